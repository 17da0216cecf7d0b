"""Assemble: turn the segments of one bucket into exchanges, keyed by the slot that decodes them.

A plain run builds the exchanges of a bucket part by part, from frames and pairs that may lie in
files. A run that saves or resumes state treats a bucket as one window of `resume.carry`. Both ways
give exchanges and an `AssembledBucket`, from which `assemble` makes rows.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import gather_ranges, take
from kdissect.capture.mapped_files import Sources
from kdissect.capture.scratch import MEMORY, Scratch, Written
from kdissect.capture.segments import SegmentBatch
from kdissect.codec.redaction import TEXT, secret_apis
from kdissect.kafka.assemble import paired_frames
from kdissect.kafka.assembly import CARRIED, Anomaly, Assembly, Carried
from kdissect.kafka.exchanges import AssembledExchanges, Exchanges, Paired
from kdissect.pipeline import exchange_index
from kdissect.pipeline.facts import Learnt
from kdissect.pipeline.filters import anomalies_within, connections_within, exchanges_within, follow
from kdissect.pipeline.options import Options
from kdissect.pipeline.run_plan import RunPlan
from kdissect.pipeline.saved_state import (
    StateFiles,
    add_earlier_facts,
    exceptions_of,
    keep_facts,
    requests_seen,
    write_connections,
)
from kdissect.pipeline.segment_buffer import ExchangePart, Gathered, packed_parts, parts
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

SEGMENTS_MAX = 1_000_000  # per bucket, if state is saved: the bucket is assembled in memory
STATE_BYTES_MAX = 256 << 20  # of carried payload per bucket
TOO_MUCH = "there are too many packets, connections or open bytes"

# exchange rows: stay; replaced by the next append; written by an earlier run
_FINAL, _OPEN, WRITTEN = 0, 1, 2


@dataclass(frozen=True, slots=True)
class ResumedConnections:
    """Connections of earlier runs and the window of this run. requests: result of
    `requests_seen`."""

    carry: ConnectionCarry
    window: AppendedWindow
    requests: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AssembledBucket:
    """Everything that the segments of a bucket give, except its exchanges.

    assembly: without exchanges; its extents are those of anomalies. sources: where the bytes are.
    lane: uint8[exchanges], _FINAL, _OPEN or WRITTEN.
    open_connections, open_anomalies: bool per row.
    notes: anomalies that belong to no single connection.
    given_up: packets of connections beyond the limit, by source number.
    resumed: set if the run saves its state. no_state_reason: why it cannot.
    """

    assembly: Assembly
    sources: Sources
    lane: npt.NDArray[np.uint8]
    open_connections: npt.NDArray[np.bool_]
    open_anomalies: npt.NDArray[np.bool_]
    notes: list[AnomalyRow] = field(default_factory=list)
    given_up: dict[int, int] = field(default_factory=dict)
    resumed: ResumedConnections | None = None
    no_state_reason: str | None = None


def assemble(
    plan: RunPlan, sources: Sources, rows: Iterable[Row], files: StateFiles | None = None
) -> Iterator[Row]:
    """Turn all rows of one bucket, in order, into rows keyed by slot. files: receives the saved
    state."""
    began = time.perf_counter()
    # with copied payload, segments must stay in the order of that payload
    gathered = Gathered(keep_order=sources.is_far)
    states: list[ConnectionState] = []
    number = 0
    payload = Written(np.uint8, Scratch(in_files=True))
    for row in rows:
        number = row.key
        if row.kind == RowKind.SEGMENTS:
            gathered.add(row.data)
        elif row.kind == RowKind.PAYLOAD:
            payload.append(np.frombuffer(row.data, np.uint8))
        elif row.kind == RowKind.STATES:
            states += unpack_states(row.data)
        else:
            yield row._replace(key=row.order % plan.slot_count if row.kind == RowKind.TABLE else 0)
    batch, scratch = gathered.batch()
    byte_count = int(batch.segments["captured"].sum())
    if sources.is_far:
        sources = sources.holding([batch.segments], payload.array())
    is_resumed = plan.keeps and (plan.before is not None or _fits_memory(plan, batch))
    batches = [batch]  # a list, so that the callee can drop the batch early
    del gathered, batch
    exchanges: Exchanges
    if is_resumed:
        exchanges, bucket = _resumed_bucket(plan, sources, batches.pop(), states)
    else:
        exchanges, bucket = _plain_bucket(plan, sources, batches, scratch)
    learnt = Learnt()
    has_times = (plan.options.time_from_ns, plan.options.time_to_ns) != (None, None)
    has_exchange = np.full(len(bucket.assembly.anomalies), not has_times)
    order: Counter[int] = Counter()
    for part in _packed(plan, exchanges, bucket):
        learnt.add(part.learnt)
        if has_times:
            has_exchange |= np.isin(bucket.assembly.anomalies["exchange_id"], part.kept)
        for slot, data in part.packed:
            yield Row(slot, RowKind.EXCHANGES, (number << 20) + order[slot], data)
            order[slot] += 1
    del exchanges  # deletes its temporary files
    learnt.finish(bucket.assembly)
    if bucket.resumed is not None:
        add_earlier_facts(bucket.resumed.window, learnt.connections)
    yield from _facts_rows(plan, number, learnt)
    for slot, name, table in _tables(plan, number, bucket, learnt, has_exchange):
        for some in sliced(table):
            yield Row(slot, RowKind.TABLE, number, packed_table(name, some))
    stats: dict[str, Any] = {
        "duplicates": _by_source(bucket.assembly.duplicate_packets),
        "given_up": bucket.given_up,
        "reason": bucket.no_state_reason,
    }
    if bucket.resumed is not None:
        stats |= _save_state(plan, bucket.resumed, learnt, files)
    timings = {"assemble_s": time.perf_counter() - began, "assemble_bytes": byte_count}
    yield Row(0, RowKind.STATS, number, json.dumps({**stats, "timings": timings}).encode())


# -- the two ways ---------------------------------------------------------------------------


def _plain_bucket(
    plan: RunPlan, sources: Sources, batches: list[SegmentBatch], scratch: Scratch
) -> tuple[Paired, AssembledBucket]:
    """Exchanges of a bucket without state. batches: a list of one batch, which is removed early."""
    limit = plan.options.limits.connections
    followed = follow(batches.pop(), limit)
    given_up, pair_count = followed.given_up, followed.pair_count
    batches.append(followed.batch)
    del followed
    paired, sources = _paired(plan, sources, batches, scratch)
    assembly = paired.anomalous()
    notes = []
    if pair_count:
        detail = f"{pair_count} pairs of endpoints beyond the limit of {limit} were not followed"
        notes.append(AnomalyRow(Anomaly.LIMIT, detail))
    bucket = AssembledBucket(
        assembly,
        sources,
        np.broadcast_to(np.uint8(_FINAL), len(paired)),
        np.zeros(len(assembly.connections), np.bool_),
        np.zeros(len(assembly.anomalies), np.bool_),
        notes,
        given_up,
        no_state_reason=TOO_MUCH if plan.keeps else None,
    )
    return paired, bucket


def _paired(
    plan: RunPlan, sources: Sources, batches: list[SegmentBatch], scratch: Scratch
) -> tuple[Paired, Sources]:
    key_logs = plan.key_logs(sources)
    paired = paired_frames(batches, sources, plan.options.stream_options, key_logs, scratch)
    if len(paired.carried.data):
        sources = sources.carrying(paired.carried.data)
    return paired, sources


def assembled(
    plan: RunPlan, sources: Sources, batches: list[SegmentBatch]
) -> tuple[SegmentBatch, Assembly, Sources]:
    """(segments of one bucket, everything assembled from them, where the bytes are)."""
    batch = follow(SegmentBatch.concat(batches), plan.options.limits.connections).batch
    paired, sources = _paired(plan, sources, [batch], MEMORY)
    return batch, paired.assembly(), sources


def _fits_memory(plan: RunPlan, batch: SegmentBatch) -> bool:
    few = len(batch.endpoints) <= plan.options.limits.connections
    return few and len(batch.segments) <= SEGMENTS_MAX


def _resumed_bucket(
    plan: RunPlan, sources: Sources, batch: SegmentBatch, states: list[ConnectionState]
) -> tuple[AssembledExchanges, AssembledBucket]:
    """Exchanges of a bucket whose connections continue from earlier runs or may continue later."""
    options = plan.options
    carry = ConnectionCarry(options.stream_options, plan.key_logs(sources), SET_LIMITS, states)
    earlier = plan.earlier_count
    secret = frozenset() if options.reveal_secrets else secret_apis()
    set_run = SetRun(plan.end_ns, earlier, options.stream_options.duplicate_window_ns, secret)
    window = carry.append(CarriedBytes(batch, sources, earlier), set_run)
    assembly, sources = _carrying_earlier_bytes(window.assembly, window.sources, earlier)
    lane = np.full(len(assembly.exchanges), WRITTEN, np.uint8)
    lane[window.rows] = _FINAL
    lane[window.open.exchanges] = _OPEN
    notes = []
    if window.late_count:
        detail = f"{window.late_count} packets of connections that were over already"
        notes.append(AnomalyRow(Anomaly.LATE_PACKETS, detail))
    requests = requests_seen(window)
    bucket = AssembledBucket(
        replace(assembly, exchanges=assembly.exchanges[:0]),
        sources,
        lane,
        window.open.connections,
        window.open.anomalies,
        notes,
        resumed=ResumedConnections(carry, window, requests),
    )
    return AssembledExchanges(assembly, requests), bucket


def _carrying_earlier_bytes(
    assembly: Assembly, sources: Sources, earlier_count: int
) -> tuple[Assembly, Sources]:
    """Copy the bytes of earlier captures into the assembly, because later tasks cannot read them.

    They follow the bytes that the assembly already carries. `exchange_index.places` maps them to
    the first capture, so they count as bytes of an earlier capture.
    """
    rows = np.flatnonzero(
        (assembly.extents["source"] >= 0) & (assembly.extents["source"] < earlier_count)
    )
    if len(rows):
        extents, carried = assembly.extents.copy(), assembly.carried
        length, source = extents["length"][rows], len(sources)
        extents["pos"][rows] = len(carried.data) + np.cumsum(length) - length
        extents["source"][rows] = source
        extents["transform"][rows] = CARRIED
        carried = Carried(
            source,
            np.concatenate([carried.data, sources.gather(assembly.extents[rows])]),
            np.append(carried.start, len(carried.data)),
            np.append(carried.file_source, np.int32(0)),
            np.append(carried.file_pos, 0),
        )
        assembly = replace(assembly, extents=extents, carried=carried)
    if len(assembly.carried.data):
        sources = sources.carrying(assembly.carried.data)
    return assembly, sources


def _save_state(
    plan: RunPlan, resumed: ResumedConnections, learnt: Learnt, files: StateFiles | None
) -> dict[str, Any]:
    """Save the open connections; returns entries of the bucket's stats."""
    window = resumed.window
    keep_facts(window, learnt.connections, resumed.requests)
    states = resumed.carry.states()
    return {
        "reason": _state_unavailable_reason(plan, window, states),
        "files": [write_connections(files, states)] if files is not None and states else [],
        "exceptions": exceptions_of(window.assembly, window.late_count),
    }


