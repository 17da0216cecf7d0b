"""Copies of a capture: other hosts and times, the same conversations."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Raw
from scapy.utils import rdpcap, wrpcap

from bench.multiply import multiply

CLIENT, BROKER = "192.168.7.1", "192.168.7.2"


def _packets() -> list[Any]:
    """Two conversations, over IPv4 and IPv6, and packets that are neither TCP nor IP."""
    ethernet = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
    pairs = [
        IP(src=CLIENT, dst=BROKER),
        IP(src=BROKER, dst=CLIENT),
        IPv6(src="fe80::1", dst="fe80::2"),
        IPv6(src="fe80::2", dst="fe80::1"),
    ]
    packets = [
        ethernet / pair / TCP(sport=1000 + n, dport=9092, seq=n) / Raw(bytes([n]) * (7 + 13 * n))
        for n in range(8)
        for pair in pairs
    ]
    packets.insert(3, ethernet / ARP(psrc=CLIENT))
    packets.insert(5, ethernet / pairs[0] / UDP(sport=1, dport=2) / Raw(b"not tcp"))
    for n, packet in enumerate(packets):
        packet.time = 1_600_000_000 + n * 0.25
    return packets


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.pcap"
    wrpcap(str(path), _packets())
    return path


def _ip(packet: Any) -> Any:
    return packet[IP] if IP in packet else packet[IPv6]


@pytest.mark.parametrize("block_bytes", [100, 999, 1 << 20])
def test_copies_follow_one_another(source: Path, tmp_path: Path, block_bytes: int) -> None:
    """Three copies: payload as it was, each copy's addresses and times apart from the others'."""
    original = rdpcap(str(source))
    done = multiply(source, tmp_path / "three.pcap", 3, block_bytes=block_bytes)
    written = rdpcap(str(done.path))
    assert done.packet_count == len(written) == 3 * len(original)
    assert done.byte_count == done.path.stat().st_size
    assert [float(packet.time) for packet in written] == sorted(float(p.time) for p in written)
    hosts: Counter[str] = Counter()
    for copy in range(3):
        part = written[copy * len(original) : (copy + 1) * len(original)]
        assert {float(p.time - q.time) for p, q in zip(part, original, strict=True)} == {copy * 10}
        addresses = {}
        for now, before in zip(part, original, strict=True):
            if ARP in before:
                assert bytes(now) == bytes(before)
                continue
            for name in ("src", "dst"):
                old, new = getattr(_ip(before), name), getattr(_ip(now), name)
                assert addresses.setdefault(old, new) == new
            assert bytes(now[Raw]) == bytes(before[Raw])
            if TCP in before:
                assert (now[TCP].sport, now[TCP].seq) == (before[TCP].sport, before[TCP].seq)
        assert len(set(addresses.values())) == len(addresses) == 4
        hosts.update(addresses.values())
    assert len(hosts) == 12


def test_checksums_stay_right(source: Path, tmp_path: Path) -> None:
    """IPv4's and TCP's checksums are what scapy computes for the new addresses."""
    done = multiply(source, tmp_path / "two.pcap", 2)
    compared = 0
    for packet in rdpcap(str(done.path)):
        if TCP not in packet:
            continue
        again = packet.copy()
        del again[TCP].chksum
        if IP in again:
            del again[IP].chksum
        assert bytes(again.__class__(bytes(again))) == bytes(packet)
        compared += 1
    assert compared == 64


@pytest.mark.parametrize("block_bytes", [100, 1 << 20])
def test_interleaved_copies_lie_side_by_side(
    source: Path, tmp_path: Path, block_bytes: int
) -> None:
    """Interleaved: the packets of the plain copies, in the order of the input's packets."""
    original = rdpcap(str(source))
    plain = rdpcap(str(multiply(source, tmp_path / "plain.pcap", 4).path))
    mixed = multiply(source, tmp_path / "mixed.pcap", 4, interleave=True, block_bytes=block_bytes)
    written = rdpcap(str(mixed.path))
    assert mixed.packet_count == len(written) == len(plain)
    for n, packet in enumerate(written):
        place, copy = divmod(n, 4)
        assert bytes(packet) == bytes(plain[copy * len(original) + place])
        assert packet.time == original[place].time


def test_a_packet_cut_at_the_end_is_left_out(source: Path, tmp_path: Path) -> None:
    """A capture that ends inside a packet gives copies of its whole packets."""
    cut = tmp_path / "cut.pcap"
    cut.write_bytes(source.read_bytes()[:-5])
    done = multiply(cut, tmp_path / "out.pcap", 2)
    assert done.packet_count == 2 * (len(_packets()) - 1)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """What is no pcap, or of an unusual link type, is an error of the caller."""
    path = tmp_path / "other"
    path.write_bytes(b"no capture at all, but long enough")
    with pytest.raises(ValueError, match="is no pcap"):
        multiply(path, tmp_path / "out", 2)
    path.write_bytes(bytes.fromhex("d4c3b2a1020004000000000000000000ffff000093000000"))
    with pytest.raises(ValueError, match="link type 147"):
        multiply(path, tmp_path / "out", 2)
    with pytest.raises(ValueError, match="copies"):
        multiply(path, tmp_path / "out", 0)
