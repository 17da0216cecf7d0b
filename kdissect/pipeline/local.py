"""A run in this process: the same steps, rows handed from one to the next in memory."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import SegmentBatch
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.analyse import analyse_step
from kdissect.pipeline.assemble import assemble_step, assembled
from kdissect.pipeline.decode import decode_step
from kdissect.pipeline.decoder import Sink
from kdissect.pipeline.run_plan import RunPlan
from kdissect.pipeline.saved_state import StateFiles, event_pieces, merged
from kdissect.pipeline.scan import scan_step
from kdissect.pipeline.step_rows import Row, RowKind


def run(
    plan: RunPlan, sink: Sink, lanes: tuple[Sink, Sink] | None = None,
    files: StateFiles | None = None,
) -> dict[str, Any]:  # fmt: skip
    """All steps, one split, bucket and slot at a time; tables go to the sink.

    lanes: where rows that later captures may change go, and the stories over all events. files:
    where the state goes. The result has `timings`, and `state` of a plan that keeps one.
    """
    for_open, for_stories = lanes or (sink, sink)
    sources = plan.sources()
    buckets: dict[int, list[Row]] = defaultdict(list)
    buckets[0] = []
    for number in range(plan.split_count):
        for row in scan_step(plan, sources, number):
            buckets[row.key].append(row)
    slots: dict[int, list[Row]] = defaultdict(list)
    slots[0] = []
    for bucket in sorted(buckets):
        for row in assemble_step(plan, sources, in_order(buckets.pop(bucket)), files):
            slots[row.key].append(row)
    timings: dict[str, float] = defaultdict(float)
    states: list[dict[str, Any]] = []

    def count(result: dict[str, Any]) -> None:
        for name, value in result["timings"].items():
            timings[name] += value
        states.append(result.get("state", {}))

    events: dict[int, list[Row]] = defaultdict(list)
    for path in plan.before.event_files if plan.before else ():
        for packed in event_pieces(path, plan.event_key_count):
            events[packed.key].append(Row(packed.key, RowKind.EVENTS, -1, packed.data))
    for slot in sorted(slots):
        target = for_open if slot == plan.open_slot else sink
        for row in decode_step(plan, sources, in_order(slots.pop(slot)), target, files):
            if row.kind == RowKind.RESULT:
                count(json.loads(row.data))
            else:
                events[row.key].append(row)
    for key in sorted(events):
        count(analyse_all(events.pop(key), for_stories))
    return {"timings": dict(timings), "state": merged(states)}


def assemblies(plan: RunPlan) -> Iterator[tuple[SegmentBatch, Assembly, Sources]]:
    """The segments of each bucket, what they come to, and where its bytes are: no decoding."""
    sources = plan.sources()
    parts: dict[int, list[Row]] = defaultdict(list)
    for number in range(len(plan.splits)):
        for row in scan_step(plan, sources, number):
            if row.kind == RowKind.SEGMENTS:
                parts[row.key].append(row)
    for bucket in sorted(parts):
        batches = [SegmentBatch.from_bytes(row.data) for row in in_order(parts.pop(bucket))]
        batch, assembly, here = assembled(plan, sources, batches)
        yield batch, assembly, here


def analyse_all(rows: list[Row], sink: Sink) -> dict[str, Any]:
    """All rows of one key of events, in any order."""
    return analyse_step([row.data for row in in_order(rows)], sink)


def in_order(rows: list[Row]) -> list[Row]:
    """Rows of one key as a step expects them: by kind, then by order."""
    return sorted(rows, key=lambda row: (row.kind, row.order))
