"""A run in this process: the same steps, rows handed from one to the next in memory."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from kdissect.pipeline.decode import Sink
from kdissect.pipeline.steps import Row, RunPlan, assemble_step, decode_step, scan_step


def run(plan: RunPlan, sink: Sink) -> dict[str, Any]:
    """All steps, one split, bucket and slot at a time; tables go to the sink."""
    sources = plan.sources()
    buckets: dict[int, list[Row]] = defaultdict(list)
    buckets[0] = []
    for number in range(len(plan.splits)):
        for row in scan_step(plan, sources, number):
            buckets[row.key].append(row)
    slots: dict[int, list[Row]] = defaultdict(list)
    slots[0] = []
    for bucket in sorted(buckets):
        for row in assemble_step(plan, sources, in_order(buckets.pop(bucket))):
            slots[row.key].append(row)
    timings: dict[str, float] = defaultdict(float)
    for slot in sorted(slots):
        result = decode_step(plan, sources, in_order(slots.pop(slot)), sink)
        for name, value in result["timings"].items():
            timings[name] += value
    return {"timings": dict(timings)}


def in_order(rows: list[Row]) -> list[Row]:
    """Rows of one key as a step expects them: by kind, then by order."""
    return sorted(rows, key=lambda row: (row.kind, row.order))
