"""Captures as lists of packets that can be changed and written again."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

Key = frozenset[tuple[bytes, int]]
"""Both endpoints of a connection, whoever is the client."""


@dataclass(frozen=True, slots=True)
class Packet:
    """An Ethernet packet; `length` is its length on the wire."""

    time_ns: int
    data: bytes
    length: int

    @property
    def is_tcp(self) -> bool:
        """True for IPv4 and TCP with whole headers."""
        data = self.data
        if len(data) < 54 or data[12:14] != b"\x08\0" or data[14] >> 4 != 4 or data[23] != 6:
            return False
        tcp = 14 + (data[14] & 15) * 4
        return len(data) >= tcp + 20 and tcp + (data[tcp + 12] >> 4) * 4 <= len(data)

    @property
    def tcp_pos(self) -> int:
        return 14 + (self.data[14] & 15) * 4

    @property
    def payload_pos(self) -> int:
        return self.tcp_pos + (self.data[self.tcp_pos + 12] >> 4) * 4

    @property
    def payload(self) -> bytes:
        return self.data[self.payload_pos :]

    @property
    def source(self) -> tuple[bytes, int]:
        tcp = self.tcp_pos
        return self.data[26:30], int.from_bytes(self.data[tcp : tcp + 2], "big")

    @property
    def target(self) -> tuple[bytes, int]:
        tcp = self.tcp_pos
        return self.data[30:34], int.from_bytes(self.data[tcp + 2 : tcp + 4], "big")

    @property
    def key(self) -> Key:
        return frozenset((self.source, self.target))

    @property
    def seq(self) -> int:
        return int.from_bytes(self.data[self.tcp_pos + 4 : self.tcp_pos + 8], "big")

    @property
    def flags(self) -> int:
        return self.data[self.tcp_pos + 13]

    def put(self, at: int, new: bytes) -> Packet:
        """The packet with `new` over its bytes at `at`, never longer than before."""
        data = self.data[:at] + new + self.data[at + len(new) :]
        return replace(self, data=data[: len(self.data)])

    def with_payload(self, payload: bytes) -> Packet:
        """Another payload, and the IP length that belongs to it."""
        data = self.data[: self.payload_pos] + payload
        total = len(data) - 14
        data = data[:16] + struct.pack(">H", total if total < 65536 else 0) + data[18:]
        return Packet(self.time_ns, data, len(data))


def read_pcap(path: Path) -> list[Packet]:
    """The packets of a little-endian pcap file with microseconds, as all of ours are."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    magic, link_type = struct.unpack_from("<I", data)[0], struct.unpack_from("<I", data, 20)[0]
    assert (magic, link_type) == (0xA1B2C3D4, 1), path
    packets = []
    pos = 24
    while pos + 16 <= len(data):
        seconds, fraction, captured, length = struct.unpack_from("<4I", data, pos)
        time_ns = seconds * 10**9 + fraction * 1000
        packets.append(Packet(time_ns, data[pos + 16 : pos + 16 + captured], length))
        pos += 16 + captured
    return packets


def pcap_bytes(packets: Iterable[Packet], link_type: int = 1) -> bytes:
    parts = [struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 1 << 18, link_type)]
    for packet in packets:
        seconds, rest = divmod(packet.time_ns, 10**9)
        head = struct.pack("<4I", seconds, rest // 1000, len(packet.data), packet.length)
        parts.append(head + packet.data)
    return b"".join(parts)


def pcapng_bytes(packets: Iterable[Packet], link_type: int = 1) -> bytes:
    """One section, one interface with nanoseconds."""

    def block(kind: int, body: bytes) -> bytes:
        body += bytes(-len(body) % 4)
        total = struct.pack("<I", 12 + len(body))
        return struct.pack("<I", kind) + total + body + total

    parts = [
        block(0x0A0D0D0A, struct.pack("<IHHq", 0x1A2B3C4D, 1, 0, -1)),
        block(1, struct.pack("<HHI", link_type, 0, 0) + b"\x09\0\x01\0\x09\0\0\0" + bytes(4)),
    ]
    for packet in packets:
        ticks = packet.time_ns
        places = 0, ticks >> 32, ticks & 0xFFFFFFFF, len(packet.data), packet.length
        parts.append(block(6, struct.pack("<5I", *places) + packet.data))
    return b"".join(parts)


def conversation(
    sent: Iterable[tuple[int, bytes]], ports: tuple[int, int] = (50000, 9092), time_ns: int = 0,
    segment_size: int = 1400,
) -> list[Packet]:  # fmt: skip
    """A whole TCP connection that carries `sent`: (side, bytes), side 0 is the client."""
    addresses = (b"\x0a\0\0\x01", b"\x0a\0\0\x02")
    seqs = [1000, 70_000]
    packets: list[Packet] = []
    now = time_ns or 1_700_000_000_000_000_000

    def add(side: int, payload: bytes, flags: int) -> None:
        tcp = struct.pack(
            ">2H2IBBHHH", ports[side], ports[1 - side], seqs[side] & 0xFFFFFFFF,
            seqs[1 - side] & 0xFFFFFFFF if flags & 16 else 0, 0x50, flags, 512, 0, 0,
        )  # fmt: skip
        number = len(packets) + 1
        ip = struct.pack(">BBHHHBBH", 0x45, 0, 40 + len(payload), number & 0xFFFF, 0x4000, 64, 6, 0)
        data = bytes(12) + b"\x08\0" + ip + addresses[side] + addresses[1 - side] + tcp + payload
        packets.append(Packet(now + number * 1_000_000, data, len(data)))
        seqs[side] += len(payload) + (1 if flags & 3 else 0)

    add(0, b"", 2)
    add(1, b"", 18)
    add(0, b"", 16)
    for side, data in sent:
        for start in range(0, len(data), segment_size):
            add(side, data[start : start + segment_size], 24)
    add(0, b"", 17)
    add(1, b"", 17)
    return packets
