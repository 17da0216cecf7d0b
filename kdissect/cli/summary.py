"""`kdissect summary`: prints a page about a table set or a capture."""

from __future__ import annotations

import json

import typer

from kdissect.cli.options import AsJson, SelectionOptions, SourceOptions, Sources
from kdissect.cli.sources import open_selected
from kdissect.cli.verbs import verb
from kdissect.step_log import logged_step


@verb("""
  kdissect summary trace.pcap
  kdissect summary tables/ --json
""")
def summary_command(
    source: Sources, selected: SelectionOptions, capture: SourceOptions, as_json: AsJson = False
) -> None:
    """Summarise a capture or a table set: APIs, clients, topics and anomalies."""
    from rich.console import Console

    from kdissect.summary import print_summary, summarise

    tables = open_selected(source, capture, selected)
    with logged_step("summarise"):
        document = summarise(tables)
    if as_json:
        typer.echo(json.dumps(document, indent=1, default=str))
    else:
        print_summary(document, Console())
