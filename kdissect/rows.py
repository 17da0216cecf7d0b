"""Rows of structured arrays moved as a whole: numpy moves their fields, ten times slower.

For a shuffle they are packed: the first bytes of all rows, then the second ones, and so on, each
array as one lz4 block. Most bytes of an index are those of the row before (high bytes of times and
places, small numbers in wide fields), so a quarter is left, and a byte that is moved through
sockets, shuffle files and two processes costs more than its packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cramjam
import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.void]
Array = npt.NDArray[Any]

_ROWS_AT_ONCE = 512  # that are packed: few enough that the cache holds them for all of their bytes


def _raw(array: Rows) -> Any:
    return array.view(np.dtype((np.void, array.dtype.itemsize)))


def take(array: Rows, rows: npt.NDArray[Any]) -> Rows:
    """array[rows], for indices; a copy."""
    taken: Rows = np.take(_raw(array), rows).view(array.dtype)
    return taken


def copied(array: Rows) -> Rows:
    """array.copy()"""
    copy: Rows = _raw(array).copy().view(array.dtype)
    return copy


def joined(arrays: Sequence[Rows]) -> Rows:
    """np.concatenate(arrays), for arrays of one type, at least one; a copy."""
    result: Rows = np.concatenate([_raw(array) for array in arrays]).view(arrays[0].dtype)
    return result


def pack(arrays: Sequence[Array]) -> bytes:
    """The arrays as one small value, for `unpack`; their dtypes are not part of it."""
    blocks = [_packed(array) for array in arrays]
    lengths = [(len(array), len(block)) for array, block in zip(arrays, blocks, strict=True)]
    return b"".join([np.array(lengths, "<i8").tobytes(), *blocks])


def unpack(data: bytes, dtypes: Sequence[np.dtype[Any]]) -> list[Array]:
    """The arrays that `pack` was given; fresh ones."""
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
    rows: Any = array.view(np.uint8).reshape(len(array), -1)
    planes: Any = np.empty(rows.shape[::-1], np.uint8)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        planes[:, some] = rows[some].T
    return bytes(cramjam.lz4.compress_block(planes, store_size=False))


def _unpacked(block: memoryview, dtype: np.dtype[Any], count: int) -> Array:
    if not count:
        return np.zeros(0, dtype)
    planes: Any = np.empty((dtype.itemsize, count), np.uint8)
    cramjam.lz4.decompress_block_into(block, planes)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


def renumbered(
    numbers: npt.NDArray[Any], count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """np.unique(numbers, return_inverse=True), faster; the numbers are below `count`."""
    if count > 4 * len(numbers):
        return np.unique(numbers, return_inverse=True)
    is_used = np.zeros(count, np.bool_)
    is_used[numbers] = True
    return np.flatnonzero(is_used), np.cumsum(is_used)[numbers] - 1


def distinct(values: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """np.unique(values, return_inverse=True), faster for integers that are near each other."""
    if not len(values):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    low = int(values.min())
    used, index = renumbered(values.astype(np.int64) - low, int(values.max()) - low + 1)
    return used + low, index


def by_value(values: npt.NDArray[Any]) -> dict[int, npt.NDArray[np.int64]]:
    """Of numbers of 16 bits: value -> places where it is, ascending."""
    order = np.argsort(values.astype(np.int16, copy=False), kind="stable")  # by digits
    bounds = np.flatnonzero(np.diff(values[order])) + 1
    return {int(values[part[0]]): part for part in np.split(order, bounds) if len(part)}


def is_any_of(values: npt.NDArray[np.int64], few: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """np.isin(values, few), faster where `few` are few: the values are not sorted."""
    if not len(few):
        return np.zeros(len(values), np.bool_)
    ordered = np.sort(few)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.asarray(ordered[at] == values)


def in_order_of_time(time_ns: npt.NDArray[Any], ident: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """np.lexsort((ident, time_ns)), faster where times are nearly in order and few are equal."""
    order = np.argsort(time_ns, kind="stable")
    is_equal = np.diff(time_ns[order]) == 0
    tied = np.flatnonzero(np.append(is_equal, False) | np.append(False, is_equal))
    some = order[tied]
    order[tied] = some[np.lexsort((ident[some], time_ns[some]))]
    return order


def gather_ranges(
    start: npt.NDArray[np.int64], count: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(indices of all ranges one after the other, new start of each range)."""
    ends = np.cumsum(count)
    new_start = ends - count
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(start - new_start, count) + np.arange(total), new_start
