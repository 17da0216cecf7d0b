"""The main path, in this process: scan, assemble, decode, analyse.

Rows go from one step to the next in memory. `spark` runs the same four functions as stages.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import SegmentBatch
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.analyse import analyse
from kdissect.pipeline.assemble import assemble, assembled
from kdissect.pipeline.decode import decode
from kdissect.pipeline.run_plan import RunPlan
from kdissect.pipeline.saved_state import StateFiles, event_pieces, merged
from kdissect.pipeline.scan import scan
from kdissect.pipeline.step_rows import Row, RowKind, Sink


def run(
    plan: RunPlan, sink: Sink, lanes: tuple[Sink, Sink] | None = None,
    files: StateFiles | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Dissect the captures of a plan, one split, bucket, slot and key of events at a time.

    Tables go to the sink. lanes: the sinks of rows that later captures may change, and of the
    stories over all events. files: where the state goes. Returns what `summed` does.
    """
    for_open, for_stories = lanes or (sink, sink)
    sources = plan.sources()
    buckets, slots, events = _KeyedRows(), _KeyedRows(), _KeyedRows()
    for split in range(plan.split_count):
        buckets.add(scan(plan, sources, split))
    for _, rows in buckets.drain():
        slots.add(assemble(plan, sources, rows, files))
    for number in range(len(plan.before.event_files) if plan.before else 0):
        events.add(earlier_events(plan, number))
    for slot, rows in slots.drain():
        target = for_open if slot == plan.open_slot else sink
        events.add(decode(plan, sources, rows, target, files))
    results: list[dict[str, Any]] = []
    for _, rows in events.drain():
        results += (json.loads(row.data) for row in rows if row.kind == RowKind.RESULT)
        packed = [row.data for row in rows if row.kind == RowKind.EVENTS]
        results += [analyse(packed, for_stories)] if packed else []
    return summed(results)


class _KeyedRows:
    """Rows between two steps, by key. Key 0 is always there: a run without rows has results too."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Row]] = defaultdict(list, {0: []})

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._rows[row.key].append(row)

    def drain(self) -> Iterator[tuple[int, list[Row]]]:
        """Each key with its rows in order; they are dropped here."""
        for key in sorted(self._rows):
            yield key, in_order(self._rows.pop(key))


def in_order(rows: list[Row]) -> list[Row]:
    """Rows of one key as a step expects them: by kind, then by order."""
    return sorted(rows, key=lambda row: (row.kind, row.order))


def earlier_events(plan: RunPlan, number: int) -> Iterator[Row]:
    """The events in file `number` of the state that the plan continues, by key of this run."""
    assert plan.before is not None
    for packed in event_pieces(plan.before.event_files[number], plan.event_key_count):
        yield Row(packed.key, RowKind.EVENTS, -1, packed.data)


def summed(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of all tasks as one: sums of `timings`, and `state` of a plan that keeps one."""
    timings: dict[str, float] = defaultdict(float)
    for result in results:
        for name, value in result["timings"].items():
            timings[name] += value
    return {
        "timings": dict(timings),
        "state": merged(result.get("state", {}) for result in results),
    }


def assemblies(plan: RunPlan) -> Iterator[tuple[SegmentBatch, Assembly, Sources]]:
    """The segments of each bucket, what they come to, and where its bytes are: no decoding."""
    sources = plan.sources()
    parts: dict[int, list[Row]] = defaultdict(list)
    for number in range(len(plan.splits)):
        for row in scan(plan, sources, number):
            if row.kind == RowKind.SEGMENTS:
                parts[row.key].append(row)
    for bucket in sorted(parts):
        batches = [SegmentBatch.from_bytes(row.data) for row in in_order(parts.pop(bucket))]
        batch, assembly, here = assembled(plan, sources, batches)
        yield batch, assembly, here
