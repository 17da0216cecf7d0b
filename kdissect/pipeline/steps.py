"""The four steps of a run as plain functions over rows; `local` and `spark` only move the rows.

scan      one split      -> SEGMENTS rows keyed by bucket (a hash of the endpoints), STATS
assemble  one bucket     -> EXCHANGES rows keyed by slot (a range of the captures' bytes),
                            FACTS to every slot, TABLE rows (connections, anomalies), STATS;
                            rows that later captures may change go to a slot of their own
decode    one slot       -> tables into a sink, EVENTS rows keyed by group or producer, RESULT,
                            PIECES rows (of snapshots: analysis/snapshots.py) keyed by snapshot
analyse   one such key   -> tables into a sink (stories over many messages, batches in many pieces)

A bucket holds whole connections, a slot about equal bytes whatever the connections; both depend
on the input and the options alone, so the rows are the same however many workers there are.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.analysis.analyse import analyse
from kdissect.analysis.events import Collector
from kdissect.capture.fragments import CONFLICT, Joined
from kdissect.capture.index import SegmentBatch
from kdissect.capture.ranged import Version
from kdissect.capture.scan import ScanResult, scan
from kdissect.capture.source import Sources
from kdissect.capture.split import CaptureInfo, Split
from kdissect.capture.spool import Held
from kdissect.pipeline import kept, slices
from kdissect.pipeline.beside import lane_parts, learnt_and_packed
from kdissect.pipeline.bucket import (
    PART_ROWS,
    THREADS,
    Gathered,
    Part,
    at_hand,
    packed_parts,
    parts,
)
from kdissect.pipeline.choose import (
    anomalies_within,
    connections_within,
    exchanges_within,
    is_within,
    of_hosts,
)
from kdissect.pipeline.decode import Decoder, Sink
from kdissect.pipeline.facts import (
    Facts,
    Learnt,
    brokers_table,
    topics_table,
    with_owners,
)
from kdissect.pipeline.follow import REASON as NOT_FOLLOWED
from kdissect.pipeline.follow import follow
from kdissect.pipeline.late import Late
from kdissect.pipeline.options import MB, Options
from kdissect.pipeline.snapshots import write_joined
from kdissect.rows import gather_ranges, take
from kdissect.stream.assemble import assemble, paired_frames
from kdissect.stream.index import Anomaly, Assembly
from kdissect.stream.options import StreamOptions
from kdissect.stream.tails import Open
from kdissect.tables.anomalies import (
    AnomalyRow,
    anomalies_table,
    anomaly_columns,
    in_parts,
    stream_anomalies,
    texts,
)
from kdissect.tables.connections import connections_table
from kdissect.tables.redact import TEXT
from kdissect.tables.schemas import FIXED_TABLES
from kdissect.tables.values import binaries, ints, plain

ROW_BYTES_MAX = 4 * MB  # of one shuffled row; Spark's Arrow batches hold several
BUCKET_BYTES = 32 * MB  # of capture per bucket, on average
SLOT_BYTES_MAX = 64 * MB
SLOT_BYTES_MIN = 8 * MB
TLS_KEY_LOG = 0x544C534B  # type of a pcapng's decryption secrets
TASK_BYTES = 32 * MB  # of capture for each of two tasks a core that scan or assemble; else one
EVENT_KEY_BYTES = 64 * MB  # of capture per key of events; a small input has one


class Kind(IntEnum):
    """What a row carries; decode reads a slot's rows in this order."""

    FACTS = 0
    STATS = 1
    TABLE = 2
    SEGMENTS = 3
    EXCHANGES = 4
    EVENTS = 5
    RESULT = 6
    KEPT = 7  # of connections that go on
    PIECES = 8  # last: they are read one after another
    PAYLOAD = 9  # of the SEGMENTS rows of a bucket, in their order


