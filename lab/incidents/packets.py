"""Packets of the captures that scenes record: little-endian pcap, Ethernet, IPv4, TCP."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from pathlib import Path

_FILE_HEADER, _PACKET_HEADER = 24, 16
_ETHERNET = 14
Packet = tuple[int, bytes]
"""Time in microseconds, and the packet from the lengths of its header on."""


def read_packets(path: Path) -> tuple[bytes, list[Packet]]:
    """The file's header, and its packets."""
    capture, packets, pos = path.read_bytes(), [], _FILE_HEADER
    while pos + _PACKET_HEADER <= len(capture):
        seconds, micros, size = struct.unpack_from("<III", capture, pos)
        end = pos + _PACKET_HEADER + size
        packets.append((seconds * 1_000_000 + micros, capture[pos + 8 : end]))
        pos = end
    return capture[:_FILE_HEADER], packets


def write_packets(path: Path, header: bytes, packets: Sequence[Packet]) -> None:
    """Write a capture anew."""
    parts = [header]
    for micros, data in packets:
        parts += [struct.pack("<II", *divmod(micros, 1_000_000)), data]
    path.write_bytes(b"".join(parts))


def keep_ports(path: Path, ports: Collection[int]) -> None:
    """Remove packets of other ports: the recorder connects to one to see that it captures."""
    header, packets = read_packets(path)
    write_packets(path, header, [one for one in packets if not _ports(one).isdisjoint(ports)])


def _ports(packet: Packet) -> set[int]:
    ip = 8 + _ETHERNET
    header_size = (packet[1][ip] & 15) * 4
    return set(struct.unpack_from(">HH", packet[1], ip + header_size))
