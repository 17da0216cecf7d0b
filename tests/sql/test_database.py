"""Views are the tables; a query reads them and nothing else, in bounded memory."""

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

import kdissect
from kdissect.errors import EnvironmentFailed, QueryError
from kdissect.interrupts import interrupts
from kdissect.sql import Database, view_name


@pytest.mark.parametrize(
    ("table", "view"),
    [
        ("exchanges", "exchanges"),
        ("apis/Fetch", "api_fetch"),
        ("apis/LeaderAndIsr", "api_leader_and_isr"),
        ("internal/OffsetCommit", "internal_offset_commit"),
        ("internal/KRaftVersionRecord", "internal_k_raft_version_record"),
    ],
)
def test_names_of_views_are_in_snake_case(table: str, view: str) -> None:
    """CamelCase becomes snake_case as the fields' names do."""
    assert view_name(table) == view


def test_every_table_is_a_view(tables: kdissect.Tables) -> None:
    """All of a set, with the rows and the columns of the files."""
    shown = tables.sql("show tables").to_arrow()["name"].to_pylist()
    assert sorted(shown) == sorted(map(view_name, tables.names))
    with tables.database() as database:
        for name in tables.names:
            rows = database.query(f"from {view_name(name)}")
            assert rows.num_rows == tables[name].num_rows
            assert rows.schema.names == tables[name].schema.names


def test_tables_in_memory(tables: kdissect.Tables, librdkafka: kdissect.Tables) -> None:
    """What `read` gives answers as the files do."""
    query = (
        "select api_name, count(*) n, max(request_time) t from exchanges group by all order by 1"
    )
    assert librdkafka.sql(query).to_pylist() == tables.sql(query).to_pylist()
    assert librdkafka.sql("from api_fetch").num_rows == tables.api("Fetch").num_rows


WRITING = [
    "copy (select 1) to '{victim}'",
    "copy exchanges to '{free}'",
    "with x as (copy (select 1) to '{victim}') select 1",
    "select * from (with x as (copy (select 1) to '{victim}') select 1)",
    "explain analyze copy (select 1) to '{victim}'",
    "EXPLAIN /* ( */ ANALYZE copy (select 1) to '{victim}'",
    "explain (analyze) with x as (copy (select 1) to '{victim}') select 1",
    "/* select */ copy (select 1) to '{victim}'",
    "export database '{free}'",
    "attach '{free}' as other",
    "create table t as select 1",
    "create or replace view exchanges as select 1",
    "drop view exchanges",
    "insert into exchanges values (1)",
    "with x as (delete from topics) select 1",
    "select exists (with x as (insert into topics values (1)) select 1)",
    "select * from enable_profiling(save_location := '{free}')",
    "select * from enable_logging(storage := 'file', storage_path := '{free}')",
    "select * from query('copy (select 1) to ''{victim}''')",
    "pivot exchanges on status using count(*)",
]
READING = [
    "select * from read_text('/etc/hostname')",
    "from '/etc/hostname'",
    "from read_csv('/etc/*')",
    "from glob('/etc/*')",
    "select * from read_blob('{victim}')",
    "select * from duckdb_secrets()",
    "from json_execute_serialized_sql('[]')",
    "from query_table(['exchanges'])",
]
SETTINGS = [
    "set enable_external_access = true",
    "reset lock_configuration",
    "pragma enable_profiling",
    "install httpfs",
    "load httpfs",
    "call enable_logging()",
    "checkpoint",
    "use system",
    "prepare p as select 1",
]
NONE = ["", "  -- nothing", ";", "select 1; select 2", "explain explain select 1"]


