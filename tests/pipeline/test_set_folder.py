"""One run at a time writes to a set; a killed one holds nothing, and the next one cleans up."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import kdissect
from kdissect.cli import app
from kdissect.errors import CaptureError, EnvironmentFailed, OutputError
from kdissect.pipeline.set_folder import STAGING, SetFolder, write_lock
from kdissect.pipeline.table_set import MANIFEST, check_out, commit, read_manifest, staging, writing
from kdissect.pipeline.table_writer import ParquetSink
from tests.builders.messages import exchange, write_capture
from tests.builders.tables import NO_INPUTS, set_files, topics_in, topics_table, write_topics
from tests.conftest import CAPTURES, ROOT
from tests.objects import Store, files_in
from tests.processes import Run

# a run that has staged a file, and waits to be killed
WRITER = """
import sys, time
from kdissect.pipeline.table_set import staging, writing
from kdissect.pipeline.table_writer import ParquetSink
from tests.builders.tables import NO_INPUTS, topics_table

out = sys.argv[1]
with writing(out, overwrite=True), staging(out) as run_id:
    sink = ParquetSink(out, run_id, "t")
    sink("topics", topics_table("lost"))
    sink.close()
    print("writing", flush=True)
    time.sleep(600)
"""

# adds 1 to a number in a file, which only a lock makes right
ADDER = """
import sys, time
from pathlib import Path
from kdissect.errors import OutputError
from kdissect.pipeline.set_folder import write_lock

out, number = sys.argv[1], Path(sys.argv[2])
done = 0
while done < 25:
    try:
        with write_lock(out):
            value = int(number.read_text())
            time.sleep(0.001)
            number.write_text(str(value + 1))
            done += 1
    except OutputError as error:
        assert "another run is writing" in str(error), error
"""


@contextmanager
def writer(out: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is writing to `out`."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, out],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "writing\n"
        yield process
    finally:
        process.kill()
        process.wait()


def write(out: str, *names: str, overwrite: bool = False) -> None:
    with writing(out, overwrite):
        write_topics(out, *names)


# -- folders ----------------------------------------------------------------------------------


def test_a_folder_has_one_writer(kdissect: Run, tmp_path: Path) -> None:
    """A second writer gets one line that names the first one's process, and exit code 2.

    The first one's files stay; after it is killed, the next run removes them.
    """
    out = tmp_path / "set"
    with writer(str(out)) as first:
        before = files_in(out)
        message = f"another run is writing there (process {first.pid} "
        with pytest.raises(OutputError, match=re.escape(message)):
            write(str(out), "a", overwrite=True)
        capture = str(CAPTURES / "java_2_0_1.pcap")
        for option in ((), ("--overwrite",)):
            done = kdissect("dissect", capture, "--out", str(out), *option)
            assert done.returncode == 2
            (line,) = done.stderr.splitlines()
            assert line.startswith(f"kdissect: {out}: {message}")
        assert files_in(out) == before
        assert any(name.endswith(".parquet") for name in before)
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert any(name.startswith(f"{STAGING}/") for name in files_in(out))
    write(str(out), "a")
    assert files_in(out) == set_files(str(out))
    assert not (out / STAGING).exists()


def test_the_next_run_removes_leftovers_of_a_killed_commit(tmp_path: Path) -> None:
    """The next run removes a killed commit's files, and no file of the user."""
    out = tmp_path / "set"
    left = "topics/part-00000-0123456789ab.parquet"
    (out / "topics").mkdir(parents=True)
    (out / left).write_bytes(b"")
    write(str(out), "a")
    assert files_in(out) == set_files(str(out))
    (out / left).write_bytes(b"")
    (out / "topics" / "mine.parquet").write_bytes(b"")
    write(str(out), "b", overwrite=True)
    assert set(files_in(out)) == {*set_files(str(out)), "topics/mine.parquet"}


def test_a_run_that_is_refused_leaves_the_old_set(tmp_path: Path) -> None:
    """Also where the manifest cannot be read: which files are the set's is not known then."""
    out = tmp_path / "set"
    write(str(out), "a")
    (out / MANIFEST).write_text("{")
    before = files_in(out)

    with pytest.raises(RuntimeError), writing(str(out), overwrite=True):
        raise RuntimeError
    assert files_in(out) == before


def test_processes_hold_the_lock_in_turn(tmp_path: Path) -> None:
    """The file of the lock is removed by each of them, and made again."""
    number = tmp_path / "number"
    number.write_text("0")
    command = [sys.executable, "-c", ADDER, str(tmp_path / "set"), str(number)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen(command, env=env) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert number.read_text() == "75"
    assert not (tmp_path / "set" / STAGING).exists()


@pytest.mark.parametrize("is_locked", [False, True])
def test_an_interrupt_while_a_folder_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_locked: bool
) -> None:
    """Nothing stays, whether it comes before the lock is taken or after."""
    flock, calls = fcntl.flock, []

    def interrupted(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) > 1 or is_locked:
            flock(descriptor, operation)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "flock", interrupted)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), write_lock(str(out)):
        pass
    assert not out.exists()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without file locks sets are written, and other staged files stay."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    out = tmp_path / "set"
    other = out / STAGING / "0123456789ab"
    other.mkdir(parents=True)
    (other / "topics.parquet").write_bytes(b"")
    write(str(out), "a")
    assert set(files_in(out)) == {*set_files(str(out)), f"{STAGING}/0123456789ab/topics.parquet"}


