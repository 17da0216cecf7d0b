"""Packets built by hand, layer by layer: `ethernet(ipv4(tcp(b"payload")))`."""

import ipaddress
import struct
from collections.abc import Sequence

NETWORK = 42  # of tunnels


def tcp(
    payload: bytes = b"", *, ports: tuple[int, int] = (40000, 9092), seq: int = 1, ack: int = 2,
    flags: int = 24, options: bytes = b"",
) -> bytes:  # fmt: skip
    offset = (20 + len(options)) // 4 << 4
    header = struct.pack(">2H2IBBHHH", *ports, seq, ack, offset, flags, 512, 0, 0)
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


def ipv6(content: bytes, *, following: int = 6, length: int | None = None) -> bytes:
    length = len(content) if length is None else length
    places = ipaddress.IPv6Address("fd00::1").packed + ipaddress.IPv6Address("fd00::2").packed
    return struct.pack(">IHBB", 6 << 28, length, following, 64) + places + content


def ethernet(content: bytes, ethertype: int = 0x0800, tags: Sequence[int] = ()) -> bytes:
    kinds = [*tags, ethertype]
    behind = b"".join(struct.pack(">HH", 100, kind) for kind in kinds[1:])
    return bytes(12) + struct.pack(">H", kinds[0]) + behind + content


def udp(content: bytes, port: int) -> bytes:
    return struct.pack(">4H", 50000, port, 8 + len(content), 0) + content


def vxlan(content: bytes) -> bytes:
    return udp(struct.pack(">II", 8 << 24, NETWORK << 8) + content, 4789)


def geneve(content: bytes, ethertype: int = 0x6558, options: bytes = b"") -> bytes:
    header = struct.pack(">BBHI", len(options) // 4, 0, ethertype, NETWORK << 8)
    return udp(header + options + content, 6081)
