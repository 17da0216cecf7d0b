"""Analyse: build the tables that need all events of one key, such as a consumer group's history."""

from __future__ import annotations

import time
from typing import Any

from kdissect.pipeline.step_rows import Sink
from kdissect.stories.analyse import analyse as read_stories


def analyse(events: list[bytes], sink: Sink) -> dict[str, Any]:
    """Write the tables built from all events of one key; returns the timings in seconds."""
    began = time.perf_counter()
    for name, table in read_stories(events):
        sink(name, table)
    return {"timings": {"analyse_s": time.perf_counter() - began}}
