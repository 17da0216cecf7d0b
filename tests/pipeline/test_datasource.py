"""spark.read.format("kdissect"): the rows of `kdissect.read`, as Spark reads them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kdissect
from kdissect.pipeline.disk_index import KEPT_S, make_index
from kdissect.pipeline.options import Options
from tests.conftest import CAPTURES

pytestmark = pytest.mark.spark
CAPTURE = CAPTURES / "sarama.pcap.gz"


@pytest.fixture(scope="module")
def source(spark, tmp_path_factory):
    kdissect.register(spark)
    spool = str(tmp_path_factory.mktemp("spool"))

    def load(table, path=CAPTURE, **options):
        reader = spark.read.format("kdissect").option("table", table).option("spool", spool)
        for name, value in options.items():
            reader = reader.option(name, value)
        return reader.load(str(path))

    return load


@pytest.fixture(scope="module")
def tables():
    return kdissect.read(CAPTURE)


def _rows(table) -> list[str]:
    return sorted(str(row) for row in table.to_pylist())


@pytest.mark.parametrize(
    "name",
    [
        *("exchanges", "apis/Produce"),
        *(
            pytest.param(name, marks=pytest.mark.heavy)
            for name in ("captures", "connections", "records", "record_batches", "group_events",
                         "transactions", "topics", "brokers", "anomalies", "apis/JoinGroup",
                         "apis/Metadata")
        ),
    ],
)  # fmt: skip
def test_the_rows_of_read(source, tables, name):
    """Each table has the columns and rows of `kdissect.read`."""
    frame = source(name, splits=3)
    found = frame.toArrow()
    assert found.num_rows == tables[name].num_rows
    expected = tables[name].to_arrow()
    assert found.column_names == expected.column_names
    assert _rows(found.cast(expected.schema)) == _rows(expected)


def test_it_is_a_frame_like_any_other(source, tables):
    """Spark groups and counts its rows."""
    counts = source("exchanges").groupBy("api_name").count().toPandas()
    expected = tables.exchanges.to_pandas().api_name.value_counts()
    assert dict(zip(counts["api_name"], counts["count"], strict=True)) == expected.to_dict()


def test_options_are_those_of_the_command_line(source):
    """Payload, host and time have their effect."""
    hidden = source("records", payload="none").filter("value is not null").count()
    assert hidden == 0
    assert source("exchanges", host="10.9.9.9").count() == 0
    early = source("exchanges", to="2000-01-01").count()
    assert early == 0


def test_internal_tables_have_the_schema_of_their_records(source):
    """Internal tables can be read by name."""
    path = CAPTURES / "librdkafka.pcap"
    expected = kdissect.read(path)
    names = [name for name in expected.names if name.startswith("internal/")]
    for name in names[:2]:
        assert source(name, path).count() == expected[name].num_rows


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        ("exchange", {}, "no table 'exchange'"),
        ("apis/Fetsch", {}, "Fetsch"),
        ("exchanges", {"colour": "red"}, "no option 'colour'"),
        ("exchanges", {"payload": "some"}, "payload must be one of"),
    ],
)
def test_what_is_asked_wrongly_is_said(source, table, options, words):
    """Wrong tables and options raise an error with the reason."""
    with pytest.raises(Exception, match=words):
        source(table, **options).count()


def test_a_path_that_is_not_there_is_said(source, tmp_path):
    """The error names the path."""
    with pytest.raises(Exception, match=r"absent\.pcap"):
        source("exchanges", tmp_path / "absent.pcap").count()


def test_an_index_is_made_once_and_goes_when_it_is_old(tmp_path: Path):
    """The same options share an index; old ones are removed."""
    index = make_index([str(CAPTURE)], Options(), str(tmp_path), 2)
    assert make_index([str(CAPTURE)], Options(), str(tmp_path), 2) == index
    other = make_index([str(CAPTURE)], Options(payload="none"), str(tmp_path), 2)
    assert other != index
    past = os.stat(other.folder).st_mtime - 2 * KEPT_S
    os.utime(other.folder, (past, past))
    assert make_index([str(CAPTURE)], Options(), str(tmp_path), 2) == index
    assert not Path(other.folder).exists()
    assert sum(part.num_rows for slot in index.slots() for part in index.table("exchanges", slot))
