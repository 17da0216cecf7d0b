"""Framing finds the sent frames in streams cut in any way, and no others."""

import random
import struct
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import ACK, ENDPOINTS, SEGMENT, SegmentBatch
from kdissect.kafka import acks, exchanges, frame_search, frame_tables, sasl_detection
from kdissect.kafka.assembly import Assembly, PairStatus, Protocol
from kdissect.kafka.options import StreamOptions
from kdissect.kafka.walk import new_walk
from kdissect.protocol.model import REQUEST
from kdissect.tcp.byte_ranges import find, peek
from tests.builders.assembling import assemble
from tests.builders.frames import framed, produce, request, response
from tests.builders.pieces import MadePieces, cuts, lost
from tests.builders.segments import in_memory
from tests.builders.talks import BROKER, CLIENT, Playbook
from tests.cases import cases
from tests.kafka.conversations import NAMED, Conversation, check_accounts, conversations, frames_of
from tests.steps import assert_linear

PIECES = st.lists(st.sampled_from((1, 3, 7, 20, 60, 60, 1400)), min_size=1, max_size=6)
PACKETS = st.lists(st.sampled_from((20, 60, 60, 120, 1400)), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**32)
LATE = 2  # whole frames that a search behind a gap may pass over before it is sure


@given(conversations(), PIECES, st.sampled_from((1, exchanges.FRAMES_AT_ONCE)))
def test_segments_of_any_size_give_the_frames_that_were_sent(
    talk: Conversation, sizes: list[int], at_once: int
) -> None:
    """Whatever the bodies look like, and however many frames or extents a walk has room for."""
    with (
        mock.patch.object(exchanges, "FRAMES_AT_ONCE", at_once),
        mock.patch.object(frame_tables, "EXTENTS_AT_ONCE", at_once),
    ):
        found = talk.captured(talk.segments(sizes), has_syn=True).run()
    assert sorted(frames_of(found)) == sorted(talk.frames)
    answered = {frame[3:] for frame in talk.frames if frame.side == BROKER}
    for row in found.exchanges[["correlation_id", "api_key", "api_version", "status"]].tolist():
        is_answered = row[:3] in answered
        wanted = PairStatus.PAIRED if is_answered else PairStatus.NO_RESPONSE_EXPECTED
        assert row[3] == wanted
    assert not len(found.anomalies)


@given(conversations(), PACKETS, SEEDS)
def test_late_and_repeated_segments_change_nothing(
    talk: Conversation, sizes: list[int], seed: int
) -> None:
    """Retransmitted and shuffled segments give the same frames."""
    choose = random.Random(seed)
    segments = talk.segments(sizes)
    for _ in range(3):
        at = choose.randrange(len(segments))
        segments.insert(at + choose.randint(1, 4), segments[at])
    book = talk.captured(segments, has_syn=True).shuffled(seed, 3)
    assert sorted(frames_of(book.run())) == sorted(talk.frames)


def captured(talk: Conversation, segments: list[tuple[int, int, int]], has_syn: bool) -> Assembly:
    """Without its SYN, a stream's positions count from the first byte that was captured."""
    found = talk.captured(segments, has_syn).run()
    if not has_syn:
        for side, name in ((CLIENT, "request"), (BROKER, "response")):
            first = min((begin for of, begin, _ in segments if of == side), default=0)
            found.exchanges[name]["pos"] += first
    return found


def check_damaged(talk: Conversation, found: Assembly) -> set[tuple[int, ...]]:
    """Check that each frame was sent; returns the frames without the API of requests."""
    said = {frame[:4] for frame in talk.frames}
    frames = {frame[:4] for frame in frames_of(found)}
    assert frames <= said
    assert {frame for frame in frames_of(found) if frame.side == CLIENT} <= set(talk.frames)
    (connection,) = found.connections
    if connection["protocol"] == Protocol.KAFKA:
        assert connection["client_side"] == CLIENT
    check_accounts(found)
    return frames


@given(conversations(), PIECES, SEEDS)
def test_a_gap_inside_of_frames_costs_only_these(
    talk: Conversation, sizes: list[int], seed: int
) -> None:
    """Sizes lead over it: all other frames are whole."""
    choose = random.Random(seed)
    heads = {(frame.side, frame.pos + at) for frame in talk.frames for at in range(14)}
    segments = [
        (side, begin, end)
        for side, begin, end in talk.segments(sizes)
        if choose.random() < 0.5 or any((side, at) in heads for at in range(begin, end))
    ]
    assert check_damaged(talk, captured(talk, segments, has_syn=True)) >= {
        frame[:4] for frame in talk.whole(segments)
    }


def nameless_produces() -> Conversation:
    """Produce requests without client id: acks, timeout and topics read like a size and a key."""
    talk = Conversation()
    for number in range(1, 6):
        talk.say(CLIENT, produce(number, -1, 0, ""), number, (0, 0))
        if number > 1:
            talk.say(BROKER, response(number - 1, bytes(4)), number - 1, (0, 0))
    talk.say(BROKER, response(5, bytes(4)), 5, (0, 0))
    return talk


