"""`kdissect replay`: sends a captured workload to a live broker and compares every answer."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kdissect.cli import replay_options as opt
from kdissect.cli.options import RequestOptions, checked
from kdissect.cli.output import EXIT_INTERRUPTED, say
from kdissect.cli.verbs import verb
from kdissect.step_log import logged_step

if TYPE_CHECKING:
    from kdissect.replay.model import ReplayPlan, Workload
    from kdissect.replay.output.rows import Results
    from kdissect.replay.running.session import SessionOptions
    from kdissect.replay.target.cluster import Target
    from kdissect.replay.target.connection import Access


@verb("""
  kdissect replay orders.pcapng --to localhost:9092 --dry-run
  kdissect replay orders.pcapng --to candidate:9092 --junit replay.xml --html replay.html
  kdissect replay orders.pcapng --to new:9092 --allow produce,groups,transactions,admin --pace max
  kdissect replay orders.pcapng --save orders.replay
  kdissect replay orders.replay --to new:9092 --against old:9092 --fail-on different,error
""")
def replay_command(
    *,
    source: list[str],
    selected: RequestOptions,
    to: str | None = None,
    guard: opt.GuardOptions,
    speed: opt.SpeedOptions,
    port: list[int] | None = None,
    keylog: list[str] | None = None,
    compared: opt.ComparisonOptions,
    output: opt.OutputOptions,
    login: opt.AccessOptions,
    quiet: bool = False,
) -> None:
    """Re-send a captured workload to a live broker and compare every answer with the captured one.

    Reads only, unless --allow names more. Exit code 1 if a verdict of --fail-on was found.
    """
    from kdissect.replay.model import PlanOptions
    from kdissect.replay.output.console import progress
    from kdissect.replay.planning.plan import make_plan
    from kdissect.replay.target.guard import parse_allow
    from kdissect.replay.workload.source import load_workload

    # Workload, plan and answers stay: a look through all of them would hold up the sending.
    gc.set_threshold(50_000, 100, 1000)
    # all refusals come before anything is read or sent
    if to is None and not guard.dry_run and output.save is None:
        raise typer.BadParameter(
            "say where to replay to, or --dry-run or --save FILE", param_hint="--to"
        )
    compared.check()
    selection = selected.selection()
    if output.save is not None and any(
        (selected.api, selected.client, selected.topic, selected.group)
    ):
        raise typer.BadParameter(
            "it keeps all requests; choose when you replay the file, or cut the capture before",
            param_hint="--save",
        )
    allowed = parse_allow(guard.allow or ())
    options = _session_options(guard, speed, compared)
    access = login.access(options.answer_timeout_s)
    target = _target("--to", to, access)
    reference = _target("--against", compared.against, access)
    output.check()

    with progress(shown=not quiet), logged_step("load workload") as counts:
        workload = load_workload(
            source,
            ports=port or (),
            keylog=keylog or (),
            from_ns=selection.time_from_ns,
            to_ns=selection.time_to_ns,
        )
        counts["connections"] = len(workload.connections)
    with logged_step("plan") as counts:
        plan = make_plan(
            workload,
            PlanOptions(
                allow=allowed,
                selection=selection,
                principal=access.principal,
                wait_for_data=options.pace.speed != 1,
            ),
        )
        counts["steps"] = len(plan.steps)
        counts["sent"] = sum(step.skipped is None for step in plan.steps)
    if output.save is not None:
        _save(workload, output.save, quiet)
        if to is None and not guard.dry_run:
            return
    _show_plan(plan, options, guard.dry_run, quiet)
    if target is None or guard.dry_run:
        return
    results = _run(plan, target, reference, options, quiet)
    _write(results, output, quiet)


def _session_options(
    guard: opt.GuardOptions, speed: opt.SpeedOptions, compared: opt.ComparisonOptions
) -> SessionOptions:
    from kdissect.replay.fields import load_fields
    from kdissect.replay.output.baseline import read_baseline
    from kdissect.replay.output.rows import FAIL_ON, parse_fail_on
    from kdissect.replay.running.session import SessionOptions

    return SessionOptions(
        pace=speed.parsed_pace(),
        answer_timeout_s=speed.timeout_s(),
        offsets=compared.offsets,
        renames=compared.renames(),
        reencode=compared.reencode,
        table=load_fields(compared.rules or (), is_strict=compared.strict),
        makes_topics=guard.create_topics,
        into_existing=guard.into_existing,
        fail_on=FAIL_ON if compared.fail_on is None else parse_fail_on(compared.fail_on),
        baseline=None if compared.baseline is None else read_baseline(compared.baseline),
        control_runs=compared.control_runs,
        reset=guard.reset or "",
    )


def _target(option: str, address: str | None, access: Access) -> Target | None:
    from kdissect.replay.target.cluster import Target, parse_address

    return None if address is None else Target(*checked(option, parse_address, address), access)


def _save(workload: Workload, path: str, quiet: bool) -> None:
    from kdissect.replay.workload.saved_file import save

    counts = save(workload, path)
    if not quiet:
        parts = [f"saved {counts['exchanges']} exchanges in {path}"]
        if counts["left_out"]:
            parts.append(f"{counts['left_out']} of brokers and logins left out")
        if counts["redacted"]:
            parts.append(f"{counts['redacted']} redacted")
        say(", ".join(parts))


def _show_plan(plan: ReplayPlan, options: SessionOptions, dry_run: bool, quiet: bool) -> None:
    """Print the plan's counts: to stdout for a dry run, otherwise to stderr before sending."""
    from kdissect.replay.output.console import print_plan, wide_console
    from kdissect.replay.target.guard import effects_of

    pace = options.pace
    if dry_run:
        print_plan(plan, pace, wide_console(), effects_of(plan, options))
    elif not quiet:
        print_plan(plan, pace, wide_console(stderr=True))


