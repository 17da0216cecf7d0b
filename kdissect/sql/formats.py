r"""Writes query results as text, CSV, JSON, NDJSON, Parquet or Arrow, batch by batch.

Values from a capture are hostile: control characters never reach a terminal (``table`` writes them
as ``\\x1b``). Bytes are DuckDB's text of a blob in ``table`` and ``csv`` (printable ASCII as it is,
others as ``\\x00``). JSON has the values of `tables.value_text`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, BinaryIO, TextIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kdissect.atomic_file import atomic_write
from kdissect.tables.value_text import column_text, joined, json_objects, json_value
from kdissect.text import display_width, visible

_FORMAT_VERSION = 1  # of the JSON document

_QUOTED = re.compile(r'[",\r\n]|^\s|\s$')
_NOT_PRINTABLE = re.compile(rb"[^\x20-\x5b\x5d-\x7e]")


# Values


def bytes_text(value: bytes) -> str:
    """Return DuckDB's text of a blob, which DuckDB casts back to the same bytes."""
    escaped = _NOT_PRINTABLE.sub(lambda match: b"\\x%02X" % match[0][0], value)
    return escaped.decode("ascii")


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


# Formats


def write_table(schema: pa.Schema, batches: Iterable[pa.RecordBatch], out: TextIO) -> None:
    """Write aligned columns; their widths come from the first batch, and nothing is cut off."""
    names = [visible(name) for name in schema.names]
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


def _cells(batch: pa.RecordBatch) -> list[list[str]]:
    """Return the texts of each column, without control characters."""
    columns = []
    for column in batch.columns:
        texts = pc.fill_null(column_text(column, lambda value: visible(cell_text(value))), "")
        columns.append(texts.to_pylist())
    return columns


def _aligned(rows: Iterable[Sequence[str]], widths: list[int], is_number: list[bool]) -> str:
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


def write_csv(schema: pa.Schema, batches: Iterable[pa.RecordBatch], out: TextIO) -> None:
    """Write RFC 4180 with a line of names; null is an empty cell, an empty text is ``""``."""
    out.write(",".join(map(csv_text, schema.names)) + "\n")
    for batch in batches:
        lines = joined([column_text(column, csv_text) for column in batch.columns], ",")
        out.write("".join(f"{line}\n" for line in lines))


def write_csv_file(rows: pa.Table, path: str | os.PathLike[str]) -> None:
    """Write rows as `write_csv` does, for spreadsheets: a list is its values with spaces between.

    Text that a spreadsheet would run as a formula gets an apostrophe in front.
    """
    columns = []
    for column in rows.combine_chunks().columns:
        if pa.types.is_list(column.type):
            texts = pa.list_(pa.string())
            column = pc.binary_join(column.cast(texts).combine_chunks(), " ")
        if pa.types.is_string(column.type):
            is_formula = pc.match_substring_regex(column, r"^[-=+@\t\r]")
            column = pc.if_else(is_formula, pc.binary_join_element_wise("'", column, ""), column)
        columns.append(column)
    shown = pa.table(columns, names=rows.column_names)
    with atomic_write(path) as part, open(part, "w", encoding="utf-8", newline="") as out:
        write_csv(shown.schema, shown.to_batches(), out)


def write_json(schema: pa.Schema, batches: Iterable[pa.RecordBatch], out: TextIO) -> None:
    """Write one document: ``format_version``, ``columns`` (name, type), ``rows``, one row per
    line."""
    columns = [{"name": field.name, "type": str(field.type)} for field in schema]
    head = json.dumps({"format_version": _FORMAT_VERSION, "columns": columns})
    out.write(head.removesuffix("}") + ', "rows": [')
    separator = "\n"
    for line in json_objects(schema.names, batches):
        out.write(separator + line)
        separator = ",\n"
    out.write("\n]}\n")


def write_ndjson(schema: pa.Schema, batches: Iterable[pa.RecordBatch], out: TextIO) -> None:
    """Write each row as a JSON object on a line."""
    for line in json_objects(schema.names, batches):
        out.write(f"{line}\n")


def write_parquet(schema: pa.Schema, batches: Iterable[pa.RecordBatch], out: BinaryIO) -> None:
    """Write one Parquet file, compressed with zstd."""
    with pq.ParquetWriter(out, schema, compression="zstd", compression_level=1) as writer:
        for batch in batches:
            writer.write_batch(batch)


def write_arrow(schema: pa.Schema, batches: Iterable[pa.RecordBatch], out: BinaryIO) -> None:
    """Write one file in Arrow's IPC format."""
    with pa.ipc.new_file(out, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


TEXT_FORMATS: dict[str, Callable[[pa.Schema, Iterable[pa.RecordBatch], TextIO], None]] = {
    "table": write_table,
    "csv": write_csv,
    "json": write_json,
    "ndjson": write_ndjson,
}
BINARY_FORMATS: dict[str, Callable[[pa.Schema, Iterable[pa.RecordBatch], BinaryIO], None]] = {
    "parquet": write_parquet,
    "arrow": write_arrow,
}
