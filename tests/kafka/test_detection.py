"""Recognition's kernel against its plain definition, over what the protocols' first bytes are."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kdissect.kafka import recognise_reference as plain
from kdissect.kafka.assembly import Protocol
from kdissect.kafka.detection import recognise
from kdissect.kafka.evidence_reference import Kafka as PlainKafka
from kdissect.kafka.frame_search import Asked
from kdissect.tcp.byte_ranges import Pieces
from kdissect.tcp.columns import (
    CLIENT_SIDE,
    CONNECTION_WIDTH,
    END,
    PIECE_START,
    PIECE_STOP,
    SIDE_WIDTH,
)
from tests.kafka.playbook import framed, produce, request, response, token
from tests.kafka.test_framing import KAFKA, LIMIT, PLAIN_KNOWN, Laid
from tests.kafka.test_other_traffic import PROTOCOLS

NOBODY = Asked(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))


def by_kernel(sides: tuple[Laid, Laid], told: int, guessed: int, hinted: bool) -> tuple[int, int]:
    """(protocol, client side) of a connection of two streams."""
    one, two = sides
    shift = len(one.times)
    pieces = Pieces(
        *(np.concatenate([getattr(one.pieces, name), getattr(two.pieces, name)])
          for name in ("pos", "length", "address", "file_pos")),
        np.concatenate([one.pieces.segment, two.pieces.segment + shift]),
    )  # fmt: skip
    table = np.zeros(2 * SIDE_WIDTH, np.int64)
    table[[PIECE_STOP, SIDE_WIDTH + PIECE_START]] = shift
    table[SIDE_WIDTH + PIECE_STOP] = shift + len(two.times)
    table[[END, SIDE_WIDTH + END]] = one.sides[END], two.sides[END]
    connection = np.zeros(CONNECTION_WIDTH, np.int64)
    connection[CLIENT_SIDE] = told
    client, protocol = np.array([guessed], np.uint8), np.zeros(1, np.uint8)
    recognise(
        pieces, np.concatenate([one.times, two.times]), table, connection,
        np.array([one.has_origin[0], two.has_origin[0]]), np.array([hinted], np.uint8), KAFKA,
        NOBODY, client, protocol,
    )  # fmt: skip
    return int(protocol[0]), int(client[0])


def zookeeper_reply(xid: int, zxid: int) -> bytes:
    return framed(struct.pack(">iqi", xid, zxid, 0) + bytes(xid % 3 * 4))


API_VERSIONS_ANSWERS = (
    response(1, struct.pack(">hi", 0, 2) + bytes(12)),
    response(1, struct.pack(">hi", 35, 1) + bytes(6) + bytes(4)),
    response(1, b"\0\0\3" + bytes(14) + bytes(5)),
)
RECORDS = (
    b"\x16\3\1\0\x05\1\0\0\1\0", b"\x16\3\3\0\4\x0b\0\0\0", b"\x17\3\3\0\3abc",
    b"\x15\3\3\0\2\2\x28", b"\x17\3\3\0\0",
)  # fmt: skip
TEXTS = (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
KEEPER = (
    framed(struct.pack(">iqiqi", 0, 0, 9, 0, 16) + bytes(17)),
    framed(struct.pack(">iiqi", 0, 9, 1, 16) + bytes(16)),
    framed(struct.pack(">ii", -2, 11)),
    framed(struct.pack(">iii", 1, 4, 3) + b"/ab\0"),
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """What one side may say, of one protocol or of several in a row."""
    number = draw(st.sampled_from((1, 1, 250, 2**31 - 20)))
    zxid = draw(st.sampled_from((5, 1 << 32, 7 << 32)))
    data = b""
    kinds = st.sampled_from(("request", "response", "token", "tls", "text", "keeper", "noise"))
    main = draw(kinds)
    for _ in range(draw(st.integers(0, 7))):
        number += draw(st.sampled_from((1, 1, 1, 2)))
        kind = main if draw(st.integers(0, 4)) else draw(kinds)
        if kind == "request":
            name = draw(st.sampled_from(("orders", "orders", "", None, "x\x01")))
            key = draw(st.sampled_from((3, 1, 18, 17, 700)))
            data += draw(st.sampled_from((request(number, key, 1, name), produce(number, 0))))
        elif kind == "response":
            body = draw(st.sampled_from((b"", bytes(6), bytes(40), b"\x02ab")))
            answers = (*API_VERSIONS_ANSWERS, response(number, body), response(number, body))
            data += draw(st.sampled_from(answers))
        elif kind == "token":
            data += token(draw(st.binary(max_size=14)))
        elif kind == "keeper":
            zxid += draw(st.integers(-1, 3)) if draw(st.booleans()) else 0
            xid = draw(st.sampled_from((number, number, number, -2, -1)))
            data += draw(st.sampled_from((*KEEPER, *[zookeeper_reply(xid, zxid)] * 6)))
        elif kind == "noise":
            data += draw(st.binary(min_size=1, max_size=20))
        else:
            data += draw(st.sampled_from(RECORDS if kind == "tls" else TEXTS))
    return data[: draw(st.sampled_from((len(data),) * 4 + (len(data) // 2, len(data) - 3)))]


def check(
    told_bytes: tuple[bytes, bytes], cuts: Any, lost: Any, origins: tuple[bool, bool], told: int,
    guessed: int, hinted: bool,
) -> Protocol:  # fmt: skip
    sides = tuple(
        Laid(data, cuts[side], lost[side], origins[side]) for side, data in enumerate(told_bytes)
    )
    assert len(sides) == 2
    expected = plain.recognise(
        [side.plain for side in sides], None if told < 0 else told, guessed, hinted,
        PlainKafka(PLAIN_KNOWN, LIMIT),
    )  # fmt: skip
    assert by_kernel(sides, told, guessed, hinted) == expected
    return expected[0]


two_lists = st.lists(st.integers(0, 400), max_size=6)
losses = st.lists(st.sampled_from((False, False, False, False, True)), min_size=1, max_size=7)


@settings(max_examples=600, deadline=None)
@given(
    st.tuples(streams(), streams()), st.tuples(two_lists, two_lists), st.tuples(losses, losses),
    st.tuples(st.booleans(), st.booleans()), st.sampled_from((-1, -1, 0, 1)), st.integers(0, 1),
    st.booleans(),
)  # fmt: skip
def test_kernel_and_definition_agree(
    told_bytes: tuple[bytes, bytes], cuts: Any, lost: Any, origins: tuple[bool, bool], told: int,
    guessed: int, hinted: bool,
) -> None:  # fmt: skip
    check(told_bytes, cuts, lost, origins, told, guessed, hinted)


def test_they_agree_on_other_traffic_from_any_place() -> None:
    seen = set()
    for talk in PROTOCOLS:
        for seed in range(6):
            choose = random.Random(f"{talk.__name__} {seed}")
            said = [b"", b""]
            for side, data in talk(choose):
                said[side] += data
            skip = [choose.choice((0, 0, choose.randrange(len(one) + 1))) for one in said]
            both = said[0][skip[0] :][:1500], said[1][skip[1] :][:1500]
            places = [[choose.randrange(1500) for _ in range(5)] for _ in range(2)]
            lost = [[choose.random() < 0.1 for _ in range(7)] for _ in range(2)]
            seen.add(
                check(
                    both, places, lost, (not skip[0], not skip[1]), choose.choice((-1, 0)),
                    choose.randrange(2), False,
                )
            )  # fmt: skip
    assert {Protocol.TLS, Protocol.HTTP, Protocol.HTTP2, Protocol.ZOOKEEPER} <= seen
