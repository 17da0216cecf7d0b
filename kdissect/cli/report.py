"""`kdissect report`: writes a table set or captures as one HTML page with CSV files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kdissect.cli.incidents import incident_lines
from kdissect.cli.inventory import InventoryOptions, write_inventory
from kdissect.cli.options import ResultOptions, SelectionOptions, SourceOptions
from kdissect.cli.sources import open_selected
from kdissect.cli.verbs import verb


@verb("""
  kdissect report tables/
  kdissect report trace.pcap --keylog keys.log
  kdissect report tables/ --out monday.html --no-csv
  kdissect report tables/ --target 4.3 --json
  kdissect report before/ after/ --inventory clients.csv --since 2026-11-21T07:30:00Z
""")
def report_command(
    source: list[str],
    selected: SelectionOptions,
    capture: SourceOptions,
    clients: InventoryOptions,
    result: ResultOptions,
    out: str | None = None,
    csv: bool = True,
    target: str = "4.0",
) -> None:
    """Write one self-contained HTML page: what happened, what stands out."""
    from kdissect.report import Options, build, check_options, name_of

    clients.check()
    options = Options(target, clients.since_us)
    check_options(out, options)
    with _progress(shown=not result.quiet and sys.stderr.isatty()) as progress:
        tables = open_selected(source, capture, selected)
        report = build(tables, out, options, name=name_of(source), csv=csv, progress=progress)
    changes: list[str] = []
    if clients.is_given:
        changes = list(write_inventory(tables, clients))
    files = f" and {len(report.csv)} CSV files beside it" if report.csv else ""
    ending = f"Report: {report.html}{files}"
    result.put(report.document, [*incident_lines(report.document["incidents"]), *changes, ending])


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[str, float], None]]:
    """Yield a function that updates a bar on stderr: the section at work, and the time left."""
    if not shown:
        yield lambda step, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=1.0)
        yield lambda step, share: bar.update(task, description=step, completed=share)
