"""`kdissect replay`: a captured workload against a live broker, every answer compared."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdissect.cli.app import app
from kdissect.cli.common import (
    EXIT_INTERRUPTED,
    FromTime,
    Hosts,
    KeyLogs,
    LimitItems,
    Payload,
    Ports,
    Quiet,
    RevealSecrets,
    ShownPayload,
    check_choice,
    checked,
    limits_of,
    say,
    with_examples,
)

if TYPE_CHECKING:
    from kdissect.replay.model import ReplayPlan, Workload
    from kdissect.replay.output.results import Results
    from kdissect.replay.running.replay import SessionOptions
    from kdissect.replay.target.cluster import Target
    from kdissect.replay.target.connection import Access

REPLAY_EXAMPLES = """
Examples:

  kdissect replay orders.pcapng --to localhost:9092 --dry-run

  kdissect replay orders.pcapng --to candidate:9092 --junit replay.xml --html replay.html

  kdissect replay orders.pcapng --to new:9092 --allow produce,groups,transactions,admin --pace max

  kdissect replay orders.pcapng --save orders.replay

  kdissect replay orders.replay --to new:9092 --against old:9092 --fail-on different,error
"""

GUARDED = "Guard"
SPEED = "Order and time"
ANSWERS = "Comparison"
OUTPUT = "Output"
ACCESS = "Access to the target"
CHOICE = "What is replayed"


class OffsetMode(StrEnum):
    """--offsets"""

    CAPTURED = "captured"
    EARLIEST = "earliest"
    RELATIVE = "relative"


@app.command("replay", cls=with_examples(REPLAY_EXAMPLES))
def replay_command(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Captures (files, folders, globs), a table set (dissected with --payload full "
            "and --reveal-secrets), or a file of --save.",
        ),
    ],
    to: Annotated[
        str | None, typer.Option("--to", metavar="HOST:PORT", help="A broker of the target.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="CLASSES",
            help="Writing classes that may be sent: produce,groups,transactions,admin. Without "
            "it only requests that read are.",
            rich_help_panel=GUARDED,
        ),
    ] = None,
    create_topics: Annotated[
        bool,
        typer.Option(
            "--create-topics",
            help="Make the topics that the capture shows, before the replay.",
            rich_help_panel=GUARDED,
        ),
    ] = False,
    same_cluster: Annotated[
        bool,
        typer.Option(
            "--same-cluster",
            help="The target may be the cluster that was captured.",
            rich_help_panel=GUARDED,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the plan, what is skipped and why, and the expected duration; send "
            "nothing.",
            rich_help_panel=GUARDED,
        ),
    ] = False,
    pace: Annotated[
        str,
        typer.Option(
            "--pace",
            metavar="PACE",
            help="recorded, x4 (four times as fast), or max (no waiting but for answers).",
            rich_help_panel=SPEED,
        ),
    ] = "recorded",
    max_gap: Annotated[
        str | None,
        typer.Option(
            "--max-gap",
            metavar="TIME",
            help="No pause between requests is longer (500ms, 5s).",
            rich_help_panel=SPEED,
        ),
    ] = None,
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout",
            metavar="TIME",
            help="For an answer; requests that wait at the broker get their captured time more.",
            rich_help_panel=SPEED,
        ),
    ] = "30s",
    connect_timeout: Annotated[
        str,
        typer.Option(
            "--connect-timeout", metavar="TIME", help="For a connection.", rich_help_panel=SPEED
        ),
    ] = "10s",
    in_flight: Annotated[
        int,
        typer.Option(
            "--in-flight-mb",
            metavar="MB",
            min=1,
            help="Sending pauses while so much is not answered.",
            rich_help_panel=SPEED,
        ),
    ] = 64,
    api: Annotated[
        list[str] | None,
        typer.Option(
            "--api",
            metavar="NAME",
            help="An API by name (any case, * and ? too) or key; repeatable.",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "--topic", metavar="NAME", help="A topic; * and ? too.", rich_help_panel=CHOICE
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            "--group", metavar="NAME", help="A group; * and ? too.", rich_help_panel=CHOICE
        ),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(
            "--client", metavar="ID", help="A client id; * and ? too.", rich_help_panel=CHOICE
        ),
    ] = None,
    host: Hosts = None,
    from_time: FromTime = None,
    until_time: Annotated[
        str | None,
        typer.Option(
            "--until", metavar="TIME", help="Exchanges before this time.", rich_help_panel=CHOICE
        ),
    ] = None,
    port: Ports = None,
    keylog: KeyLogs = None,
    limit: LimitItems = None,
    offsets: Annotated[
        OffsetMode,
        typer.Option(
            "--offsets",
            help="Where readers start: relative (where the same data is at the target), "
            "captured (the same numbers), earliest.",
            rich_help_panel=ANSWERS,
        ),
    ] = OffsetMode.RELATIVE,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="KIND:OLD=NEW",
            help="A topic, group or transactional-id of another name at the target; repeatable.",
            rich_help_panel=ANSWERS,
        ),
    ] = None,
    reencode: Annotated[
        bool,
        typer.Option(
            "--reencode",
            help="Send requests whose api_version the target does not speak at the nearest one.",
            rich_help_panel=ANSWERS,
        ),
    ] = False,
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--rules",
            metavar="FILE",
            help="Rules for what may differ (TOML); repeatable.",
            rich_help_panel=ANSWERS,
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Without the built-in rules: only ids that had to be translated may differ.",
            rich_help_panel=ANSWERS,
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="HOST:PORT",
            help="Replay to this one first, and compare with its answers.",
            rich_help_panel=ANSWERS,
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="FILE",
            help="Compare with an earlier run (its --json FILE).",
            rich_help_panel=ANSWERS,
        ),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            metavar="VERDICTS",
            help="Verdicts that make the exit code 1: different,error (default), tolerated, "
            "skipped, same, none.",
            rich_help_panel=ANSWERS,
        ),
    ] = None,
    junit: Annotated[
        str | None,
        typer.Option(
            "--junit",
            metavar="FILE",
            help="JUnit XML, a test suite per API.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="JSON lines: the run, every exchange, the counts.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(
            "--html", metavar="FILE", help="A self-contained page.", rich_help_panel=OUTPUT
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="The table set of the replay's own traffic.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace the table set in DIR.", rich_help_panel=OUTPUT),
    ] = False,
    pcap: Annotated[
        str | None,
        typer.Option(
            "--pcap",
            metavar="FILE",
            help="The replay's own traffic as a capture (after TLS, without logins).",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    save: Annotated[
        str | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Keep the workload as a small file for later replays.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    spool: Annotated[
        str | None,
        typer.Option(
            "--spool", metavar="DIR", help="Folder for uncompressed copies of compressed captures."
        ),
    ] = None,
    payload: ShownPayload = Payload.FULL,
    reveal_secrets: RevealSecrets = False,
    tls: Annotated[
        bool, typer.Option("--tls", help="Speak TLS to the target.", rich_help_panel=ACCESS)
    ] = False,
    tls_ca: Annotated[
        str | None,
        typer.Option(
            "--tls-ca", metavar="FILE", help="Authorities to trust (PEM).", rich_help_panel=ACCESS
        ),
    ] = None,
    tls_cert: Annotated[
        str | None,
        typer.Option(
            "--tls-cert", metavar="FILE", help="Our certificate (PEM).", rich_help_panel=ACCESS
        ),
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option(
            "--tls-key",
            metavar="FILE",
            help="Its key (PEM); the password of an encrypted one comes from "
            "KDISSECT_TLS_KEY_PASSWORD.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    tls_no_verify: Annotated[
        bool,
        typer.Option(
            "--tls-no-verify",
            help="Do not check the target's certificate.",
            rich_help_panel=ACCESS,
        ),
    ] = False,
    tls_server_name: Annotated[
        str | None,
        typer.Option(
            "--tls-server-name",
            metavar="NAME",
            help="The name in the target's certificate, where it is not its host.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    sasl: Annotated[
        str | None,
        typer.Option(
            "--sasl",
            metavar="MECHANISM",
            help="PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    sasl_user: Annotated[
        str | None, typer.Option("--sasl-user", metavar="NAME", rich_help_panel=ACCESS)
    ] = None,
    sasl_password_file: Annotated[
        str | None,
        typer.Option(
            "--sasl-password-file",
            metavar="FILE",
            help="Or in KDISSECT_SASL_PASSWORD.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    sasl_token_file: Annotated[
        str | None,
        typer.Option(
            "--sasl-token-file",
            metavar="FILE",
            help="OAUTHBEARER: the token; or in KDISSECT_SASL_TOKEN.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Re-send a captured workload to a live broker and compare every answer with the captured one.

    Reads only, unless --allow names more. Exit code 1 when a verdict of --fail-on was found.
    """
    from kdissect.pipeline.filters import time_ns
    from kdissect.replay.model import PlanOptions, TranslateOptions
    from kdissect.replay.output.results import FAIL_ON_DEFAULT, parse_fail_on
    from kdissect.replay.planning.schedule import parse_pace, parse_span
    from kdissect.replay.running.replay import SessionOptions
    from kdissect.replay.running.result import RunOptions
    from kdissect.replay.target import guard
    from kdissect.replay.target.cluster import Target, parse_address
    from kdissect.show.filters import api_keys

    # what can be refused is refused before anything is read or sent
    if to is None and not dry_run and save is None:
        raise typer.BadParameter("say where to replay to, or --dry-run or --save FILE",
                                 param_hint="--to")  # fmt: skip
    if against is not None and baseline is not None:
        raise typer.BadParameter("name one of --against and --baseline", param_hint="--against")
    check_choice(host, from_time, until_time, "--until")
    apis = checked("--api", api_keys, api or ())
    limits = limits_of(limit)
    allowed = guard.parse_allow(allow or ())
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
        fail_on=FAIL_ON_DEFAULT if fail_on is None else parse_fail_on(fail_on),
        baseline=baseline,
    )
    files = {"--junit": junit, "--json": json, "--html": html, "--pcap": pcap, "--save": save}
    _check_outputs(files, out, overwrite)
    _check_inputs(options)

    workload, plan = _plan(
        source,
        PlanOptions(
            allow=allowed,
            apis=apis,
            topics=frozenset(topic or ()),
            groups=frozenset(group or ()),
            client_ids=frozenset(client or ()),
            wait_for_data=paced.speed != 1,
        ),
        ports=port or (),
        keylog=keylog or (),
        limits=limits,
        hosts=host or (),
        from_ns=None if from_time is None else time_ns(from_time),
        to_ns=None if until_time is None else time_ns(until_time),
        spool=spool,
    )
    if save is not None:
        _save(workload, save, payload.value, reveal_secrets, quiet)
        if to is None and not dry_run:
            return
    _show_plan(plan, paced, dry_run, quiet)
    if dry_run:
        return
    target, other = targets
    assert target is not None
    for each in (target, other):
        if each is not None:
            guard.check_address(workload.facts, each.host, each.port, same_cluster)
    results = _run(plan, target, options, other, quiet)
    _write(results, files, out, overwrite, payload.value, reveal_secrets)
    _finish(results, files, out, quiet)


