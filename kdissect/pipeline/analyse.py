"""Analyse: all events of one key to the tables that tell stories."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from kdissect.pipeline.decoder import Sink
from kdissect.pipeline.run_plan import RunPlan
from kdissect.pipeline.snapshots import write_joined
from kdissect.stories.analyse import analyse


def analyse_step(
    plan: RunPlan, events: list[bytes], pieces: Iterable[bytes], sink: Sink
) -> dict[str, Any]:
    """All events of one key, and its pieces in their order, to tables; returns what the driver
    sums up."""
    began = time.perf_counter()
    for name, table in analyse(events):
        sink(name, table)
    write_joined(pieces, plan.options, sink)
    return {"timings": {"analyse_s": time.perf_counter() - began}}
