"""`kdissect replay`: sends a captured workload to a live broker and compares every answer."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kdissect.cli import replay_options as opt
from kdissect.cli.common import (
    EXIT_INTERRUPTED,
    KeyLogs,
    LimitItems,
    Payload,
    Ports,
    Quiet,
    RevealSecrets,
    ShownPayload,
    checked,
    limits_of,
    say,
)
from kdissect.cli.options import ReplaySelectionOptions, Spool
from kdissect.cli.verbs import verb
from kdissect.step_log import logged_step

if TYPE_CHECKING:
    from kdissect.replay.model import ReplayPlan, Workload
    from kdissect.replay.output.results import Results
    from kdissect.replay.running.replay import SessionOptions
    from kdissect.replay.target.cluster import Target
    from kdissect.replay.target.connection import Access

_log = logging.getLogger(__name__)

REPLAY_EXAMPLES = """
Examples:

  kdissect replay orders.pcapng --to localhost:9092 --dry-run

  kdissect replay orders.pcapng --to candidate:9092 --junit replay.xml --html replay.html

  kdissect replay orders.pcapng --to new:9092 --allow produce,groups,transactions,admin --pace max

  kdissect replay orders.pcapng --save orders.replay

  kdissect replay orders.replay --to new:9092 --against old:9092 --fail-on different,error