# -- object stores ----------------------------------------------------------------------------


def test_the_next_run_removes_leftovers_in_a_store(store: Store) -> None:
    """A killed run has no manifest, and the next one need not wait."""
    out = store.url("killed")
    with writer(out) as killed:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert len(store.names("killed")) == 2, "a mark, a file of rows"
    with pytest.raises(CaptureError, match="no table set"):
        kdissect.open(out)
    write(out, "a")
    assert store.names("killed") == set_files(out)


def test_a_run_in_a_store_ends_the_one_before(store: Store) -> None:
    """Its tasks start no file any more, and it publishes nothing."""
    out = store.url("two")

    def lose() -> None:
        with writing(out, overwrite=False), staging(out) as run_id:
            sink = ParquetSink(out, run_id, "t")
            sink("topics", topics_table("slow"))
            staged = sink.close()
            write(out, "quick")
            with pytest.raises(EnvironmentFailed, match="is over"):
                ParquetSink(out, run_id, "t")
            commit(out, run_id, staged, NO_INPUTS)

    with pytest.raises(EnvironmentFailed, match="removed by another"):
        lose()
    assert topics_in(out) == ["quick"]
    assert store.names("two") == set_files(out)


def test_an_attempt_that_comes_too_late_does_not_start(store: Store, tmp_path: Path) -> None:
    """A task of an ended run writes nothing."""
    for out in (store.url("late"), str(tmp_path / "late")):
        with staging(out) as run_id:
            pass
        with pytest.raises(EnvironmentFailed, match="is over"):
            ParquetSink(out, run_id, "t")
    assert not store.names("late")
    assert not files_in(tmp_path)


@pytest.mark.usefixtures("store")
def test_a_bucket_that_is_not_there() -> None:
    """No folder can be made in it."""
    with pytest.raises(OutputError, match="cannot be written"):
        check_out("s3://no-such-bucket/set", overwrite=False)


# -- what comes after the manifest ------------------------------------------------------------


@contextmanager
def refusing_once_written(store: Store, prefix: str) -> Iterator[None]:
    """Refuse all requests after the manifest is there, of which there is one or more."""
    state = {"written": False, "refused": False}

    def fault(method: str, path: str, _: Any) -> int:
        if state["written"]:
            state["refused"] = True
            return 503
        state["written"] = method == "PUT" and path == f"/{store.bucket}/{prefix}/{MANIFEST}"
        return 0

    with store.failing(fault):
        yield
    assert state["refused"]


@pytest.fixture
def single_attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from kdissect.capture import object_store as stores

    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    stores._s3.cache_clear()
    yield
    stores._s3.cache_clear()


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """A capture with few tables: each is a request or more to a store."""
    return write_capture(tmp_path / "made.pcap", [exchange(1, 3, 1, {}, {})])


@pytest.mark.usefixtures("single_attempts")
def test_a_set_is_written_once_its_manifest_is(store: Store, capture: Path) -> None:
    """Whatever the store refuses then: the set before may not be removed, nor the new one read."""
    out = store.url("whole")
    write(out, "old")
    read = kdissect.read(capture)
    with refusing_once_written(store, "whole"):
        written = read.write(out, overwrite=True)
        with pytest.raises((EnvironmentFailed, OSError)):
            written.exchanges.to_arrow()
    assert written.exchanges.num_rows == read.exchanges.num_rows
    assert len(store.names("whole")) > len(set_files(out)), "files of the old set are there"
    with writing(out, overwrite=True):
        pass
    assert store.names("whole") == set_files(out)


@pytest.mark.usefixtures("single_attempts", "without_spark")
def test_a_run_succeeds_once_the_manifest_is_written(store: Store, capture: Path) -> None:
    """Exit 0, and a line that says why there is no summary."""
    out = store.url("run")
    with refusing_once_written(store, "run"):
        result = CliRunner().invoke(app, ["dissect", str(capture), "--out", out])
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert result.stderr.startswith(f"kdissect: warning: {out} is written; it cannot be read")
    assert kdissect.open(out).exchanges.num_rows == kdissect.read(capture).exchanges.num_rows


def test_a_manifest_whose_answer_is_lost(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has it, the client does not know: it is read back."""
    write_file = SetFolder.write

    def lost(place: SetFolder, name: str, data: bytes) -> None:
        write_file(place, name, data)
        if name == MANIFEST:
            raise EnvironmentFailed("connection reset")

    monkeypatch.setattr(SetFolder, "write", lost)
    write(store.url("lost"), "a")
    assert read_manifest(store.url("lost"))["tables"]["topics"]["rows"] == 1


def test_a_folder_is_written_once_its_manifest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the old set that cannot be removed are no fault of the new one."""
    out = tmp_path / "set"
    write(str(out), "old")

    def refuse(*_: Any) -> None:
        raise EnvironmentFailed("Permission denied")

    with writing(str(out), overwrite=True), staging(str(out)) as run_id:
        sink = ParquetSink(str(out), run_id, "t")
        sink("topics", topics_table("new", "newer"))
        with monkeypatch.context() as patch:
            patch.setattr(SetFolder, "remove", refuse)
            commit(str(out), run_id, sink.close(), NO_INPUTS)
    assert read_manifest(str(out))["tables"]["topics"]["rows"] == 2
    assert set(files_in(out)) > set(set_files(str(out)))
    assert isinstance(kdissect.open(out).topics.to_arrow(), pa.Table)