@given(conversations(least=5), PACKETS, SEEDS, st.booleans(), st.sampled_from((0.05, 0.2, 0.5)))
@example(talk=nameless_produces(), sizes=[20], seed=786011, has_syn=True, rate=0.05)
def test_gaps_anywhere_give_no_false_frame(
    talk: Conversation, sizes: list[int], seed: int, has_syn: bool, rate: float
) -> None:
    """Random losses give no frame that was not sent."""
    choose = random.Random(seed)
    segments = [one for one in talk.segments(sizes) if choose.random() >= rate]
    if segments:
        check_damaged(talk, captured(talk, segments, has_syn))


def one_request_and_small_ids() -> Conversation:
    """Five requests, of which only the last is whole after 120 bytes, and three responses."""
    talk = Conversation()
    for number, wanted, version in ((1, -1, 0), (2, -1, 0), (3, 0, 0), (4, 0, 3), (5, -1, 0)):
        talk.say(CLIENT, produce(number, wanted, version), number, (0, version))
    for number in (1, 2, 5):
        talk.say(BROKER, response(number, bytes(4)), number, (0, 0))
    return talk


@given(conversations(least=5, names=NAMED), PACKETS, SEEDS, st.booleans())
@example(talk=one_request_and_small_ids(), sizes=[120], seed=1, has_syn=False)
def test_frames_are_found_again_behind_a_gap(
    talk: Conversation, sizes: list[int], seed: int, has_syn: bool
) -> None:
    """At most LATE whole frames in a row are missed, if two whole requests show that it is
    Kafka."""
    choose = random.Random(seed)
    segments = talk.segments(sizes)
    del segments[choose.randrange(len(segments))]
    assembly, whole = captured(talk, segments, has_syn), talk.whole(segments)
    found = check_damaged(talk, assembly)
    if assembly.connections["protocol"][0] != Protocol.KAFKA:
        # One request inside a segment may be chance, and so may responses with small ids.
        assert not has_syn
        assert sum(frame.side == CLIENT and frame.api_key >= 0 for frame in whole) <= 1
        return
    for side in (CLIENT, BROKER):
        missed = 0
        for frame in talk.frames:
            if frame.side == side:
                missed = missed + 1 if frame in whole and frame[:4] not in found else 0
                assert missed <= LATE


@given(conversations(least=5), PACKETS, SEEDS, st.sampled_from((CLIENT, BROKER)), st.booleans())
def test_one_side_alone_gives_no_false_frame(
    talk: Conversation, sizes: list[int], seed: int, side: int, has_syn: bool
) -> None:
    """The same with one direction only."""
    choose = random.Random(seed)
    segments = [one for one in talk.segments(sizes) if one[0] == side and choose.random() >= 0.1]
    if segments:
        check_damaged(talk, captured(talk, segments, has_syn))


@given(st.binary(min_size=1, max_size=60), cuts, lost, st.integers(0, 64), st.integers(1, 4))
def test_numbers_are_read_across_pieces(
    data: bytes, cuts: list[int], lost: list[bool], pos: int, count: int
) -> None:
    """-1 where a byte of them is missing."""
    made = MadePieces(data, cuts, lost)
    wanted = [byte for byte in made.there[pos : pos + count] if byte is not None]
    number = int.from_bytes(wanted, "big") if len(wanted) == count else -1
    stop = len(made.spans)
    assert peek(made.pieces, find(made.pieces, 0, stop, pos), stop, pos, count) == number
    assert peek(made.pieces, 0, stop, pos, count) == number


@given(
    st.integers(0, 9), st.sampled_from((-1, 0, 1)), st.sampled_from((0, 2, 3, 8, 9, 12)), cuts,
    lost,
)  # fmt: skip
def test_acks_are_read_across_pieces(
    number: int, said: int, version: int, cuts: list[int], lost: list[bool]
) -> None:
    """At any version of Produce; -1 where they are missing, and then they may be any."""
    made = MadePieces(produce(number, said, version), cuts, lost)
    walk = new_walk(REQUEST, 5000)
    header = walk["header"]
    if frame_search.request_header(made.stream, 0, 0, walk, header) == frame_search.GOOD:
        at = made.stream, 0, 0, header
        is_whole = len(made.there) == len(made.memory.arrays[0]) and None not in made.there
        assert acks.acks_of(*at) in ((said & 0xFFFF,) if is_whole else (said & 0xFFFF, -1))
        assert acks.may_be_produce(*at)


