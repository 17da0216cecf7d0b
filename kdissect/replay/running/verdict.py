"""The verdicts of a replay: its run judged by the capture or the reference, without noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kdissect.replay.comparison.claims import compare_states
from kdissect.replay.comparison.findings import Explainer, Settings, find
from kdissect.replay.comparison.judge import Judge, ReferenceRun
from kdissect.replay.comparison.latency import (
    captured_latencies,
    compare_latencies,
    latencies_of,
    notes_of,
)
from kdissect.replay.comparison.noise import Noise, is_evidence
from kdissect.replay.comparison.releases import ReleaseDifferences, Releases, captured_ranges
from kdissect.replay.fields import FieldTable
from kdissect.replay.model import Judgement, ReplayPlan, RunFinding, Verdict
from kdissect.replay.output.results import Results
from kdissect.replay.output.text import dropped_notes, finding_text, retry_notes
from kdissect.replay.running.runner import RunResult
from kdissect.replay.target.cluster import Target

if TYPE_CHECKING:
    from kdissect.replay.running.session import SessionOptions


@dataclass
class Verdicts:
    """Judges a run. controls: runs of the reference, or of the target itself."""

    plan: ReplayPlan
    options: SessionOptions
    run: RunResult
    controls: Sequence[RunResult]
    against: Target | None
    target: Target

    def add_to(self, results: Results, settings: Settings) -> None:
        """Judge the outcomes, and add findings and notes to the results."""
        outcomes, notes = self.run.outcomes, results.notes
        notes += self._judge()
        if len(self.controls) > 1:
            notes += self._excuse_noise()
        releases = self._releases()
        ReleaseDifferences(releases, self.target.versions).allow(outcomes)
        findings = self._end_findings(notes)
        if self.options.fail_on.latency:
            findings += self._slower(notes)
        if (baseline := self.options.baseline) is not None:
            baseline.accept(outcomes)
            findings = baseline.new(findings)
            results.reference, results.reference_name = "an earlier run", baseline.path
        if self.against is not None:
            results.reference = "the answers of another target"
            results.reference_name = str(self.against)
        notes += [*dropped_notes(outcomes), *retry_notes(outcomes)]
        results.findings = findings
        results.releases = releases.then, releases.now
        results.kinds, results.follows = find(self.plan, outcomes, Explainer(releases, settings))

    def _references(self) -> list[ReferenceRun]:
        return [
            ReferenceRun(each.outcomes, each.ids) for each in self.controls if each.ids is not None
        ]

    def _judge(self) -> list[str]:
        """Judge each answer by the capture, or by the answer of the reference that it resembles
        most. Returns notes about rules of the user that allowed nothing."""
        run = self.run
        if run.ids is None:
            return []
        references: list[ReferenceRun | None] = [None]
        if self.against is not None and self.controls:
            references = [*self._references()]
        used: set[str] = set()
        best: dict[int, Judgement] = {}
        for reference in references:
            judge = Judge(run.ids, self.options.table, reference)
            judge.judge(run.outcomes)
            used |= judge.allowances.used.keys()
            for outcome in run.outcomes:
                judgement, number = outcome.judgement, outcome.step.number
                if number not in best or _findings(judgement) < _findings(best[number]):
                    best[number] = judgement
        for outcome in run.outcomes:
            outcome.judgement = best[outcome.step.number]
        return _unused(self.options.table, used)

    def _excuse_noise(self) -> list[str]:
        """Tolerate what differs between the control runs; notes name these fields."""
        noise, (first, *others) = Noise(), self._references()
        for other in others:
            Judge(other.ids, self.options.table, first).judge(other.outcomes)
            noise.add(other.outcomes)
        for outcome in self.run.outcomes:
            excused = partial(noise.excused, outcome.step.api_name)
            outcome.judgement = outcome.judgement.allowing(excused)
        return [
            f"control runs differ from each other in {api} {place}, in {field.count} places: "
            + ("never excused" if is_evidence(place) else "excused")
            for (api, place), field in sorted(
                noise.fields.items(), key=lambda each: (-each[1].count, each[0])
            )
        ]

    def _releases(self) -> Releases:
        captured = captured_ranges(self.plan.workload)
        if self.against is not None:
            captured = self.against.versions
        return Releases.between(captured, self.target.versions)

    def _end_findings(self, notes: list[str]) -> list[RunFinding]:
        """Findings about the end state that the control runs do not have."""
        state = self.run.state
        if state is None:
            return []
        notes += [
            f"the end state of {part} could not be read: {why}"
            for part, why in state.unread.items()
        ]
        for control in self.controls:
            notes += [f"a control run: {finding_text(each)}" for each in control.findings]
        excused = {each for control in self.controls for each in control.findings}
        findings = [each for each in self.run.findings if each not in excused]
        states = [each.state for each in self.controls if each.state is not None]
        if states and self.against is not None:
            known = {each.subject for each in findings}
            compared = compare_states(state, states)
            findings += [each for each in compared if each.subject not in known]
        return findings

    def _slower(self, notes: list[str]) -> list[RunFinding]:
        """Findings about latencies; notes say what they do not prove."""
        controls = [latencies_of(each.outcomes) for each in self.controls]
        tests = compare_latencies(
            self.plan,
            controls or [captured_latencies(self.plan)],
            latencies_of(self.run.outcomes),
        )
        notes += notes_of(tests, control_count=len(controls))
        return [each.finding() for each in tests if each.is_slower]


def _findings(judgement: Judgement) -> tuple[bool, int]:
    """A rank that is lower for a judgement with fewer findings."""
    count = sum(not each.rule for each in judgement.differences)
    return judgement.verdict in (Verdict.DIFFERENT, Verdict.ERROR), count


def _unused(table: FieldTable, used: set[str]) -> list[str]:
    """A line for each rule of the user that allowed no difference."""
    return [
        f"rule {rule.name} allowed nothing: nothing differs at {', '.join(rule.paths)}"
        for rule in table.rules
        if rule.is_own and rule.name not in used and rule.is_allowance
    ]
