"""Nothing lost, and it adds up: every byte in a frame or under an anomaly, every packet counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kdissect.protocol.model import SIDES
from tests.material import CAPTURES
from tests.truth import packets
from tests.truth.material import ALL, Capture, each, read, rows, shapes

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HOLES = ("gap", "packet_cut")  # anomalies of bytes that are not in the capture
DAMAGED = {"cut.pcap", "snap128.pcap", "drop1pct.pcap", "midstream.pcap"}
COMPARED_WITH_DPKT = {
    *("other_clients/librdkafka.pcap", "cluster/cluster.pcap", "zookeeper/zk_1_1_1.pcap"),
    *("odd/odd_conversations.pcap", "java_latest/java_latest.pcap", "shapes/duplicated.pcap"),
    *("shapes/ipv6.pcap", "shapes/any_sll2.pcap", "shapes/reordered.pcap"),
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Input:
    """A capture file, and independent facts about it."""

    path: Path
    packet_count: int
    is_damaged: bool
    stream_problems: frozenset[tuple[int, int]]  # (client port, broker port) of odd streams

    def __str__(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    def rows(self, table: str) -> list[Row]:
        return rows(read(self.path), table)


def _inputs() -> list[Input]:
    found = [
        Input(
            capture.path,
            capture.check["packets"],
            False,
            frozenset(
                _ports(problem["connection"])
                for problem in capture.check["stream_problems"]["sample"]
            ),
        )
        for capture in ALL
    ]
    for name, shape in shapes().items():
        path = CAPTURES / "shapes" / name
        found.append(Input(path, shape["packets"], name in DAMAGED, frozenset()))
    return found


def _ports(connection: str) -> tuple[int, int]:
    """Of "127.0.0.1:48398->127.0.0.1:9092"."""
    client, broker = connection.split("->")
    return int(client.rpartition(":")[2]), int(broker.rpartition(":")[2])


# librdkafka.pcap in other wrappings, whose tables test_invariance compares with that capture's
REWRAPPED = {
    f"shapes/{name}"
    for name in (
        *("be_ns.pcap", "gzip.pcap.gz", "null.pcap", "pcapng_ns.pcapng", "qinq.pcap"),
        *("pcapng_two_interfaces.pcapng", "rawip.pcap", "seqwrap.pcap", "sll1.pcap", "sll2.pcap"),
        *("vlan_vxlan.pcap", "zstd.pcap.zst"),
    )
}
every_input = each("source", _inputs(), repeated=REWRAPPED)


@every_input
def test_every_packet_is_counted(source: Input) -> None:
    """packet_count is the manifest's; TCP and ignored packets, by reason, are all of them."""
    (capture,) = source.rows("captures")
    assert Path(capture["path"]).name == source.path.name
    assert capture["packet_count"] == source.packet_count
    ignored = sum(count for _, count in capture["ignored_reasons"])
    assert capture["ignored_packet_count"] == ignored
    assert capture["packet_count"] == capture["tcp_packet_count"] + ignored
    is_cut = source.path.name == "cut.pcap"
    assert (capture["error"] is not None) == is_cut, capture["error"]
    kinds = Counter(row["kind"] for row in source.rows("anomalies"))
    assert (kinds["capture_cut"] > 0) == is_cut
    cut_packets = shapes().get(source.path.name, {}).get("cut_packets", 0)
    assert capture["truncated_packet_count"] == cut_packets


@every_input
def test_every_tcp_packet_is_in_one_connection_or_a_duplicate(source: Input) -> None:
    """Segments and duplicates add up to the TCP packets; dpkt counts the same duplicates."""
    (capture,) = source.rows("captures")
    segments = sum(
        row[f"{side}_segment_count"] for row in source.rows("connections") for side in SIDES
    )
    assert segments + capture["duplicate_packet_count"] == capture["tcp_packet_count"]
    if str(source) in COMPARED_WITH_DPKT:
        assert capture["duplicate_packet_count"] == packets.copies(source.path)


