"""The tables that framing writes: frames, extents of their bytes, and faults."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdissect.jit import kernel, making_kernel, making_part
from kdissect.kafka.assembly import WARNING, Anomaly
from kdissect.tcp.byte_ranges import find, grown, int64

# Columns of a frame. CONNECTION: row of its connection. FIRST, LAST: segments of the first and the
# last captured byte. CAPTURED: number of captured bytes, with the size prefix.
(
    CONNECTION, POS, FRAME_SIZE, API_KEY, VERSION, ID, KIND, FIRST, LAST, EXTENT_START,
    EXTENT_COUNT, CAPTURED,
) = range(12)  # fmt: skip
FRAME_WIDTH = 12
EXPECTS, TOKEN, SILENT = 0, 1, 2  # KIND of a request; a response is EXPECTS or TOKEN

EXTENT_WIDTH = 3  # position in the source, length, source (-1: missing)

# Columns of a fault. FAULT_FRAME: row of the frame that it is about, or -1.
(
    FAULT_KIND, SEVERITY, DIRECTION, FAULT_CONNECTION, FAULT_SEGMENT, FAULT_POS, FAULT_BYTES,
    FAULT_A, FAULT_B, FAULT_EXTENT, FAULT_EXTENTS, FAULT_FRAME,
) = range(12)  # fmt: skip
FAULT_WIDTH = 12

# Why bytes are unframed: `a` of the anomaly. `b` is the size that was read there, or -1.
AFTER_GAP, BAD_SIZE, HEADER_CUT, NO_BOUNDARY, NOT_DECRYPTED = 0, 1, 2, 3, 4

_SHOWN_MAX = 256  # unframed bytes shown with their anomaly
FRAMES, EXTENTS, FAULTS = 0, 1, 2  # indices into `used`, the number of rows in each table


@making_part
def empty_tables() -> Any:
    """(frames, extents, faults, used): empty tables, and the number of rows in each."""
    frames = np.empty(1024 * FRAME_WIDTH, np.int64)
    extents = np.empty(1024 * EXTENT_WIDTH, np.int64)
    faults = np.empty(64 * FAULT_WIDTH, np.int64)
    return frames, extents, faults, np.zeros(3, np.int64)


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
def put_extents(
    pieces: Any, source: Any, index: int, stop: int, begin: int, end: int, extents: Any, used: Any
) -> int:
    """Append the extents of the bytes [begin, end), holes included; returns the captured bytes.

    The table must have room for `extents_max` rows.
    """
    captured = int64(0)
    here = begin
    while here < end:
        while index < stop and pieces[index]["end"] <= here:
            index += 1
        at = used[EXTENTS] * EXTENT_WIDTH
        if index >= stop or pieces[index]["pos"] > here:
            until = end if index >= stop else min(end, pieces[index]["pos"])
            extents[at] = 0
            extents[at + 1] = until - here
            extents[at + 2] = -1
        else:
            until = min(end, pieces[index]["end"])
            extents[at] = pieces[index]["file_pos"] + (here - pieces[index]["pos"])
            extents[at + 1] = until - here
            extents[at + 2] = source[pieces[index]["segment"]]
            captured += until - here
        used[EXTENTS] += 1
        here = until
    return captured


@kernel
def put_frame(
    pieces: Any, source: Any, index: int, stop: int, connection: int, pos: int, header: Any,
    kind: int, frames: Any, extents: Any, used: Any,
) -> None:  # fmt: skip
    """Append the frame at `pos`, whose size prefix was captured.

    The tables must have room for it, and for `extents_max` rows of its bytes.
    """
    end = pos + 4 + header["size"]
    at = used[FRAMES] * FRAME_WIDTH
    used[FRAMES] += 1
    frames[at + CONNECTION] = connection
    frames[at + POS] = pos
    frames[at + FRAME_SIZE] = header["size"]
    frames[at + API_KEY] = header["key"]
    frames[at + VERSION] = header["api_version"]
    frames[at + ID] = header["correlation"]
    frames[at + KIND] = kind
    frames[at + FIRST] = pieces[index]["segment"]
    first = used[EXTENTS]
    captured = put_extents(pieces, source, index, stop, pos + 4, end, extents, used)
    frames[at + EXTENT_START] = first
    frames[at + EXTENT_COUNT] = used[EXTENTS] - first
    frames[at + CAPTURED] = captured + 4
    last = find(pieces, index, stop, end - 1)
    if last >= stop or pieces[last]["pos"] >= end:
        last -= 1
    frames[at + LAST] = pieces[last]["segment"]


@making_kernel
def put_fault(
    faults: Any, used: Any, kind: int, severity: int, direction: int, connection: int, segment: int,
    pos: int, count: int, a: int, b: int, frame: int,
) -> Any:  # fmt: skip
    """Append a fault without bytes to show; returns the table."""
    faults = grown(faults, used[FAULTS] * FAULT_WIDTH, FAULT_WIDTH)
    at = used[FAULTS] * FAULT_WIDTH
    used[FAULTS] += 1
    faults[at + FAULT_KIND] = kind
    faults[at + SEVERITY] = severity
    faults[at + DIRECTION] = direction
    faults[at + FAULT_CONNECTION] = connection
    faults[at + FAULT_SEGMENT] = segment
    faults[at + FAULT_POS] = pos
    faults[at + FAULT_BYTES] = count
    faults[at + FAULT_A] = a
    faults[at + FAULT_B] = b
    faults[at + FAULT_EXTENT] = 0
    faults[at + FAULT_EXTENTS] = 0
    faults[at + FAULT_FRAME] = frame
    return faults


@making_kernel
def put_unframed(
    pieces: Any, source: Any, index: int, stop: int, begin: int, end: int, direction: int,
    connection: int, reason: int, size: int, extents: Any, faults: Any, used: Any,
) -> Any:  # fmt: skip
    """Append a fault for the captured bytes in [begin, end), if any; returns (extents, faults)."""
    while index < stop and pieces[index]["end"] <= begin:
        index += 1
    if index >= stop or pieces[index]["pos"] >= end:
        return extents, faults
    first = max(begin, pieces[index]["pos"])
    count = int64(0)
    number = index
    while number < stop and pieces[number]["pos"] < end:
        last = min(end, pieces[number]["end"])
        count += last - max(begin, pieces[number]["pos"])
        number += 1
    faults = put_fault(
        faults, used, int64(Anomaly.UNFRAMED_BYTES), WARNING, direction, connection,
        pieces[index]["segment"], first, count, reason, size, -1,
    )  # fmt: skip
    at = (used[FAULTS] - 1) * FAULT_WIDTH
    before = used[EXTENTS]
    shown = min(end, first + _SHOWN_MAX)
    room = extents_max(pieces, index, stop, shown) * EXTENT_WIDTH
    extents = grown(extents, before * EXTENT_WIDTH, room)
    put_extents(pieces, source, index, stop, first, shown, extents, used)
    faults[at + FAULT_EXTENT] = before
    faults[at + FAULT_EXTENTS] = used[EXTENTS] - before
    return extents, faults


@making_kernel
def put_gaps(
    pieces: Any, start: int, stop: int, end: int, direction: int, connection: int, faults: Any,
    used: Any,
) -> Any:  # fmt: skip
    """Note the holes of a stream that is known to be `end` bytes long; the table of faults."""
    here = int64(0)
    segment = int64(-1)
    for index in range(start, stop + 1):
        until = pieces[index]["pos"] if index < stop else end
        if index < stop:
            segment = pieces[index]["segment"]
        if until > here:
            faults = put_fault(
                faults, used, int64(Anomaly.GAP), WARNING, direction, connection, segment, here,
                until - here, 0, 0, -1,
            )  # fmt: skip
        if index < stop:
            here = pieces[index]["end"]
    return faults


def renumber(frames: Any, faults: Any, extent_base: int) -> None:
    """Add `extent_base` to the extent numbers in flat tables of frames and faults."""
    frames[EXTENT_START::FRAME_WIDTH] += extent_base
    shown = np.flatnonzero(faults[FAULT_EXTENTS::FAULT_WIDTH])
    faults[FAULT_EXTENT::FAULT_WIDTH][shown] += extent_base