def _run(
    plan: ReplayPlan, target: Target, reference: Target | None, options: SessionOptions, quiet: bool
) -> Results:
    import asyncio

    from kdissect.replay.output.console import progress
    from kdissect.replay.running.session import replay
    from kdissect.replay.target.guard import SAME_CLUSTER, check_address

    for broker in (target, reference):
        if broker is not None and SAME_CLUSTER not in plan.options.allow:
            check_address(plan.workload.facts, broker.host, broker.port)
    with progress(shown=not quiet) as watch, logged_step("replay") as counts, _terminated():
        results = asyncio.run(
            replay(plan, target, options, reference, watch, (lambda line: None) if quiet else say)
        )
        counts["sent"] = results.sent_count
    return results


@contextmanager
def _terminated() -> Iterator[None]:
    """Take SIGTERM for SIGINT, which ends a run in order."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write(results: Results, output: opt.OutputOptions, quiet: bool) -> None:
    """Write the files, print the results, and end with their exit code."""
    from kdissect.replay.output.console import print_results, wide_console
    from kdissect.replay.output.files import write_html, write_junit, write_tables
    from kdissect.replay.output.rows import write_json_lines

    for path, write in (
        (output.junit, write_junit),
        (output.json, write_json_lines),
        (output.html, write_html),
    ):
        if path:
            write(results, Path(path))
    if output.out is not None:
        write_tables(results.run, output.out)
    if not quiet:
        print_results(results, wide_console())
        if output.written:
            say(f"written: {', '.join(output.written)}")
    if results.run.ended and not results.run.links:
        say(f"nothing was sent: {results.run.ended}")  # the reason names the target
    elif results.run.ended:
        say(f"{results.target}: the replay ended early: {results.run.ended}")
    elif not results.sent_count:
        say("warning: nothing was sent; --dry-run prints why")
    if results.exit_code == EXIT_INTERRUPTED:
        sys.stdout.flush()
    if results.exit_code:
        raise typer.Exit(results.exit_code)
