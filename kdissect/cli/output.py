"""Exit codes, messages on stderr, and results on stdout or in files."""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, BinaryIO, Literal, get_args

import typer

from kdissect.atomic_file import atomic_write
from kdissect.errors import EnvironmentFailed, QueryError

if TYPE_CHECKING:
    import pyarrow as pa

    from kdissect.api import Tables

    Batches = Iterable[pa.RecordBatch]

EXIT_FINDING, EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_INTERRUPTED = 1, 2, 3, 130
_NAMED_MAX = 8  # names in a message; others are counted


def say(line: str) -> None:
    """Print a line for the user on stderr."""
    typer.echo(f"kdissect: {line}", err=True)


def say_notes(tables: Tables) -> None:
    """Print the notes of the tables on stderr."""
    for note in tables.notes:
        say(note)


def some_of(names: Sequence[str]) -> str:
    """Join the first few names of a list, with a count of the others."""
    shown = ", ".join(names[:_NAMED_MAX])
    more = len(names) - _NAMED_MAX
    return f"{shown} and {more:,} more" if more > 0 else shown


def say_no_kafka(tables: Tables, captures: Sequence[str]) -> None:
    """Print that there is no Kafka traffic, and which packets were not read, on stderr."""
    ignored: Counter[str] = Counter()
    for row in tables.captures.to_arrow(["ignored_reasons"]).to_pylist():
        ignored.update(dict(row["ignored_reasons"] or ()))
    say(f"warning: {no_kafka(captures, ignored)}")


def no_kafka(captures: Sequence[str], ignored: Counter[str]) -> str:
    """Return a line for captures without Kafka traffic. ignored: packets by reason."""
    counts = ", ".join(f"{count:,} {reason}" for reason, count in ignored.most_common())
    return f"no Kafka traffic found in {some_of(captures)}" + (
        f"; ignored packets: {counts}" if counts else ""
    )


def shown(value: str | None, missing: str) -> str:
    """Return a capture's text without control characters."""
    from kdissect.text import visible

    return missing if value is None else visible(value) or '""'


def put(lines: Iterable[str]) -> None:
    """Write lines to stdout; a reader that closes the pipe early is no error."""
    try:
        for line in lines:
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError as error:
        stdout_failed(error)


def stdout_failed(error: OSError) -> None:
    """Handle a failed write to stdout: ignore a broken pipe, raise EnvironmentFailed otherwise."""
    close_stdout()
    if not isinstance(error, BrokenPipeError):
        raise EnvironmentFailed(f"stdout: {error.strerror or error}") from error


def close_stdout() -> None:
    """Discard the buffer of stdout and all later output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (stdout lasts as long as the program)


# Rows of a query or of exchanges, in the format of the file's ending

Format = Literal["table", "csv", "json", "ndjson", "parquet", "arrow"]
BINARY = ("parquet", "arrow")
_ENDINGS: dict[str, Format] = {form: form for form in get_args(Format)}
_ENDINGS |= {"": "table", "txt": "table", "jsonl": "ndjson"}


def format_of(out: str | None) -> Format:
    """The format of a file by its ending; a table for stdout. Raises BadParameter."""
    ending = os.path.splitext(out or "")[1].lower().removeprefix(".")
    if ending not in _ENDINGS:
        known = ", ".join(f".{form}" for form in get_args(Format) if form != "table")
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
    import pyarrow as pa

    from kdissect.sql import formats
    from kdissect.sql.database import one_line

    try:
        if form in BINARY:
            formats.BINARY_FORMATS[form](schema, batches, binary)
            return
        text = io.TextIOWrapper(binary, "utf-8", errors="surrogateescape", newline="")
        formats.TEXT_FORMATS[form](schema, batches, text)
        text.detach()  # writes what is left
    except (pa.ArrowException, OverflowError) as error:
        raise QueryError(f"a value cannot be written as {form}: {one_line(error)}") from error