class Row(NamedTuple):
    """A row between steps: key is the bucket, the slot or the events' key."""

    key: int
    kind: int
    order: int
    data: bytes


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything a task needs to know; made once, picklable."""

    paths: tuple[str, ...]  # what is read: the captures, or their spooled copies
    sizes: tuple[int, ...]  # of these, in bytes
    captures: tuple[CaptureInfo, ...]  # in the order of `source` numbers
    capture_ids: tuple[int, ...]
    splits: tuple[Split, ...]
    fragments: Joined | None
    bucket_count: int
    slot_bytes: int
    options: Options
    versions: tuple[Version | None, ...] = ()  # of the paths that are objects in stores
    keeps: bool = False  # what `--append` needs
    before: kept.Before | None = None  # the first captures are of it, and are not read

    @property
    def source_start(self) -> list[int]:
        """Position of each source's first byte in the run's bytes."""
        return [0, *itertools.accumulate(self.sizes)][: len(self.sizes)]

    @property
    def byte_count(self) -> int:
        return sum(self.sizes)

    @property
    def slot_count(self) -> int:
        return max(1, -(-self.byte_count // self.slot_bytes))

    @property
    def open_slot(self) -> int:
        """The slot of rows that later captures may change; the last one."""
        return self.slot_count if self.keeps else -1

    @property
    def key_count(self) -> int:
        """Of slots, with that one."""
        return self.slot_count + self.keeps

    @property
    def split_count(self) -> int:
        """Of captures, and of what is kept: the scan's tasks."""
        return len(self.splits) + (len(self.before.open_files) if self.before else 0)

    @property
    def end_ns(self) -> int:
        """The latest packet's time."""
        times = [info.last_time_ns for info in self.captures if info.last_time_ns is not None]
        return max(times, default=0)

    @property
    def event_key_count(self) -> int:
        """Keys over which events of groups and producers are spread."""
        byte_count = self.byte_count + (self.before.byte_count if self.before else 0)
        return max(1, min(4096, -(-byte_count // EVENT_KEY_BYTES)))

    def threads(self, packet_count: int) -> int:
        """For a bucket of so many packets: THREADS where it has more than twice its share, since
        other cores have less to do then."""
        first = self.before.captures if self.before else 0
        total = sum(info.packet_count for info in self.captures if info.source >= first)
        is_giant = packet_count > max(PART_ROWS, 2 * total // self.bucket_count)
        return THREADS if is_giant else 1

    def sources(self) -> Sources:
        return Sources(list(self.paths), list(self.versions))

    def key_logs(self, sources: Sources) -> list[memoryview]:
        """The texts of key log files and of the secrets inside captures."""
        files = Sources(list(self.options.keylog))
        texts = [files.data(number) for number in range(len(files))]
        for info in self.captures:
            for kind, pos, length in info.secrets:
                if kind == TLS_KEY_LOG and info.source >= 0:
                    texts.append(sources.part(info.source, pos, pos + length).copy())
        return [memoryview(text) for text in texts]  # type: ignore[arg-type]


def tasks(byte_count: int, parallelism: int) -> int:
    """Tasks that scan or assemble an input of that size: two a core, which even out, if each has
    enough to do. One takes Spark and its worker 20 ms, whatever it does."""
    return parallelism * (2 if byte_count >= 2 * parallelism * TASK_BYTES else 1)


def sized(byte_count: int, parallelism: int) -> tuple[int, int]:
    """(bucket_count, slot_bytes) for an input of that size on so many cores.

    Slots are alike and a multiple of the cores, so that none waits for the others at the end. Fewer
    and larger ones would save tasks, but what is fresh in memory costs more than that.
    """
    slot_count = min(2 * parallelism, byte_count // SLOT_BYTES_MIN)
    slot_count = max(1, slot_count, -(-byte_count // SLOT_BYTES_MAX))
    if slot_count > 1:
        slot_count = -(-slot_count // parallelism) * parallelism
    slot_bytes = max(1, -(-byte_count // slot_count))
    return max(1, min(4096, -(-byte_count // BUCKET_BYTES) * 2)), slot_bytes


# -- scan -----------------------------------------------------------------------------------


def scan_step(plan: RunPlan, sources: Sources, number: int) -> Iterator[Row]:
    """Split `number` to rows keyed by bucket; behind the splits, a file of what was kept."""
    began = time.perf_counter()
    if plan.before is not None and number >= len(plan.splits):
        path = plan.before.open_files[number - len(plan.splits)]
        pieces = kept.open_pieces(path, _bucket_of, plan.bucket_count, ROW_BYTES_MAX)
        for order, (bucket, data) in enumerate(pieces):
            yield Row(bucket, Kind.KEPT, (number << 20) + order, data)
        return
    split = plan.splits[number]
    result = of_hosts(scan(split, sources, plan.fragments), plan.options.hosts)
    stats: dict[str, Any] = {
        "source": split.source,
        "packet_count": result.packet_count,
        "tcp_packet_count": result.tcp_packet_count,
        "ignored": result.ignored_reasons,
    }
    for part in _sliced(_scan_anomalies(plan, result, is_first=number == 0)):
        yield Row(0, Kind.TABLE, number, _packed_table("anomalies", part))
    yield from _bucket_rows(result.batch, plan.bucket_count, number, sources)
    stats["timings"] = {
        "scan_s": time.perf_counter() - began,
        "scan_bytes": split.end - split.pos,
    }
    yield Row(0, Kind.STATS, number, json.dumps(stats).encode())


def _scan_anomalies(plan: RunPlan, result: ScanResult, is_first: bool) -> pa.Table:
    """Anomalies of packets; those of the whole run come with the first split."""
    rows = [*_fragment_faults(plan, result)]
    if is_first and plan.fragments is not None and plan.fragments.ignored_count:
        count = plan.fragments.ignored_count
        detail = f"{count} IP fragments beyond the limit of fragments were not joined"
        rows.append(AnomalyRow(Anomaly.LIMIT, detail))
    return pa.concat_tables([_cut_packets(plan, result), anomalies_table(rows)])


def _cut_packets(plan: RunPlan, result: ScanResult) -> pa.Table:
    """A packet_cut anomaly for each segment that a snap length cut."""
    options = plan.options
    segments = take(result.batch.segments, result.cut_segments)
    segments = segments[is_within(segments["time_ns"], options.time_from_ns, options.time_to_ns)]
    count = len(segments)
    captured, length = segments["captured"], segments["length"]
    return anomaly_columns(
        np.full(count, Anomaly.PACKET_CUT, np.uint8),
        texts(
            "the capture holds {captured} of the {length} bytes of a segment",
            count,
            captured=captured,
            length=length,
        ),
        capture_id=pa.repeat(pa.scalar(plan.capture_ids[result.source], pa.int64()), count),
        packet=ints(segments["packet"], pa.int64()),
        byte_count=ints(length - captured, pa.int64()),
    )


def _fragment_faults(plan: RunPlan, result: ScanResult) -> Iterator[AnomalyRow]:
    """Anomalies of IP fragments that never came, or differ where they overlap."""
    options = plan.options
    faults = result.fragment_faults
    times = np.array([fault.time_ns for fault in faults], np.int64)
    within = is_within(times, options.time_from_ns, options.time_to_ns)
    for fault in (faults[row] for row in np.flatnonzero(within).tolist()):
        count = max(fault.byte_count, 0)
        kind = Anomaly.LOST_FRAGMENTS
        detail = f"{count} bytes of an IP datagram are in no fragment of the capture"
        if fault.byte_count < 0:
            detail = "the last fragment of an IP datagram is not in the capture"
        if fault.kind == CONFLICT:
            kind = Anomaly.OVERLAP_CONFLICT
            detail = f"{count} bytes of an IP fragment differ from those before, which count"
        yield AnomalyRow(
            kind,
            detail,
            capture_id=plan.capture_ids[fault.source],
            packet=fault.packet,
            byte_count=count if fault.byte_count >= 0 else None,
        )


def _bucket_rows(
    batch: SegmentBatch, bucket_count: int, number: int, sources: Sources
) -> Iterator[Row]:
    """Segments by bucket; of objects in stores their payload travels along, piece by piece.

    What a bucket needs lies all over the captures: in a store that would be a request for every few
    packets, or all of the captures for every bucket.
    """
    if not len(batch.segments):
        return
    bucket = _bucket_of(batch, bucket_count)
    of_segment = bucket[batch.segments["endpoints"]]
    order = np.argsort(of_segment.astype(np.uint16), kind="stable")  # buckets are few: by digits
    bounds = np.flatnonzero(np.diff(of_segment[order])) + 1
    row_max = ROW_BYTES_MAX // batch.segments.itemsize
    for rows in np.split(order, bounds):
        key = int(of_segment[rows[0]])
        for start in range(0, len(rows), row_max):
            segments = take(batch.segments, rows[start : start + row_max])
            used, index = np.unique(segments["endpoints"], return_inverse=True)
            segments["endpoints"] = index
            part = SegmentBatch(batch.endpoints[used], segments)
            order_number = (number << 20) + start // row_max
            yield Row(key, Kind.SEGMENTS, order_number, part.to_bytes())
            if sources.is_far:
                for piece, data in enumerate(sources.payload(segments, ROW_BYTES_MAX)):
                    yield Row(key, Kind.PAYLOAD, (order_number << 20) + piece, data)


def _bucket_of(batch: SegmentBatch, bucket_count: int) -> Any:
    """Bucket per endpoint pair: a hash of its 40 bytes, the same in every process."""
    words = np.frombuffer(batch.endpoints.tobytes(), "<u8").reshape(len(batch.endpoints), 5)
    digest = np.zeros(len(words), np.uint64)
    for column in range(5):
        digest = (digest ^ words[:, column]) * np.uint64(0x9E3779B97F4A7C15)
        digest ^= digest >> np.uint64(29)
    return (digest % np.uint64(bucket_count)).astype(np.int64)


# -- assemble -------------------------------------------------------------------------------


def assembled(
    plan: RunPlan, sources: Sources, batches: list[SegmentBatch]
) -> tuple[SegmentBatch, Assembly, Sources]:
    """The segments of one bucket, what they come to, and the bytes of that."""
    limits = plan.options.limits
    batch = follow(SegmentBatch.concat(batches), limits.connections).batch
    key_logs = plan.key_logs(sources)
    sources = at_hand(sources, batch.segments)
    assembly = assemble(batch, sources, _stream_options(plan), key_logs)
    if len(assembly.carried.data):
        sources = sources.carrying(assembly.carried.data)
    return batch, assembly, sources


def _stream_options(plan: RunPlan) -> StreamOptions:
    limits = plan.options.limits
    return StreamOptions(plan.options.ports, limits.frame_size, limits.gaps)


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
    paired = paired_frames(batches, sources, _stream_options(plan), key_logs, scratch)
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
        for part_table in _sliced(table.filter(pa.array(overlaps))):
            yield Row(here, Kind.TABLE, bucket, _packed_table("connections", part_table))
    stays = anomalies_within(shown.anomalies, with_exchange, overlaps)
    told = replace(shown, anomalies=shown.anomalies[stays])
    for table in _assembly_anomalies(plan, sources, told, given_up_pairs):
        for part_table in _sliced(table):
            yield Row(here, Kind.TABLE, bucket, _packed_table("anomalies", part_table))
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
            some = slices.take(some, np.arange(count))
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
        for part in _sliced(table.filter(pa.array(lane.connections))):
            yield Row(here, Kind.TABLE, bucket, _packed_table("connections", part))
        for anomalies in _assembly_anomalies(plan, sources, lane.assembly, 0):
            for part in _sliced(anomalies):
                yield Row(here, Kind.TABLE, bucket, _packed_table("anomalies", part))
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
    place = slices.places(assembly.exchanges, assembly.extents, assembly.carried)
    starts = np.array([*plan.source_start, 0], np.int64)
    slot = (starts[place["source"]] + place["pos"]) // plan.slot_bytes
    slot = np.where(place["source"] < (plan.before.captures if plan.before else 0), 0, slot)
    return np.clip(slot, 0, plan.slot_count - 1)


# -- decode ---------------------------------------------------------------------------------


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
            name, table = _unpacked_table(row.data)  # facts come before tables
            if name == "connections":
                late.add_users(table)
                table = with_owners(table, facts)
            sink(name, table)
        else:
            parts[row.order] = slices.from_bytes(row.data)
    state: dict[str, Any] = {}
    if is_first:
        sink("topics", topics_table(facts))
        sink("brokers", brokers_table(facts))
        sink("captures", captures_table(plan, stats))
        sink("anomalies", _cut_captures(plan))
        state = kept.gathered(plan, stats, facts)
    assembly = slices.concat([parts[order] for order in sorted(parts)])
    if len(assembly.carried.data):
        sources = sources.carrying(assembly.carried.data)
    del parts
    for side in slices.SIDES:
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
    timings: Counter[str] = Counter()
    for entry in stats:
        timings.update(entry.get("timings", {}))
    timings["decode_s"] += time.perf_counter() - began  # type: ignore[assignment]
    timings["decode_bytes"] += byte_count
    result = json.dumps({"timings": dict(timings), "state": state}).encode()
    yield Row(slot % plan.event_key_count, Kind.RESULT, slot, result)


def analyse_step(
    plan: RunPlan, events: list[bytes], pieces: Iterable[bytes], sink: Sink
) -> dict[str, Any]:
    """All events of one key, and its pieces in their order, to tables; returns what the driver
    sums up."""
    began = time.perf_counter()
    for name, table in analyse(events):
        sink(name, table)
    write_joined(pieces, plan.options, sink)
    return {"timings": {"analyse_s": time.perf_counter() - began}}


def _cut_captures(plan: RunPlan) -> pa.Table:
    """A capture_cut anomaly for each file that could not be read to its end."""
    return anomalies_table(
        AnomalyRow(
            Anomaly.CAPTURE_CUT,
            info.error or "",
            capture_id=plan.capture_ids[number],
            packet=info.error_packet if info.error_packet >= 0 else None,
            pos=info.error_pos if info.error_pos >= 0 else None,
        )
        for number, info in enumerate(plan.captures)
        if info.source >= (plan.before.captures if plan.before else 0) and info.error is not None
    )


def captures_table(plan: RunPlan, stats: list[dict[str, Any]]) -> pa.Table:
    """Rows of `captures`: what the split walk knew and what the scans counted."""
    count = len(plan.captures)
    packets, tcp = [0] * count, [0] * count
    duplicates = [0] * count
    ignored: list[Counter[str]] = [Counter() for _ in range(count)]
    for entry in [*stats, *(json.loads(plan.before.stats) if plan.before else ())]:
        for source, number in entry.get("duplicates", {}).items():
            duplicates[int(source)] += number
        for source, number in entry.get("given_up", {}).items():
            tcp[int(source)] -= number
            ignored[int(source)][NOT_FOLLOWED] += number
        if "source" in entry:
            source = entry["source"]
            packets[source] += entry["packet_count"]
            tcp[source] += entry["tcp_packet_count"]
            ignored[source].update(entry["ignored"])
    rows = []
    for number, info in enumerate(plan.captures):
        assert packets[number] == info.packet_count, (info.path, packets[number])
        rows.append(
            {
                "capture_id": plan.capture_ids[number],
                "path": info.path,
                "format": info.format,
                "compression": info.compression,
                "link_types": list(info.link_types),
                "packet_count": info.packet_count,
                "byte_count": info.byte_count,
                "first_time": _time_us(info.first_time_ns),
                "last_time": _time_us(info.last_time_ns),
                "truncated_packet_count": info.truncated_packet_count,
                "tcp_packet_count": tcp[number],
                "duplicate_packet_count": duplicates[number],
                "ignored_packet_count": sum(ignored[number].values()),
                "ignored_reasons": sorted(ignored[number].items()),
                "error": info.error,
            }
        )
    schema = FIXED_TABLES["captures"]
    loose = schema
    for name in ("first_time", "last_time"):
        loose = loose.set(loose.get_field_index(name), pa.field(name, pa.int64()))
    table = pa.Table.from_pylist(rows, schema=loose)
    for name in ("first_time", "last_time"):
        index = schema.get_field_index(name)
        column = table.column(name).combine_chunks().view(schema.field(name).type)
        table = table.set_column(index, schema.field(name), column)
    return table


def _time_us(time_ns: int | None) -> int | None:
    inside = time_ns is not None and -62_135_596_800 * 10**9 <= time_ns < 253_402_300_800 * 10**9
    return time_ns // 1000 if inside and time_ns is not None else None


# -- tables as rows -------------------------------------------------------------------------


def _sliced(table: pa.Table) -> Iterator[pa.Table]:
    if not table.num_rows:
        return
    row_max = max(1, int(table.num_rows * ROW_BYTES_MAX // max(table.nbytes, 1)))
    for start in range(0, table.num_rows, row_max):
        yield table.slice(start, row_max)


def _packed_table(name: str, table: pa.Table) -> bytes:
    out = pa.BufferOutputStream()
    table = plain(table, FIXED_TABLES[name]).replace_schema_metadata({"table": name})
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return bytes(out.getvalue().to_pybytes())


def _unpacked_table(data: bytes) -> tuple[str, pa.Table]:
    table = pa.ipc.open_stream(data).read_all()
    name = table.schema.metadata[b"table"].decode()
    return name, table.replace_schema_metadata(None)
