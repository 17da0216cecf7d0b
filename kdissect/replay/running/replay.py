"""One replay from a plan to its results: who is the target, may we, topics, the run, the verdicts.

The pure halves (translation, comparison) are made here for each target, as each has ids of its own.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kdissect.errors import EnvironmentFailed
from kdissect.protocol.releases import taken
from kdissect.replay.comparison.end_state import Claims
from kdissect.replay.model import DELETE_EXISTING, ReplayPlan, TranslateOptions
from kdissect.replay.output.baseline import read_baseline
from kdissect.replay.output.results import FailOn, Results
from kdissect.replay.running.control_runs import FinishedRun, PlannedRun, plan_runs
from kdissect.replay.running.result import RunOptions, not_begun
from kdissect.replay.running.runner import Runner
from kdissect.replay.running.verdict import Verdicts
from kdissect.replay.target.cluster import EARLIEST, Target
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.target.end_state import read_end_state, read_settings
from kdissect.replay.target.guard import (
    Effects,
    Name,
    check_cluster,
    check_existing,
    effects_of,
    find_existing,
)
from kdissect.replay.target.preparation import (
    Prepared,
    create_topics,
    delete_names,
    find_missing,
    used_state,
)
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.nodes import coordinators_of_plan
from kdissect.replay.translation.translator import Translator
from kdissect.replay.workload.starting_state import starting_state


@dataclass(frozen=True)
class SessionOptions:
    """The options of a replay; `run` has pace and limits.

    into_existing: write to topics, groups and transactional ids that hold data or members.
    rules: files of rules for the comparison. is_strict: no built-in tolerance.
    baseline: a file of an earlier run's --json.
    control_runs: how often to replay to the reference. reset: a command before each run, "" none.
    """

    run: RunOptions = field(default_factory=RunOptions)
    translate: TranslateOptions = field(default_factory=TranslateOptions)
    rules: tuple[str, ...] = ()
    is_strict: bool = False
    makes_topics: bool = False
    same_cluster: bool = False
    into_existing: bool = False
    fail_on: FailOn = field(default_factory=FailOn)
    baseline: str | None = None
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

    Raises GuardError where a target may not be used, CaptureError for a baseline that is none.
    Troubles with a target are in the results, also where it could not be reached at all: every step
    then says so, and the run has ended early.
    """
    try:
        return await _Replay(plan, options, watch, say).run(target, against)
    finally:
        for each in (against, target):
            if each is not None:
                each.close()


class _Replay:
    """All runs of one replay, and their comparison."""

    def __init__(
        self, plan: ReplayPlan, options: SessionOptions, watch: Watch | None, say: Say | None
    ) -> None:
        self._plan, self._options, self._watch, self._say = plan, options, watch, say
        self._existing: dict[str, dict[Name, str]] = {}  # by run
        self._controls: list[FinishedRun] = []
        self._notes: list[str] = []

    async def run(self, target: Target, against: Target | None) -> Results:
        """Do all runs in their order, and compare the one that counts with the others."""
        options, plan = self._options, self._plan
        baseline = read_baseline(options.baseline) if options.baseline else None
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
                    return self._ended_before(target, reason)
        finished: FinishedRun | None = None
        for each in planned:
            if options.reset and (reason := await self._prepare(each)):
                if finished is None:
                    return self._ended_before(target, reason)
                finished.result.ended = reason
                break
            run = await _run(plan, each, options, self._existing[each.name], self._watch)
            if each.suffix:
                await self._delete_made(each)
            if not each.is_control:
                finished = run
            elif finished is None and run.result.is_interrupted:
                return _results(plan, each.target, options, run, self._notes)
            else:
                if run.result.ended:
                    self._notes.append(f"{each.name} ended early: {run.result.ended}")
                self._controls.append(run)
            if run.result.is_interrupted:
                assert finished is not None
                finished.result.is_interrupted = True
                break
        assert finished is not None
        settings = finished.state.settings if finished.state is not None else {}
        if not settings and not finished.result.ended:
            settings = await read_settings(target)
        results = _results(plan, target, options, finished, self._notes)
        verdicts = Verdicts(plan, options, finished, self._controls, against, target, baseline)
        verdicts.add_to(results, settings)
        return results

    async def _prepare(self, run: PlannedRun) -> str:
        """Reset and probe the run's target, and check what it holds. Returns why the run cannot
        begin, or ""."""
        options = self._options
        if self._watch is not None:
            self._watch(f"{run.name}: {'resetting and ' * bool(run.command)}probing {run.target}")
        effects = self._effects(run)
        try:
            await run.reset()
            await run.target.probe()
            check_cluster(self._plan.workload.facts, run.target, options.same_cluster)
            self._existing[run.name] = await find_existing(run.target, effects)
        except EnvironmentFailed as error:
            return str(error)
        if not options.into_existing:
            check_existing(run.target, self._existing[run.name])
        if not run.is_control:
            await self._compare_start(run)
        return ""

    def _effects(self, run: PlannedRun) -> Effects:
        renames = run.translate.renames
        return effects_of(self._plan, makes_topics=self._options.makes_topics, renames=renames)

    async def _delete_made(self, run: PlannedRun) -> None:
        """Delete what a run with a suffix created; notes name what is still there."""
        effects, existing = self._effects(run), self._existing[run.name]
        names = effects.made | effects.written | effects.deleted
        made = [name for name in names if name not in existing]
        self._notes += [f"{run.name}: {line}" for line in await delete_names(run.target, made)]

    async def _compare_start(self, run: PlannedRun) -> None:
        """Say what the target lacks of the state that the capture began with."""
        plan = self._plan
        lines = await find_missing(
            run.target,
            used_state(plan, starting_state(plan.workload)),
            {(kind, old): new for kind, old, new in run.translate.renames},
            makes_topics=self._options.makes_topics,
        )
        notes = [f"answers will differ: {line}" for line in lines[:LACKS_MAX]]
        if len(lines) > LACKS_MAX:
            notes.append(f"answers will differ: {len(lines) - LACKS_MAX} more such reasons")
        self._notes += notes
        if self._say is not None:
            for note in notes:
                self._say(note)

    def _ended_before(self, target: Target, reason: str) -> Results:
        nothing = not_begun(self._plan, reason, time.time_ns())
        return _results(self._plan, target, self._options, FinishedRun(nothing), self._notes)


