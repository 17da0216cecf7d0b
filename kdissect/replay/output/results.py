"""Results of a replay for all outputs: counts, latencies in both clusters, lag, exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum

from kdissect.errors import Error
from kdissect.replay.comparison.findings import Finding, group
from kdissect.replay.model import Judgement, Outcome, ReplayPlan, RunFinding, Verdict
from kdissect.replay.running.result import RunResult
from kdissect.replay.target.preparation import Prepared
from kdissect.text import rfc3339

RESULTS_VERSION = 2
_PARTS = (0.5, 0.95, 0.99)
_LATENCY = "latency"  # of --fail-on, and a kind of RunFinding
EXIT_DONE, _EXIT_FINDING, _EXIT_ENVIRONMENT, _EXIT_INTERRUPTED = 0, 1, 3, 130


class FailOnError(Error, ValueError):
    """--fail-on names no verdict."""


class Reference(Enum):
    """The kind of responses that answers are compared with; outputs show the value."""

    CAPTURE = "the capture"
    AGAINST = "the answers of another target"
    BASELINE = "an earlier run"


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


@dataclass(frozen=True)
class Span:
    """Percentiles of a list of times, in ns; None where there are none."""

    count: int = 0
    p50: int | None = None
    p95: int | None = None
    p99: int | None = None
    max: int | None = None

    @classmethod
    def of(cls, values: Iterable[int]) -> Span:
        found = sorted(values)
        if not found:
            return cls()
        p50, p95, p99 = (found[min(int(len(found) * part), len(found) - 1)] for part in _PARTS)
        return cls(len(found), p50, p95, p99, found[-1])

    def as_us(self) -> dict[str, float | int | None]:
        """For JSON: microseconds."""
        times = {name: getattr(self, name) for name in ("p50", "p95", "p99", "max")}
        return {
            "count": self.count,
            **{f"{name}_us": None if ns is None else ns / 1000 for name, ns in times.items()},
        }


@dataclass
class ApiResult:
    """An API's outcomes: how many of each verdict, and latencies where both are known."""

    api_name: str
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    captured: Span = field(default_factory=Span)
    answered: Span = field(default_factory=Span)

    @property
    def count(self) -> int:
        return sum(self.verdicts.values())


@dataclass
class Results:
    """A finished replay.

    reference: the kind of responses that the answers were compared with (the capture's by default).
    reference_name: the name of that capture or run, if any.
    releases: Kafka releases of the captured broker and of the target, "" unknown.
    findings: about the whole run, not about one answer.
    kinds: the differences by kind, what would hurt first; follows: step -> step that it follows.
    """

    plan: ReplayPlan
    run: RunResult
    target: str
    cluster_id: str | None
    pace: str
    is_timed: bool
    fail_on: FailOn = field(default_factory=FailOn)
    reference: Reference = Reference.CAPTURE
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

    def verdicts(self) -> Counter[Verdict]:
        return Counter(judgement_of(outcome).verdict for outcome in self.outcomes)

    def by_api(self) -> list[ApiResult]:
        """In order of the APIs' keys."""
        rows: dict[tuple[int, str], list[Outcome]] = {}
        for outcome in self.outcomes:
            step = outcome.step
            rows.setdefault((step.exchange.api_key, step.api_name), []).append(outcome)
        return [_api_result(name, rows[key, name]) for key, name in sorted(rows)]

    def groups(self, *, tolerated: bool = False) -> list[Finding]:
        """All differences that nothing tolerates (or those that a rule does), each kind once."""
        return group(self.outcomes, None, tolerated=tolerated)

    def exchange_id(self, step_number: int) -> int:
        return self.plan.steps[step_number].exchange.exchange_id

    def api_key(self, finding: Finding) -> int:
        return self.plan.steps[finding.step].exchange.api_key

    def reasons(self, verdict: Verdict) -> list[tuple[tuple[str, str, str], int]]:
        """((API, code of a skipped step, reason), count) of outcomes with a verdict whose reason
        has no place in a message, the most frequent first."""
        counts: Counter[tuple[str, str, str]] = Counter()
        for outcome in self.outcomes:
            judgement = judgement_of(outcome)
            if judgement.verdict is verdict and not judgement.differences:
                code = outcome.skipped.code.value if outcome.skipped else ""
                reason = judgement.reason or verdict.value
                counts[outcome.step.api_name, code, reason] += 1
        return counts.most_common()

    def lag(self) -> Span:
        """Behind the schedule, over all steps that were sent."""
        if not self.is_timed:
            return Span()
        return Span.of(each.lag_ns for each in self.outcomes if each.sent is not None)

    def own_lag(self) -> Span:
        """The part of it that is ours: ready to go, and not yet sent."""
        return Span.of(each.own_lag_ns for each in self.outcomes if each.own_lag_ns >= 0)

    def connection_count(self) -> int:
        """Captured connections of which something was sent."""
        return len({each.step.connection for each in self.outcomes if each.sent is not None})

    def requests_per_s(self) -> float:
        return self.sent_count / (self.run.elapsed_ns / 1e9) if self.run.elapsed_ns else 0.0

    def fails(self, finding: RunFinding) -> bool:
        """Return whether --fail-on names a finding of the whole run."""
        if finding.kind == _LATENCY:
            return self.fail_on.latency
        return Verdict.DIFFERENT in self.fail_on.verdicts

    def failing(self) -> int:
        """Outcomes and findings that --fail-on names."""
        verdicts = self.verdicts()
        return sum(verdicts[each] for each in self.fail_on.verdicts) + sum(
            self.fails(each) for each in self.findings
        )

    @property
    def exit_code(self) -> int:
        if self.run.is_interrupted:
            return _EXIT_INTERRUPTED
        if self.run.ended:
            return _EXIT_ENVIRONMENT
        return _EXIT_FINDING if self.failing() else EXIT_DONE


def _api_result(name: str, outcomes: Sequence[Outcome]) -> ApiResult:
    both = [
        (each.step.exchange.latency_ns, each.latency_ns)
        for each in outcomes
        if each.latency_ns >= 0 and each.step.exchange.latency_ns >= 0
    ]
    return ApiResult(
        name,
        Counter(judgement_of(each).verdict for each in outcomes),
        Span.of(then for then, _ in both),
        Span.of(now for _, now in both),
    )


def judgement_of(outcome: Outcome) -> Judgement:
    """The judgement of an outcome; one not judged yet gets skipped, error or same."""
    if outcome.judgement is not None:
        return outcome.judgement
    if outcome.skipped is not None:
        verdict = Verdict.DIFFERENT if outcome.skipped.is_finding else Verdict.SKIPPED
        return Judgement(verdict, reason=outcome.skipped.reason)
    if outcome.error:
        return Judgement(Verdict.ERROR, reason=outcome.error)
    return Judgement(Verdict.SAME)


def timestamp(time_ns: int) -> str | None:
    """RFC 3339 with microseconds; None for an unknown time."""
    if time_ns < 0:
        return None
    seconds, rest = divmod(time_ns, 10**9)
    moment = datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest // 1000)
    return rfc3339(moment, "microseconds")


def show_ns(ns: float | None) -> str:
    """A time for people: 3 digits and a unit; whole seconds from 1000 s on."""
    if ns is None:
        return "-"
    for unit, size in (("ns", 1), ("µs", 1e3), ("ms", 1e6), ("s", 1e9)):
        text = f"{ns / size:.3g}"
        if float(text) < 1000:  # as rounded: 999.6 µs are 1 ms
            return f"{text} {unit}"
    return f"{ns / 1e9:.0f} s"
