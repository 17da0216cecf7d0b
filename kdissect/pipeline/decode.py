"""Decode: the exchanges of one slot to tables, and events for the stories of the whole capture."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from kdissect.capture.mapped_files import Sources
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline import exchange_index, kept
from kdissect.pipeline.captures import captures_table, cut_captures
from kdissect.pipeline.decoder import Decoder, Sink
from kdissect.pipeline.facts import (
    Facts,
    brokers_table,
    topics_table,
    with_owners,
)
from kdissect.pipeline.late import Late
from kdissect.pipeline.run_plan import RunPlan
from kdissect.pipeline.step_rows import Kind, Row, unpacked_table
from kdissect.stories.events import Collector


def decode_step(
    plan: RunPlan,
    sources: Sources,
    rows: Iterable[Row],
    sink: Sink,
    files: kept.StateFiles | None = None,
) -> Iterator[Row]:
    """All rows of one slot to tables; gives events, and last a RESULT that the driver sums up.

    files: where events go that no later capture changes.
    """
    began = time.perf_counter()
    slot = 0
    facts = Facts.from_bytes(plan.before.facts) if plan.before else Facts()
    late = Late()
    parts: dict[int, Assembly] = {}
    stats: list[dict[str, Any]] = []
    is_first = False
    byte_count = 0
    for row in rows:
        slot = row.key
        is_first = is_first or row.key == 0
        if row.kind == Kind.FACTS:
            facts.merge(Facts.from_bytes(row.data))
        elif row.kind == Kind.STATS:
            stats.append(json.loads(row.data))
        elif row.kind == Kind.TABLE:
            name, table = unpacked_table(row.data)  # facts come before tables
            if name == "connections":
                late.add_users(table)
                table = with_owners(table, facts)
            sink(name, table)
        else:
            parts[row.order] = exchange_index.from_bytes(row.data)
    state: dict[str, Any] = {}
    if is_first:
        sink("topics", topics_table(facts))
        sink("brokers", brokers_table(facts))
        sink("captures", captures_table(plan, stats))
        sink("anomalies", cut_captures(plan))
        state = kept.gathered(plan, stats, facts)
    assembly = exchange_index.concat([parts[order] for order in sorted(parts)])
    if len(assembly.carried.data):
        sources = sources.carrying(assembly.carried.data)
    del parts
    for side in exchange_index.SIDES:
        column = assembly.exchanges[side]
        byte_count += int(column["size"][column["size"] > 0].sum())
    events = Collector(plan.event_key_count)
    decoder = Decoder(sources, list(plan.capture_ids), facts, plan.options, sink, events)
    decoder.run(assembly)
    settled = []
    for packed in events.packed():
        if files is not None and slot != plan.open_slot:
            settled.append(packed.data)
        yield Row(packed.key, Kind.EVENTS, (slot << 20) + packed.number, packed.data)
    for fragment in events.fragments():
        state["reason"] = "batches of snapshots lie in several pieces"
        yield Row(fragment.key, Kind.PIECES, fragment.number, fragment.data)
    if files is not None and slot != plan.open_slot:
        late.merge(decoder.late)
        state |= late.to_json()
        if settled:
            state["files"] = [*state.get("files", ()), files.write(kept.EVENT_FILES, settled)]
    timings: defaultdict[str, float] = defaultdict(float)
    for entry in [*stats, {"timings": {"decode_s": time.perf_counter() - began,
                                       "decode_bytes": byte_count}}]:  # fmt: skip
        for name, value in entry.get("timings", {}).items():
            timings[name] += value
    result = json.dumps({"timings": timings, "state": state}).encode()
    yield Row(slot % plan.event_key_count, Kind.RESULT, slot, result)
