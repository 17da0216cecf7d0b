"""Latency tests of a replay: real changes are found, noise between runs is not."""

import numpy as np
import pytest

from kdissect.replay.comparison import latency
from kdissect.replay.model import ReplayPlan
from tests.replay.made import MS, PlanMaker


def plan_of(connections: int, each: int = 10) -> ReplayPlan:
    maker = PlanMaker()
    for number in range(connections * each):
        maker.add(number % connections, number)
    return maker.plan()


@pytest.fixture
def plan() -> ReplayPlan:
    return plan_of(8)


def a_run(
    plan: ReplayPlan,
    seed: int,
    factor: float = 1.0,
    more_ms: float = 0.0,
    *,
    median_ms: float = 20.0,
) -> dict[int, int]:
    """Latencies with noise, ten times as long in one of ten requests."""
    generator = np.random.default_rng(seed)
    noise = np.exp(generator.normal(0, 0.2, len(plan.steps)))
    return {
        step.number: int((median_ms * (10 if step.number % 10 == 0 else 1) * noise[step.number]
                          * factor + more_ms) * MS)
        for step in plan.steps
    }  # fmt: skip


def of_all(plan: ReplayPlan, *runs: dict[int, int]) -> latency.LatencyTest:
    """The test of all APIs together; the last run is the one that counts."""
    tests = latency.compare_latencies(plan, runs[:-1], runs[-1])
    [found] = [each for each in tests if each.api_name == latency.ALL]
    return found


def test_a_delay_of_every_answer_is_found(plan: ReplayPlan) -> None:
    """500 ms more on each answer: the finding has both medians and the ratio."""
    found = of_all(plan, a_run(plan, 1), a_run(plan, 2), a_run(plan, 3, more_ms=500))
    assert found.is_slower
    assert found.p_value < 0.01
    assert 490 * MS < found.answered_ns - found.reference_ns < 510 * MS
    assert "8 connections" in found.finding().note
    assert found.finding().keys == (latency.ALL,)


def test_equal_runs_are_no_finding(plan: ReplayPlan) -> None:
    """Of thirty replays of an unchanged target no one is slower."""
    for seed in range(0, 90, 3):
        runs = [a_run(plan, seed + number) for number in range(3)]
        assert not of_all(plan, *runs).is_slower


def test_a_difference_that_control_runs_have_too_is_no_finding(plan: ReplayPlan) -> None:
    """One control run took twice as long as the other, so twice as long proves nothing."""
    noisy = a_run(plan, 1), a_run(plan, 2, factor=2), a_run(plan, 3, factor=3.5)
    found = of_all(plan, *noisy)
    assert found.ratio < found.predicted
    assert not found.is_slower


@pytest.mark.parametrize(
    ("median_ms", "factor", "expected"),
    [(20, 2, True), (20, 1.35, False), (20, 0.25, False), (4, 2, False)],
)
def test_small_effects_are_no_finding(
    plan: ReplayPlan, median_ms: float, factor: float, expected: bool
) -> None:
    """An API has to take half as long again, and five milliseconds more."""
    runs = [a_run(plan, seed, median_ms=median_ms) for seed in range(4)]
    slower = a_run(plan, 9, factor, median_ms=median_ms)
    assert of_all(plan, *runs, slower).is_slower is expected


def test_two_control_runs_predict_little(plan: ReplayPlan) -> None:
    """Twice as long is found with four control runs; two leave it undecided, and a note says so."""
    slower = a_run(plan, 9, factor=2)
    two = a_run(plan, 1), a_run(plan, 2, factor=1.1)
    undecided = of_all(plan, *two, slower)
    assert not undecided.is_slower
    [note, count] = latency.notes_of([undecided], control_count=2)
    assert note.startswith("2 control runs cannot decide whether latencies changed: all APIs took")
    assert count == "latencies of 0 tests decided, 0 slower"
    four = (*two, a_run(plan, 3), a_run(plan, 4, factor=1.1))
    assert of_all(plan, *four, slower).is_slower


def test_one_connection_decides_nothing() -> None:
    """Many exchanges of one connection are one unit: the test is open, and a note names it."""
    plan = plan_of(1, 100)
    found = of_all(plan, a_run(plan, 1), a_run(plan, 2), a_run(plan, 3, more_ms=500))
    assert not found.is_decided
    assert not found.is_slower
    [note, _] = latency.notes_of([found], control_count=2)
    assert "too few connections" in note


def test_the_capture_as_reference_proves_little(plan: ReplayPlan) -> None:
    """Captured latencies are 1 ms here; the finding comes with a note about its worth."""
    found = of_all(plan, latency.captured_latencies(plan), a_run(plan, 3, more_ms=500))
    assert found.is_slower
    notes = latency.notes_of([found], control_count=0)
    assert "another machine on another day" in notes[0]


def test_requests_that_a_run_lacks_are_left_out(plan: ReplayPlan) -> None:
    """Only exchanges that all runs answered are pairs; without any there is no test."""
    first, second = a_run(plan, 1), a_run(plan, 2)
    part = {number: first[number] for number in list(first)[:40]}
    assert of_all(plan, part, second).exchanges == 40
    assert latency.compare_latencies(plan, [{}], second) == []
    assert latency.compare_latencies(plan, [], second) == []
