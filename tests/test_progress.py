"""The bar that a terminal shows while Spark works."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kdissect import progress

SIZE = 10_000_000


class Tracker:
    """A status tracker as Spark's, of jobs as {job: [(tasks, completed tasks) of its stages]}."""

    def __init__(self) -> None:
        self.jobs: dict[int, list[tuple[int, int]]] = {}

    def getActiveJobsIds(self) -> list[int]:
        return list(self.jobs)

    def getJobInfo(self, job: int) -> Any:
        return SimpleNamespace(stageIds=[10 * job + n for n in range(len(self.jobs[job]))])

    def getStageInfo(self, stage: int) -> Any:
        tasks, completed = self.jobs[stage // 10][stage % 10]
        return SimpleNamespace(numTasks=tasks, numCompletedTasks=completed)


@pytest.fixture
def tracker() -> Tracker:
    return Tracker()


@pytest.fixture
def bar(tracker: Tracker) -> progress.Progress:
    context = SimpleNamespace(statusTracker=lambda: tracker)
    return progress.Progress(SimpleNamespace(sparkContext=context), SIZE, shown=True)


def test_stages_have_their_shares(tracker: Tracker, bar: progress.Progress) -> None:
    """The bar's position comes from the tasks that Spark has completed in each stage."""
    assert bar._state() == ("scan", 0)
    tracker.jobs = {3: [(4, 4), (2, 1)]}
    assert bar._state() == ("assemble", pytest.approx(0.15 + 0.15 / 2))
    tracker.jobs = {4: [(4, 0), (2, 0), (2, 2), (8, 4), (1, 0)]}  # the first ones are skipped
    assert bar._state() == ("decode", pytest.approx(0.3 + 0.7 / 2))
    tracker.jobs = {}
    assert bar._state() == ("decode", pytest.approx(0.3 + 0.7 / 2))


def test_one_task_is_the_whole_run(tracker: Tracker, bar: progress.Progress) -> None:
    """A job of one task counts as the whole run."""
    tracker.jobs = {1: [(1, 0)]}
    assert bar._state() == ("dissect", 0)
    tracker.jobs = {1: [(1, 1)]}
    assert bar._state() == ("dissect", 1)


@pytest.mark.parametrize(("error", "last"), [(None, "10.0/10.0 MB"), (ValueError, "0.0/10.0 MB")])
def test_the_bar_ends_where_the_run_does(
    tracker: Tracker,
    bar: progress.Progress,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception] | None,
    last: str,
) -> None:
    """Full, unless the run failed."""
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, color_system=None, width=100)
    monkeypatch.setattr(progress, "Console", lambda stderr: terminal)
    tracker.jobs = {1: [(1, 0)]}
    try:
        with bar:
            if error is not None:
                raise error
    except ValueError:
        assert error is ValueError
    assert out.getvalue().rpartition("/10.0 MB")[0].split()[-1] + "/10.0 MB" == last
