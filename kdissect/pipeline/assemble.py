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
from kdissect.capture.spool import Held
from kdissect.kafka.assemble import assemble, paired_frames
from kdissect.kafka.assembly import Anomaly, Assembly
from kdissect.pipeline import exchange_index, kept
from kdissect.pipeline.beside import lane_parts, learnt_and_packed
from kdissect.pipeline.connection_selection import follow
from kdissect.pipeline.facts import (
    Learnt,
)
from kdissect.pipeline.filters import anomalies_within, connections_within, exchanges_within
from kdissect.pipeline.run_plan import RunPlan
from kdissect.pipeline.segment_buffer import Gathered, Part, at_hand, packed_parts, parts
from kdissect.pipeline.step_rows import ROW_BYTES_MAX, Kind, Row, packed_table, sliced
from kdissect.resume.tails import Open
from kdissect.tables.anomalies import (
    AnomalyRow,
    anomalies_table,
    in_parts,
    stream_anomalies,
)
from kdissect.tables.arrow_arrays import binaries
from kdissect.tables.connections import connections_table
from kdissect.tables.redaction import TEXT


def assembled(
    plan: RunPlan, sources: Sources, batches: list[SegmentBatch]
) -> tuple[SegmentBatch, Assembly, Sources]:
    """The segments of one bucket, what they come to, and the bytes of that."""
    limits = plan.options.limits
    batch = follow(SegmentBatch.concat(batches), limits.connections).batch
    key_logs = plan.key_logs(sources)
    sources = at_hand(sources, batch.segments)
    assembly = assemble(batch, sources, plan.options.stream_options, key_logs)
    if len(assembly.carried.data):
        sources = sources.carrying(assembly.carried.data)
    return batch, assembly, sources


def assemble_step(
    plan: RunPlan, sources: Sources, rows: Iterable[Row], files: kept.StateFiles | None = None
) -> Iterator[Row]:
    """All rows of one bucket, in order, to rows keyed by slot; files: where what is kept goes."""
    began = time.perf_counter()
    options = plan.options
    # payload that comes along is in the order of the segments
    gathered = Gathered(keep_order=sources.is_far)
    before: list[bytes] = []
    bucket = 0
    payload = Held()
    for row in rows:
        bucket = row.key
        if row.kind == Kind.SEGMENTS:
            gathered.add(row.data)
        elif row.kind == Kind.PAYLOAD:
            payload.write(row.data)
        elif row.kind == Kind.KEPT:
            before.append(row.data)
        else:
            yield row._replace(key=row.order % plan.slot_count if row.kind == Kind.TABLE else 0)
    batch, scratch = gathered.batch()
    del gathered
    byte_count = int(batch.segments["captured"].sum())
    reason = None
    if plan.keeps and (plan.before or kept.is_small(batch, options)):
        yield from _open_rows(plan, sources, batch, before, bucket, files, began)
        return
    if plan.keeps:
        reason = "there are too many packets, or connections, to be kept"
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

    def pack(assembly: Assembly, learnt: Learnt) -> Part:
        within = exchanges_within(assembly.exchanges, options.time_from_ns, options.time_to_ns)
        if not within.all():
            assembly = replace(assembly, exchanges=assembly.exchanges[within])
        packed = list(packed_parts(assembly, _slots(plan, assembly), ROW_BYTES_MAX))
        return Part(learnt, assembly.exchanges["exchange_id"], packed)

    learnt = Learnt()
    counts: Counter[int] = Counter()
    for part in parts(paired, sources, options.chunk_bytes, pack):
        learnt.add(part.learnt)
        if has_times:
            with_exchange |= np.isin(shown.anomalies["exchange_id"], part.kept)
        for slot, data in part.packed:
            yield Row(slot, Kind.EXCHANGES, (bucket << 20) + counts[slot], data)
            counts[slot] += 1
    del paired
    learnt.finish(shown)
    facts = learnt.facts
    packed_facts = facts.to_bytes()
    is_for_all = facts.topics or facts.brokers or facts.owners
    for slot in range(plan.key_count) if is_for_all else [0]:
        yield Row(slot, Kind.FACTS, bucket, packed_facts)
    here = bucket % plan.slot_count
    overlaps = connections_within(shown.connections, options.time_from_ns, options.time_to_ns)
    if overlaps.any():
        table = connections_table(shown.endpoints, shown.connections, learnt.connections, shown.tls)
        for part_table in sliced(table.filter(pa.array(overlaps))):
            yield Row(here, Kind.TABLE, bucket, packed_table("connections", part_table))
    stays = anomalies_within(shown.anomalies, with_exchange, overlaps)
    told = replace(shown, anomalies=shown.anomalies[stays])
    for table in _assembly_anomalies(plan, sources, told, given_up_pairs):
        for part_table in sliced(table):
            yield Row(here, Kind.TABLE, bucket, packed_table("anomalies", part_table))
    stats = {
        "reason": reason,
        "duplicates": _duplicates(shown),
        "given_up": given_up,
        "timings": {
            "assemble_s": time.perf_counter() - began,
            "assemble_bytes": byte_count,
        },
    }
    yield Row(0, Kind.STATS, bucket, json.dumps(stats).encode())


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


