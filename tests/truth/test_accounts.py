"""Nothing lost, and it adds up: accounts of all captures, and what dpkt finds in some."""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kdissect.accounts import check
from kdissect.protocol.model import SIDES
from tests.material import CAPTURES
from tests.truth import packets
from tests.truth.material import ALL, Capture, each, read, rows, shapes

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
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
def test_the_accounts_add_up(source: Input) -> None:
    """`check` finds no fault; the manifest counts the same packets, and dpkt the same copies."""
    assert check(read(source.path))["faults"] == []
    (capture,) = source.rows("captures")
    assert capture["packet_count"] == source.packet_count
    is_cut = source.path.name == "cut.pcap"
    assert (capture["error"] is not None) == is_cut, capture["error"]
    kinds = Counter(row["kind"] for row in source.rows("anomalies"))
    assert (kinds["capture_cut"] > 0) == is_cut
    cut_packets = shapes().get(source.path.name, {}).get("cut_packets", 0)
    assert capture["truncated_packet_count"] == cut_packets
    if str(source) in COMPARED_WITH_DPKT:
        assert capture["duplicate_packet_count"] == packets.copies(source.path)


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
