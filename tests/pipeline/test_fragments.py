"""IP fragments of a real conversation give the rows of the whole packets."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import kdissect
from tests.builders.captures import Packet, read_packets, write_packets
from tests.builders.packets import ethernet, ipv4, tcp
from tests.builders.tables import kinds
from tests.capture.fragmenting import (
    Fragments,
    doubled,
    fragmented,
    in_vxlan,
    ipv4_fragments,
    ipv6_fragments,
    shuffled,
    to_ipv6,
)
from tests.cases import cases
from tests.conftest import CAPTURES

EXCHANGE = [
    "client_port", "broker_port", "api_key", "api_version", "correlation_id", "client_id",
    "request_time_ns", "response_time_ns", "request_size", "response_size", "request_pos",
    "response_pos", "status", "decode_status", "error_codes", "topics",
]  # fmt: skip
RECORD = [
    "batch_index", "record_index", "source", "topic", "partition", "offset", "timestamp_ms", "key",
    "value", "headers",
]  # fmt: skip
COUNTERS = [
    f"{side}_{name}"
    for side in ("request", "response")
    for name in ("byte_count", "framed_byte_count", "segment_count", "missing_byte_count")
]


@pytest.fixture(scope="module")
def packets() -> list[Packet]:
    found = read_packets(CAPTURES / "librdkafka.pcap")[:420]
    # Linux gives SYN-ACKs, which are never fragmented, the identification 0.
    return [packet.put(18, number.to_bytes(2, "big")) for number, packet in enumerate(found, 1)]


def read(folder: Path, packets: list[Packet], **options: Any) -> Any:
    return kdissect.read(write_packets(folder / "made.pcap", packets), **options)


def rows(tables: Any, name: str, columns: list[str]) -> list[str]:
    return sorted(map(repr, tables[name].to_arrow(columns).to_pylist()))


def check_like(found: Any, whole: Any, is_exact: bool = True) -> None:
    for name, columns in (("exchanges", EXCHANGE), ("records", RECORD)):
        assert rows(found, name, columns) == rows(whole, name, columns)
    if is_exact:
        assert rows(found, "connections", COUNTERS) == rows(whole, "connections", COUNTERS)
        kinds = found.anomalies.to_arrow(["kind"]).to_pylist()
        assert kinds == whole.anomalies.to_arrow(["kind"]).to_pylist()


def cut_ipv4(size: int) -> Callable[[int, Packet], Fragments]:
    return lambda number, packet: ipv4_fragments(packet, size)


def cut_ipv6(size: int) -> Callable[[int, Packet], Fragments]:
    return lambda number, packet: ipv6_fragments(to_ipv6(packet), size, number)


CUTS = {
    "ipv4 576": cut_ipv4(552), "ipv4 1280": cut_ipv4(1256), "ipv4 tiny": cut_ipv4(8),
    "ipv6 576": cut_ipv6(528), "ipv6 1280": cut_ipv6(1232),
    "vxlan 576": lambda number, packet: ipv4_fragments(in_vxlan(packet, number), 552),
}  # fmt: skip
REPEATED = ("ipv4 1280", "ipv6 1280")  # the same kinds in larger fragments


@cases("name", [name for name in CUTS if name not in REPEATED], heavy=REPEATED)
def test_the_same_rows(tmp_path: Path, packets: list[Packet], name: str) -> None:
    """In order, out of order, every fragment twice."""
    sent = [to_ipv6(packet) for packet in packets] if "ipv6" in name else packets
    whole = read(tmp_path, sent)
    datagrams = fragmented(packets, CUTS[name])
    is_tiny = max(map(len, datagrams)) > 256
    if is_tiny:  # more fragments than one datagram may have
        datagrams = [one if len(one) < 256 else [packet] for one, packet in
                     zip(datagrams, packets, strict=True)]  # fmt: skip
    assert max(map(len, datagrams)) > 1
    for order in (lambda found, seed: found, shuffled, doubled):
        made = [*chain.from_iterable(order(datagrams, 1))]
        found = read(tmp_path, made)
        check_like(found, whole, order is not doubled)
        (capture,) = found.captures.to_pylist()
        assert capture["packet_count"] == len(made)
        assert capture["tcp_packet_count"] == len(packets)
        assert dict(capture["ignored_reasons"]) == {"ip_fragment": len(made) - len(packets)}
        counted = found.connections.to_pandas()
        segments = counted["request_segment_count"] + counted["response_segment_count"]
        assert segments.sum() == len(packets) - capture["duplicate_packet_count"]


def test_the_same_rows_however_split(tmp_path: Path, packets: list[Packet]) -> None:
    """Fragments of one datagram in several splits, and in several files."""
    made = [*chain.from_iterable(shuffled(fragmented(packets, cut_ipv4(552)), 2))]
    whole = read(tmp_path, made)
    small = read(tmp_path, made, split_bytes=700)
    for name in whole.names:
        columns = whole[name].schema.names
        assert rows(small, name, columns) == rows(whole, name, columns), name
    places = [number for number, one in enumerate(made) if one.data[20] & 0x3F or one.data[21]]
    assert places
    for number, at in enumerate((0, places[3], places[9], places[20])):
        ends = [places[3], places[9], places[20], len(made)]
        write_packets(tmp_path / f"part{number}.pcap", made[at : ends[number]])
    # the last file has more than its share of the limit
    limits = {"fragments": len(places)}
    rotated = kdissect.read([tmp_path / f"part{number}.pcap" for number in range(4)], limits=limits)
    check_like(rotated, whole)
    assert "limit" not in rotated.anomalies.to_pandas()["kind"].tolist()


def test_a_lost_fragment_is_a_gap(tmp_path: Path, packets: list[Packet]) -> None:
    """Only the bytes of the lost fragment are missing; the place says so."""
    whole = read(tmp_path, packets)
    datagrams = fragmented(packets, cut_ipv4(552))
    largest = max(range(len(datagrams)), key=lambda at: len(datagrams[at]))
    for lost in (1, len(datagrams[largest]) - 1):
        gone = datagrams[largest][lost]
        made = [packet for packet in chain.from_iterable(datagrams) if packet is not gone]
        found = read(tmp_path, made)
        missing = found.connections.to_pandas(
            ["request_missing_byte_count", "response_missing_byte_count"]
        )
        assert missing.to_numpy().sum() == len(gone.data) - 34
        left = set(rows(found, "exchanges", EXCHANGE)) ^ set(rows(whole, "exchanges", EXCHANGE))
        assert len(left) == 2  # one exchange, now partial
        assert kinds(found).count("lost_fragments") == 1
        assert "gap" in kinds(found)
        (capture,) = found.captures.to_pylist()
        assert capture["tcp_packet_count"] == len(packets) - 1
        assert capture["packet_count"] == len(made)


def test_a_lost_first_fragment_loses_the_segment(tmp_path: Path, packets: list[Packet]) -> None:
    """Without its first fragment a segment's payload is missing, with an anomaly."""
    datagrams = fragmented(packets, cut_ipv4(552))
    largest = max(range(len(datagrams)), key=lambda at: len(datagrams[at]))
    payload = (
        sum(len(one.data) - 34 for one in datagrams[largest])
        - (datagrams[largest][0].data[46] >> 4) * 4
    )
    del datagrams[largest][0]
    made = [*chain.from_iterable(datagrams)]
    found = read(tmp_path, made)
    missing = found.connections.to_pandas(
        ["request_missing_byte_count", "response_missing_byte_count"]
    )
    assert missing.to_numpy().sum() == payload
    assert kinds(found).count("lost_fragments") == 1


