"""Pieces of snapshots: their edges as fragments, and the rows of what fragments come to.

`Edges` takes the FetchSnapshot responses of a chunk apart while they are decoded. `write_joined`
decodes the batches that `analysis.snapshots` puts together, where all fragments of a snapshot are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.codec.record_batches import iter_record_chunks
from kdissect.kafka.assembly import Anomaly
from kdissect.pipeline.options import Options
from kdissect.pipeline.record_output import alike, as_shown
from kdissect.pipeline.record_sets import RESPONSE
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import Role
from kdissect.stories.messages import Messages, flattened
from kdissect.stories.snapshots import (
    BatchFragment,
    Fault,
    Headless,
    JoinedBatches,
    Joiner,
    Snapshot,
)
from kdissect.tables.anomalies import AnomalyRow, anomalies_table, anomaly_columns, texts
from kdissect.tables.arrow_arrays import binaries, ints
from kdissect.tables.message_facts import METADATA_TOPIC, ChunkMarks, RecordSets
from kdissect.tables.payload import FULL
from kdissect.tables.records import NO_OFFSET, SNAPSHOT, RecordRows, RecordSetFacts
from kdissect.tables.redaction import TEXT

REQUEST = 0
_SIZE_PREFIX = 4
_SETS = 1 << 14  # found things written at a time

Ints = npt.NDArray[np.int64]
Sink = Callable[[str, pa.Table], None]


class Edges:
    """The edges of the pieces among the record sets of a chunk."""

    def __init__(
        self, sets: RecordSets, lead: Ints, pieces: Ints, messages: Messages, frame_start: Ints
    ) -> None:
        """lead: as `record_sets` gives it. pieces: which sets are pieces. frame_start: place of
        each response in the chunk's buffer."""
        self.sets, self.lead, self.pieces = sets, lead, pieces
        self.messages, self.frame_start = messages, frame_start
        self._walked = sets.start + lead
        self._tail = np.full(len(sets.row), -1, np.int64)
        self._tail_index = np.zeros(len(sets.row), np.int64)
        self._is_piece = np.zeros(len(sets.row), np.bool_)
        self._is_piece[pieces] = True

    def without_open(self, raw: pa.Table, batches: pa.Table) -> pa.Table:
        """`batches` (rows of `record_batches`; raw: `wire.records.BATCHES`) without those at the
        end of a piece, which may go on in another."""
        at, pos = raw["set_index"].to_numpy(), raw["pos"].to_numpy()
        np.maximum.at(self._walked, at, pos + raw["size"].to_numpy())
        is_partial = raw["is_partial"].fill_null(False).to_numpy()
        is_open = is_partial & self._is_piece[at]
        rows = np.flatnonzero(is_open)
        if not len(rows):
            return batches
        self._tail[at[rows]] = pos[rows]
        self._tail_index[at[rows]] = batches["batch_index"].to_numpy()[rows]
        return batches.filter(pa.array(~is_open))

    def fragments(
        self,
        places: tuple[Ints, Ints],
        marks: ChunkMarks,
        ids_by_name: dict[str, str],
        capture_ids: list[int],
    ) -> Iterator[BatchFragment]:
        """All edges, once all batches went through `without_open`; places: `RecordRows.places`."""
        sets, messages = self.sets, self.messages
        bases, totals = places
        row = sets.row[self.pieces]
        told = _told(messages, marks, row)
        asked = messages.body(ApiKey.FETCH_SNAPSHOT, REQUEST, row)
        followers = [None] * len(row) if asked is None else asked.field("replica_id").to_pylist()
        brokers = messages.broker.take(pa.array(row)).to_pylist()
        order, set_count = _within_exchange(sets.row)
        response = messages.exchanges["response"]
        for at, place, follower, broker in zip(
            self.pieces.tolist(), told, followers, brokers, strict=True
        ):
            exchange, topic = int(sets.row[at]), int(sets.topic[at])
            column = response[exchange]
            source = int(column["source"])
            start = int(sets.start[at])
            end, begin = start + int(sets.length[at]), start + int(self.lead[at])
            name = marks.topics[topic] if topic >= 0 else ""
            position, *ident = place
            partition = int(sets.partition[at])
            empty = BatchFragment(
                snapshot=Snapshot(broker or "", name, ids_by_name.get(name), partition, *ident),
                follower=-1 if follower is None else follower,
                connection_id=int(messages.connection_id[exchange]),
                exchange_id=int(messages.exchanges["exchange_id"][exchange]),
                time_ns=int(column["time_ns"]),
                capture_id=capture_ids[source] if source >= 0 else None,
                packet=int(column["packet"]) if source >= 0 else None,
                pos=int(column["pos"]) + _SIZE_PREFIX + start - int(self.frame_start[exchange]),
                position=position,
                piece_end=position + end - start,
                is_first=True,
                begins=position == 0,
                ends=position == 0 or begin < end,
                batch_index=int(bases[at]),
                spare_index=int(totals[at] + order[at]),
                spare_step=int(set_count[at]),
                data=b"",
            )
            yield replace(empty, data=marks.buf[start:begin].tobytes())
            tail, index = int(self._tail[at]), int(self._tail_index[at])
            if tail < 0 and empty.ends and self._walked[at] == end:
                tail = end  # all batches are whole
            if tail >= 0:
                yield replace(
                    empty,
                    pos=empty.pos + tail - start,
                    position=position + tail - start,
                    is_first=False,
                    begins=True,
                    ends=False,
                    batch_index=index,
                    data=marks.buf[tail:end].tobytes(),
                )


