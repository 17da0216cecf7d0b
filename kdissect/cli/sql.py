"""`kdissect sql`: SQL over the tables of a set, run by DuckDB."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from kdissect.cli.messages import say_notes
from kdissect.cli.options import SourceOptions
from kdissect.cli.rows import BINARY, Format, format_of, write_file, write_stdout
from kdissect.cli.sources import open_source
from kdissect.cli.verbs import verb
from kdissect.step_log import logged_step


@verb("""
  kdissect sql tables/ "select api_name, count(*) n from exchanges group by all order by n desc"
  kdissect sql tables/ "select request.acks, count(*) from api_produce group by all" --format csv
  kdissect sql tables/ - --out slow.parquet < slow.sql
  kdissect sql trace.pcap "from exchanges where error_code != 0"
  kdissect sql tables/ "from exchanges where wait = 'answer'" --format ndjson | jq .latency_ms
  kdissect sql tables/ "show tables"
  kdissect sql tables/ "describe exchanges"
""")
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
            "--memory", metavar="SIZE", help="Memory for the query before it uses the disk."
        ),
    ] = "1GiB",
) -> None:
    """Query the tables with SQL: each is a view, exchanges, api_fetch, internal_offset_commit,
    ..."""
    is_prompt = query is None and sys.stdin.isatty()
    if is_prompt and (out is not None or form is not None or not sys.stdout.isatty()):
        raise typer.BadParameter("no QUERY, and stdin is a terminal", param_hint="QUERY")
    form = form or format_of(out)
    if form in BINARY and out is None and sys.stdout.isatty():
        raise typer.BadParameter(
            "binary, and stdout is a terminal; add --out", param_hint="--format"
        )
    if query == "-" and sys.stdin.isatty():
        raise typer.BadParameter("no QUERY, and stdin is a terminal", param_hint="QUERY")
    if query is None or query == "-":
        query = "" if is_prompt else sys.stdin.read()
    tables = open_source([source], capture)
    say_notes(tables)
    with tables.database(memory_limit=memory) as database:
        if is_prompt:
            _prompt(tables, database)
            return
        # bytes that the locale could not read came as surrogates
        text = os.fsencode(query).decode("utf-8", "replace")
        with logged_step("query"):
            schema, batches = database.stream(text)
        with logged_step("write rows", columns=len(schema)):
            if out is None:
                write_stdout(form, schema, batches)
            else:
                write_file(form, schema, batches, out)


def _prompt(tables: Any, database: Any) -> None:
    from kdissect.sql import view_name
    from kdissect.sql.prompt import Prompt, line_editing

    views = {view_name(name): tables[name].schema.names for name in tables.names}
    with line_editing(views):
        Prompt(database, input, sys.stdout).run()