def test_other_bytes_begin_another_datagram(tmp_path: Path, packets: list[Packet]) -> None:
    """A fragment with other bytes for the same position ends the datagram; its bytes stay."""
    whole = read(tmp_path, packets)
    datagrams = fragmented(packets, cut_ipv4(552))
    largest = max(datagrams, key=len)
    other = largest[1]
    wrong = Packet(other.time_ns, other.data[:34] + b"x" * (len(other.data) - 34), other.length)
    largest.insert(2, wrong)
    made = [*chain.from_iterable(datagrams)]
    found = read(tmp_path, made)
    left = set(rows(found, "exchanges", EXCHANGE)) ^ set(rows(whole, "exchanges", EXCHANGE))
    assert len(left) == 2  # one exchange, now partial
    lost = [row["packet"] for row in found.anomalies.to_pylist() if row["kind"] == "lost_fragments"]
    assert lost == [made.index(largest[0]) + 1, made.index(wrong) + 1]


def test_an_identification_used_again_is_another_datagram(
    tmp_path: Path, packets: list[Packet]
) -> None:
    """All fragments have the same identification, and some datagrams are not whole."""
    same = [packet.put(18, b"\0\7") for packet in packets]
    datagrams = fragmented(same, cut_ipv4(552))
    several = [at for at, one in enumerate(datagrams) if len(one) > 2]
    for at in several[::4]:
        del datagrams[at][-1]
    found = read(tmp_path, [*chain.from_iterable(datagrams)])
    before = dict.fromkeys(rows(read(tmp_path, same), "records", RECORD))
    assert all(row in before for row in rows(found, "records", RECORD))
    assert "overlap_conflict" not in kinds(found)


def test_a_tunnel_that_claims_more_than_its_datagram(tmp_path: Path) -> None:
    """The inner IP header announces bytes, and TCP options, that the fragments do not have."""
    inner = ipv4(tcp(b"", flags=24), total=1000)
    inner = inner[:32] + b"\xf0" + inner[33:]  # a TCP header of 60 bytes
    datagram = ethernet(ipv4(inner + bytes(8), protocol=4))
    pieces = ipv4_fragments(Packet(1000, datagram, len(datagram)), 40)
    assert len(pieces) == 2
    (capture,) = read(tmp_path, pieces).captures.to_pylist()
    assert dict(capture["ignored_reasons"]) == {"ip_fragment": 2}
