"""The options of `kdissect replay`, by help panel."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

# an option, listed in the help under this title
_guard = partial(typer.Option, rich_help_panel="Guard")
_speed = partial(typer.Option, rich_help_panel="Order and time")
_comparison = partial(typer.Option, rich_help_panel="Comparison")
_output = partial(typer.Option, rich_help_panel="Output")
_access = partial(typer.Option, rich_help_panel="Access to the target")


class OffsetMode(StrEnum):
    """The values of --offsets."""

    CAPTURED = "captured"
    EARLIEST = "earliest"
    RELATIVE = "relative"


# Source and target

Source = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Captures (files, folders, globs), a table set (dissected with --payload full "
        "and --reveal-secrets), or a file of --save.",
    ),
]
To = Annotated[
    str | None, typer.Option("--to", metavar="HOST:PORT", help="A broker of the target.")
]

# Guard

Allow = Annotated[
    list[str] | None,
    _guard(
        "--allow",
        metavar="CLASSES",
        help="Writing classes that may be sent: produce,groups,transactions,admin. Without "
        "it only requests that read are. delete-existing: also delete what the replay did not "
        "create.",
    ),
]
CreateTopics = Annotated[
    bool, _guard("--create-topics", help="Create the topics of the capture before the replay.")
]
SameCluster = Annotated[
    bool, _guard("--same-cluster", help="The target may be the cluster that was captured.")
]
IntoExisting = Annotated[
    bool,
    _guard(
        "--into-existing",
        help="Write also to topics, groups and transactional ids that hold data or members at the "
        "target.",
    ),
]
DryRun = Annotated[
    bool,
    _guard(
        "--dry-run",
        help="Print the plan, the skipped requests and the expected duration; send nothing.",
    ),
]

# Order and time

Pace = Annotated[
    str,
    _speed(
        "--pace",
        metavar="PACE",
        help="recorded, x4 (four times as fast), or max (waits for answers only).",
    ),
]
MaxGap = Annotated[
    str | None,
    _speed("--max-gap", metavar="TIME", help="Longest pause between requests (500ms, 5s)."),
]
Timeout = Annotated[
    str,
    _speed(
        "--timeout",
        metavar="TIME",
        help="Longest wait for an answer; for a long poll, plus its captured time.",
    ),
]
ConnectTimeout = Annotated[
    str, _speed("--connect-timeout", metavar="TIME", help="Longest wait for a connection.")
]
InFlight = Annotated[
    int,
    _speed(
        "--in-flight-mb",
        metavar="MB",
        min=1,
        help="Pause sending while more than this is unanswered.",
    ),
]

# Comparison

Offsets = Annotated[
    OffsetMode,
    _comparison(
        "--offsets",
        help="Where readers start: relative (at the same data), "
        "captured (the same numbers), earliest.",
    ),
]
Rename = Annotated[
    list[str] | None,
    _comparison(
        "--rename",
        metavar="KIND:OLD=NEW",
        help="Another name for a topic, group or transactional-id at the target; repeatable.",
    ),
]
Reencode = Annotated[
    bool,
    _comparison(
        "--reencode",
        help="Send requests of an api_version that the target lacks in the nearest one.",
    ),
]
Rules = Annotated[
    list[str] | None,
    _comparison("--rules", metavar="FILE", help="Rules for what may differ (TOML); repeatable."),
]
Strict = Annotated[
    bool,
    _comparison(
        "--strict",
        help="Without the built-in rules: only ids that had to be translated may differ.",
    ),
]
Against = Annotated[
    str | None,
    _comparison(
        "--against",
        metavar="HOST:PORT",
        help="Replay to this broker first, and compare with its answers.",
    ),
]
Baseline = Annotated[
    str | None,
    _comparison(
        "--baseline", metavar="FILE", help="Compare with an earlier run (its --json FILE)."
    ),
]
ControlRuns = Annotated[
    int,
    _comparison(
        "--control-runs",
        metavar="N",
        min=0,
        help="Replay N times, at least 2, to --against or else to the target itself, and excuse "
        "fields that differ between these runs.",
    ),
]
Reset = Annotated[
    str | None,
    _guard(
        "--reset",
        metavar="COMMAND",
        help="Run this command before each run: it resets the cluster, whose address is in "
        "KDISSECT_TARGET.",
    ),
]
KeepRuns = Annotated[
    bool,
    _guard(
        "--keep-runs",
        help="Keep the topics and groups that --control-runs creates with a suffix for each run.",
    ),
]
FailOn = Annotated[
    list[str] | None,
    _comparison(
        "--fail-on",
        metavar="VERDICTS",
        help="Verdicts that make the exit code 1: different,error (default), tolerated, "
        "skipped, same, none. latency: answers that are slower than those of --control-runs.",
    ),
]
LatencyRatio = Annotated[
    float,
    _comparison(
        "--latency-ratio",
        metavar="RATIO",
        min=1.0,
        help="How many times as long an API's median latency has to be for --fail-on latency.",
    ),
]
LatencyMin = Annotated[
    str,
    _comparison(
        "--latency-min",
        metavar="TIME",
        help="How much longer an API's median latency has to be for --fail-on latency.",
    ),
]

# Output

Junit = Annotated[
    str | None, _output("--junit", metavar="FILE", help="JUnit XML, a test suite per API.")
]
Json = Annotated[
    str | None,
    _output("--json", metavar="FILE", help="JSON lines: the run, every exchange, the counts."),
]
Html = Annotated[str | None, _output("--html", metavar="FILE", help="A self-contained page.")]
Out = Annotated[
    str | None, _output("--out", metavar="DIR", help="The table set of the replay's own traffic.")
]
Overwrite = Annotated[bool, _output("--overwrite", help="Replace the table set in DIR.")]
Pcap = Annotated[
    str | None,
    _output(
        "--pcap",
        metavar="FILE",
        help="The replay's own traffic as a capture (after TLS, without logins).",
    ),
]
Save = Annotated[
    str | None,
    _output("--save", metavar="FILE", help="Keep the workload as a small file for later replays."),
]

# Access to the target

Tls = Annotated[bool, _access("--tls", help="Speak TLS to the target.")]
TlsCa = Annotated[
    str | None, _access("--tls-ca", metavar="FILE", help="Authorities to trust (PEM).")
]
TlsCert = Annotated[
    str | None, _access("--tls-cert", metavar="FILE", help="The client certificate (PEM).")
]
TlsKey = Annotated[
    str | None,
    _access(
        "--tls-key",
        metavar="FILE",
        help="Its key (PEM); the password of an encrypted one comes from "
        "KDISSECT_TLS_KEY_PASSWORD.",
    ),
]
TlsNoVerify = Annotated[
    bool, _access("--tls-no-verify", help="Do not check the target's certificate.")
]
TlsServerName = Annotated[
    str | None,
    _access(
        "--tls-server-name",
        metavar="NAME",
        help="The name in the target's certificate, if not its host.",
    ),
]
Sasl = Annotated[
    str | None,
    _access(
        "--sasl", metavar="MECHANISM", help="PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER."
    ),
]
SaslUser = Annotated[str | None, _access("--sasl-user", metavar="NAME")]
SaslPasswordFile = Annotated[
    str | None,
    _access(
        "--sasl-password-file", metavar="FILE", help="The password; or in KDISSECT_SASL_PASSWORD."
    ),
]
SaslTokenFile = Annotated[
    str | None,
    _access(
        "--sasl-token-file",
        metavar="FILE",
        help="OAUTHBEARER: the token; or in KDISSECT_SASL_TOKEN.",
    ),
]
