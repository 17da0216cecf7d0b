"""From exchanges and connections back to the packets that carried them.

A frame is a range of stream positions, a segment too; which segment holds a frame's first byte in
the file ties stream positions to sequence numbers. So retransmissions of a frame's bytes are found
as well, although its bytes were read from one copy only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture.segments import SegmentBatch
from kdissect.kafka.assembly import AS_CAPTURED, Assembly
from kdissect.protocol.model import REQUEST, RESPONSE

Ints = npt.NDArray[np.int64]
_SIDES = ((REQUEST, "request"), (RESPONSE, "response"))
SIZE_PREFIX = 4


def connection_segments(
    batch: SegmentBatch, assembly: Assembly, connection: int
) -> npt.NDArray[np.int64]:
    """int64[n]: rows of the segments of a connection, both ways, in time order."""
    row = assembly.connections[connection]
    segments = batch.segments
    # an assembly's endpoints are the batch's
    rows = np.flatnonzero(segments["endpoints"] == row["endpoints"])
    times = segments["time_ns"][rows]
    rows = rows[(times >= row["first_time_ns"]) & (times <= row["last_time_ns"])]
    ordered: npt.NDArray[np.int64] = rows[np.argsort(segments["time_ns"][rows], kind="stable")]
    return ordered


def is_carried(assembly: Assembly, exchange: int) -> bool:
    """True where the exchange's bytes are in no packet as they are (TLS)."""
    for _, side in _SIDES:
        column = assembly.exchanges[side][exchange]
        start, count = int(column["extent_start"]), int(column["extent_count"])
        if (assembly.extents["transform"][start : start + count] != AS_CAPTURED).any():
            return True
    return False


def frame_segments(
    batch: SegmentBatch, assembly: Assembly, connection: int, exchanges: Ints
) -> npt.NDArray[np.int64]:
    """int64[n]: rows of the segments that carry a byte of these exchanges of a connection."""
    rows = connection_segments(batch, assembly, connection)
    client_side = int(assembly.connections["client_side"][connection])
    found = []
    for direction, side in _SIDES:
        sender = client_side if direction == REQUEST else 1 - client_side
        own = rows[batch.segments["side"][rows] == sender]
        column = assembly.exchanges[side][exchanges]
        column = column[column["size"] >= 0]
        if not len(own) or not len(column):
            continue
        start = _stream_positions(batch.segments[own], assembly, column)
        end = start + batch.segments["length"][own]
        first = np.sort(column["pos"])
        last = column["pos"][np.argsort(column["pos"])] + column["size"] + SIZE_PREFIX
        # frames of a stream do not overlap: the first that ends behind the segment's start decides
        frame = np.searchsorted(last, start, "right")
        is_hit = (frame < len(first)) & (end > start)
        is_hit &= first[np.minimum(frame, len(first) - 1)] < end
        found.append(own[is_hit])
    if not found:
        return np.zeros(0, np.int64)
    return np.unique(np.concatenate(found))


def _stream_positions(
    segments: npt.NDArray[np.void], assembly: Assembly, column: npt.NDArray[np.void]
) -> Ints:
    """int64[n]: the stream position where each segment (in time order) begins.

    column: one side of some exchanges; the first of them that has captured bytes ties the two
    counts. Between segments the sequence number moves by less than 2^31, so that differences tell
    how often it wrapped.
    """
    steps: Any = np.diff(segments["seq"].astype(np.int64))
    steps = (steps + 2**31) % 2**32 - 2**31
    unwrapped = np.concatenate([[0], np.cumsum(steps)])
    order = np.lexsort((segments["pos"], segments["source"]))
    places = segments[order]
    for side in column:
        start, count = int(side["extent_start"]), int(side["extent_count"])
        before = SIZE_PREFIX
        for extent in assembly.extents[start : start + count]:
            if extent["source"] >= 0 and extent["length"] > 0:
                key = (int(extent["source"]), int(extent["pos"]))
                at = _holding(places, *key)
                if at >= 0:
                    inside = key[1] - int(places["pos"][at])
                    offset = int(side["pos"]) + before - inside - int(unwrapped[order[at]])
                    positions: Ints = unwrapped + offset
                    return positions
            before += int(extent["length"])
    # nothing of these frames was captured behind their size prefixes
    return np.full(len(segments), -1, np.int64)


def _holding(places: npt.NDArray[np.void], source: int, pos: int) -> int:
    """The segment, of some sorted by place, whose captured payload holds a byte; -1 for none."""
    of_source = np.searchsorted(places["source"], [source, source + 1])
    starts = places["pos"][of_source[0] : of_source[1]]
    at = int(np.searchsorted(starts, pos, "right")) - 1 + int(of_source[0])
    while at >= of_source[0]:
        segment = places[at]
        if int(segment["pos"]) + int(segment["captured"]) > pos:
            return at
        if segment["captured"] > 0:
            return -1
        at -= 1  # an empty segment may lie at the same place
    return -1
