"""The framing kernels against their plain definition, and against hostile bytes."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kdissect.capture.segments import ACK, ENDPOINTS, SEGMENT, SegmentBatch
from kdissect.kafka import (
    acks,
    acks_reference,
    evidence_reference,
    frame_search,
    frame_tables,
    framing,
    sasl_detection,
    sasl_evidence_reference,
)
from kdissect.kafka import framing_reference as plain
from kdissect.kafka.assemble import assemble, known_apis
from kdissect.kafka.assembly import Protocol
from kdissect.kafka.frame_search import API_VERSIONS, Asked, Kafka
from kdissect.kafka.frame_tables import FRAME_WIDTH
from kdissect.kafka.options import StreamOptions
from kdissect.kafka.pairing_reference import Request
from kdissect.tcp import columns, pieces_reference
from kdissect.tcp.byte_ranges import Pieces
from kdissect.tcp.columns import SIDE_WIDTH
from tests.kafka.plain_reader import Memory
from tests.kafka.playbook import Playbook, framed, produce, request, response, token

LIMIT = 5000
KNOWN = known_apis()
PLAIN_KNOWN = {divmod(int(place), API_VERSIONS) for place in np.flatnonzero(KNOWN)}


class Laid:
    """One stream as pieces in memory (as the request stream of a connection) and as plain bytes."""

    def __init__(self, data: bytes, cuts: list[int], lost: list[bool], has_origin: int) -> None:
        edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
        self.memory = Memory(data)
        kept: list[int | None] = list(data)
        times = [0] * len(data)
        rows = []
        for number, (begin, end) in enumerate(pairwise(edges)):
            if lost[number % len(lost)]:
                kept[begin:end] = [None] * (end - begin)
                continue
            times[begin:end] = [begin * 1000] * (end - begin)
            rows.append((begin, end - begin))
        base = int(self.memory.bases[0])
        self.pieces = Pieces(
            np.array([begin for begin, _ in rows], np.int64),
            np.array([length for _, length in rows], np.int64),
            np.array([base + begin for begin, _ in rows], np.uint64),
            np.array([begin for begin, _ in rows], np.int64),
            np.arange(len(rows)),
        )
        self.times = self.pieces.pos * 1000
        self.source = np.zeros(len(rows), np.int32)
        self.sides = np.zeros(2 * SIDE_WIDTH, np.int64)
        self.sides[columns.PIECE_STOP] = len(rows)
        self.sides[columns.END] = len(data)
        self.has_origin = np.array([has_origin, has_origin], np.int64)
        self.plain = pieces_reference.PlainStream(
            kept, {begin for begin, _ in rows}, times, has_origin != 0,
            has_origin & framing.RESUMED != 0, has_origin & framing.IN_TOKENS != 0,
            has_origin & framing.HAS_ASKED != 0,
            was_young=has_origin & framing.YOUNG != 0,
            last_id=(has_origin >> framing.LAST_ID) - 1 if has_origin >> framing.LAST_ID else None,
        )  # fmt: skip


def rows_of(found: Any) -> list[tuple[int, ...]]:
    frames, _, faults, used = found
    table = frames[: used[0] * FRAME_WIDTH].reshape(-1, FRAME_WIDTH)
    unframed = faults[: used[2] * frame_tables.FAULT_WIDTH].reshape(-1, frame_tables.FAULT_WIDTH)
    assert (unframed[:, frame_tables.FAULT_BYTES] > 0).all()
    picked = (
        frame_tables.POS, frame_tables.FRAME_SIZE, frame_tables.API_KEY, frame_tables.VERSION,
        frame_tables.ID, frame_tables.KIND,
    )  # fmt: skip
    return [tuple(int(row[column]) for column in picked) for row in table]


KAFKA = Kafka(KNOWN, np.array([LIMIT], np.int64))
ONE = np.array([Protocol.KAFKA], np.uint8)


MECHANISMS = (b"\0\5PLAIN", b"\0\x0dSCRAM-SHA-256", b"\0\5plain", b"\0\5PLAIN!", b"\0\6PLAIN")
CLIENT_TOKENS = (
    b"\0user\0secret", b"as\0user\0secret", b"\0\0secret", b"\0user\0", b"\0u\0s\0", b"\0us\x01\0s",
    b"n,,n=user,r=abc", b"y,a=x,n=user,r=abc", b"c=biws,r=abc,p=xyz",
    b"n,,\x01auth=Bearer x\x01\x01",
    b"\x01", b"n,,\x02", b"\x60\x08\x06\x06abcdef", b"\x60\x07\x06\x06abcdef", b"\5\4\0\xffxyz",
    b"\x60\x81\x06\x06\x04abcd", b"\x60\x82\0\x04abcd", b"\5\4\x09\xffxyz", b"",
)  # fmt: skip
BROKER_TOKENS = (
    b"", b"", b"r=abc,s=salt,i=4096", b"v=signature", b"e=other-error", b'{"status":"x"}',
    b"v=\0\0\0",
    b"\x60\x08\x06\x06abcdef", b"\5\4\1\xffxyz", b"\0\0\0\1\0\0", b"x=abc",
)  # fmt: skip
RANGES = b"\0\x12\0\0\0\4", b"\0\0\0\3\0\x0d", b"\0\1\0\4\0\x12", b"\0\1\0\4\0\3"
TAGGED = b"".join(one + b"\0" for one in RANGES[:3])
FEATURE = b"\2\0\4\2\2a\0\1\x80\1" + bytes(128)
TOLD = (
    b"\0\0\0\0\0\1\0\5PLAIN", b"\0\x21\0\0\0\2\0\5PLAIN\0\6GSSAPI", b"\0\0\0\0\0\1\0\5plain",
    b"\0\0\0\0\0\0", b"\0\0\0\0\0\1\0\5PLAIN\0", b"\0\0\0\0\0\1" + RANGES[0],
    b"\0\x23\0\0\0\1" + RANGES[0], b"\0\x23\0\0\0\1" + RANGES[0] + bytes(4),
    b"\0\0\0\0\0\3" + b"".join(RANGES[:3]), b"\0\0\0\0\0\3" + b"".join(RANGES[1:]) + bytes(4),
    b"\0\0\0\0\0\3" + b"".join(RANGES[:3]) + bytes(4), b"\0\0\2" + RANGES[0] + bytes(6),
    b"\0\0\4" + TAGGED + bytes(5), b"\0\0\4" + TAGGED + bytes(6), b"\0\0\4" + TAGGED + bytes(4),
    b"\0\0\4" + TAGGED + bytes(4) + FEATURE, b"\0\0\4" + TAGGED + bytes(4) + FEATURE[:-1],
    b"\0\0\5" + TAGGED + RANGES[3] + bytes(6), b"\0\0\4" + TAGGED[:-1] + b"\1" + bytes(5),
)  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Frames that requests are made of, and what only looks like them."""
    number = draw(st.integers(0, 3)) + 250
    versions = st.sampled_from((1, 1, 2, 3))
    data = b""
    for _ in range(draw(st.integers(1, 8))):
        number += draw(st.sampled_from((1, 1, 1, 1, 2, 0, 3000)))
        kind = draw(st.integers(0, 13))
        name = draw(st.sampled_from(("orders", "orders", "orders", "", None, "x\x01")))
        size = draw(st.sampled_from((0, 4, 30)))
        if kind < 5:
            data += request(
                number, draw(st.sampled_from((3, 1, 18))), draw(versions), name, bytes(size)
            )
        elif kind < 7:
            version = draw(st.sampled_from((0, 3, 8, 9, 12)))
            data += produce(number, draw(st.integers(-1, 1)), version)
        elif kind == 7:
            data += request(number, 17, 0, body=b"\0\5PLAIN") + token()
        elif kind == 8:
            data += request(number, draw(st.sampled_from((7, 700))), draw(st.integers(0, 1)), name)
        elif kind == 9:
            data += struct.pack(">ihhii", 12, 7, 0, number, 3)
        elif kind == 10:
            data += draw(st.binary(min_size=1, max_size=20))
        elif kind == 11:
            data += framed(draw(st.binary(max_size=14)))
        elif kind == 12:
            data += request(number, 17, 0, name, draw(st.sampled_from(MECHANISMS)))
        else:
            data += framed(draw(st.sampled_from(CLIENT_TOKENS)))
    return data