"""


@verb("replay", REPLAY_EXAMPLES)
def replay_command(
    source: opt.Source,
    selected: ReplaySelectionOptions,
    to: opt.To = None,
    allow: opt.Allow = None,
    create_topics: opt.CreateTopics = False,
    same_cluster: opt.SameCluster = False,
    into_existing: opt.IntoExisting = False,
    dry_run: opt.DryRun = False,
    pace: opt.Pace = "recorded",
    max_gap: opt.MaxGap = None,
    timeout: opt.Timeout = "30s",
    connect_timeout: opt.ConnectTimeout = "10s",
    in_flight: opt.InFlight = 64,
    port: Ports = None,
    keylog: KeyLogs = None,
    limit: LimitItems = None,
    offsets: opt.Offsets = opt.OffsetMode.RELATIVE,
    rename: opt.Rename = None,
    reencode: opt.Reencode = False,
    rules: opt.Rules = None,
    strict: opt.Strict = False,
    against: opt.Against = None,
    baseline: opt.Baseline = None,
    control_runs: opt.ControlRuns = 0,
    reset: opt.Reset = None,
    keep_runs: opt.KeepRuns = False,
    fail_on: opt.FailOn = None,
    latency_ratio: opt.LatencyRatio = 1.5,
    latency_min: opt.LatencyMin = "5ms",
    junit: opt.Junit = None,
    json: opt.Json = None,
    html: opt.Html = None,
    out: opt.Out = None,
    overwrite: opt.Overwrite = False,
    pcap: opt.Pcap = None,
    save: opt.Save = None,
    spool: Spool = None,
    payload: ShownPayload = Payload.FULL,
    reveal_secrets: RevealSecrets = False,
    tls: opt.Tls = False,
    tls_ca: opt.TlsCa = None,
    tls_cert: opt.TlsCert = None,
    tls_key: opt.TlsKey = None,
    tls_no_verify: opt.TlsNoVerify = False,
    tls_server_name: opt.TlsServerName = None,
    sasl: opt.Sasl = None,
    sasl_user: opt.SaslUser = None,
    sasl_password_file: opt.SaslPasswordFile = None,
    sasl_token_file: opt.SaslTokenFile = None,
    quiet: Quiet = False,
) -> None:
    """Re-send a captured workload to a live broker and compare every answer with the captured one.

    Reads only, unless --allow names more. Exit code 1 when a verdict of --fail-on was found.
    """
    from kdissect.replay.comparison.latency import LatencyOptions
    from kdissect.replay.model import PlanOptions, TranslateOptions
    from kdissect.replay.output.results import FailOn, parse_fail_on
    from kdissect.replay.planning.schedule import parse_pace, parse_span
    from kdissect.replay.running.replay import SessionOptions
    from kdissect.replay.running.result import RunOptions
    from kdissect.replay.target.cluster import Target, parse_address
    from kdissect.replay.target.guard import parse_allow

    # all refusals come before anything is read or sent
    _check_combination(to, dry_run, save, against, baseline)
    _check_control_runs(control_runs, baseline)
    selection = selected.selection()
    limits = limits_of(limit)
    allowed = parse_allow(allow or ())
    if max_gap is not None:
        checked("--max-gap", parse_span, max_gap)
    paced = parse_pace(pace, max_gap)
    access = _access(
        tls=tls or bool(tls_ca or tls_cert or tls_no_verify or tls_server_name),
        ca=tls_ca,
        cert=tls_cert,
        key=tls_key,
        verify=not tls_no_verify,
        server_name=tls_server_name,
        sasl=(sasl, sasl_user, sasl_password_file, sasl_token_file),
        connect_timeout=checked("--connect-timeout", parse_span, connect_timeout),
    )
    targets = [
        None if text is None else Target(*checked(option, parse_address, text), access)
        for option, text in (("--to", to), ("--against", against))
    ]
    options = SessionOptions(
        run=RunOptions(paced, checked("--timeout", parse_span, timeout), in_flight << 20),
        translate=TranslateOptions(offsets.value, _renames(rename or []), reencode),
        rules=tuple(rules or ()),
        is_strict=strict,
        makes_topics=create_topics,
        same_cluster=same_cluster,
        into_existing=into_existing,
        fail_on=FailOn() if fail_on is None else parse_fail_on(fail_on),
        baseline=baseline,
        control_runs=control_runs,
        reset=reset or "",
        keeps_runs=keep_runs,
        latency=LatencyOptions(
            latency_ratio, int(checked("--latency-min", parse_span, latency_min) * 1e9)
        ),
    )
    files = {"--junit": junit, "--json": json, "--html": html, "--pcap": pcap, "--save": save}
    _check_outputs(files, out, overwrite)
    _check_inputs(options)

    workload, plan = _plan(
        source,
        quiet,
        PlanOptions(
            allow=allowed,
            apis=selection.apis,
            topics=frozenset(selection.topics),
            groups=frozenset(selection.groups),
            wait_for_data=paced.speed != 1,
        ),
        ports=port or (),
        keylog=keylog or (),
        limits=limits,
        hosts=selection.hosts,
        from_ns=selection.time_from_ns,
        to_ns=selection.time_to_ns,
        # the plan applies these: requests without a topic or group go with any selection
        selection=replace(
            selection,
            apis=frozenset(),
            topics=(),
            groups=(),
            hosts=(),
            time_from_ns=None,
            time_to_ns=None,
        ),
        spool=spool,
    )
    if save is not None:
        _save(workload, save, payload.value, reveal_secrets, quiet)
        if to is None and not dry_run:
            return
    _show_plan(plan, options, dry_run, quiet)
    if dry_run:
        return
    results = _run(plan, targets, options, quiet)
    _write(results, files, out, overwrite, payload.value, reveal_secrets)
    _finish(results, files, out, quiet)


def _check_combination(
    to: str | None, dry_run: bool, save: str | None, against: str | None, baseline: str | None
) -> None:
    if to is None and not dry_run and save is None:
        raise typer.BadParameter(
            "say where to replay to, or --dry-run or --save FILE", param_hint="--to"
        )
    if against is not None and baseline is not None:
        raise typer.BadParameter("name one of --against and --baseline", param_hint="--against")


def _check_control_runs(control_runs: int, baseline: str | None) -> None:
    from kdissect.replay.running.control_runs import FEWEST

    if control_runs and control_runs < FEWEST:
        raise typer.BadParameter(
            f"at least {FEWEST}: one run cannot show which fields differ by themselves",
            param_hint="--control-runs",
        )
    if control_runs and baseline is not None:
        raise typer.BadParameter(
            "name one of --control-runs and --baseline", param_hint="--control-runs"
        )


def _renames(values: list[str]) -> tuple[tuple[str, str, str], ...]:
    kinds = ("topic", "group", "transactional-id")
    renames = []
    for value in values:
        kind, colon, rest = value.partition(":")
        old, equals, new = rest.partition("=")
        if kind not in kinds or not colon or not equals or not old or not new:
            raise typer.BadParameter(
                f"{value!r} is not KIND:OLD=NEW (kinds: {', '.join(kinds)})",
                param_hint="--rename",
            )
        renames.append((kind, old, new))
    return tuple(renames)


def _access(
    *, tls: bool, ca: str | None, cert: str | None, key: str | None, verify: bool,
    server_name: str | None, sasl: tuple[str | None, str | None, str | None, str | None],
    connect_timeout: float,
) -> Access:  # fmt: skip
    from kdissect.replay.target.auth import TlsOptions, sasl_from
    from kdissect.replay.target.connection import Access

    tls_options = TlsOptions(ca, cert, key, verify, server_name) if tls else None
    if tls_options is not None:
        tls_options.context()  # raises now if a file is unusable
    mechanism, user, password_file, token_file = sasl
    login = sasl_from(mechanism, user, password_file, token_file) if mechanism else None
    return Access(tls_options, login, connect_timeout)


def _check_outputs(files: dict[str, str | None], out: str | None, overwrite: bool) -> None:
    from kdissect.errors import OutputError
    from kdissect.pipeline.table_set import check_out

    for option, path in files.items():
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise OutputError(f"{option} {path}: no folder {Path(path).parent}")
        if path is not None and Path(path).is_dir():
            raise OutputError(f"{option} {path}: a folder; name a file")
    if out is not None:
        check_out(out, overwrite)


def _check_inputs(options: SessionOptions) -> None:
    """Check rules and baseline before the capture is read, which may take long."""
    from kdissect.replay.comparison.rules import load_rules
    from kdissect.replay.output.baseline import read_baseline

    load_rules(options.rules)
    if options.baseline is not None:
        read_baseline(options.baseline)


def _plan(
    source: list[str], quiet: bool, options: Any, **selection: Any
) -> tuple[Workload, ReplayPlan]:
    from kdissect.replay.output.console import ReplayProgress
    from kdissect.replay.planning.plan import make_plan
    from kdissect.replay.workload.source import load_workload

    with ReplayProgress(shown=not quiet), logged_step(_log, "load workload") as counts:
        workload = load_workload(source, **selection)
        counts["connections"] = len(workload.connections)
    with logged_step(_log, "plan") as counts:
        plan = make_plan(workload, options)
        counts["steps"] = len(plan.steps)
        counts["sent"] = sum(step.skipped is None for step in plan.steps)
    return workload, plan


def _save(workload: Workload, path: str, payload: str, reveal_secrets: bool, quiet: bool) -> None:
    from kdissect.replay.workload.saved_file import save as save_workload

    counts = save_workload(workload, path, payload=payload, reveal_secrets=reveal_secrets)
    if not quiet:
        left_out = f", {counts['left_out']} of brokers and logins left out"
        redacted = f", {counts['redacted']} redacted"
        say(
            f"saved {counts['exchanges']} exchanges in {path}"
            + (left_out if counts["left_out"] else "")
            + (redacted if counts["redacted"] else "")
        )


def _show_plan(plan: ReplayPlan, options: SessionOptions, dry_run: bool, quiet: bool) -> None:
    """Print the plan's counts: to stdout for a dry run, otherwise to stderr before sending."""
    from kdissect.replay.output.console import print_plan, wide_console
    from kdissect.replay.target.effects import effects_of

    pace = options.run.pace
    if dry_run:
        renames = options.translate.renames
        effects = effects_of(plan, makes_topics=options.makes_topics, renames=renames)
        print_plan(plan, pace, wide_console(), effects)
    elif not quiet:
        print_plan(plan, pace, wide_console(stderr=True))


