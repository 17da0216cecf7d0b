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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kdissect.diff.statistics import Scores, compare_units
from kdissect.replay.model import LATENCY, Outcome, ReplayPlan, RunFinding
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
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LatencyTest:
    """The test of one API. Latencies are medians.

    predicted: the ratio up to which another control run may differ, 1 for a single one.
    is_decided: whether there are enough connections.
    is_large: slower by enough, and more than by chance.
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
    is_large: bool

    @property
    def is_slower(self) -> bool:
        """Return whether the API is a finding."""
        return self.is_large and self.ratio >= self.predicted

    def finding(self) -> RunFinding:
        """The finding of a slower API."""
        noise = f"; control runs may differ by {self.predicted:.2f}" if self.predicted > 1 else ""
        return RunFinding(
            LATENCY,
            self.api_name,
            duration(self.reference_ns / 1e6),
            duration(self.answered_ns / 1e6),
            f"medians; {self.ratio:.2f} times as long, by chance with p = {self.p_value:.4f} in "
            f"{plural(self.exchanges, 'exchange')} on {plural(self.connections, 'connection')}"
            f"{noise}",
        )


def latencies_of(outcomes: Sequence[Outcome]) -> dict[int, int]:
    """Latencies of answered requests that were sent once."""
    return {
        each.step.number: each.latency_ns
        for each in outcomes
        if each.latency_ns > 0 and not each.earlier
    }


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
    if not numbers:
        return []
    logs = np.log(np.array([[each[number] for number in numbers] for each in runs], np.float64))
    steps = [plan.steps[number] for number in numbers]
    connections = np.array([step.connection for step in steps], np.int64)
    names = np.array([step.api_name for step in steps])
    rows_of = {ALL: np.arange(len(steps))}
    rows_of |= {str(name): np.flatnonzero(names == name) for name in np.unique(names)}
    tested = {name: rows for name, rows in rows_of.items() if len(rows) >= FEWEST_EXCHANGES}
    if not tested:
        return []
    scores, is_run = _scores(logs, connections, list(tested.values()))
    verdicts = compare_units(scores, is_run, len(tested), ALPHA)
    return [
        _tested(
            name, logs[:, rows], len(set(connections[rows].tolist())),
            float(verdicts.p_values[place]), bool(verdicts.is_decided[place]),
        )
        for place, (name, rows) in enumerate(tested.items())
    ]  # fmt: skip


def _scores(
    logs: Floats, connections: Ints, tested: Sequence[Ints]
) -> tuple[Scores, npt.NDArray[np.bool_]]:
    """The scores by API, connection and run; and for each of these units, whether it is of the last
    run."""
    run_count = len(logs)
    scores = logs - logs.mean(axis=0)
    known, connection = np.unique(connections, return_inverse=True)
    units = connection * run_count + np.arange(run_count)[:, np.newaxis]
    comparison = [np.full(run_count * len(rows), number) for number, rows in enumerate(tested)]
    unit = np.concatenate([units[:, rows].ravel() for rows in tested])
    values = np.concatenate([scores[:, rows].ravel() for rows in tested])
    is_run = np.arange(len(known) * run_count) % run_count == run_count - 1
    ones = np.ones(len(values))
    return Scores(np.concatenate(comparison), unit, ones, values, values**2), is_run


def _tested(
    name: str, logs: Floats, connections: int, p_value: float, decided: bool
) -> LatencyTest:
    """The effect in an API, and whether it is a finding. logs: by run, the tested one last."""
    controls, run = logs[:-1], logs[-1]
    effect = float(np.median(run - controls.mean(axis=0)))
    reference_ns, answered_ns = (int(np.median(np.exp(each))) for each in (controls, run))
    is_large = (
        decided
        and p_value < ALPHA
        and effect >= math.log(LEAST_RATIO)
        and answered_ns - reference_ns >= LEAST_NS
    )
    return LatencyTest(
        name, logs.shape[1], connections, reference_ns, answered_ns, math.exp(effect),
        math.exp(_predicted(controls)), p_value, decided, is_large,
    )  # fmt: skip


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
        names = ", ".join(few)
        notes.append(f"too few connections to decide whether latencies changed: {names}")
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
