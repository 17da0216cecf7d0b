"""A process that read a capture ends as it should: no Arrow thread needs Python while it ends.

Arrow's worker threads may release memory after the call that used it has returned. Memory that
belongs to Python needs the GIL for that, which aborts a process whose interpreter is ending.
"""

import ast
import gc
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import kdissect
from kdissect.tables.arrow_arrays import owned

PACKAGE = Path(kdissect.__file__).parent


@pytest.mark.parametrize("travel", [lambda tables: tables, lambda t: pickle.loads(pickle.dumps(t))])
def test_rows_in_memory_belong_to_arrow(
    captures: Path, travel: Callable[[kdissect.Tables], kdissect.Tables]
) -> None:
    """Arrow's own memory pool has the tables, also after pickling."""
    gc.collect()  # what earlier tests left
    before = pa.total_allocated_bytes()
    tables = travel(kdissect.read(captures / "librdkafka.pcap"))
    rows = [tables[name].to_arrow() for name in tables.names]
    held = sum(table.get_total_buffer_size() for table in rows)
    assert held > 1 << 20
    assert pa.total_allocated_bytes() - before >= held


def test_an_owned_table_is_the_same_rows() -> None:
    """Chunks stay; a slice does not keep the rows around it."""
    numbers = np.arange(100_000)
    tables = [
        pa.table({"number": part, "names": pa.array([[str(n % 7)] * (n % 3) for n in part])})
        for part in (numbers, numbers[:10])
    ]
    table = pa.concat_tables([tables[0].slice(50_000, 100), tables[1]])
    copy = owned(table)
    assert copy.equals(table)
    assert [len(chunk) for chunk in copy["names"].chunks] == [100, 10]
    assert copy.get_total_buffer_size() < 10_000 < table.get_total_buffer_size()
    assert owned(table.schema.empty_table()).equals(table.schema.empty_table())


def test_rows_of_numpy_are_grouped_in_the_calling_thread() -> None:
    """Steps keep their rows in numpy's memory, where `group_by` and `join` would use threads."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                if node.func.attr == "group_by" or "join_type" in given:
                    threads = given.get("use_threads")
                    is_off = isinstance(threads, ast.Constant) and threads.value is False
                    found.append((f"{path.name}:{node.lineno}", is_off))
    assert found
    assert [place for place, is_off in found if not is_off] == []
