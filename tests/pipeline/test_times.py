"""Times beyond the calendar stay exact as integers, and are null as timestamps."""

from pathlib import Path
from typing import Any

import duckdb
import pandas
import pyarrow.parquet as pq
import pytest

import kdissect
from kdissect.codec.record_encoder import encode_batch
from tests.builders.messages import fetch, write_capture

YEAR_10000_MS = 253_402_300_800_000
YEAR_1_MS = -62_135_596_800_000
TIMES_MS = [0, -1, YEAR_10000_MS, YEAR_10000_MS - 1, YEAR_1_MS, YEAR_1_MS - 1, -(2**62), 2**62]
TELLABLE = [0, YEAR_10000_MS - 1, YEAR_1_MS]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table set of records with every such time."""
    folder = tmp_path_factory.mktemp("times")
    batches = [
        encode_batch([{"offset": at, "timestamp_ms": time_ms, "key": None, "value": b"v"}])
        for at, time_ms in enumerate(TIMES_MS)
    ]
    capture = write_capture(folder / "times.pcap", [fetch(1, "t", [b"".join(batches)])])
    kdissect.read(capture).write(folder / "out")
    return folder / "out"


def test_the_wires_number_stays(out: Path) -> None:
    """timestamp_ms is exact; timestamp is null for -1 and outside of years 1 to 9999."""
    rows = kdissect.open(out).records.to_arrow(["timestamp_ms", "timestamp"]).to_pylist()
    assert [row["timestamp_ms"] for row in rows] == TIMES_MS
    told = [row["timestamp_ms"] for row in rows if row["timestamp"] is not None]
    assert told == TELLABLE


def test_every_reader_opens_them(out: Path) -> None:
    """pyarrow, pandas and DuckDB read the same nulls without settings."""
    null_count = len(TIMES_MS) - len(TELLABLE)
    for name in ("records", "record_batches"):
        assert pq.read_table(out / name).num_rows == len(TIMES_MS)
    assert pandas.read_parquet(out / "records").timestamp.isna().sum() == null_count
    query = f"select count(*) - count(timestamp) from '{out}/records/*.parquet'"
    assert duckdb.sql(query).fetchall() == [(null_count,)]


@pytest.mark.spark
def test_spark_opens_them(out: Path, spark: Any) -> None:
    """Spark too, with the same numbers.

    The first moment of year 1 is compared there: Python's datetime cannot make it from a number.
    """
    records = spark.read.parquet(str(out / "records"))
    rows = records.select("timestamp_ms").collect()
    assert sorted(row.timestamp_ms for row in rows) == sorted(TIMES_MS)
    assert records.where("timestamp is null").count() == len(TIMES_MS) - len(TELLABLE)
    same = records.where("unix_millis(timestamp) = timestamp_ms").count()
    assert same == len(TELLABLE)
