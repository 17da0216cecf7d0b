"""The byte ranges of TCP streams: found by stream position, read across their borders.

An array of `PIECE` has the ordered, disjoint byte ranges (pieces) of all streams, one stream after
the other; a stream is a range [start, stop) of its rows. Bytes between two pieces are missing.
`peek` reads big-endian numbers at any position and returns -1 if one of their bytes is missing.
"""

from __future__ import annotations

import ctypes

import numpy as np

from kdissect.arrays import Indices, Rows
from kdissect.jit import (
    copy_bytes,
    inlined,
    int64,
    kernel,
    load_u8,
    load_u16,
    load_u32,
    making_kernel,
    making_part,
)

Pieces = Rows  # PIECE[n]

PIECE = np.dtype(
    [
        ("pos", "i8"),  # of its first byte, in the stream
        ("end", "i8"),  # after its last byte
        ("address", "u8"),  # of its first byte, in memory
        ("file_pos", "i8"),  # of its first byte, in its source
        ("segment", "i8"),  # row of the segment that it came from, in assembly order
    ]
)


@kernel
def find(pieces: Pieces, start: int, stop: int, pos: int) -> int:
    """The first piece of [start, stop) that ends after `pos`; it may also begin after `pos`."""
    low = start
    high = stop
    while low < high:
        middle = (low + high) >> 1
        if pieces[middle]["end"] <= pos:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def peek_u8(pieces: Pieces, index: int, stop: int, pos: int) -> int:
    """The byte at `pos`, -1 if it is missing; `index` is the result of `find` for `pos`."""
    if index >= stop or pieces[index]["pos"] > pos:
        return -1
    return load_u8(pieces[index]["address"] + np.uint64(pos - pieces[index]["pos"]))


@kernel
def peek(pieces: Pieces, index: int, stop: int, pos: int, count: int) -> int:
    """The unsigned big-endian number in the 1 to 4 bytes at `pos`; -1 if a byte is missing.

    index: a piece at or before the one that holds `pos`.
    """
    while index < stop and pieces[index]["end"] <= pos:
        index += 1
    if index >= stop or pieces[index]["pos"] > pos:
        return -1
    if pieces[index]["end"] - pos >= count:
        address = pieces[index]["address"] + np.uint64(pos - pieces[index]["pos"])
        if count == 4:
            return load_u32(address)
        if count == 2:
            return load_u16(address)
    value = 0
    for at in range(pos, pos + count):
        if pieces[index]["end"] <= at:
            index += 1
        byte = peek_u8(pieces, index, stop, at)
        if byte < 0:
            return -1
        value = (value << 8) | byte
    return value


@kernel
def copy_range(pieces: Pieces, index: int, stop: int, pos: int, end: int, target: int) -> bool:
    """Copy the bytes [pos, end) of a stream to an address; False if one of them is missing.

    index: a piece at or before the one that holds `pos`.
    """
    while pos < end:
        while index < stop and pieces[index]["end"] <= pos:
            index += 1
        if index >= stop or pieces[index]["pos"] > pos:
            return False
        source = int64(pieces[index]["address"]) + pos - pieces[index]["pos"]
        size = min(end, pieces[index]["end"]) - pos
        copy_bytes(target, source, size)
        target += size
        pos += size
    return True


@making_kernel
def first_bytes(pieces: Pieces, sides: Rows) -> Indices:
    """int64[sides]: the byte at position 0 of each stream; -1 if it is missing."""
    first = np.empty(len(sides), np.int64)
    for stream in range(len(sides)):
        side = sides[stream]
        first[stream] = peek_u8(pieces, side["piece_start"], side["piece_stop"], 0)
    return first


def read_bytes(pieces: Pieces, index: int, pos: int, count: int) -> bytes:
    """Bytes [pos, pos + count) of a stream, all captured, starting in or after piece `index`."""
    while pieces[index]["end"] <= pos:
        index += 1
    parts = []
    while count > 0:
        skipped = pos - int(pieces[index]["pos"])
        size = min(count, int(pieces[index]["end"]) - pos)
        parts.append(ctypes.string_at(int(pieces[index]["address"]) + skipped, size))
        pos += size
        count -= size
        index += 1
    return b"".join(parts)


@making_part
def grown(table: Rows, used: int, needed: int) -> Rows:
    """The table itself, or one of at least twice the size with its first `used` rows copied."""
    if used + needed <= len(table):
        return table
    larger = np.empty(2 * len(table) + needed, table.dtype)
    for at in range(used):  # a loop, because a slice assignment takes 3 s to compile
        larger[at] = table[at]
    return larger
