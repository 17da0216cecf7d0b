"""Other programs read the tables: nothing of kdissect is needed, and the values are the same."""

import json
import sys
from pathlib import Path

import duckdb
import pytest

from kdissect import Tables
from tests.processes import run

READ = """
import json, sys
from pathlib import Path
import pyarrow.parquet as pq
rows = {}
for file in Path(sys.argv[1]).rglob("*.parquet"):
    table = pq.read_table(file)
    table.validate(full=True)
    name = file.parent.relative_to(sys.argv[1]).as_posix()
    rows[name] = rows.get(name, 0) + table.num_rows
assert not any(name.startswith("kdissect") for name in sys.modules)
print(json.dumps(rows))
"""


def test_pyarrow_alone_reads_every_table(table_set: Path, librdkafka: Tables) -> None:
    """PyArrow reads the files of a table set without kdissect, with the same counts."""
    done = run(sys.executable, "-c", READ, table_set, check=True)
    found = json.loads(done.stdout)
    some = {name: count for name, count in found.items() if count}
    assert some == {
        name: librdkafka[name].num_rows for name in librdkafka.names if librdkafka[name].num_rows
    }


def test_duckdb_sees_the_same_values(
    table_set: Path, librdkafka: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Differences, dictionaries and levels of lists are read back as they were."""
    monkeypatch.chdir(table_set)  # its name would be a pattern
    database = duckdb.connect()
    for name in librdkafka.names:
        expected = librdkafka[name].to_arrow()
        if expected.num_rows:
            database.register("memory", expected)
            written = f"from '{name}/*.parquet'"
            both = f"select count(*) from (({written}) except all from memory)"
            assert database.sql(both).fetchall() == [(0,)], name
            counted = database.sql(f"select count(*) from ({written})").fetchall()
            assert counted == [(expected.num_rows,)], name
