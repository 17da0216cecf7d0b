"""Start a Spark session for the command line, and inspect a caller's session."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from kdissect.errors import EnvironmentFailed

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
