"""Capture files: read as lists of packets that can be changed, and written again.

`pcap` and `Blocks` write any file byte by byte, also broken ones.
"""

import gzip
import itertools
import random
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.oracles.packets import read_capture

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

    def put(self, at: int, new: bytes) -> "Packet":
        """The packet with `new` over its bytes at `at`, never longer than before."""
        data = self.data[:at] + new + self.data[at + len(new) :]
        return replace(self, data=data[: len(self.data)])

    def with_port(self, old: int, new: int) -> "Packet":
        """The packet with another port in place of `old`, whichever end that is."""
        ports = [new if end[1] == old else end[1] for end in (self.source, self.target)]
        return self.put(self.tcp_pos, struct.pack(">HH", *ports))

    def with_payload(self, payload: bytes) -> "Packet":
        """Another payload, and the IP length that belongs to it."""
        data = self.data[: self.payload_pos] + payload
        total = len(data) - 14
        data = data[:16] + struct.pack(">H", total if total < 65536 else 0) + data[18:]
        return Packet(self.time_ns, data, len(data))


def file_bytes(path: Path) -> bytes:
    """The bytes of a capture, which may be compressed with gzip."""
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def read_packets(path: Path) -> list[Packet]:
    """The packets of an Ethernet capture, as far as it can be read."""
    data = file_bytes(path)
    packets = []
    for row in read_capture(data).packets:
        assert row.link_type == 1, path
        packet = data[row.data_pos : row.data_pos + row.captured]
        packets.append(Packet(row.time_ns, packet, row.length))
    return packets


def pcap_bytes(packets: Iterable[Packet], link_type: int = 1) -> bytes:
    """A pcap with microseconds."""
    packets = list(packets)
    return pcap(
        [packet.data for packet in packets],
        link_type=link_type,
        lengths=[packet.length for packet in packets],
        times=[divmod(packet.time_ns // 1000, 10**6) for packet in packets],
    )


def write_packets(path: Path, packets: Iterable[Packet]) -> Path:
    """Write packets as a pcap; returns its path."""
    path.write_bytes(pcap_bytes(packets))
    return path


def pcapng_bytes(packets: Iterable[Packet]) -> bytes:
    """One section, one interface with nanoseconds."""
    blocks = Blocks()
    return b"".join(
        [
            blocks.section(),
            blocks.interface(resolution=9),
            *(blocks.enhanced(each.data, each.time_ns, length=each.length) for each in packets),
        ]
    )


def lose_packets(capture: Path, path: Path, share: float, seed: int = 1) -> Path:
    """Write a pcap without a random share of its packets, as if a busy machine lost them."""
    dice = random.Random(seed)
    head, packets = split_capture(file_bytes(capture))
    path.write_bytes(head + b"".join(packet for packet in packets if dice.random() >= share))
    return path


def split_capture(capture: bytes) -> tuple[bytes, list[bytes]]:
    """What a file has before its first packet, and each packet with its header or block.

    Of a pcapng, other blocks have to come first.
    """
    reading = read_capture(capture)
    edges = [*(packet.pos for packet in reading.packets), reading.pos]
    return capture[: edges[0]], [capture[a:b] for a, b in itertools.pairwise(edges)]


def pcap(
    packets: Iterable[bytes], *, little: bool = True, nano: bool = False, link_type: int = 1,
    lengths: Sequence[int] | None = None, times: Sequence[tuple[int, int]] | None = None,
) -> bytes:  # fmt: skip
    mark = "<" if little else ">"
    magic = 0xA1B23C4D if nano else 0xA1B2C3D4
    parts = [struct.pack(mark + "IHHiIII", magic, 2, 4, 0, 0, 1 << 18, link_type)]
    for number, packet in enumerate(packets):
        length = lengths[number] if lengths else len(packet)
        seconds, fraction = times[number] if times else (1_700_000_000, number)
        parts.append(struct.pack(mark + "4I", seconds, fraction, len(packet), length) + packet)
    return b"".join(parts)


class Blocks:
    """Writes pcapng blocks of one byte order."""

    def __init__(self, little: bool = True) -> None:
        self.mark = "<" if little else ">"

    def block(self, kind: int, body: bytes) -> bytes:
        body += bytes(-len(body) % 4)
        total = 12 + len(body)
        start = struct.pack(self.mark + "2I", kind, total)
        return start + body + struct.pack(self.mark + "I", total)

    def section(self) -> bytes:
        return self.block(0x0A0D0D0A, struct.pack(self.mark + "IHHq", 0x1A2B3C4D, 1, 0, -1))

    def interface(
        self, link_type: int = 1, snap_length: int = 0, resolution: int | None = None,
        offset_s: int | None = None,
    ) -> bytes:  # fmt: skip
        body = struct.pack(self.mark + "HHI", link_type, 0, snap_length)
        body += self.option(2, b"eth0")
        if resolution is not None:
            body += self.option(9, bytes([resolution]))
        if offset_s is not None:
            body += self.option(14, struct.pack(self.mark + "q", offset_s))
        return self.block(1, body + self.option(0, b""))

    def option(self, code: int, value: bytes) -> bytes:
        return struct.pack(self.mark + "2H", code, len(value)) + value + bytes(-len(value) % 4)

    def enhanced(
        self, packet: bytes, ticks: int = 0, interface: int = 0, length: int | None = None,
        kind: int = 6, captured: int | None = None,
    ) -> bytes:  # fmt: skip
        captured = len(packet) if captured is None else captured
        length = captured if length is None else length
        first = "I" if kind == 6 else "HH"  # the old block has 16 bits, then a count of drops
        numbers = (interface,) if kind == 6 else (interface, 3)
        body = struct.pack(
            self.mark + first + "4I", *numbers, ticks >> 32, ticks & 0xFFFFFFFF, captured, length
        )
        return self.block(kind, body + packet)

    def simple(self, packet: bytes, length: int | None = None) -> bytes:
        length = len(packet) if length is None else length
        return self.block(3, struct.pack(self.mark + "I", length) + packet)

    def secrets(self, data: bytes) -> bytes:
        return self.block(10, struct.pack(self.mark + "2I", 0x544C534B, len(data)) + data)
