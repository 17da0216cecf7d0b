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

Array = npt.NDArray[Any]

_TILE = 512  # rows of some hundred bytes, which fit the cache together


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

    numpy would move whole columns, which miss the processor's cache; it moves parts of them here.
    """
    rows, columns = bytes_of.shape
    if rows == 1 or columns == 1:
        return bytes_of.reshape(columns, rows)
    result = np.empty((columns, rows), np.uint8)
    for start in range(0, max(rows, columns), _TILE):
        part = slice(start, start + _TILE)
        if rows > columns:
            result[:, part] = bytes_of[part].T
        else:
            result[part] = bytes_of[:, part].T
    return result