def _open_rows(
    plan: RunPlan, sources: Sources, batch: SegmentBatch, before: list[bytes], bucket: int,
    files: kept.StateFiles | None, began: float,
) -> Iterator[Row]:  # fmt: skip
    """`assemble_step` of a run that keeps what goes on."""
    byte_count = int(batch.segments["captured"].sum())
    known = Open.concat([Open.from_bytes(data) for data in before])
    threads = plan.threads(len(batch.segments))
    opened = kept.reopened(plan, sources, [batch], known)
    sources = opened.sources

    def pack(some: Assembly, is_final: bool) -> list[tuple[int, bytes]]:
        count = len(some.exchanges)
        slots = _slots(plan, some) if is_final else np.full(count, plan.open_slot)
        if plan.before is not None or len(some.carried.data):
            some = exchange_index.take(some, np.arange(count))
            some = kept.carried(plan, some, sources.beside())
        return list(packed_parts(some, slots, ROW_BYTES_MAX))

    learnt, early = learnt_and_packed(opened, plan.options, plan.end_ns, pack, threads)
    assembly = opened.assembly
    learnt.finish(assembly)
    facts = learnt.facts
    is_for_all = facts.topics or facts.brokers or facts.owners
    for slot in range(plan.key_count) if is_for_all else [0]:
        yield Row(slot, Kind.FACTS, bucket, facts.to_bytes())
    kept.add_facts(opened.run, learnt.connections)
    table = connections_table(
        assembly.endpoints, assembly.connections, learnt.connections, assembly.tls
    )
    for lane in opened.lanes():
        here = bucket % plan.slot_count if lane.is_final else plan.open_slot
        for part in sliced(table.filter(pa.array(lane.connections))):
            yield Row(here, Kind.TABLE, bucket, packed_table("connections", part))
        for anomalies in _assembly_anomalies(plan, sources, lane.assembly, 0):
            for part in sliced(anomalies):
                yield Row(here, Kind.TABLE, bucket, packed_table("anomalies", part))
        counts: Counter[int] = Counter()
        for to, data in lane_parts(lane, early, pack, threads):
            yield Row(to, Kind.EXCHANGES, (bucket << 20) + counts[to], data)
            counts[to] += 1
    stats = {
        **kept.told(opened, learnt.connections, files),
        "duplicates": _duplicates(assembly),
        "timings": {
            "assemble_s": time.perf_counter() - began,
            "assemble_bytes": byte_count,
        },
    }
    yield Row(0, Kind.STATS, bucket, json.dumps(stats).encode())


def _slots(plan: RunPlan, assembly: Assembly) -> npt.NDArray[np.int64]:
    """int64[n]: the slot of each exchange, by the place of its first captured byte.

    Slot 0 for those that begin in no capture which this run reads.
    """
    place = exchange_index.places(assembly.exchanges, assembly.extents, assembly.carried)
    starts = np.array([*plan.source_start, 0], np.int64)
    slot = (starts[place["source"]] + place["pos"]) // plan.slot_bytes
    slot = np.where(place["source"] < (plan.before.captures if plan.before else 0), 0, slot)
    return np.clip(slot, 0, plan.slot_count - 1)
