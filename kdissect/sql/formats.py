"""Query results as text, CSV, JSON or Parquet, batch by batch.

What came from a capture is hostile: control characters never reach a terminal (``table`` writes
them as ``\\x1b``). Times are RFC 3339 in UTC. Bytes are DuckDB's text of a blob in ``table`` and
``csv`` (printable ASCII as it is, all else as ``\\x00``), base64 in ``json``. Values that JSON has
not the numbers for are strings there: integers beyond 2^53, decimals, NaN and infinities.
"""

from __future__ import annotations

import base64
import datetime
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from itertools import chain
from typing import Any, BinaryIO, TextIO
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

FORMAT_VERSION = 1  # of the JSON document
INTEGER_MAX = 2**53  # larger ones do not survive where numbers are doubles

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_QUOTED = re.compile(r'[",\r\n]|^\s|\s$')
_NOT_PRINTABLE = re.compile(rb"[^\x20-\x5b\x5d-\x7e]")
_MICROS_PER_SECOND = 1_000_000


def column_names(schema: pa.Schema) -> list[str]:
    """The columns' names, made distinct: ``a, a`` gives ``a, a_1``."""
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
    """RFC 3339; with the zone where the value has one."""
    text = value.isoformat()
    return text.removesuffix("+00:00") + "Z" if text.endswith("+00:00") else text


def interval_text(value: Any) -> str:
    """ISO 8601 of an interval: months, days, seconds."""
    seconds, micros = divmod(value.nanoseconds // 1000, _MICROS_PER_SECOND)
    tail = f".{micros:06d}".rstrip("0") if micros else ""
    return f"P{value.months}M{value.days}DT{seconds}{tail}S"


def bytes_text(value: bytes) -> str:
    """DuckDB's text of a blob, which gives the bytes back."""
    escaped = _NOT_PRINTABLE.sub(lambda found: b"\\x%02X" % found[0][0], value)
    return escaped.decode("ascii")


def json_value(value: Any) -> Any:
    """A value of pyarrow's as JSON has it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -INTEGER_MAX <= value <= INTEGER_MAX else str(value)
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
        is_whole = value == value.to_integral_value() and value.as_tuple().exponent == 0
        return json_value(int(value)) if is_whole else str(value)
    return _plain_text(value)


def _plain_text(value: Any) -> str:
    if isinstance(value, datetime.datetime):
        return time_text(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    return str(value)


def cell_text(value: Any) -> str:
    """A value as a cell of text: nested values as JSON, null as nothing."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return bytes_text(value)
    if isinstance(value, pa.MonthDayNano):
        return interval_text(value)
    if isinstance(value, dict | list | tuple):
        return json.dumps(json_value(value), ensure_ascii=False)
    return _plain_text(value)


def printable(text: str) -> str:
    """The text without anything that a terminal would obey."""
    return _CONTROL.sub(lambda found: _escape(found[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _map_columns(schema: pa.Schema) -> list[bool]:
    return [pa.types.is_map(field.type) for field in schema]


def _rows(batches: Iterable[Any], schema: pa.Schema) -> Iterator[tuple[Any, ...]]:
    maps = _map_columns(schema)
    for batch in batches:
        columns = [
            [None if each is None else dict(each) for each in column.to_pylist()]
            if is_map
            else column.to_pylist()
            for column, is_map in zip(batch.columns, maps, strict=True)
        ]
        yield from zip(*columns, strict=True) if columns else ()


# Formats


def write_table(schema: pa.Schema, batches: Iterable[Any], out: TextIO) -> None:
    """Aligned columns; widths come from the first batch, and nothing is ever cut off."""
    names = [printable(name) for name in column_names(schema)]
    is_number = [_is_number(field.type) for field in schema]
    waiting = iter(batches)
    first = next(waiting, None)
    head = [] if first is None else [_cells(row) for row in _rows([first], schema)]
    widths = [
        max(map(_width, (name, *column)))
        for name, column in zip(names, _columns(head, len(names)), strict=True)
    ]

    def line(cells: list[str]) -> str:
        padded = [
            " " * (width - _width(cell)) + cell if right else cell + " " * (width - _width(cell))
            for cell, width, right in zip(cells, widths, is_number, strict=True)
        ]
        return "  ".join(padded).rstrip()

    out.write(line(names) + "\n")
    out.write("  ".join("-" * width for width in widths) + "\n")
    for row in chain(head, (_cells(row) for row in _rows(waiting, schema))):
        out.write(line(row) + "\n")


def _cells(row: tuple[Any, ...]) -> list[str]:
    return [printable(cell_text(value)) for value in row]


def _columns(rows: list[list[str]], count: int) -> list[tuple[str, ...]]:
    return list(zip(*rows, strict=True)) if rows else [()] * count


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1
        for each in text
    )


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    )


def write_csv(schema: pa.Schema, batches: Iterable[Any], out: TextIO) -> None:
    """RFC 4180 with a line of names; null is an empty cell, an empty text is ``""``."""
    out.write(",".join(map(_quoted, column_names(schema))) + "\n")
    for row in _rows(batches, schema):
        cells = ("" if value is None else _quoted(cell_text(value)) for value in row)
        out.write(",".join(cells) + "\n")


def _quoted(cell: str) -> str:
    if cell and not _QUOTED.search(cell):
        return cell
    return '"' + cell.replace('"', '""') + '"'


def write_json(schema: pa.Schema, batches: Iterable[Any], out: TextIO) -> None:
    """One document: ``format_version``, ``columns`` (name, type), ``rows``, a row a line."""
    names = column_names(schema)
    columns = [
        {"name": name, "type": str(field.type)} for name, field in zip(names, schema, strict=True)
    ]
    head = json.dumps({"format_version": FORMAT_VERSION, "columns": columns})
    out.write(head.removesuffix("}") + ', "rows": [')
    separator = "\n"
    for row in _rows(batches, schema):
        document = {name: json_value(value) for name, value in zip(names, row, strict=True)}
        out.write(separator + json.dumps(document, ensure_ascii=True))
        separator = ",\n"
    out.write("\n]}\n")


def write_parquet(schema: pa.Schema, batches: Iterable[Any], out: BinaryIO) -> None:
    """One Parquet file, zstd."""
    named = pa.schema(
        [field.with_name(name) for field, name in zip(schema, column_names(schema), strict=True)]
    )
    with pq.ParquetWriter(out, named, compression="zstd", compression_level=1) as writer:
        for batch in batches:
            writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=named))


TEXT_FORMATS: dict[str, Callable[[pa.Schema, Iterable[Any], TextIO], None]] = {
    "table": write_table,
    "csv": write_csv,
    "json": write_json,
}
