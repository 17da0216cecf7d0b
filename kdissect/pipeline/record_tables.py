"""Write the record sets of decoded messages to `record_batches`, `records` and internal tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Ints, Rows
from kdissect.codec.record_batches import FaultStage, iter_record_chunks
from kdissect.codec.redaction import TEXT
from kdissect.kafka.assembly import Anomaly
from kdissect.pipeline.message_tables import NO_BYTES, TableOutput, add_anomalies
from kdissect.pipeline.saved_state import NamesUsed
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import Role
from kdissect.protocol.model import REQUEST
from kdissect.status import REASONS, Status
from kdissect.stories.events import Collector
from kdissect.stories.producer_messages import produce_events
from kdissect.tables.anomalies import texts
from kdissect.tables.internal import RecordFault, internal_rows
from kdissect.tables.message_chunk import MessageChunk
from kdissect.tables.message_marks import ChunkMarks, first_match
from kdissect.tables.payload import shown, with_decoded
from kdissect.tables.records import (
    FETCH,
    FROM_PRODUCE,
    NO_OFFSET,
    RAFT_FETCH,
    REPLICA_FETCH,
    SHARE_FETCH,
    SNAPSHOT,
    RecordRows,
)

_RECORD_SOURCES = {
    ApiKey.PRODUCE: FROM_PRODUCE,
    ApiKey.FETCH: FETCH,
    ApiKey.SHARE_FETCH: SHARE_FETCH,
    ApiKey.FETCH_SNAPSHOT: SNAPSHOT,
}

_FAULTS: dict[tuple[FaultStage, Status], Anomaly] = {
    (FaultStage.FRAMING, Status.UNKNOWN_MAGIC): Anomaly.UNKNOWN_MAGIC,
    (FaultStage.CRC, Status.BAD_CRC): Anomaly.WRONG_CRC,
    (FaultStage.CODEC, Status.UNKNOWN_CODEC): Anomaly.DECOMPRESSION_FAILED,
    (FaultStage.CODEC, Status.CORRUPT): Anomaly.DECOMPRESSION_FAILED,
    (FaultStage.CODEC, Status.LIMIT): Anomaly.DECOMPRESSION_LIMIT,
    (FaultStage.RECORDS, Status.BAD_CRC): Anomaly.WRONG_CRC,
    (FaultStage.RECORDS, Status.COUNT_MISMATCH): Anomaly.RECORD_COUNT_MISMATCH,
    (FaultStage.RECORDS, Status.LIMIT): Anomaly.LIMIT,
}


def decode_records(
    chunk: MessageChunk, output: TableOutput, names_used: NamesUsed, events: Collector
) -> None:
    """Write the records of a chunk and their anomalies; produced batches also become events.

    names_used: receives topics that are known by name only.
    """
    frames, marks = chunk.frames, chunk.marks
    sets, lead = marks.record_sets(frames.api_key)
    if not len(sets):
        return
    by_name = np.unique(sets["topic"][(sets["topic"] >= 0) & (sets["topic_id"] < 0)])
    names_used |= {("topic", marks.topics.names[code]) for code in by_name.tolist()}
    source = _record_source(frames.api_key[sets["row"]], sets, marks)
    exchange_id = frames.exchanges["exchange_id"][sets["row"]]
    rows = RecordRows(sets, lead, exchange_id, source, _produced_offset(sets, marks), marks.topics)
    start, length = np.ascontiguousarray(sets["value"] + lead), sets["length"] - lead
    for part in iter_record_chunks(frames.buf, start, length, output.options.limits.of_records):
        raw = pa.table(part.batches)
        batches, records = rows.add(raw, pa.table(part.records))
        for table in produce_events(chunk, sets, source, raw, batches):
            events.add("producers", table)
        if batches.num_rows:
            output.sink("record_batches", batches)
        if records.num_rows:
            set_index = part.records.column("set_index").to_numpy()
            table, faults = _as_shown(records, output)
            output.sink("records", table)
            _internal_anomalies(chunk, output, sets, faults, set_index)
        _record_anomalies(chunk, output, sets, part.faults)
    if lead.any():
        output.sink("record_batches", rows.batch_ends())


def _record_source(api_key: Ints, sets: Rows, marks: ChunkMarks) -> Ints:
    """int8[sets]: kind of message that each record set came in."""
    source = np.zeros(len(sets), np.int8)
    for key, code in _RECORD_SOURCES.items():
        source[api_key == key] = code
    # Fetch: a follower sets its broker id as replica_id, a consumer sends -1.
    replica, has_replica = marks.first_number(Role.REPLICA_ID)
    follower = has_replica[sets["row"]] & (replica[sets["row"]] >= 0)
    source[(source == FETCH) & follower] = REPLICA_FETCH
    is_fetch = np.isin(source, (FETCH, REPLICA_FETCH))
    source[marks.topics.is_metadata(sets["topic"]) & is_fetch] = RAFT_FETCH
    return source


def _produced_offset(sets: Rows, marks: ChunkMarks) -> Ints:
    """int64[sets]: base offset that the Produce response assigned."""
    given = marks.by_partition(Role.BASE_OFFSET)
    offset = np.full(len(sets), NO_OFFSET, np.int64)
    produced = np.flatnonzero(sets["side"] == REQUEST)
    if len(given) and len(produced):
        match = first_match(sets[produced], given)
        offset[produced] = np.where(match >= 0, given["value"][match], NO_OFFSET)
    return offset


def _as_shown(records: pa.Table, output: TableOutput) -> tuple[pa.Table, list[RecordFault]]:
    """(rows of `records` as the options allow, faults). Writes rows of internal topics to their
    tables."""
    options = output.options
    records, faults = internal_rows(records, options.payload, options.reveal_secrets, output.sink)
    records = shown(records, options.payload)
    if options.decode_values is not None:
        records = with_decoded(records, options.decode_values, options.payload)
    return records, faults


def _record_anomalies(chunk: MessageChunk, output: TableOutput, sets: Rows, faults: Rows) -> None:
    """Write anomalies of record batches, without bytes."""
    is_secret = chunk.marks.topics.is_metadata(sets["topic"]) & (not output.options.reveal_secrets)
    for some, side, kind, reason in _by_reason(faults, sets["side"][faults["set_index"]]):
        batch, at = some["batch_index"], some["set_index"]
        rows, pos, secret = sets["row"][at], some["pos"].astype(np.int64), is_secret[at]
        add_anomalies(
            chunk,
            output,
            kind,
            rows,
            side,
            texts(f"record batch {{batch}}: {reason}", len(some), batch=batch, n=some["key_count"]),
            (pos, pos + some["byte_count"]),
            pc.if_else(pa.array(secret), pa.scalar(TEXT.encode()), NO_BYTES),
        )


def _by_reason(faults: Rows, side: Ints) -> Iterator[tuple[Rows, int, Anomaly, str]]:
    """Yield FAULT rows by reason and side: (rows, side, kind, reason).

    side: int[n]. The reason may contain {n}, which stands for the row's `key_count`.
    """
    codes = (faults["stage"].astype(np.int64) << 16) | (faults["kind"].astype(np.int64) << 8) | side
    for code in np.unique(codes).tolist():
        stage, status = FaultStage(code >> 16), Status((code >> 8) & 255)
        kind, reason = _FAULTS.get((stage, status)), REASONS[status]
        if stage is FaultStage.TEXT:
            kind, reason = Anomaly.INVALID_UTF8, "{n} header keys are no UTF-8"
        chosen = faults[codes == code]
        yield chosen, code & 255, Anomaly.MALFORMED_RECORDS if kind is None else kind, reason


def _internal_anomalies(
    chunk: MessageChunk,
    output: TableOutput,
    sets: Rows,
    faults: Sequence[RecordFault],
    set_index: Ints,
) -> None:
    """Write anomalies of internal topics' records; each shows the record's value."""
    by_kind: dict[tuple[Anomaly, int], list[RecordFault]] = defaultdict(list)
    for fault in faults:
        by_kind[fault.kind, int(sets["side"][set_index[fault.row]])].append(fault)
    for (kind, side), some in by_kind.items():
        at = set_index[[fault.row for fault in some]]
        rows, start = sets["row"][at], sets["value"][at]
        data = [TEXT.encode() if fault.is_secret else fault.data for fault in some]
        add_anomalies(
            chunk,
            output,
            kind,
            rows,
            side,
            pa.array([fault.detail for fault in some], pa.string()),
            (start, start + sets["length"][at]),
            pa.array(data, pa.binary()),
        )