def _state_unavailable_reason(
    plan: RunPlan, window: AppendedWindow, states: list[ConnectionState]
) -> str | None:
    """Return why the state of a bucket cannot be saved; None if it can."""
    if window.is_secret:
        return "a message with secrets is not complete at the end"
    too_many = len(states) > plan.options.limits.connections
    if too_many or sum(state.size for state in states) > STATE_BYTES_MAX:
        return TOO_MUCH
    return None


# -- rows -----------------------------------------------------------------------------------


def _packed(plan: RunPlan, exchanges: Exchanges, bucket: AssembledBucket) -> Iterator[ExchangePart]:
    """The exchanges packed by slot, with the facts learnt from them."""
    options = plan.options

    def pack(assembly: Assembly, learnt: Learnt, rows: slice) -> ExchangePart:
        lane = bucket.lane[rows]
        chosen = exchanges_within(assembly.exchanges, options.time_from_ns, options.time_to_ns)
        chosen &= lane != WRITTEN
        if not chosen.all():
            assembly = replace(assembly, exchanges=assembly.exchanges[chosen])
        slots = np.where(lane[chosen] == _OPEN, plan.open_slot, _slots(plan, assembly))
        packed = list(packed_parts(assembly, slots, ROW_BYTES_MAX))
        return ExchangePart(learnt, assembly.exchanges["exchange_id"], packed)

    return parts(exchanges, bucket.sources, options.chunk_bytes, pack)


