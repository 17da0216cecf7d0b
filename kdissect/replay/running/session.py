"""Takes a replay from its plan to its results: checks targets, does the runs, judges the answers.

Each run has a translator of its own, since each target has ids of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kdissect.errors import EnvironmentFailed
from kdissect.replay import model
from kdissect.replay.comparison import kinds, latency
from kdissect.replay.comparison.judge import RunFacts, end_findings, judge_run, unanswered
from kdissect.replay.fields import FieldTable, built_in_fields
from kdissect.replay.output.baseline import Baseline
from kdissect.replay.output.rows import FAIL_ON, Results
from kdissect.replay.output.text import dropped_notes, finding_text, retry_notes
from kdissect.replay.planning.plan import Pace
from kdissect.replay.running.control_runs import PlannedRun, plan_runs
from kdissect.replay.running.runner import Runner, RunResult, not_begun
from kdissect.replay.target import guard
from kdissect.replay.target.cluster import READY_S, Target
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.target.state import State, find_missing, read_state, starting_facts
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.nodes import coordinators_of_plan
from kdissect.replay.translation.translator import Translator
from kdissect.replay.workload.messages import EARLIEST


@dataclass(frozen=True)
class SessionOptions(model.TranslateOptions):
    """The options of a replay.

    answer_timeout_s: as of `Runner`.
    into_existing: write to topics, groups and transactional ids that hold data or members.
    table: fields with the user's rules. baseline: an accepted run.
    control_runs: how often to replay to the reference. reset: a command before each run, "" none.
    """

    pace: Pace = field(default_factory=Pace)
    answer_timeout_s: float = 30.0
    table: FieldTable = field(default_factory=built_in_fields)
    into_existing: bool = False
    fail_on: frozenset[str] = FAIL_ON
    baseline: Baseline | None = None
    control_runs: int = 0
    reset: str = ""


Watch = Callable[[Runner | str], None]
Say = Callable[[str], None]
LACKS_MAX = 20  # lines about what the target lacks; the rest is counted


async def replay(
    plan: model.ReplayPlan,
    target: Target,
    options: SessionOptions,
    against: Target | None = None,
    watch: Watch = lambda activity: None,
    say: Say = lambda line: None,
) -> Results:
    """Replay a plan to `target`. Control runs go to `against`, or else to `target`; half of them
    come before, and a single one does.

    watch: called with each runner when it begins, and with a text before other parts. say: called
    before the first request with each thing that the target lacks.

    Raises OptionError if a target may not be used.
    Troubles with a target are in the results, also where it could not be reached at all: every step
    then says so, and the run has ended early.
    """
    session = _Session(plan, target, against, options, watch, say)
    try:
        return await session.results()
    finally:
        for each in (against, target):
            if each is not None:
                each.close()


@dataclass
class _Session:
    """All runs of one replay, and their comparison.

    notes: for the results. controls: the control runs that came to their end.
    """

    plan: model.ReplayPlan
    target: Target
    against: Target | None
    options: SessionOptions
    watch: Watch
    say: Say
    notes: list[str] = field(default_factory=list)
    controls: list[RunResult] = field(default_factory=list)

    async def results(self) -> Results:
        """Do all runs in their order, and compare the one that counts with the others."""
        planned = plan_runs(self.plan, self.target, self.against, self.options)
        if not self.options.reset:  # all are looked at before the first request of the workload
            for each in planned:
                if reason := await self._prepare(each):
                    return self._unjudged(not_begun(self.plan, reason))
        counting: RunResult | None = None
        for each in planned:
            result = await self._do(each)
            self.notes += await each.delete_made()
            is_over = result.is_interrupted or result.facts is None
            if not each.is_control:
                counting = result
            elif not is_over:
                self.controls.append(result)
                if result.ended:
                    self.notes.append(f"{each.name} ended early: {result.ended}")
            if is_over:  # the replay ends with this run
                if counting is None:
                    return self._unjudged(result)
                counting.ended, counting.is_interrupted = result.ended, result.is_interrupted
                break
        assert counting is not None
        results = self._unjudged(counting)
        self._compare(results)
        return results

    # -- before a run -----------------------------------------------------------------------------

    async def _prepare(self, planned: PlannedRun) -> str:
        """Reset and probe the run's target, and check what it holds. Returns why the run cannot
        begin, or ""."""
        options = self.options
        resetting = "resetting and " if options.reset else ""
        self.watch(f"{planned.name}: {resetting}probing {planned.target}")
        try:
            if options.reset:
                await planned.reset(options.reset)
            await planned.target.probe()
            if guard.SAME_CLUSTER not in self.plan.options.allow:
                guard.check_cluster(self.plan.workload.facts, planned.target)
            planned.existing = await guard.find_existing(planned.target, planned.effects)
        except EnvironmentFailed as error:
            return str(error)
        if not options.into_existing:
            guard.check_existing(planned.target, planned.existing)
        if not planned.is_control:
            await self._compare_start(planned)
        return ""

    async def _compare_start(self, planned: PlannedRun) -> None:
        """Say what the target lacks of the state that captured answers depend on."""
        needed = starting_facts(self.plan)
        lines = await find_missing(planned.target, needed, planned.options)
        if len(lines) > LACKS_MAX:
            lines[LACKS_MAX:] = [f"{len(lines) - LACKS_MAX} more such reasons"]
        for line in lines:
            self.notes.append(f"answers will differ: {line}")
            self.say(self.notes[-1])

    # -- a run ------------------------------------------------------------------------------------

    async def _do(self, planned: PlannedRun) -> RunResult:
        plan, target, options = self.plan, planned.target, self.options
        if options.reset and (reason := await self._prepare(planned)):
            return not_begun(plan, reason)
        is_protected = model.DELETE_EXISTING not in plan.options.allow
        kept = planned.existing if is_protected else ()
        ids = IdMap(plan, planned.options, kept, target.cluster)
        try:
            if options.makes_topics:
                self.notes += await guard.create_topics(plan, target, planned.options)
            await _learn_target(ids, target)
        except (ConnectFailed, EnvironmentFailed) as error:
            reason = f"{target}: {error}" if isinstance(error, ConnectFailed) else str(error)
            return not_begun(plan, reason)
        runner = Runner(plan, Translator(ids), target, options.pace, options.answer_timeout_s)
        self.watch(runner)
        result = await runner.run()
        result.facts = RunFacts(ids, result.outcomes)
        if not result.ended and not result.is_interrupted:
            self.watch(f"{planned.name}: reading back the state of {target}")
            await _read_back(planned, result.facts)
        return result

    # -- verdicts -------------------------------------------------------------------------------

    def _unjudged(self, result: RunResult) -> Results:
        for each in result.outcomes:
            each.judgement = unanswered(each) or model.Judgement()
            if result.facts is None and each.error:  # it never began, whatever the capture has
                each.judgement = model.Judgement(model.Verdict.ERROR, reason=each.error)
        options, notes = self.options, self.notes
        return Results(self.plan, result, self.target, options.pace, options.fail_on, notes=notes)

    def _compare(self, results: Results) -> None:
        """Judge the outcomes by the capture or the reference, without noise, and add findings and
        notes to the results."""
        facts, outcomes, against = results.run.facts, results.outcomes, self.against
        captured = against.versions if against else self.plan.workload.facts.offered
        releases = kinds.Releases.between(captured, self.target.versions)
        state = (facts and facts.state) or State()  # empty if it was not read
        if facts is not None:
            controls = [each.facts for each in self.controls if each.facts is not None]
            references = controls if against else []
            self.notes += judge_run(facts, controls, references, self.options.table, releases)
            results.findings = end_findings(facts, controls, references)
            unread = state.unread.items()
            excused = [finding for control in controls for finding in control.findings]
            self.notes += [
                *(f"the end state of {of} could not be read: {why}" for of, why in unread),
                *(f"a control run: {finding_text(each)}" for each in excused),
            ]
        if model.LATENCY in self.options.fail_on:
            controls_of = [each.outcomes for each in self.controls]
            slower, notes = latency.slower(self.plan, outcomes, controls_of)
            results.findings += slower
            self.notes += notes
        if (baseline := self.options.baseline) is not None:
            baseline.accept(outcomes)
            results.findings = baseline.new(results.findings)
            results.reference, results.reference_name = "an earlier run", baseline.path
        if against is not None:
            results.reference = "the answers of another target"
            results.reference_name = str(against)
        self.notes += [*dropped_notes(outcomes), *retry_notes(outcomes)]
        results.releases = releases.then, releases.now
        explainer = kinds.Explainer(releases, state.settings)
        results.kinds, results.follows = kinds.find_kinds(outcomes, explainer)


# -- around a run -----------------------------------------------------------------------------


async def _learn_target(ids: IdMap, target: Target) -> None:
    """Learn what the target is asked for before the first request. Raises ConnectFailed."""
    starts = await target.log_offsets(target.cluster.topics, EARLIEST)
    for (name, partition), start in starts.items():
        ids.offsets.of((ids.captured_name("topic", name), partition), 0).target_starts(start)
    # so that a fresh target makes its internal topics before the first request
    end = time.monotonic() + READY_S
    for key in coordinators_of_plan(ids):
        await target.coordinator(*key, max(end - time.monotonic(), 0.0))
    await target.learn_metadata()


async def _read_back(planned: PlannedRun, facts: RunFacts) -> None:
    """Read the state after a run."""
    ids, target = facts.ids, planned.target
    topics = {name: ids.captured_name("topic", name) for name in planned.effects.names("topic")}
    state = await read_state(target, topics.values(), facts.claims.decided, ids.options)
    target.close()
    held = {captured for name, captured in topics.items() if planned.existing.get(("topic", name))}
    facts.state, facts.findings = state, facts.claims.check(state, held)
