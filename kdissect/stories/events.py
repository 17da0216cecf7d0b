"""Events: facts of a message about a group, producer or fetch session, small enough to shuffle.

Decoding handles messages slot by slot, but a rebalance or a transaction spans many slots and
connections. So decoding emits events, each with a key: a hash of the id of its group, producer or
fetch session. All events of a key reach one task, in which `groups`, `transactions` and others
order them and build rows. Frequent messages without news (a heartbeat without error) make no event.
A produced batch of an idempotent producer makes one row of about 100 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Bools, Indices, Ints, take
from kdissect.tables.arrow_arrays import packed, unpacked
from kdissect.tables.message_chunk import MessageChunk

_ROW_BYTES_MAX = 4 << 20  # bytes of one packed table

NO_TIME = -(2**63)  # end_ns of an exchange without response
NOT_ANSWERED = -(2**15)  # stands for the error code of an exchange without response


class EventKind(IntEnum):
    """The kind of a producer event."""

    INIT = 0  # InitProducerId assigned id and epoch; flag: the request had that same id
    ADD = 1  # a partition was added to the transaction
    VERIFY = 2  # a broker asked whether a partition is in the transaction
    ADD_OFFSETS = 3  # AddOffsetsToTxn
    OFFSETS = 4  # TxnOffsetCommit
    PRODUCE = 5  # a batch; flag: transactional
    END = 6  # EndTxn; flag: commit
    MARKER = 7  # WriteTxnMarkers, one partition; flag: commit


_PLACE = [
    ("time_ns", pa.int64()),  # of the request
    ("end_ns", pa.int64()),  # of the response, or NO_TIME
    ("connection_id", pa.int64()),
    ("pos", pa.int64()),  # of the request: orders the messages of one segment
    ("order", pa.int32()),  # within the exchange
    ("exchange_id", pa.int64()),
]

# error_code is null without a response. `data`: JSON of facts for that event's rows only.
GROUP_EVENT = pa.schema(
    [
        ("group_id", pa.string()),
        ("api_key", pa.int16()),
        *_PLACE,
        ("client_id", pa.string()),
        ("member_id", pa.string()),
        ("generation", pa.int32()),
        ("error_code", pa.int16()),
        ("data", pa.string()),
    ]
)

# base_sequence, sequence_count, record_count, capture_id, packet, batch_pos, size: of PRODUCE only.
# data: of OFFSETS only, JSON of [group, topic, partition, offset] for each that was not refused.
PRODUCER_EVENT = pa.schema(
    [
        ("producer_id", pa.int64()),
        ("producer_epoch", pa.int16()),
        ("step", pa.int8()),  # an EventKind
        *_PLACE,
        ("transactional_id", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("error_code", pa.int16()),
        ("flag", pa.bool_()),
        ("base_sequence", pa.int32()),
        ("sequence_count", pa.int64()),
        ("record_count", pa.int64()),
        ("capture_id", pa.int64()),
        ("packet", pa.int64()),
        ("batch_pos", pa.int64()),
        ("size", pa.int64()),
        ("data", pa.string()),
    ]
)

# broker: address and port, separated by a space. `order` is an `Ask`.
FETCH_EVENT = pa.schema(
    [
        ("broker", pa.string()),
        ("session_id", pa.int32()),
        *_PLACE,
        ("client_id", pa.string()),
        ("epoch", pa.int32()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
    ]
)

SCHEMAS = {"groups": GROUP_EVENT, "producers": PRODUCER_EVENT, "fetches": FETCH_EVENT}
_KEY = {"groups": "group_id", "producers": "producer_id", "fetches": "session_id"}


def event_table(name: str, **columns: pa.Array) -> pa.Table:
    """A table of events; columns that are not given are null."""
    schema = SCHEMAS[name]
    count = len(next(iter(columns.values())))
    return pa.table(
        [
            _as(columns[field.name], field.type)
            if field.name in columns
            else pa.nulls(count, field.type)
            for field in schema
        ],
        schema=schema,
    )


def _as(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column if column.type == kind else column.cast(kind)


def place(messages: MessageChunk, rows: Indices, order: Ints | None = None) -> dict[str, pa.Array]:
    """Columns of an event with its time and place, for exchanges `rows`."""
    some = take(messages.exchanges, rows)
    response = some["response"]
    end_ns = np.where(response["size"] >= 0, response["time_ns"], NO_TIME)
    return {
        "time_ns": pa.array(np.ascontiguousarray(some["request"]["time_ns"])),
        "end_ns": pa.array(end_ns),
        "connection_id": pa.array(messages.frames.connection_ids[rows]),
        "pos": pa.array(np.ascontiguousarray(some["request"]["pos"])),
        "order": pa.array(
            np.zeros(len(rows), np.int32) if order is None else order.astype(np.int32)
        ),
        "exchange_id": pa.array(np.ascontiguousarray(some["exchange_id"])),
    }


def begins(*keys: Ints) -> Bools:
    """bool per row: it is the first, or a key differs from that of the row before."""
    new = np.ones(len(keys[0]), bool)
    new[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return new


def flattened(column: pa.Array) -> tuple[pa.Array, Ints]:
    """(elements of all lists of a list column, row of each element)."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return column.flatten(), np.repeat(np.arange(len(column)), lengths)


