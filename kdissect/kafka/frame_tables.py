"""The tables that framing writes: frames, extents of their bytes, and faults."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kdissect.arrays import Rows
from kdissect.jit import kernel, making_kernel, making_part
from kdissect.kafka.assembly import ANOMALY, EXTENT, Anomaly
from kdissect.tcp.byte_ranges import find, grown, int64

EXPECTS, TOKEN, SILENT = 0, 1, 2  # kind of a request; a response is EXPECTS or TOKEN
# Before a frame: another one or the stream's beginning, bytes in no frame, or a beginning that was
# not captured.
NO_HOLE, HOLE, BEGINNING = 0, 1, 2

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
        ("first", "i8"),  # segments of the first and the last captured byte
        ("last", "i8"),
        ("extent_start", "i8"),
        ("extent_count", "i8"),
        ("captured", "i8"),  # number of captured bytes, with the size prefix
        ("hole", "i8"),  # what directly precedes it: NO_HOLE, HOLE or BEGINNING
        # filled by `pairing.pair`:
        ("partner", "i8"),  # row of the response or the request, -1 without one
        ("outcome", "i8"),  # of a request its PairStatus, of a response how it came
        ("is_lost", "i8"),  # of a request: its response was in a hole
    ]
)

# Why bytes are unframed: `a` of the anomaly. `b` is the size that was read there, or -1.
AFTER_GAP, BAD_SIZE, HEADER_CUT, NO_BOUNDARY, NOT_DECRYPTED = 0, 1, 2, 3, 4

_SHOWN_MAX = 256  # unframed bytes shown with their anomaly
FRAMES, EXTENTS, FAULTS = 0, 1, 2  # indices into `used`, the number of rows in each table

# A fault without bytes to show, at no place yet.
FAULT = np.zeros(1, ANOMALY)
FAULT["source"] = -1


class Tables(NamedTuple):
    """Tables that grow, and the number of rows used in each.

    faults: ANOMALY rows; `packet` is the row of a segment, and `source` is not known yet.
    """

    frames: Rows  # FRAME
    extents: Rows  # EXTENT
    faults: Rows
    used: Any  # int64[3]


@making_part
def empty_tables() -> Any:
    """`Tables` without rows."""
    return Tables(
        np.empty(1024, FRAME), np.empty(1024, EXTENT), np.empty(64, ANOMALY), np.zeros(3, np.int64)
    )


@kernel
def extents_max(pieces: Any, index: int, stop: int, end: int) -> int:
    """Upper bound on the extents of bytes up to `end` that begin in or before piece `index`.

    Each piece can have a hole before and after it.
    """
    behind = index
    while behind < stop and pieces[behind]["pos"] < end:
        behind += 1
    return 2 * (behind - index) + 1


@kernel
def _put_extents(
    stream: Any, source: Any, index: int, begin: int, end: int, extents: Any, used: Any
) -> int:
    """Append the extents of the bytes [begin, end), holes included; returns the captured bytes.

    The table must have room for `extents_max` rows.
    """
    pieces, stop = stream.pieces, stream.stop
    captured = int64(0)
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
            extent["source"] = source[pieces[index]["segment"]]
            captured += until - here
        extent["length"] = until - here
        used[EXTENTS] += 1
        here = until
    return captured


@kernel
def put_frame(
    stream: Any, source: Any, times: Any, index: int, header: Any, kind: int, walk: Any, tables: Any
) -> None:
    """Append the frame at the walk's position, whose size prefix was captured.

    The tables must have room for it, and for `extents_max` rows of its bytes.
    """
    pieces, pos, used = stream.pieces, walk["pos"], tables.used
    end = pos + 4 + header["size"]
    frame = tables.frames[used[FRAMES]]
    used[FRAMES] += 1
    frame["connection"] = walk["connection"]
    frame["time"] = times[pieces[index]["segment"]]
    frame["pos"] = pos
    frame["size"] = header["size"]
    frame["api_key"] = header["key"]
    frame["api_version"] = header["api_version"]
    frame["correlation"] = header["correlation"]
    frame["kind"] = kind
    frame["hole"] = HOLE if pos != walk["covered"] else NO_HOLE
    if walk["reason"] == NO_BOUNDARY:
        frame["hole"] = BEGINNING
    frame["partner"] = -1
    frame["outcome"] = 0
    frame["is_lost"] = 0
    frame["first"] = pieces[index]["segment"]
    first = used[EXTENTS]
    captured = _put_extents(stream, source, index, pos + 4, end, tables.extents, used)
    frame["extent_start"] = first
    frame["extent_count"] = used[EXTENTS] - first
    frame["captured"] = captured + 4
    last = find(pieces, index, stream.stop, end - 1)
    if last >= stream.stop or pieces[last]["pos"] >= end:
        last -= 1
    frame["last"] = pieces[last]["segment"]


@making_kernel
def _put_fault(
    faults: Any, used: Any, kind: int, direction: int, connection: int, segment: int, pos: int,
    count: int,
) -> Any:  # fmt: skip
    """Append a fault without bytes to show; returns the table."""
    faults = grown(faults, used[FAULTS], 1)
    faults[used[FAULTS]] = FAULT[0]
    fault = faults[used[FAULTS]]
    used[FAULTS] += 1
    fault["kind"] = kind
    fault["direction"] = direction
    fault["connection"] = connection
    fault["packet"] = segment
    fault["pos"] = pos
    fault["byte_count"] = count
    return faults


@making_kernel
def put_unframed(stream: Any, source: Any, end: int, direction: int, walk: Any, tables: Any) -> Any:
    """Append a fault for the captured bytes from the last frame to `end`, if any; the tables."""
    pieces, stop, used, begin = stream.pieces, stream.stop, tables.used, walk["covered"]
    index = find(pieces, stream.start, stop, begin)
    if index >= stop or pieces[index]["pos"] >= end:
        return tables
    first = max(begin, pieces[index]["pos"])
    count = int64(0)
    number = index
    while number < stop and pieces[number]["pos"] < end:
        last = min(end, pieces[number]["end"])
        count += last - max(begin, pieces[number]["pos"])
        number += 1
    faults = _put_fault(
        tables.faults, used, int64(Anomaly.UNFRAMED_BYTES), direction, walk["connection"],
        pieces[index]["segment"], first, count,
    )  # fmt: skip
    before = used[EXTENTS]
    shown = min(end, first + _SHOWN_MAX)
    extents = grown(tables.extents, before, extents_max(pieces, index, stop, shown))
    _put_extents(stream, source, index, first, shown, extents, used)
    fault = faults[used[FAULTS] - 1]
    fault["a"] = walk["reason"]
    fault["b"] = walk["bad_size"]
    fault["extent_start"] = before
    fault["extent_count"] = used[EXTENTS] - before
    return Tables(tables.frames, extents, faults, used)


@making_kernel
def put_gaps(stream: Any, end: int, direction: int, connection: int, faults: Any, used: Any) -> Any:
    """Note the holes of a stream that is known to be `end` bytes long; the table of faults."""
    pieces = stream.pieces
    here = int64(0)
    segment = int64(-1)
    for index in range(stream.start, stream.stop + 1):
        until = pieces[index]["pos"] if index < stream.stop else end
        if index < stream.stop:
            segment = pieces[index]["segment"]
        if until > here:
            faults = _put_fault(
                faults, used, int64(Anomaly.GAP), direction, connection, segment, here,
                until - here,
            )  # fmt: skip
        if index < stream.stop:
            here = pieces[index]["end"]
    return faults
