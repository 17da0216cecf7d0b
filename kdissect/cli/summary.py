"""`kdissect summary`: prints a page about a table set or a capture."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kdissect.cli.app import app
from kdissect.cli.common import Sources, open_selected, with_examples
from kdissect.cli.options import SelectionOptions, SourceOptions, with_groups

SUMMARY_EXAMPLES = """
Examples:

  kdissect summary trace.pcap

  kdissect summary tables/ --json
"""


@app.command("summary", cls=with_examples(SUMMARY_EXAMPLES))
@with_groups
def summary_command(
    source: Sources,
    selected: SelectionOptions,
    capture: SourceOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Summarise a capture or a table set: APIs, clients, topics and anomalies."""
    from rich.console import Console

    from kdissect.summary import print_summary, summarise

    tables = open_selected(source, capture, selected)
    document = summarise(tables)
    if as_json:
        typer.echo(json.dumps(document, indent=1, default=str))
    else:
        print_summary(document, Console())
