"""Rows of `transactions`: what a transactional producer did between one end and the next.

Events of one (producer id, epoch, transactional id) in order of time are cut behind each EndTxn
that ended something; each piece is a transaction. Under Transactions v2 (KIP-890) every
transaction has an epoch of its own, before it a producer keeps its epoch over many.

How a transaction ended, the first that applies:
- an EndTxn that was answered without an error: `commit` or `abort`;
- PRODUCER_FENCED or INVALID_PRODUCER_EPOCH in any answer: `fenced`;
- markers that the coordinator wrote (WriteTxnMarkers, with this epoch or the next one): theirs;
  this is what a timeout looks like, or an EndTxn whose answer was not captured;
- an EndTxn without an answer, after which the producer went on: as it asked;
- another producer got the same transactional id: `fenced`; else `open`.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.analysis.events import NO_TIME, Step
from kdissect.tables.schemas import TRANSACTIONS
from kdissect.tables.values import times_from_ns

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

FENCING = (47, 90)  # INVALID_PRODUCER_EPOCH, PRODUCER_FENCED
NOT_ANSWERED = -(2**15)
NEVER = 2**63 - 1
_BEGINS = (Step.ADD, Step.ADD_OFFSETS, Step.OFFSETS, Step.PRODUCE)


class _Events:
    """Columns of the transactional events in order of time, those of a producer together."""

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

    def of(self, *steps: Step) -> Mask:
        return np.isin(self.step, [int(step) for step in steps])


def transactions_table(events: pa.Table) -> pa.Table:
    """`transactions` of PRODUCER_STEPS that are in order of time."""
    step = events["step"].to_numpy()
    transactional = (step != Step.PRODUCE) | events["flag"].fill_null(False).to_numpy()
    known = _Events(events.filter(pa.array(transactional)))
    rows = np.flatnonzero(~known.of(Step.MARKER) & (known.name_code >= 0))
    if not len(rows):
        return TRANSACTIONS.empty_table()
    return _Pieces(known, rows).table()


class _Pieces:
    """Transactional events cut into transactions.

    rows: indices of events, by producer, epoch and transactional id, then in order of time;
    start: where in `rows` each piece starts.
    """

    def __init__(self, events: _Events, rows: Ints) -> None:
        self.events = events
        key = (events.producer[rows], events.epoch[rows], events.name_code[rows])
        order = np.lexsort((rows, key[2], key[1], key[0]))
        self.rows = rows[order]
        new = np.ones(len(rows), bool)
        producer, epoch, name = (part[order] for part in key)
        new[1:] = (
            (producer[1:] != producer[:-1]) | (epoch[1:] != epoch[:-1]) | (name[1:] != name[:-1])
        )
        self.start = np.flatnonzero(new | self._after_end(new) | self._given_again(new))
        self.end = np.append(self.start[1:], len(self.rows))

    def _after_end(self, new: Mask) -> Mask:
        """Where the event before is an EndTxn that ended something, and this is no retry of it."""
        events, rows = self.events, self.rows
        is_end = events.step[rows] == Step.END
        done = is_end & np.isin(events.error[rows], (0, NOT_ANSWERED))
        cut = np.zeros(len(rows), bool)
        retry = is_end[1:] & (events.error[rows][:-1] == NOT_ANSWERED)
        cut[1:] = done[:-1] & ~retry
        return cut & ~new

    def _given_again(self, new: Mask) -> Mask:
        """Where a broker gave the same id and epoch anew: another cluster's producer."""
        events, rows = self.events, self.rows
        return (events.step[rows] == Step.INIT) & ~new

    def table(self) -> pa.Table:
        pieces = [
            _Piece(self.events, self.rows[a:b]) for a, b in zip(self.start, self.end, strict=True)
        ]
        kept = [piece for piece in pieces if piece.is_transaction]
        _add_markers(self.events, kept)
        later = _Later(self.events, self.rows)
        found = [piece.row(later) for piece in kept]
        loose = TRANSACTIONS
        for name in ("begin_time", "end_time"):
            loose = loose.set(loose.get_field_index(name), pa.field(name, pa.int64()))
        table = pa.Table.from_pylist(found, schema=loose)
        for name in ("begin_time", "end_time"):
            index = loose.get_field_index(name)
            column = table[name].combine_chunks()
            valid = column.is_valid().to_numpy(zero_copy_only=False)
            times = times_from_ns(column.fill_null(0).to_numpy(), valid)
            table = table.set_column(index, TRANSACTIONS.field(name), times)
        return table


class _Later:
    """Whether a producer was seen again: its last event, and who got its transactional id when."""

    def __init__(self, events: _Events, rows: Ints) -> None:
        self.last: dict[tuple[int, int], int] = {}
        going_on = rows[events.error[rows] == 0]
        for at in np.sort(going_on).tolist():
            self.last[int(events.producer[at]), int(events.name_code[at])] = at
        self.taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for at in np.sort(rows[(events.step[rows] == Step.INIT) & ~events.flag[rows]]).tolist():
            key = int(events.producer[at]), int(events.name_code[at])
            self.taken.setdefault(key, []).append((at, int(events.epoch[at])))


