"""Scan: turn the packets of one split into segments, keyed by the bucket of their endpoints."""

from __future__ import annotations

import pickle
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from kdissect.arrays import Ints, renumbered, stable_order, take
from kdissect.capture.mapped_files import Sources
from kdissect.capture.scan import ScanResult
from kdissect.capture.scan import scan as scan_packets
from kdissect.capture.segments import SEGMENT, SegmentBatch
from kdissect.capture.splits import Split
from kdissect.kafka.assembly import Anomaly
from kdissect.pipeline.filters import is_within, of_hosts
from kdissect.pipeline.options import MB
from kdissect.pipeline.plan import RunPlan, hashed_input
from kdissect.pipeline.run_tables import RunSummary
from kdissect.pipeline.saved_state import read_state
from kdissect.pipeline.step_rows import ROW_BYTES_MAX, STATE_OPEN, RowKind, StepRow, sliced
from kdissect.resume.open_connection import endpoints_of
from kdissect.tables.anomalies import AnomalyRow, anomalies_table, anomaly_columns, texts
from kdissect.tables.arrow_arrays import packed

SEGMENT_BYTES = 16 * MB  # splits with fewer bytes of segments share rows


def scan(plan: RunPlan, sources: Sources, rows: Iterable[StepRow]) -> Iterator[StepRow]:
    """Yield the rows of all units in rows of `RunPlan.scan_rows`.

    Small splits share their rows of segments, so that these are few and large.
    """
    began = time.perf_counter()
    byte_count = size = number = 0
    waiting: list[SegmentBatch] = []
    for units in rows:
        for number, unit in pickle.loads(units.data):
            if isinstance(unit, str):
                yield from _saved_connections(plan, number, unit)
            elif isinstance(unit, int):
                yield from _hash(plan, number, unit)
            else:
                waiting.append((yield from _split_rows(plan, sources, number, unit)))
                byte_count += unit.end - unit.pos
                size += waiting[-1].segments.nbytes
                if size >= SEGMENT_BYTES:
                    yield from _bucket_rows(waiting, plan.bucket_count, number)
                    size = 0
    yield from _bucket_rows(waiting, plan.bucket_count, number)
    timings = {"scan_s": time.perf_counter() - began, "scan_bytes": byte_count}
    yield RunSummary(timings=timings).row()


def _hash(plan: RunPlan, number: int, file: int) -> Iterator[StepRow]:
    digest = hashed_input(plan.files[file], plan.folder)
    if digest is not None:
        yield RunSummary(hashes={file: digest}).row(number)


def _split_rows(
    plan: RunPlan, sources: Sources, number: int, split: Split
) -> Generator[StepRow, None, SegmentBatch]:
    """Yield the anomalies and counts of a split; returns its segments."""
    result = scan_packets(split, sources)
    result = replace(result, batch=of_hosts(result.batch, plan.options.hosts))
    source = split.source
    summary = RunSummary(
        Counter({source: result.packet_count}),
        Counter({source: result.tcp_packet_count}),
        ignored=defaultdict(Counter, {source: Counter(result.ignored_reasons)}),
    )
    yield summary.row(number)
    ignored_count = split.fragments.ignored_count if split.fragments else 0
    bucket = number % plan.bucket_count
    for table in _scan_anomalies(plan, result, ignored_count):
        for part in sliced(table):
            yield StepRow(bucket, RowKind.TABLE, number, packed("anomalies", part))
    return result.batch


def _saved_connections(plan: RunPlan, number: int, path: str) -> Iterator[StepRow]:
    """Yield the rows of a file of saved connections, by bucket."""
    saved = read_state(path)
    batch = SegmentBatch(endpoints_of(saved), np.zeros(0, SEGMENT))
    buckets, order = bucket_of(batch, plan.bucket_count), number << 20
    for bucket in np.unique(buckets).tolist():
        for part in sliced(saved.filter(pa.array(buckets == bucket))):
            yield StepRow(bucket, RowKind.STATES, order, packed(STATE_OPEN, part))
            order += 1


