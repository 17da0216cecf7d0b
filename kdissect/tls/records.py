"""Finds the records of TLS streams by their headers, and resynchronises after a gap.

A record is a type (20 to 23), a version (0x0300 to 0x0304), a length and as many bytes (RFC 8446
section 5.1). From a certain boundary on, each header gives the next boundary, also over missing
bytes. If a header is missing or invalid, the walk searches for a valid header that is followed by
another one, by missing bytes or by the end of the stream. The bytes in between are *lost*: the
number of records in them is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kdissect.arrays import Marks, Rows, Struct
from kdissect.jit import inlined, int64, kernel, load_u8, making_kernel
from kdissect.tcp.byte_ranges import Pieces, find, grown, peek

CHANGE_CIPHER, ALERT, HANDSHAKE, APPLICATION = 20, 21, 22, 23
LOST = 0  # instead of a type: a stretch without known boundaries
TLS_HEADER_SIZE = 5
BODY_MAX = 16384 + 2048  # RFC 5246; RFC 8446 allows less

_ROWS_AT_ONCE = 4096


class Record(NamedTuple):
    """A row of RECORD."""

    kind: int
    pos: int
    size: int  # with its header
    captured: int  # bytes of these that are there
    piece: int  # the first one that ends after `pos`
    first: int  # segments of the first and last captured byte, or -1
    last: int


RECORD = np.dtype([(name, "i8") for name in Record._fields])


def each_record(table: Rows) -> Iterator[Record]:
    """The rows of RECORD[n], a few thousand Python objects at a time."""
    for start in range(0, len(table), _ROWS_AT_ONCE):
        yield from map(Record._make, table[start : start + _ROWS_AT_ONCE].tolist())


@inlined
def record_size(pieces: Pieces, index: int, stop: int, pos: int) -> int:
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
def _search(pieces: Pieces, index: int, stop: int, pos: int, end: int) -> int:
    """The first boundary of a record at or after `pos`, or -1."""
    while index < stop:
        here = max(pos, pieces[index]["pos"])
        until = pieces[index]["end"]
        address = pieces[index]["address"] - np.uint64(pieces[index]["pos"])
        while here < until:
            kind = load_u8(address + np.uint64(here))
            if CHANGE_CIPHER <= kind <= APPLICATION:
                size = record_size(pieces, index, stop, here)
                if size > 0:
                    behind = here + size
                    if behind == end:
                        return here
                    if behind < end:
                        after = find(pieces, index, stop, behind)
                        if record_size(pieces, after, stop, behind) != 0:
                            return here
            here += 1
        index += 1
    return -1


@making_kernel
def walk_records(pieces: Pieces, sides: Rows, stream: int, has_origin: Marks) -> Rows:
    """All records of a stream: RECORD[n].

    has_origin uint8 of each stream: it began with a SYN, so that position 0 is a boundary.
    """
    table = np.empty(64, RECORD)
    used = 0
    start, stop = sides[stream]["piece_start"], sides[stream]["piece_stop"]
    if start >= stop:
        return table[:0]
    end = pieces[stop - 1]["end"]
    index = start
    pos = int64(0) if has_origin[stream] else pieces[start]["pos"]
    is_boundary = has_origin[stream] != 0
    while pos < end:
        size = record_size(pieces, index, stop, pos) if is_boundary else int64(0)
        kind = int64(LOST)
        if size > 0:
            kind = peek(pieces, index, stop, pos, 1)
        else:
            boundary = _search(pieces, index, stop, pos + is_boundary, end)
            size = (end if boundary < 0 else boundary) - pos
        is_boundary = True
        if size > 0:
            table = grown(table, used, 1)
            index = _put(pieces, index, stop, kind, pos, size, table[used])
            used += 1
            pos += size
    return table[:used]


@kernel
def _put(
    pieces: Pieces, index: int, stop: int, kind: int, pos: int, size: int, record: Struct
) -> int:
    """Fill a record; returns the first piece that ends after it."""
    while index < stop and pieces[index]["end"] <= pos:
        index += 1
    record["kind"] = kind
    record["pos"] = pos
    record["size"] = size
    record["piece"] = index
    record["first"] = -1
    record["last"] = -1
    captured = int64(0)
    while index < stop and pieces[index]["pos"] < pos + size:
        last = min(pos + size, pieces[index]["end"])
        captured += last - max(pos, pieces[index]["pos"])
        if record["first"] < 0:
            record["first"] = pieces[index]["segment"]
        record["last"] = pieces[index]["segment"]
        if pieces[index]["end"] > pos + size:
            break
        index += 1
    record["captured"] = captured
    return index
