"""Finds the packets that carried exchanges and connections.

A frame is a range of stream positions, and so is a segment. The segment whose bytes in the file
hold a frame's first byte ties stream positions to sequence numbers. So retransmitted copies of a
frame's bytes are found as well, although the frame was read from one copy only.
"""

from __future__ import annotations

import numpy as np

from kdissect.arrays import Indices, Ints, Rows
from kdissect.capture.segments import SegmentBatch
from kdissect.kafka.assembly import Assembly
from kdissect.protocol.model import REQUEST, SIDES

SIZE_PREFIX = 4


def connection_segments(batch: SegmentBatch, assembly: Assembly, connection: int) -> Indices:
    """Return int64[n]: rows of a connection's segments, both directions, in time order."""
    row = assembly.connections[connection]
    segments = batch.segments
    # an assembly's endpoints are numbered as the batch's
    rows = np.flatnonzero(segments["endpoints"] == row["endpoints"])
    times = segments["time_ns"][rows]
    rows = rows[(times >= row["first_time_ns"]) & (times <= row["last_time_ns"])]
    ordered: Indices = rows[np.argsort(segments["time_ns"][rows], kind="stable")]
    return ordered


def frame_segments(
    batch: SegmentBatch, assembly: Assembly, connection: int, exchanges: Indices
) -> Indices:
    """Return int64[n]: rows of the segments that carry a byte of these exchanges of a
    connection."""
    rows = connection_segments(batch, assembly, connection)
    every = assembly.exchanges[assembly.exchanges["connection"] == connection]
    client_side = int(assembly.connections["client_side"][connection])
    parts = []
    for direction, side in enumerate(SIDES):
        sender = client_side if direction == REQUEST else 1 - client_side
        own = rows[batch.segments["side"][rows] == sender]
        column = assembly.exchanges[side][exchanges]
        column = column[column["size"] >= 0]
        if not len(own) or not len(column):
            continue
        segments = batch.segments[own]
        start = _stream_positions(segments, assembly, every[side])
        if start is None:
            begun = np.isin(segments[["source", "packet"]], column[["source", "packet"]])
            parts.append(own[begun])
            continue
        end = start + segments["length"]
        column = column[np.argsort(column["pos"])]
        first, last = column["pos"], column["pos"] + column["size"] + SIZE_PREFIX
        # frames of a stream do not overlap: only the first that ends after the segment's start can
        # match
        frame = np.searchsorted(last, start, "right")
        is_hit = (frame < len(first)) & (end > start)
        is_hit &= first[np.minimum(frame, len(first) - 1)] < end
        parts.append(own[is_hit])
    if not parts:
        return np.zeros(0, np.int64)
    return np.unique(np.concatenate(parts))


def _stream_positions(segments: Rows, assembly: Assembly, column: Rows) -> Indices | None:
    """Return int64[n]: the stream position where each segment (in time order) begins.

    column: one side of the connection's exchanges; the first with captured bytes ties stream
    positions to sequence numbers. None if only size prefixes were captured. Sequence numbers wrap
    at 2^32 (RFC 9293, 3.4): two neighbours are taken to differ by less than 2^31.
    """
    steps: Ints = np.diff(segments["seq"].astype(np.int64))
    steps = (steps + 2**31) % 2**32 - 2**31
    unwrapped = np.concatenate([[0], np.cumsum(steps)])
    for side in column:
        start, count = int(side["extent_start"]), int(side["extent_count"])
        before = SIZE_PREFIX
        for extent in assembly.extents[start : start + count]:
            if extent["source"] >= 0 and extent["length"] > 0:
                inside = extent["pos"] - segments["pos"]
                holds = (segments["source"] == extent["source"]) & (inside >= 0)
                rows = np.flatnonzero(holds & (inside < segments["captured"]))
                if len(rows):
                    at = rows[0]
                    positions: Indices = (
                        unwrapped + side["pos"] + before - inside[at] - unwrapped[at]
                    )
                    return positions
            before += int(extent["length"])
    return None