class Collector:
    """Collects the events of one decode task and packs them by key."""

    def __init__(self, key_count: int) -> None:
        """key_count: number of keys; depends on the run's plan only."""
        self.key_count = key_count
        self._tables: dict[str, list[pa.Table]] = {name: [] for name in SCHEMAS}

    def add(self, name: str, table: pa.Table) -> None:
        """Add rows of `SCHEMAS[name]`."""
        if table.num_rows:
            self._tables[name].append(table)

    def tables(self) -> dict[str, pa.Table]:
        """All events by name, without names that have none."""
        return {name: pa.concat_tables(some) for name, some in self._tables.items() if some}

    def packed(self) -> Iterator[tuple[int, bytes]]:
        """Yield all events: (key, some of its events)."""
        for name, parts in self._tables.items():
            if not parts:
                continue
            table = pa.concat_tables(parts).combine_chunks()
            parts.clear()  # packed events take their room
            keys = self._keys(name, table)
            order = np.argsort(keys, kind="stable")
            bounds = np.flatnonzero(np.diff(keys[order])) + 1
            for rows in np.split(order, bounds):
                key = int(keys[rows[0]])
                chosen = table if len(rows) == len(keys) else table.take(pa.array(rows))
                step = max(1, int(chosen.num_rows * _ROW_BYTES_MAX // max(chosen.nbytes, 1)))
                for start in range(0, chosen.num_rows, step):
                    yield key, packed(name, chosen.slice(start, step))

    def _keys(self, name: str, table: pa.Table) -> Ints:
        encoded = table[_KEY[name]].combine_chunks().dictionary_encode()
        hashes = [crc32(str(value).encode()) for value in encoded.dictionary.to_pylist()]
        keys: Ints = np.array(hashes, np.int64)[encoded.indices] % self.key_count
        return keys


def unpack(parts: list[bytes]) -> dict[str, pa.Table]:
    """The events of one key from all tasks, by name of SCHEMAS; every name is present."""
    tables_of: dict[str, list[pa.Table]] = {name: [] for name in SCHEMAS}
    for data in parts:
        name, table = unpacked(data)
        tables_of[name].append(table)
    return {
        name: pa.concat_tables(tables).combine_chunks() if tables else SCHEMAS[name].empty_table()
        for name, tables in tables_of.items()
    }


def sorted_events(events: pa.Table) -> pa.Table:
    """Events by time; those of one segment in stream order."""
    keys = ("time_ns", "connection_id", "pos", "order")
    return events.take(pc.sort_indices(events, [(key, "ascending") for key in keys]))