def _renames(values: list[str]) -> tuple[tuple[str, str, str], ...]:
    kinds = ("topic", "group", "transactional-id")
    found = []
    for value in values:
        kind, colon, rest = value.partition(":")
        old, equals, new = rest.partition("=")
        if kind not in kinds or not colon or not equals or not old or not new:
            raise typer.BadParameter(
                f"{value!r} is not KIND:OLD=NEW (kinds: {', '.join(kinds)})",
                param_hint="--rename",
            )
        found.append((kind, old, new))
    return tuple(found)


def _access(
    *, tls: bool, ca: str | None, cert: str | None, key: str | None, verify: bool,
    server_name: str | None, sasl: tuple[str | None, str | None, str | None, str | None],
    connect_timeout: float,
) -> Access:  # fmt: skip
    from kdissect.replay.target.auth import TlsOptions, sasl_from
    from kdissect.replay.target.connection import Access

    spoken = TlsOptions(ca, cert, key, verify, server_name) if tls else None
    if spoken is not None:
        spoken.context()  # files that cannot be used are told now
    mechanism, user, password_file, token_file = sasl
    login = sasl_from(mechanism, user, password_file, token_file) if mechanism else None
    return Access(spoken, login, connect_timeout)


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
    """Rules and baseline are read before a capture, which may take long."""
    from kdissect.replay.comparison.rules import load_rules
    from kdissect.replay.output.baseline import read_baseline

    load_rules(options.rules)
    if options.baseline is not None:
        read_baseline(options.baseline)


