"""`kdissect sql`: SQL over the tables of a set, answered by DuckDB."""

from __future__ import annotations

import io
import os
import sys
from enum import StrEnum
from typing import Annotated, Any, BinaryIO

import typer

from kdissect.atomic_file import atomic_write
from kdissect.cli.app import app
from kdissect.cli.common import open_source, stdout_failed, with_examples
from kdissect.cli.options import SourceOptions, with_groups

SQL_EXAMPLES = """
Examples:

  kdissect sql tables/ "select api_name, count(*) n from exchanges group by all order by n desc"

  kdissect sql tables/ "select request.acks, count(*) from api_produce group by all" --format csv

  kdissect sql tables/ - --out slow.parquet < slow.sql

  kdissect sql trace.pcap "from exchanges where error_code != 0"

  kdissect sql tables/ "from exchanges where wait = 'answer'" --format ndjson | jq .latency_ms

  kdissect sql tables/ "show tables"

  kdissect sql tables/ "describe exchanges"
"""


class Format(StrEnum):
    """--format"""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    NDJSON = "ndjson"
    PARQUET = "parquet"
    ARROW = "arrow"


@app.command("sql", cls=with_examples(SQL_EXAMPLES))
@with_groups
def sql_command(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A table set, or a capture (file, folder, glob)."),
    ],
    capture: SourceOptions,
    query: Annotated[
        str | None,
        typer.Argument(
            metavar="[QUERY]",
            help="One statement that reads; '-' is stdin. None on a terminal is a prompt.",
        ),
    ] = None,
    form: Annotated[
        Format | None,
        typer.Option(
            "--format", help="How rows are written (default: by FILE's ending, else table)."
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Write to FILE, not to stdout.")
    ] = None,
    memory: Annotated[
        str,
        typer.Option(
            "--memory", metavar="SIZE", help="What the query may hold before it uses the disk."
        ),
    ] = "1GiB",
) -> None:
    """SQL over the tables: each is a view, exchanges, api_fetch, internal_offset_commit, ..."""
    is_prompt = query is None and sys.stdin.isatty()
    if is_prompt and (out is not None or form is not None or not sys.stdout.isatty()):
        raise typer.BadParameter("no QUERY, and stdin is a terminal", param_hint="QUERY")
    form = form or _format_of(out)
    if form in _BINARY and out is None and sys.stdout.isatty():
        raise typer.BadParameter(
            "binary, and stdout is a terminal; add --out", param_hint="--format"
        )
    if query == "-" and sys.stdin.isatty():
        raise typer.BadParameter("no QUERY, and stdin is a terminal", param_hint="QUERY")
    if query is None or query == "-":
        query = "" if is_prompt else sys.stdin.read()
    tables = open_source([source], capture)
    with tables.database(memory_limit=memory) as database:
        if is_prompt:
            _prompt(tables, database)
            return
        # a query's bytes that the locale could not read came as surrogates
        text = os.fsencode(query).decode("utf-8", "replace")
        schema, batches = database.stream(text)
        if out is None:
            _to_stdout(form, schema, batches)
        else:
            _to_file(form, schema, batches, out)


_BINARY = (Format.PARQUET, Format.ARROW)
_ENDINGS = {"": Format.TABLE, "txt": Format.TABLE, "jsonl": Format.NDJSON}


def _format_of(out: str | None) -> Format:
    ending = os.path.splitext(out or "")[1].lower().removeprefix(".")
    if ending in list(Format):
        return Format(ending)
    if ending not in _ENDINGS:
        known = ", ".join(f".{form}" for form in Format if form is not Format.TABLE)
        raise typer.BadParameter(
            f"{out}: no format has this ending; there are {known} and .txt, or name a --format",
            param_hint="--out",
        )
    return _ENDINGS[ending]


def _prompt(tables: Any, database: Any) -> None:
    from kdissect.sql import view_name
    from kdissect.sql.prompt import Prompt, line_editing

    views = {view_name(name): tables[name].schema.names for name in tables.names}
    with line_editing(views):
        Prompt(database, input, sys.stdout).run()


def _to_stdout(form: Format, schema: Any, batches: Any) -> None:
    from kdissect.sql import formats

    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape", newline="")
    try:
        if form in _BINARY:
            formats.BINARY_FORMATS[form.value](schema, batches, sys.stdout.buffer)
        else:
            formats.TEXT_FORMATS[form.value](schema, batches, sys.stdout)
        sys.stdout.flush()
    except OSError as error:
        stdout_failed(error)


def _to_file(form: Format, schema: Any, batches: Any, out: str) -> None:
    """The file appears when it is whole: a query that fails leaves what was there before."""
    with atomic_write(out) as place, open(place, "ab") as binary:
        _write(form, schema, batches, binary)


def _write(form: Format, schema: Any, batches: Any, binary: BinaryIO) -> None:
    from kdissect.sql import formats

    if form in _BINARY:
        formats.BINARY_FORMATS[form.value](schema, batches, binary)
        return
    text = io.TextIOWrapper(binary, "utf-8", errors="surrogateescape", newline="")
    formats.TEXT_FORMATS[form.value](schema, batches, text)
    text.flush()
    text.detach()
