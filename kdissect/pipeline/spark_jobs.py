"""What a failed or interrupted Spark job means to the user."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from kdissect import __version__
from kdissect.capture.mapped_files import was_cut
from kdissect.errors import CaptureError, EnvironmentFailed
from kdissect.interrupts import is_interrupt
from kdissect.pipeline.run_plan import RunPlan


@contextmanager
def job_errors(spark: SparkSession, plan: RunPlan | None = None) -> Iterator[None]:
    """Errors of a job as ours; an interrupt also ends its tasks. plan: of the captures it reads."""
    try:
        yield
    except BaseException as error:
        # PySpark calls the JVM once more as an interrupt leaves a job, and that may fail in turn
        if is_interrupt(error):
            _cancel(spark)
            raise error if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt from error
        if not isinstance(error, Exception):
            raise
        raise (_cut_input(plan) if plan else None) or _job_error(error) from error


def _cancel(spark: SparkSession) -> None:
    """Stop the tasks of an interrupted run, so that none writes after the clean-up."""
    try:
        context = spark.sparkContext
    except Exception:  # Spark Connect has none; the server ends the query with the call
        return
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        # The interrupt cut a call short: the JVM may drop that connection's successor too, and
        # takes the next one.
        with suppress(Py4JError, OSError):
            context.cancelAllJobs()
            if not context.statusTracker().getActiveStageIds():
                return
        time.sleep(0.05)


_RAISED = re.compile(r"^((?:\w+\.)*\w+(?:Error|Failed|Exception|Interrupt)): (.*)$", re.MULTILINE)


# a module that a worker's Python lacks, a Python that is not there, one of another version
_UNFIT_WORKER = (
    (re.compile(r"^ModuleNotFoundError: (No module named '[^'\n]+')$", re.MULTILINE), "{}"),
    (re.compile(r'Cannot run program "([^"\n]+)"'), "there is no program {}"),
    (re.compile(r"\[PYTHON_VERSION_MISMATCH\] ([^,\n]+)"), "{}"),
)


def _unfit_worker(text: str) -> str | None:
    """What to do about workers that cannot run our tasks; None for any other fault."""
    for pattern, reason in _UNFIT_WORKER:
        if found := pattern.search(text):
            version = "{}.{}".format(*sys.version_info)
            return (
                f"Spark's workers cannot run kdissect: {reason.format(found[1])}; install kdissect "
                f"{__version__} for Python {version} on every worker, or name a Python there that "
                "has it with --conf spark.pyspark.python=PATH (docs/cluster.md)"
            )
    return None


def _job_error(error: Exception) -> Exception:
    """What a failed job means to the user: no room, an input that went away, or a bug of ours."""
    text = str(error)
    if "No space left on device" in text:
        return EnvironmentFailed("no space left on the device; what was there is as it was")
    if unfit := _unfit_worker(text):
        return EnvironmentFailed(unfit)
    raised = [found for found in _RAISED.findall(text) if "spark" not in found[0].lower()]
    kind, reason = raised[-1] if raised else ("", "")
    if kind.endswith("CaptureError"):
        return CaptureError(reason)
    if kind.endswith("EnvironmentFailed"):
        return EnvironmentFailed(reason)
    if kind.endswith(("AssertionError", "ValueError", "TypeError", "IndexError", "KeyError")):
        return error
    first = reason or (text.strip().splitlines() or [type(error).__name__])[0]
    return EnvironmentFailed(f"the Spark job failed: {first}")


def _cut_input(plan: RunPlan) -> EnvironmentFailed | None:
    """Of a capture that was cut while it was mapped, the workers that read on there are dead."""
    for path, size, version in zip(plan.paths, plan.sizes, plan.sources().versions, strict=True):
        found = was_cut(path, size) if version is None else None
        if found is not None:
            return found
    return None
