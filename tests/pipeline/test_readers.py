"""Other programs read the tables: nothing of kdissect is needed, and the values are the same."""

import json
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest

import kdissect
from tests.conftest import CAPTURES
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


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("tables") / "set"
    read = kdissect.read(CAPTURES / "librdkafka.pcap")
    read.write(out)
    return out, read


def test_pyarrow_alone_reads_every_table(tables: tuple[Path, Any]) -> None:
    """PyArrow reads the files of a table set without kdissect, with the same counts."""
    out, read = tables
    done = run(sys.executable, "-c", READ, out, check=True)
    found = json.loads(done.stdout)
    some = {name: count for name, count in found.items() if count}
    assert some == {name: read[name].num_rows for name in read.names if read[name].num_rows}


def test_duckdb_sees_the_same_values(tables: tuple[Path, Any]) -> None:
    """Differences, dictionaries and levels of lists are read back as they were."""
    out, read = tables
    database = duckdb.connect()
    for name in read.names:
        expected = read[name].to_arrow()
        if expected.num_rows:
            database.register("memory", expected)
            written = f"from '{out}/{name}/*.parquet'"
            both = f"select count(*) from (({written}) except all from memory)"
            assert database.sql(both).fetchall() == [(0,)], name
            counted = database.sql(f"select count(*) from ({written})").fetchall()
            assert counted == [(expected.num_rows,)], name
