"""readStream.format("kdissect"): each finished exchange once, also across files and restarts."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

import kdissect
from kdissect import folder_stream
from kdissect.capture.inputs import describe
from kdissect.folder_stream import FolderStream
from kdissect.pipeline.options import Options
from tests.conftest import ROOT

ROTATED = sorted((ROOT.parent / "shared" / "captures" / "shapes").glob("rotated_*.pcap"))
COLUMNS = ("exchange_id", "api_name", "correlation_id", "status", "latency_ms", "client_id",
           "request_packet", "response_packet", "response_decode_status")  # fmt: skip

pytestmark = pytest.mark.skipif(not ROTATED, reason="no shared captures on this machine")


def _rows(table: pa.Table) -> list[tuple[str, ...]]:
    rows = table.select(list(COLUMNS)).to_pylist()
    return sorted(tuple(map(str, row.values())) for row in rows)


def _folder(tmp_path: Path, count: int) -> Path:
    folder = tmp_path / "captures"
    folder.mkdir(exist_ok=True)
    for path in ROTATED[:count]:
        shutil.copy(path, folder / path.name)
    return folder


def _batch(stream: FolderStream, start, end, name="exchanges") -> list[pa.Table]:
    return [tables[name] for tables in stream.read(start, end) if name in tables]


def _all(parts: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(parts, promote_options="permissive")


def test_batches_give_what_one_read_gives(tmp_path):
    folder, spool = _folder(tmp_path, 0), str(tmp_path)
    parts, last = [], None
    for count in range(1, len(ROTATED) + 1):
        _folder(tmp_path, count)
        stream = FolderStream(str(folder), Options(), spool)  # as after a restart
        last = last or stream.first()
        end = stream.latest()
        again = _batch(stream, last, end)
        once_more = _batch(FolderStream(str(folder), Options(), spool), last, end)
        assert list(map(_rows, again)) == list(map(_rows, once_more))
        stream.forget_before(end)
        parts += again
        last = end
    found = _all(parts)
    ids = found["exchange_id"].to_pylist()
    assert len(ids) == len(set(ids)) > 200
    # the newest file waits for the next one; what is open at the end is no row yet
    expected = kdissect.read([folder / path.name for path in ROTATED[:-1]])
    whole = expected.exchanges.to_arrow()
    missing = set(_rows(whole)) - set(_rows(found))
    assert set(_rows(found)) - set(_rows(whole)) == set()
    assert {row[3] for row in missing} <= {"response_missing", "connection_closed"}


def test_only_new_files_are_opened(tmp_path, monkeypatch):
    """A trigger over many rotated files costs what the new ones cost."""
    folder, spool = _folder(tmp_path, 3), str(tmp_path)
    (folder / "notes.txt").write_text("no capture")
    opened = []
    monkeypatch.setattr(
        folder_stream,
        "describe",
        lambda path: opened.append(Path(path).name) or describe(path),
    )
    stream = FolderStream(str(folder), Options(), spool)
    end = stream.latest()
    assert sorted(opened) == ["notes.txt", *(path.name for path in ROTATED[:3])]
    opened.clear()
    assert stream.latest() == end
    assert not opened
    _folder(tmp_path, 3)  # written again: their times of change are others
    (folder / "notes.txt").unlink()
    assert stream.latest() == end
    first = _batch(stream, stream.first(), end)
    opened.clear()
    shutil.copy(ROTATED[3], folder)
    fresh = pickle.loads(pickle.dumps(stream))  # as a task gets it
    assert _batch(fresh, end, stream.latest())
    # the new one by both; the one that waited is not yet done for the task
    assert sorted(opened) == [ROTATED[2].name, ROTATED[3].name, ROTATED[3].name]
    assert first


def test_a_glob_is_a_folder(tmp_path):
    folder = _folder(tmp_path, 3)
    here = FolderStream(str(folder), Options(), str(tmp_path))
    assert FolderStream(str(folder / "*.pcap"), Options(), str(tmp_path)).latest() == here.latest()
    missing = FolderStream(str(tmp_path / "none"), Options(), str(tmp_path))
    assert missing.latest() == missing.first()


def test_state_that_is_gone_is_made_again(tmp_path):
    folder = _folder(tmp_path, len(ROTATED))
    stream = FolderStream(str(folder), Options(), str(tmp_path / "a"))
    files = stream._files()
    middle = {"time_ns": files[1][0], "path": files[1][1]}
    first = _batch(stream, stream.first(), middle)
    second = _batch(stream, middle, stream.latest())
    other = FolderStream(str(folder), Options(), str(tmp_path / "b"))
    assert list(map(_rows, second)) == list(map(_rows, _batch(other, middle, other.latest())))
    assert first


def test_a_file_that_grows_after_it_was_read_is_said(tmp_path):
    folder = _folder(tmp_path, 3)
    stream = FolderStream(str(folder), Options(), str(tmp_path))
    end = stream.latest()
    assert _batch(stream, stream.first(), end)
    _folder(tmp_path, 4)
    with (folder / ROTATED[0].name).open("ab") as file:
        file.write(b"more")
    with pytest.raises(kdissect.CaptureError, match="grew after it was read"):
        _batch(stream, end, stream.latest())


@pytest.mark.heavy
@pytest.mark.spark
def test_spark_streams_a_folder_exactly_once(spark, tmp_path):
    kdissect.register(spark)
    folder = _folder(tmp_path, 2)
    out = str(tmp_path / "out")

    def run() -> None:
        frame = (
            spark.readStream.format("kdissect").option("table", "exchanges")
            .option("spool", str(tmp_path)).load(str(folder))
        )  # fmt: skip
        query = (
            frame.writeStream.format("parquet").option("path", out)
            .option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        )  # fmt: skip
        query.processAllAvailable()
        query.stop()

    run()
    count = spark.read.parquet(out).count()
    _folder(tmp_path, len(ROTATED))
    run()
    found = spark.read.parquet(out).toArrow()
    assert 0 < count < found.num_rows
    assert found["exchange_id"].length() == len(set(found["exchange_id"].to_pylist()))
    direct = FolderStream(str(folder), Options(), str(tmp_path / "direct"))
    assert _rows(found) == _rows(_all(_batch(direct, direct.first(), direct.latest())))


@pytest.mark.spark
def test_tables_of_a_whole_capture_are_no_stream(spark, tmp_path):
    kdissect.register(spark)
    frame = spark.readStream.format("kdissect").option("table", "connections")
    writer = frame.load(str(_folder(tmp_path, 1))).writeStream.format("noop")
    with pytest.raises(Exception, match="a stream has no table connections"):
        writer.start().processAllAvailable()
