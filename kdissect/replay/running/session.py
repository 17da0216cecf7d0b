"""One replay from a plan to its results: who is the target, may we, topics, the run, the verdicts.

The pure halves (translation, comparison) are made here for each target, as each has ids of its own.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kdissect.errors import EnvironmentFailed
from kdissect.replay.comparison.claims import Claims, compare_states
from kdissect.replay.comparison.findings import (
    Explainer,
    Releases,
    Settings,
    allow_changes,
    captured_ranges,
    find,
)
from kdissect.replay.comparison.judge import Judge, Noise, ReferenceRun, is_evidence, unanswered
from kdissect.replay.comparison.latency import (
    captured_latencies,
    compare_latencies,
    latencies_of,
    notes_of,
)
from kdissect.replay.fields import FieldTable, built_in_fields
from kdissect.replay.model import (
    DELETE_EXISTING,
    LATENCY,
    Judgement,
    ReplayPlan,
    RunFinding,
    TranslateOptions,
    Verdict,
)
from kdissect.replay.output.rows import FAIL_ON, Baseline, Results
from kdissect.replay.output.text import dropped_notes, finding_text, retry_notes
from kdissect.replay.running.control_runs import PlannedRun, plan_runs
from kdissect.replay.running.runner import Runner, RunOptions, RunResult, not_begun
from kdissect.replay.target.cluster import READY_S, Target
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.target.guard import (
    check_cluster,
    check_existing,
    create_topics,
    find_existing,
)
from kdissect.replay.target.state import find_missing, read_settings, read_state, starting_state
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.nodes import coordinators_of_plan
from kdissect.replay.translation.translator import Translator
from kdissect.replay.workload.messages import EARLIEST


@dataclass(frozen=True)
class SessionOptions:
    """The options of a replay; `run` has pace and limits.

    into_existing: write to topics, groups and transactional ids that hold data or members.
    table: fields with the user's rules. baseline: an accepted run.
    control_runs: how often to replay to the reference. reset: a command before each run, "" none.
    """

    run: RunOptions = field(default_factory=RunOptions)
    translate: TranslateOptions = field(default_factory=TranslateOptions)
    table: FieldTable = field(default_factory=built_in_fields)
    makes_topics: bool = False
    same_cluster: bool = False
    into_existing: bool = False
    fail_on: frozenset[str] = FAIL_ON
    baseline: Baseline | None = None
    control_runs: int = 0
    reset: str = ""


Watch = Callable[[Runner | str], None]
Say = Callable[[str], None]
LACKS_MAX = 20  # lines about what the target lacks; the rest is counted


async def replay(
    plan: ReplayPlan,
    target: Target,
    options: SessionOptions,
    against: Target | None = None,
    watch: Watch | None = None,
    say: Say | None = None,
) -> Results:
    """Replay a plan to `target`, and before that to `against` where one is given.

    watch: called with each runner when it begins, and with a text before other parts. say: called
    before the first request with each thing that the target lacks.

    Raises OptionError where a target may not be used.
    Troubles with a target are in the results, also where it could not be reached at all: every step
    then says so, and the run has ended early.
    """
    try:
        return await _Session(plan, options, watch, say).run(target, against)
    finally:
        for each in (against, target):
            if each is not None:
                each.close()


class _Session:
    """All runs of one replay, and their comparison."""

    def __init__(
        self, plan: ReplayPlan, options: SessionOptions, watch: Watch | None, say: Say | None
    ) -> None:
        self._plan, self._options = plan, options
        self._watch: Watch = watch or (lambda what: None)
        self._say: Say = say or (lambda line: None)
        self._notes: list[str] = []

    async def run(self, target: Target, against: Target | None) -> Results:
        """Do all runs in their order, and compare the one that counts with the others."""
        options, plan = self._options, self._plan
        planned = plan_runs(
            plan,
            target,
            against,
            options.translate,
            control_runs=options.control_runs,
            command=options.reset,
            makes_topics=options.makes_topics,
        )
        if not options.reset:  # all are looked at before the first request of the workload
            for each in planned:
                if reason := await self._prepare(each):
                    return self._results(target, not_begun(plan, reason))
        finished: RunResult | None = None
        controls: list[RunResult] = []
        for each in planned:
            if options.reset and (reason := await self._prepare(each)):
                if finished is None:
                    return self._results(target, not_begun(plan, reason))
                finished.ended = reason
                break
            run = await self._run(each)
            self._notes += await each.delete_made()
            if not each.is_control:
                finished = run
            elif finished is None and run.is_interrupted:
                return self._results(each.target, run)
            else:
                if run.ended:
                    self._notes.append(f"{each.name} ended early: {run.ended}")
                controls.append(run)
            if run.is_interrupted:
                assert finished is not None
                finished.is_interrupted = True
                break
        assert finished is not None
        settings = finished.state.settings if finished.state is not None else {}
        if not settings and not finished.ended:
            settings = await read_settings(target)
        results = self._results(target, finished)
        _Verdicts(results, options, controls, against, target).add(settings)
        return results

    # -- before a run -----------------------------------------------------------------------------

    async def _prepare(self, run: PlannedRun) -> str:
        """Reset and probe the run's target, and check what it holds. Returns why the run cannot
        begin, or ""."""
        options = self._options
        self._watch(f"{run.name}: {'resetting and ' * bool(run.command)}probing {run.target}")
        try:
            await run.reset()
            await run.target.probe()
            check_cluster(self._plan.workload.facts, run.target, options.same_cluster)
            run.existing = await find_existing(run.target, run.effects)
        except EnvironmentFailed as error:
            return str(error)
        if not options.into_existing:
            check_existing(run.target, run.existing)
        if not run.is_control:
            await self._compare_start(run)
        return ""

    async def _compare_start(self, run: PlannedRun) -> None:
        """Say what the target lacks of the state that captured answers depend on."""
        lines = await find_missing(
            run.target,
            starting_state(self._plan),
            run.translate.renames,
            makes_topics=self._options.makes_topics,
        )
        if len(lines) > LACKS_MAX:
            lines[LACKS_MAX:] = [f"{len(lines) - LACKS_MAX} more such reasons"]
        for line in lines:
            self._notes.append(f"answers will differ: {line}")
            self._say(self._notes[-1])

    # -- a run ------------------------------------------------------------------------------------

    async def _run(self, planned: PlannedRun) -> RunResult:
        plan, target, options = self._plan, planned.target, self._options
        is_protected = DELETE_EXISTING not in plan.options.allow
        kept = planned.existing if is_protected else ()
        ids = IdMap(plan, planned.translate, kept, target.cluster)
        try:
            if options.makes_topics:
                self._notes += await create_topics(plan, target, planned.translate.renames)
            await _learn_target(ids, target)
        except (ConnectFailed, EnvironmentFailed) as error:
            reason = f"{target}: {error}" if isinstance(error, ConnectFailed) else str(error)
            return not_begun(plan, reason)
        runner = Runner(plan, Translator(ids), target, options.run)
        with _stopped_by_signals(runner):
            self._watch(runner)
            result = await runner.run()
        result.ids = ids
        if not result.ended and not result.is_interrupted:
            self._watch(f"{planned.name}: reading back the state of {target}")
            await _read_back(planned, ids, result)
        return result

    # -- results ----------------------------------------------------------------------------------

    def _results(self, target: Target, run: RunResult) -> Results:
        for each in run.outcomes:
            each.judgement = unanswered(each) or Judgement()
            if run.ids is None and each.error:  # it never began, whatever the capture has
                each.judgement = Judgement(Verdict.ERROR, reason=each.error)
        options = self._options
        return Results(
            self._plan, run, target, options.run.pace, options.fail_on, notes=self._notes
        )


async def _learn_target(ids: IdMap, target: Target) -> None:
    """Learn what the target is asked for before the first request. Raises ConnectFailed."""
    starts = await target.log_offsets(target.cluster.topics, EARLIEST)
    for (name, partition), start in starts.items():
        ids.offsets.target_starts((ids.captured_topic_name(name), partition), start)
    # so that a fresh target makes its internal topics before the first request
    end = time.monotonic() + READY_S
    for key in coordinators_of_plan(ids):
        await target.coordinator(*key, max(end - time.monotonic(), 0.0))
    await target.learn_metadata()


async def _read_back(planned: PlannedRun, ids: IdMap, finished: RunResult) -> None:
    """Read the end state of a run that wrote something, and compare it with the answers."""
    topics = [ids.captured_topic_name(name) for name in planned.effects.names("topic")]
    claims = Claims(ids, finished.outcomes)
    if not topics and not claims.committed_groups and not claims.transactional_ids:
        return
    finished.state = await read_state(
        planned.target,
        topics,
        claims.committed_groups,
        claims.transactional_ids,
        claims.gone,
        renames=planned.translate.renames,
    )
    planned.target.close()
    held = {name for (kind, name), text in planned.existing.items() if kind == "topic" and text}
    held = set(map(ids.captured_topic_name, held))
    finished.findings = claims.check(finished.state, held)


@contextmanager
def _stopped_by_signals(runner: Runner) -> Any:
    """SIGINT and SIGTERM end the run in order; a second one ends the process as usual."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
        runner.interrupt()

    try:
        for number in numbers:
            loop.add_signal_handler(number, stop)
    except (ValueError, RuntimeError, NotImplementedError):
        yield  # not in the main thread: signals are the caller's
        return
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