lost = st.lists(st.sampled_from((False, False, False, True)), min_size=1, max_size=9)
cuts = st.lists(st.integers(0, 400), max_size=9)
RESUMED = framing.ORIGIN | framing.RESUMED
origins = st.sampled_from(
    (
        0, framing.ORIGIN, RESUMED, RESUMED | framing.IN_TOKENS, RESUMED | framing.HAS_ASKED,
        RESUMED | framing.YOUNG, RESUMED | framing.YOUNG | framing.IN_TOKENS,
        RESUMED | framing.HAS_ASKED | 7 << framing.LAST_ID,
        framing.ORIGIN | 2**32 << framing.LAST_ID,
    )
)  # fmt: skip


def edges(data: bytes) -> list[int]:
    """Where frames end, as far as their sizes tell."""
    found = []
    pos = 0
    while pos + 4 <= len(data):
        pos += 4 + struct.unpack_from(">I", data, pos)[0]
        found.append(pos)
    return found


def in_turns(walk: Callable[[Any, int], Any], connection_count: int, most: int) -> Any:
    """What a walk finds that stops and goes on every `most` frames, as if it had not stopped."""
    state = np.zeros(framing.STATE_WIDTH, np.int64)
    tables: list[list[Any]] = [[], [], []]
    total = np.zeros(3, np.int64)
    while state[framing.WALK_CONNECTION] < connection_count:
        *found, used = walk(state, most)
        assert used[frame_tables.FRAMES] <= most
        widths = (frame_tables.FRAME_WIDTH, frame_tables.EXTENT_WIDTH, frame_tables.FAULT_WIDTH)
        for table, part, count, width in zip(tables, found, used, widths, strict=True):
            table.append(part[: count * width])
        frame_tables.renumber(tables[0][-1], tables[2][-1], int(total[frame_tables.EXTENTS]))
        total += used
    return (*(np.concatenate(table) for table in tables), total)