def _scan_anomalies(plan: RunPlan, result: ScanResult, ignored_count: int) -> Iterator[pa.Table]:
    """Anomalies of packets. ignored_count: IP fragments beyond the limit, of the whole run."""
    if len(result.cut_segments):
        yield _cut_packets(plan, result)
    rows = [*_fragment_faults(plan, result)]
    if ignored_count:
        detail = f"{ignored_count} IP fragments beyond the limit of fragments were not joined"
        rows.append(AnomalyRow(Anomaly.LIMIT, detail))
    if rows:
        yield anomalies_table(rows)


def _cut_packets(plan: RunPlan, result: ScanResult) -> pa.Table:
    """A packet_cut anomaly for each segment that a snap length cut."""
    options = plan.options
    segments = take(result.batch.segments, result.cut_segments)
    segments = segments[is_within(segments["time_ns"], options.time_from_ns, options.time_to_ns)]
    count = len(segments)
    captured, length = segments["captured"], segments["length"]
    return anomaly_columns(
        np.full(count, Anomaly.PACKET_CUT, np.uint8),
        detail=texts(
            "the capture holds {captured} of the {length} bytes of a segment",
            count,
            captured=captured,
            length=length,
        ),
        capture_id=np.full(count, plan.capture_ids[result.source]),
        packet=segments["packet"],
        byte_count=length - captured,
    )


def _fragment_faults(plan: RunPlan, result: ScanResult) -> Iterator[AnomalyRow]:
    """Anomalies of IP fragments that are missing."""
    options = plan.options
    lost = result.lost_fragments
    within = is_within(lost["time_ns"], options.time_from_ns, options.time_to_ns)
    for source, packet, count, _ in lost[within].tolist():
        detail = f"{count} bytes of an IP datagram are in no fragment of the capture"
        if count < 0:
            detail = "the last fragment of an IP datagram is not in the capture"
        yield AnomalyRow(
            Anomaly.LOST_FRAGMENTS,
            detail,
            capture_id=int(plan.capture_ids[source]),
            packet=packet,
            byte_count=count if count >= 0 else None,
        )


def _bucket_rows(batches: list[SegmentBatch], bucket_count: int, number: int) -> Iterator[StepRow]:
    """Yield the segments of the batches by bucket, and empty the list."""
    batch = batches[0] if len(batches) == 1 else SegmentBatch.concat(batches)
    batches.clear()
    if not len(batch.segments):
        return
    bucket = bucket_of(batch, bucket_count)
    of_segment = bucket[batch.segments["endpoints"]]
    order = stable_order(of_segment)
    bounds = np.flatnonzero(np.diff(of_segment[order])) + 1
    row_max = ROW_BYTES_MAX // batch.segments.itemsize
    for rows in np.split(order, bounds):
        key = int(of_segment[rows[0]])
        for start in range(0, len(rows), row_max):
            segments = take(batch.segments, rows[start : start + row_max])
            used, index = renumbered(segments["endpoints"], len(batch.endpoints))
            segments["endpoints"] = index
            part = SegmentBatch(batch.endpoints[used], segments)
            order_number = (number << 20) + start // row_max
            yield StepRow(key, RowKind.SEGMENTS, order_number, part)


def bucket_of(batch: SegmentBatch, bucket_count: int) -> Ints:
    """int64[pairs]: bucket of each endpoint pair, a hash of its 40 bytes, the same in every
    process."""
    words = np.frombuffer(batch.endpoints.tobytes(), "<u8").reshape(len(batch.endpoints), 5)
    digest = np.zeros(len(words), np.uint64)
    for column in range(5):
        digest = (digest ^ words[:, column]) * np.uint64(0x9E3779B97F4A7C15)
        digest ^= digest >> np.uint64(29)
    return (digest % np.uint64(bucket_count)).astype(np.int64)
