"""`kdissect incidents`: the problems in a capture, with their evidence."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import typer

from kdissect.cli.options import ResultOptions, SelectionOptions, SourceOptions
from kdissect.cli.sources import open_selected
from kdissect.cli.verbs import verb

if TYPE_CHECKING:
    from kdissect.tables.schemas import Row

_WIDTH_MAX, _INDENT = 100, 6


@verb("""
  kdissect incidents trace.pcap
  kdissect incidents tables/ --json
  kdissect incidents 'trace-*.pcap' --keylog keys.log --fail-on bad
  kdissect incidents tables/ --fail-on broker_stall,login_failures
""")
def incidents_command(
    source: list[str],
    selected: SelectionOptions,
    capture: SourceOptions,
    result: ResultOptions,
    fail_on: list[str] | None = None,
) -> None:
    """Show incidents: stalled brokers, refused logins, stuck consumers, storms and others."""
    from kdissect.incidents import SEVERITIES, json_rows

    wanted = _wanted(fail_on or ())
    rows = json_rows(open_selected(source, capture, selected).incidents().to_arrow())
    result.put(
        {"format_version": 1, "incidents": rows},
        incident_lines(rows),
        failed=any(
            {row["kind"], *SEVERITIES[SEVERITIES.index(row["severity"]) :]} & wanted for row in rows
        ),
    )


def _wanted(values: Sequence[str]) -> set[str]:
    """Return the kinds and severities of --fail-on; raises BadParameter for an unknown one."""
    from kdissect.incidents import KINDS, SEVERITIES

    names = {name.strip() for value in values for name in value.split(",")}
    for name in sorted(names):
        if name not in KINDS and name not in SEVERITIES:
            raise typer.BadParameter(
                f"{name!r} is none of {', '.join((*SEVERITIES, *sorted(KINDS)))}",
                param_hint="--fail-on",
            )
    return names


_MARGIN = " " * _INDENT


def incident_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines of incidents for a terminal. rows: as JSON has them."""
    if not rows:
        yield "No incidents found"
    width = min(_WIDTH_MAX, shutil.get_terminal_size((_WIDTH_MAX, 0)).columns)
    for number, row in enumerate(rows):
        if number:
            yield ""
        yield f"{row['severity']:<{_INDENT}}{row['kind']}  {row['subject']}"
        yield from textwrap.wrap(
            f"{_when(row)}. {row['text']}", width, initial_indent=_MARGIN, subsequent_indent=_MARGIN
        )
        if row["next_command"]:
            yield f"{_MARGIN}$ {row['next_command']}"


def _when(row: Row) -> str:
    """Return when an incident happened and what it cost: 2026-11-22 14:03:07.123, 3.01 s, ..."""
    from kdissect.text import duration, plural

    begin, end = (datetime.fromisoformat(row[name]) for name in ("start_time", "end_time"))
    length = (end - begin).total_seconds() * 1000
    parts = [f"{begin:%Y-%m-%d %H:%M:%S}.{begin.microsecond // 1000:03d}"]
    parts += [f"for {duration(length)}"] if length else []
    parts += [plural(row["request_count"], "request")] if row["request_count"] else []
    parts += [f"{duration(row['time_lost_ms'])} lost"] if row["time_lost_ms"] else []
    return ", ".join(parts)
