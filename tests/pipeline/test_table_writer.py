"""The files of tables: their order, their size, and folders of days."""

from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

import kdissect
from kdissect.errors import OutputError
from kdissect.pipeline import table_writer
from kdissect.pipeline.table_set import staging
from kdissect.pipeline.table_writer import ParquetSink
from tests.builders.captures import split_capture
from tests.truth.rows import set_differences

DAY_S = 86_400


def _written(out: Path, *times: list[int | None]) -> list[list[Any]]:
    """The request times in each file of `exchanges`, from tables of these request times."""
    with staging(str(out)) as run_id:
        sink = ParquetSink(str(out), run_id, "s00000")
        for some in times:
            request = pa.array(some, pa.timestamp("us", "UTC"))
            response = pa.array([50] * len(some), pa.timestamp("us", "UTC"))
            sink("exchanges", pa.table({"request_time": request, "response_time": response}))
        files = [(out / file.path, file.row_count) for file in sink.close()]
        found = [pq.read_table(path, partitioning=None)["request_time"] for path, _ in files]
        assert [count for _, count in files] == [len(rows) for rows in found]
    return [rows.cast(pa.int64()).to_pylist() for rows in found]


def test_rows_of_a_file_ascend_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group is sorted; one that begins before the end of the file begins another file."""
    assert _written(tmp_path / "one", [10, 60], [20, None, 70]) == [[10, 20, None, 60, 70]]
    monkeypatch.setattr(table_writer, "ROW_GROUP_BYTES", 1)
    found = _written(tmp_path / "many", [10, 30], [30, 60], [20, 40], [None])
    assert found == [[10, 30, 30, 60], [20, 40, None]]


def test_files_end_at_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is too large for one file has several, with all rows in order."""
    monkeypatch.setattr(table_writer, "ROW_GROUP_BYTES", 4_000)
    monkeypatch.setattr(table_writer, "FILE_BYTES_MAX", 20_000)
    times = np.cumsum(np.random.default_rng(1).integers(0, 1 << 40, 20_000))
    found = _written(tmp_path / "out", *times.reshape(50, -1).tolist())
    assert len(found) > 5
    assert all(len(rows) <= 20_000 / 5 for rows in found)  # a random time takes five bytes
    assert [time for rows in found for time in rows] == times.tolist()


def test_a_page_of_values_finds_what_repeats(tmp_path: Path) -> None:
    """8 MB of the same 250 kB again and again take two pages, and each page takes 250 kB."""
    rng = np.random.default_rng(1)
    values = [rng.bytes(1000) for _ in range(250)]
    table = pa.table({"value": pa.array(values * 32, pa.binary())})
    with staging(str(tmp_path)) as run_id:
        sink = ParquetSink(str(tmp_path), run_id, "s00000")
        sink("records", table)
        (file,) = sink.close()
        assert (tmp_path / file.path).stat().st_size < 2.5 * 250_000


def _around_midnight(capture: Path, path: Path) -> None:
    """Write a pcap whose packets are at another time, the middle one at the end of a day."""
    head, packets = split_capture(capture.read_bytes())
    seconds = [int.from_bytes(packet[:4], "little") for packet in packets]
    shift = -seconds[len(seconds) // 2] % DAY_S
    for number, second in enumerate(seconds):
        packets[number] = (second + shift).to_bytes(4, "little") + packets[number][4:]
    path.write_bytes(head + b"".join(packets))


@pytest.mark.spark
def test_folders_of_days(spark: Any, captures: Path, tmp_path: Path) -> None:
    """Spark, DuckDB and pyarrow read them as partitions; kdissect has its columns alone."""
    capture, out = tmp_path / "two-days.pcap", tmp_path / "set"
    _around_midnight(captures / "librdkafka.pcap", capture)
    options = {"partition_by": "day", "split_bytes": 100_000}
    there = kdissect.dissect(spark, capture, out, **options)
    for tables in (there, kdissect.open(out)):
        assert set_differences(kdissect.read(capture), tables) == []
    for name in ("exchanges", "records", "record_batches", "apis/Fetch"):
        folders = {path.parent.name for path in (out / name).rglob("*.parquet")}
        assert len(folders) == 2
        assert all(folder.startswith("date=20") for folder in folders)
    rows = there.exchanges.to_arrow(["request_time", "response_time"])
    days = Counter(str(day) for day in pc.coalesce(*rows.columns).cast(pa.date32()).to_pylist())
    expected = sorted(days.items())
    of_day = "select cast(date as string), count(*) from {} group by 1 order by 1"
    files = f"read_parquet('{out}/exchanges/**/*.parquet')"
    assert duckdb.sql(of_day.format(files)).fetchall() == expected
    table = pads.dataset(out / "exchanges", partitioning="hive").to_table()
    counts = table.group_by("date").aggregate([([], "count_all")]).sort_by("date")
    assert list(zip(*counts.to_pydict().values(), strict=True)) == expected
    spark.read.parquet(str(out / "exchanges")).createOrReplaceTempView("dated")
    found = spark.sql(of_day.format("dated")).collect()
    assert [tuple(row) for row in found] == expected
    with pytest.raises(OutputError, match="partition_by"):
        kdissect.dissect(spark, capture, out, append=True)
