"""Analyse: all events of one key to the tables that tell stories."""

from __future__ import annotations

import time
from typing import Any

from kdissect.pipeline.step_rows import Sink
from kdissect.stories.analyse import analyse as read_stories


def analyse(events: list[bytes], sink: Sink) -> dict[str, Any]:
    """Write the tables that all events of one key make; returns the timings."""
    began = time.perf_counter()
    for name, table in read_stories(events):
        sink(name, table)
    return {"timings": {"analyse_s": time.perf_counter() - began}}
