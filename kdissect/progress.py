"""Shows the progress of a Spark run on a terminal: bytes done and time left, from task counts."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from rich import progress as bars
from rich.console import Console

STAGES = ("scan", "assemble", "decode")
# Measured share of the time per stage; decoding also writes the tables.
WEIGHTS = (0.15, 0.15, 0.7)
ALL_STEPS = "dissect"  # the tasks of a small capture run all stages
_INTERVAL_S = 0.3


class Progress:
    """A context in which a thread polls Spark for the finished tasks of each stage.

    Shows nothing unless `shown`, nor if the session has no status tracker (Spark Connect).
    """

    def __init__(self, spark: Any, byte_count: int, *, shown: bool) -> None:
        self._byte_count = byte_count
        self._tracker: Any = self._find_tracker(spark) if shown else None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_done = False
        self._shown = STAGES[0], 0.0

    @staticmethod
    def _find_tracker(spark: Any) -> Any:
        try:
            return spark.sparkContext.statusTracker()
        except Exception:  # Spark Connect has none
            return None

    def __enter__(self) -> Progress:
        if self._tracker is not None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._is_done = kind is None
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(),
            bars.TimeRemainingColumn(),
        )
        with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting", total=self._byte_count)
            while not self._stop.wait(_INTERVAL_S):
                stage, share = self._state()
                bar.update(task, description=stage, completed=int(share * self._byte_count))
            if self._is_done:
                bar.update(task, completed=self._byte_count)

    def _state(self) -> tuple[str, float]:
        """Return the current stage's name and the done share of the run; between jobs, the last
        values."""
        jobs = self._tracker.getActiveJobsIds()
        if jobs:
            self._shown = self._of_jobs(jobs)
        return self._shown

    def _of_jobs(self, jobs: Iterable[int]) -> tuple[str, float]:
        """Jobs of two stages walk over captures, or scan and assemble. The last job has more."""
        name, done = self._shown
        for job in jobs:
            info = self._tracker.getJobInfo(job)
            stages = sorted(info.stageIds) if info else []
            states = [self._tracker.getStageInfo(stage) for stage in stages]
            shares = [
                state.numCompletedTasks / state.numTasks if state and state.numTasks else 0.0
                for state in states
            ]
            if len(stages) == 1:
                return ALL_STEPS, shares[0]
            if len(stages) == 2:
                name = STAGES[int(shares[0] == 1)]
                done = max(done, WEIGHTS[0] * shares[0] + WEIGHTS[1] * shares[1])
            elif stages:
                name = STAGES[2]
                done = max(done, WEIGHTS[0] + WEIGHTS[1] + WEIGHTS[2] * shares[-2])
        return name, min(done, 1.0)
