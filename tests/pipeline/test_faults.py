"""What the machine does to a run: no partial tables, a clear line, an exit code, and a repeat that
succeeds."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from py4j.protocol import Py4JNetworkError

import kdissect
from kdissect.capture import mapped_files
from kdissect.capture.mapped_files import Sources
from kdissect.capture.scan import scan
from kdissect.errors import EnvironmentFailed
from kdissect.pipeline import spark as on_spark
from kdissect.pipeline.spark_session import job_errors
from kdissect.pipeline.table_set import MANIFEST
from tests.builders.tables import set_files
from tests.capture.scanned import planned, write
from tests.conftest import CAPTURES, ROOT
from tests.objects import object_store
from tests.processes import KDISSECT, Done, run
from tests.truth.rows import set_differences

CAPTURE = CAPTURES / "librdkafka.pcap"


def dissect(*args: str) -> list[str]:
    return [*KDISSECT, "dissect", *args, "--master", "local[2]", "--quiet"]


def last_line(error: str) -> str:
    assert "Traceback" not in error
    return error.strip().splitlines()[-1]


def test_a_file_that_is_cut_under_the_walk(tmp_path: Path) -> None:
    """Its pages are gone; touching them would end the process."""
    file = write(tmp_path, CAPTURE.read_bytes())
    sources = Sources([file.data_path])
    data = sources.data(0)
    plan = planned([file])
    os.truncate(file.data_path, 100_000)
    message = r"made\.pcap: was cut from 301074 to 100000 bytes while it was read"
    with pytest.raises(EnvironmentFailed, match=message):
        scan(plan.splits[0], sources)
    assert mapped_files.fault(data.ctypes.data, 90_000) is None
    assert mapped_files.fault(data.ctypes.data + 250_000, 10) == os.strerror(5)


def test_a_range_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails in the middle; the size stays."""
    file = write(tmp_path, CAPTURE.read_bytes())
    monkeypatch.setattr(mapped_files, "fault", lambda address, size: "Input/output error")
    with pytest.raises(EnvironmentFailed, match=r"bytes 24 to 301074 cannot be read: Input/output"):
        planned([file])


def test_windows_are_no_borders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few bytes are seen to at a time, the splits and segments are the same."""
    file = write(tmp_path, CAPTURE.read_bytes())
    whole = planned([file], 50_000)
    expected = [scan(split, whole.sources()).batch.segments for split in whole.splits]
    monkeypatch.setattr(mapped_files, "WALKED_BYTES", 1000)
    again = planned([file], 50_000)
    assert (again.captures, again.splits) == (whole.captures, whole.splits)
    found = [scan(split, again.sources()).batch.segments for split in again.splits]
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.spark
@pytest.mark.heavy
def test_a_file_that_shrinks_during_a_run_is_an_error(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that shrinks during a run is an error; the repeated run is whole."""
    path = tmp_path / "made.pcap"
    shutil.copy(CAPTURE, path)
    assembled = on_spark._assembled

    def meanwhile(*values: Any) -> Any:
        os.truncate(path, 100_000)
        return assembled(*values)

    monkeypatch.setattr(on_spark, "_assembled", meanwhile)
    out = tmp_path / "out"
    with pytest.raises(EnvironmentFailed, match=r"made\.pcap: was cut from 301074 to 100000 bytes"):
        kdissect.dissect(spark, path, out, split_bytes=100_000)
    assert not out.exists()
    monkeypatch.setattr(on_spark, "_assembled", assembled)
    shutil.copy(CAPTURE, path)
    assert set_differences(kdissect.read(path), kdissect.dissect(spark, path, out)) == []


