"""Rows of structured arrays moved as a whole: numpy moves their fields, ten times slower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.void]

_ENDINGS = 1 << 16  # of values, that are told apart


def _raw(array: Rows) -> Any:
    return array.view(np.dtype((np.void, array.dtype.itemsize)))


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory, read-only, as mapped captures are: else Numba compiles kernels for both."""
    view = array.view()
    view.flags.writeable = False
    return view


def take(array: Rows, rows: npt.NDArray[Any]) -> Rows:
    """array[rows], for indices; a copy."""
    if len(rows) and 0 <= rows[0] <= rows[-1] < len(array) and (rows[1:] == rows[:-1] + 1).all():
        return copied(array[rows[0] : rows[-1] + 1])
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
    """np.isin(values, few), faster where `few` are few: the values are not sorted, and only those
    are looked for that end in the same bits as one of the few."""
    found = np.zeros(len(values), np.bool_)
    if not len(few):
        return found
    ordered = np.sort(few)
    has_ending = np.zeros(_ENDINGS, np.bool_)
    has_ending[ordered & (_ENDINGS - 1)] = True
    rows = np.flatnonzero(has_ending[values & (_ENDINGS - 1)])
    some = values[rows]
    at = np.minimum(np.searchsorted(ordered, some), len(ordered) - 1)
    found[rows] = ordered[at] == some
    return found


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
