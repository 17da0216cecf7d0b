"""Hides bytes of records as `--payload` says, and gives readable forms of values.

- `full`: all bytes.
- `keys`: keys; values and header values are null.
- `hash`: keys, values and header values are the 16 lower-case hexadecimal digits of their xxh3_64
  (null stays null), so that equal bytes stay recognisable.
- `none`: keys, values and header values are null.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_hexdigest

from kdissect.arrays import Marks
from kdissect.codec.embedded_structs import Places
from kdissect.codec.nested_columns import with_fields, with_values
from kdissect.tables.schemas import decoded_fields

FULL, KEYS, HASH, _NONE = "full", "keys", "hash", "none"
_MAGIC_BYTE = 0  # of the Schema Registry's wire format: 0, schema id int32, data


def shown(records: pa.Table, payload: str) -> pa.Table:
    """Rows of `records` with keys, values and headers as `payload` allows."""
    if payload == FULL:
        return records
    for name in ("value",) if payload == KEYS else ("key", "value"):
        index = records.schema.get_field_index(name)
        column = _hidden(records[name].combine_chunks(), payload)
        records = records.set_column(index, records.schema.field(index), column)
    index = records.schema.get_field_index("headers")
    headers = records["headers"].combine_chunks()
    field = records.schema.field(index)
    return records.set_column(index, field, _hidden_headers(headers, payload))


def _hidden(column: pa.Array, payload: str) -> pa.Array:
    return hashes(column) if payload == HASH else pa.nulls(len(column), pa.binary())


def _hidden_headers(headers: pa.ListArray, payload: str) -> pa.ListArray:
    entries = headers.flatten()
    return with_values(
        headers, with_fields(entries, {"value": _hidden(entries.field("value"), payload)})
    )


def hashes(column: pa.Array) -> pa.Array:
    """The hexadecimal xxh3_64 of each value as 16 bytes; null stays null.

    The library hashes one value per call, so only this mode takes a Python step per record.
    """
    texts = [None if value is None else xxh3_64_hexdigest(value) for value in column.to_pylist()]
    return pa.array(texts, pa.string()).cast(pa.binary())


# -- values read for people -----------------------------------------------------------------


def with_decoded(records: pa.Table, kind: str, payload: str) -> pa.Table:
    """`records` (as `shown`) with the columns of ``--decode-values``; null where a value cannot be
    read.

    With `hash` all of them are null, because hashes are no values.
    """
    for column in decoded_fields(kind):
        source = records["key" if column.name.startswith("key") else "value"].combine_chunks()
        if payload == HASH:
            read = pa.nulls(len(source), column.type)
        elif column.name == "value_text":
            read = texts(source)
        elif column.name == "value_json":
            read = canonical_json(source)
        else:
            read = schema_ids(source)
        records = records.append_column(column, read)
    return records


def texts(column: pa.Array) -> pa.Array:
    """The strings of a binary column; null if a value is no UTF-8."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([_text(value) for value in column.to_pylist()], pa.string())


def _text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode("utf-8")
    except UnicodeDecodeError:
        return None


def canonical_json(column: pa.Array) -> pa.Array:
    """JSON values in a canonical form: sorted names, no spaces, UTF-8; null if they are no JSON.

    RFC 8259 defines JSON. Integers keep all digits; other numbers are doubles, and one beyond their
    range makes the value null.
    """
    return pa.array([_canonical(value) for value in column.to_pylist()], pa.string())


def _canonical(value: bytes | None) -> str | None:
    if not value:
        return None
    try:
        parsed = json.loads(value.decode("utf-8"), parse_constant=_no_constant)
        text = json.dumps(
            parsed, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except (ValueError, RecursionError):
        return None
    # a lone surrogate has no UTF-8, so its escape stays
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def schema_ids(column: pa.Array) -> pa.Array:
    """Ids in the Schema Registry's wire format (byte 0, int32 id); null for other values."""
    places = Places.of(column)
    value, there = places.int32(1)
    first: Marks = np.ones(len(column), np.uint8)
    first[there] = places.buf[places.start[there]]
    return pa.array(value.astype(np.int32), pa.int32(), mask=first != _MAGIC_BYTE)