@every_input
def test_bytes_of_every_connection_add_up(source: Input) -> None:
    """byte_count = framed + unframed; a connection that is not Kafka's is all unframed."""
    unframed_anomalies = {
        row["connection_id"]
        for row in source.rows("anomalies")
        if row["kind"] in ("unframed_bytes", "malformed_message")
    }
    for row in source.rows("connections"):
        assert row["is_kafka"] or row["protocol"] != "kafka", row
        for side in SIDES:
            framed, unframed = row[f"{side}_framed_byte_count"], row[f"{side}_unframed_byte_count"]
            assert framed >= 0 <= unframed, row
            assert row[f"{side}_byte_count"] == framed + unframed, row
            if not row["is_kafka"]:
                assert framed == 0, row
        if not row["is_kafka"]:
            assert row["connection_id"] not in unframed_anomalies, row


@every_input
def test_nothing_is_unframed_or_missing_where_nothing_is_damaged(source: Input) -> None:
    """In whole captures every byte of a Kafka connection is in a frame, except where clients of
    odd_conversations sent what no broker understands."""
    if source.is_damaged:
        pytest.skip("a damaged capture")
    for row in source.rows("connections"):
        if (row["client_port"], row["broker_port"]) in source.stream_problems:
            continue
        for side in SIDES:
            if row["is_kafka"]:
                assert row[f"{side}_unframed_byte_count"] == 0, row
            assert row[f"{side}_missing_byte_count"] == 0, row
            assert row[f"{side}_gap_count"] == 0, row


@every_input
def test_every_byte_is_in_a_frame_or_under_an_anomaly(source: Input) -> None:
    """Stream positions of frames and anomalies cover every Kafka stream from 0 to its end; frames
    do not overlap; the holes are as large as missing_byte_count says."""
    frames: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for row in source.rows("exchanges"):
        for side in SIDES:
            if row[f"{side}_size"] is not None:
                start = row[f"{side}_pos"]
                span = start, start + 4 + row[f"{side}_size"]
                frames[row["connection_id"], side].append(span)
    anomalies: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    holes: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for row in source.rows("anomalies"):
        if row["pos"] is not None and row["byte_count"]:
            span = row["pos"], row["pos"] + row["byte_count"]
            anomalies[row["connection_id"], row["direction"]].append(span)
            if row["kind"] in HOLES:
                holes[row["connection_id"], row["direction"]].append(span)
    for row in source.rows("connections"):
        if not row["is_kafka"] or row["is_tls"]:  # of TLS, headers of records lie between frames
            continue
        for side in SIDES:
            at = row["connection_id"], side
            missing = row[f"{side}_missing_byte_count"]
            end = row[f"{side}_byte_count"] + missing
            framed = _union(_clip(frames[at], end))
            hole = _union(_clip(holes[at], end))
            assert _length(framed) == sum(b - a for a, b in _clip(frames[at], end)), (side, row)
            covered = _union(framed + _clip(anomalies[at], end))
            assert covered == ([(0, end)] if end else []), (side, covered, end, row)
            assert _length(hole) == missing, (side, hole, row)
            not_framed = end - _length(framed)
            holes_outside = _length(_union(framed + hole)) - _length(framed)
            assert row[f"{side}_unframed_byte_count"] == not_framed - holes_outside, (side, row)


Spans = list[tuple[int, int]]


def _clip(spans: Iterable[tuple[int, int]], end: int) -> Spans:
    """Parts before the end: a last frame may announce more than the stream has."""
    return [(a, min(b, end)) for a, b in spans if a < min(b, end)]


def _union(spans: Spans) -> Spans:
    merged: Spans = []
    for a, b in sorted(spans):
        if merged and a <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(b, merged[-1][1])
        else:
            merged.append((a, b))
    return merged


def _length(spans: Spans) -> int:
    return sum(b - a for a, b in spans)