def _plan(source: list[str], options: Any, **filters: Any) -> tuple[Workload, ReplayPlan]:
    from kdissect.replay.planning.plan import make_plan
    from kdissect.replay.workload.source import load_workload

    workload = load_workload(source, **filters)
    return workload, make_plan(workload, options)


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


def _show_plan(plan: ReplayPlan, pace: Any, dry_run: bool, quiet: bool) -> None:
    """The counts: the result of a dry run, otherwise a word before the first byte is sent."""
    from rich.console import Console

    from kdissect.replay.output.console import print_plan

    if dry_run:
        print_plan(plan, pace, Console())
    elif not quiet:
        print_plan(plan, pace, Console(stderr=True))


def _run(
    plan: ReplayPlan, target: Target, options: SessionOptions, against: Target | None, quiet: bool
) -> Results:
    import asyncio

    from kdissect.replay.output.console import ReplayProgress
    from kdissect.replay.running.replay import replay

    progress = ReplayProgress(shown=not quiet and sys.stderr.isatty())
    try:
        return asyncio.run(replay(plan, target, options, against, progress.watch))
    finally:
        progress.stop()


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
    from rich.console import Console

    from kdissect.replay.output.console import print_results

    if not quiet:
        print_results(results, Console())
        written = [f"{option} {path}" for option, path in files.items() if path]
        written += [f"--out {out}"] if out else []
        if written:
            say(f"written: {', '.join(written)}")
    if results.run.ended and not results.run.links:
        say(f"nothing was sent: {results.run.ended}")  # which names the target at fault
    elif results.run.ended:
        say(f"{results.target}: the replay ended early: {results.run.ended}")
    elif not results.sent_count:
        say("warning: nothing was sent; see what was skipped and why")
    if results.exit_code == EXIT_INTERRUPTED:
        sys.stdout.flush()
    if results.exit_code:
        raise typer.Exit(results.exit_code)
