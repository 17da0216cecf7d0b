r"""Writes query results as text, CSV, JSON, NDJSON, Parquet or Arrow, batch by batch.

Values from a capture are hostile: control characters never reach a terminal (``table`` writes them
as ``\\x1b``). Times are RFC 3339 in UTC. Bytes are DuckDB's text of a blob in ``table`` and ``csv``
(printable ASCII as it is, others as ``\\x00``), base64 in JSON. Numbers that JSON cannot represent
are strings there: integers beyond 2^53, decimals, NaN and infinities.

Columns become columns of text before rows are joined: numbers and times by Arrow, text once for
each distinct value, nested values one by one.
"""

from __future__ import annotations

import base64
import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from itertools import chain
from typing import Any, BinaryIO, TextIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kdissect.text import display_width, visible

_FORMAT_VERSION = 1  # of the JSON document
_INTEGER_MAX = 2**53  # larger integers are not exact as doubles

_QUOTED = re.compile(r'[",\r\n]|^\s|\s$')
_NOT_PRINTABLE = re.compile(rb"[^\x20-\x5b\x5d-\x7e]")
_MICROS_PER_SECOND = 1_000_000


def column_names(schema: pa.Schema) -> list[str]:
    """Return the columns' names, made distinct: ``a, a`` gives ``a, a_1``."""
    names: list[str] = []
    for name in schema.names:
        distinct, number = name, 0
        while distinct in names:
            number += 1
            distinct = f"{name}_{number}"
        names.append(distinct)
    return names


# Values


def time_text(value: datetime.datetime) -> str:
    """Format a time as RFC 3339, with the zone if the value has one."""
    text = value.isoformat(timespec="microseconds")
    return text.removesuffix("+00:00") + "Z" if text.endswith("+00:00") else text


