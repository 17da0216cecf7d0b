"""Analyse: build the tables that need all events of one key, such as a consumer group's history."""

from __future__ import annotations

import time
from typing import Any

from kdissect.pipeline.step_rows import Sink
from kdissect.stories.events import in_order, unpack
from kdissect.stories.fetch_sessions import fetch_sessions_table
from kdissect.stories.groups import group_events_table
from kdissect.stories.sequences import sequence_anomalies
from kdissect.stories.transactions import transactions_table

_TABLES = (
    ("group_events", "groups", group_events_table),
    ("fetch_sessions", "fetches", fetch_sessions_table),
    ("transactions", "producers", transactions_table),
    ("anomalies", "producers", sequence_anomalies),
)


def analyse(events: list[bytes], sink: Sink) -> dict[str, Any]:
    """Write the tables built from all events of one key; returns the timings in seconds."""
    began = time.perf_counter()
    of_kind = {name: in_order(table) for name, table in unpack(events).items()}
    for name, kind, rows_of in _TABLES:
        if of_kind[kind].num_rows:
            sink(name, rows_of(of_kind[kind]))
    return {"timings": {"analyse_s": time.perf_counter() - began}}
