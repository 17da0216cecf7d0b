"""Rows of a query or of exchanges, to a file or to stdout, in the format of the file's ending."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, BinaryIO

import typer

from kdissect.atomic_file import atomic_write
from kdissect.cli.messages import stdout_failed

if TYPE_CHECKING:
    import pyarrow as pa

    Batches = Iterable[pa.RecordBatch]


class Format(StrEnum):
    """--format"""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    NDJSON = "ndjson"
    PARQUET = "parquet"
    ARROW = "arrow"


BINARY = (Format.PARQUET, Format.ARROW)
_ENDINGS = {"": Format.TABLE, "txt": Format.TABLE, "jsonl": Format.NDJSON}


def format_of(out: str | None) -> Format:
    """The format of a file by its ending; a table for stdout. Raises BadParameter."""
    ending = os.path.splitext(out or "")[1].lower().removeprefix(".")
    if ending in list(Format):
        return Format(ending)
    if ending not in _ENDINGS:
        known = ", ".join(f".{form}" for form in Format if form is not Format.TABLE)
        raise typer.BadParameter(
            f"{out}: no format has this ending; use {known} or .txt", param_hint="--out"
        )
    return _ENDINGS[ending]


def write_stdout(form: Format, schema: pa.Schema, batches: Batches) -> None:
    """batches: record batches of the schema, text as UTF-8."""
    try:
        _write(form, schema, batches, sys.stdout.buffer)
        sys.stdout.flush()
    except OSError as error:
        stdout_failed(error)


def write_file(form: Format, schema: pa.Schema, batches: Batches, out: str) -> None:
    """The file appears when it is whole; if reading fails, the file before it stays."""
    with atomic_write(out) as place, open(place, "ab") as binary:
        _write(form, schema, batches, binary)


def _write(form: Format, schema: pa.Schema, batches: Batches, binary: BinaryIO) -> None:
    from kdissect.sql import formats

    if form in BINARY:
        formats.BINARY_FORMATS[form.value](schema, batches, binary)
        return
    text = io.TextIOWrapper(binary, "utf-8", errors="surrogateescape", newline="")
    formats.TEXT_FORMATS[form.value](schema, batches, text)
    text.detach()  # writes what is left
