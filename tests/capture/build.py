"""Captures and packets built by hand, byte by byte, for the tests of this folder."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from kdissect.capture.inputs import InputFile, find_captures, spool
from kdissect.capture.scan import ScanResult, scan
from kdissect.capture.segments import SegmentBatch
from kdissect.capture.splits import CaptureInfo, Sources, Split, plan_splits
from tests.oracles.link_layers import Segment

# Packets.


def tcp(
    payload: bytes = b"", *, ports: tuple[int, int] = (40000, 9092), seq: int = 1, ack: int = 2,
    flags: int = 24, options: bytes = b"", window: int = 512,
) -> bytes:  # fmt: skip
    offset = (20 + len(options)) // 4 << 4
    header = struct.pack(">2H2IBBHHH", *ports, seq, ack, offset, flags, window, 0, 0)
    return header + options + payload


def ipv4(
    content: bytes, *, addresses: tuple[str, str] = ("10.0.0.1", "10.0.0.2"), protocol: int = 6,
    options: bytes = b"", ip_id: int = 7, fragment: int = 0x4000, total: int | None = None,
) -> bytes:  # fmt: skip
    size = 20 + len(options)
    total = size + len(content) if total is None else total
    start = struct.pack(">BBHHHBBH", 0x40 | size // 4, 0, total, ip_id, fragment, 64, protocol, 0)
    places = b"".join(ipaddress.IPv4Address(address).packed for address in addresses)
    return start + places + options + content


def ipv6(
    content: bytes, *, addresses: tuple[str, str] = ("fd00::1", "fd00::2"), following: int = 6,
    length: int | None = None,
) -> bytes:  # fmt: skip
    length = len(content) if length is None else length
    places = b"".join(ipaddress.IPv6Address(address).packed for address in addresses)
    return struct.pack(">IHBB", 6 << 28, length, following, 64) + places + content


def ethernet(content: bytes, ethertype: int = 0x0800, tags: Sequence[int] = ()) -> bytes:
    kinds = [*tags, ethertype]
    behind = b"".join(struct.pack(">HH", 100, kind) for kind in kinds[1:])
    return bytes(12) + struct.pack(">H", kinds[0]) + behind + content


def udp(content: bytes, port: int) -> bytes:
    return struct.pack(">4H", 50000, port, 8 + len(content), 0) + content


def vxlan(content: bytes, network: int = 42) -> bytes:
    return udp(struct.pack(">II", 8 << 24, network << 8) + content, 4789)


def geneve(
    content: bytes, network: int = 42, ethertype: int = 0x6558, options: bytes = b""
) -> bytes:
    header = struct.pack(">BBHI", len(options) // 4, 0, ethertype, network << 8)
    return udp(header + options + content, 6081)


# Files.


def pcap(
    packets: Iterable[bytes], *, little: bool = True, nano: bool = False, link_type: int = 1,
    lengths: Sequence[int] | None = None, times: Sequence[tuple[int, int]] | None = None,
) -> bytes:  # fmt: skip
    mark = "<" if little else ">"
    magic = 0xA1B23C4D if nano else 0xA1B2C3D4
    parts = [struct.pack(mark + "IHHiIII", magic, 2, 4, 0, 0, 65535, link_type)]
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


# Reading them.


def write(folder: Path, data: bytes, name: str = "made.pcap") -> InputFile:
    path = folder / name
    path.write_bytes(data)
    return spool(find_captures([path])[0], folder)


def read(
    file: InputFile, split_bytes: int = 1 << 30
) -> tuple[CaptureInfo, list[Split], list[ScanResult], Sources]:
    plan = plan_splits([file], split_bytes)
    results = [scan(split, plan.sources, plan.fragments) for split in plan.splits]
    return plan.captures[0], plan.splits, results, plan.sources


def written_out(batch: SegmentBatch) -> list[Segment]:
    """A batch's rows as the oracle gives them."""
    pairs = [
        (bytes(row["ip_a"]), int(row["port_a"]), bytes(row["ip_b"]), int(row["port_b"]),
         int(row["network"]))
        for row in batch.endpoints
    ]  # fmt: skip
    names = [name for name in Segment._fields if name != "endpoints"]
    columns = {name: batch.segments[name].tolist() for name in names}
    columns["endpoints"] = [pairs[row] for row in batch.segments["endpoints"].tolist()]
    return [Segment(*row) for row in zip(*(columns[n] for n in Segment._fields), strict=True)]


def segments_of(results: Iterable[ScanResult]) -> list[Segment]:
    return [segment for result in results for segment in written_out(result.batch)]


def ignored_of(results: Iterable[ScanResult]) -> dict[str, int]:
    total: dict[str, int] = {}
    for result in results:
        for name, count in result.ignored_reasons.items():
            total[name] = total.get(name, 0) + count
    return total
