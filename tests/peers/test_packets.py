"""Segments against dpkt, an independent parser of captures, packets and TCP."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dpkt
import pytest

from kdissect.capture.inputs import find_captures, spool
from kdissect.capture.scan import scan
from kdissect.capture.splits import plan_splits
from tests.material import ABSENT
from tests.material import CAPTURES as SHARED

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not SHARED.is_dir(), reason=ABSENT),
]

LINKS = {
    0: dpkt.loopback.Loopback, 1: dpkt.ethernet.Ethernet, 113: dpkt.sll.SLL, 276: dpkt.sll2.SLL2,
}  # fmt: skip


def dpkt_segments(data: bytes, path: Path) -> Iterator[tuple[Any, ...]]:
    with path.open("rb") as file:
        is_pcapng = data[:4] == b"\n\r\r\n"
        reader = dpkt.pcapng.Reader(file) if is_pcapng else dpkt.pcap.Reader(file)
        link_type = reader.datalink()
        for number, (time, packet) in enumerate(reader, 1):
            if link_type in (12, 101):
                ip = dpkt.ip6.IP6(packet) if packet[0] >> 4 == 6 else dpkt.ip.IP(packet)
            else:
                ip = LINKS[link_type](packet).data
                ip = ip if not isinstance(ip, bytes) else dpkt.ip.IP(ip)
            tcp = ip.data
            yield (
                number, round(float(time) * 1e6), str(ipaddress.ip_address(ip.src)), tcp.sport,
                str(ipaddress.ip_address(ip.dst)), tcp.dport, tcp.seq, tcp.ack, tcp.flags & 255,
                tcp.win, getattr(ip, "id", None), bytes(tcp.data),
            )  # fmt: skip


def our_segments(path: Path, folder: Path) -> tuple[bytes, Path, list[tuple[Any, ...]]]:
    file = spool(find_captures([path])[0], folder)
    planned = plan_splits([file], 100_000)
    sources, splits = planned.sources, planned.splits
    data = Path(file.data_path).read_bytes()
    rows = []
    for split in splits:
        batch = scan(split, sources).batch
        ends = []
        for pair in batch.endpoints:
            addresses = [ipaddress.IPv6Address(bytes(pair[name])) for name in ("ip_a", "ip_b")]
            texts = [str(address.ipv4_mapped or address) for address in addresses]
            ends.append(((texts[0], int(pair["port_a"])), (texts[1], int(pair["port_b"]))))
        for row in batch.segments:
            sender, receiver = ends[row["endpoints"]][:: -1 if row["side"] else 1]
            pos = int(row["pos"])
            rows.append(
                (
                    int(row["packet"]), round(int(row["time_ns"]) / 1e9 * 1e6), *sender, *receiver,
                    int(row["seq"]), int(row["ack"]), int(row["flags"]), int(row["window"]),
                    int(row["ip_id"]) & 0xFFFF, data[pos : pos + int(row["captured"])],
                )
            )  # fmt: skip
    return data, Path(file.data_path), rows


@pytest.mark.parametrize(
    "name",
    [
        "other_clients/librdkafka.pcap", "java_latest/java_latest.pcap",
        "odd/odd_conversations.pcap",
        "shapes/ipv6.pcap", "shapes/any_sll2.pcap", "shapes/sll1.pcap", "shapes/sll2.pcap",
        "shapes/null.pcap", "shapes/rawip.pcap", "shapes/be_ns.pcap", "shapes/pcapng_ns.pcapng",
        "shapes/qinq.pcap", "shapes/gzip.pcap.gz", "shapes/zstd.pcap.zst", "shapes/seqwrap.pcap",
        "shapes/snap128.pcap",
    ],
)  # fmt: skip
def test_segments_are_dpkt_s(name: str, tmp_path: Path) -> None:
    """Endpoints, sequence numbers, flags, payload bytes and times of every packet."""
    data, path, ours = our_segments(SHARED / name, tmp_path)
    theirs = list(dpkt_segments(data, path))
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert abs(mine[1] - other[1]) <= 1  # dpkt's times are floats
        assert (mine[0], *mine[2:10], mine[11]) == (other[0], *other[2:10], other[11])
        assert other[10] is None or mine[10] == other[10]
