"""The main path in this process: scan, assemble, decode, analyse.

Rows pass from step to step in memory. `spark` runs the same four functions as stages.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import SegmentBatch
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline.assemble import assemble, assembled
from kdissect.pipeline.decode import analyse, decode
from kdissect.pipeline.plan import RunPlan
from kdissect.pipeline.run_tables import RunSummary, write_run_tables
from kdissect.pipeline.saved_state import saved_events
from kdissect.pipeline.scan import scan
from kdissect.pipeline.step_rows import RUN, RowKind, Sink, StepRow
from kdissect.pipeline.table_writer import ParquetSink
from kdissect.step_log import logged_step


def run(plan: RunPlan, sink: Sink) -> RunSummary:
    """Dissect the captures of a plan: one split, bucket, slot and event key at a time."""
    sources, summary = plan.sources(), RunSummary()
    buckets, slots, events = (_KeyedRows(summary) for _ in range(3))
    with logged_step("scan", splits=len(plan.splits), bytes=plan.byte_count):
        buckets.add(scan(plan, sources, plan.scan_rows()))
    with logged_step("assemble", buckets=len(buckets)):
        for rows in buckets.drain():
            slots.add(assemble(plan, sources, rows))
    write_run_tables(plan, summary, sink)
    slots.add(saved_events(plan))
    known = summary.facts.known_names()
    with logged_step("decode", slots=len(slots)):
        for rows in slots.drain():
            events.add(decode(plan, known, sources, rows, sink))
    with logged_step("analyse", keys=len(events)):
        for rows in events.drain():
            events.add(analyse(rows, sink))
    return summary


def staged_run(plan: RunPlan, out: str, run_id: str) -> RunSummary:
    """Dissect the captures of a plan into files for the set at `out`."""
    sink = ParquetSink(out, run_id, "s00000")
    summary = run(plan, sink)
    summary.files = sink.close()
    return summary


class _KeyedRows(defaultdict[int, list[StepRow]]):
    """Rows between two steps, by key."""

    def __init__(self, summary: RunSummary) -> None:
        """summary: gets the rows with the key RUN."""
        super().__init__(list)
        self._summary = summary

    def add(self, rows: Iterable[StepRow]) -> None:
        for row in rows:
            if row.key == RUN:
                self._summary.add(row)
            else:
                self[row.key].append(row)

    def drain(self) -> Iterator[list[StepRow]]:
        """Yield the rows of each key in the order that a step expects, and drop them."""
        for key in sorted(self):
            yield sorted(self.pop(key), key=lambda row: (row.kind, row.order))


def assemblies(plan: RunPlan) -> Iterator[tuple[SegmentBatch, Assembly, Sources]]:
    """Yield (segments, assembly, sources) of each bucket, without decoding messages."""
    sources = plan.sources()
    parts = _KeyedRows(RunSummary())
    units = StepRow(0, RowKind.UNITS, 0, pickle.dumps([*enumerate(plan.splits)]))
    parts.add(row for row in scan(plan, sources, [units]) if row.kind == RowKind.SEGMENTS)
    for rows in parts.drain():
        yield assembled(plan, sources, [row.data for row in rows])
