"""A small reader of plain Ethernet pcap files for the stream tests: no fragments, no tunnels.

It is not the product's scanner: the tests of `kafka` stand on their own.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from kdissect.capture.segments import ENDPOINTS, SEGMENT, SegmentBatch


class Memory:
    """Captures in memory, as `assemble` wants its sources."""

    def __init__(self, *contents: bytes) -> None:
        self.arrays = [np.frombuffer(bytes(data) or b"\0", np.uint8) for data in contents]
        self.bases = np.array([array.ctypes.data for array in self.arrays], np.uint64)
        self.sizes = np.array([len(data) for data in contents], np.int64)

    def addresses(self, source: np.ndarray, pos: np.ndarray, _: np.ndarray) -> np.ndarray:
        return self.bases[source] + pos.astype(np.uint64)


def read_capture(path: Path, source: int = 0) -> tuple[SegmentBatch, bytes]:
    """The TCP segments of an Ethernet pcap (microseconds or nanoseconds)."""
    data = path.read_bytes()
    order = "<" if data[:4] in (b"\xd4\xc3\xb2\xa1", b"\x4d\x3c\xb2\xa1") else ">"
    unit = 1 if data[:4] in (b"\x4d\x3c\xb2\xa1", b"\xa1\xb2\x3c\x4d") else 1000
    header = struct.Struct(order + "IIII")
    pairs: dict[bytes, int] = {}
    rows = []
    pos, packet = 24, 0
    while pos + 16 <= len(data):
        seconds, fraction, captured, _ = header.unpack_from(data, pos)
        start, pos, packet = pos + 16, pos + 16 + captured, packet + 1
        if pos > len(data):
            break
        kind = data[start + 12 : start + 14]
        ip = start + 14
        if kind == b"\x08\x00" and data[ip + 9] == 6:
            tcp = ip + (data[ip] & 15) * 4
            ip_end = ip + int.from_bytes(data[ip + 2 : ip + 4], "big")
            ip_id = int.from_bytes(data[ip + 4 : ip + 6], "big")
            prefix = bytes(10) + b"\xff\xff"
            sender, receiver = prefix + data[ip + 12 : ip + 16], prefix + data[ip + 16 : ip + 20]
        elif kind == b"\x86\xdd" and data[ip + 6] == 6:
            tcp = ip + 40
            ip_end = tcp + int.from_bytes(data[ip + 4 : ip + 6], "big")
            ip_id = 0
            sender, receiver = data[ip + 8 : ip + 24], data[ip + 24 : ip + 40]
        else:
            continue
        sport, dport, seq, ack, size, flags, window = struct.unpack_from(">HHIIBBH", data, tcp)
        payload = tcp + (size >> 4) * 4
        side = int((sender, sport) > (receiver, dport))
        ends = ((sender, sport), (receiver, dport))
        (ip_a, port_a), (ip_b, port_b) = ends[::-1] if side else ends
        key = ip_a + ip_b + struct.pack("<HHI", port_a, port_b, 0)
        pair = pairs.setdefault(key, len(pairs))
        length = max(0, ip_end - payload)
        rows.append(
            (
                seconds * 10**9 + fraction * unit,
                payload,
                packet,
                seq,
                ack,
                min(length, max(0, pos - payload)),
                length,
                source,
                pair,
                ip_id,
                flags & 63,
                side,
                window,
            )
        )
    endpoints = np.frombuffer(b"".join(pairs), ENDPOINTS)
    return SegmentBatch(endpoints, np.array(rows, SEGMENT)), data
