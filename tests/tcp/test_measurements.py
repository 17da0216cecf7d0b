"""Facts of TCP connections: against an oracle, on real captures and on made ones, cut anywhere."""

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import kdissect
from kdissect.capture.segments import ACK, FIN, RST, SYN
from kdissect.kafka.assembly import CONNECTION
from kdissect.tables.connections import tcp_table
from kdissect.tcp.measurements import TcpFacts, no_facts
from kdissect.tcp.reassembly import reassemble
from tests.builders.segments import batch_of
from tests.conftest import CAPTURES
from tests.material import CAPTURES as SHARED
from tests.material import needed
from tests.oracles import tcp_facts as oracle
from tests.oracles.link_layers import scan_capture
from tests.oracles.segments import Segment

WINDOW_NS = 10_000_000
MS = 1_000_000
SIDES = ("request", "response")
WITH_ERROR = ("rtt_ms_p50", "rtt_ms_p99")
OPTIONS = bytes.fromhex("020405b4 0402 080a0000000100000000 01 030307")


def expected(segments: list[Segment], client: int = 0) -> dict[str, Any]:
    """The oracle's columns of a connection."""
    row = oracle.connection_facts(segments, client)
    for direction, name in enumerate(SIDES):
        side = client ^ direction
        facts = oracle.side_facts(segments, side)
        facts["window_max"] = oracle.window_max(segments, side)
        row |= {f"{name}_{column}": value for column, value in facts.items()}
    return row


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if name.endswith("_time") and found[name] is not None:
            value = value // 1000
        if name.endswith(WITH_ERROR) and value is not None:
            assert found[name] == pytest.approx(value, rel=1 / 32, abs=1e-6), name
        else:
            assert found[name] == (pytest.approx(value) if isinstance(value, float) else value), (
                name
            )


def columns(facts: TcpFacts, last_time_ns: int) -> dict[str, Any]:
    """The product's columns of one connection whose client is side 0; times in us."""
    connections = np.zeros(1, CONNECTION)
    connections["last_time_ns"] = last_time_ns
    found = {}
    table = tcp_table(connections, facts)
    for name, values in zip(table.column_names, table.columns, strict=True):
        is_time = name.endswith("_time")
        found[name] = (values.cast("int64") if is_time else values)[0].as_py()
    return found


def facts_of(segments: list[Segment], first: int = 0, earlier: TcpFacts | None = None) -> TcpFacts:
    batch, memory = batch_of(segments, first)
    return reassemble([batch], memory, WINDOW_NS, earlier_facts=earlier).facts


class Conversation:
    """Packets of one connection; each is 1 ms after the one before."""

    def __init__(self, start: tuple[int, int] = (1000, 5000)) -> None:
        self.next = list(start)
        self.acked = [start[1], start[0]]
        self.time = 0
        self.window = [500, 500]
        self.segments: list[Segment] = []

    def put(
        self, side: int, flags: int, length: int = 0, back: int = 0, options: bytes | None = None
    ) -> None:
        """A segment that begins `back` before the next byte."""
        self.time += MS
        seq = (self.next[side] - back) % 2**32
        ack = self.acked[side] % 2**32 if flags & ACK else 0
        window = self.window[side]
        number = len(self.segments)
        payload = bytes([number & 0xFF]) * length
        self.segments.append(
            Segment(self.time, side, flags, seq, ack, number, window, length, payload, options)
        )
        self.next[side] = max(
            self.next[side], self.next[side] - back + length + bool(flags & (SYN | FIN))
        )

    def acknowledge(self, side: int) -> None:
        self.acked[side] = self.next[1 - side]

    def open(self, options: bytes | None = OPTIONS) -> "Conversation":
        self.put(0, SYN, options=options)
        self.acknowledge(1)
        self.put(1, SYN | ACK, options=options)
        self.acknowledge(0)
        self.put(0, ACK)
        return self

    def found(self) -> dict[str, Any]:
        facts = facts_of(self.segments)
        row = columns(facts, self.segments[-1].time_ns)
        assert_same(row, expected(self.segments))
        return row


ACTIONS = ("data", "data", "data", "ack", "ack", "again", "partly", "probe", "window", "wait",
           "old", "fin", "rst", "syn")  # fmt: skip


