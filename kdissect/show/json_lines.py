"""Rows of `exchanges` as JSON, one object a line: times in RFC 3339, large ids as strings."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.show import text_columns
from kdissect.show.text_columns import joined

_INTEGER_MAX = 2**53  # larger ones do not survive where numbers are doubles
IDS = ("exchange_id", "connection_id", "request_capture_id", "response_capture_id")


def block(table: pa.Table, more: list[str] | None = None) -> bytes:
    """All objects, each with its line end; `more`: members to add to each, as JSON text."""
    parts: list[Any] = []
    for number, name in enumerate(table.column_names):
        parts += [("{" if number == 0 else ",") + json.dumps(name) + ":", _column(name, table)]
    if more is not None:
        parts.append(pa.array(more, pa.string()))
    lines = joined(*parts, "}\n")
    return b"".join(line.encode() for line in lines.to_pylist())


def _column(name: str, table: pa.Table) -> pa.Array:
    column = table[name]
    kind = column.type
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind):
        values, index = text_columns.distinct(column)
        quoted = pa.array([json.dumps(value, ensure_ascii=False) for value in values.to_pylist()])
        return quoted.cast(pa.string()).take(index).fill_null("null")
    array = text_columns.plain(column)
    if pa.types.is_timestamp(kind):
        time_ns = array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False) * 1000
        shown = joined('"', text_columns.time_column(time_ns, "T", "Z"), '"')
        return pc.if_else(array.is_valid(), shown, "null")
    if pa.types.is_list(kind):
        flat = array.flatten()
        if pa.types.is_string(flat.type):
            values, index = text_columns.distinct(flat)
            quoted = [json.dumps(value, ensure_ascii=False) for value in values.to_pylist()]
            flat = pa.array(quoted, pa.string()).take(index)
        else:
            flat = flat.cast(pa.string())
        counts = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lists = pa.ListArray.from_arrays(pa.array(offsets), flat)
        shown = joined("[", pc.binary_join(lists, ","), "]")
        return pc.if_else(array.is_valid(), shown, "null")
    if name in IDS:
        shown = array.cast(pa.string())
        is_large = pc.greater(array, _INTEGER_MAX)
        return pc.if_else(is_large, joined('"', shown, '"'), shown).fill_null("null")
    if pa.types.is_floating(kind):
        values = array.to_pylist()
        return pa.array(["null" if value is None else json.dumps(value) for value in values])
    return array.cast(pa.string()).fill_null("null")


def value(item: Any) -> Any:
    """A value of a record or a message as JSON has it; bytes in base64."""
    if isinstance(item, dict):
        return {str(name): value(each) for name, each in item.items()}
    if isinstance(item, (list, tuple)):
        return [value(each) for each in item]
    if isinstance(item, (bytes, bytearray, memoryview)):
        return base64.b64encode(item).decode("ascii")
    if isinstance(item, int) and not isinstance(item, bool) and abs(item) > _INTEGER_MAX:
        return str(item)
    if hasattr(item, "isoformat"):
        return item.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return item
