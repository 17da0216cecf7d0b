"""Terminal output of a replay: the plan, then a line of progress, then the differences found."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from shutil import get_terminal_size
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from kdissect.replay.model import CLASSES, ReplayPlan, SkipCode, Verdict
from kdissect.replay.output.rows import Results, summary_row
from kdissect.replay.output.text import rendered, time_text
from kdissect.replay.planning.plan import Pace, duration_ns
from kdissect.replay.running.runner import Runner
from kdissect.replay.target.guard import Effects
from kdissect.replay.target.state import starting_facts
from kdissect.text import visible

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


def print_plan(
    plan: ReplayPlan, pace: Pace, console: Console, effects: Effects | None = None
) -> None:
    """Print the plan: requests to send per API, requests to skip with the reason, and the duration.

    With `effects`, also the names that the replay creates, writes to and deletes at the target.
    """
    counts: dict[tuple[int, str, str], Counter[str]] = {}  # by API; "" for steps that are sent
    for step in plan.steps:
        key = step.exchange.api_key, step.api_name, step.step_class
        code = "" if step.skipped is None else step.skipped.code.value
        counts.setdefault(key, Counter())[code] += 1
    planned = sum(codes[""] for codes in counts.values())
    requests = f"{planned} of {len(plan.steps)} requests on {len(plan.lanes)} connections"
    console.print(
        f"Plan for {visible(plan.workload.source)}: {requests}", markup=False, emoji=False
    )
    missing = Counter[str]()  # steps that --allow would add, by class
    table = Table("API", "class", *_numbers("sent", "skipped"), box=None, pad_edge=False)
    table.add_column("why skipped", overflow="fold")
    for (_, name, step_class), codes in sorted(counts.items()):
        sent, not_allowed = codes.pop("", 0), codes[SkipCode.NOT_ALLOWED.value]
        missing += Counter({step_class: not_allowed})
        why = ", ".join(f"{code} {count}" for code, count in sorted(codes.items()))
        table.add_row(name, step_class, str(sent or "-"), str(codes.total() or "-"), why)
    console.print(table)
    reasons = Counter(
        (step.skipped.code.value, step.skipped.reason)
        for step in plan.steps
        if step.skipped is not None
    )
    _print(
        "plan.txt.j2",
        console,
        plan=plan,
        reasons=[f"skipped {n}: {code}: {why}" for (code, why), n in reasons.most_common()],
        missing={name: missing[name] for name in CLASSES if missing[name]},
        effects=effects,
        needed=Counter(kind for kind, *_ in (starting_facts(plan) if effects else ())),
        pace=pace,
        took_ns=duration_ns(plan, pace),
    )


def _numbers(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def _print(template: str, console: Console, **values: Any) -> None:
    text = rendered(template, visible, **values)
    console.print(text.rstrip("\n"), markup=False, highlight=False, emoji=False)


@contextmanager
def progress(*, shown: bool) -> Iterator[Callable[[Runner | str], None]]:
    """Show the work of a replay on stderr, from a thread of its own. Yields a function that shows
    another activity: a run, or a text.

    On a terminal it is one line that changes. Otherwise it is a line after every twenty seconds.
    """
    done, activities = threading.Event(), deque[Runner | str](["reading the capture"], maxlen=1)

    def show() -> None:
        is_terminal = sys.stderr.isatty()
        while not done.wait(_TERMINAL_S if is_terminal else QUIET_S):
            with suppress(Exception):  # the run changes what is read here
                activity = activities[0]
                text = visible(activity if isinstance(activity, str) else activity.activity())
                text = text[: get_terminal_size().columns - 1] if is_terminal else text
                sys.stderr.write(f"\r{text}{_CLEAR}" if is_terminal else f"kdissect: {text}\n")
                sys.stderr.flush()
        if is_terminal:
            sys.stderr.write(f"\r{_CLEAR}")

    thread = threading.Thread(target=show, daemon=True)
    if shown:
        thread.start()
    try:
        yield activities.append
    finally:
        done.set()
        if shown:
            thread.join(2)


def wide_console(*, stderr: bool = False) -> Console:
    """A console that wraps lines for a terminal only, or for $COLUMNS."""
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _NO_WRAP
    return console


def print_results(results: Results, console: Console) -> None:
    """Print verdicts per API with latencies then and now, differences grouped, lag."""
    summary = summary_row(results)
    names = *(verdict.value for verdict in Verdict), "p50 then", "now", "p99 then", "now"
    table = Table("API", *_numbers(*names), box=None, pad_edge=False)
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
    _print("results.txt.j2", console, results=results, summary=summary)
