"""Builds Arrow columns from arrays of numbers, places and codes; used by all tables."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.jit import kernel

TIME_TYPE = pa.timestamp("us", tz="UTC")

# Years 1 to 9999, the range that pandas, Spark and SQL share.
_FIRST_US = -62_135_596_800_000_000
_LAST_US = 253_402_300_799_999_999

Ints = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


def numbers(values: Ints, kind: pa.DataType, valid: Mask | None = None) -> pa.Array:
    """A column of numbers or bools; null where `valid` is False."""
    mask = None if valid is None else ~valid
    return pa.array(np.ascontiguousarray(values), kind, mask=mask)


def times_from_ns(time_ns: Ints, valid: Mask | None = None) -> pa.Array:
    """timestamp[us, UTC] from nanoseconds since 1970; null outside years 1-9999."""
    return _times(time_ns // 1000, valid)


def times_from_ms(time_ms: Ints, valid: Mask | None = None) -> pa.Array:
    """timestamp[us, UTC] from Kafka's milliseconds; null if -1 or outside years 1-9999."""
    inside = (time_ms >= _FIRST_US // 1000) & (time_ms <= _LAST_US // 1000) & (time_ms != -1)
    return _times(np.where(inside, time_ms, 0) * 1000, inside if valid is None else inside & valid)


def _times(time_us: Ints, valid: Mask | None) -> pa.Array:
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


def labels(codes: Ints, names: Sequence[str], valid: Mask | None = None) -> pa.Array:
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


@kernel
def _copy_places(
    buf: npt.NDArray[np.uint8],
    start: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint8],
) -> None:
    at = 0
    for row in range(start.size):
        size = length[row]
        if size > 0:
            pos = start[row]
            for k in range(size):
                out[at + k] = buf[pos + k]
            at += size


def binaries(buf: npt.NDArray[np.uint8], start: Ints, length: Ints) -> pa.Array:
    """binary column of the places (start, length) in buf; length -1 becomes null."""
    start = np.ascontiguousarray(start, np.int64)
    length = np.ascontiguousarray(length, np.int64)
    sizes = np.maximum(length, 0)
    assert bool(np.all((start[sizes > 0] >= 0) & ((start + sizes)[sizes > 0] <= buf.size)))
    offsets = np.zeros(start.size + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    total = int(offsets[-1])
    if total > 2**31 - 1:
        raise OverflowError("a column of more than 2 GiB in one chunk")
    data = np.empty(total, np.uint8)
    _copy_places(buf, start, length, data)
    missing = length < 0
    validity = None
    if missing.any():
        validity = pa.py_buffer(np.packbits(~missing, bitorder="little").tobytes())
    return pa.Array.from_buffers(
        pa.binary(),
        start.size,
        [validity, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)],
        null_count=int(missing.sum()),
    )


def strings(buf: npt.NDArray[np.uint8], start: Ints, length: Ints) -> tuple[pa.Array, list[int]]:
    """(string column of places in buf, rows with invalid UTF-8, in which U+FFFD replaces bytes)."""
    raw = binaries(buf, start, length)
    try:
        return raw.cast(pa.string()), []
    except pa.ArrowInvalid:
        values = raw.to_pylist()
    texts: list[str | None] = []
    bad: list[int] = []
    for row, value in enumerate(values):
        if value is None:
            texts.append(None)
            continue
        try:
            texts.append(value.decode("utf-8"))
        except UnicodeDecodeError:
            texts.append(value.decode("utf-8", "replace"))
            bad.append(row)
    return pa.array(texts, pa.string()), bad


_BASE64 = np.frombuffer(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", np.uint8
)


def uuid_texts(raw: npt.NDArray[np.uint8]) -> pa.Array:
    """Kafka's text of uuids, 22 characters of URL-safe base64; raw: uint8[n, 16]."""
    count = raw.shape[0]
    padded = np.zeros((count, 18), np.uint32)
    padded[:, :16] = raw
    triples = padded.reshape(count, 6, 3)
    word = (triples[:, :, 0] << 16) | (triples[:, :, 1] << 8) | triples[:, :, 2]
    digits = np.stack([(word >> shift) & 63 for shift in (18, 12, 6, 0)], axis=2)
    text = np.ascontiguousarray(_BASE64[digits.reshape(count, 24)[:, :22]])
    offsets = np.arange(count + 1, dtype=np.int32) * 22
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(text))


def ip_text(raw: bytes) -> str:
    """Canonical text of a 16-byte address; IPv4-mapped IPv6 as IPv4."""
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address)


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


def mix64(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64: every input bit affects all output bits."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
