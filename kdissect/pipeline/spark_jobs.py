"""Turn a failed or interrupted Spark job into an error for the user."""

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
from kdissect.pipeline.plan import RunPlan


@contextmanager
def job_errors(spark: SparkSession, plan: RunPlan | None = None) -> Iterator[None]:
    """Raise errors of a job as kdissect's own; after an interrupt, also cancel its tasks.

    plan: of the captures that the job reads.
    """
    try:
        yield
    except BaseException as error:
        # after an interrupt PySpark calls the JVM once more, and that call may fail as well
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
    except Exception:  # no SparkContext with Spark Connect; its server ends the query itself
        return
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        # An interrupted call breaks the connection to the JVM. The next call may fail too; the one
        # after that gets a new connection.
        with suppress(Py4JError, OSError):
            context.cancelAllJobs()
            if not context.statusTracker().getActiveStageIds():
                return
        time.sleep(0.05)


_RAISED = re.compile(r"^((?:\w+\.)*\w+(?:Error|Failed|Exception|Interrupt)): (.*)$", re.MULTILINE)


# a module that a worker lacks; a Python that does not exist; a Python of another version
_UNFIT_WORKER = (
    (re.compile(r"^ModuleNotFoundError: (No module named '[^'\n]+')$", re.MULTILINE), "{}"),
    (re.compile(r'Cannot run program "([^"\n]+)"'), "there is no program {}"),
    (re.compile(r"\[PYTHON_VERSION_MISMATCH\] ([^,\n]+)"), "{}"),
)


def _unfit_worker(text: str) -> str | None:
    """Advice if workers cannot run kdissect's tasks; None for other errors."""
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
    """Error for the user: a full disk, a capture that vanished, or a bug in kdissect."""
    text = str(error)
    if "No space left on device" in text:
        return EnvironmentFailed("no space left on the device; existing files are unchanged")
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
    """The error for a capture that was truncated while mapped; workers that read it are killed."""
    for file, size in zip(plan.files, plan.sizes, strict=False):
        if not isinstance(file, str) and file.data_path:
            error = was_cut(file.data_path, size)
            if error is not None:
                return error
    return None
