"""Finds the records of TLS streams by their headers, and resynchronises after a gap.

A record is a type (20 to 23), a version (0x0300 to 0x0304), a length and as many bytes (RFC 8446
section 5.1). From a certain boundary on, each header gives the next boundary, also over missing
bytes. If a header is missing or invalid, the walk searches for a valid header that is followed by
another one, by missing bytes or by the end of the stream. The bytes in between are *lost*: the
number of records in them is unknown.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kdissect.jit import inlined, kernel, load_u8, making_kernel
from kdissect.tcp.byte_ranges import find, grown, int64, peek
from kdissect.tcp.columns import PIECE_START, PIECE_STOP, SIDE_WIDTH

CHANGE_CIPHER, ALERT, HANDSHAKE, APPLICATION = 20, 21, 22, 23
LOST = 0  # instead of a type: a stretch without known boundaries
TLS_HEADER_SIZE = 5
BODY_MAX = 16384 + 2048  # RFC 5246; RFC 8446 allows less

# Columns of a record. SIZE: with its header; CAPTURED: bytes of these that are there; PIECE: the
# first piece that ends after POS; FIRST, LAST: segments of the first and last captured byte.
TYPE, _VERSION, POS, SIZE, CAPTURED, PIECE, FIRST, LAST = range(8)
RECORD_WIDTH = 8


@inlined
def _size_at(pieces: Any, index: int, stop: int, pos: int) -> int:
    """Bytes of the record whose header is at `pos`; 0: no header, -1: bytes of it are missing."""
    kind = peek(pieces, index, stop, pos, 1)
    version = peek(pieces, index, stop, pos + 1, 2)
    length = peek(pieces, index, stop, pos + 3, 2)
    if kind < 0 or version < 0 or length < 0:
        return int64(-1)
    if kind < CHANGE_CIPHER or kind > APPLICATION or version < 0x0300 or version > 0x0304:
        return int64(0)
    if length == 0 and kind != APPLICATION:
        return int64(0)
    return TLS_HEADER_SIZE + length if length <= BODY_MAX else int64(0)


@kernel
def _search(pieces: Any, index: int, stop: int, pos: int, end: int) -> int:
    """The first boundary of a record at or after `pos`, or -1."""
    while index < stop:
        here = max(pos, pieces[index]["pos"])
        until = pieces[index]["end"]
        address = pieces[index]["address"] - np.uint64(pieces[index]["pos"])
        while here < until:
            kind = load_u8(address + np.uint64(here))
            if CHANGE_CIPHER <= kind <= APPLICATION:
                size = _size_at(pieces, index, stop, here)
                if size > 0:
                    behind = here + size
                    if behind == end:
                        return here
                    if behind < end:
                        after = find(pieces, index, stop, behind)
                        if _size_at(pieces, after, stop, behind) != 0:
                            return here
            here += 1
        index += 1
    return -1


@making_kernel
def walk_records(pieces: Any, sides: Any, stream: int, has_origin: Any) -> Any:
    """All records of a stream: int64[n * RECORD_WIDTH].

    has_origin uint8 of each stream: it began with a SYN, so that position 0 is a boundary.
    """
    table = np.empty(64 * RECORD_WIDTH, np.int64)
    used = 0
    start = sides[stream * SIDE_WIDTH + PIECE_START]
    stop = sides[stream * SIDE_WIDTH + PIECE_STOP]
    if start >= stop:
        return table[:0]
    end = pieces[stop - 1]["end"]
    index = start
    pos = int64(0) if has_origin[stream] else pieces[start]["pos"]
    if not has_origin[stream]:
        boundary = _search(pieces, index, stop, pos, end)
        until = end if boundary < 0 else boundary
        table, used, index = _put(pieces, index, stop, LOST, 0, pos, until - pos, table, used)
        pos = until
    while pos < end:
        size = _size_at(pieces, index, stop, pos)
        if size > 0:
            kind = peek(pieces, index, stop, pos, 1)
            version = peek(pieces, index, stop, pos + 1, 2)
            table, used, index = _put(pieces, index, stop, kind, version, pos, size, table, used)
            pos += size
            continue
        boundary = _search(pieces, index, stop, pos + 1, end)
        until = end if boundary < 0 else boundary
        table, used, index = _put(pieces, index, stop, LOST, 0, pos, until - pos, table, used)
        pos = until
    return table[: used * RECORD_WIDTH]


@making_kernel
def _put(
    pieces: Any, index: int, stop: int, kind: int, version: int, pos: int, size: int, table: Any,
    used: int,
) -> Any:  # fmt: skip
    """Append a row, unless size is 0; (table, rows, first piece after the record)."""
    if size <= 0:
        return table, used, index
    table = grown(table, used * RECORD_WIDTH, RECORD_WIDTH)
    at = used * RECORD_WIDTH
    while index < stop and pieces[index]["end"] <= pos:
        index += 1
    table[at + TYPE] = kind
    table[at + _VERSION] = version
    table[at + POS] = pos
    table[at + SIZE] = size
    table[at + PIECE] = index
    table[at + FIRST] = -1
    table[at + LAST] = -1
    captured = int64(0)
    while index < stop and pieces[index]["pos"] < pos + size:
        last = min(pos + size, pieces[index]["end"])
        captured += last - max(pos, pieces[index]["pos"])
        if table[at + FIRST] < 0:
            table[at + FIRST] = pieces[index]["segment"]
        table[at + LAST] = pieces[index]["segment"]
        if pieces[index]["end"] > pos + size:
            break
        index += 1
    table[at + CAPTURED] = captured
    return table, used + 1, index
