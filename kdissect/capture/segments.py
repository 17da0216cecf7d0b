"""The index of TCP segments that `scan` passes to `kafka.assemble`. Payload stays in the file.

A `SegmentBatch` has two arrays: the endpoint pairs, and one row per segment that points at its
payload. Batches are packed to bytes, so that Spark shuffles each as one binary value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kdissect.arrays import Array, Indices, Ints, Rows, joined, stable_order
from kdissect.packing import pack, unpack

# A pair of endpoints, ordered as bytes: (ip_a, port_a) <= (ip_b, port_b). IPv4 is stored as
# IPv4-mapped IPv6 (::ffff:a.b.c.d). `network` is 1 + the VXLAN or GENEVE network id, or 0.
ENDPOINTS = np.dtype(
    [
        ("ip_a", "u1", (16,)),
        ("ip_b", "u1", (16,)),
        ("port_a", "<u2"),
        ("port_b", "<u2"),
        ("network", "<u4"),
    ]
)

MAPPED = bytes(10) + b"\xff\xff"  # precedes an IPv4 address

# One TCP segment. `side` is 0 if endpoint a sent it. `captured` <= `length`: payload bytes in the
# file and on the wire (a snap length cuts).
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
        ("ip_id", "<u2"),  # where IP has none or 0, 16 bits of TCP's options
        ("marks", "u1"),  # FRAGMENT_PART, NO_HEADER, COUNTED_BEFORE
        # of a SYN: 1 + the number of 32-bit words of TCP options, which lie before `pos` in the
        # source; 0 if they are cut, or if the SYN came in IP fragments
        ("option_words", "u1"),
        ("flags", "u1"),  # TCP's: FIN 1, SYN 2, RST 4, PSH 8, ACK 16, URG 32
        ("side", "u1"),
        ("window", "<u2"),
    ]
)

# A packed batch has a column for each field: some as they follow in the file, the others by sender,
# and of those that grow the differences. So most bytes are those of the row before.
_IN_FILE = ("time_ns", "pos", "packet", "source", "endpoints", "side")
_COLUMNS = (*_IN_FILE, *(name for name in SEGMENT.names or () if name not in _IN_FILE))
_GROWING = ("time_ns", "pos", "packet", "seq", "ack")

FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16

FRAGMENT_PART = 1  # bytes of an IP fragment that are not counted as a segment (`ip_fragments`)
NO_HEADER = 2  # the segment's TCP header is cut or malformed; only its endpoints are known
COUNTED_BEFORE = 4  # an earlier window counted the segment (`resume.carry`)
NOT_COUNTED = FRAGMENT_PART | COUNTED_BEFORE


def option_sizes(segments: Rows) -> Ints:
    """int64[n]: bytes of TCP options directly before the payload; -1 if they are not available.

    Only a SYN's options are available.
    """
    words = segments["option_words"].astype(np.int64)
    return 4 * words - np.where(words > 0, 4, 1)


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """endpoints: ENDPOINTS[n]. segments: SEGMENT[m], in file order within a source."""

    endpoints: Rows
    segments: Rows

    def to_bytes(self) -> bytes:
        """Pack the batch for a shuffle."""
        order = _sender_order(self.segments["endpoints"], self.segments["side"])
        columns = []
        for name in _COLUMNS:
            column = self.segments[name]
            if name not in _IN_FILE:
                column = column[order]
            if name in _GROWING:
                column = np.diff(column, prepend=column.dtype.type(0))
            columns.append(column)
        return pack([self.endpoints, *columns])

    @staticmethod
    def from_bytes(data: bytes) -> SegmentBatch:
        """Unpack the batch that `to_bytes` packed."""
        kinds = [SEGMENT[name] for name in _COLUMNS]
        endpoints, *arrays = unpack(data, (ENDPOINTS, *kinds))
        columns = dict(zip(_COLUMNS, arrays, strict=True))
        segments = np.empty(len(arrays[0]), SEGMENT)
        order = _sender_order(columns["endpoints"], columns["side"])
        for name, column in columns.items():
            values = np.cumsum(column, dtype=column.dtype) if name in _GROWING else column
            segments[name][slice(None) if name in _IN_FILE else order] = values
        return SegmentBatch(endpoints, segments)

    @staticmethod
    def concat(batches: list[SegmentBatch]) -> SegmentBatch:
        """One batch with all segments; equal endpoint pairs become one row."""
        if not batches:
            return SegmentBatch(np.zeros(0, ENDPOINTS), np.zeros(0, SEGMENT))
        return SegmentBatch.numbered(
            [batch.endpoints for batch in batches],
            [len(batch.segments) for batch in batches],
            joined([batch.segments for batch in batches]),
        )

    @staticmethod
    def numbered(pairs: list[Rows], counts: list[int], segments: Rows) -> SegmentBatch:
        """One batch from the endpoint pairs and segment counts of several.

        segments: of all batches, concatenated; changed in place.
        """
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


def _sender_order(endpoints: Ints, side: Array) -> Indices:
    """int64[n]: the segments by endpoints and side, those of one sender in file order."""
    return stable_order(2 * endpoints.astype(np.int64) + side)