class _Piece:
    """One transaction: its events, and the markers that belong to it."""

    def __init__(self, events: _Events, rows: Ints) -> None:
        self.events = events
        self.rows = rows
        step = events.step[rows]
        self.begins = rows[np.isin(step, [int(s) for s in _BEGINS])]
        self.ends = rows[step == Step.END]
        self.markers: list[int] = []
        errors = events.error[rows]
        begun = np.isin(events.error[self.begins], (0, NOT_ANSWERED))
        # one of which everything was refused never began, unless the producer was fenced
        self.is_transaction = bool(
            begun.any() or self._closing().any() or np.isin(errors, FENCING).any()
        )
        at = self.begins[0] if len(self.begins) else rows[0]
        self.producer = int(events.producer[at])
        self.epoch = int(events.epoch[at])
        answered = self.begins[events.error[self.begins] == 0]
        self.accepted_ns = int(events.end_ns[answered].min()) if len(answered) else NEVER

    def _closing(self) -> Mask:
        result: Mask = np.isin(self.events.error[self.ends], (0, NOT_ANSWERED))
        return result

    def row(self, later: _Later) -> dict[str, Any]:
        events = self.events
        outcome, end_ns = self._outcome(later)
        begin_ns = int(events.time_ns[self.begins[0]]) if len(self.begins) else None
        duration = None
        if begin_ns is not None and end_ns is not None:
            duration = (end_ns - begin_ns) / 1e6
        used = np.concatenate([self.rows, np.array(self.markers, np.int64)])
        used.sort()
        _, index = np.unique(events.exchange_id[used], return_index=True)
        name = int(events.name_code[self.rows[0]])
        return {
            "transactional_id": events.name.dictionary[name].as_py(),
            "producer_id": self.producer,
            "producer_epoch": self.epoch,
            "begin_time": begin_ns,
            "end_time": end_ns,
            "outcome": outcome,
            "duration_ms": duration,
            "partitions": self._partitions(),
            "record_count": self._record_count(),
            "exchange_ids": events.exchange_id[used[np.sort(index)]].tolist(),
        }

    def _outcome(self, later: _Later) -> tuple[str, int | None]:
        """(outcome, when it was known: the answer's time, or the marker's)."""
        events = self.events
        done = self.ends[events.error[self.ends] == 0]
        if len(done):
            return _asked(events, int(done[-1])), _answer_time(events, int(done[-1]))
        fenced = self.rows[np.isin(events.error[self.rows], FENCING)]
        if len(fenced):
            return "fenced", _answer_time(events, int(fenced[0]))
        if self.markers:
            return _asked(events, self.markers[-1]), int(events.time_ns[self.markers[-1]])
        key = self.producer, int(events.name_code[self.rows[0]])
        tried = self.ends[events.error[self.ends] == NOT_ANSWERED]
        if len(tried) and later.last.get(key, -1) > int(self.rows[-1]):
            return _asked(events, int(tried[-1])), int(events.time_ns[tried[-1]])
        for at, epoch in later.taken.get(key, ()):
            if at > int(self.rows[-1]) and epoch > self.epoch:
                return "fenced", _answer_time(events, at)
        return "open", None

    def _partitions(self) -> list[dict[str, Any]]:
        """Those that a broker did not refuse, by topic and partition."""
        events = self.events
        rows = self.rows
        step, error = events.step[rows], events.error[rows]
        agreed = np.isin(error, (0, NOT_ANSWERED))
        chosen = rows[
            (np.isin(step, (int(Step.ADD), int(Step.PRODUCE))) & agreed)
            | ((step == Step.VERIFY) & (error == 0))
        ]
        chosen = np.concatenate([chosen, np.array(self.markers, np.int64)])
        pairs = set(
            zip(events.topic_code[chosen].tolist(), events.partition[chosen].tolist(), strict=True)
        )
        names = {code: events.topic.dictionary[code].as_py() for code, _ in pairs if code >= 0}
        listed = [(names[code], partition) for code, partition in pairs if code >= 0]
        return [{"topic": topic, "partition": part} for topic, part in sorted(listed)]

    def _record_count(self) -> int:
        """Records of the batches that were not refused, each sequence once."""
        events, rows = self.events, self.rows
        taken = rows[
            (events.step[rows] == Step.PRODUCE) & np.isin(events.error[rows], (0, NOT_ANSWERED))
        ]
        if not len(taken):
            return 0
        keys = np.column_stack(
            [events.topic_code[taken], events.partition[taken], events.base_sequence[taken]]
        )
        _, first = np.unique(keys, axis=0, return_index=True)
        return int(events.record_count[taken[first]].sum())


def _add_markers(events: _Events, pieces: list[_Piece]) -> None:
    """Give each marker to the transaction that was open then, of its epoch or of the one below.

    Transactions v2 writes markers with the next epoch, and so does a coordinator that fences. A
    transaction counts as open from its first accepted request on: the next one asks already while
    the markers of the last are on their way, and is told to wait.
    """
    begun: dict[tuple[int, int], list[_Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.accepted_ns):
        begun.setdefault((piece.producer, piece.epoch), []).append(piece)
    accepted = {key: [piece.accepted_ns for piece in some] for key, some in begun.items()}
    for at in np.flatnonzero(events.of(Step.MARKER)).tolist():
        producer, epoch = int(events.producer[at]), int(events.epoch[at])
        best: _Piece | None = None
        for key in ((producer, epoch), (producer, epoch - 1)):
            index = bisect_right(accepted.get(key, ()), int(events.time_ns[at])) - 1
            if index >= 0:
                piece = begun[key][index]
                if best is None or piece.accepted_ns > best.accepted_ns:
                    best = piece
        if best is not None:
            best.markers.append(at)


def _asked(events: _Events, at: int) -> str:
    return "commit" if events.flag[at] else "abort"


def _answer_time(events: _Events, at: int) -> int:
    end_ns = int(events.end_ns[at])
    return end_ns if end_ns != NO_TIME else int(events.time_ns[at])


def in_order(events: pa.Table) -> pa.Table:
    """Events by time; those of one segment in the order of their stream."""
    keys = ("time_ns", "connection_id", "pos", "order")
    return events.take(pc.sort_indices(events, [(key, "ascending") for key in keys]))
