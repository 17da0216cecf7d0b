"""Terminal output of a replay: the plan, then a line of progress, then the differences found."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from shutil import get_terminal_size

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kdissect.replay.model import ReplayPlan, Verdict
from kdissect.replay.output.rows import Results, Row, summary_row
from kdissect.replay.output.text import (
    finding_text,
    followers_text,
    kind_line,
    release_lines,
    time_text,
)
from kdissect.replay.planning.plan import Pace, duration_ns
from kdissect.replay.running.runner import Runner
from kdissect.replay.target.guard import Effects, not_allowed
from kdissect.replay.target.state import starting_state
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
    counts: dict[tuple[int, str, str], Counter[str]] = {}  # by API; "" for steps that are sent
    for step in plan.steps:
        key = step.exchange.api_key, step.api_name, step.step_class
        code = "" if step.skipped is None else step.skipped.code.value
        counts.setdefault(key, Counter())[code] += 1
    planned = sum(codes[""] for codes in counts.values())
    requests = f"{planned} of {len(plan.steps)} requests on {len(plan.lanes)} connections"
    _line(console, f"Plan for {workload.source}: {requests}")
    table = Table(box=None, pad_edge=False)
    for name in ("API", "class"):
        table.add_column(name)
    for name in ("sent", "skipped"):
        table.add_column(name, justify="right")
    table.add_column("why skipped", overflow="fold")
    for (_, name, step_class), codes in sorted(counts.items()):
        sent = codes.pop("", 0)
        why = ", ".join(f"{code} {count}" for code, count in sorted(codes.items()))
        table.add_row(name, step_class, str(sent or "-"), str(codes.total() or "-"), why)
    console.print(table)
    reasons = Counter(
        (step.skipped.code.value, step.skipped.reason)
        for step in plan.steps
        if step.skipped is not None
    )
    lines = (f"skipped {count}: {code}: {why}" for (code, why), count in reasons.most_common())
    _some(console, lines, len(reasons), "  ", "and {} more reasons")
    if missing := not_allowed(plan):
        names = ",".join(missing)
        count = sum(missing.values())
        _line(console, f"  --allow {names} would send {count} more")
    if effects is not None:
        _print_effects(effects, console)
        _print_start(plan, console)
    took = duration_ns(plan, pace)
    lasts = "as long as the target needs" if took is None else f"{took / 1e9:.1f} s"
    _line(console, f"Pace {pace}: expected duration {lasts}")
    for note in [*workload.notes, *plan.notes]:
        _line(console, f"note: {note}")


def _print_effects(effects: Effects, console: Console) -> None:
    for verb, names in (
        ("make", effects.made), ("write to", effects.written), ("delete", effects.deleted),
    ):  # fmt: skip
        by_kind: dict[str, list[str]] = {}
        for kind, name in names:
            by_kind.setdefault(kind, []).append(name)
        for kind, found in by_kind.items():
            _line(console, f"  would {verb} {plural(len(found), kind)}: {', '.join(found)}")


def _print_start(plan: ReplayPlan, console: Console) -> None:
    """Print the state that the target has to have, since no request of the plan makes it."""
    state = starting_state(plan)
    needed = [
        f"{start}{plural(len(found), kind)}"
        for start, kind, found in (
            ("", "topic", state.topics), ("records of ", "partition", state.logs),
            ("", "committed offset", state.commits),
        )
        if found
    ]  # fmt: skip
    if needed:
        _line(console, f"  the target needs {', '.join(needed)}, which no request makes")


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
    summary = summary_row(results)
    table = Table(box=None, pad_edge=False)
    table.add_column("API")
    for verdict in Verdict:
        table.add_column(verdict.value, justify="right")
    for name in ("p50 then", "now", "p99 then", "now"):
        table.add_column(name, justify="right")
    for api in summary["apis"]:
        counts = [
            f"[{_STYLES[verdict]}]{api['verdicts'][verdict.value]}[/]"
            if verdict.value in api["verdicts"]
            else "-"
            for verdict in Verdict
        ]
        spans = api["captured_latency"], api["latency"]
        times = [span[name] for name in ("p50_us", "p99_us") for span in spans]
        table.add_row(api["api_name"], *counts, *map(time_text, times))
    console.print(table)
    findings = map(finding_text, results.findings)
    _some(console, findings, len(results.findings), "", "and {} more, see --json or --html")
    _print_kinds(results, summary["kinds"], console)
    if lines := release_lines(summary["release_changes"]):
        then, now = results.releases
        console.print(f"Changes of this release (Kafka {then} -> Kafka {now}), by design:")
        _some(console, lines, len(lines), "    ", "and {} more, see --json or --html")
    _print_reasons(summary["reasons"], console)
    _print_run(results, summary, console)


def _line(console: Console, text: str) -> None:
    console.print(clean(text), highlight=False)


def _some(console: Console, lines: Iterable[str], count: int, indent: str, more: str) -> None:
    """Print the first lines, and say how many there are besides."""
    for line in islice(lines, _SHOWN_GROUPS):
        _line(console, f"{indent}{line}")
    if count > _SHOWN_GROUPS:
        _line(console, indent + more.format(count - _SHOWN_GROUPS))


def _print_kinds(results: Results, kinds: list[Row], console: Console) -> None:
    """Kinds of differences, what would hurt first."""
    if kinds:
        _line(console, f"Differences from {results.compared_with}, what would hurt first:")
    for kind in kinds[:_SHOWN_GROUPS]:
        _line(console, f"  {kind_line(kind)}, for example exchange {kind['example']}")
        followers = [followers_text(kind["followers"])] if kind["followers"] else []
        for note in [*kind["notes"], *followers]:
            _line(console, f"    {note}")
    if (count := len(kinds) - _SHOWN_GROUPS) > 0:
        console.print(f"  and {count} more, see --json or --html")


def _print_reasons(reasons: list[Row], console: Console) -> None:
    """Errors, findings without a place, and skipped ones, by reason."""
    for verdict in (Verdict.ERROR, Verdict.DIFFERENT, Verdict.SKIPPED):
        counts: Counter[tuple[str, str]] = Counter()
        for row in reasons:
            if row["verdict"] == verdict.value:
                counts[row["code"], row["reason"]] += row["count"]
        lines = (
            f"{verdict.value} ({code}) {count}: {reason}" if code
            else f"{verdict.value} {count}: {reason}"
            for (code, reason), count in counts.most_common()
        )  # fmt: skip
        _some(console, lines, len(counts), "", f"{verdict.value}: and {{}} more reasons")


def _print_run(results: Results, summary: Row, console: Console) -> None:
    line = (
        f"{summary['sent']} requests on {summary['connections']} connections in "
        f"{summary['elapsed_s']:.1f} s ({summary['requests_per_s']:.0f}/s), pace {results.pace}"
    )
    lag, own = summary["lag"], summary["own_lag"]
    if lag["count"]:
        median, tail, most = (time_text(lag[name]) for name in ("p50_us", "p99_us", "max_us"))
        line += f"; behind schedule p50 {median}, p99 {tail}, max {most} (of this not waiting for "
        line += f"answers: p99 {time_text(own['p99_us'])})"
    if summary["reconnects"]:
        line += f"; {summary['reconnects']} connections ended early"
    _line(console, line)
    for note in results.notes:
        _line(console, f"note: {note}")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in summary["verdicts"].items())
    _line(console, f"Verdicts: {counts or 'none'}")
