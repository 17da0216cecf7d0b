"""Builds the tables that need all events of a key."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from kdissect.stories.events import unpack
from kdissect.stories.fetch_sessions import fetch_sessions_table
from kdissect.stories.groups import group_events_table
from kdissect.stories.sequences import sequence_anomalies
from kdissect.stories.transactions import in_order, transactions_table


def analyse(parts: list[bytes]) -> Iterator[tuple[str, pa.Table]]:
    """Yield (table name, rows) from packed events; all events of a key must be present."""
    events = unpack(parts)
    groups = in_order(events["groups"])
    if groups.num_rows:
        yield "group_events", group_events_table(groups)
    fetches = in_order(events["fetches"])
    if fetches.num_rows:
        yield "fetch_sessions", fetch_sessions_table(fetches)
    producers = in_order(events["producers"])
    if producers.num_rows:
        yield "transactions", transactions_table(producers)
        yield "anomalies", sequence_anomalies(producers)
