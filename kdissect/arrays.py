"""Types of arrays by what they hold, and faster forms of numpy functions.

numpy copies structured arrays field by field, which takes ten times as long as copying rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# What an array holds, where arrays pass between modules.
Array = npt.NDArray[Any]  # anything
Rows = npt.NDArray[np.void]  # rows of a structured array
Struct = np.void  # one of them; kernels change it in place
Bytes = npt.NDArray[np.uint8]
Ints = Array  # integers of any width
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]  # of rows in another array
Positions = npt.NDArray[np.int64]  # of bytes in a buffer or a stream
TimesNs = npt.NDArray[np.int64]  # nanoseconds since 1970
Ids = npt.NDArray[np.int64]  # of captures, connections or exchanges
Addresses = npt.NDArray[np.uint64]  # of bytes in memory
Marks = npt.NDArray[np.uint8]  # flags or codes, one for each row of another array
States = npt.NDArray[np.int8]  # values of an enumeration, one for each row of another array
Codes = npt.NDArray[np.int16]  # of APIs, versions or errors, as messages have them


def _raw(array: Rows) -> Rows:
    return array.view(np.dtype((np.void, array.dtype.itemsize)))


def address_of(array: Array) -> int:
    """The address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


def read_only(array: Array) -> Array:
    """The same memory, read-only, as mapped captures are: else Numba compiles kernels for both."""
    view = array.view()
    view.flags.writeable = False
    return view


def take(array: Rows, rows: Array) -> Rows:
    """Return array[rows] for an array of indices; a copy."""
    taken: Rows = np.take(_raw(array), rows).view(array.dtype)
    return taken


def copied(array: Rows) -> Rows:
    """Return array.copy()."""
    copy: Rows = _raw(array).copy().view(array.dtype)
    return copy


def joined(arrays: Sequence[Rows]) -> Rows:
    """Return np.concatenate(arrays) for one or more arrays of one dtype."""
    result: Rows = np.concatenate([_raw(array) for array in arrays]).view(arrays[0].dtype)
    return result


def renumbered(numbers: Array, count: int) -> tuple[Indices, Indices]:
    """Return np.unique(numbers, return_inverse=True), faster; all numbers are below `count`."""
    if count > 4 * len(numbers):
        return np.unique(numbers, return_inverse=True)
    is_used = np.zeros(count, np.bool_)
    is_used[numbers] = True
    return np.flatnonzero(is_used), np.cumsum(is_used)[numbers] - 1


def stable_order(numbers: Array) -> Indices:
    """Return np.argsort(numbers, kind="stable") of numbers from 0 on, faster if all are below
    65,536."""
    if len(numbers) and numbers.max() < 1 << 16:
        numbers = numbers.astype(np.uint16)  # numpy sorts 16-bit numbers by radix
    order: Indices = np.argsort(numbers, kind="stable")
    return order


def by_value(values: Array) -> dict[int, Indices]:
    """Return the places of each value, ascending, for 16-bit numbers."""
    # numpy sorts 16-bit numbers by radix
    order = np.argsort(values.astype(np.int16, copy=False), kind="stable")
    bounds = np.flatnonzero(np.diff(values[order])) + 1
    return {int(values[part[0]]): part for part in np.split(order, bounds) if len(part)}


def in_order_of_time(time_ns: Array, ident: Array) -> Indices:
    """Return np.lexsort((ident, time_ns)), faster if times are nearly sorted and few are equal."""
    order = np.argsort(time_ns, kind="stable")
    is_equal = np.diff(time_ns[order]) == 0
    tied = np.flatnonzero(np.append(is_equal, False) | np.append(False, is_equal))
    tied_rows = order[tied]
    order[tied] = tied_rows[np.lexsort((ident[tied_rows], time_ns[tied_rows]))]
    return order


def gather_ranges(start: Indices, count: Indices) -> tuple[Indices, Indices]:
    """Return the indices of all ranges one after the other, and the new start of each range."""
    ends = np.cumsum(count)
    new_start = ends - count
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(start - new_start, count) + np.arange(total), new_start
