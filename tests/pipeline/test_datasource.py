"""spark.read.format("kdissect"): the rows of `kdissect.read`, as Spark reads them.

A query starts several processes, so most tests call the reader of Spark's tasks themselves.
"""

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest

import kdissect
from kdissect.datasource import KEPT_S, KdissectDataSource, table_set
from kdissect.pipeline.options import Options
from tests.builders.messages import COMMIT, COMMIT_KEY, batch, fetch, write_capture
from tests.cases import cases
from tests.conftest import CAPTURES
from tests.objects import Store

CAPTURE = CAPTURES / "sarama.pcap.gz"
TABLES = ("exchanges", "captures", "connections", "records", "record_batches", "group_events",
          "transactions", "topics", "brokers", "anomalies", "apis/Produce", "apis/JoinGroup",
          "apis/Metadata")  # fmt: skip


@pytest.fixture(scope="module")
def spool(tmp_path_factory):
    return str(tmp_path_factory.mktemp("spool"))


@pytest.fixture(scope="module")
def source(spark, spool):
    """Loads a table with Spark."""
    kdissect.register(spark)

    def load(table, path=CAPTURE, **options):
        reader = spark.read.format("kdissect").option("table", table).option("spool", spool)
        for name, value in options.items():
            reader = reader.option(name, value)
        return reader.load(str(path))

    return load


@pytest.fixture(scope="module")
def read_tasks(spool):
    """Reads a table as Spark's tasks do, in this process."""

    def read(table, path=CAPTURE, **options):
        named = {"table": table, "path": str(path), "spool": spool, **options}
        data_source = KdissectDataSource(named)
        reader = data_source.reader(data_source.schema())
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        return pa.Table.from_batches(batches, reader._schema)

    return read


@pytest.fixture(scope="module")
def tables():
    return kdissect.read(CAPTURE)


def _rows(table) -> list[str]:
    return sorted(str(row) for row in table.to_pylist())


def _check(found, expected):
    assert found.num_rows == expected.num_rows
    assert found.column_names == expected.column_names
    assert _rows(found.cast(expected.schema)) == _rows(expected)


@pytest.mark.spark
@cases("name", TABLES[:1], heavy=TABLES[1:])
def test_spark_gives_the_rows_of_read(source, tables, name):
    """A query over a table has the columns and rows of `kdissect.read`."""
    _check(source(name).toArrow(), tables[name].to_arrow())


@pytest.mark.parametrize("name", TABLES)
def test_tasks_give_the_rows_of_read(read_tasks, tables, name):
    """All tasks of a table together have its columns and rows."""
    _check(read_tasks(name), tables[name].to_arrow())


def test_options_are_those_of_the_command_line(read_tasks):
    """Payload, host and time have their effect."""
    hidden = read_tasks("records", payload="none")
    assert hidden["value"].null_count == hidden.num_rows > 0
    assert read_tasks("exchanges", host="10.9.9.9").num_rows == 0
    assert read_tasks("exchanges", until="2000-01-01").num_rows == 0


def test_internal_tables_have_the_schema_of_their_records(read_tasks, tmp_path):
    """Internal tables can be read by name."""
    commits = batch([(COMMIT_KEY, COMMIT), (COMMIT_KEY, None)])
    path = write_capture(tmp_path / "made.pcap", [fetch(1, "__consumer_offsets", [commits])])
    expected = kdissect.read(path).internal("OffsetCommit").to_arrow()
    assert expected.num_rows == 2
    _check(read_tasks("internal/OffsetCommit", path), expected)


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        ("exchange", {}, "no table 'exchange'"),
        ("apis/Fetsch", {}, "Fetsch"),
        ("exchanges", {"colour": "red"}, "no option 'colour'"),
        ("exchanges", {"to": "2000-01-01"}, "no option 'to'"),
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


@pytest.mark.spark
def test_an_error_of_the_data_source_reaches_the_caller_of_spark(source):
    """The error of a query has the reason, although another process raised it."""
    with pytest.raises(Exception, match="no table 'exchange'"):
        source("exchange").count()


def test_a_link_is_no_folder_of_ours(tmp_path: Path):
    """Another user may have made it, and it may lead to folders that are not to be removed."""
    kept = tmp_path / "home" / "kept"
    kept.mkdir(mode=0o700, parents=True)
    kept.parent.chmod(0o700)
    os.utime(kept, (0, 0))
    (tmp_path / f"kdissect-tables-{os.getuid()}").symlink_to(kept.parent)
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        table_set([str(CAPTURE)], Options(), str(tmp_path))
    assert kept.is_dir()


def test_tables_are_made_once_and_go_when_they_are_old(tmp_path: Path):
    """The same options share a set; old ones are removed."""

    def folder(**options: str) -> Path:
        tables = table_set([str(CAPTURE)], Options(**options), str(tmp_path))
        return Path(tables.exchanges.dataset.files[0]).parent.parent

    first = folder()
    assert folder() == first
    other = folder(payload="none")
    assert other != first
    past = os.stat(other).st_mtime - 2 * KEPT_S
    os.utime(other, (past, past))
    assert folder() == first
    assert not other.exists()
    assert os.listdir(first.parent) == [first.name]
    assert first.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("named", ["replaced/a.pcap", "replaced/*.pcap"])
def test_a_replaced_object_has_tables_of_its_own(
    named: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set of an object is not one of other bytes with the same name and size."""
    made: list[Path] = []
    monkeypatch.setattr("kdissect.datasource.dissect_here", lambda *_: made.append(Path()))
    monkeypatch.setattr("kdissect.datasource.open_tables", lambda _: None)
    data = (CAPTURES / "java_2_0_1.pcap").read_bytes()
    for content in (data, data[:-1] + b"x"):
        time.sleep(1.01 if made else 0)  # a store lists whole seconds
        store.put("replaced/a.pcap", content)
        for _ in range(2):
            table_set([store.url(named)], Options(), str(tmp_path))
    assert len(made) == 2
