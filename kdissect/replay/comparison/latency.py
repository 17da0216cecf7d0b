"""Tests whether the target answers slower than the reference, by the same requests.

Each exchange is paired with itself in the control runs. Its score in a run is the logarithm of its
latency there, less the mean over all runs, so requests of any cost count alike. Scores are summed
by connection and run, and a permutation test deals these sums to the runs (`diff.statistics`).

A change is a finding if all of these hold:

- it is beyond chance, with all tested APIs corrected for
- the median ratio is at least `LEAST_RATIO`, and beyond the range that the medians of the
  control runs predict for one more run: a whole run may be slow because the machine was busy
- the median latency grows by at least `LEAST_NS`

A change that lacks only the second part of the second condition is undecided: the control runs
differ too much, or are too few, to tell it from noise.

Without control runs the captured latencies are the only reference. That is another machine on
another day, and there is no measure of its noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kdissect.arrays import Floats, Ints
from kdissect.diff.statistics import Scores, Verdicts, compare_units
from kdissect.replay.model import LATENCY, Difference, Outcome, ReplayPlan
from kdissect.replay.workload.messages import BLOCKING_APIS
from kdissect.text import duration, plural

ALPHA = 0.01  # the probability of one false alarm or more among all APIs of a replay
FEWEST_EXCHANGES = 5
LEAST_RATIO, LEAST_NS = 1.5, 5_000_000  # effects that count
ALL = "all APIs"
# Student's t at 0.99, by degrees of freedom from 1; more of them count as the last.
_T_99 = (31.82, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764)

# What the reference cannot prove, by the number of control runs
_LIMITS = {
    0: "latencies were compared with the captured ones, of another machine on another day: a "
    "difference does not prove that the target is slower; --control-runs measures both",
    1: "latencies were compared with one run, which does not show how much two runs differ; "
    "--control-runs does",
}

Latencies = Mapping[int, int]  # by step, in ns


class LatencyTest(NamedTuple):
    """The test of one API. Latencies are medians.

    predicted: the ratio up to which another control run may differ, 1 for a single one.
    is_decided: whether there are enough connections.
    """

    api_name: str
    exchanges: int
    connections: int
    reference_ns: int
    answered_ns: int
    ratio: float
    predicted: float
    p_value: float
    is_decided: bool

    @property
    def is_large(self) -> bool:
        """Return whether the API is slower by enough, and more than by chance."""
        is_beyond_chance = self.is_decided and self.p_value < ALPHA
        is_much = self.ratio >= LEAST_RATIO and self.answered_ns - self.reference_ns >= LEAST_NS
        return is_beyond_chance and is_much

    @property
    def is_slower(self) -> bool:
        """Return whether the API is a finding."""
        return self.is_large and self.ratio >= self.predicted

    def finding(self) -> Difference:
        """The finding of a slower API."""
        noise = f"; control runs may differ by {self.predicted:.2f}" if self.predicted > 1 else ""
        then, now = (duration(each / 1e6) for each in (self.reference_ns, self.answered_ns))
        note = (
            f"medians; {self.ratio:.2f} times as long, by chance with p = {self.p_value:.4f} in "
            f"{plural(self.exchanges, 'exchange')} on {plural(self.connections, 'connection')}"
            f"{noise}"
        )
        return Difference(LATENCY, (self.api_name,), then, now, note=note)


def slower(
    plan: ReplayPlan, outcomes: Sequence[Outcome], controls: Sequence[Sequence[Outcome]]
) -> tuple[list[Difference], list[str]]:
    """Findings about the latencies of a run beside those of control runs, or else the captured
    ones; and notes, which say what they do not prove."""
    of_run, *of_controls = (
        {one.step.number: one.latency_ns for one in each if one.latency_ns > 0 and not one.earlier}
        for each in (outcomes, *controls)
    )
    tests = compare_latencies(plan, of_controls or [captured_latencies(plan)], of_run)
    notes = notes_of(tests, control_count=len(controls))
    return [each.finding() for each in tests if each.is_slower], notes


def captured_latencies(plan: ReplayPlan) -> dict[int, int]:
    """Latencies in the capture, without requests that wait at the broker: their latency depends on
    when other requests came."""
    return {
        step.number: step.exchange.latency_ns
        for step in plan.steps
        if step.exchange.latency_ns > 0 and step.exchange.api_key not in BLOCKING_APIS
    }


def compare_latencies(
    plan: ReplayPlan, controls: Sequence[Latencies], run: Latencies
) -> list[LatencyTest]:
    """A test of each API with enough exchanges that all runs answered, and one of all together."""
    runs = [*controls, run]
    numbers = sorted(set(run).intersection(*controls)) if controls else []
    steps = [plan.steps[number] for number in numbers]
    names = np.array([step.api_name for step in steps])
    rows_of = {ALL: np.arange(len(steps))}
    rows_of |= {str(name): np.flatnonzero(names == name) for name in np.unique(names)}
    tested = {name: rows for name, rows in rows_of.items() if len(rows) >= FEWEST_EXCHANGES}
    if not tested:
        return []
    logs = np.log(np.array([[each[number] for number in numbers] for each in runs], np.float64))
    _, connections = np.unique([step.connection for step in steps], return_inverse=True)
    verdicts = _verdicts(logs, connections, list(tested.values()))
    tests = []
    for place, (name, rows) in enumerate(tested.items()):
        before, after = logs[:-1, rows], logs[-1, rows]
        reference_ns, answered_ns = (int(np.median(np.exp(each))) for each in (before, after))
        tests.append(
            LatencyTest(
                api_name=name,
                exchanges=len(rows),
                connections=len(np.unique(connections[rows])),
                reference_ns=reference_ns,
                answered_ns=answered_ns,
                ratio=math.exp(np.median(after - before.mean(axis=0))),
                predicted=math.exp(_predicted(before)),
                p_value=float(verdicts.p_values[place]),
                is_decided=bool(verdicts.is_decided[place]),
            )
        )
    return tests


def _verdicts(logs: Floats, connections: Ints, tested: Sequence[Ints]) -> Verdicts:
    """Compare the last run with the others; a unit is a connection in a run. logs: by run. tested:
    the exchanges of each API."""
    run_count = len(logs)
    scores = logs - logs.mean(axis=0)
    units = connections * run_count + np.arange(run_count)[:, np.newaxis]
    comparison = [np.full(run_count * len(rows), number) for number, rows in enumerate(tested)]
    unit = np.concatenate([units[:, rows].ravel() for rows in tested])
    values = np.concatenate([scores[:, rows].ravel() for rows in tested])
    is_run = np.arange((connections.max() + 1) * run_count) % run_count == run_count - 1
    of_units = Scores(np.concatenate(comparison), unit, np.ones(len(values)), values, values**2)
    return compare_units(of_units, is_run, len(tested), ALPHA)


def _predicted(controls: Floats) -> float:
    """The largest effect of one more run that differs from the control runs as they do from each
    other; 0 for a single one. controls: logarithms by run."""
    count = len(controls)
    if count < 2:
        return 0.0
    medians = np.median(controls - controls.mean(axis=0), axis=1)
    quantile = _T_99[min(count - 1, len(_T_99)) - 1]
    return quantile * float(np.std(medians, ddof=1)) * math.sqrt(1 + 1 / count)


def notes_of(tests: Sequence[LatencyTest], *, control_count: int) -> list[str]:
    """Return notes on the limits of the tests.

    control_count: of the runs whose latencies are the reference; 0 for the captured ones.
    """
    notes = [_LIMITS[control_count]] if control_count in _LIMITS else []
    if few := [each.api_name for each in tests if not each.is_decided]:
        says = "too few connections to decide whether latencies changed"
        notes.append(f"{says}: {', '.join(few)}")
    if noisy := [each for each in tests if each.is_large and not each.is_slower]:
        names = ", ".join(
            f"{each.api_name} took {each.ratio:.2f} times as long, a finding from "
            f"{each.predicted:.2f}"
            for each in noisy
        )
        notes.append(
            f"{control_count} control runs cannot decide whether latencies changed: {names}; more "
            "control runs decide smaller changes"
        )
    decided = len(tests) - len(few) - len(noisy)
    slower = sum(each.is_slower for each in tests)
    return [*notes, f"latencies of {plural(decided, 'test')} decided, {slower} slower"]