@st.composite
def conversations(draw: st.DrawFn) -> list[Segment]:
    """A handshake, whole or not, then data, acknowledgements, retransmissions and closing."""
    start = draw(st.sampled_from(((1000, 5000), (2**32 - 4, 2**32 - 900), (0, 2**31))))
    made = Conversation(start)
    lists = st.sampled_from((None, b"", OPTIONS, OPTIONS[:8], b"\3\3\16\0", b"\2\0\0\0"))
    for _ in range(draw(st.integers(0, 2))):
        made.put(0, SYN, options=draw(lists))
        made.next[0] -= 1
    made.next[0] += 1
    if draw(st.booleans()):
        made.acknowledge(1)
        made.put(1, SYN | ACK, options=draw(lists))
    else:
        made.next[1] += 1
    for _ in range(draw(st.integers(1, 25))):
        side, action = draw(st.integers(0, 1)), draw(st.sampled_from(ACTIONS))
        if action == "ack":
            made.acknowledge(side)
        elif action == "window":
            made.window[side] = draw(st.sampled_from((0, 0, 1, 700)))
        elif action == "wait":
            made.time += draw(st.integers(1, 50)) * MS
        length = draw(st.integers(1, 9))
        if action == "data":
            made.put(side, ACK, length)
        elif action in ("again", "partly"):
            made.put(side, ACK, length, back=length if action == "again" else 1 + length // 2)
        elif action == "probe":
            made.put(side, ACK, draw(st.integers(0, 1)), back=1)
        elif action == "old":
            made.acked[side] -= 3
            made.put(side, ACK)
            made.acked[side] += 3
        elif action == "fin":
            made.put(side, ACK | FIN, draw(st.sampled_from((0, length))))
        elif action == "rst":
            made.put(side, draw(st.sampled_from((RST, RST | ACK))))
        elif action != "syn":
            made.put(side, ACK)
    return made.segments


@given(conversations())
def test_the_facts_are_the_oracle_s(segments: list[Segment]) -> None:
    """Handshakes, windows, round trips, idle time and closing of any conversation."""
    facts = facts_of(segments)
    assume(len(facts.connections) == 1)
    assert_same(columns(facts, segments[-1].time_ns), expected(segments))


@given(conversations(), st.data())
def test_cuts_change_nothing(segments: list[Segment], data: st.DataObject) -> None:
    """Windows that begin with the facts of the earlier ones give those of the whole."""
    places = st.lists(st.integers(1, max(1, len(segments) - 1)), max_size=3, unique=True)
    cuts = [0, *sorted(data.draw(places)), len(segments)]
    earlier = no_facts(1)
    for low, high in itertools.pairwise(cuts):
        if low < high:
            found = facts_of(segments[low:high], low, earlier)
            assume(len(found.connections) == 1)
            earlier = found.of(0)
    whole = facts_of(segments)
    assume(len(whole.connections) == 1)
    assert earlier.connections.tobytes() == whole.connections.tobytes()
    assert earlier.sides.tobytes() == whole.sides.tobytes()


def test_no_window_scaling_after_a_syn_cookie() -> None:
    """A SYN-ACK without the option turns scaling off for both sides."""
    made = Conversation()
    made.window = [65535, 65535]
    made.put(0, SYN, options=OPTIONS)
    made.acknowledge(1)
    made.put(1, SYN | ACK, options=b"\2\4\5\xb4")
    made.acknowledge(0)
    made.put(0, ACK)
    row = made.found()
    assert (row["request_window_scale"], row["response_window_scale"]) == (7, None)
    assert row["response_syn_seen"]
    assert row["response_mss"] == 1460
    assert row["request_window_max"] == 65535
    assert (row["request_sack_permitted"], row["response_sack_permitted"]) == (True, False)


def test_a_scale_that_is_unknown_gives_no_window() -> None:
    """Without the SYNs nothing is known of options, and windows are not given in bytes."""
    made = Conversation()
    made.put(0, ACK, 5)
    made.put(1, ACK, 5)
    row = made.found()
    assert row["request_syn_seen"] is False
    assert row["request_sack_permitted"] is None
    assert row["request_window_max"] is row["response_window_max"] is None


def test_unanswered_and_refused() -> None:
    """SYNs into silence are unanswered; an RST that acknowledges the SYN refuses it."""
    silent = Conversation()
    for _ in range(3):
        silent.put(0, SYN, options=OPTIONS)
        silent.next[0] -= 1
    row = silent.found()
    assert (row["syn_count"], row["unanswered_syn_count"], row["refused"]) == (3, 3, False)
    refused = Conversation()
    refused.put(0, SYN, options=OPTIONS)
    refused.acknowledge(1)
    refused.next[1] = 0
    refused.put(1, RST | ACK)
    row = refused.found()
    assert (row["syn_count"], row["unanswered_syn_count"], row["refused"]) == (1, 0, True)
    assert row["closed_by"] == "broker"
    later = Conversation().open()
    later.put(1, RST | ACK)
    assert later.found()["refused"] is False


def test_one_side_of_a_connection() -> None:
    """If only the client's packets were captured, its own ACK shows that its SYN was answered."""
    made = Conversation().open()
    made.put(0, ACK, 9)
    segments = [segment for segment in made.segments if segment.side == 0]
    assert columns(facts_of(segments), made.time)["unanswered_syn_count"] == 0


def test_zero_windows() -> None:
    """Time with a closed window counts until it opens, or until the last packet."""
    made = Conversation().open()
    made.window[1] = 0
    made.put(1, ACK)
    made.time += 40 * MS
    made.put(1, ACK)  # the same closed window
    made.window[1] = 9
    made.put(1, ACK)
    made.window[1] = 0
    made.put(1, ACK)
    made.time += 5 * MS
    made.put(0, ACK, 1)
    row = made.found()
    assert (row["response_zero_window_count"], row["request_zero_window_count"]) == (2, 0)
    assert row["response_zero_window_ms"] == pytest.approx(42 + 6)
    made.put(1, RST | ACK)
    assert made.found()["response_zero_window_count"] == 2


def test_keep_alive_probes_do_not_end_idle_time() -> None:
    """A probe of one byte that was sent before is no payload; the next real byte is."""
    made = Conversation().open()
    made.put(0, ACK, 10)
    began = made.time
    for _ in range(3):
        made.time += 1000 * MS
        made.put(0, ACK, 1, back=1)
        made.put(1, ACK)
    row = made.found()
    assert row["idle_ms_max"] == made.time / MS - began / MS
    assert row["idle_start_time"] == row["request_last_time"] == began // 1000
    made.put(0, ACK, 1)
    assert made.found()["request_last_time"] == made.time // 1000


def test_a_retransmitted_segment_has_no_round_trip() -> None:
    """Karn: the acknowledgement may be of either copy."""
    made = Conversation().open()
    made.put(0, ACK, 10)
    made.put(0, ACK, 10, back=10)
    made.acknowledge(1)
    made.put(1, ACK)
    assert made.found()["request_rtt_ms_p50"] is None
    made.put(0, ACK, 10)
    made.time += 7 * MS
    made.acknowledge(1)
    made.put(1, ACK)
    assert made.found()["request_rtt_ms_p50"] == pytest.approx(8, rel=1 / 32)


@pytest.mark.parametrize(
    "data",
    [
        b"", bytes(4), b"\1\1\1\1", b"\2\4\5\xb4\3\3\16\0", b"\3\3\xff\0", b"\3\2\1\1",
        b"\2\0\5\xb4", b"\2\1\5\xb4", b"\2\x28\5\xb4", b"\1\1\1\2", b"\4\2\4\2",
        b"\2\4\0\1\2\4\0\2", b"\2\4\5\xb4" + b"\3\3\2\1" * 9, b"\xfe" + b"\xff" * 39,
    ],
)  # fmt: skip
def test_options_of_any_form(data: bytes) -> None:
    """Lists that are cut, repeated, of length 0 or too long for their header."""
    row = Conversation().open(data).found()
    mss, scale, sack = oracle.options(data)
    assert row["request_mss"] == row["response_mss"] == mss
    assert row["request_window_scale"] == row["response_window_scale"] == scale
    assert row["request_sack_permitted"] is row["response_sack_permitted"] is sack


def test_a_syn_with_payload() -> None:
    """TCP Fast Open: the options are those before the payload."""
    made = Conversation()
    made.put(0, SYN, 100, options=OPTIONS)
    row = made.found()
    assert (row["request_mss"], row["request_window_scale"]) == (1460, 7)
    assert row["request_last_time"] == made.time // 1000


def conversations_of(path: Path) -> dict[tuple[Any, ...], list[Segment]]:
    """The segments of each pair of endpoints."""
    data = path.read_bytes()
    found: dict[tuple[Any, ...], list[Segment]] = defaultdict(list)
    for one in scan_capture(data)[0]:
        size = 4 * one.option_words - 4
        options = data[one.pos - size : one.pos] if one.option_words else None
        numbers = (one.seq, one.ack, one.ip_id, one.window, one.length)
        segment = Segment(
            one.time_ns, one.side, one.flags, *numbers, options=options, marks=one.marks
        )
        found[one.endpoints].append(segment)
    return found


@pytest.mark.parametrize(
    "path",
    [
        CAPTURES / "java_0_10_2_2.pcap", CAPTURES / "librdkafka.pcap",
        SHARED / "odd/odd_conversations.pcap", SHARED / "shapes/ipv6.pcap",
        SHARED / "shapes/reordered.pcap", SHARED / "shapes/midstream.pcap",
    ],
    ids=lambda path: path.stem,
)  # fmt: skip
def test_real_captures(path: Path) -> None:
    """Every connection whose endpoints have only one has the oracle's facts."""
    by_ends = conversations_of(needed(path))
    rows = kdissect.read(path).connections.to_pylist()
    times = {"idle_start_time": None, "request_last_time": None, "response_last_time": None}
    compared = 0
    for (a, a_port, b, b_port, _), segments in by_ends.items():
        ports = {a_port, b_port}
        mine = [row for row in rows if {row["client_port"], row["broker_port"]} == ports]
        syns = {(one.side, one.seq) for one in segments if one.is_syn}
        if len(mine) != 1 or len(syns) > 2 or (a == b and a_port == b_port):
            continue
        (row,) = mine
        unordered = sorted(one.time_ns for one in segments)
        if unordered != [one.time_ns for one in segments]:
            continue
        client = 0 if row["client_port"] == a_port else 1
        found = dict(row)
        for name in times:
            value = row[name]
            found[name] = None if value is None else round(value.timestamp() * 1_000_000)
        assert_same(found, expected(segments, client))
        compared += 1
    assert compared > len(by_ends) // 2
