"""The main path in this process: scan, assemble, decode, analyse.

Rows pass from step to step in memory. `spark` runs the same four functions as stages.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import SegmentBatch
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.assemble import assemble, assembled
from kdissect.pipeline.decode import analyse, decode
from kdissect.pipeline.plan import RunPlan
from kdissect.pipeline.run_tables import RunSummary, write_run_tables
from kdissect.pipeline.saved_state import NamesUsed, earlier_events
from kdissect.pipeline.scan import scan
from kdissect.pipeline.step_rows import RUN, Row, RowKind, Sink
from kdissect.pipeline.table_writer import ParquetSink, StagedFile
from kdissect.step_log import logged_step


def run(plan: RunPlan, sink: Sink, for_stories: Sink | None = None) -> dict[str, Any]:
    """Dissect the captures of a plan: one split, bucket, slot and event key at a time.

    sink: receives tables. for_stories: receives those built from all events, if not `sink`. Returns
    the result of `summed`.
    """
    sources = plan.sources()
    buckets, slots, events = _KeyedRows(), _KeyedRows(), _KeyedRows()
    with logged_step("scan", splits=len(plan.splits), bytes=plan.byte_count):
        for number, unit in enumerate(plan.scan_units):
            buckets.add(scan(plan, sources, number, unit))
    slots.add(buckets.pop(RUN, []))
    with logged_step("assemble", buckets=len(buckets)):
        for rows in buckets.drain():
            slots.add(assemble(plan, sources, rows))
    summary = RunSummary.of(slots.pop(RUN, []))
    results = [write_run_tables(plan, summary, sink)]
    for number in range(len(plan.before.event_files) if plan.before else 0):
        events.add(earlier_events(plan, number))
    with logged_step("decode", slots=len(slots)):
        for rows in slots.drain():
            events.add(decode(plan, summary.facts, sources, rows, sink))
    with logged_step("analyse", keys=len(events)):
        for rows in events.drain():
            results += (json.loads(row.data) for row in rows if row.kind == RowKind.RESULT)
            packed = [row.data for row in rows if row.kind == RowKind.EVENTS]
            results += [analyse(packed, for_stories or sink)] if packed else []
    return summed(results)


def staged_run(plan: RunPlan, out: str, run_id: str) -> tuple[list[StagedFile], dict[str, Any]]:
    """Dissect the captures of a plan into files for the set at `out`: (these, result of `run`)."""
    sinks = [ParquetSink(out, run_id, "s00000")]
    if plan.keeps:
        sinks.append(ParquetSink(out, run_id, "e", is_final=False))
    result = run(plan, sinks[0], sinks[-1])
    return [file for sink in sinks for file in sink.close()], result


class _KeyedRows(defaultdict[int, list[Row]]):
    """Rows between two steps, by key."""

    def __init__(self) -> None:
        super().__init__(list)

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self[row.key].append(row)

    def drain(self) -> Iterator[list[Row]]:
        """Yield the rows of each key in the order that a step expects, and drop them."""
        for key in sorted(self):
            yield sorted(self.pop(key), key=lambda row: (row.kind, row.order))


def summed(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of all tasks: `timings` summed in seconds, `state` and `hashes` merged."""
    timings: dict[str, float] = defaultdict(float)
    state: dict[str, Any] = {}
    used: NamesUsed = set()
    for result in results:
        for name, value in result["timings"].items():
            timings[name] += value
        of_task = result.get("state", {})
        used |= {(kind, name) for kind, name in of_task.get("names_used", ())}
        state |= of_task
    return {
        "timings": dict(timings),
        "state": state | {"names_used": sorted(used)},
        "hashes": [one for result in results for one in result.get("hashes", ())],
    }


def assemblies(plan: RunPlan) -> Iterator[tuple[SegmentBatch, Assembly, Sources]]:
    """Yield (segments, assembly, sources) of each bucket, without decoding messages."""
    sources = plan.sources()
    parts = _KeyedRows()
    for number, split in enumerate(plan.splits):
        scanned = scan(plan, sources, number, split)
        parts.add(row for row in scanned if row.kind == RowKind.SEGMENTS)
    for rows in parts.drain():
        yield assembled(plan, sources, [SegmentBatch.from_bytes(row.data) for row in rows])
