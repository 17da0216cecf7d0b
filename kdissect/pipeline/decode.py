"""Decode: the exchanges of one slot to tables, and events for the stories of the whole capture."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from kdissect.capture.mapped_files import Sources
from kdissect.kafka.assembly import Anomaly, Assembly
from kdissect.pipeline import exchange_index
from kdissect.pipeline.captures import captures_table, cut_captures
from kdissect.pipeline.decoder import Decoder, Sink
from kdissect.pipeline.facts import (
    CaptureFacts,
    NamesUsed,
    brokers_table,
    topics_table,
    with_owners,
)
from kdissect.pipeline.run_plan import RunPlan
from kdissect.pipeline.saved_state import EVENT_FILES, StateFiles, run_state
from kdissect.pipeline.step_rows import Row, RowKind, unpacked_table
from kdissect.stories.events import Collector
from kdissect.tables.anomalies import AnomalyRow, anomalies_table

LATE_NAMES_LISTED = 20


def decode(
    plan: RunPlan,
    sources: Sources,
    rows: Iterable[Row],
    sink: Sink,
    files: StateFiles | None = None,
) -> Iterator[Row]:
    """All rows of one slot to tables; gives events, and last a RESULT that the driver sums up.

    files: where events go that no later capture changes.
    """
    began = time.perf_counter()
    slot = 0
    facts = CaptureFacts.from_bytes(plan.before.facts) if plan.before else CaptureFacts()
    used = NamesUsed()
    parts: dict[int, Assembly] = {}
    stats: list[dict[str, Any]] = []
    is_first = False
    byte_count = 0
    for row in rows:
        slot = row.key
        is_first = is_first or row.key == 0
        if row.kind == RowKind.FACTS:
            facts.merge(CaptureFacts.from_bytes(row.data))
        elif row.kind == RowKind.STATS:
            stats.append(json.loads(row.data))
        elif row.kind == RowKind.TABLE:
            name, table = unpacked_table(row.data)  # facts come before tables
            if name == "connections":
                used.add_users(table)
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
        state = run_state(plan, stats, facts)
        exceptions = [entry.get("exceptions", {}) for entry in stats]
        for name in ("late_packets", "carry_limits"):
            state[name] = sum(entry.get(name, 0) for entry in exceptions)
        state["late_names"] = _late_names(plan, facts, sink)
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
        yield Row(packed.key, RowKind.EVENTS, (slot << 20) + packed.number, packed.data)
    if files is not None and slot != plan.open_slot:
        used.merge(decoder.names_used)
        state["names_used"] = used.to_json()
        if settled:
            state["files"] = [*state.get("files", ()), files.write(EVENT_FILES, settled)]
    timings: defaultdict[str, float] = defaultdict(float)
    for entry in [*stats, {"timings": {"decode_s": time.perf_counter() - began,
                                       "decode_bytes": byte_count}}]:  # fmt: skip
        for name, value in entry.get("timings", {}).items():
            timings[name] += value
    result = json.dumps({"timings": timings, "state": state}).encode()
    yield Row(slot % plan.event_key_count, RowKind.RESULT, slot, result)


def _late_names(plan: RunPlan, facts: CaptureFacts, sink: Sink) -> int:
    """How many names this run knows that rows of earlier runs lack; an anomaly lists some."""
    if plan.before is None:
        return 0
    used = NamesUsed.from_json(json.loads(plan.before.names_used))
    names = used.late(CaptureFacts.from_bytes(plan.before.facts), facts)
    if names:
        listed = ", ".join(names[:LATE_NAMES_LISTED])
        detail = f"{len(names)} names became known that rows of earlier runs lack: {listed}"
        sink("anomalies", anomalies_table([AnomalyRow(Anomaly.LATE_NAMES, detail)]))
    return len(names)
