"""SQL of facts about exchanges."""

from __future__ import annotations

import duckdb
import pytest

from kdissect.pipeline.facts import CaptureFacts, topics_table
from kdissect.sql.exchange_facts import topic_names

ID, OTHER = "rjTz1wHdRFOkxL3dMqJzQw", "pVvN9nqKQeK1x1Jq0B9i8A"
TIME_NS = 1_700_000_000_000_000_000


@pytest.mark.parametrize("first", ["new", "old"])
def test_a_topic_id_has_the_name_seen_first(first: str) -> None:
    """SQL and the pipeline choose alike if a topic id occurs with two names."""
    facts = CaptureFacts()
    for name in ("old", "new"):
        facts.add_topic(name, ID, TIME_NS + 1_000_000 * (name != first), "Metadata")
    facts.add_topic("alone", OTHER, TIME_NS, "Metadata")
    facts.add_topic("no id", "", TIME_NS, "Produce")
    topics = topics_table(facts)  # noqa: F841, DuckDB finds it by its name
    found = dict(duckdb.sql(topic_names()).fetchall())
    assert found[ID] == first
    assert found == facts.names_by_id()