def _slots(plan: RunPlan, assembly: Assembly) -> npt.NDArray[np.int64]:
    """int64[n]: the slot of each exchange, from the position of its first captured byte.

    Slot 0 if an exchange begins in no capture that this run reads.
    """
    place = exchange_index.places(assembly.exchanges, assembly.extents, assembly.carried)
    starts = np.array([*plan.source_start, 0], np.int64)
    slot = (starts[place["source"]] + place["pos"]) // plan.slot_bytes
    slot = np.where(place["source"] < plan.earlier_count, 0, slot)
    return np.clip(slot, 0, plan.slot_count - 1)


def _facts_rows(plan: RunPlan, number: int, learnt: Learnt) -> Iterator[Row]:
    facts = learnt.facts
    packed = facts.to_bytes()
    is_for_all = facts.topics or facts.brokers or facts.owners
    for slot in range(plan.key_count) if is_for_all else [0]:
        yield Row(slot, RowKind.FACTS, number, packed)


def _tables(
    plan: RunPlan, number: int, bucket: AssembledBucket, learnt: Learnt, has_exchange: Any
) -> Iterator[tuple[int, str, pa.Table]]:
    """Rows of `connections` and `anomalies` by slot. has_exchange: bool per anomaly, whether its
    exchange is written."""
    assembly, options = bucket.assembly, plan.options
    overlaps = connections_within(assembly.connections, options.time_from_ns, options.time_to_ns)
    stays = anomalies_within(assembly.anomalies, has_exchange, overlaps)
    connections = connections_table(
        assembly.endpoints, assembly.connections, learnt.connections, assembly.tls, assembly.tcp
    )
    home = number % plan.slot_count
    for is_open, slot in ((False, home), (True, plan.open_slot)):
        chosen = overlaps & (bucket.open_connections == is_open)
        yield slot, "connections", connections.filter(pa.array(chosen))
        chosen = stays & (bucket.open_anomalies == is_open)
        chosen_assembly = replace(assembly, anomalies=assembly.anomalies[chosen])
        for table in anomaly_tables(
            chosen_assembly, bucket.sources, list(plan.capture_ids), options
        ):
            yield slot, "anomalies", table
    yield home, "anomalies", anomalies_table(bucket.notes)