def same_tables(one: Any, two: Any) -> None:
    assert one[3].tolist() == two[3].tolist()
    widths = (frame_tables.FRAME_WIDTH, frame_tables.EXTENT_WIDTH, frame_tables.FAULT_WIDTH)
    for first, second, count, width in zip(one, two, one[3], widths, strict=False):
        assert first[: count * width].tolist() == second[: count * width].tolist()


@settings(max_examples=400, deadline=None)
@given(requests(), cuts, lost, origins, st.booleans())
def test_request_kernel_and_definition_agree(
    data: bytes, cuts: list[int], lost: list[bool], has_origin: int, by_frame: bool
) -> None:
    laid = Laid(data, edges(data) + cuts[:2] if by_frame else cuts, lost, has_origin)
    found = framing.frame_requests(
        laid.pieces, laid.source, laid.sides, np.zeros(1, np.uint8), ONE, laid.has_origin, KAFKA
    )
    definition = plain.frame_requests(laid.plain, evidence_reference.Kafka(PLAIN_KNOWN, LIMIT))
    assert rows_of(found) == [tuple(frame) for frame in definition]

    def walk(state: Any, most: int) -> Any:
        return framing.some_requests(
            laid.pieces, laid.source, laid.sides, np.zeros(1, np.uint8), ONE, laid.has_origin,
            KAFKA, state, most,
        )  # fmt: skip

    same_tables(found, in_turns(walk, 1, 1))