def interval_text(value: Any) -> str:
    """Format an interval as ISO 8601: months, days, seconds."""
    seconds, micros = divmod(value.nanoseconds // 1000, _MICROS_PER_SECOND)
    tail = f".{micros:06d}".rstrip("0") if micros else ""
    return f"P{value.months}M{value.days}DT{seconds}{tail}S"


def bytes_text(value: bytes) -> str:
    """Return DuckDB's text of a blob, which DuckDB casts back to the same bytes."""
    escaped = _NOT_PRINTABLE.sub(lambda match: b"\\x%02X" % match[0][0], value)
    return escaped.decode("ascii")


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
        return time_text(value)
    return str(value)  # dates, times and uuids have ISO's form


def json_text(value: Any) -> str:
    return json.dumps(json_value(value))


def cell_text(value: Any) -> str:
    """Format a value as a cell of text; nested values as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return bytes_text(value)
    if isinstance(value, pa.MonthDayNano) or not isinstance(value, dict | list | tuple):
        return str(json_value(value))
    return json.dumps(json_value(value), ensure_ascii=False)


def csv_text(value: Any) -> str:
    """Format a cell as in RFC 4180: quoted if necessary, and if empty, since null is an empty
    cell."""
    cell = cell_text(value)
    if cell and not _QUOTED.search(cell):
        return cell
    return '"' + cell.replace('"', '""') + '"'


# Columns


def column_text(column: pa.Array, text_of: Callable[[Any], str], is_json: bool = False) -> pa.Array:
    """Return the column as strings, null staying null; `text_of` formats one value."""
    kind = column.type
    if pa.types.is_integer(kind):
        texts = pc.cast(column, pa.string())
        if not is_json or kind.bit_width < 64:
            return texts
        is_large = pc.greater(column, _INTEGER_MAX)
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
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        coded = column.dictionary_encode()
        return pa.array(map(text_of, coded.dictionary.to_pylist()), pa.string()).take(coded.indices)
    values = column.to_pylist()
    if pa.types.is_map(kind):
        values = [None if value is None else dict(value) for value in values]
    return pa.array([None if value is None else text_of(value) for value in values], pa.string())


def _quoted_where(condition: pa.Array, texts: pa.Array) -> pa.Array:
    return pc.if_else(condition, pc.binary_join_element_wise('"', texts, '"', ""), texts)


def _joined(parts: list[Any], between: str) -> list[str]:
    """Join the columns' texts to rows; null becomes empty."""
    joined = pc.binary_join_element_wise(
        *parts, between, null_handling="replace", null_replacement=""
    )
    lines: list[str] = joined.to_pylist()
    return lines


# Formats


def write_table(schema: pa.Schema, batches: Iterable[Any], out: TextIO) -> None:
    """Write aligned columns; their widths come from the first batch, and nothing is cut off."""
    names = [visible(name) for name in column_names(schema)]
    is_number = [_is_number(field.type) for field in schema]
    waiting = iter(batches)
    first = next(waiting, None)
    head = [] if first is None else [_cells(first)]
    widths = [
        max(map(display_width, (name, *column)))
        for name, column in zip(names, head[0] if head else [()] * len(names), strict=True)
    ]
    out.write(_aligned([names], widths, is_number))
    out.write("  ".join("-" * width for width in widths) + "\n")
    for columns in chain(head, map(_cells, waiting)):
        out.write(_aligned(zip(*columns, strict=True), widths, is_number))


def _cells(batch: Any) -> list[list[str]]:
    """Return the texts of each column, without control characters."""
    columns = []
    for column in batch.columns:
        texts = pc.fill_null(column_text(column, lambda value: visible(cell_text(value))), "")
        columns.append(texts.to_pylist())
    return columns


def _aligned(rows: Iterable[Any], widths: list[int], is_number: list[bool]) -> str:
    lines = []
    for row in rows:
        cells = [
            " " * (width - display_width(cell)) + cell
            if right
            else cell + " " * (width - display_width(cell))
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        lines.append("  ".join(cells).rstrip() + "\n")
    return "".join(lines)


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    )


def write_csv(schema: pa.Schema, batches: Iterable[Any], out: TextIO) -> None:
    """Write RFC 4180 with a line of names; null is an empty cell, an empty text is ``""``."""
    out.write(",".join(map(csv_text, column_names(schema))) + "\n")
    for batch in batches:
        lines = _joined([column_text(column, csv_text) for column in batch.columns], ",")
        out.write("".join(f"{line}\n" for line in lines))


def write_json(schema: pa.Schema, batches: Iterable[Any], out: TextIO) -> None:
    """Write one document: ``format_version``, ``columns`` (name, type), ``rows``, one row per
    line."""
    names = column_names(schema)
    columns = [
        {"name": name, "type": str(field.type)} for name, field in zip(names, schema, strict=True)
    ]
    head = json.dumps({"format_version": _FORMAT_VERSION, "columns": columns})
    out.write(head.removesuffix("}") + ', "rows": [')
    separator = "\n"
    for line in _objects(names, batches):
        out.write(separator + line)
        separator = ",\n"
    out.write("\n]}\n")


def write_ndjson(schema: pa.Schema, batches: Iterable[Any], out: TextIO) -> None:
    """Write each row as a JSON object on a line."""
    for line in _objects(column_names(schema), batches):
        out.write(f"{line}\n")


def _objects(names: list[str], batches: Iterable[Any]) -> Iterator[str]:
    """Yield each row as a JSON object."""
    keys = [f"{', ' if place else '{'}{json.dumps(name)}: " for place, name in enumerate(names)]
    for batch in batches:
        parts: list[Any] = []
        for key, column in zip(keys, batch.columns, strict=True):
            parts += [key, pc.fill_null(column_text(column, json_text, is_json=True), "null")]
        yield from _joined([*parts, "}"], "")


def write_parquet(schema: pa.Schema, batches: Iterable[Any], out: BinaryIO) -> None:
    """Write one Parquet file, compressed with zstd."""
    named = _named(schema)
    with pq.ParquetWriter(out, named, compression="zstd", compression_level=1) as writer:
        for batch in batches:
            writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=named))


def write_arrow(schema: pa.Schema, batches: Iterable[Any], out: BinaryIO) -> None:
    """Write one file in Arrow's IPC format."""
    named = _named(schema)
    with pa.ipc.new_file(out, named) as writer:
        for batch in batches:
            writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=named))


def _named(schema: pa.Schema) -> pa.Schema:
    """Return the schema with distinct names."""
    names = column_names(schema)
    return pa.schema([field.with_name(name) for field, name in zip(schema, names, strict=True)])


TEXT_FORMATS: dict[str, Callable[[pa.Schema, Iterable[Any], TextIO], None]] = {
    "table": write_table,
    "csv": write_csv,
    "json": write_json,
    "ndjson": write_ndjson,
}
BINARY_FORMATS: dict[str, Callable[[pa.Schema, Iterable[Any], BinaryIO], None]] = {
    "parquet": write_parquet,
    "arrow": write_arrow,
}
