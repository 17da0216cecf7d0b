"""Values of tables as text: rows as JSON objects, and columns as columns of text.

Times are RFC 3339 in UTC, bytes base64. Numbers that JSON cannot represent are strings: integers
beyond 2^53, decimals, NaN and infinities.

Columns become columns of text before rows are joined: numbers and times by Arrow, text once for
each distinct value, lists by their elements, other nested values one by one.
"""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Callable, Container, Iterable, Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kdissect.text import rfc3339

_INTEGER_MAX = 2**53  # larger integers are not exact as doubles
_MICROS_PER_SECOND = 1_000_000

SPACED = json.JSONEncoder()
COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def interval_text(value: Any) -> str:
    """Format an interval as ISO 8601: months, days, seconds."""
    seconds, micros = divmod(abs(value.nanoseconds) // 1000, _MICROS_PER_SECOND)
    sign = "-" if value.nanoseconds < 0 else ""
    tail = f".{micros:06d}".rstrip("0") if micros else ""
    return f"P{value.months}M{value.days}DT{sign}{seconds}{tail}S"


def json_value(value: Any) -> Any:
    """Return pyarrow's value as JSON represents it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -_INTEGER_MAX <= value <= _INTEGER_MAX else str(value)
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, dict):
        return {str(name): json_value(item) for name, item in value.items()}
    if isinstance(value, pa.MonthDayNano):
        return interval_text(value)
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Decimal):
        is_whole = value.as_tuple().exponent == 0
        return json_value(int(value)) if is_whole else str(value)
    if isinstance(value, datetime.datetime):
        return rfc3339(value, "microseconds")
    return str(value)  # dates, times and uuids have ISO's form


def column_text(
    column: pa.Array, text_of: Callable[[Any], str], encoder: json.JSONEncoder | None = None
) -> pa.Array:
    """Return the column as strings, null staying null; `text_of` formats one value.

    encoder: of JSON, if the strings are to be JSON.
    """
    kind = column.type
    is_json = encoder is not None
    if pa.types.is_integer(kind):
        texts = pc.cast(column, pa.string())
        if not is_json or kind.bit_width < 64:
            return texts
        is_large = pc.greater(column, pa.scalar(_INTEGER_MAX, kind))
        if not pa.types.is_unsigned_integer(kind):
            is_large = pc.or_(is_large, pc.less(column, -_INTEGER_MAX))
        return _quoted_where(is_large, texts)
    if pa.types.is_boolean(kind):
        return pc.cast(column, pa.string())
    if pa.types.is_floating(kind):
        texts = pc.cast(column, pa.string())
        return _quoted_where(pc.invert(pc.is_finite(column)), texts) if is_json else texts
    if pa.types.is_timestamp(kind) and kind.tz in (None, "UTC", "Etc/UTC"):
        plain = pc.cast(pc.cast(column, pa.timestamp("us"), safe=False), pa.string())
        zone = "" if kind.tz is None else "Z"
        texts = pc.replace_substring(plain, " ", "T")
        quote = '"' if is_json else ""
        return pc.binary_join_element_wise(quote, texts, zone + quote, "")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind):
        coded = column if pa.types.is_dictionary(kind) else column.dictionary_encode()
        return pa.array(map(text_of, coded.dictionary.to_pylist()), pa.string()).take(coded.indices)
    if encoder is not None and pa.types.is_list(kind):
        return _list_text(column, text_of, encoder)
    values = column.to_pylist()
    if pa.types.is_map(kind):
        values = [None if value is None else dict(value) for value in values]
    return pa.array([None if value is None else text_of(value) for value in values], pa.string())


def _list_text(
    column: pa.ListArray, text_of: Callable[[Any], str], encoder: json.JSONEncoder
) -> pa.Array:
    """Return a column of lists as JSON."""
    items = pc.fill_null(column_text(column.flatten(), text_of, encoder), "null")
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])
    lists = pa.ListArray.from_arrays(offsets, items)
    texts = pc.binary_join_element_wise("[", pc.binary_join(lists, encoder.item_separator), "]", "")
    return pc.if_else(column.is_valid(), texts, None)


def _quoted_where(condition: pa.Array, texts: pa.Array) -> pa.Array:
    return pc.if_else(condition, pc.binary_join_element_wise('"', texts, '"', ""), texts)


def joined(parts: list[Any], between: str) -> list[str]:
    """Join the columns' texts to rows; null becomes empty."""
    joined = pc.binary_join_element_wise(
        *parts, between, null_handling="replace", null_replacement=""
    )
    lines: list[str] = joined.to_pylist()
    return lines


def json_objects(
    names: list[str],
    batches: Iterable[Any],
    encoder: json.JSONEncoder = SPACED,
    numbers: Container[str] = (),
) -> Iterator[str]:
    """Yield each row as a JSON object.

    numbers: columns whose integers are JSON numbers even beyond 2^53.
    """
    colon, comma = encoder.key_separator, encoder.item_separator
    keys = [
        f"{comma if place else '{'}{encoder.encode(name)}{colon}"
        for place, name in enumerate(names)
    ]

    def text_of(value: Any) -> str:
        return encoder.encode(json_value(value))

    for batch in batches:
        parts: list[Any] = []
        for name, key, column in zip(names, keys, batch.columns, strict=True):
            texts = (
                pc.cast(column, pa.string())
                if name in numbers
                else column_text(column, text_of, encoder)
            )
            parts += [key, pc.fill_null(texts, "null")]
        yield from joined([*parts, "}"], "")
