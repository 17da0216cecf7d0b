"""Terminal output of a replay: the plan, then a line of progress, then the differences found."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from contextlib import suppress
from shutil import get_terminal_size

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kdissect.replay.model import ReplayPlan, Verdict
from kdissect.replay.output.results import Results, show_ns
from kdissect.replay.output.text import (
    finding_text,
    followers_of,
    headline_of,
    release_lines,
)
from kdissect.replay.planning.schedule import Pace, duration_ns
from kdissect.replay.running.runner import Runner
from kdissect.replay.target.guard import Effects, not_allowed
from kdissect.replay.target.starting_state import used_state
from kdissect.text import plural, visible

_SHOWN_GROUPS = 40  # lines of differences on the terminal; files have all, and the rest is counted
QUIET_S = 20.0  # after which a run that is not on a terminal says what it does
_TERMINAL_S, _CLEAR = 0.5, "\x1b[K"  # to the end of the line
_NO_WRAP = 100_000  # columns
_STYLES = {
    Verdict.SAME: "green",
    Verdict.TOLERATED: "cyan",
    Verdict.DIFFERENT: "red",
    Verdict.ERROR: "magenta",
    Verdict.SKIPPED: "dim",
}


def clean(text: str) -> str:
    """Text from a capture made safe for a terminal: no control characters, no markup."""
    return escape(visible(text))


def print_plan(
    plan: ReplayPlan, pace: Pace, console: Console, effects: Effects | None = None
) -> None:
    """Print the plan: requests to send per API, requests to skip with the reason, and the duration.

    With `effects`, also the names that the replay creates, writes to and deletes at the target.
    """
    workload = plan.workload
    counts = plan.counts()
    planned = sum(each.planned for each in counts)
    console.print(
        f"Plan for {clean(workload.source)}: {planned} of {len(plan.steps)} requests on "
        f"{len(plan.lanes)} connections",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for name in ("API", "class"):
        table.add_column(name)
    for name in ("sent", "skipped"):
        table.add_column(name, justify="right")
    table.add_column("why skipped", overflow="fold")
    for each in counts:
        skipped = sum(each.skipped.values())
        why = ", ".join(f"{code} {count}" for code, count in sorted(each.skipped.items()))
        table.add_row(
            each.api_name, each.step_class, str(each.planned or "-"), str(skipped or "-"), why
        )
    console.print(table)
    reasons = Counter(
        (step.skipped.code.value, step.skipped.reason)
        for step in plan.steps
        if step.skipped is not None
    )
    for (code, reason), count in reasons.most_common(_SHOWN_GROUPS):
        console.print(f"  skipped {count}: {code}: {clean(reason)}", highlight=False)
    if len(reasons) > _SHOWN_GROUPS:
        console.print(f"  and {len(reasons) - _SHOWN_GROUPS} more reasons", highlight=False)
    if missing := not_allowed(plan):
        names = ",".join(missing)
        count = sum(missing.values())
        console.print(f"  --allow {names} would send {count} more", highlight=False)
    if effects is not None:
        _print_effects(effects, console)
        _print_start(plan, console)
    took = duration_ns(plan, pace)
    lasts = "as long as the target needs" if took is None else f"{took / 1e9:.1f} s"
    console.print(f"Pace {pace}: expected duration {lasts}", highlight=False)
    for note in [*workload.notes, *plan.notes]:
        console.print(f"note: {clean(note)}", highlight=False)


def _print_effects(effects: Effects, console: Console) -> None:
    for verb, names in (
        ("make", effects.made), ("write to", effects.written), ("delete", effects.deleted),
    ):  # fmt: skip
        by_kind: dict[str, list[str]] = {}
        for kind, name in names:
            by_kind.setdefault(kind, []).append(clean(name))
        for kind, found in by_kind.items():
            text = f"  would {verb} {plural(len(found), kind)}: {', '.join(found)}"
            console.print(text, highlight=False)


def _print_start(plan: ReplayPlan, console: Console) -> None:
    """Print the state that the capture began with, which the target has to have."""
    lines = used_state(plan).lines()
    for line in lines[:_SHOWN_GROUPS]:
        console.print(f"  the capture began with {clean(line)}", highlight=False)
    if len(lines) > _SHOWN_GROUPS:
        console.print(f"  and with {len(lines) - _SHOWN_GROUPS} more", highlight=False)


class ReplayProgress:
    """Shows the work of a replay on stderr, from a thread of its own.

    On a terminal it is one line that changes. Otherwise it is a line after every twenty seconds.
    """

    def __init__(self, shown: bool) -> None:
        self._done = threading.Event()
        self._activity: Runner | str = "reading the capture"
        self._thread = threading.Thread(target=self._show, daemon=True) if shown else None
        if self._thread is not None:
            self._thread.start()

    def watch(self, activity: Runner | str) -> None:
        """Show another activity: a run, or a text."""
        self._activity = activity

    def _show(self) -> None:
        is_terminal = sys.stderr.isatty()
        while not self._done.wait(_TERMINAL_S if is_terminal else QUIET_S):
            with suppress(Exception):  # the run changes what is read here
                activity = self._activity
                text = visible(activity if isinstance(activity, str) else activity.activity())
                text = text[: get_terminal_size().columns - 1] if is_terminal else text
                sys.stderr.write(f"\r{text}{_CLEAR}" if is_terminal else f"kdissect: {text}\n")
                sys.stderr.flush()
        if is_terminal:
            sys.stderr.write(f"\r{_CLEAR}")

    def __enter__(self) -> ReplayProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(2)


def wide_console(*, stderr: bool = False) -> Console:
    """A console that wraps lines for a terminal only, or for $COLUMNS."""
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _NO_WRAP
    return console


def print_results(results: Results, console: Console) -> None:
    """Verdicts per API with latencies then and now, differences grouped, lag."""
    table = Table(box=None, pad_edge=False)
    table.add_column("API")
    for verdict in Verdict:
        table.add_column(verdict.value, justify="right")
    for name in ("p50 then", "now", "p99 then", "now"):
        table.add_column(name, justify="right")
    for api in results.by_api():
        counts = [
            f"[{_STYLES[verdict]}]{api.verdicts[verdict]}[/]" if api.verdicts[verdict] else "-"
            for verdict in Verdict
        ]
        times = (api.captured.p50, api.answered.p50, api.captured.p99, api.answered.p99)
        table.add_row(api.api_name, *counts, *(show_ns(ns) for ns in times))
    console.print(table)
    for topic in results.prepared:
        console.print(f"topic {clean(topic.name)}: {clean(topic.note)}", highlight=False)
    _print_differences(results, console)
    _print_changes(results, console)
    _print_reasons(results, console)
    _print_run(results, console)


def _print_differences(results: Results, console: Console) -> None:
    """Findings about the whole run, then kinds of differences, what would hurt first."""
    for finding in results.findings[:_SHOWN_GROUPS]:
        console.print(clean(finding_text(finding)), highlight=False)
    if (count := len(results.findings) - _SHOWN_GROUPS) > 0:
        console.print(f"and {plural(count, 'finding')} more, see --json or --html")
    if not results.kinds:
        return
    compared = f"{results.reference.value} {results.reference_name}".strip()
    console.print(f"Differences from {clean(compared)}, what would hurt first:", highlight=False)
    for kind in results.kinds[:_SHOWN_GROUPS]:
        line = headline_of(results.api_key(kind), kind)
        where = f"for example exchange {results.exchange_id(kind.step)}"
        console.print(f"  {clean(line)}, {where}", highlight=False)
        for note in [*kind.notes, followers_of(kind)]:
            if note:
                console.print(f"    {clean(note)}", highlight=False)
    if (count := len(results.kinds) - _SHOWN_GROUPS) > 0:
        console.print(f"  and {count} more, see --json or --html")


def _print_changes(results: Results, console: Console) -> None:
    """What the release changes by design; it fails no run."""
    lines = release_lines(results.outcomes)
    if lines:
        then, now = results.releases
        console.print(f"Changes of this release (Kafka {then} -> Kafka {now}), by design:")
    for line in lines[:_SHOWN_GROUPS]:
        console.print(f"    {clean(line)}", highlight=False)
    if (count := len(lines) - _SHOWN_GROUPS) > 0:
        console.print(f"    and {count} more, see --json or --html")


def _print_reasons(results: Results, console: Console) -> None:
    """Errors, findings without a place, and skipped ones, by reason."""
    for verdict in (Verdict.ERROR, Verdict.DIFFERENT, Verdict.SKIPPED):
        counts: Counter[tuple[str, str]] = Counter()
        for (_, code, reason), count in results.reasons(verdict):
            counts[code, reason] += count
        for (code, reason), count in counts.most_common(_SHOWN_GROUPS):
            name = f"{verdict.value} ({code})" if code else verdict.value
            console.print(f"{name} {count}: {clean(reason)}", highlight=False)
        if len(counts) > _SHOWN_GROUPS:
            console.print(f"{verdict.value}: and {len(counts) - _SHOWN_GROUPS} more reasons")


def _print_run(results: Results, console: Console) -> None:
    run = results.run
    line = (
        f"{results.sent_count} requests on {results.connection_count()} connections in "
        f"{run.elapsed_ns / 1e9:.1f} s ({results.requests_per_s():.0f}/s), pace {results.pace}"
    )
    lag, own = results.lag(), results.own_lag()
    if lag.count:
        line += (
            f"; behind schedule p50 {show_ns(lag.p50)}, p99 {show_ns(lag.p99)}, "
            f"max {show_ns(lag.max)} (of this not waiting for answers: p99 {show_ns(own.p99)})"
        )
    if run.reconnects:
        line += f"; {run.reconnects} connections ended early"
    console.print(line, highlight=False)
    for note in results.notes:
        console.print(f"note: {clean(note)}", highlight=False)
    verdicts = results.verdicts()
    counts = ", ".join(f"{verdicts[each]} {each.value}" for each in Verdict if verdicts[each])
    console.print(f"Verdicts: {counts or 'none'}", highlight=False)