@every_input
def test_rows_refer_to_rows_that_exist(source: Input) -> None:
    """IDs are unique and positive, and every reference has its row."""
    connections = [row["connection_id"] for row in source.rows("connections")]
    exchanges = [row["exchange_id"] for row in source.rows("exchanges")]
    captures = {row["capture_id"] for row in source.rows("captures")}
    for ids in (connections, exchanges):
        assert len(set(ids)) == len(ids)
        assert all(0 < one < 2**63 for one in ids)
    known = set(exchanges)
    batches = {(r["exchange_id"], r["batch_index"]) for r in source.rows("record_batches")}
    assert len(batches) == len(source.rows("record_batches"))
    assert {exchange_id for exchange_id, _ in batches} <= known
    assert {(r["exchange_id"], r["batch_index"]) for r in source.rows("records")} <= batches
    assert {row["connection_id"] for row in source.rows("exchanges")} <= set(connections)
    for row in source.rows("exchanges"):
        assert {row["request_capture_id"], row["response_capture_id"]} <= captures | {None}, row
    for row in source.rows("anomalies"):
        assert row["connection_id"] is None or row["connection_id"] in set(connections), row
        assert row["exchange_id"] is None or row["exchange_id"] in known, row
        assert row["capture_id"] is None or row["capture_id"] in captures, row


@every_input
def test_record_counts_are_those_of_the_batches(source: Input) -> None:
    """A whole batch has its records, numbered from 0; a partial one has no record."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in source.rows("records"):
        found[row["exchange_id"], row["batch_index"]].append(row["record_index"])
    for row in source.rows("record_batches"):
        numbers = sorted(found.pop((row["exchange_id"], row["batch_index"]), []))
        expected = 0 if row["is_partial"] else row["record_count"]
        assert numbers == list(range(expected)), row
        assert row["is_partial"] or row["crc_ok"], row
    assert not found


@pytest.mark.parametrize(
    "name",
    ["other_clients/librdkafka", "cluster/cluster", "zookeeper/zk_1_1_1", "odd/odd_conversations"],
)
def test_connections_are_those_that_dpkt_finds(name: str) -> None:
    """The same connections by another reader's count: bytes and segments of each direction, first
    and last packet, handshake and end."""
    capture = Capture(name)
    expected = Counter(
        (
            *(*client, *broker, len(there.data), len(back.data)),
            *(len(there.times_ns), len(back.times_ns)),
            min(there.times_ns + back.times_ns) // 1000,
            max(there.times_ns + back.times_ns) // 1000,
            there.has_syn and back.has_syn,
            _close_reason(there, back),
        )
        for (client, broker), connections in packets.streams(capture.path).items()
        for there, back in connections
    )
    found = Counter(
        (
            *(row["client_ip"], row["client_port"], row["broker_ip"], row["broker_port"]),
            *(row["request_byte_count"], row["response_byte_count"]),
            *(row["request_segment_count"], row["response_segment_count"]),
            _microseconds(row["first_time"]),
            _microseconds(row["last_time"]),
            row["handshake_seen"],
            row["close_reason"],
        )
        for row in capture.rows("connections")
    )
    assert found == expected


def _close_reason(there: packets.Stream, back: packets.Stream) -> str:
    """The first end of either side; clients often reset a closed connection."""
    ends = [stream.end for stream in (there, back) if stream.end is not None]
    if not ends:
        return "capture_end"
    _, flags = min(ends)
    return "rst" if flags & packets.RST else "fin"


def _microseconds(time: datetime) -> int:
    return (time - EPOCH) // timedelta(microseconds=1)


@pytest.mark.parametrize("name", ["other_clients/librdkafka", "java_latest/java_latest"])
def test_rows_lead_back_to_packets(name: str) -> None:
    """The packet that a side names was sent by that side, at that time, and holds the first bytes
    of its size prefix, at its stream position."""
    capture = Capture(name)
    by_number = {packet.number: packet for packet in packets.tcp_packets(capture.path)}
    streams = packets.streams(capture.path)
    checked = 0
    for row in capture.rows("exchanges"):
        client = row["client_ip"], row["client_port"]
        broker = row["broker_ip"], row["broker_port"]
        (connection,) = streams[client, broker]
        for side, sender, stream in zip(SIDES, (client, broker), connection, strict=True):
            if row[f"{side}_packet"] is None:
                continue
            packet = by_number[row[f"{side}_packet"]]
            assert packet.source == sender, row
            assert packet.time_ns == row[f"{side}_time_ns"], row
            pos = row[f"{side}_pos"]
            prefix = row[f"{side}_size"].to_bytes(4, "big")
            assert stream.data[pos : pos + 4] == prefix, row
            assert 0 <= pos - stream.pos_of(packet) < len(packet.payload), row
            checked += 1
    assert checked >= capture.check["requests"] + capture.check["responses"]
