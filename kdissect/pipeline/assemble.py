"""Assemble: turn the segments of one bucket into exchanges, keyed by the slot that decodes them.

A run that keeps state treats a bucket as one window of `resume.carry`: only complete exchanges
become rows. Both kinds of runs give an `AssembledBucket`, from which `assemble` makes rows part by
part.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Ids, Indices, Ints, Rows, gather_ranges, take
from kdissect.capture.mapped_files import Sources
from kdissect.capture.scratch import MEMORY, Scratch, Written
from kdissect.capture.segments import SEGMENT, SegmentBatch
from kdissect.codec.redaction import TEXT, secret_apis
from kdissect.kafka.assemble import assemble_streams
from kdissect.kafka.assembly import Anomaly, Assembly
from kdissect.pipeline import exchange_index
from kdissect.pipeline.filters import NOT_FOLLOWED, follow, within
from kdissect.pipeline.learn import learn
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import RunPlan
from kdissect.pipeline.run_tables import RunSummary
from kdissect.pipeline.saved_state import continued, count_anomalies, rows_so_far, with_rows
from kdissect.pipeline.step_rows import (
    OPEN_CONNECTIONS,
    ROW_BYTES_MAX,
    STATE_OPEN,
    RowKind,
    StepRow,
    sliced,
)
from kdissect.pipeline.unrequested_responses import infer
from kdissect.resume.carry import CarryLimits, CompletedExchanges, ConnectionCarry
from kdissect.resume.open_connection import (
    OPEN_SCHEMA,
    OpenConnection,
    from_table,
    rows_of,
    to_table,
)
from kdissect.tables.anomalies import AnomalyRow, anomalies_table, in_parts, stream_anomalies
from kdissect.tables.arrow_arrays import binaries, packed, plain, unpacked
from kdissect.tables.connections import ConnectionClients, connections_table
from kdissect.tables.schemas import CONNECTIONS
from kdissect.tcp.columns import CloseReason

LARGE_BYTES = 24 << 20  # of segments; a larger bucket lies in files (`capture.scratch`)
PART_ROWS = 1 << 15  # exchanges at a time
# Segments of a bucket whose connections a run that saves state begins to follow. A bucket that goes
# on with saved connections has no limit, because they would end. Both are assembled in memory.
SEGMENTS_MAX = 1_000_000


class Gathered:
    """The segments of a bucket, in the order of the splits.

    A bucket may be one connection with most of the capture. Its segments, streams and exchanges
    then lie in files, so the task's memory does not grow with the connection.
    """

    def __init__(self) -> None:
        self._batches: list[SegmentBatch] = []
        self._size = 0
        # of a large bucket
        self._file: Written | None = None
        self._pairs: list[Rows] = []
        self._counts: list[int] = []

    def add(self, batch: SegmentBatch) -> None:
        self._batches.append(batch)
        self._size += batch.segments.nbytes
        if self._size <= LARGE_BYTES:
            return
        self._file = self._file or Written(SEGMENT, Scratch(in_files=True))
        for batch in self._batches:
            self._file.append(batch.segments)
            self._pairs.append(batch.endpoints.copy())  # so that the row can be freed
            self._counts.append(len(batch.segments))
        self._batches.clear()

    def batch(self) -> tuple[SegmentBatch, Scratch]:
        """(all segments, where arrays derived from them can be stored). Call it once."""
        if self._file is None:
            batch = SegmentBatch.concat(self._batches)
            self._batches.clear()
            return batch, MEMORY
        segments = self._file.array()
        batch = SegmentBatch.numbered(self._pairs, self._counts, segments)
        return batch, Scratch(in_files=True)


@dataclass(frozen=True, slots=True)
class AssembledBucket:
    """Everything that the segments of a bucket give.

    found: its exchanges and connections. notes: anomalies that belong to no single connection.
    states: of connections, for the next run. summary: counts of the bucket.
    """

    found: CompletedExchanges
    notes: list[AnomalyRow] = field(default_factory=list)
    states: list[OpenConnection] = field(default_factory=list)
    summary: RunSummary = field(default_factory=RunSummary)


def assemble(plan: RunPlan, sources: Sources, rows: Iterable[StepRow]) -> Iterator[StepRow]:
    """Turn all rows of one bucket, in order, into rows keyed by slot."""
    began = time.perf_counter()
    gathered = Gathered()
    states: list[OpenConnection] = []
    earlier = [CONNECTIONS.empty_table()]
    number = 0
    for row in rows:
        number = row.key
        if row.kind == RowKind.SEGMENTS:
            gathered.add(row.data)
        elif row.kind == RowKind.STATES:
            _, saved = unpacked(row.data)
            states += from_table(saved.select(OPEN_SCHEMA.names))
            earlier.append(rows_so_far(saved))
        else:
            yield row._replace(key=row.order % plan.slot_count)
    batch, scratch = gathered.batch()
    byte_count = int(batch.segments["captured"].sum())
    is_small = len(batch.endpoints) <= plan.options.limits.connections
    is_small &= len(batch.segments) <= SEGMENTS_MAX
    batches = [batch]  # a list, so that the callee can drop the batch early
    del gathered, batch
    if plan.keeps and (is_small or states):
        bucket = _bucket_with_state(plan, sources, batches.pop(), states)
    else:
        bucket = _bucket_without_state(plan, sources, batches, scratch)
    options, summary, clients = plan.options, bucket.summary, ConnectionClients()
    assembly, sources = bucket.found.assembly, bucket.found.sources
    for part in _parts(assembly):
        learn(summary.facts, clients, part, sources)
    summary.facts.brokers.add_listeners(assembly)
    assembly, overlaps = within(assembly, options.time_from_ns, options.time_to_ns)
    order: Counter[int] = Counter()
    for part in _parts(assembly):
        for slot, some in exchange_index.parts(part, _slots(plan, part), ROW_BYTES_MAX):
            yield StepRow(slot, RowKind.EXCHANGES, (number << 20) + order[slot], some)
            order[slot] += 1
    home = number % plan.slot_count
    connections = connections_table(
        assembly.endpoints, assembly.connections, clients, assembly.tls, assembly.tcp
    ).filter(pa.array(overlaps))
    connections = continued(connections, pa.concat_tables(earlier))
    anomalies = anomaly_tables(assembly, sources, plan.capture_ids, options)
    tables = chain(
        _connections(connections, bucket.states),
        (("anomalies", table) for table in chain(anomalies, [anomalies_table(bucket.notes)])),
    )
    for name, table in tables:
        for some in sliced(table):
            yield StepRow(home, RowKind.TABLE, number, packed(name, some))
    packets = enumerate(assembly.duplicate_packets.tolist())
    summary.duplicates.update({source: count for source, count in packets if count})
    summary.timings |= {"assemble_s": time.perf_counter() - began, "assemble_bytes": byte_count}
    yield summary.row(number)


def _parts(assembly: Assembly) -> Iterator[Assembly]:
    """Yield PART_ROWS exchanges at a time, so that memory stays bounded."""
    for first in range(0, len(assembly.exchanges), PART_ROWS):
        yield replace(assembly, exchanges=assembly.exchanges[first : first + PART_ROWS])


# -- the two ways ---------------------------------------------------------------------------


def _bucket_without_state(
    plan: RunPlan, sources: Sources, batches: list[SegmentBatch], scratch: Scratch
) -> AssembledBucket:
    """A bucket without state. batches: a list of one batch, which is removed early."""
    limit = plan.options.limits.connections
    excess = len(batches[0].endpoints) - limit
    batch, given_up = follow(batches.pop(), limit)
    batches.append(batch)
    del batch
    assembly, sources = _assembled(plan, sources, batches, scratch)
    infer(assembly, sources)
    notes, summary = [], RunSummary()
    for source, count in given_up.items():
        summary.tcp[source] -= count
        summary.ignored[source][NOT_FOLLOWED] += count
    if excess > 0:
        detail = f"{excess} pairs of endpoints beyond the limit of {limit} were not followed"
        notes.append(AnomalyRow(Anomaly.LIMIT, detail))
    if plan.keeps:
        goes_on = assembly.connections["close_reason"] == CloseReason.CAPTURE_END
        summary.counts["carry_limits"] = int(goes_on.sum())
    notes += count_anomalies(summary.counts)
    found = CompletedExchanges(assembly, sources)
    return AssembledBucket(found, notes, summary=summary)


def _assembled(
    plan: RunPlan, sources: Sources, batches: list[SegmentBatch], scratch: Scratch
) -> tuple[Assembly, Sources]:
    options = plan.options.stream_options
    assembly = assemble_streams(batches, sources, options, plan.key_logs, scratch=scratch)[0]
    return assembly, sources.carrying(assembly.carried.data)


def assembled(
    plan: RunPlan, sources: Sources, batches: list[SegmentBatch]
) -> tuple[SegmentBatch, Assembly, Sources]:
    """(segments of one bucket, everything assembled from them, where the bytes are)."""
    batch, _ = follow(SegmentBatch.concat(batches), plan.options.limits.connections)
    return batch, *_assembled(plan, sources, [batch], MEMORY)


def _bucket_with_state(
    plan: RunPlan, sources: Sources, batch: SegmentBatch, states: list[OpenConnection]
) -> AssembledBucket:
    """A bucket whose connections go on from run to run."""
    options = plan.options
    carry = ConnectionCarry(
        options.stream_options,
        plan.key_logs,
        CarryLimits(connection_max=options.limits.connections),
        connections=states,
        secret_apis=frozenset() if options.reveal_secrets else secret_apis(),
    )
    found = carry.add(batch, sources, plan.end_ns)
    infer(found.assembly, found.sources)
    states = carry.connections()
    counts = {
        "late_packets": carry.counts.late,
        "carry_limits": carry.counts.given_up + carry.counts.limited,
        "open_exchanges": int(rows_of(states)["exchange_count"].sum()),
    }
    return AssembledBucket(
        found, count_anomalies(counts), states, RunSummary(counts=Counter(counts))
    )


# -- rows -----------------------------------------------------------------------------------


def _slots(plan: RunPlan, assembly: Assembly) -> Indices:
    """int64[n]: the slot of each exchange, from the position of its first captured byte.

    Slot 0 if an exchange begins in no capture that this run reads.
    """
    place = exchange_index.places(assembly.exchanges, assembly.extents, assembly.carried)
    starts = np.append(plan.source_start, 0)
    slot = (starts[place["source"]] + place["pos"]) // plan.slot_bytes
    slot = np.where(place["source"] < plan.earlier_count, 0, slot)
    return np.clip(slot, 0, plan.slot_count - 1)


def _connections(
    connections: pa.Table, states: list[OpenConnection]
) -> Iterator[tuple[str, pa.Table]]:
    """The rows of `connections`, those that may go on apart, and the saved state."""
    ids = pa.array(rows_of(states)["connection"]["connection_id"])
    may_go_on = pc.is_in(connections["connection_id"], value_set=ids)
    yield "connections", connections.filter(pc.invert(may_go_on))
    place = pc.index_in(ids, connections["connection_id"])
    assert not place.null_count
    rows = plain(connections.take(place), CONNECTIONS)
    yield OPEN_CONNECTIONS, rows
    yield STATE_OPEN, with_rows(to_table(states), rows)


def anomaly_tables(
    assembly: Assembly, sources: Sources, capture_ids: Ids | list[int], options: Options
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


def _shown(assembly: Assembly, start: Ints, count: Ints, data_max: int) -> tuple[Rows, Indices]:
    """(extents of the first `data_max` bytes of each range of extents, index of that range)."""
    indices, first = gather_ranges(start, count)
    extents = take(assembly.extents, indices)
    owner = np.repeat(np.arange(len(count)), count)
    done = np.cumsum(extents["length"]) - extents["length"]
    done -= np.append(done, 0)[first][owner]
    extents["length"] = np.clip(data_max - done, 0, extents["length"])
    chosen = (extents["source"] >= 0) & (extents["length"] > 0)
    return extents[chosen], owner[chosen]