produces = st.builds(
    lambda number, acks, version, lead, cut: lead + produce(number, acks, version)[:-cut or None],
    st.integers(0, 9), st.sampled_from((-1, 0, 1, 2, 200)), st.sampled_from((0, 2, 3, 8, 9, 12)),
    st.sampled_from((b"", bytes(4))), st.integers(0, 3),
)  # fmt: skip
bare = st.builds(
    lambda version, body: framed(bytes((0, 0, 0, version)) + bytes(6) + body),
    st.sampled_from((0, 2, 3, 8, 9, 12)), st.binary(max_size=20),
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.one_of(produces, bare), cuts, lost)
def test_acks_kernel_and_definition_agree(data: bytes, cuts: list[int], lost: list[bool]) -> None:
    """Of requests of Produce, also cut ones, and ones that are none behind the header."""
    laid = Laid(data, cuts, lost, framing.ORIGIN)
    stream = framing.stream_of(laid.pieces, laid.sides, 0)
    header = np.zeros(frame_search.HEADER_WIDTH, np.int64)
    grade = frame_search.request_header(laid.pieces, 0, stream.stop, 0, KAFKA, header)
    known = evidence_reference.Kafka(PLAIN_KNOWN, LIMIT)
    definition = evidence_reference.request_header(laid.plain, 0, known)
    assert grade == definition.grade
    if grade == frame_search.GOOD and definition.key == 0:
        at = laid.pieces, 0, stream.stop, 0, header
        found = acks_reference.acks(laid.plain, 0, definition)
        assert acks.acks_of(*at) == (-1 if found is None else found)
        may_be = acks_reference.may_be_produce(laid.plain, 0, definition)
        assert bool(acks.may_be_produce(*at)) == may_be


@settings(max_examples=300, deadline=None)
@given(st.sampled_from((*CLIENT_TOKENS, *BROKER_TOKENS, *TOLD)), cuts, lost)
def test_token_kernels_and_definitions_agree(
    data: bytes, cuts: list[int], lost: list[bool]
) -> None:
    laid = Laid(framed(data), cuts, lost, framing.ORIGIN)
    stream = framing.stream_of(laid.pieces, laid.sides, 0)
    for name in ("is_client_token", "is_broker_token", "is_mechanisms"):
        found = getattr(sasl_detection, name)(stream, 0, 0, len(data))
        assert bool(found) == getattr(sasl_evidence_reference, name)(laid.plain, 0, len(data)), name


@st.composite
def conversations(draw: st.DrawFn) -> tuple[bytes, list[Request]]:
    """Responses and what was asked, not all of either."""
    number = draw(st.sampled_from((0, 250, 2**31 - 8, 2**32 - 3)))
    data, asked = b"", []
    for _ in range(draw(st.integers(1, 8))):
        number = (number + draw(st.sampled_from((0, 1, 1, 1, 2, -2, 2**31 + 3)))) % 2**32
        kind = draw(st.sampled_from((0, 0, 0, 0, 0, 1, 2)))
        if draw(st.integers(0, 5)):
            when = len(data) * 1000 + draw(st.sampled_from((0, 0, 20_000_000)))
            asked.append(Request(number if kind != 1 else 2**64 - 1, when, kind))
        what = draw(st.integers(0, 13))
        signed = number - 2**32 if number >= 2**31 else number
        if kind == 1:
            anything = st.one_of(st.binary(max_size=9), st.sampled_from(BROKER_TOKENS))
            data += framed(draw(anything))
        elif what >= 12:
            data += response(signed, draw(st.sampled_from(TOLD)))
        elif kind == 0 and what < 9:
            magic = draw(st.integers(0, 2))
            batch = struct.pack(">qiib", 0, draw(st.integers(9, 30)), signed, magic)
            body = draw(st.sampled_from((b"", b"\0\0", bytes(40), b"\0\0" + batch + bytes(21))))
            data += response(signed, body)
        elif what == 10:
            data += draw(st.binary(min_size=1, max_size=20))
    asked = [one._replace(correlation_id=-1) if one.kind == 1 else one for one in asked]
    return data, sorted(asked, key=lambda one: one.time_ns)


@settings(max_examples=400, deadline=None)
@given(conversations(), cuts, lost, origins, st.booleans())
def test_response_kernel_and_definition_agree(
    told: tuple[bytes, list[Request]],
    cuts: list[int],
    lost: list[bool],
    has_origin: int,
    by_frame: bool,
) -> None:
    data, requests = told
    laid = Laid(data, edges(data) + cuts[:2] if by_frame else cuts, lost, has_origin)
    asked = Asked(
        np.array([one.correlation_id for one in requests], np.int64),
        np.array([one.time_ns for one in requests], np.int64),
        np.array([one.kind for one in requests], np.int64),
    )
    found = framing.frame_responses(
        laid.pieces, laid.source, laid.times, laid.sides, np.ones(1, np.uint8), ONE,
        laid.has_origin, KAFKA, asked, np.array([0, len(requests)], np.int64),
    )  # fmt: skip
    definition = plain.frame_responses(laid.plain, LIMIT, requests)
    assert rows_of(found) == [tuple(frame) for frame in definition]

    def walk(state: Any, most: int) -> Any:
        return framing.some_responses(
            laid.pieces, laid.source, laid.times, laid.sides, np.ones(1, np.uint8), ONE,
            laid.has_origin, KAFKA, asked, np.array([0, len(requests)], np.int64), state, most,
        )  # fmt: skip

    same_tables(found, in_turns(walk, 1, 1))