def _told(messages: Messages, marks: ChunkMarks, row: Ints) -> list[tuple[int, int, int, int]]:
    """(position, end offset and epoch of the snapshot, its size) of the pieces of exchanges `row`.

    Every partition of a response that was decoded has these and one record set, in wire order.
    """
    distinct = np.unique(row)
    body = messages.body(ApiKey.FETCH_SNAPSHOT, RESPONSE, distinct)
    assert body is not None
    topics, _ = flattened(body.field("topics"))
    partitions, _ = flattened(topics.field("partitions"))
    holds = _lengths(marks, distinct) > 0
    ident = partitions.field("snapshot_id")
    columns = [
        partitions.field("position"),
        ident.field("end_offset"),
        ident.field("epoch"),
        partitions.field("size"),
    ]
    kept = pa.array(holds)
    listed = [column.filter(kept).to_pylist() for column in columns]
    return list(zip(*listed, strict=True))


def _lengths(marks: ChunkMarks, rows: Ints) -> Ints:
    """Lengths of all record sets of the responses of these exchanges."""
    sets = marks.places(Role.RECORDS)
    chosen = np.isin(sets.row, rows) & (sets.side == RESPONSE)
    result: Ints = sets.length[chosen]
    return result


def _within_exchange(row: Ints) -> tuple[Ints, Ints]:
    """(number of each set within its exchange, how many sets that has)."""
    _, first, count = np.unique(row, return_index=True, return_counts=True)
    return np.arange(len(row)) - np.repeat(first, count), np.repeat(count, count)


# -- what fragments come to -----------------------------------------------------------------


def write_joined(packed: Iterable[bytes], options: Options, sink: Sink) -> None:
    """Rows of all batches that lie in several pieces, and of what is wrong with these.

    packed: all fragments (Fragment.to_bytes) of some snapshots, sorted by their `order`.
    """
    joiner = Joiner(options.limits.frame_size)
    waiting: list[JoinedBatches | Headless] = []
    faults: list[Fault] = []
    size = 0
    for found in joiner.join(BatchFragment.from_bytes(data) for data in packed):
        if isinstance(found, Fault):
            faults.append(found)
        else:
            waiting.append(found)
            size += len(found.data) if isinstance(found, JoinedBatches) else 0
        if size >= options.chunk_bytes or len(waiting) >= _SETS or len(faults) >= _SETS:
            _write(waiting, faults, options, sink)
            waiting, faults, size = [], [], 0
    _write(waiting, faults, options, sink)


def _write(
    waiting: list[JoinedBatches | Headless], faults: list[Fault], options: Options, sink: Sink
) -> None:
    if faults:
        sink("anomalies", anomalies_table(map(_anomaly, faults)))
    if waiting:
        _Sets(waiting, options, sink).write()


def _anomaly(fault: Fault) -> AnomalyRow:
    at = fault.at
    return AnomalyRow(
        fault.kind,
        fault.detail,
        connection_id=at.connection_id,
        exchange_id=at.exchange_id,
        capture_id=at.capture_id,
        packet=at.packet,
        direction=RESPONSE,
        pos=at.pos,
        byte_count=fault.byte_count,
    )


