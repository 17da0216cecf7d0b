"""Packs arrays of rows into small values for a shuffle.

Packed bytes are transposed: the first bytes of all rows, then the second ones, and so on, and each
array is one lz4 block. Most bytes of an index equal those of the row before (high bytes of times
and positions, small numbers in wide fields), so a quarter remains. Moving a byte through sockets,
shuffle files and two processes takes longer than packing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cramjam
import numpy as np
import numpy.typing as npt

from kdissect.jit import inlined, kernel, load_word, store_64

Array = npt.NDArray[Any]

TILE = 512  # rows and columns that fit the cache together


def pack(arrays: Sequence[Array]) -> bytes:
    """Return the arrays as one small value for `unpack`, which needs their dtypes."""
    blocks = [_packed(array) for array in arrays]
    lengths = [(len(array), len(block)) for array, block in zip(arrays, blocks, strict=True)]
    return b"".join([np.array(lengths, "<i8").tobytes(), *blocks])


def unpack(data: bytes, dtypes: Sequence[np.dtype[Any]]) -> list[Array]:
    """Return the arrays given to `pack`, as new arrays."""
    lengths = np.frombuffer(data, "<i8", 2 * len(dtypes)).reshape(-1, 2)
    view = memoryview(data)
    pos = lengths.nbytes
    arrays = []
    for dtype, (count, size) in zip(dtypes, lengths.tolist(), strict=True):
        arrays.append(_unpacked(view[pos : pos + size], dtype, count))
        pos += size
    return arrays


def _packed(array: Array) -> bytes:
    if not len(array):
        return b""
    rows = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)
    return bytes(cramjam.lz4.compress_block(transposed(rows), store_size=False))


def _unpacked(block: memoryview, dtype: np.dtype[Any], count: int) -> Array:
    if not count:
        return np.zeros(0, dtype)
    planes: Any = np.empty((dtype.itemsize, count), np.uint8)
    cramjam.lz4.decompress_block_into(block, planes)
    return transposed(planes).reshape(-1).view(dtype)


def transposed(bytes_of: npt.NDArray[np.uint8]) -> Any:
    """Return `bytes_of.T`, contiguous, for contiguous uint8[rows, columns].

    It is a copy, unless all bytes stay in order. numpy would move them one at a time.
    """
    rows, columns = bytes_of.shape
    assert bytes_of.flags.c_contiguous
    if rows == 1 or columns == 1:
        return bytes_of.reshape(columns, rows)
    result = np.empty((columns, rows), np.uint8)
    source, target = bytes_of.reshape(-1), result.reshape(-1)
    _transpose(source, rows, columns, target, source.ctypes.data, target.ctypes.data)
    return result


@inlined
def _exchanged(one: int, two: int, bits: int, mask: int) -> Any:
    """Swap the upper fields of `one` with the lower ones of `two`.

    bits: size of a field. mask: the bits of the lower fields.
    """
    differing = ((one >> bits) ^ two) & mask
    return one ^ (differing << bits), two ^ differing


@kernel
def _transpose(
    source: Any, rows: int, columns: int, target: Any, source_address: int, target_address: int
) -> None:
    """Transpose 8 x 8 bytes at a time, in registers (Warren, Hacker's Delight, 7-3).

    First single bytes of words in neighbouring rows are swapped, then pairs, then fours. The lowest
    byte of a word is the first in memory: all machines that Kafka and Spark support are
    little-endian.
    """
    for top in range(0, rows, TILE):
        bottom = min(top + TILE, rows)
        low = top + ((bottom - top) & ~7)
        for left in range(0, columns, TILE):
            right = min(left + TILE, columns)
            edge = left + ((right - left) & ~7)
            for column in range(left, edge, 8):
                for row in range(top, low, 8):
                    at = source_address + row * columns + column
                    a = load_word(at)
                    b = load_word(at + columns)
                    c = load_word(at + 2 * columns)
                    d = load_word(at + 3 * columns)
                    e = load_word(at + 4 * columns)
                    f = load_word(at + 5 * columns)
                    g = load_word(at + 6 * columns)
                    h = load_word(at + 7 * columns)
                    a, b = _exchanged(a, b, 8, 0x00FF00FF00FF00FF)
                    c, d = _exchanged(c, d, 8, 0x00FF00FF00FF00FF)
                    e, f = _exchanged(e, f, 8, 0x00FF00FF00FF00FF)
                    g, h = _exchanged(g, h, 8, 0x00FF00FF00FF00FF)
                    a, c = _exchanged(a, c, 16, 0x0000FFFF0000FFFF)
                    b, d = _exchanged(b, d, 16, 0x0000FFFF0000FFFF)
                    e, g = _exchanged(e, g, 16, 0x0000FFFF0000FFFF)
                    f, h = _exchanged(f, h, 16, 0x0000FFFF0000FFFF)
                    a, e = _exchanged(a, e, 32, 0x00000000FFFFFFFF)
                    b, f = _exchanged(b, f, 32, 0x00000000FFFFFFFF)
                    c, g = _exchanged(c, g, 32, 0x00000000FFFFFFFF)
                    d, h = _exchanged(d, h, 32, 0x00000000FFFFFFFF)
                    to = target_address + column * rows + row
                    store_64(to, a)
                    store_64(to + rows, b)
                    store_64(to + 2 * rows, c)
                    store_64(to + 3 * rows, d)
                    store_64(to + 4 * rows, e)
                    store_64(to + 5 * rows, f)
                    store_64(to + 6 * rows, g)
                    store_64(to + 7 * rows, h)
            for column in range(left, right):
                for row in range(low if column < edge else top, bottom):
                    target[column * rows + row] = source[row * columns + column]
