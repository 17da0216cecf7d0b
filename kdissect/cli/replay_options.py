"""The options of `kdissect replay`, a group for each panel of its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from kdissect.cli.options import checked
from kdissect.cli.verbs import OptionGroup

if TYPE_CHECKING:
    from kdissect.replay.planning.plan import Pace
    from kdissect.replay.target.connection import Access


@dataclass(frozen=True)
class GuardOptions(OptionGroup):
    """Options for the changes that a replay may make at the target."""

    TITLE = "Guard"

    allow: list[str] | None = None
    create_topics: bool = False
    into_existing: bool = False
    dry_run: bool = False
    reset: str | None = None


@dataclass(frozen=True)
class SpeedOptions(OptionGroup):
    """Options for the times of requests, and the longest waits."""

    TITLE = "Order and time"

    pace: str = "recorded"
    max_gap: str | None = None
    timeout: str = "30s"

    def parsed_pace(self) -> Pace:
        """Return the pace; raises BadParameter."""
        from kdissect.replay.planning.plan import parse_pace, parse_span

        if self.max_gap is not None:
            checked("--max-gap", parse_span, self.max_gap)
        return parse_pace(self.pace, self.max_gap)

    def timeout_s(self) -> float:
        """Return the longest wait for an answer; raises BadParameter."""
        from kdissect.replay.planning.plan import parse_span

        return checked("--timeout", parse_span, self.timeout)


@dataclass(frozen=True)
class ComparisonOptions(OptionGroup):
    """Options for the answers that count as different, and what they are compared with."""

    TITLE = "Comparison"

    offsets: Literal["captured", "earliest", "relative"] = "relative"
    rename: list[str] | None = None
    reencode: bool = False
    rules: list[str] | None = None
    strict: bool = False
    against: str | None = None
    baseline: str | None = None
    control_runs: int = 0
    fail_on: list[str] | None = None

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

    def renames(self) -> dict[tuple[str, str], str]:
        """Return (kind, old name) -> new name; raises BadParameter."""
        renames: dict[tuple[str, str], str] = {}
        for kind, old, new in map(_rename, self.rename or ()):
            if renames.setdefault((kind, old), new) != new:
                raise typer.BadParameter(f"{kind} {old} has two new names", param_hint="--rename")
        if len({(kind, new) for (kind, _), new in renames.items()}) < len(renames):
            raise typer.BadParameter("two names become one", param_hint="--rename")
        return renames


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
class OutputOptions(OptionGroup):
    """Options for the files that a replay writes."""

    TITLE = "Output"

    junit: str | None = None
    json: str | None = None
    html: str | None = None
    out: str | None = None
    save: str | None = None

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
class AccessOptions(OptionGroup):
    """Options for TLS and SASL."""

    TITLE = "Access to the target"

    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_no_verify: bool = False
    sasl: str | None = None
    sasl_user: str | None = None

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