# SASL tokens, and whether they are one: PLAIN (RFC 4616), SCRAM (RFC 5802), OAUTHBEARER (RFC 7628),
# GSSAPI (RFC 2743 for the first, RFC 4121 for wrapped ones).
CLIENT_TOKENS = {
    b"\0user\0secret": True, b"as\0user\0secret": True, b"\0\0secret": False,
    b"\0user\0": False, b"\0u\0s\0": False, b"\0us\x01\0s": False, b"n,,n=user,r=abc": True,
    b"y,a=x,n=user,r=abc": True, b"c=biws,r=abc,p=xyz": True,
    b"n,,\x01auth=Bearer x\x01\x01": True, b"\x01": True, b"n,,\x02": False,
    b"\x60\x08\x06\x06abcdef": True, b"\x60\x07\x06\x06abcdef": False,
    b"\x60\x81\x06\x06\x04abcd": True, b"\x60\x81\x06\x06\x04abcde": False,
    b"\x60\x82\0\x04abcd": True, b"\5\4\0\xffxyz": True, b"\5\4\x09\xffxyz": False,
    b"": False, b"\0\0\0\1\0\0": False,
}  # fmt: skip
BROKER_TOKENS = {
    b"": False, b"r=abc,s=salt,i=4096": True, b"v=signature": True, b"e=other-error": True,
    b'{"status":"x"}': True, b"v=\0\0\0": False, b"\x60\x08\x06\x06abcdef": True,
    b"\5\4\1\xffxyz": True, b"\0\0\0\1\0\0": False, b"x=abc": False,
}  # fmt: skip
MECHANISMS = {  # a correlation id, then what SaslHandshake answers
    b"\0\0\0\1\0\0\0\0\0\1\0\5PLAIN": True,
    b"\0\0\0\1\0\x21\0\0\0\2\0\5PLAIN\0\6GSSAPI": True,
    b"\0\0\0\1\0\0\0\0\0\1\0\5plain": False,
    b"\0\0\0\1\0\0\0\0\0\0": False,
    b"\0\0\0\1\0\0\0\0\0\1\0\5PLAIN\0": False,
    b"\0\0\0\1\0\0\0\0\0\2\0\5PLAIN": False,
}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("is_client_token", CLIENT_TOKENS),
        ("is_broker_token", BROKER_TOKENS),
        ("is_mechanisms", MECHANISMS),
    ],
)
@given(cuts=cuts, lost=lost)
def test_sasl_tokens_are_recognised_in_any_segments(
    name: str, tokens: dict[bytes, bool], cuts: list[int], lost: list[bool]
) -> None:
    """SASL tokens are recognised in any segments, and missing bytes make no token."""
    for told, is_token in tokens.items():
        for losses in ([False], lost):
            made = MadePieces(framed(told), cuts, losses)
            found = bool(getattr(sasl_detection, name)(made.stream, 0, 0, len(told)))
            is_whole = not any(losses[: len(made.spans) + 1])
            assert found == is_token if is_whole else found <= is_token, told


def one_stream(
    client: bytes, broker: bytes, size: int, has_syn: bool
) -> tuple[SegmentBatch, Sources]:
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
    return SegmentBatch(endpoints, rows), in_memory(client + broker)


def hostile(size: int) -> dict[str, bytes]:
    """Zeros, headers everywhere, sizes that point anywhere."""
    header = struct.pack(">ihhih", 1000, 3, 1, 7, 6) + b"orders"
    return {
        "zeros": bytes(size),
        "sizes": b"\0\0\0\x10" * (size // 4),
        "headers": header * (size // len(header)),
        "large": struct.pack(">ihhi", 60_000, 0, 1, 0) * (size // 12),
        "responses": struct.pack(">ii", 300_000, 5) * (size // 8),
        "random": random.Random(1).randbytes(size),
    }


def assemble_hostile(name: str, size: int) -> None:
    pattern = hostile(size)[name]
    for has_syn in (False, True):
        for client, broker in ((pattern, b""), (request(5) * 3, pattern), (pattern, pattern)):
            batch, memory = one_stream(client, broker, 1400, has_syn)
            check_accounts(assemble(batch, memory, StreamOptions(ports=(9092,))))


@pytest.mark.parametrize("name", hostile(0))
def test_hostile_bytes_are_accounted_for(name: str) -> None:
    """Framed and unframed bytes add up to all bytes, in each direction."""
    assemble_hostile(name, 400_000)


@cases("name", ["headers", "large"], heavy=["zeros", "sizes", "responses", "random"])
def test_hostile_bytes_take_linear_time(name: str) -> None:
    """Twice the bytes take at most twice the steps."""
    assert_linear(assemble_hostile, 1000, name)


def test_flipped_bytes_and_cuts_crash_nothing() -> None:
    """A conversation with random bytes changed, of any protocol hint: accounts still add up."""
    book = Playbook().syn()
    for number in range(12):
        book = book >> request(number) >> produce(100 + number, 0) << response(number)
    batch, memory = book.batch()
    clean = memory.arrays[0].tobytes()
    for seed in range(150):
        source = random.Random(seed)
        data = bytearray(clean)
        for _ in range(source.randrange(1, 30)):
            data[source.randrange(len(data))] = source.choice((0, 1, 255, source.randrange(256)))
        keep = np.array([source.random() < 0.9 for _ in range(len(batch.segments))])
        part = SegmentBatch(batch.endpoints, batch.segments[keep])
        options = StreamOptions(ports=(9092,) * (seed % 2))
        check_accounts(assemble(part, in_memory(bytes(data)), options))