def _run(
    plan: ReplayPlan, targets: list[Target | None], options: SessionOptions, quiet: bool
) -> Results:
    import asyncio

    from kdissect.replay.output.console import ReplayProgress
    from kdissect.replay.running.replay import replay
    from kdissect.replay.target.guard import check_address

    target, against = targets
    assert target is not None
    for broker in (target, against):
        if broker is not None:
            check_address(plan.workload.facts, broker.host, broker.port, options.same_cluster)
    with ReplayProgress(shown=not quiet) as progress, logged_step(_log, "replay") as counts:
        results = asyncio.run(
            replay(plan, target, options, against, progress.watch, None if quiet else say)
        )
        counts["sent"] = results.sent_count
    return results


def _write(
    results: Results, files: dict[str, str | None], out: str | None, overwrite: bool,
    payload: str, reveal_secrets: bool,
) -> None:  # fmt: skip
    from kdissect.replay.output.html import write_html
    from kdissect.replay.output.jsonl import write_json_lines
    from kdissect.replay.output.junit import write_junit
    from kdissect.replay.output.tables import write_tables
    from kdissect.replay.output.traffic import write_capture

    writers = {"--junit": write_junit, "--json": write_json_lines, "--html": write_html}
    for option, write in writers.items():
        if path := files[option]:
            write(results, Path(path))
    if path := files["--pcap"]:
        write_capture(results.run, Path(path))
    if out is not None:
        write_tables(
            results, out, overwrite=overwrite, payload=payload, reveal_secrets=reveal_secrets
        )


def _finish(results: Results, files: dict[str, str | None], out: str | None, quiet: bool) -> None:
    from kdissect.replay.output.console import print_results, wide_console

    if not quiet:
        print_results(results, wide_console())
        written = [f"{option} {path}" for option, path in files.items() if path]
        written += [f"--out {out}"] if out else []
        if written:
            say(f"written: {', '.join(written)}")
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