@pytest.mark.parametrize("query", [*WRITING, *READING, *SETTINGS, *NONE])
def test_statements_that_do_not_only_read_are_refused(
    query: str, tables: kdissect.Tables, tmp_path: Path
) -> None:
    """Whatever does not only read the views is refused in one line, and nothing is touched."""
    victim = Path(tables.topics.dataset.files[0])
    before = victim.read_bytes()
    quoted = str(victim).replace("'", "''")
    with pytest.raises(QueryError) as refusal:
        tables.sql(query.format(victim=quoted, free=tmp_path / "free"))
    assert "\n" not in str(refusal.value)
    assert victim.read_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_variables_are_no_tables(tables: kdissect.Tables) -> None:
    """DuckDB would find Python's frames by name."""
    frame = pa.table({"a": [1]})
    with pytest.raises(QueryError, match="frame does not exist"):
        tables.sql("select * from frame")
    assert frame.num_rows == 1


@pytest.mark.parametrize(
    "query",
    [
        "from exchanges limit 3",
        "with a as (select 1 x) select * from a, range(2), unnest([1]) t(u)",
        "with recursive a(n) as (select 1 union all select n + 1 from a where n < 4) from a",
        "(select 1) union all (select 2) order by 1",
        "pivot exchanges on status in ('paired') using count(*) group by api_name",
        "select api_name, row_number() over (order by request_time) from exchanges qualify true",
        "describe exchanges",
        "summarize brokers",
        "show tables",
        "explain select 1",
        "-- words first\nexplain analyze select count(*) from records",
        "values (1), (2)",
        "select list_transform(topics, lambda t: upper(t)) from exchanges limit 1",
        "select api_name, f.request.max_bytes from exchanges join api_fetch f using (exchange_id)",
        "select 1;",
    ],
)
def test_every_form_of_reading_works(query: str, tables: kdissect.Tables) -> None:
    """Every form of reading works."""
    assert tables.sql(query).num_rows


def test_faults_in_the_middle(tables: kdissect.Tables) -> None:
    """A fault that comes after rows were drawn is the query's fault too."""
    query = "select if(range = 40_000_000, 'x', '1')::int from range(50_000_000)"
    with tables.database() as database:
        _, batches = database.stream(query)
        assert next(batches).num_rows
        with pytest.raises(QueryError, match="Could not convert"):
            list(batches)


def test_memory_is_bounded() -> None:
    """A large sort uses the disk and removes its files; a refused one has a clear error."""
    with Database({}, memory_limit="60MiB") as database:
        spill = Path(database._spill)
        _, batches = database.stream("select a from range(6000000) t(a) order by hash(a)")
        assert next(batches).num_rows
        assert list(spill.iterdir())
        assert sum(batch.num_rows for batch in batches) < 6_000_000
        with pytest.raises(EnvironmentFailed, match=r"Out of Memory.*memory limit"):
            database.query("select list('some longer text ' || a) from range(6000000) t(a)")
    assert not spill.exists()
    with pytest.raises(QueryError, match="memory limit much"):
        Database({}, memory_limit="much")


def test_many_results_stream() -> None:
    """A billion rows begin at once."""
    with Database({}) as database:
        _, batches = database.stream("from range(1000000000)")
        assert next(batches).num_rows < 100_000


def test_a_table_is_all_of_its_files(tmp_path: Path) -> None:
    """A table is all of its files, and of nothing else in the folder."""
    for number in range(3):
        pq.write_table(pa.table({"a": [number]}), tmp_path / f"part-{number}.parquet")
    listed = pads.dataset([str(tmp_path / f"part-{n}.parquet") for n in (0, 2)], format="parquet")
    with Database({"topics": listed}) as database:
        assert database.query("select a from topics order by a")["a"].to_pylist() == [0, 2]
        with pytest.raises(QueryError, match="file system operations are disabled"):
            database.query(f"from '{tmp_path}/part-1.parquet'")


@pytest.mark.parametrize(
    "error", [duckdb.InterruptException("INTERRUPT Error"), RuntimeError("Query interrupted")]
)
def test_interrupts_become_keyboard_interrupt(error: Exception) -> None:
    """DuckDB's interrupt errors become KeyboardInterrupt; other errors stay."""
    with pytest.raises(KeyboardInterrupt), interrupts():
        raise error
    with pytest.raises(RuntimeError, match="another"), interrupts():
        raise RuntimeError("another")
