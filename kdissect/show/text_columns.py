"""Arrow columns of strings for a terminal: made safe, padded, joined; times and milliseconds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.text import display_width, shortened, visible

DAY_NS = 86_400_000_000_000


def visible_column(column: pa.Array) -> pa.Array:
    """`visible` of a string column; nulls stay."""
    is_plain = pc.match_substring_regex(column, "^[ -~]*$")
    if pc.all(is_plain, min_count=0).as_py():
        return column
    texts = column.to_pylist()
    return pa.array([None if text is None else visible(text) for text in texts], pa.string())


def _one_array(column: Any) -> pa.Array:
    """The column as one array; a dictionary column may stay in chunks when they are combined."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array


def plain(column: Any) -> pa.Array:
    """One array of the values themselves, for a column in chunks or with a dictionary."""
    array = _one_array(column)
    return array.cast(array.type.value_type) if pa.types.is_dictionary(array.type) else array


def distinct(column: Any) -> tuple[pa.Array, pa.Array]:
    """(the distinct values, index of each row's value or null) of a string column."""
    array = _one_array(column)
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    return array.dictionary, array.indices


def padded(column: pa.Array, width: int, right: bool = False) -> pa.Array:
    """The texts with spaces up to `width` columns of a terminal."""
    if pc.all(pc.equal(pc.binary_length(column), pc.utf8_length(column)), min_count=0).as_py():
        return (pc.utf8_lpad if right else pc.utf8_rpad)(column, width, " ")
    pad = pa.array([" " * (width - display_width(text or "")) for text in column.to_pylist()])
    return joined(pad, column) if right else joined(column, pad)


def cut(column: pa.Array, width: int) -> pa.Array:
    """The texts in at most `width` columns of a terminal; longer ones are cut and end in "…"."""
    if pc.all(pc.less_equal(pc.binary_length(column), width), min_count=0).as_py():
        return column  # no text has fewer bytes than columns
    return pa.array([shortened(text or "", width) for text in column.to_pylist()], pa.string())


def stored(column: Any) -> pa.Array:
    """Values of a table's column as text; "-" for null, a comma between those of a list."""
    array = plain(column)
    kind = array.type
    if pa.types.is_timestamp(kind):
        time_ns = array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False) * 1000
        array = pc.if_else(array.is_valid(), time_column(time_ns, "T", "Z"), None)
    elif pa.types.is_list(kind):
        array = pa.array([",".join(map(str, values or ())) for values in array.to_pylist()])
    elif pa.types.is_floating(kind):
        array = pc.if_else(array.is_valid(), millis_column(array.fill_null(0.0).to_numpy()), None)
    return visible_column(array.cast(pa.string())).fill_null("-")


def joined(*parts: Any) -> pa.Array:
    """Strings put together row by row; null counts as empty."""
    return pc.binary_join_element_wise(*parts, "", null_handling="replace", null_replacement="")


def chosen(mask: npt.NDArray[np.bool_], some: Any, other: Any) -> pa.Array:
    return pc.if_else(pa.array(mask), some, other)


def time_column(
    time_ns: npt.NDArray[np.int64], joint: str = " ", zone: str = "", with_date: bool = True
) -> pa.Array:
    """string[n] of UTC times in microseconds: 2026-11-21 07:30:00.123456."""
    day = time_ns // DAY_NS
    micros = (time_ns - day * DAY_NS) // 1000
    days, index = np.unique(day, return_inverse=True)
    names = pa.array([f"{_date(int(number))}{joint}" if with_date else "" for number in days])
    digits = np.empty((len(time_ns), 15), np.uint8)
    digits[:, [2, 5]] = ord(":")
    digits[:, 8] = ord(".")
    seconds, fraction = np.divmod(micros, 1_000_000)
    _put(digits, (0, 1), seconds // 3600)
    _put(digits, (3, 4), seconds // 60 % 60)
    _put(digits, (6, 7), seconds % 60)
    _put(digits, range(9, 15), fraction)
    offsets = np.arange(len(time_ns) + 1, dtype=np.int32) * 15
    clock = pa.Array.from_buffers(
        pa.string(), len(time_ns), [None, pa.py_buffer(offsets), pa.py_buffer(digits)]
    )
    return joined(names.take(pa.array(index)), clock, zone)


def _put(digits: Any, places: Any, values: Any) -> None:
    for place in reversed(places):
        digits[:, place] = 48 + values % 10
        values = values // 10


def _date(day: int) -> str:
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day)).strftime("%Y-%m-%d")
    except OverflowError:
        return f"day {day}"


def seconds_column(span_ns: npt.NDArray[np.int64]) -> pa.Array:
    """string[n] of spans in seconds, with microseconds."""
    micros = np.abs(span_ns) // 1000
    whole = pa.array(micros // 1_000_000).cast(pa.string())
    rest = pc.utf8_lpad(pa.array(micros % 1_000_000).cast(pa.string()), 6, "0")
    return joined(chosen((span_ns < 0) & (micros > 0), "-", ""), whole, ".", rest)


def millis_column(values: npt.NDArray[np.float64]) -> pa.Array:
    """string[n] with three decimals."""
    micros = np.round(np.nan_to_num(np.abs(values)) * 1000).astype(np.int64)
    whole = pa.array(micros // 1000).cast(pa.string())
    rest = pc.utf8_lpad(pa.array(micros % 1000).cast(pa.string()), 3, "0")
    sign = chosen((values < 0) & (micros > 0), "-", "")
    return joined(sign, whole, ".", rest)
