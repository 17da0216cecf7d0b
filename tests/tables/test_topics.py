"""Names of topic ids."""

import duckdb
import pytest

from kdissect.tables.topics import SeenTopics, names_sql

ID, OTHER = "rjTz1wHdRFOkxL3dMqJzQw", "pVvN9nqKQeK1x1Jq0B9i8A"
TIME_NS = 1_700_000_000_000_000_000


@pytest.mark.parametrize("first", ["new", "old"])
def test_a_topic_id_has_the_name_seen_first(first: str) -> None:
    """SQL and the pipeline choose alike if a topic id occurs with two names."""
    seen = SeenTopics()
    for name in ("old", "new"):
        seen.add(name, ID, TIME_NS + 1_000_000 * (name != first), "Metadata")
    seen.add("alone", OTHER, TIME_NS, "Metadata")
    seen.add("no id", "", TIME_NS, "Produce")
    topics = seen.table()  # noqa: F841, DuckDB finds it by its name
    found = dict(duckdb.sql(names_sql()).fetchall())
    assert found[ID] == first
    assert found == seen.names().of_id


def test_a_recreated_topic_has_no_single_id() -> None:
    """A name with two ids gets none; an id without a name stays as it is."""
    seen = SeenTopics()
    for name, topic_id in (("again", ID), ("again", OTHER), ("once", "pVvN9nqKQeK1x1Jq0B9i8B")):
        seen.add(name, topic_id, TIME_NS, "Metadata")
    names = seen.names()
    assert "again" not in names.id_of
    assert names.id_of["once"] == "pVvN9nqKQeK1x1Jq0B9i8B"
    assert [names.name(ID), names.name("unknown")] == ["again", "unknown"]
