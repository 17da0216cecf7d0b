"""Arrow columns of strings for a terminal: made safe, padded, joined; times and milliseconds."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Floats, Ints, TimesNs
from kdissect.tables.arrow_arrays import plain_schema
from kdissect.text import display_width, shortened, visible


def visible_column(column: pa.Array) -> pa.Array:
    """`visible` of a string column; nulls stay."""
    is_plain = pc.match_substring_regex(column, "^[ -~]*$")
    if pc.all(is_plain, min_count=0).as_py():
        return column
    texts = column.to_pylist()
    return pa.array([None if text is None else visible(text) for text in texts], pa.string())


def plain(table: pa.Table) -> pa.RecordBatch:
    """The rows as one batch, whose dictionaries became plain values."""
    (batch,) = table.cast(plain_schema(table.schema)).combine_chunks().to_batches()
    return batch


def distinct(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """(the distinct values, index of each row's value or null) of a string column."""
    encoded = column.dictionary_encode()
    return encoded.dictionary, encoded.indices


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


def stored(array: pa.Array) -> pa.Array:
    """Values as text; "-" for null, a comma between those of a list."""
    kind = array.type
    if pa.types.is_timestamp(kind):
        time_ns = array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False) * 1000
        array = pc.if_else(array.is_valid(), time_column(time_ns, "T", "Z"), None)
    elif pa.types.is_list(kind):
        array = pa.array([",".join(map(str, values or ())) for values in array.to_pylist()])
    elif pa.types.is_floating(kind):
        array = pc.if_else(array.is_valid(), millis_column(array.fill_null(0.0).to_numpy()), None)
    return visible_column(array.cast(pa.string())).fill_null("-")


def joined(*parts: pa.Array | pa.Scalar | str) -> pa.Array:
    """Strings put together row by row; null counts as empty."""
    return pc.binary_join_element_wise(*parts, "", null_handling="replace", null_replacement="")


def time_column(
    time_ns: TimesNs, joint: str = " ", zone: str = "", with_date: bool = True
) -> pa.Array:
    """string[n] of UTC times in microseconds: 2026-11-21 07:30:00.123456."""
    text = pa.array(time_ns // 1000, pa.timestamp("us")).cast(pa.string())
    start = 0 if with_date else 11
    text = pc.utf8_slice_codeunits(pc.utf8_replace_slice(text, 10, 11, joint), start)
    return joined(text, zone)


def seconds_column(span_ns: Ints) -> pa.Array:
    """string[n] of spans in seconds, with microseconds."""
    micros = np.sign(span_ns) * (np.abs(span_ns) // 1000)
    return _decimals(micros / 1e6, 6)


def millis_column(values: Floats) -> pa.Array:
    """string[n] with three decimals."""
    return _decimals(np.nan_to_num(values), 3)


def _decimals(values: Floats, places: int) -> pa.Array:
    """string[n] of numbers, rounded to so many decimal places."""
    return pa.array(np.round(values, places)).cast(pa.decimal128(38, places)).cast(pa.string())
