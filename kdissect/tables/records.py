"""Rows of `record_batches` and `records`: decoded record sets joined with their exchanges."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from kdissect.arrays import Ids, Indices, Ints, Rows
from kdissect.tables.arrow_arrays import labels, times_from_ms
from kdissect.tables.schemas import RECORD_BATCHES, RECORDS, Column, table_of
from kdissect.tables.topics import ChunkTopics

SOURCES = ("produce", "fetch", "replica_fetch", "share_fetch", "raft_fetch", "snapshot")
FROM_PRODUCE, FETCH, REPLICA_FETCH, SHARE_FETCH, RAFT_FETCH, SNAPSHOT = range(len(SOURCES))

NO_OFFSET = -1
_NO_BATCH = 1 << 62


class RecordRows:
    """Turns the chunks of `codec.record_batches` into table rows, in order.

    Counts batches and records per set so far: a batch's index counts over its exchange, and a
    produced record's offset over its set.
    """

    def __init__(
        self,
        sets: Rows,
        lead: Ints,
        exchange_id: Ids,
        source: Ints,
        produced_offset: Ints,
        topics: ChunkTopics,
    ) -> None:
        """sets: PARTITION_MARK of the record sets; the next four have one entry per set.

        lead: bytes before its first batch; they become rows of `batch_ends`. source: index into
        SOURCES. produced_offset: base offset from the response; NO_OFFSET if unknown.
        """
        self._sets = sets
        self._lead = lead
        self._exchange_id, self._source = exchange_id, source
        self._produced_offset = produced_offset
        self._batches = (lead > 0).astype(np.int64)
        self._records = np.zeros(len(sets), np.int64)
        # the first batch of each set that was not read: nobody knows how many records it has
        self._unread = np.full(len(sets), _NO_BATCH)
        # index of the first set of each set's exchange
        self._first = np.searchsorted(sets["row"], sets["row"])
        self._topic = topics.name_column(sets["topic"])
        self._topic_id = topics.id_column(sets["topic"], sets["topic_id"])

    def _batch_base(self) -> Ints:
        """Number of batches in earlier sets of the same exchange, per set."""
        if not len(self._batches):
            return self._batches
        before = np.cumsum(self._batches) - self._batches
        return before - before[self._first]

    def add(self, batches: pa.Table, records: pa.Table) -> tuple[pa.Table, pa.Table]:
        """(`record_batches`, `records`) rows of one chunk."""
        batch_set = batches["set_index"].to_numpy()
        within = batches["batch_index"].to_numpy() + (self._lead > 0)[batch_set]
        unread = batches["uncompressed_size"].is_null().to_numpy()
        np.minimum.at(self._unread, batch_set[unread], batches["batch_index"].to_numpy()[unread])
        # last batch of each set; sets are in order
        last = np.flatnonzero(np.diff(batch_set, append=-1))
        self._batches[batch_set[last]] = within[last] + 1
        base = self._batch_base()
        return (
            self._batch_rows(batches, batch_set, within, base),
            self._record_rows(records, base),
        )

    def batch_ends(self) -> pa.Table:
        """`record_batches` rows for the bytes before the first batch header of a set.

        Such bytes are the end of a batch that began in an earlier FetchSnapshot response (KIP-630).
        Only their size is known. Call it after `add` has seen all chunks.
        """
        chosen = np.flatnonzero(self._lead > 0)
        columns = self._common(chosen)
        columns["batch_index"] = self._batch_base()[chosen]
        columns["is_partial"] = np.ones(len(chosen), np.bool_)
        columns["size"] = self._lead[chosen]
        for field in RECORD_BATCHES:
            columns.setdefault(field.name, pa.nulls(len(chosen), field.type))
        return table_of(RECORD_BATCHES, columns)

    def _common(self, set_index: Indices) -> dict[str, Column]:
        """Columns that a row has from its set."""
        via = pa.array(set_index)
        return {
            "exchange_id": self._exchange_id[set_index],
            "source": labels(self._source[set_index], SOURCES),
            "topic": self._topic.take(via),
            "topic_id": self._topic_id.take(via),
            "partition": self._sets["partition"][set_index],
        }

    def _batch_rows(
        self, batches: pa.Table, set_index: Indices, within: Ints, base: Ints
    ) -> pa.Table:
        columns = self._common(set_index)
        columns["batch_index"] = within + base[set_index]
        for name in ("base_timestamp", "max_timestamp"):
            columns[name] = _times(batches[f"{name}_ms"])
        return _with_rest(RECORD_BATCHES, columns, batches)

    def _record_rows(self, records: pa.Table, base: Ints) -> pa.Table:
        set_index = records["set_index"].to_numpy().astype(np.int64)
        columns = self._common(set_index)
        batch_index = records["batch_index"].to_numpy()
        columns["batch_index"] = batch_index + (base + (self._lead > 0))[set_index]
        columns["offset"] = self._offsets(records["offset"], set_index, batch_index)
        columns["timestamp"] = _times(records["timestamp_ms"])
        return _with_rest(RECORDS, columns, records)

    def _offsets(self, offsets: pa.ChunkedArray, set_index: Indices, batch_index: Ints) -> Column:
        """Offsets from the wire; for produced records from the response, or null."""
        produced = self._source[set_index] == FROM_PRODUCE
        if not produced.any():
            return offsets
        given = self._produced_offset[set_index]
        # rows of a set are consecutive, also over chunks
        index = np.arange(len(set_index)) - np.searchsorted(set_index, set_index)
        index += self._records[set_index]
        self._records += np.bincount(set_index, minlength=len(self._records))
        offset = np.where(produced, given + index, offsets.to_numpy())
        is_known = (given != NO_OFFSET) & (batch_index < self._unread[set_index])
        return offset, ~produced | is_known


def _with_rest(schema: pa.Schema, columns: dict[str, Column], decoded: pa.Table) -> pa.Table:
    """The table of these columns; the others are columns of `decoded`."""
    rest = {name: decoded[name] for name in schema.names if name not in columns}
    return table_of(schema, columns | rest)


def _times(milliseconds: pa.ChunkedArray) -> pa.Array:
    valid = milliseconds.is_valid().to_numpy() if milliseconds.null_count else None
    return times_from_ms(milliseconds.fill_null(0).to_numpy(), valid)