def anomaly_tables(
    assembly: Assembly, sources: Sources, capture_ids: list[int], options: Options
) -> Iterator[pa.Table]:
    """Rows of `anomalies`, with as many bytes of each fault as the options allow."""
    anomalies, ids = assembly.anomalies, assembly.connections["connection_id"]
    count = anomalies["extent_count"].astype(np.int64)
    if options.payload != "full":
        count[:] = 0  # stream bytes may be those of records
    extents, owner = _shown(assembly, anomalies["extent_start"], count, options.limits.anomaly_data)
    size = np.bincount(owner, extents["length"], len(anomalies)).astype(np.int64)
    start = np.append(0, np.cumsum(np.bincount(owner, minlength=len(anomalies))))
    for part in in_parts(size):
        if options.reveal_secrets:
            buf = sources.gather(extents[start[part.start] : start[part.stop]])
            data = binaries(buf, np.cumsum(size[part]) - size[part], size[part])
        else:  # stream bytes may be those of a token or of an administrator's request
            data = pa.array([b"", TEXT.encode()]).take(pa.array((size[part] > 0).astype(np.int8)))
        data = pc.if_else(pa.array(count[part] > 0), data, pa.scalar(None, pa.binary()))
        yield stream_anomalies(anomalies[part], ids, capture_ids, data)


def _shown(
    assembly: Assembly, start: Any, count: Any, data_max: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """(extents of the first `data_max` bytes of each range of extents, index of that range)."""
    indices, first = gather_ranges(start, count)
    extents = take(assembly.extents, indices)
    owner = np.repeat(np.arange(len(count)), count)
    done = np.cumsum(extents["length"]) - extents["length"]
    done -= np.append(done, 0)[first][owner]
    extents["length"] = np.clip(data_max - done, 0, extents["length"])
    chosen = (extents["source"] >= 0) & (extents["length"] > 0)
    return extents[chosen], owner[chosen]


def _by_source(counts: npt.NDArray[np.int64]) -> dict[str, int]:
    return {str(source): int(count) for source, count in enumerate(counts) if count}
