"""The options of `kdissect replay`, by help panel."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

GUARDED = "Guard"
SPEED = "Order and time"
ANSWERS = "Comparison"
OUTPUT = "Output"
ACCESS = "Access to the target"


class OffsetMode(StrEnum):
    """--offsets"""

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
Spool = Annotated[
    str | None,
    typer.Option(
        "--spool", metavar="DIR", help="Folder for uncompressed copies of compressed captures."
    ),
]

# Guard

Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="CLASSES",
        help="Writing classes that may be sent: produce,groups,transactions,admin. Without "
        "it only requests that read are. delete-existing: also delete what the replay did not "
        "make.",
        rich_help_panel=GUARDED,
    ),
]
CreateTopics = Annotated[
    bool,
    typer.Option(
        "--create-topics",
        help="Make the topics that the capture shows, before the replay.",
        rich_help_panel=GUARDED,
    ),
]
SameCluster = Annotated[
    bool,
    typer.Option(
        "--same-cluster",
        help="The target may be the cluster that was captured.",
        rich_help_panel=GUARDED,
    ),
]
IntoExisting = Annotated[
    bool,
    typer.Option(
        "--into-existing",
        help="Write also to topics, groups and transactional ids that hold data or members at the "
        "target.",
        rich_help_panel=GUARDED,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the plan, what is skipped and why, and the expected duration; send nothing.",
        rich_help_panel=GUARDED,
    ),
]

# Order and time

Pace = Annotated[
    str,
    typer.Option(
        "--pace",
        metavar="PACE",
        help="recorded, x4 (four times as fast), or max (no waiting but for answers).",
        rich_help_panel=SPEED,
    ),
]
MaxGap = Annotated[
    str | None,
    typer.Option(
        "--max-gap",
        metavar="TIME",
        help="No pause between requests is longer (500ms, 5s).",
        rich_help_panel=SPEED,
    ),
]
Timeout = Annotated[
    str,
    typer.Option(
        "--timeout",
        metavar="TIME",
        help="For an answer; requests that wait at the broker get their captured time more.",
        rich_help_panel=SPEED,
    ),
]
ConnectTimeout = Annotated[
    str,
    typer.Option(
        "--connect-timeout", metavar="TIME", help="For a connection.", rich_help_panel=SPEED
    ),
]
InFlight = Annotated[
    int,
    typer.Option(
        "--in-flight-mb",
        metavar="MB",
        min=1,
        help="Sending pauses while so much is not answered.",
        rich_help_panel=SPEED,
    ),
]

# What is replayed


# Comparison

Offsets = Annotated[
    OffsetMode,
    typer.Option(
        "--offsets",
        help="Where readers start: relative (where the same data is at the target), "
        "captured (the same numbers), earliest.",
        rich_help_panel=ANSWERS,
    ),
]
Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="KIND:OLD=NEW",
        help="A topic, group or transactional-id of another name at the target; repeatable.",
        rich_help_panel=ANSWERS,
    ),
]
Reencode = Annotated[
    bool,
    typer.Option(
        "--reencode",
        help="Send requests whose api_version the target does not speak at the nearest one.",
        rich_help_panel=ANSWERS,
    ),
]
Rules = Annotated[
    list[str] | None,
    typer.Option(
        "--rules",
        metavar="FILE",
        help="Rules for what may differ (TOML); repeatable.",
        rich_help_panel=ANSWERS,
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Without the built-in rules: only ids that had to be translated may differ.",
        rich_help_panel=ANSWERS,
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="HOST:PORT",
        help="Replay to this one first, and compare with its answers.",
        rich_help_panel=ANSWERS,
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="FILE",
        help="Compare with an earlier run (its --json FILE).",
        rich_help_panel=ANSWERS,
    ),
]
FailOn = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-on",
        metavar="VERDICTS",
        help="Verdicts that make the exit code 1: different,error (default), tolerated, "
        "skipped, same, none.",
        rich_help_panel=ANSWERS,
    ),
]

# Output

Junit = Annotated[
    str | None,
    typer.Option(
        "--junit",
        metavar="FILE",
        help="JUnit XML, a test suite per API.",
        rich_help_panel=OUTPUT,
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="JSON lines: the run, every exchange, the counts.",
        rich_help_panel=OUTPUT,
    ),
]
Html = Annotated[
    str | None,
    typer.Option("--html", metavar="FILE", help="A self-contained page.", rich_help_panel=OUTPUT),
]
Out = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="The table set of the replay's own traffic.",
        rich_help_panel=OUTPUT,
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace the table set in DIR.", rich_help_panel=OUTPUT),
]
Pcap = Annotated[
    str | None,
    typer.Option(
        "--pcap",
        metavar="FILE",
        help="The replay's own traffic as a capture (after TLS, without logins).",
        rich_help_panel=OUTPUT,
    ),
]
Save = Annotated[
    str | None,
    typer.Option(
        "--save",
        metavar="FILE",
        help="Keep the workload as a small file for later replays.",
        rich_help_panel=OUTPUT,
    ),
]

# Access to the target

Tls = Annotated[
    bool, typer.Option("--tls", help="Speak TLS to the target.", rich_help_panel=ACCESS)
]
TlsCa = Annotated[
    str | None,
    typer.Option(
        "--tls-ca", metavar="FILE", help="Authorities to trust (PEM).", rich_help_panel=ACCESS
    ),
]
TlsCert = Annotated[
    str | None,
    typer.Option(
        "--tls-cert", metavar="FILE", help="Our certificate (PEM).", rich_help_panel=ACCESS
    ),
]
TlsKey = Annotated[
    str | None,
    typer.Option(
        "--tls-key",
        metavar="FILE",
        help="Its key (PEM); the password of an encrypted one comes from "
        "KDISSECT_TLS_KEY_PASSWORD.",
        rich_help_panel=ACCESS,
    ),
]
TlsNoVerify = Annotated[
    bool,
    typer.Option(
        "--tls-no-verify",
        help="Do not check the target's certificate.",
        rich_help_panel=ACCESS,
    ),
]
TlsServerName = Annotated[
    str | None,
    typer.Option(
        "--tls-server-name",
        metavar="NAME",
        help="The name in the target's certificate, where it is not its host.",
        rich_help_panel=ACCESS,
    ),
]
Sasl = Annotated[
    str | None,
    typer.Option(
        "--sasl",
        metavar="MECHANISM",
        help="PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER.",
        rich_help_panel=ACCESS,
    ),
]
SaslUser = Annotated[
    str | None, typer.Option("--sasl-user", metavar="NAME", rich_help_panel=ACCESS)
]
SaslPasswordFile = Annotated[
    str | None,
    typer.Option(
        "--sasl-password-file",
        metavar="FILE",
        help="Or in KDISSECT_SASL_PASSWORD.",
        rich_help_panel=ACCESS,
    ),
]
SaslTokenFile = Annotated[
    str | None,
    typer.Option(
        "--sasl-token-file",
        metavar="FILE",
        help="OAUTHBEARER: the token; or in KDISSECT_SASL_TOKEN.",
        rich_help_panel=ACCESS,
    ),
]
