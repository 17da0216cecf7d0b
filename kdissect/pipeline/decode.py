"""Decode and analyse: the last two steps.

`decode` turns the exchanges of one slot into tables and events. `analyse` builds the tables that
need all events of one key, such as a consumer group's history.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import chain

from kdissect.arrays import Ids, Indices
from kdissect.capture.mapped_files import Sources
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline import exchange_index
from kdissect.pipeline.learn import KnownNames, with_owners
from kdissect.pipeline.message_tables import TableOutput, write_tables
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import RunPlan
from kdissect.pipeline.record_tables import decode_records
from kdissect.pipeline.run_tables import RunSummary
from kdissect.pipeline.saved_state import NamesUsed, read_events, scram_users
from kdissect.pipeline.step_rows import STATE, STORY_ANOMALIES, TABLE_OF, RowKind, Sink, StepRow
from kdissect.stories.events import Collector, sorted_events, unpack
from kdissect.stories.fetch_messages import fetch_events
from kdissect.stories.fetch_sessions import fetch_sessions_table
from kdissect.stories.group_messages import group_events
from kdissect.stories.groups import group_events_table
from kdissect.stories.producer_messages import producer_events
from kdissect.stories.sequences import sequence_anomalies
from kdissect.stories.transactions import transactions_table
from kdissect.tables.arrow_arrays import unpacked
from kdissect.tables.message_chunk import FrameBuffer, MessageChunk, chunks_in_time, decode_messages
from kdissect.tables.topics import TopicNames

_EVENTS = (("groups", group_events), ("producers", producer_events), ("fetches", fetch_events))
_TABLES = (
    ("group_events", "groups", group_events_table),
    ("fetch_sessions", "fetches", fetch_sessions_table),
    ("transactions", "producers", transactions_table),
    (STORY_ANOMALIES, "producers", sequence_anomalies),
)


def decode(
    plan: RunPlan, known: KnownNames, sources: Sources, rows: Iterable[StepRow], sink: Sink
) -> Iterator[StepRow]:
    """Write all rows of one slot to tables; yields events.

    known: of the whole run. rows: all have the slot's number as their key, in the order of
    `RowKind`.
    """
    began = time.perf_counter()
    slot = 0
    used: NamesUsed = set()
    parts: list[Assembly] = []
    events, earlier = Collector(plan.event_key_count), Collector(plan.event_key_count)
    for row in rows:
        slot = row.key
        if row.kind == RowKind.TABLE:
            name, table = unpacked(row.data)
            if TABLE_OF.get(name, name) == "connections":
                used |= scram_users(table)
                table = with_owners(table, known.owners)
            sink(name, table)
        elif row.kind == RowKind.SAVED_EVENTS:
            earlier.add(*read_events(row))
        else:
            parts.append(row.data)
    assembly = exchange_index.concat(parts)
    parts.clear()
    sources = sources.carrying(assembly.carried.data)
    sizes = [assembly.exchanges[side]["size"] for side in exchange_index.SIDES]
    byte_count = sum(int(size[size > 0].sum()) for size in sizes)
    by_day = plan.options.partition_by is not None
    rows_of_chunks, ids = chunks_in_time(assembly.exchanges, by_day), plan.capture_ids
    chunks = decoded_chunks(assembly, sources, rows_of_chunks, ids, known.topics, plan.options)
    used |= write_chunks(chunks, TableOutput(plan.options, sink), events)
    for name, table in events.tables().items() if plan.keeps else ():
        sink(f"{STATE}/{name}", table)
    for number, (key, data) in enumerate(chain(events.packed(), earlier.packed())):
        yield StepRow(key, RowKind.EVENTS, (slot << 20) + number, data)
    timings = {"decode_s": time.perf_counter() - began, "decode_bytes": byte_count}
    yield RunSummary(timings=timings, names_used=used if plan.keeps else set()).row(slot)


def decoded_chunks(
    assembly: Assembly,
    sources: Sources,
    chunks: Iterable[Indices],
    capture_ids: Ids,
    names: TopicNames,
    options: Options,
) -> Iterator[MessageChunk]:
    """Decode exchanges chunk by chunk. chunks: rows. capture_ids: by source."""
    for rows in chunks:
        frames = FrameBuffer.gather(assembly, sources, rows)
        yield decode_messages(frames, capture_ids, names, options.limits.array_elements)


def write_chunks(
    chunks: Iterable[MessageChunk], output: TableOutput, events: Collector
) -> NamesUsed:
    """Write the tables and collect the events of chunks.

    Returns topics of these rows whose name or id no message has given so far.
    """
    used: NamesUsed = set()
    for chunk in chunks:
        known = chunk.topic_names.of_id
        used |= {("id", one) for one in chunk.marks.topics.ids if one not in known}
        of_day = output.of_day(chunk)
        write_tables(chunk, of_day)
        for name, events_of in _EVENTS:
            for table in events_of(chunk):
                events.add(name, table)
        decode_records(chunk, of_day, used, events)
    return used


def analyse(rows: Iterable[StepRow], sink: Sink) -> Iterator[StepRow]:
    """Write the tables built from all events of one key."""
    began = time.perf_counter()
    events = unpack([row.data for row in rows])
    of_kind = {name: sorted_events(table) for name, table in events.items()}
    for name, kind, rows_of in _TABLES:
        if of_kind[kind].num_rows:
            sink(name, rows_of(of_kind[kind]))
    yield RunSummary(timings={"analyse_s": time.perf_counter() - began}).row()