class _Sets:
    """What was found, as record sets of one buffer."""

    def __init__(self, found: list[JoinedBatches | Headless], options: Options, sink: Sink) -> None:
        self.options, self.sink = options, sink
        self.at = [one.at for one in found]
        data = [one.data if isinstance(one, JoinedBatches) else b"" for one in found]
        self.buf = np.frombuffer(b"".join(data), np.uint8)
        self.length = np.array([len(each) for each in data], np.int64)
        self.start = np.cumsum(self.length) - self.length
        self.lead = np.array(
            [one.size if isinstance(one, Headless) else 0 for one in found], np.int64
        )
        first = [one.first if isinstance(one, JoinedBatches) else 0 for one in found]
        self.first = np.array(first, np.int64)
        self.index, self.spare, self.step = (
            np.array([getattr(one, name) for one in self.at], np.int64)
            for name in ("batch_index", "spare_index", "spare_step")
        )

    def write(self) -> None:
        rows = RecordRows(self._facts(), self.lead)
        limits = self.options.limits.of_records
        for part in iter_record_chunks(self.buf, self.start, self.length, limits):
            raw = pa.table(part.batches)
            batches, records = rows.add(raw, pa.table(part.records))
            if batches.num_rows:
                self.sink("record_batches", self._numbered(batches, raw["set_index"].to_numpy()))
            if records.num_rows:
                at = part.records.column("set_index").to_numpy()
                table, wrong = as_shown(self._numbered(records, at), self.options, self.sink)
                self.sink("records", table)
                for fault in wrong:
                    self._internal_anomaly(int(at[fault.row]), fault)
            self._anomalies(part.faults)
        headless = np.flatnonzero(self.lead)
        if len(headless):
            self.sink("record_batches", self._numbered(rows.pieces(), headless))

    def _facts(self) -> RecordSetFacts:
        count = len(self.at)
        names = pa.array([one.snapshot.topic for one in self.at]).dictionary_encode()
        ids = pa.array([one.snapshot.topic_id for one in self.at], pa.string()).dictionary_encode()
        return RecordSetFacts(
            sets=RecordSets(
                row=np.arange(count),
                side=np.full(count, RESPONSE, np.int8),
                start=self.start,
                length=self.length,
                topic=_codes(names),
                topic_id=_codes(ids),
                partition=np.array([one.snapshot.partition for one in self.at], np.int64),
            ),
            exchange_id=np.array([one.exchange_id for one in self.at], np.int64),
            source=np.full(count, SNAPSHOT, np.int8),
            produced_offset=np.full(count, NO_OFFSET, np.int64),
            topics=names.dictionary.to_pylist(),
            topic_ids=ids.dictionary.to_pylist(),
            id_of_name={},
        )

    def _numbered(self, table: pa.Table, at: Ints) -> pa.Table:
        """Rows of sets `at`, whose batches have the numbers that their fragments keep for them."""
        place = table.schema.get_field_index("batch_index")
        number = self._batch_index(at, table.column(place).to_numpy())
        return table.set_column(place, "batch_index", ints(number, pa.int64()))

    def _batch_index(self, at: Ints, within: Ints) -> Ints:
        number = within + self.first[at]
        spare = self.spare[at] + (number - 1) * self.step[at]
        return np.where(number == 0, self.index[at], spare)

    def _anomalies(self, faults: npt.NDArray[np.void]) -> None:
        data_max = self.options.limits.anomaly_data
        for some, _, kind, reason in alike(faults, np.zeros(len(faults), np.int64)):
            at = some["set_index"].astype(np.int64)
            number = self._batch_index(at, some["batch_index"].astype(np.int64))
            size = np.minimum(some["byte_count"], data_max)
            data = binaries(self.buf, some["pos"].astype(np.int64), size)
            detail = texts(
                f"record batch {{batch}}: {reason}", len(some), batch=number, number=some["a"]
            )
            self._write_anomalies(at, kind, detail, some["byte_count"], data)

    def _internal_anomaly(self, at: int, fault: Any) -> None:
        data = fault.data[: self.options.limits.anomaly_data]
        data = pa.array([TEXT.encode() if fault.is_secret else data], pa.binary())
        self._write_anomalies(
            np.array([at]),
            fault.kind,
            pa.array([fault.detail]),
            self.length[[at]],
            data,
            is_value=True,
        )

    def _write_anomalies(
        self,
        at: Ints,
        kind: Anomaly,
        detail: pa.Array,
        byte_count: Any,
        data: pa.Array,
        is_value: bool = False,
    ) -> None:
        """Anomalies of the sets `at`. is_value: `data` is a record's value without its secrets."""
        some = [self.at[n] for n in at.tolist()]
        if not self.options.reveal_secrets and not is_value:
            secret = pa.array([one.snapshot.topic == METADATA_TOPIC for one in some])
            data = pc.if_else(secret, pa.scalar(TEXT.encode()), data)
        if self.options.payload != FULL:
            data = pa.nulls(len(some), pa.binary())
        table = anomaly_columns(
            np.full(len(some), kind, np.uint8),
            detail,
            connection_id=pa.array([one.connection_id for one in some], pa.int64()),
            exchange_id=pa.array([one.exchange_id for one in some], pa.int64()),
            capture_id=pa.array([one.capture_id for one in some], pa.int64()),
            packet=pa.array([one.packet for one in some], pa.int64()),
            direction=np.full(len(some), RESPONSE, np.uint8),
            pos=pa.array([one.pos for one in some], pa.int64()),
            byte_count=ints(byte_count, pa.int64()),
            data=data,
        )
        self.sink("anomalies", table)


def _codes(encoded: pa.DictionaryArray) -> Ints:
    """Codes of a dictionary array, -1 for null."""
    return encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
