"""The index of segments: what `scan` hands to `kafka.assemble`. Payload stays in the file.

A `SegmentBatch` is two plain arrays: the endpoint pairs met, and one row per TCP segment that
points at its payload. Batches pack to bytes, so Spark shuffles them as one binary value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kdissect.arrays import joined
from kdissect.packing import pack, unpack

# One pair of endpoints, ordered: (ip_a, port_a) <= (ip_b, port_b) as bytes. IPv4 is stored as
# IPv4-mapped IPv6 (::ffff:a.b.c.d). `network` is 1 + the VXLAN or GENEVE network id, 0 without.
ENDPOINTS = np.dtype(
    [
        ("ip_a", "u1", (16,)),
        ("ip_b", "u1", (16,)),
        ("port_a", "<u2"),
        ("port_b", "<u2"),
        ("network", "<u4"),
    ]
)

MAPPED = bytes(10) + b"\xff\xff"  # in front of an IPv4 address

# One TCP segment (40 payload-independent bytes and its places). `side` is 0 when sent by a.
# `captured` <= `length`: bytes of payload in the file and on the wire (a snap length cuts).
SEGMENT = np.dtype(
    [
        ("time_ns", "<i8"),
        ("pos", "<i8"),  # of the first payload byte, in its source
        ("packet", "<i8"),  # Wireshark's frame.number in its capture, from 1
        ("seq", "<u4"),
        ("ack", "<u4"),
        ("captured", "<i4"),
        ("length", "<i4"),
        ("source", "<i4"),  # index into the run's list of captures, ordered by first packet
        ("endpoints", "<i4"),  # index into SegmentBatch.endpoints
        ("ip_id", "<u4"),  # 16 bits of it (IPv6: of TCP's timestamps), FRAGMENT_PART, NO_HEADER
        ("flags", "u1"),  # TCP's: FIN 1, SYN 2, RST 4, PSH 8, ACK 16, URG 32
        ("side", "u1"),
        ("window", "<u2"),
    ]
)

FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16

# In ip_id: bytes of an IP fragment that count as no segment of their own (see `ip_fragments`).
FRAGMENT_PART = 1 << 16
# In ip_id: a segment whose TCP header is cut, or makes no sense; only its endpoints are known.
NO_HEADER = 1 << 17


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """endpoints: ENDPOINTS[n]; segments: SEGMENT[m], in file order within a source."""

    endpoints: npt.NDArray[np.void]
    segments: npt.NDArray[np.void]

    def to_bytes(self) -> bytes:
        return pack([self.endpoints, self.segments])

    @staticmethod
    def from_bytes(data: bytes) -> SegmentBatch:
        return SegmentBatch(*unpack(data, (ENDPOINTS, SEGMENT)))

    @staticmethod
    def concat(batches: list[SegmentBatch]) -> SegmentBatch:
        """One batch; equal endpoint pairs become one row."""
        if not batches:
            return SegmentBatch(np.zeros(0, ENDPOINTS), np.zeros(0, SEGMENT))
        return SegmentBatch.numbered(
            [batch.endpoints for batch in batches],
            [len(batch.segments) for batch in batches],
            joined([batch.segments for batch in batches]),
        )

    @staticmethod
    def numbered(
        pairs: list[npt.NDArray[np.void]], counts: list[int], segments: npt.NDArray[np.void]
    ) -> SegmentBatch:
        """`concat` of batches with these pairs and counts of segments, which lie joined already
        and are changed in place."""
        endpoints = np.concatenate(pairs)
        raw = np.frombuffer(endpoints.tobytes(), f"V{ENDPOINTS.itemsize}")
        _, first, inverse = np.unique(raw, return_index=True, return_inverse=True)
        base = 0
        row = 0
        for pair, count in zip(pairs, counts, strict=True):
            rows = slice(row, row + count)
            segments["endpoints"][rows] = inverse[segments["endpoints"][rows] + base]
            base += len(pair)
            row += count
        return SegmentBatch(endpoints[first], segments)