def _results(
    plan: ReplayPlan,
    target: Target,
    options: SessionOptions,
    run: FinishedRun,
    notes: list[str],
) -> Results:
    return Results(
        plan,
        run.result,
        str(target),
        target.cluster_id,
        str(options.run.pace),
        not options.run.pace.is_max,
        options.fail_on,
        prepared=run.prepared,
        notes=notes,
    )


async def _run(
    plan: ReplayPlan,
    planned: PlannedRun,
    options: SessionOptions,
    existing: Mapping[Name, str],
    watch: Watch | None,
) -> FinishedRun:
    target, translate = planned.target, planned.translate
    ids = IdMap(plan, translate, () if DELETE_EXISTING in plan.options.allow else existing)
    ids.target.ranges = taken(target.versions)
    prepared: list[Prepared] = []
    try:
        if options.makes_topics:
            prepared = await create_topics(plan, target, _topic_renames(translate))
        ids.target.learn_metadata(target.metadata)
        starts = await target.log_offsets(target.topic_names(), EARLIEST)
        for (name, partition), start in starts.items():
            ids.offsets.target_starts((ids.captured_topic_name(name), partition), start)
        # so that a fresh target makes its internal topics before the first request
        ids.target.coordinators |= await target.find_coordinators(coordinators_of_plan(ids))
        ids.target.learn_metadata(await target.learn_metadata(None))
    except (ConnectFailed, EnvironmentFailed) as error:
        reason = f"{target}: {error}" if isinstance(error, ConnectFailed) else str(error)
        return FinishedRun(not_begun(plan, reason, time.time_ns()), prepared=prepared)
    runner = Runner(plan, Translator(ids), target, options.run)
    with _stopped_by_signals(runner):
        if watch is not None:
            watch(runner)
        result = await runner.run()
    finished = FinishedRun(result, ids, prepared)
    if not result.ended and not result.is_interrupted:
        if watch is not None:
            watch(f"{planned.name}: reading back the state of {target}")
        await _read_back(plan, planned, options, existing, ids, finished)
    return finished


async def _read_back(
    plan: ReplayPlan,
    planned: PlannedRun,
    options: SessionOptions,
    existing: Mapping[Name, str],
    ids: IdMap,
    finished: FinishedRun,
) -> None:
    """Read the end state of a run that wrote something, and compare it with the answers."""
    effects = effects_of(plan, makes_topics=options.makes_topics, renames=planned.translate.renames)
    topics = effects.names("topic")
    claims = Claims(ids, finished.result.outcomes)
    if not topics and not claims.groups and not claims.transactional_ids:
        return
    state = await read_end_state(
        planned.target, topics, claims.groups, claims.transactional_ids, claims.gone
    )
    planned.target.close()
    held = {name for (kind, name), text in existing.items() if kind == "topic" and text}
    finished.findings = [
        planned.finding_in_capture_terms(each) for each in claims.check(state, held)
    ]
    finished.state = planned.state_in_capture_terms(state)


def _topic_renames(options: TranslateOptions) -> Mapping[str, str]:
    return {old: new for kind, old, new in options.renames if kind == "topic"}


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
