"""Rows of `transactions`: what a transactional producer did between two ends.

Events of one (producer id, epoch, transactional id) are ordered by time and cut after each EndTxn
that ended a transaction. With Transactions v2 (KIP-890) every transaction has an epoch of its own;
before, a producer uses one epoch for many.

The outcome of a transaction is that of the first rule that applies:
- an EndTxn was answered without error: `commit` or `abort`;
- any response has PRODUCER_FENCED or INVALID_PRODUCER_EPOCH: `fenced`;
- the coordinator wrote markers (WriteTxnMarkers with this epoch or the next one): their outcome.
  This happens after a timeout, or if the response to EndTxn was not captured;
- an EndTxn has no response, and the producer continued afterwards: as requested;
- another producer got the same transactional id: `fenced`. Otherwise `open`.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Bools, Ints
from kdissect.protocol.error_codes import ErrorCode
from kdissect.stories.events import NO_TIME, NOT_ANSWERED, EventKind, begins
from kdissect.tables.arrow_arrays import lists
from kdissect.tables.schemas import TRANSACTIONS, table_of

FENCING = (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED)
_NEVER = 2**63 - 1
_BEGINS = (EventKind.ADD, EventKind.ADD_OFFSETS, EventKind.OFFSETS, EventKind.PRODUCE)


class _Events:
    """Columns of the transactional events, in order of time."""

    def __init__(self, events: pa.Table) -> None:
        self.table = events

        def column(name: str, missing: Any = -1) -> Any:
            return events[name].fill_null(missing).to_numpy()

        self.producer = column("producer_id")
        self.epoch = column("producer_epoch").astype(np.int64)
        self.step = column("step")
        self.time_ns = column("time_ns")
        self.end_ns = column("end_ns")
        self.error = column("error_code", NOT_ANSWERED).astype(np.int64)
        self.flag = column("flag", False)
        self.exchange_id = column("exchange_id")
        self.record_count = column("record_count", 0)
        self.partition = column("partition")
        self.base_sequence = column("base_sequence")
        self.topic = events["topic"].combine_chunks().dictionary_encode()
        self.name = events["transactional_id"].combine_chunks().dictionary_encode()
        self.topic_code = self.topic.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        self.name_code = self.name.indices.fill_null(-1).to_numpy(zero_copy_only=False)

    def of(self, *steps: EventKind) -> Bools:
        return np.isin(self.step, [int(step) for step in steps])


def transactions_table(events: pa.Table) -> pa.Table:
    """`transactions` from PRODUCER_EVENT in order of time."""
    step = events["step"].to_numpy()
    transactional = (step != EventKind.PRODUCE) | events["flag"].fill_null(False).to_numpy()
    transactional_events = _Events(events.filter(pa.array(transactional)))
    rows = np.flatnonzero(
        ~transactional_events.of(EventKind.MARKER) & (transactional_events.name_code >= 0)
    )
    if not len(rows):
        return TRANSACTIONS.empty_table()
    return _Pieces(transactional_events, rows).table()


class _Pieces:
    """Transactional events cut into transactions.

    rows: indices of events, by producer, epoch and transactional id, then in order of time. start:
    where in `rows` each piece starts.
    """

    def __init__(self, events: _Events, rows: Ints) -> None:
        self.events = events
        keys = [column[rows] for column in (events.name_code, events.epoch, events.producer)]
        order = np.lexsort((rows, *keys))
        self.rows = rows[order]
        new = begins(*(key[order] for key in keys))
        # a broker assigned the same id and epoch again, so it is another cluster's producer
        given_again = events.step[self.rows] == EventKind.INIT
        self.start = np.flatnonzero(new | given_again | self._after_end())
        self.end = np.append(self.start[1:], len(self.rows))

    def _after_end(self) -> Bools:
        """bool: the previous event is an EndTxn that ended a transaction, and this one is no
        retry of it."""
        events, rows = self.events, self.rows
        is_end = events.step[rows] == EventKind.END
        done = is_end & np.isin(events.error[rows], (0, NOT_ANSWERED))
        cut = np.zeros(len(rows), bool)
        retry = is_end[1:] & (events.error[rows][:-1] == NOT_ANSWERED)
        cut[1:] = done[:-1] & ~retry
        return cut

    def table(self) -> pa.Table:
        """One row per piece that is a transaction."""
        events, rows, count = self.events, self.rows, len(self.start)
        self.piece = np.repeat(np.arange(count), self.end - self.start)
        self.producer, self.epoch, self.name = (
            column[rows[self.start]] for column in (events.producer, events.epoch, events.name_code)
        )
        step, error = events.step[rows], events.error[rows]
        agreed = np.isin(error, (0, NOT_ANSWERED))
        begins = np.isin(step, [int(begin) for begin in _BEGINS])
        ends = step == EventKind.END
        self.begin = self._edge(begins)
        self.done = self._edge(ends & (error == 0), last=True)
        self.tried = self._edge(ends & (error == NOT_ANSWERED), last=True)
        self.fenced = self._edge(np.isin(error, FENCING))
        # a piece with only refused requests never began, unless the producer was fenced
        begun = self._edge(begins & agreed)
        kept = np.max([begun, self.done, self.tried, self.fenced], axis=0) >= 0
        pairs = self._markers(begins & (error == 0), kept)
        self.marker = np.full(count, -1, np.int64)
        self.marker[pairs[0]] = pairs[1]  # in order of time, so the last one stays
        taken = (step == EventKind.PRODUCE) & agreed
        added = (
            taken | ((step == EventKind.ADD) & agreed) | ((step == EventKind.VERIFY) & (error == 0))
        )
        outcomes = [self._outcome(at) if kept[at] else ("", NO_TIME) for at in range(count)]
        begin_ns = np.where(self.begin >= 0, events.time_ns[self.begin], NO_TIME)
        end_ns = np.array([end for _, end in outcomes], np.int64)
        has_both = (begin_ns != NO_TIME) & (end_ns != NO_TIME)
        duration = np.where(has_both, end_ns - np.where(has_both, begin_ns, end_ns), 0) / 1e6
        columns = {
            "transactional_id": events.name.dictionary.take(pa.array(self.name)),
            "producer_id": self.producer,
            "producer_epoch": self.epoch,
            "begin_time": (begin_ns, begin_ns != NO_TIME),
            "end_time": (end_ns, end_ns != NO_TIME),
            "outcome": [outcome for outcome, _ in outcomes],
            "duration_ms": (duration, has_both),
            "partitions": self._partitions(rows[added], self.piece[added], pairs),
            "record_count": self._record_count(rows[taken], self.piece[taken]),
            "exchange_ids": self._exchange_ids(pairs),
            "offsets": self._offsets(step == EventKind.OFFSETS),
        }
        return table_of(TRANSACTIONS, columns).filter(pa.array(kept))

    def _edge(self, chosen: Bools, last: bool = False) -> Ints:
        """Row of the first (or last) chosen event per piece, -1 if there is none."""
        result = np.full(len(self.start), -1, np.int64)
        at = np.flatnonzero(chosen)
        at = at if last else at[::-1]
        result[self.piece[at]] = self.rows[at]  # the last value written stays
        return result

    def _markers(self, accepted: Bools, kept: Bools) -> tuple[Ints, Ints]:
        """(pieces, markers): each marker with the transaction that was open, of its epoch or the
        one below.

        Transactions v2 (KIP-890) writes markers with the next epoch, as does a coordinator that
        fences. A transaction is open from its first accepted request on: requests of the next one
        may arrive while the previous markers are being written, and are refused.
        """
        events = self.events
        since = np.full(len(self.start), _NEVER, np.int64)
        np.minimum.at(since, self.piece[accepted], events.end_ns[self.rows[accepted]])
        begun: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for at in np.argsort(since, kind="stable").tolist():
            if kept[at]:
                key = int(self.producer[at]), int(self.epoch[at])
                times, pieces = begun.setdefault(key, ([], []))
                times.append(int(since[at]))
                pieces.append(at)
        matches: list[tuple[int, int]] = []
        for marker in np.flatnonzero(events.of(EventKind.MARKER)).tolist():
            producer, epoch = int(events.producer[marker]), int(events.epoch[marker])
            best, best_since = -1, NO_TIME
            for key in ((producer, epoch), (producer, epoch - 1)):
                times, pieces = begun.get(key, ([], []))
                index = bisect_right(times, int(events.time_ns[marker])) - 1
                if index >= 0 and times[index] > best_since:
                    best, best_since = pieces[index], times[index]
            if best >= 0:
                matches.append((best, marker))
        pairs = np.array(matches, np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    @cached_property
    def _last_seen(self) -> dict[tuple[int, int], int]:
        """(producer, name) -> last event of the producer that was not refused."""
        events = self.events
        rows = np.sort(self.rows[events.error[self.rows] == 0])
        keys = zip(events.producer[rows].tolist(), events.name_code[rows].tolist(), strict=True)
        return dict(zip(keys, rows.tolist(), strict=True))

    @cached_property
    def _given(self) -> dict[tuple[int, int], list[int]]:
        """(producer, name) -> events that assigned its id to another producer, in order of time."""
        events = self.events
        assigned: dict[tuple[int, int], list[int]] = {}
        others = (events.step[self.rows] == EventKind.INIT) & ~events.flag[self.rows]
        for at in np.sort(self.rows[others]).tolist():
            key = int(events.producer[at]), int(events.name_code[at])
            assigned.setdefault(key, []).append(at)
        return assigned

    def _outcome(self, at: int) -> tuple[str, int]:
        """(outcome, time in ns of the response or marker from which it is known)."""
        events = self.events
        if self.done[at] >= 0:
            return _asked(events, int(self.done[at])), _answer_time(events, int(self.done[at]))
        if self.fenced[at] >= 0:
            return "fenced", _answer_time(events, int(self.fenced[at]))
        marker, tried = int(self.marker[at]), int(self.tried[at])
        if marker >= 0:
            return _asked(events, marker), int(events.time_ns[marker])
        key = int(self.producer[at]), int(self.name[at])
        final = int(self.rows[self.end[at] - 1])
        if tried >= 0 and self._last_seen.get(key, -1) > final:
            return _asked(events, tried), int(events.time_ns[tried])
        given = self._given.get(key, [])
        for other in given[bisect_right(given, final) :]:
            if events.epoch[other] > self.epoch[at]:
                return "fenced", _answer_time(events, other)
        return "open", NO_TIME

    def _partitions(self, rows: Ints, piece: Ints, pairs: tuple[Ints, Ints]) -> pa.Array:
        """Partitions that a broker did not refuse or that markers name, in order."""
        events = self.events
        rows, piece = np.concatenate([rows, pairs[1]]), np.concatenate([piece, pairs[0]])
        named = events.topic_code[rows] >= 0
        rows, piece = rows[named], piece[named]
        names = events.topic.dictionary
        order = np.array(pc.sort_indices(names)).astype(np.int64)
        rank = np.argsort(order, kind="stable")
        keys = np.column_stack([piece, rank[events.topic_code[rows]], events.partition[rows]])
        keys = np.unique(keys.astype(np.int64), axis=0)
        kind = TRANSACTIONS.field("partitions").type.value_type
        topics = names.take(pa.array(order[keys[:, 1]]))
        places = pa.StructArray.from_arrays(
            [topics, pa.array(keys[:, 2].astype(np.int32))], fields=list(kind)
        )
        return lists(keys[:, 0], places, len(self.start))

    def _record_count(self, rows: Ints, piece: Ints) -> Ints:
        """Records of the batches that were not refused, each sequence number once."""
        events = self.events
        parts = (piece, events.topic_code[rows], events.partition[rows], events.base_sequence[rows])
        _, first = np.unique(np.column_stack(parts).astype(np.int64), axis=0, return_index=True)
        total = np.zeros(len(self.start), np.int64)
        np.add.at(total, piece[first], events.record_count[rows[first]])
        return total

    def _offsets(self, chosen: Bools) -> pa.Array:
        """Group offsets that are part of the transaction; the last one per partition."""
        offsets_of: list[dict[tuple[str, str, int], int]] = [{} for _ in self.start]
        data = self.events.table["data"].take(pa.array(self.rows[chosen])).to_pylist()
        for piece, offsets in zip(self.piece[chosen].tolist(), data, strict=True):
            for group, topic, partition, offset in json.loads(offsets or "[]"):
                offsets_of[piece][group, topic, partition] = offset
        kind = TRANSACTIONS.field("offsets").type
        names = kind.value_type.names
        return pa.array(
            [
                [
                    dict(zip(names, (*key, offset), strict=True))
                    for key, offset in sorted(one.items())
                ]
                for one in offsets_of
            ],
            kind,
        )

    def _exchange_ids(self, pairs: tuple[Ints, Ints]) -> pa.Array:
        """Each exchange once, in order of time."""
        rows = np.concatenate([self.rows, pairs[1]])
        piece = np.concatenate([self.piece, pairs[0]])
        order = np.lexsort((rows, piece))
        keys = np.column_stack([piece[order], self.events.exchange_id[rows[order]]])
        _, first = np.unique(keys, axis=0, return_index=True)
        keys = keys[np.sort(first)]
        return lists(keys[:, 0], pa.array(keys[:, 1]), len(self.start))


def _asked(events: _Events, at: int) -> str:
    return "commit" if events.flag[at] else "abort"


def _answer_time(events: _Events, at: int) -> int:
    end_ns = int(events.end_ns[at])
    return end_ns if end_ns != NO_TIME else int(events.time_ns[at])
