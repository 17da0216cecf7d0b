"""spark.read.format("kdissect"): the rows of `kdissect.read`, as Spark reads them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kdissect
from kdissect.datasource import KdissectDataSource
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


@pytest.mark.heavy
def test_spark_groups_and_counts_the_rows(source, tables):
    """Spark finds the counts of pandas."""
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
        ("exchanges", {"path": "absent.pcap"}, r"absent\.pcap"),
    ],
)
def test_wrong_tables_and_options_raise_an_error(table, options, words, tmp_path):
    """The error has the reason."""
    data_source = KdissectDataSource(
        {"table": table, "path": str(CAPTURE), "spool": str(tmp_path), **options}
    )
    with pytest.raises(Exception, match=words):
        data_source.reader(data_source.schema()).partitions()


def test_an_error_of_the_data_source_reaches_the_caller_of_spark(source):
    """The error of a query has the reason, although another process raised it."""
    with pytest.raises(Exception, match="no table 'exchange'"):
        source("exchange").count()


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
