"""A finished replay: its run with findings, what it was compared with, and its exit code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kdissect.errors import Error
from kdissect.replay.comparison.findings import Finding
from kdissect.replay.model import Outcome, ReplayPlan, RunFinding, Verdict
from kdissect.replay.running.runner import RunResult
from kdissect.replay.target.preparation import Prepared

_LATENCY = "latency"  # of --fail-on, and a kind of RunFinding
EXIT_DONE, _EXIT_FINDING, _EXIT_ENVIRONMENT, _EXIT_INTERRUPTED = 0, 1, 3, 130


class FailOnError(Error, ValueError):
    """--fail-on names no verdict."""


@dataclass(frozen=True)
class FailOn:
    """The findings that make the exit code 1: verdicts, and slower answers."""

    verdicts: frozenset[Verdict] = frozenset({Verdict.DIFFERENT, Verdict.ERROR})
    latency: bool = False

    def __str__(self) -> str:
        names = sorted(verdict.value for verdict in self.verdicts)
        return ",".join([*names, _LATENCY] if self.latency else names)


def parse_fail_on(values: Iterable[str]) -> FailOn:
    """The verdicts of ``different,error,latency`` and the like; ``none`` for nothing.

    Raises FailOnError.
    """
    names = {name.strip().lower() for value in values for name in value.split(",")} - {""}
    known = {verdict.value: verdict for verdict in Verdict}
    for name in sorted(names - {"none", _LATENCY}):
        if name not in known:
            every = ", ".join([*known, _LATENCY])
            raise FailOnError(f"--fail-on {name}: verdicts are {every}, or none")
    verdicts = frozenset(known[name] for name in names - {"none", _LATENCY})
    return FailOn(verdicts, _LATENCY in names)


@dataclass
class Results:
    """A finished replay.

    reference: the kind of responses that the answers were compared with; reference_name: the name
    of that target or run, if any. releases: Kafka releases of the captured broker and of the
    target, "" unknown. findings: about the whole run, not about one answer.
    kinds: the differences by kind, what would hurt first; follows: step -> step that it follows.
    """

    plan: ReplayPlan
    run: RunResult
    target: str
    cluster_id: str | None
    pace: str
    is_timed: bool
    fail_on: FailOn = field(default_factory=FailOn)
    reference: str = "the capture"
    reference_name: str = ""
    prepared: list[Prepared] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    findings: list[RunFinding] = field(default_factory=list)
    kinds: list[Finding] = field(default_factory=list)
    follows: dict[int, int] = field(default_factory=dict)
    releases: tuple[str, str] = ("", "")

    @property
    def outcomes(self) -> list[Outcome]:
        return self.run.outcomes

    @property
    def sent_count(self) -> int:
        return sum(outcome.sent is not None for outcome in self.outcomes)

    @property
    def compared_with(self) -> str:
        return f"{self.reference} {self.reference_name}".strip()

    def exchange_id(self, step_number: int) -> int:
        return self.plan.steps[step_number].exchange.exchange_id

    def fails(self, finding: RunFinding) -> bool:
        """Return whether --fail-on names a finding of the whole run."""
        if finding.kind == _LATENCY:
            return self.fail_on.latency
        return Verdict.DIFFERENT in self.fail_on.verdicts

    def failing(self) -> int:
        """Outcomes and findings that --fail-on names."""
        outcomes = sum(each.judgement.verdict in self.fail_on.verdicts for each in self.outcomes)
        return outcomes + sum(self.fails(each) for each in self.findings)

    @property
    def exit_code(self) -> int:
        if self.run.is_interrupted:
            return _EXIT_INTERRUPTED
        if self.run.ended:
            return _EXIT_ENVIRONMENT
        return _EXIT_FINDING if self.failing() else EXIT_DONE
