"""One replay from a plan to its results: who is the target, may we, topics, the run, the verdicts.

The pure halves (translation, comparison) are made here for each target, as each has ids of its own.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kdissect.errors import EnvironmentFailed
from kdissect.replay.comparison.explain import explain
from kdissect.replay.comparison.grouping import dropped_notes, retry_notes
from kdissect.replay.model import DELETE_EXISTING, ReplayPlan, TranslateOptions, Verdict
from kdissect.replay.output import baseline as runs
from kdissect.replay.output.results import FAIL_ON_DEFAULT, Reference, Results
from kdissect.replay.running.result import RunOptions, RunResult, not_begun
from kdissect.replay.running.runner import Runner
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.effects import Name, check_existing, effects_of, find_existing
from kdissect.replay.target.guard import check_cluster
from kdissect.replay.target.topics import Prepared, create_topics


@dataclass(frozen=True)
class SessionOptions:
    """How a plan is replayed; `run` has pace and limits.

    into_existing: write to topics, groups and transactional ids that hold data or members.
    rules: files of rules for the comparison. is_strict: no built-in tolerance.
    baseline: a file of an earlier run's --json.
    """

    run: RunOptions = field(default_factory=RunOptions)
    translate: TranslateOptions = field(default_factory=TranslateOptions)
    rules: tuple[str, ...] = ()
    is_strict: bool = False
    makes_topics: bool = False
    same_cluster: bool = False
    into_existing: bool = False
    fail_on: frozenset[Verdict] = FAIL_ON_DEFAULT
    baseline: str | None = None


Watch = Callable[[Runner], None]


async def replay(
    plan: ReplayPlan,
    target: Target,
    options: SessionOptions,
    against: Target | None = None,
    watch: Watch | None = None,
) -> Results:
    """Replay a plan to `target`, and before that to `against` where one is given.

    watch: called with each runner when it begins. Raises GuardError where a target may not be
    used, CaptureError for a baseline that is none. Troubles with a target are in the results, also
    where it could not be reached at all: every step then says so, and the run has ended early.
    """
    try:
        return await _replay(plan, target, options, against, watch)
    finally:
        for each in (against, target):
            if each is not None:
                each.close()


async def _replay(
    plan: ReplayPlan,
    target: Target,
    options: SessionOptions,
    against: Target | None,
    watch: Watch | None,
) -> Results:
    baseline = runs.read_baseline(options.baseline) if options.baseline else None
    effects = effects_of(plan, makes_topics=options.makes_topics, renames=options.translate.renames)
    existing: dict[Target, dict[Name, str]] = {}
    for each in (against, target):
        if each is not None:  # both are looked at before the first request of the workload
            try:
                await each.probe()
                check_cluster(plan.workload.facts, each, options.same_cluster)
                existing[each] = await find_existing(each, effects)
            except EnvironmentFailed as error:
                nothing = not_begun(plan, str(error), time.time_ns())
                return _results(plan, target, options, nothing, [], [])
            if not options.into_existing:
                check_existing(each, existing[each])
    notes: list[str] = []
    reference, reference_name = Reference.CAPTURE, ""
    if against is not None:
        first, _ = await _run(plan, against, options, existing[against], watch)
        if first.ended:
            notes.append(f"the run against {against} ended early: {first.ended}")
        notes += [f"the run against {against}: {note}" for note in dropped_notes(first.outcomes)]
        baseline = runs.judged(first.outcomes)
        reference, reference_name = Reference.AGAINST, str(against)
        if first.is_interrupted:
            return _results(plan, against, options, first, [], notes)
    elif baseline is not None:
        reference, reference_name = Reference.BASELINE, str(options.baseline)
    result, prepared = await _run(plan, target, options, existing[target], watch)
    if baseline is not None:
        missing = runs.compare_runs(result.outcomes, baseline)
        if missing:
            notes.append(
                f"{missing} exchanges are not in the reference and were compared with the capture"
            )
    notes += dropped_notes(result.outcomes)
    notes += retry_notes(result.outcomes)
    notes += explain(plan, result.outcomes, target.versions)
    results = _results(plan, target, options, result, prepared, notes)
    results.reference, results.reference_name = reference, reference_name
    return results


def _results(
    plan: ReplayPlan,
    target: Target,
    options: SessionOptions,
    result: RunResult,
    prepared: list[Prepared],
    notes: list[str],
) -> Results:
    return Results(
        plan,
        result,
        str(target),
        target.cluster_id,
        str(options.run.pace),
        not options.run.pace.is_max,
        options.fail_on,
        prepared=prepared,
        notes=notes,
    )


async def _run(
    plan: ReplayPlan,
    target: Target,
    options: SessionOptions,
    existing: Collection[Name],
    watch: Watch | None,
) -> tuple[RunResult, list[Prepared]]:
    from kdissect.replay.comparison.comparator import Comparator
    from kdissect.replay.comparison.rules import load_rules
    from kdissect.replay.translation.fast_path import FastTranslator
    from kdissect.replay.translation.id_map import IdMap

    ids = IdMap(plan, options.translate)
    comparator = Comparator(ids, load_rules(options.rules), strict=options.is_strict)
    # `Translator` does the same. The fast path saves a third of the CPU of a compared replay
    # of small requests.
    translator = FastTranslator(ids, comparator.differs)
    translator.learn_versions(target.versions)
    if DELETE_EXISTING not in plan.options.allow:
        translator.keep(existing)
    prepared: list[Prepared] = []
    try:
        if options.makes_topics:
            prepared = await create_topics(plan, target, _topic_renames(options.translate))
        translator.learn_metadata(target.metadata)
        translator.learn_log_starts(await target.learn_log_starts())
        coordinators = await target.find_coordinators(translator.coordinator_keys())
    except EnvironmentFailed as error:
        return not_begun(plan, str(error), time.time_ns()), prepared
    for (key_type, key), node_id in coordinators.items():
        translator.learn_coordinator(key_type, key, node_id)
    runner = Runner(plan, translator, comparator, target, options.run)
    with _stopped_by_signals(runner):
        if watch is not None:
            watch(runner)
        return await runner.run(), prepared


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
