"""Gaps and repeats in the sequence numbers of idempotent producers (KIP-98).

A producer numbers its records per partition. A batch has the sequence number of its first record,
and the next batch continues after its last record; 0 follows 2^31-1. So the batches of one
(producer id, epoch, topic, partition) cover one range without gaps. Every captured batch counts,
also one that was refused or has no response. So a gap means that batches were not captured or not
sent, not that a broker refused them. A batch repeats another if the same sequence number was sent
before and was not refused, or if the broker says so.

A later retry fills a gap, so gaps need no order but to unwrap numbers. Restarts and repeats
compare a batch with those before it.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Bools, Ints
from kdissect.kafka.assembly import Anomaly
from kdissect.protocol.error_codes import ErrorCode
from kdissect.stories.events import NOT_ANSWERED, EventKind, begins
from kdissect.tables.anomalies import anomaly_columns, texts, texts_of_kinds
from kdissect.tables.schemas import ANOMALIES

WRAP = 1 << 31


def sequence_anomalies(events: pa.Table) -> pa.Table:
    """Rows of `anomalies` from PRODUCER_EVENT in order of time."""
    step = events["step"].to_numpy()
    rows = np.flatnonzero(
        (step == EventKind.PRODUCE) & (events["base_sequence"].fill_null(-1).to_numpy() >= 0)
    )
    if not len(rows):
        return ANOMALIES.empty_table()
    group = _groups(events, rows, step)
    base = events["base_sequence"].to_numpy()[rows].astype(np.int64)
    count = events["sequence_count"].to_numpy()[rows]
    error = events["error_code"].fill_null(NOT_ANSWERED).to_numpy()[rows].astype(np.int64)
    order = np.argsort(group, kind="stable")
    group, base, count, error = group[order], base[order], count[order], error[order]
    group = _restarted(group, base, error)
    start = _unwrapped(group, base)
    missing = _gaps(group, start, count)
    repeats, unanswered = _repeats(group, start, error)
    gaps, again = np.flatnonzero(missing), np.flatnonzero(repeats)
    at = np.concatenate([gaps, again])
    kind = np.repeat([Anomaly.SEQUENCE_GAP, Anomaly.SEQUENCE_DUPLICATE], [len(gaps), len(again)])
    number = np.concatenate([missing[gaps], unanswered[again].astype(np.int64)])
    row = rows[order[at]]
    in_order = np.lexsort((kind, row))
    return _anomalies(events.take(pa.array(row[in_order])), kind[in_order], number[in_order])


def _groups(events: pa.Table, rows: Ints, step: Ints) -> Ints:
    """A number per (producer, epoch, topic, partition), and per assignment of the producer id.

    If an id and epoch are assigned twice, the captures are of two clusters, so each assignment
    begins new groups.
    """
    producer = codes(events["producer_id"], events["producer_epoch"])
    given = step == EventKind.INIT
    order = np.argsort(producer, kind="stable")
    assignments = np.cumsum(given[order])
    first = np.searchsorted(producer[order], producer[order])
    of_earlier_producers = assignments[first] - given[order][first]
    life = np.zeros(len(step), np.int64)
    life[order] = assignments - of_earlier_producers
    return codes(
        pa.array(producer[rows]),
        pa.array(life[rows]),
        events["topic"].take(pa.array(rows)),
        events["partition"].take(pa.array(rows)),
    )


def codes(*columns: pa.Array | pa.ChunkedArray) -> Ints:
    """int64[n]: a dense number per distinct combination of values."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        encoded = pc.dictionary_encode(column, null_encoding="encode")
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        index = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        _, code = np.unique(code * (len(encoded.dictionary) + 1) + index, return_inverse=True)
    return code.astype(np.int64)


def _restarted(group: Ints, base: Ints, error: Ints) -> Ints:
    """New groups where clients before 2.5 restart at 0 in the same epoch, after
    UNKNOWN_PRODUCER_ID."""
    lost = np.concatenate([[False], error[:-1] == ErrorCode.UNKNOWN_PRODUCER_ID])
    # each restart gets a number of its own
    return np.cumsum(begins(group) | lost & (base == 0)).astype(np.int64)