def one_stream(
    client: bytes, broker: bytes, size: int, has_syn: bool
) -> tuple[SegmentBatch, Memory]:
    """Segments of `size` bytes of both sides, alternating."""
    count = max(len(client), len(broker)) // size + 1
    rows = np.zeros(2 * count, SEGMENT)
    for side, data in ((0, client), (1, broker)):
        part = rows[side::2]
        at = np.arange(count) * size
        part["side"] = side
        part["seq"] = 1 + at
        part["pos"] = np.minimum(at, len(data)) + (len(client) if side else 0)
        part["captured"] = part["length"] = np.clip(len(data) - at, 0, size)
    rows["flags"] = ACK
    rows["time_ns"] = np.arange(2 * count) * 1000
    rows["packet"] = rows["ip_id"] = np.arange(2 * count) + 1
    if has_syn:
        syn = np.zeros(2, SEGMENT)
        syn["side"], syn["flags"], syn["ack"] = (0, 1), (2, 18), (0, 1)
        rows = np.concatenate([syn, rows])
        rows["packet"] = np.arange(len(rows)) + 1
    endpoints = np.zeros(1, ENDPOINTS)
    endpoints["port_a"], endpoints["port_b"] = 50000, 9092
    return SegmentBatch(endpoints, rows), Memory(client + broker)


def test_hostile_bytes_take_linear_time() -> None:
    """Zeros, headers everywhere, sizes that point anywhere: 400 kB each."""
    size = 400_000
    header = struct.pack(">ihhih", 1000, 3, 1, 7, 6) + b"orders"
    patterns = (
        bytes(size),
        b"\0\0\0\x10" * (size // 4),
        header * (size // len(header)),
        struct.pack(">ihhi", 60_000, 0, 1, 0) * (size // 12),
        struct.pack(">ii", 300_000, 5) * (size // 8),
        random.Random(1).randbytes(size),
    )
    assemble(*one_stream(header, b"", 100, True), StreamOptions(ports=(9092,)))
    for pattern in patterns:
        for has_syn in (False, True):
            for client, broker in ((pattern, b""), (request(5) * 3, pattern), (pattern, pattern)):
                batch, memory = one_stream(client, broker, 1400, has_syn)
                began = time.perf_counter()
                found = assemble(batch, memory, StreamOptions(ports=(9092,)))
                assert time.perf_counter() - began < 5
                counts = found.connections["direction"]
                framed_ = counts["framed_byte_count"] + counts["unframed_byte_count"]
                assert (framed_ == counts["byte_count"]).all()


def test_flipped_bytes_and_cuts_crash_nothing() -> None:
    """A conversation with random bytes changed, of any protocol hint: accounts still add up."""
    book = Playbook().syn()
    for number in range(12):
        book = book >> request(number) >> produce(100 + number, 0) << response(number)
    batch, memory = book.batch()
    clean = memory.arrays[0].tobytes()
    for seed in range(300):
        source = random.Random(seed)
        data = bytearray(clean)
        for _ in range(source.randrange(1, 30)):
            data[source.randrange(len(data))] = source.choice((0, 1, 255, source.randrange(256)))
        keep = np.array([source.random() < 0.9 for _ in range(len(batch.segments))])
        part = SegmentBatch(batch.endpoints, batch.segments[keep])
        found = assemble(part, Memory(bytes(data)), StreamOptions(ports=(9092,) * (seed % 2)))
        for counts in found.connections["direction"].reshape(-1):
            both = counts["framed_byte_count"] + counts["unframed_byte_count"]
            assert counts["byte_count"] == both
            assert counts["unframed_byte_count"] >= 0
