"""The decoded messages of a chunk, in the form that the event readers use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Bools, Ints
from kdissect.codec.message_columns import MessageColumns
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.stories.events import NO_TIME
from kdissect.tables.message_marks import ChunkMarks
from kdissect.tables.topics import TopicNames


@dataclass(frozen=True, slots=True)
class Messages:
    """A chunk of exchanges with their decoded messages.

    exchanges: EXCHANGE[n].
    connection_id, capture_id: int64[n]; capture_id is that of the request.
    request_start: int64[n], position of the request's frame in the buffer.
    client_id: string or dictionary [n].
    broker: string[n], address and port.
    decoded: (api key, side) -> (rows of the chunk, columns in their order).
    marks: of these messages.
    """

    exchanges: npt.NDArray[np.void]
    connection_id: Ints
    capture_id: Ints
    request_start: Ints
    client_id: pa.Array
    broker: pa.Array
    decoded: dict[tuple[int, int], tuple[Ints, MessageColumns]]
    marks: ChunkMarks
    topic_names: TopicNames

    @property
    def error_code(self) -> npt.NDArray[np.int16]:
        """The first non-zero code in the response of each row, otherwise 0."""
        return self.marks.error_columns[0]

    def rows(self, api_key: int) -> Ints:
        """Rows whose request of that API was decoded."""
        return self._good(api_key, REQUEST)

    def _good(self, api_key: int, side: int) -> Ints:
        decoded = self.decoded.get((api_key, side))
        if decoded is None:
            return np.zeros(0, np.int64)
        rows, columns = decoded
        return rows[columns.status == 0]

    def answered(self, api_key: int, rows: Ints) -> npt.NDArray[np.bool_]:
        """bool per row: it has a decoded response."""
        return np.isin(rows, self._good(api_key, RESPONSE))

    def body(self, api_key: int, side: int, rows: Ints) -> pa.StructArray | None:
        """Bodies of these rows, null if a row has none; None if no row of the chunk has one."""
        decoded = self.decoded.get((api_key, side))
        if decoded is None:
            return None
        there, columns = decoded
        good = np.flatnonzero(columns.status == 0)
        if len(good) == len(rows) == len(there) and bool(np.all(there == rows)):
            return columns.body
        there = there[good]
        if not len(there):
            return columns.body.take(pa.nulls(len(rows), pa.int64()))
        at = np.minimum(np.searchsorted(there, rows), len(there) - 1)
        return columns.body.take(pa.array(good[at], pa.int64(), mask=there[at] != rows))

    def requests(self, api_key: int) -> tuple[Ints, pa.StructArray | None]:
        """(rows, bodies) of the decoded requests of that API; no bodies without a row."""
        rows = self.rows(api_key)
        return rows, self.body(api_key, REQUEST, rows) if len(rows) else None

    def values(self, api_key: int, side: int, rows: Ints) -> list[Any]:
        """Bodies of these rows as plain values, None if a row has none."""
        bodies = self.body(api_key, side, rows)
        return [None] * len(rows) if bodies is None else bodies.to_pylist()

    def place(self, rows: Ints, order: Any = None) -> dict[str, pa.Array]:
        """Columns of an event with its time and place, for exchanges `rows`."""
        some = self.exchanges[rows]
        response = some["response"]
        end_ns = np.where(response["size"] >= 0, response["time_ns"], NO_TIME)
        return {
            "time_ns": pa.array(np.ascontiguousarray(some["request"]["time_ns"])),
            "end_ns": pa.array(end_ns),
            "connection_id": pa.array(self.connection_id[rows]),
            "pos": pa.array(np.ascontiguousarray(some["request"]["pos"])),
            "order": pa.array(
                np.zeros(len(rows), np.int32) if order is None else order.astype(np.int32)
            ),
            "exchange_id": pa.array(np.ascontiguousarray(some["exchange_id"])),
        }

    def errors(self, api_key: int, rows: Ints) -> pa.Array:
        """Error code per row, null if no response was decoded."""
        return pa.array(self.error_code[rows].astype(np.int16), mask=~self.answered(api_key, rows))


def begins(*keys: npt.NDArray[Any]) -> Bools:
    """bool per row: it is the first, or a key differs from that of the row before."""
    new = np.ones(len(keys[0]), bool)
    new[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return new


def flattened(column: pa.Array) -> tuple[pa.Array, Ints]:
    """(elements of all lists of a list column, row of each element)."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return column.flatten(), np.repeat(np.arange(len(column)), lengths)
