"""Fixtures and settings of all tests."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests import material
from tests.processes import Done, Run

if TYPE_CHECKING:
    from kdissect import Tables
    from tests.objects import Store

# A shell may forbid bytecode. Each process of a test would then compile kdissect, and each worker
# of `make test` would compile all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Three workers share two cores. A thread of OpenBLAS that waits for another one uses a core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
CAPTURES = ROOT / "captures"

# `make test` tries 20 examples of each property, the same ones each time, so that a run says the
# same of the same code; `make test-all` tries 400 random ones. Without health checks and deadlines,
# which measure the machine.
UNCHECKED = settings(deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("few", UNCHECKED, max_examples=20, derandomize=True)
settings.register_profile("many", UNCHECKED, max_examples=400)
settings.load_profile("few")

# A job that a shell started in the background ignores SIGINT, and so would the commands under test.
signal.signal(signal.SIGINT, signal.default_int_handler)


PIPELINE = "tests/pipeline/"


class _ByFile(LoadFileScheduling):
    """Gives whole files to a worker, so that it makes their fixtures once.

    All files of pipelines go to one worker: they share a Spark session.
    """

    def _split_scope(self, nodeid: str) -> str:
        return PIPELINE if nodeid.startswith(PIPELINE) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    return _ByFile(config, log)


@pytest.hookimpl(wrapper=True)  # after pytest-randomly's
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Puts the longest tests first, so that short files end a run: of pipelines, then of truth."""
    yield
    items.sort(key=lambda item: (PIPELINE not in item.nodeid, "truth" not in item.path.parts))


# Tests that skip in a clone, and the reasons that a machine may have. Others fail `--expect-skips`.
SKIPS = ROOT / "tests" / "skips.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--expect-skips", action="store_true", help=f"compare the skipped tests with {SKIPS.name}"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what `say` was told and the seed. Fails a run with other skips than expected."""
    sentences = [
        str(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "compared"
    ]
    if sentences:
        terminalreporter.section("compared with the truth")
        for sentence in sentences:
            terminalreporter.write_line(sentence)
    config = terminalreporter.config
    if seed := getattr(config.option, "randomly_seed", None):
        terminalreporter.write_line(f"random order: --randomly-seed={seed}")
    if not config.getoption("--expect-skips"):
        return
    lines = [line for line in SKIPS.read_text().splitlines() if line and line[0] != "#"]
    reasons = tuple(line[2:] for line in lines if line.startswith("~ "))
    expected = (
        {line for line in lines if not line.startswith("~ ")}
        if not material.CAPTURES.is_dir()
        else set()
    )
    skipped = set()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(reasons):
            skipped.add(report.nodeid.partition("[")[0])
    for words, tests in (
        ("skipped, but not listed", skipped - expected),
        ("listed, but not skipped", expected - skipped),
    ):
        for test in sorted(tests):
            terminalreporter.write_line(f"{SKIPS.name}: {words}: {test}", red=True)
    if skipped != expected:
        terminalreporter._session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def captures() -> Path:
    """The folder of captures that ships with the project."""
    return CAPTURES


@pytest.fixture(scope="session")
def librdkafka() -> "Tables":
    """The tables of a capture with groups, transactions, lag, errors and five codecs."""
    from kdissect import read

    return read(CAPTURES / "librdkafka.pcap")


@pytest.fixture(scope="session")
def table_set(tmp_path_factory: pytest.TempPathFactory, librdkafka: "Tables") -> Path:
    """The same tables, in a folder whose name would be a pattern in SQL."""
    out = tmp_path_factory.mktemp("set") / "tables [1] it's*?"
    librdkafka.write(out)
    return out


@pytest.fixture(scope="session")
def tables(table_set: Path) -> "Tables":
    """The same tables, opened from that folder."""
    from kdissect import open

    return open(table_set)


@pytest.fixture(scope="module")
def store() -> Iterator["Store"]:
    """An S3 server with the empty bucket `far`; the environment says where it is meanwhile."""
    from tests.objects import object_store

    with object_store("far") as found:
        yield found


@pytest.fixture
def window_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes windows of one size."""

    def make(size: int) -> None:
        monkeypatch.setattr("kdissect.capture.windows.WINDOW_BYTES_MIN", size)
        monkeypatch.setattr("kdissect.capture.windows.WINDOW_BYTES_MAX", size)

    return make


@pytest.fixture
def kdissect(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in this process, from the root: exit code, stdout and stderr.

    It is for commands that start no Spark, read no stdin, and print to someone who reads all.
    """
    from kdissect.__main__ import main

    class Exit(BaseException):
        pass

    def leave(status: int) -> None:
        raise Exit(status)

    def run(*args: str) -> Done:
        capfd.readouterr()
        with monkeypatch.context() as patch, contextlib.chdir(ROOT):
            patch.setattr(os, "_exit", leave)
            patch.setattr(sys, "argv", ["kdissect", *args])
            patch.setattr(sys, "stderr", sys.stderr)  # main opens another one
            patch.setattr(sys, "meta_path", [*sys.meta_path])  # main hides pandas
            patch.setattr(logging.root.manager, "disable", logging.root.manager.disable)
            with pytest.raises(Exit) as stopped:
                main()
        (status,) = stopped.value.args
        return Done(args, status, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One session for all tests that need Spark: two cores, failed tasks are tried again."""
    from kdissect.pipeline.spark_session import session

    few_tasks = {"spark.sql.shuffle.partitions": "2"}
    started = session("local[2]", few_tasks, tmp_path_factory.mktemp("spark") / "spark.log")
    yield started
    started.stop()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dissect(None, ...)` runs in this process, files and commit as ever."""
    from kdissect.pipeline import spark_session

    monkeypatch.setattr(spark_session, "use_this_python", lambda _: None)
    monkeypatch.setattr(spark_session, "start_seconds", lambda _: 0.0)


@pytest.fixture
def without_spark(in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command `dissect` runs in this process, without Spark."""
    monkeypatch.setattr("kdissect.cli.dissect._start_spark", lambda *_: None)
    monkeypatch.setattr("kdissect.cli.dissect._progress", lambda *_: contextlib.nullcontext())


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Say a sentence in the summary of the run (works under pytest-xdist too)."""

    def _say(sentence: str) -> None:
        print(sentence)
        record_property("compared", sentence)

    return _say