@pytest.mark.heavy
@pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0,
    reason="a small file system is mounted: needs root and unshare",
)
def test_a_full_disk(tmp_path: Path) -> None:
    """The disk has room for the captures, as is checked before, but not for the tables."""
    disk = tmp_path / "disk"
    disk.mkdir()
    out = disk / "out"
    script = """
        mount -t tmpfs -o size="$1" tmpfs "$2" || exit 99
        shift 2; "$@"; status=$?
        ls -A "$DISK"; exit $status
    """

    def on_disk(size: str) -> Done:
        command = ["unshare", "-m", "sh", "-c", script, "sh", size, str(disk)]
        return run(*command, *dissect(str(CAPTURE), "--out", str(out)), DISK=str(disk))

    done = on_disk("320k")
    if done.returncode == 99:
        pytest.skip("no file system can be mounted here")
    assert done.returncode == 3, done.stderr
    assert last_line(done.stderr).startswith("kdissect: no space left on the device")
    assert done.stdout == "", "the disk is as it was"
    done = on_disk("64m")
    assert (done.returncode, done.stdout) == (0, "out\n"), done.stderr


def interrupted(command: list[str], started: Any, number: int, **variables: str) -> Any:
    """A run that gets a signal once `started()`: (exit code, stderr)."""
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes, env=os.environ | variables, cwd=ROOT) as process:
        until = time.monotonic() + 120
        while not started() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(number)
        error = process.stderr.read()
    return process.returncode, error


@pytest.mark.parametrize("leaving_fails", [False, True])
def test_an_interrupt_that_cuts_a_call_to_the_jvm(leaving_fails: bool) -> None:
    """The JVM may drop the next connection too, and PySpark calls it as the interrupt leaves a job:
    jobs are cancelled all the same, and the interrupt stays an interrupt."""
    said: list[str] = []

    class Context:
        def cancelAllJobs(self) -> None:
            said.append("cancel")
            if len(said) == 1:
                raise Py4JNetworkError("Answer from Java side is empty")

        def statusTracker(self) -> Any:
            running = [7] if len(said) < 3 else []
            return SimpleNamespace(getActiveStageIds=lambda: running)

    def cut(*_: Any) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            if leaving_fails:
                raise Py4JNetworkError("Answer from Java side is empty")

    spark: Any = SimpleNamespace(sparkContext=Context())
    with pytest.raises(KeyboardInterrupt), job_errors(spark):
        cut()
    assert said == ["cancel"] * 3


@pytest.mark.heavy
def test_an_interrupted_run_can_be_repeated(tmp_path: Path) -> None:
    """SIGINT while tasks write, also beside a table set that is to be replaced."""
    out = tmp_path / "out"
    command = dissect(str(CAPTURE), "--out", str(out), "--overwrite", "--split-bytes", "20000")
    for before in ([], ["the old set"]):
        status, error = interrupted(command, lambda: list(out.glob("_staging/*/*")), signal.SIGINT)
        assert status == 130
        assert last_line(error) == "kdissect: interrupted; nothing was written"
        assert out.exists() == bool(before)
        assert not (out / "_staging").exists()
        if before:
            assert kdissect.open(out).exchanges.num_rows
        done = run(*command)
        assert done.returncode == 0, done.stderr
    assert set_differences(kdissect.read(CAPTURE), kdissect.open(out)) == []


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_to_an_object_store(number: int) -> None:
    """An interrupted run leaves no manifest; the repeated run removes its files."""
    with object_store(f"killed-{number}") as store:
        mapped_files, out = store.put("x.pcap", CAPTURE), store.url("out")
        command = dissect(mapped_files, "--out", out, "--split-bytes", "20000")

        def started() -> bool:
            return any(name.endswith(".parquet") for name in store.names("out"))

        status, error = interrupted(command, started, number, **store.environment)
        left = store.names("out")
        assert MANIFEST not in left
        if number == signal.SIGINT:
            assert status == 130
            assert last_line(error) == "kdissect: interrupted; nothing was written"
            assert not left
        else:
            assert status == -signal.SIGKILL
            assert left
        done = run(*command, **store.environment)
        assert done.returncode == 0, done.stderr
        assert store.names("out") == set_files(out)
        assert kdissect.open(out).exchanges.num_rows == kdissect.read(CAPTURE).exchanges.num_rows
