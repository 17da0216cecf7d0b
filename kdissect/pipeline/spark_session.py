"""A Spark session for the command line, a caller's session, and errors of a session's jobs."""

from __future__ import annotations

import os
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

_START_SECONDS = "kdissect.session.start.seconds"  # a setting of the sessions that we start


def session(master: str, conf: dict[str, str], log_path: str | os.PathLike[str]) -> SparkSession:
    """Start a session that starts quickly and tries each task four times.

    Output of the JVM and its workers goes to the file `log_path`. Raises EnvironmentFailed if Spark
    does not start.
    """
    os.environ["PYSPARK_PYTHON"] = worker_python(master, conf)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        # a short run ends before the optimising compiler pays off
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.execution.arrow.maxBytesPerBatch": str(32 << 20),
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.log.level": "WARN",
    }
    if master.startswith("local"):
        # otherwise Spark looks up the host's own name, which need not resolve in a container
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    settings |= conf
    builder = SparkSession.builder.appName("kdissect").master(_with_retries(master))
    for name, value in settings.items():
        builder = builder.config(name, value)
    began = time.perf_counter()
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        with _stderr_to(descriptor):
            spark = builder.getOrCreate()
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise EnvironmentFailed(f"Spark did not start: {reason[0]}") from error
    finally:
        os.close(descriptor)
    spark.conf.set(_START_SECONDS, str(time.perf_counter() - began))
    return spark


def worker_python(master: str, conf: dict[str, str]) -> str:
    """The Python of a session's workers: `spark.pyspark.python`, else PYSPARK_PYTHON, else the
    driver's.

    A local master ignores PYSPARK_PYTHON, because its workers run on the driver's machine.
    """
    named = conf.get("spark.pyspark.python")
    if named is None and not master.startswith("local"):
        named = os.environ.get("PYSPARK_PYTHON")
    return named or sys.executable


@contextmanager
def _stderr_to(descriptor: int) -> Iterator[None]:
    """Redirect stderr to a file: the JVM inherits it and writes there in spite of all settings."""
    sys.stderr.flush()
    saved = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _with_retries(master: str) -> str:
    """local[N] tries a task once; local[N,4] retries it, as clusters do."""
    if master == "local":
        return "local[1,4]"
    if master.startswith("local[") and "," not in master:
        return master[:-1] + ",4]"
    return master


def use_this_python(spark: SparkSession) -> None:
    """Let workers of a local session run the caller's Python, unless the caller chose another.

    Spark's default is the first python3 on PATH, which need not have kdissect.
    """
    context = getattr(spark, "_sc", None)  # absent with Spark Connect
    if (
        context is not None
        and context.master.startswith("local")
        and context.pythonExec == "python3"
        and not os.environ.get("PYSPARK_PYTHON")
    ):
        context.pythonExec = sys.executable


def start_seconds(spark: SparkSession) -> float:
    """Seconds that `session` took to start the session; 0 if somebody else started it."""
    return float(spark.conf.get(_START_SECONDS, "0") or 0)


# -- errors of jobs ------------------------------------------------------------------------


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


JOB_FAILED = "the Spark job failed: "
_CALLED = re.compile(r"^An error occurred while calling \S+\n: ")  # py4j's, before the error itself
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
    lines = _CALLED.sub("", text.strip()).splitlines() or [type(error).__name__]
    return EnvironmentFailed(JOB_FAILED + (reason or lines[0]))


def _cut_input(plan: RunPlan) -> EnvironmentFailed | None:
    """The error for a capture that was truncated while mapped; workers that read it are killed."""
    for file, size in zip(plan.files, plan.sizes, strict=False):
        if file.data_path:
            error = was_cut(file.data_path, size)
            if error is not None:
                return error
    return None
