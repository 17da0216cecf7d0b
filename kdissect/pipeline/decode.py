"""Decode: turn the exchanges of one slot into tables, and into events for the analyse step."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.capture.mapped_files import Sources
from kdissect.kafka.assembly import Anomaly, Assembly
from kdissect.pipeline import exchange_index
from kdissect.pipeline.captures import captures_table, cut_captures
from kdissect.pipeline.clients import with_owners
from kdissect.pipeline.cluster import Cluster, NamesUsed
from kdissect.pipeline.frame_buffer import FrameBuffer
from kdissect.pipeline.message_anomalies import TableOutput, write_message_anomalies
from kdissect.pipeline.message_chunks import MessageChunk, decode_messages, iter_chunks
from kdissect.pipeline.message_tables import write_tables
from kdissect.pipeline.record_tables import decode_records
from kdissect.pipeline.run_plan import RunPlan
from kdissect.pipeline.saved_state import (
    EVENT_FILES,
    StateFiles,
    continued_connections,
    run_state,
)
from kdissect.pipeline.step_rows import (
    TABLE_OF,
    Row,
    RowKind,
    Sink,
    unpacked_table,
)
from kdissect.protocol.model import REQUEST
from kdissect.stories.events import Collector
from kdissect.stories.fetch_messages import fetch_events
from kdissect.stories.group_messages import group_events
from kdissect.stories.messages import Messages
from kdissect.stories.producer_messages import producer_events
from kdissect.tables.anomalies import AnomalyRow, anomalies_table
from kdissect.tables.connections import broker_texts
from kdissect.tables.topics import TopicNames

LATE_NAMES_LISTED = 20
_EVENTS = (("groups", group_events), ("producers", producer_events), ("fetches", fetch_events))


def decode(
    plan: RunPlan,
    sources: Sources,
    rows: Iterable[Row],
    sink: Sink,
    files: StateFiles | None = None,
) -> Iterator[Row]:
    """Write all rows of one slot to tables; yields events, and last a RESULT for the driver.

    rows: all have the slot's number as their key, in the order of `RowKind`. Slot 0 also writes the
    tables of the whole run. files: receives the events.
    """
    began = time.perf_counter()
    slot = _read_slot(plan, rows, sink)
    used = slot.used
    state = _write_run_tables(plan, slot, sink) if slot.is_first else {}
    assembly = slot.take_assembly()
    sources = sources.carrying(assembly.carried.data)
    sizes = [assembly.exchanges[side]["size"] for side in exchange_index.SIDES]
    byte_count = sum(int(size[size > 0].sum()) for size in sizes)
    events = Collector(plan.event_key_count)
    output = TableOutput(assembly, list(plan.capture_ids), plan.options, sink)
    chunks = iter_chunks(assembly.exchanges, plan.options.chunk_bytes)
    names = slot.cluster.topics.names()
    used.merge(decode_exchanges(output, sources, chunks, names, events))
    kept = []
    for packed in events.packed():
        kept.append(packed.data)
        yield Row(packed.key, RowKind.EVENTS, (slot.number << 20) + packed.number, packed.data)
    if files is not None:
        state["names_used"] = used.to_json()
        if kept:
            state["files"] = [*state.get("files", ()), files.write(EVENT_FILES, kept)]
    timings: defaultdict[str, float] = defaultdict(float)
    for entry in [*slot.stats, {"timings": {"decode_s": time.perf_counter() - began,
                                            "decode_bytes": byte_count}}]:  # fmt: skip
        for name, value in entry.get("timings", {}).items():
            timings[name] += value
    result = json.dumps({"timings": timings, "state": state}).encode()
    yield Row(slot.number % plan.event_key_count, RowKind.RESULT, slot.number, result)


@dataclass(slots=True)
class _SlotRows:
    """The rows of a slot. is_first: it writes the tables of the whole run, too."""

    cluster: Cluster
    number: int = 0
    is_first: bool = False
    used: NamesUsed = field(default_factory=NamesUsed)
    stats: list[dict[str, Any]] = field(default_factory=list)
    parts: dict[int, Assembly] = field(default_factory=dict)
    continued: dict[str, list[pa.Table]] = field(default_factory=dict)

    def take_assembly(self) -> Assembly:
        """Return all parts as one, and forget them."""
        parts, self.parts = self.parts, {}
        return exchange_index.concat([parts[order] for order in sorted(parts)])


def _read_slot(plan: RunPlan, rows: Iterable[Row], sink: Sink) -> _SlotRows:
    """Read the rows of a slot; those of tables go to `sink`."""
    slot = _SlotRows(Cluster.from_bytes(plan.before.facts) if plan.before else Cluster())
    for row in rows:
        slot.number = row.key
        slot.is_first = slot.is_first or row.key == 0
        if row.kind == RowKind.FACTS:
            slot.cluster.merge(Cluster.from_bytes(row.data))
        elif row.kind == RowKind.STATS:
            slot.stats.append(json.loads(row.data))
        elif row.kind == RowKind.TABLE:
            name, table = unpacked_table(row.data)
            if TABLE_OF.get(name, name) == "connections":
                slot.used.add_users(table)
                table = with_owners(table, slot.cluster.owners)
            if name in TABLE_OF:
                slot.continued.setdefault(name, []).append(table)
            else:
                sink(name, table)
        else:
            slot.parts[row.order] = exchange_index.from_bytes(row.data)
    return slot


def _write_run_tables(plan: RunPlan, slot: _SlotRows, sink: Sink) -> dict[str, Any]:
    """Write the tables of the whole run; returns its state and counts for the manifest."""
    sink("topics", slot.cluster.topics.table())
    sink("brokers", slot.cluster.brokers.table())
    sink("captures", captures_table(plan, slot.stats))
    sink("anomalies", cut_captures(plan))
    for name, table in continued_connections(plan, slot.continued):
        sink(name, table)
    state = run_state(slot.stats, slot.cluster)
    state["counts"]["late_names"] = _late_names(plan, slot.cluster, sink)
    return state


def decode_exchanges(
    output: TableOutput,
    sources: Sources,
    chunks: Iterable[npt.NDArray[np.int64]],
    names: TopicNames,
    events: Collector,
) -> NamesUsed:
    """Decode the exchanges chunk by chunk into tables and events.

    Returns topics of these rows whose name or id no message has given so far.
    """
    used = NamesUsed()
    brokers = broker_texts(output.assembly.endpoints, output.assembly.connections)
    elements_max = output.options.limits.array_elements
    for rows in chunks:
        frames = FrameBuffer.gather(output.assembly, sources, rows)
        chunk = decode_messages(frames, names, elements_max)
        used.ids.update(set(chunk.marks.topics.ids).difference(names.of_id))
        write_message_anomalies(chunk, output)
        write_tables(chunk, output)
        messages = _messages(chunk, output, names, brokers)
        for name, events_of in _EVENTS:
            for table in events_of(messages):
                events.add(name, table)
        decode_records(chunk, output, used, messages, events)
    return used


def _messages(
    chunk: MessageChunk, output: TableOutput, names: TopicNames, brokers: pa.Array
) -> Messages:
    """A chunk in the form that the stories take."""
    exchanges = chunk.frames.exchanges
    captures = np.array([*output.capture_ids, 0], np.int64)
    return Messages(
        exchanges=exchanges,
        connection_id=output.connection_ids(exchanges),
        capture_id=captures[exchanges["request"]["source"]],
        request_start=chunk.frames.start[:, REQUEST],
        client_id=chunk.client_ids,
        broker=brokers.take(pa.array(exchanges["connection"])),
        decoded={key: (one.rows, one.columns) for key, one in chunk.decoded.items()},
        marks=chunk.marks,
        topic_names=names,
    )


def _late_names(plan: RunPlan, cluster: Cluster, sink: Sink) -> int:
    """Return how many names this run knows that rows of earlier runs lack; an anomaly lists some of
    them."""
    if plan.before is None:
        return 0
    used = NamesUsed.from_json(json.loads(plan.before.names_used))
    names = used.late(Cluster.from_bytes(plan.before.facts), cluster)
    if names:
        listed = ", ".join(names[:LATE_NAMES_LISTED])
        detail = f"{len(names)} names became known that rows of earlier runs lack: {listed}"
        sink("anomalies", anomalies_table([AnomalyRow(Anomaly.LATE_NAMES, detail)]))
    return len(names)