def _unwrapped(group: Ints, base: Ints) -> Ints:
    """Sequence numbers continued past 2^31-1, each within half a turn of the previous batch."""
    step = np.diff(base, prepend=base[:1])
    step = (step + WRAP // 2) % WRAP - WRAP // 2
    new = begins(group)
    step[new] = 0
    total = np.cumsum(step)
    firsts = np.flatnonzero(new)
    which = np.cumsum(new) - 1
    return total - total[firsts][which] + base[firsts][which]


def _gaps(group: Ints, start: Ints, count: Ints) -> Ints:
    """int64 per batch: sequence numbers directly before it that no batch covers."""
    order = np.lexsort((start, group))
    g, s = group[order], start[order]
    end = s + count[order]
    missing = np.zeros(len(group), np.int64)
    # the highest end so far within each group, by ranks of (group, end)
    by_end = np.lexsort((end, g))
    reach = end[by_end][np.maximum.accumulate(np.argsort(by_end, kind="stable"))]
    gap = np.maximum(s - np.roll(reach, 1), 0)
    gap[begins(g)] = 0
    missing[order] = gap
    return missing


def _repeats(group: Ints, start: Ints, error: Ints) -> tuple[Bools, Bools]:
    """(bool: the batch repeats another one, bool: and no earlier copy was acknowledged)."""
    refused = (
        (error != 0) & (error != NOT_ANSWERED) & (error != ErrorCode.DUPLICATE_SEQUENCE_NUMBER)
    )
    order = np.lexsort((np.arange(len(group)), start, group))
    g, s = group[order], start[order]
    new = begins(g, s)
    first = np.flatnonzero(new)[np.cumsum(new) - 1]

    def earlier(flags: Bools) -> Bools:
        """bool per batch: an earlier copy has the flag."""
        before: Ints = np.cumsum(flags[order]) - flags[order]
        result: Bools = np.zeros(len(g), bool)
        result[order] = before > before[first]
        return result

    taken = earlier(~refused)
    repeats = taken | (error == ErrorCode.DUPLICATE_SEQUENCE_NUMBER)
    return repeats, repeats & taken & ~earlier(~refused & (error != NOT_ANSWERED))


_GAP, _BROKER_HAS_IT, _UNANSWERED, _AGAIN = range(4)
_WHERE = "producer {producer_id} epoch {producer_epoch}, {topic}-{partition}: "
_TEXTS = (
    "{number} sequence numbers before {base_sequence} are in no batch",
    "the broker has sequence {base_sequence} already",
    "sequence {base_sequence} sent again; an earlier copy was not answered",
    "sequence {base_sequence} sent again",
)


def _anomalies(events: pa.Table, kind: Ints, number: Ints) -> pa.Table:
    """Rows for these events; number: sequence numbers of a gap, or whether a copy has no
    response."""
    error = events["error_code"].fill_null(NOT_ANSWERED).to_numpy()
    code = np.where(number != 0, _UNANSWERED, _AGAIN)
    code[error == ErrorCode.DUPLICATE_SEQUENCE_NUMBER] = _BROKER_HAS_IT
    code[kind == Anomaly.SEQUENCE_GAP] = _GAP
    shown = {
        name: pc.fill_null(pc.cast(events[name].combine_chunks(), pa.string()), "None")
        for name in ("producer_id", "producer_epoch", "topic", "partition", "base_sequence")
    }
    shown["number"] = pc.cast(pa.array(number), pa.string())

    def text(which: int, rows: Ints) -> pa.Array:
        some = {name: column.take(pa.array(rows)) for name, column in shown.items()}
        return texts(_WHERE + _TEXTS[which], len(rows), **some)

    def column(name: str) -> pa.Array:
        return pc.cast(events[name].combine_chunks(), pa.int64())

    return anomaly_columns(
        kind,
        detail=texts_of_kinds(code, text),
        connection_id=column("connection_id"),
        exchange_id=column("exchange_id"),
        capture_id=column("capture_id"),
        packet=column("packet"),
        direction=np.zeros(len(kind), np.uint8),
        pos=column("batch_pos"),
        byte_count=column("size"),
    )
