"""The declaration of tables, and what of it travels with rows."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kdissect
from kdissect.pipeline.table_set import staging
from kdissect.pipeline.table_writer import ParquetSink
from kdissect.tables.schemas import (
    API_COLUMNS,
    BROKERS,
    DERIVED_TABLES,
    FIXED_TABLES,
    INTERNAL_COLUMNS,
    SINCE_COLUMNS,
    TOPICS,
    meaning_of,
    table_of,
    table_of_rows,
)
from tools.table_reference import unit_of

SCHEMAS = {
    **FIXED_TABLES,
    **DERIVED_TABLES,
    "apis": API_COLUMNS,
    "internal": INTERNAL_COLUMNS,
    "since": SINCE_COLUMNS,
}
TIME_NS = 1_700_000_000_123_456_789


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_column_has_a_meaning_of_its_own(name: str) -> None:
    """A clause that needs no other column: no "its", no "the same", no full stop."""
    for field in SCHEMAS[name]:
        meaning = meaning_of(field)
        assert meaning, field.name
        assert not meaning.endswith("."), meaning
        assert not meaning.startswith(("its ", "the same", "of the")), meaning
        ends = {"ms": "ms", "ns": "ns"}.get(field.name.rpartition("_")[2])
        assert ends in (None, unit_of(field)), field.name


def test_meanings_travel_in_parquet(tmp_path: Path) -> None:
    """From the builders of rows to the files."""
    tables = kdissect.read("captures/java_2_0_1.pcap")
    with staging(str(tmp_path)) as run:
        sink = ParquetSink(str(tmp_path), run, "task")
        for name in FIXED_TABLES:
            sink(name, tables[name].to_arrow())
        for file in sink.close():
            stored = pq.read_schema(tmp_path / file.path)
            schema = FIXED_TABLES[file.table]
            assert [field.name for field in stored] == schema.names
            assert list(map(meaning_of, stored)) == list(map(meaning_of, schema)), file.table
            assert not any(pa.types.is_dictionary(field.type) for field in stored)


def test_tables_of_columns() -> None:
    """NumPy arrays take the declared types, nulls and times; dictionaries stay."""
    columns = {
        "topic": pa.array(["a", "a"]).dictionary_encode(),
        "topic_id": [None, "x"],
        "first_time": (np.array([TIME_NS, 0]), np.array([True, False])),
        "source": pa.array(["Metadata", None]),
    }
    table = table_of(TOPICS, columns)
    assert pa.types.is_dictionary(table.schema.field("topic").type)
    assert table["first_time"].cast(pa.int64()).to_pylist() == [TIME_NS // 1000, None]
    assert meaning_of(table.schema.field("topic")) == "name of the topic"
    with pytest.raises(AssertionError, match="source"):
        table_of(TOPICS, {name: columns[name] for name in ("topic", "topic_id", "first_time")})


def test_tables_of_rows() -> None:
    """Times outside the years 1 to 9999 are null."""
    row = {"topic": "a", "topic_id": None, "source": "Fetch"}
    table = table_of_rows(TOPICS, [{**row, "first_time": time} for time in (TIME_NS, None, 10**21)])
    assert table.schema == TOPICS
    assert table["first_time"].cast(pa.int64()).to_pylist() == [TIME_NS // 1000, None, None]
    assert table_of_rows(BROKERS, []).schema == BROKERS
