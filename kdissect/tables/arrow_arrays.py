"""Builds Arrow columns from arrays of numbers, places and codes; used by all tables."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from enum import IntEnum

import numpy as np
import pyarrow as pa

from kdissect.arrays import Bools, Bytes, Ints, address_of
from kdissect.codec.strings import as_text, gathered

TIME_TYPE = pa.timestamp("us", tz="UTC")

# Years 1 to 9999, the range that pandas, Spark and SQL share.
_FIRST_US = -62_135_596_800_000_000
_LAST_US = 253_402_300_799_999_999


def numbers(values: Ints, kind: pa.DataType, valid: Bools | None = None) -> pa.Array:
    """A column of numbers or bools; null where `valid` is False."""
    mask = None if valid is None else ~valid
    return pa.array(np.ascontiguousarray(values), kind, mask=mask)


def times_from_ns(time_ns: Ints, valid: Bools | None = None) -> pa.Array:
    """timestamp[us, UTC] from nanoseconds since 1970; null outside years 1-9999."""
    return _times(time_ns // 1000, valid)


def times_from_ms(time_ms: Ints, valid: Bools | None = None) -> pa.Array:
    """timestamp[us, UTC] from Kafka's milliseconds; null if -1 or outside years 1-9999."""
    inside = (time_ms >= _FIRST_US // 1000) & (time_ms <= _LAST_US // 1000) & (time_ms != -1)
    return _times(np.where(inside, time_ms, 0) * 1000, inside if valid is None else inside & valid)


def _times(time_us: Ints, valid: Bools | None) -> pa.Array:
    inside = (time_us >= _FIRST_US) & (time_us <= _LAST_US)
    mask = ~inside if valid is None else ~(inside & valid)
    return pa.array(np.ascontiguousarray(time_us), pa.int64(), mask=mask).view(TIME_TYPE)


def times_of(times_ns: Iterable[int | None]) -> pa.Array:
    """timestamp[us, UTC] from nanoseconds since 1970; null for None and outside years 1-9999."""
    times_us = (None if time is None else time // 1000 for time in times_ns)
    inside = [
        time if time is not None and _FIRST_US <= time <= _LAST_US else None for time in times_us
    ]
    return pa.array(inside, pa.int64()).view(TIME_TYPE)


def labels(codes: Ints, names: Sequence[str], valid: Bools | None = None) -> pa.Array:
    """A string column with few distinct values, as a dictionary: names[code] per row."""
    mask = None if valid is None else ~valid
    indices = pa.array(np.ascontiguousarray(codes, np.int32), mask=mask)
    return pa.DictionaryArray.from_arrays(indices, pa.array(list(names), pa.string()))


def names_of(kind: type[IntEnum]) -> list[str]:
    """Names, in lower case, of an enum whose members count from 0."""
    names = [member.name.lower() for member in sorted(kind)]
    assert [int(member) for member in sorted(kind)] == list(range(len(names))), kind
    return names


def lists(rows: Ints, values: pa.Array, row_count: int) -> pa.Array:
    """list column of `row_count` rows from (row, value) pairs ordered by row; never null."""
    offsets = np.searchsorted(rows, np.arange(row_count + 1)).astype(np.int32)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def binaries(buf: Bytes, start: Ints, length: Ints) -> pa.Array:
    """binary column of the places (start, length) in buf; length -1 becomes null."""
    size = np.maximum(length, 0).astype(np.int64)
    start = np.where(size > 0, start, 0)
    assert bool(np.all((start >= 0) & (start + size <= len(buf))))
    return gathered(address_of(buf) + start, np.where(length < 0, -1, size))


def strings(buf: Bytes, start: Ints, length: Ints) -> pa.Array:
    """string column of places in buf, as `binaries`; U+FFFD replaces bytes that are no UTF-8."""
    return as_text(binaries(buf, start, length))[0]


def ip_text(raw: bytes) -> str:
    """Canonical text of a 16-byte address; IPv4-mapped IPv6 as IPv4."""
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema with the value types of dictionaries."""
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in schema
    ]
    return pa.schema(fields, schema.metadata)


def plain(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table cast to the schema's types: dictionaries become plain strings."""
    if table.schema.equals(schema):
        return table
    assert table.column_names == schema.names
    columns = [
        column if column.type.equals(field.type) else column.cast(field.type)  # a cast takes 10 us
        for column, field in zip(table.columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def packed(name: str, table: pa.Table) -> bytes:
    """A table and its name as one value, for `unpacked`."""
    out = pa.BufferOutputStream()
    table = table.replace_schema_metadata({"name": name})
    with (
        pa.CompressedOutputStream(out, "zstd") as whole,
        pa.ipc.new_stream(whole, table.schema) as writer,
    ):
        writer.write_table(table)
    return bytes(out.getvalue().to_pybytes())


def unpacked(data: bytes) -> tuple[str, pa.Table]:
    """(name, table) that `packed` was given; dictionaries are plain columns."""
    table = pa.ipc.open_stream(pa.CompressedInputStream(pa.py_buffer(data), "zstd")).read_all()
    name = table.schema.metadata[b"name"].decode()
    table = table.replace_schema_metadata(None)
    return name, plain(table, plain_schema(table.schema))


def owned(table: pa.Table) -> pa.Table:
    """A copy of the table in Arrow's own memory, chunk by chunk.

    Arrow's worker threads may release a column after the call that used it returned. A buffer over
    a NumPy array needs the GIL for that, and aborts a process whose interpreter is ending.
    """
    columns = [
        pa.chunked_array([pa.concat_arrays([chunk]) for chunk in column.chunks], column.type)
        for column in table.columns
    ]
    return pa.Table.from_arrays(columns, schema=table.schema)
