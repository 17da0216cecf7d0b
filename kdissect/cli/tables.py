"""`kdissect summary`, `check` and `sql`: what the tables of a set say."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from kdissect.cli.options import ResultOptions, SelectionOptions, SourceOptions
from kdissect.cli.output import BINARY, Format, format_of, say_notes, write_file, write_stdout
from kdissect.cli.sources import open_selected, open_source
from kdissect.cli.verbs import verb
from kdissect.step_log import logged_step

if TYPE_CHECKING:
    from kdissect.api import Tables
    from kdissect.sql import Database
    from kdissect.tables.schemas import Row


@verb("""
  kdissect summary trace.pcap
  kdissect summary tables/ --json
""")
def summary_command(
    source: list[str], selected: SelectionOptions, capture: SourceOptions, as_json: bool = False
) -> None:
    """Summarise a capture or a table set: APIs, clients, topics and anomalies."""
    from rich.console import Console

    from kdissect.summary import print_summary, summarise

    tables = open_selected(source, capture, selected)
    with logged_step("summarise"):
        document = summarise(tables)
    if as_json:
        ResultOptions(as_json=True).put(document, ())
    else:
        print_summary(document, Console())


@verb("""
  kdissect check tables/
  kdissect check tables/ --json
""")
def check_command(source: list[str], capture: SourceOptions, result: ResultOptions) -> None:
    """Check that the tables agree with each other: bytes, packets, ids and rows; exit 1 if not."""
    from kdissect.accounts import check

    tables = open_source(source, capture)
    with logged_step("check"):
        document = check(tables)
    result.put(document, _lines(document), failed=bool(document["faults"]))


def _lines(document: Row) -> Iterator[str]:
    from kdissect.text import visible

    for fault in document["faults"]:
        place = visible(fault["place"])
        yield f"{fault['account']}: {place}: {fault['left']:,} is not {fault['right']:,}"
    wrong = len({fault["account"] for fault in document["faults"]})
    count = len(document["accounts"])
    yield f"{wrong} of {count} accounts do not add up" if wrong else f"{count} accounts add up"


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
    source: list[str],
    capture: SourceOptions,
    form: Format | None = None,
    out: str | None = None,
    memory_limit: str = "1GiB",
) -> None:
    """Query the tables with SQL: each is a view, exchanges, api_fetch, internal_offset_commit,
    ..."""
    query = source.pop() if len(source) > 1 else None
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
    tables = open_source(source, capture)
    say_notes(tables)
    with tables.database(memory_limit=memory_limit) as database:
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


def _prompt(tables: Tables, database: Database) -> None:
    from kdissect.sql import view_name
    from kdissect.sql.prompt import Prompt, line_editing

    views = {view_name(name): tables[name].schema.names for name in tables.names}
    with line_editing(views):
        Prompt(database, input, sys.stdout).run()
