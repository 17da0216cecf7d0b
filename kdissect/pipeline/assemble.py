"""Assemble: the segments of one bucket to exchanges, keyed by the slot that decodes them."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import gather_ranges, take
from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import SegmentBatch
from kdissect.capture.spool import SpooledBytes
from kdissect.kafka.assemble import assemble as assemble_segments
from kdissect.kafka.assemble import paired_frames
from kdissect.kafka.assembly import CARRIED, Anomaly, Assembly, Carried
from kdissect.pipeline import exchange_index
from kdissect.pipeline.facts import Learnt, learn
from kdissect.pipeline.filters import anomalies_within, connections_within, exchanges_within, follow
from kdissect.pipeline.response_versions import infer
from kdissect.pipeline.run_plan import RunPlan
from kdissect.pipeline.saved_state import (
    StateFiles,
    add_earlier_facts,
    exceptions_of,
    keep_facts,
    requests_seen,
    write_connections,
)
from kdissect.pipeline.segment_buffer import (
    PART_ROWS,
    ExchangePart,
    Gathered,
    at_hand,
    packed_parts,
    parts,
)
from kdissect.pipeline.step_rows import ROW_BYTES_MAX, Row, RowKind, packed_table, sliced
from kdissect.resume.carry import AppendedWindow, CarriedBytes, ConnectionCarry
from kdissect.resume.completion import SetRun
from kdissect.resume.connection_state import SET_LIMITS, ConnectionState, unpack_states
from kdissect.tables.anomalies import (
    AnomalyRow,
    anomalies_table,
    in_parts,
    stream_anomalies,
)
from kdissect.tables.arrow_arrays import binaries
from kdissect.tables.connections import connections_table
from kdissect.tables.redaction import SECRET_APIS, TEXT


def assembled(
    plan: RunPlan, sources: Sources, batches: list[SegmentBatch]
) -> tuple[SegmentBatch, Assembly, Sources]:
    """The segments of one bucket, what they come to, and the bytes of that."""
    limits = plan.options.limits
    batch = follow(SegmentBatch.concat(batches), limits.connections).batch
    key_logs = plan.key_logs(sources)
    sources = at_hand(sources, batch.segments)
    assembly = assemble_segments(batch, sources, plan.options.stream_options, key_logs)
    if len(assembly.carried.data):
        sources = sources.carrying(assembly.carried.data)
    return batch, assembly, sources


def assemble(
    plan: RunPlan, sources: Sources, rows: Iterable[Row], files: StateFiles | None = None
) -> Iterator[Row]:
    """All rows of one bucket, in order, to rows keyed by slot; files: where the state goes."""
    began = time.perf_counter()
    options = plan.options
    # payload that comes along is in the order of the segments
    gathered = Gathered(keep_order=sources.is_far)
    before: list[bytes] = []
    bucket = 0
    payload = SpooledBytes()
    for row in rows:
        bucket = row.key
        if row.kind == RowKind.SEGMENTS:
            gathered.add(row.data)
        elif row.kind == RowKind.PAYLOAD:
            payload.write(row.data)
        elif row.kind == RowKind.STATES:
            before.append(row.data)
        else:
            yield row._replace(key=row.order % plan.slot_count if row.kind == RowKind.TABLE else 0)
    batch, scratch = gathered.batch()
    del gathered
    byte_count = int(batch.segments["captured"].sum())
    reason = None
    if plan.keeps and (plan.before or _fits_memory(plan, batch)):
        yield from _set_rows(plan, sources, batch, before, bucket, files, began)
        return
    if plan.keeps:
        reason = TOO_MUCH
    if sources.is_far:
        sources = sources.holding([batch.segments], payload.data())
    followed = follow(batch, options.limits.connections)
    given_up, given_up_pairs = followed.given_up, followed.pair_count
    batches = [followed.batch]
    del batch, followed
    key_logs = plan.key_logs(sources)
    sources = at_hand(sources, batches[0].segments)
    paired = paired_frames(batches, sources, plan.options.stream_options, key_logs, scratch)
    if len(paired.carried.data):
        sources = sources.carrying(paired.carried.data)
    shown = paired.anomalous()
    has_times = (options.time_from_ns, options.time_to_ns) != (None, None)
    with_exchange = np.full(len(shown.anomalies), not has_times)

    def pack(assembly: Assembly, learnt: Learnt) -> ExchangePart:
        within = exchanges_within(assembly.exchanges, options.time_from_ns, options.time_to_ns)
        if not within.all():
            assembly = replace(assembly, exchanges=assembly.exchanges[within])
        packed = list(packed_parts(assembly, _slots(plan, assembly), ROW_BYTES_MAX))
        return ExchangePart(learnt, assembly.exchanges["exchange_id"], packed)

    learnt = Learnt()
    counts: Counter[int] = Counter()
    for part in parts(paired, sources, options.chunk_bytes, pack):
        learnt.add(part.learnt)
        if has_times:
            with_exchange |= np.isin(shown.anomalies["exchange_id"], part.kept)
        for slot, data in part.packed:
            yield Row(slot, RowKind.EXCHANGES, (bucket << 20) + counts[slot], data)
            counts[slot] += 1
    del paired
    learnt.finish(shown)
    yield from _facts_rows(plan, bucket, learnt)
    here = bucket % plan.slot_count
    overlaps = connections_within(shown.connections, options.time_from_ns, options.time_to_ns)
    if overlaps.any():
        table = connections_table(shown.endpoints, shown.connections, learnt.connections, shown.tls)
        for part_table in sliced(table.filter(pa.array(overlaps))):
            yield Row(here, RowKind.TABLE, bucket, packed_table("connections", part_table))
    stays = anomalies_within(shown.anomalies, with_exchange, overlaps)
    told = replace(shown, anomalies=shown.anomalies[stays])
    for table in _assembly_anomalies(plan, sources, told, given_up_pairs):
        for part_table in sliced(table):
            yield Row(here, RowKind.TABLE, bucket, packed_table("anomalies", part_table))
    stats = {
        "reason": reason,
        "duplicates": _duplicates(shown),
        "given_up": given_up,
        "timings": {
            "assemble_s": time.perf_counter() - began,
            "assemble_bytes": byte_count,
        },
    }
    yield Row(0, RowKind.STATS, bucket, json.dumps(stats).encode())


def _duplicates(assembly: Assembly) -> dict[str, int]:
    counts = assembly.duplicate_packets
    return {str(source): int(count) for source, count in enumerate(counts) if count}


def _assembly_anomalies(
    plan: RunPlan, sources: Sources, assembly: Assembly, given_up: int
) -> Iterator[pa.Table]:
    anomalies = assembly.anomalies
    ids, capture_ids = assembly.connections["connection_id"], list(plan.capture_ids)
    count = anomalies["extent_count"].astype(np.int64)
    if plan.options.payload != "full":
        count[:] = 0  # bytes of a stream may be those of records
    extents, owner = _shown(
        assembly, anomalies["extent_start"], count, plan.options.limits.anomaly_data
    )
    size = np.bincount(owner, extents["length"], len(anomalies)).astype(np.int64)
    start = np.append(0, np.cumsum(np.bincount(owner, minlength=len(anomalies))))
    for part in in_parts(size):
        if plan.options.reveal_secrets:
            buf = sources.gather(extents[start[part.start] : start[part.stop]])
            data = binaries(buf, np.cumsum(size[part]) - size[part], size[part])
        else:  # or of a token, or an admin's request
            data = pa.array([b"", TEXT.encode()]).take(pa.array((size[part] > 0).astype(np.int8)))
        data = pc.if_else(pa.array(count[part] > 0), data, pa.scalar(None, pa.binary()))
        yield stream_anomalies(anomalies[part], ids, capture_ids, data)
    if given_up:
        limit = plan.options.limits.connections
        detail = f"{given_up} pairs of endpoints beyond the limit of {limit} were not followed"
        yield anomalies_table([AnomalyRow(Anomaly.LIMIT, detail)])


def _shown(
    assembly: Assembly, start: Any, count: Any, data_max: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """Of ranges of extents those with the first `data_max` bytes, and the range that each is of."""
    indices, first = gather_ranges(start, count)
    extents = take(assembly.extents, indices)
    owner = np.repeat(np.arange(len(count)), count)
    done = np.cumsum(extents["length"]) - extents["length"]
    done -= np.append(done, 0)[first][owner]
    extents["length"] = np.clip(data_max - done, 0, extents["length"])
    chosen = (extents["source"] >= 0) & (extents["length"] > 0)
    return extents[chosen], owner[chosen]


def _facts_rows(plan: RunPlan, bucket: int, learnt: Learnt) -> Iterator[Row]:
    facts = learnt.facts
    packed = facts.to_bytes()
    is_for_all = facts.topics or facts.brokers or facts.owners
    for slot in range(plan.key_count) if is_for_all else [0]:
        yield Row(slot, RowKind.FACTS, bucket, packed)


# -- runs that save their state, or go on from one ------------------------------------------

SEGMENTS_MAX = 1_000_000  # of a bucket whose state is saved: all of it is assembled in memory
STATE_BYTES_MAX = 256 << 20  # of carried bytes of a bucket
TOO_MUCH = "there are too many packets, connections or open bytes"


def _fits_memory(plan: RunPlan, batch: SegmentBatch) -> bool:
    few = len(batch.endpoints) <= plan.options.limits.connections
    return few and len(batch.segments) <= SEGMENTS_MAX


def _set_rows(
    plan: RunPlan, sources: Sources, batch: SegmentBatch, before: list[bytes], bucket: int,
    files: StateFiles | None, began: float,
) -> Iterator[Row]:  # fmt: skip
    """`assemble` of a run that saves its state: rows that a later packet may change go to the
    open slot."""
    options = plan.options
    byte_count = int(batch.segments["captured"].sum())
    states = [state for data in before for state in unpack_states(data)]
    key_logs = plan.key_logs(sources)
    carry = ConnectionCarry(options.stream_options, key_logs, SET_LIMITS, states)
    earlier = plan.before.captures if plan.before else 0
    secret = frozenset() if options.reveal_secrets else SECRET_APIS
    set_run = SetRun(plan.end_ns, earlier, options.stream_options.duplicate_window_ns, secret)
    appended = carry.append(CarriedBytes(batch, sources, earlier), set_run)
    assembly, sources = appended.assembly, appended.sources
    if len(assembly.carried.data):
        sources = sources.carrying(assembly.carried.data)
    seen = requests_seen(appended)
    infer(assembly, sources, seen)
    learnt = learn(assembly, sources, options.chunk_bytes)
    learnt.finish(assembly)
    add_earlier_facts(appended, learnt.connections)
    yield from _facts_rows(plan, bucket, learnt)
    connections = connections_table(
        assembly.endpoints, assembly.connections, learnt.connections, assembly.tls
    )
    opened = appended.open
    for is_open, exchanges in ((False, appended.rows), (True, opened.exchanges)):
        here = plan.open_slot if is_open else bucket % plan.slot_count
        for part in sliced(connections.filter(pa.array(opened.connections == is_open))):
            yield Row(here, RowKind.TABLE, bucket, packed_table("connections", part))
        some = replace(assembly, anomalies=assembly.anomalies[opened.anomalies == is_open])
        for anomalies in _assembly_anomalies(plan, sources, some, 0):
            for part in sliced(anomalies):
                yield Row(here, RowKind.TABLE, bucket, packed_table("anomalies", part))
        counts: Counter[int] = Counter()
        for start in range(0, len(exchanges), PART_ROWS):
            rows = exchanges[start : start + PART_ROWS]
            part = replace(assembly, exchanges=take(assembly.exchanges, rows))
            slots = np.full(len(rows), plan.open_slot) if is_open else _slots(plan, part)
            part = _with_earlier_bytes(plan, exchange_index.take(assembly, rows), sources)
            for slot, data in packed_parts(part, slots, ROW_BYTES_MAX):
                yield Row(slot, RowKind.EXCHANGES, (bucket << 20) + counts[slot], data)
                counts[slot] += 1
    keep_facts(appended, learnt.connections, seen)
    left = carry.states()
    stats = {
        "reason": _state_unavailable_reason(plan, appended, left),
        "files": [write_connections(files, left)] if files is not None and left else [],
        "duplicates": _duplicates(assembly),
        "exceptions": exceptions_of(assembly, appended.late_count),
        "timings": {
            "assemble_s": time.perf_counter() - began,
            "assemble_bytes": byte_count,
        },
    }
    if appended.late_count:
        detail = f"{appended.late_count} packets of connections that were over already"
        late = anomalies_table([AnomalyRow(Anomaly.LATE_PACKETS, detail)])
        here = bucket % plan.slot_count
        yield Row(here, RowKind.TABLE, bucket, packed_table("anomalies", late))
    yield Row(0, RowKind.STATS, bucket, json.dumps(stats).encode())


def _state_unavailable_reason(
    plan: RunPlan, appended: AppendedWindow, states: list[ConnectionState]
) -> str | None:
    """Why the state of a bucket cannot be saved, or None."""
    if appended.is_secret:
        return "a message with secrets is not complete at the end"
    too_many = len(states) > plan.options.limits.connections
    if too_many or sum(state.size for state in states) > STATE_BYTES_MAX:
        return TOO_MUCH
    return None


def _with_earlier_bytes(plan: RunPlan, assembly: Assembly, sources: Sources) -> Assembly:
    """The assembly with bytes of earlier captures as carried ones: later tasks cannot read those.

    They come after those that it carries already.
    """
    earlier = plan.before.captures if plan.before else 0
    extents = assembly.extents
    rows = np.flatnonzero((extents["source"] >= 0) & (extents["source"] < earlier))
    if not len(rows):
        return assembly
    data = sources.gather(extents[rows]).copy()
    length = extents["length"][rows]
    known = assembly.carried
    extents["pos"][rows] = len(known.data) + np.cumsum(length) - length
    extents["source"][rows] = len(plan.paths)
    extents["transform"][rows] = CARRIED
    data = np.concatenate([known.data, data])
    more = Carried(len(plan.paths), data, known.start, known.file_source, known.file_pos)
    return replace(assembly, carried=more)


def _slots(plan: RunPlan, assembly: Assembly) -> npt.NDArray[np.int64]:
    """int64[n]: the slot of each exchange, by the place of its first captured byte.

    Slot 0 for those that begin in no capture which this run reads.
    """
    place = exchange_index.places(assembly.exchanges, assembly.extents, assembly.carried)
    starts = np.array([*plan.source_start, 0], np.int64)
    slot = (starts[place["source"]] + place["pos"]) // plan.slot_bytes
    slot = np.where(place["source"] < (plan.before.captures if plan.before else 0), 0, slot)
    return np.clip(slot, 0, plan.slot_count - 1)
