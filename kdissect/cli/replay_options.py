"""The options of `kdissect replay`, a group for each panel of its help."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from kdissect.cli.options import checked

if TYPE_CHECKING:
    from kdissect.replay.model import TranslateOptions
    from kdissect.replay.running.runner import RunOptions
    from kdissect.replay.target.connection import Access

Source = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Captures (files, folders, globs), or a file of `--save`.",
    ),
]
To = Annotated[
    str | None, typer.Option("--to", metavar="HOST:PORT", help="A broker of the target.")
]


@dataclass(frozen=True)
class GuardOptions:
    """Options for the changes that a replay may make at the target."""

    TITLE: ClassVar[str] = "Guard"

    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="CLASSES",
            help="Writing classes that may be sent: produce,groups,transactions,admin. Without "
            "it only requests that read are. delete-existing: also delete what the replay did not "
            "create. same-cluster: the target may be the cluster that was captured.",
        ),
    ] = None
    create_topics: Annotated[
        bool,
        typer.Option("--create-topics", help="Create the topics of the capture before the replay."),
    ] = False
    into_existing: Annotated[
        bool,
        typer.Option(
            "--into-existing",
            help="Write also to topics, groups and transactional ids that hold data or members at "
            "the target.",
        ),
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the plan, the skipped requests and the expected duration; send nothing.",
        ),
    ] = False
    reset: Annotated[
        str | None,
        typer.Option(
            "--reset",
            metavar="COMMAND",
            help="Run this command before each run: it resets the cluster, whose address is in "
            "KDISSECT_TARGET.",
        ),
    ] = None


@dataclass(frozen=True)
class SpeedOptions:
    """Options for the times of requests, and the longest waits."""

    TITLE: ClassVar[str] = "Order and time"

    pace: Annotated[
        str,
        typer.Option(
            "--pace",
            metavar="PACE",
            help="recorded, x4 (four times as fast), or max (waits for answers only).",
        ),
    ] = "recorded"
    max_gap: Annotated[
        str | None,
        typer.Option(
            "--max-gap", metavar="TIME", help="Longest pause between requests (500ms, 5s)."
        ),
    ] = None
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout",
            metavar="TIME",
            help="Longest wait for an answer (for a long poll, plus its captured time), or a "
            "connection (10 s at most).",
        ),
    ] = "30s"

    def run_options(self) -> RunOptions:
        """Return the pace and the limits of a run; raises BadParameter."""
        from kdissect.replay.planning.plan import parse_pace, parse_span
        from kdissect.replay.running.runner import RunOptions

        if self.max_gap is not None:
            checked("--max-gap", parse_span, self.max_gap)
        pace = parse_pace(self.pace, self.max_gap)
        timeout_s = checked("--timeout", parse_span, self.timeout)
        return RunOptions(pace, timeout_s)


class OffsetMode(StrEnum):
    """The values of --offsets."""

    CAPTURED = "captured"
    EARLIEST = "earliest"
    RELATIVE = "relative"


@dataclass(frozen=True)
class ComparisonOptions:
    """Options for the answers that count as different, and what they are compared with."""

    TITLE: ClassVar[str] = "Comparison"

    offsets: Annotated[
        OffsetMode,
        typer.Option(
            "--offsets",
            help="Where readers start: relative (at the same data), "
            "captured (the same numbers), earliest.",
        ),
    ] = OffsetMode.RELATIVE
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="KIND:OLD=NEW",
            help="Another name for a topic, group or transactional-id at the target; repeatable.",
        ),
    ] = None
    reencode: Annotated[
        bool,
        typer.Option(
            "--reencode",
            help="Send requests of an api_version that the target lacks in the nearest one.",
        ),
    ] = False
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--rules", metavar="FILE", help="Rules for what may differ (TOML); repeatable."
        ),
    ] = None
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Without the built-in rules: only ids that had to be translated may differ.",
        ),
    ] = False
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="HOST:PORT",
            help="Replay to this broker first, and compare with its answers.",
        ),
    ] = None
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline", metavar="FILE", help="Compare with an earlier run (its --json FILE)."
        ),
    ] = None
    control_runs: Annotated[
        int,
        typer.Option(
            "--control-runs",
            metavar="N",
            min=0,
            help="Replay N times, at least 2, to --against or else to the target itself, and "
            "excuse fields that differ between these runs.",
        ),
    ] = 0
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            metavar="VERDICTS",
            help="Verdicts that make the exit code 1: different,error (default), tolerated, "
            "skipped, same, none. latency: answers that are slower than those of --control-runs.",
        ),
    ] = None

    def check(self) -> None:
        """Raise BadParameter for options that exclude each other."""
        from kdissect.replay.running.control_runs import FEWEST

        if self.against is not None and self.baseline is not None:
            raise typer.BadParameter("name one of --against and --baseline", param_hint="--against")
        if self.control_runs and self.control_runs < FEWEST:
            raise typer.BadParameter(
                f"at least {FEWEST}: one run cannot show which fields differ by themselves",
                param_hint="--control-runs",
            )
        if self.control_runs and self.baseline is not None:
            raise typer.BadParameter(
                "name one of --control-runs and --baseline", param_hint="--control-runs"
            )

    def translate_options(self) -> TranslateOptions:
        """Return the options of the translation; raises BadParameter."""
        from kdissect.replay.model import TranslateOptions

        renames: dict[tuple[str, str], str] = {}
        for kind, old, new in map(_rename, self.rename or ()):
            if renames.setdefault((kind, old), new) != new:
                raise typer.BadParameter(f"{kind} {old} has two new names", param_hint="--rename")
        return TranslateOptions(self.offsets.value, renames, self.reencode)


def _rename(value: str) -> tuple[str, str, str]:
    """Return kind, old and new name of a value of --rename."""
    from kdissect.replay.translation.id_map import RENAME_KINDS

    kind, colon, rest = value.partition(":")
    old, equals, new = rest.partition("=")
    if kind not in RENAME_KINDS or not colon or not equals or not old or not new:
        raise typer.BadParameter(
            f"{value!r} is not KIND:OLD=NEW (kinds: {', '.join(RENAME_KINDS)})",
            param_hint="--rename",
        )
    return kind, old, new


@dataclass(frozen=True)
class OutputOptions:
    """Options for the files that a replay writes."""

    TITLE: ClassVar[str] = "Output"

    junit: Annotated[
        str | None, typer.Option("--junit", metavar="FILE", help="JUnit XML, a test suite per API.")
    ] = None
    json: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="JSON lines: the run, every exchange, the counts."
        ),
    ] = None
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="A self-contained page.")
    ] = None
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="DIR", help="The table set of the replay's own traffic."),
    ] = None
    save: Annotated[
        str | None,
        typer.Option(
            "--save", metavar="FILE", help="Keep the workload as a small file for later replays."
        ),
    ] = None

    @property
    def files(self) -> dict[str, str | None]:
        """The files to write, by option."""
        return {
            "--junit": self.junit,
            "--json": self.json,
            "--html": self.html,
            "--save": self.save,
        }

    @property
    def written(self) -> list[str]:
        """The options and their values, for a message."""
        paths = {**self.files, "--out": self.out}
        return [f"{option} {path}" for option, path in paths.items() if path]

    def check(self) -> None:
        """Raise OutputError for a place that cannot be written."""
        from kdissect.errors import OutputError
        from kdissect.pipeline.table_set import check_out

        for option, path in self.files.items():
            if path is not None and not Path(path).absolute().parent.is_dir():
                raise OutputError(f"{option} {path}: no folder {Path(path).parent}")
            if path is not None and Path(path).is_dir():
                raise OutputError(f"{option} {path}: a folder; name a file")
        if self.out is not None:
            check_out(self.out, False)


@dataclass(frozen=True)
class AccessOptions:
    """Options for TLS and SASL."""

    TITLE: ClassVar[str] = "Access to the target"

    tls: Annotated[bool, typer.Option("--tls", help="Speak TLS to the target.")] = False
    tls_ca: Annotated[
        str | None, typer.Option("--tls-ca", metavar="FILE", help="Authorities to trust (PEM).")
    ] = None
    tls_cert: Annotated[
        str | None,
        typer.Option(
            "--tls-cert",
            metavar="FILE",
            help="The client certificate and its key (PEM). "
            "The password of an encrypted key is in KDISSECT_TLS_KEY_PASSWORD.",
        ),
    ] = None
    tls_no_verify: Annotated[
        bool, typer.Option("--tls-no-verify", help="Do not check the target's certificate.")
    ] = False
    sasl: Annotated[
        str | None,
        typer.Option(
            "--sasl",
            metavar="MECHANISM",
            help="PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER. The password is in "
            "KDISSECT_SASL_PASSWORD, a token in KDISSECT_SASL_TOKEN.",
        ),
    ] = None
    sasl_user: Annotated[str | None, typer.Option("--sasl-user", metavar="NAME")] = None

    def access(self, timeout_s: float) -> Access:
        """Return the way to log in; raises an error for a file that is unusable."""
        from kdissect.replay.target.auth import TlsOptions, sasl_from, tls_context
        from kdissect.replay.target.connection import Access

        tls = None
        if self.tls or self.tls_ca or self.tls_cert or self.tls_no_verify:
            tls = TlsOptions(self.tls_ca, self.tls_cert, verify=not self.tls_no_verify)
            tls_context(tls)  # raises now if a file is unusable
        sasl = sasl_from(self.sasl, self.sasl_user) if self.sasl else None
        return Access(tls, sasl, min(timeout_s, Access.connect_timeout))