# -- verdicts ---------------------------------------------------------------------------------


@dataclass
class _Verdicts:
    """Judges the run of `results` by the capture or the reference, without noise. controls: runs of
    the reference, or of the target itself."""

    results: Results
    options: SessionOptions
    controls: Sequence[RunResult]
    against: Target | None
    target: Target

    def add(self, settings: Settings) -> None:
        """Judge the outcomes, and add findings and notes to the results."""
        results, outcomes, notes = self.results, self.results.outcomes, self.results.notes
        notes += self._judge()
        if len(self.controls) > 1:
            notes += self._excuse_noise()
        captured = self.against.versions if self.against else captured_ranges(results.plan.workload)
        releases = Releases.between(captured, self.target.versions)
        allow_changes(releases, outcomes)
        results.findings = self._end_findings(notes)
        if LATENCY in self.options.fail_on:
            results.findings += self._slower(notes)
        if (baseline := self.options.baseline) is not None:
            baseline.accept(outcomes)
            results.findings = baseline.new(results.findings)
            results.reference, results.reference_name = "an earlier run", baseline.path
        if self.against is not None:
            results.reference = "the answers of another target"
            results.reference_name = str(self.against)
        notes += [*dropped_notes(outcomes), *retry_notes(outcomes)]
        results.releases = releases.then, releases.now
        explainer = Explainer(releases, settings)
        results.kinds, results.follows = find(outcomes, explainer)

    def _references(self) -> list[ReferenceRun]:
        return [
            ReferenceRun(each.outcomes, each.ids) for each in self.controls if each.ids is not None
        ]

    def _judge(self) -> list[str]:
        """Judge each answer by the capture, or by the answer of the reference that it resembles
        most. Returns notes about rules of the user that allowed nothing."""
        ids, table, outcomes = self.results.run.ids, self.options.table, self.results.outcomes
        if ids is None:
            return []
        references: list[ReferenceRun | None] = [None]
        if self.against is not None and self.controls:
            references = [*self._references()]
        used: set[str] = set()
        best: dict[int, Judgement] = {}
        for reference in references:
            judge = Judge(ids, table, reference)
            judge.judge(outcomes)
            used |= judge.used.keys()
            for outcome in outcomes:
                judgement, number = outcome.judgement, outcome.step.number
                if number not in best or _findings(judgement) < _findings(best[number]):
                    best[number] = judgement
        for outcome in outcomes:
            outcome.judgement = best[outcome.step.number]
        return [
            f"rule {rule.name} allowed nothing: nothing differs at {', '.join(rule.paths)}"
            for rule in table.rules
            if rule.is_own and rule.name not in used and rule.is_allowance
        ]

    def _excuse_noise(self) -> list[str]:
        """Tolerate what differs between the control runs; notes name these fields."""
        noise, (first, *others) = Noise(), self._references()
        for other in others:
            Judge(other.ids, self.options.table, first).judge(other.outcomes)
            noise.add(other.outcomes)
        for outcome in self.results.outcomes:
            excused = partial(noise.excused, outcome.step.api_name)
            outcome.judgement = outcome.judgement.allowing(excused)
        return [
            f"control runs differ from each other in {api} {place}, in {field.count} places: "
            + ("never excused" if is_evidence(place) else "excused")
            for (api, place), field in sorted(
                noise.fields.items(), key=lambda each: (-each[1].count, each[0])
            )
        ]

    def _end_findings(self, notes: list[str]) -> list[RunFinding]:
        """Findings about the end state that the control runs do not have."""
        run = self.results.run
        if run.state is None:
            return []
        notes += [
            f"the end state of {part} could not be read: {why}"
            for part, why in run.state.unread.items()
        ]
        excused = [each for control in self.controls for each in control.findings]
        notes += [f"a control run: {finding_text(each)}" for each in excused]
        findings = [each for each in run.findings if each not in excused]
        states = [each.state for each in self.controls if each.state is not None]
        if states and self.against is not None:
            known = {each.subject for each in findings}
            compared = compare_states(run.state, states)
            findings += [each for each in compared if each.subject not in known]
        return findings

    def _slower(self, notes: list[str]) -> list[RunFinding]:
        """Findings about latencies; notes say what they do not prove."""
        plan, controls = self.results.plan, [latencies_of(each.outcomes) for each in self.controls]
        tests = compare_latencies(
            plan, controls or [captured_latencies(plan)], latencies_of(self.results.outcomes)
        )
        notes += notes_of(tests, control_count=len(controls))
        return [each.finding() for each in tests if each.is_slower]


def _findings(judgement: Judgement) -> tuple[bool, int]:
    """A rank that is lower for a judgement with fewer findings."""
    count = sum(not each.rule for each in judgement.differences)
    return judgement.verdict in (Verdict.DIFFERENT, Verdict.ERROR), count
