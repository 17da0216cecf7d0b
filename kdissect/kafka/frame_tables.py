"""The tables that framing writes: frames, extents of their bytes, and faults."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kdissect.arrays import Indices, Rows, Struct
from kdissect.jit import inlined, int64, kernel
from kdissect.kafka.assembly import ANOMALY, EXTENT, Anomaly
from kdissect.kafka.walk import STREAM, Stream
from kdissect.tcp.byte_ranges import find

EXPECTS, TOKEN, SILENT = 0, 1, 2  # kind of a request; a response is EXPECTS or TOKEN
# What is before a frame: another one, or the beginning of the stream; a break, that is bytes in no
# frame; what was sent before the capture began.
NO_BREAK, BREAK, NOT_CAPTURED = 0, 1, 2

FRAME = np.dtype(
    [
        ("connection", "i8"),  # row of its connection
        ("time", "i8"),  # ns when its first byte was captured
        ("pos", "i8"),
        ("size", "i8"),
        ("api_key", "i8"),
        ("api_version", "i8"),
        ("correlation", "i8"),  # unsigned id
        ("kind", "i8"),  # EXPECTS, TOKEN or SILENT
        ("first", "i8"),  # segment of the first byte
        ("last", "i8"),  # the latest segment
        ("extent_start", "i8"),
        ("extent_count", "i8"),
        ("captured", "i8"),  # number of captured bytes, with the size prefix
        ("before", "i8"),  # what directly precedes it: NO_BREAK, BREAK or NOT_CAPTURED
        ("after", STREAM),  # the stream from its end on
        # filled by `pairing.pair`:
        ("partner", "i8"),  # row of the response or the request, -1 without one
        ("outcome", "i8"),  # of a request its PairStatus, of a response how it came
        ("is_lost", "i8"),  # of a request: its response was in a break
    ]
)

NO_FRAMES = np.zeros(0, FRAME)

# Why bytes are unframed: `reason` of the anomaly. `tables.anomalies` has the words.
SIZE_MISSING, NO_FRAME, HEADER_MISSING, MID_STREAM, NOT_DECRYPTED = 0, 1, 2, 3, 4

_SHOWN_MAX = 256  # unframed bytes shown with their anomaly
_EXTENTS_SHOWN = 2 * _SHOWN_MAX + 1  # most extents of these
EXTENTS_AT_ONCE = 1 << 16
FRAMES, EXTENTS, FAULTS = 0, 1, 2  # indices into `used`, the number of rows in each table


class Tables(NamedTuple):
    """Room for the results of some steps of a walk, and the number of rows used in each table.

    faults: ANOMALY rows; `packet` is the row of a segment, and `source` is not known yet.
    """

    frames: Rows  # FRAME
    extents: Rows  # EXTENT
    faults: Rows
    used: Indices  # [3]


def new_tables(frame_count: int, extent_count: int) -> Tables:
    """Empty tables with room for so many frames and extents, and for a fault before each frame."""
    extents = np.empty(extent_count + _EXTENTS_SHOWN, EXTENT)
    frames, faults = np.empty(frame_count, FRAME), np.empty(frame_count, ANOMALY)
    return Tables(frames, extents, faults, np.zeros(3, np.int64))


@inlined
def has_room(tables: Tables, extent_count: int) -> bool:
    """Return whether a frame with so many extents fits, and a fault before it."""
    used = tables.used
    if used[FRAMES] == len(tables.frames) or used[FAULTS] == len(tables.faults):
        return False
    return used[EXTENTS] + extent_count + _EXTENTS_SHOWN <= len(tables.extents)


@kernel
def extents_max(stream: Stream, index: int, end: int) -> int:
    """Upper bound on the extents of bytes up to `end` that begin in or before piece `index`.

    Each piece can have a gap before and after it.
    """
    behind = index
    while behind < stream.stop and stream.pieces[behind]["pos"] < end:
        behind += 1
    return 2 * (behind - index) + 1


@kernel
def _put_extents(
    stream: Stream, index: int, begin: int, end: int, tables: Tables
) -> tuple[int, int]:
    """Append the extents of the bytes [begin, end), gaps included.

    Returns the number of captured bytes and the latest segment of these and of piece `index`.
    """
    pieces, stop = stream.pieces, stream.stop
    extents, used = tables.extents, tables.used
    captured = int64(0)
    latest = int64(pieces[index]["segment"])
    here = begin
    while here < end:
        while index < stop and pieces[index]["end"] <= here:
            index += 1
        extent = extents[used[EXTENTS]]
        if index >= stop or pieces[index]["pos"] > here:
            until = end if index >= stop else min(end, pieces[index]["pos"])
            extent["pos"] = 0
            extent["source"] = -1
        else:
            until = min(end, pieces[index]["end"])
            extent["pos"] = pieces[index]["file_pos"] + (here - pieces[index]["pos"])
            segment = int64(pieces[index]["segment"])
            extent["source"] = stream.source[segment]
            captured += until - here
            if stream.times[segment] >= stream.times[latest]:
                latest = segment
        extent["length"] = until - here
        used[EXTENTS] += 1
        here = until
    return captured, latest


@kernel
def put_frame(stream: Stream, index: int, kind: int, walk: Struct, tables: Tables) -> None:
    """Append the frame at the walk's position, whose size prefix was captured, and step over it.

    The tables must have room for it (`has_room`).
    """
    pieces, pos, used, header = stream.pieces, walk["pos"], tables.used, walk["header"]
    end = pos + 4 + header["size"]
    frame = tables.frames[used[FRAMES]]
    used[FRAMES] += 1
    frame["connection"] = walk["connection"]
    frame["time"] = stream.times[pieces[index]["segment"]]
    frame["pos"] = pos
    frame["size"] = header["size"]
    frame["api_key"] = header["key"]
    frame["api_version"] = header["api_version"]
    frame["correlation"] = header["correlation"]
    frame["kind"] = kind
    if pos != walk["covered"]:
        frame["before"] = BREAK
    else:
        frame["before"] = NOT_CAPTURED if walk["reason"] == MID_STREAM else NO_BREAK
    frame["partner"] = -1
    frame["outcome"] = 0
    frame["is_lost"] = 0
    frame["first"] = pieces[index]["segment"]
    first = used[EXTENTS]
    captured, frame["last"] = _put_extents(stream, index, pos + 4, end, tables)
    frame["extent_start"] = first
    frame["extent_count"] = used[EXTENTS] - first
    frame["captured"] = captured + 4
    after = frame["after"]
    after["is_boundary"] = after["was_framed"] = 1
    after["in_tokens"] = walk["in_tokens"]
    after["is_young"] = walk["is_young"]
    after["last_id"] = walk["last_id"]
    walk["pos"] = end
    walk["covered"] = end
    walk["reason"] = SIZE_MISSING
    walk["size_read"] = -1


@kernel
def put_unframed(stream: Stream, end: int, walk: Struct, tables: Tables) -> None:
    """Append a fault for the captured bytes from the last frame to `end`, if any.

    The tables must have room for it (`has_room`).
    """
    pieces, stop, used, begin = stream.pieces, stream.stop, tables.used, walk["covered"]
    index = find(pieces, stream.start, stop, begin)
    if index >= stop or pieces[index]["pos"] >= end:
        return
    first = max(begin, pieces[index]["pos"])
    count = int64(0)
    number = index
    while number < stop and pieces[number]["pos"] < end:
        last = min(end, pieces[number]["end"])
        count += last - max(begin, pieces[number]["pos"])
        number += 1
    fault = tables.faults[used[FAULTS]]
    used[FAULTS] += 1
    fault["kind"] = int64(Anomaly.UNFRAMED_BYTES)
    fault["direction"] = walk["direction"]
    fault["connection"] = walk["connection"]
    fault["packet"] = pieces[index]["segment"]
    fault["source"] = -1
    fault["pos"] = first
    fault["byte_count"] = count
    fault["exchange_id"] = fault["other"] = 0
    fault["reason"] = walk["reason"]
    fault["number"] = walk["size_read"]
    before = used[EXTENTS]
    _put_extents(stream, index, first, min(end, first + _SHOWN_MAX), tables)
    fault["extent_start"] = before
    fault["extent_count"] = used[EXTENTS] - before
