"""Frames, their pairs, and exchange rows made from both: all at once or part by part.

A frame is 12 numbers in a flat table, an exchange a row of 148 bytes. A large connection has too
many exchanges to make at once, so `Paired` keeps the tables and makes rows on request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.arrays import gather_ranges, joined
from kdissect.capture.scratch import Scratch, Written
from kdissect.jit import inlined, kernel, making_kernel
from kdissect.kafka import frame_tables, framing
from kdissect.kafka.assembly import (
    ANOMALY,
    CARRIED,
    EXCHANGE,
    EXTENT,
    NO_API,
    Assembly,
    Carried,
    PairStatus,
)
from kdissect.kafka.frame_tables import EXTENT_WIDTH, FAULT_WIDTH, FRAME_WIDTH
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.tcp.byte_ranges import int64
from kdissect.tcp.connection_ids import exchange_ids
from kdissect.tcp.measurements import TcpFacts
from kdissect.tls.handshake import TlsFacts

Ints = npt.NDArray[np.int64]
Walk = Callable[
    [framing.WalkState, int], Any
]  # `framing.some_requests` or `some_responses`: (state, most)

NO_RESPONSE = -(1 << 62)  # no earlier response is known
FRAMES_AT_ONCE = 1 << 15  # frames found between writes to files
_REQUEST_MISSING = int(PairStatus.REQUEST_MISSING)


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of one direction.

    table: int64[n, FRAME_WIDTH]. extents, faults: int64 tables. start: int64[connections + 1],
    first row of each connection, and the end.
    """

    table: Ints
    extents: Ints
    faults: Ints
    start: Ints  # first row of each connection, and the end

    @staticmethod
    def of(walk: Walk, connection_count: int, scratch: Scratch) -> Frames:
        """All frames that `walk` finds in the streams of a direction.

        They are collected some at a time, because an array that grows inside a kernel is copied to
        fresh pages each time.
        """
        state = framing.walk_state()
        widths = (FRAME_WIDTH, EXTENT_WIDTH, FAULT_WIDTH)
        files = [Written(np.int64, scratch) for _ in widths]
        extent_count = 0
        while state.connection < connection_count:
            *tables_found, used = walk(state, FRAMES_AT_ONCE)
            parts = [
                table[: n * width]
                for table, n, width in zip(tables_found, used, widths, strict=True)
            ]
            frame_tables.renumber(parts[0], parts[2], extent_count)
            extent_count += int(used[frame_tables.EXTENTS])
            for file, part in zip(files, parts, strict=True):
                file.append(part)
        tables = [file.array() for file in files]
        start = _starts(tables[0], connection_count)
        shaped = [table.reshape(-1, width) for table, width in zip(tables, widths, strict=True)]
        frames, extents, faults = shaped
        return Frames(frames, extents, faults, start)

    def column(self, number: int, scratch: Scratch) -> Ints:
        return scratch.copied(self.table[:, number])

    def behind_hole(
        self, has_origin: npt.NDArray[np.bool_], scratch: Scratch
    ) -> npt.NDArray[np.uint8]:
        """uint8[frames]: whether unframed bytes, or unknown ones, directly precede the frame.

        has_origin: bool per connection, whether position 0 is known to be the stream's beginning.
        """
        is_behind_hole = scratch.empty(len(self.table), np.uint8)
        _behind_hole(
            self.table.reshape(-1), self.start, has_origin.astype(np.uint8), is_behind_hole
        )
        return is_behind_hole

    def framed_bytes(self) -> Ints:
        """int64[connections]: captured bytes inside frames."""
        return _framed_bytes(self.table.reshape(-1), len(self.start) - 1)

    def cut(self) -> Ints:
        """Rows of frames with missing bytes."""
        cut_rows = [np.zeros(0, np.int64)]
        for first in range(0, len(self.table), FRAMES_AT_ONCE):
            portion = self.table[first : first + FRAMES_AT_ONCE]
            is_cut = portion[:, frame_tables.CAPTURED] != portion[:, frame_tables.FRAME_SIZE] + 4
            cut_rows.append(np.flatnonzero(is_cut) + first)
        return np.concatenate(cut_rows)


@making_kernel
def _starts(table: Any, connection_count: int) -> Any:
    """int64[n + 1]: first row of each connection in a flat table that is sorted by connection."""
    start = np.empty(connection_count + 1, np.int64)
    count = len(table) // FRAME_WIDTH
    start[connection_count] = count
    low = 0
    for connection in range(connection_count):
        high = count
        while low < high:
            middle = (low + high) >> 1
            if table[middle * FRAME_WIDTH + frame_tables.CONNECTION] < connection:
                low = middle + 1
            else:
                high = middle
        start[connection] = low
    return start


@making_kernel
def _framed_bytes(table: Any, connection_count: int) -> Any:
    total = np.zeros(connection_count, np.int64)
    for row in range(len(table) // FRAME_WIDTH):
        at = row * FRAME_WIDTH
        total[table[at + frame_tables.CONNECTION]] += table[at + frame_tables.CAPTURED]
    return total


@kernel
def _behind_hole(table: Any, start: Any, has_origin: Any, found: Any) -> None:
    for connection in range(len(start) - 1):
        before = int64(0) if has_origin[connection] else int64(-1)
        for row in range(start[connection], start[connection + 1]):
            pos = table[row * FRAME_WIDTH + frame_tables.POS]
            found[row] = pos != before
            before = pos + 4 + table[row * FRAME_WIDTH + frame_tables.FRAME_SIZE]


@kernel
def _fill_sides(
    exchanges: Any, requests: Any, responses: Any, request: Any, response: Any, segments: Any,
    base: int
) -> None:  # fmt: skip
    """Fill both sides of EXCHANGE rows; extents of responses begin at `base`.

    This is a kernel of its own, because NumPy reports the field of a single row as contiguous, and
    the kernel would be compiled a second time.
    """
    _fill_side(exchanges["request"], requests, request, segments, 0)
    _fill_side(exchanges["response"], responses, response, segments, base)


@inlined
def _fill_side(side: Any, table: Any, row: Any, segments: Any, extent_base: int) -> None:
    """Fill the SIDE of exchanges from their frame `row` in a flat table (-1: no such side)."""
    for index in range(len(row)):
        if row[index] < 0:
            side[index]["size"] = -1
            side[index]["pos"] = -1
            side[index]["packet"] = -1
            side[index]["source"] = -1
            continue
        at = row[index] * FRAME_WIDTH
        first = segments[table[at + frame_tables.FIRST]]
        side[index]["time_ns"] = first["time_ns"]
        side[index]["end_time_ns"] = segments[table[at + frame_tables.LAST]]["time_ns"]
        side[index]["size"] = table[at + frame_tables.FRAME_SIZE]
        side[index]["pos"] = table[at + frame_tables.POS]
        side[index]["packet"] = first["packet"]
        side[index]["extent_start"] = table[at + frame_tables.EXTENT_START] + extent_base
        side[index]["extent_count"] = table[at + frame_tables.EXTENT_COUNT]
        side[index]["source"] = first["source"]
        side[index]["is_whole"] = (
            table[at + frame_tables.CAPTURED] == table[at + frame_tables.FRAME_SIZE] + 4
        )


@kernel
def _fill_heads(
    exchanges: Any, requests: Any, request: Any, responses: Any, response: Any, status: Any
) -> None:
    """Fill the fields common to both sides, from the request's frame, or else from the
    response's."""
    for index in range(len(exchanges)):
        exchange = exchanges[index]
        if request[index] >= 0:
            at = request[index] * FRAME_WIDTH
            exchange["status"] = status[request[index]]
            exchange["api_key"] = np.int16(requests[at + frame_tables.API_KEY])
            exchange["api_version"] = np.int16(requests[at + frame_tables.VERSION])
            exchange["connection"] = requests[at + frame_tables.CONNECTION]
            exchange["correlation_id"] = np.int32(requests[at + frame_tables.ID])
            exchange["is_sasl_token"] = requests[at + frame_tables.KIND] == frame_tables.TOKEN
        else:
            at = response[index] * FRAME_WIDTH
            exchange["status"] = _REQUEST_MISSING
            exchange["api_key"] = NO_API
            exchange["api_version"] = NO_API
            exchange["connection"] = responses[at + frame_tables.CONNECTION]
            exchange["correlation_id"] = np.int32(responses[at + frame_tables.ID])
            exchange["is_sasl_token"] = responses[at + frame_tables.KIND] == frame_tables.TOKEN


@kernel
def _fill_queues(
    exchanges: Any, request: Any, responses: Any, response: Any, is_behind_hole: Any, earlier: Any,
    segments: Any,
) -> None:  # fmt: skip
    """Set queued_ns: how long a request waited for the response before its own.

    A broker handles the requests of a connection one at a time, so a request starts when the
    previous response has left. earlier: per connection, position and time of the end of the last
    response before these frames (NO_RESPONSE: none).
    """
    for index in range(len(exchanges)):
        row = response[index]
        if request[index] < 0 or row < 0:
            continue
        exchange = exchanges[index]
        at = row * FRAME_WIDTH
        connection = responses[at + frame_tables.CONNECTION]
        before = at - FRAME_WIDTH
        if row > 0 and responses[before + frame_tables.CONNECTION] == connection:
            ended = segments[responses[before + frame_tables.LAST]]["time_ns"]
            is_next = is_behind_hole[row] == 0
        else:
            ended = earlier[2 * connection + 1]
            is_next = responses[at + frame_tables.POS] == earlier[2 * connection]
            if earlier[2 * connection] == NO_RESPONSE:
                continue
        # a response in the hole may have occupied the broker for longer
        exchange["queued_ns"] = -1
        if is_next:
            until = min(ended, exchange["response"]["time_ns"])
            exchange["queued_ns"] = max(0, until - exchange["request"]["end_time_ns"])


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of frames.

    answer_of: int64[requests], row of the response or -1. status, is_lost: uint8[requests].
    request_of: int64[responses], row of the request or -1. came: uint8[responses], arrival
    (`pairing.pair`). is_behind_hole: uint8[responses]. request, response: int64[exchanges], frame
    rows or -1.
    """

    answer_of: Ints
    status: npt.NDArray[np.uint8]
    is_lost: npt.NDArray[np.uint8]
    request_of: Ints
    came: npt.NDArray[np.uint8]
    is_behind_hole: npt.NDArray[np.uint8]
    request: Ints
    response: Ints

    def lost(self) -> npt.NDArray[np.bool_]:
        """bool[exchanges]: whether the response is known to be lost."""
        has_request = self.request >= 0
        lost = np.zeros(len(self.request), np.bool_)
        lost[has_request] = self.is_lost[self.request[has_request]] != 0
        return lost


@dataclass(frozen=True, slots=True)
class Paired:
    """Everything of an `Assembly`, with frames and pairs instead of exchange rows.

    segments: SEGMENT, in assembly order. anomalies: their extents are numbered as in `assembly()`.
    earlier: int64[connections, 2], see `_fill_queues`.
    """

    endpoints: npt.NDArray[np.void]
    connections: npt.NDArray[np.void]
    segments: npt.NDArray[np.void]
    requests: Frames
    responses: Frames
    pairs: Pairs
    earlier: Ints
    anomalies: npt.NDArray[np.void]
    duplicate_packets: Ints
    tls: dict[int, TlsFacts]
    carried: Carried
    tcp: TcpFacts

    def __len__(self) -> int:
        """The number of exchanges."""
        return len(self.pairs.request)

    def assembly(self) -> Assembly:
        """All exchanges as one Assembly."""
        extents = joined(
            [_extents(frames.extents, self.carried) for frames in (self.requests, self.responses)]
        )
        exchanges = self._exchanges(self.pairs.request, self.pairs.response)
        return self._assembly(exchanges, extents, self.anomalies)

    def anomalous(self) -> Assembly:
        """An Assembly without exchanges; its extents are those that anomalies show."""
        anomalies = self.anomalies.copy()
        start, extents = self._gathered(
            anomalies["extent_start"], anomalies["extent_count"].astype(np.int64)
        )
        anomalies["extent_start"] = start
        return self._assembly(np.zeros(0, EXCHANGE), extents, anomalies)

    def part(self, rows: slice | Ints) -> Assembly:
        """An Assembly of some exchanges with their extents, and all connections; no anomalies."""
        exchanges = self._exchanges(self.pairs.request[rows], self.pairs.response[rows])
        parts = []
        base = 0
        for side in ("request", "response"):
            column = exchanges[side]
            start, extents = self._gathered(
                column["extent_start"], column["extent_count"].astype(np.int64)
            )
            column["extent_start"] = start + base
            base += len(extents)
            parts.append(extents)
        return self._assembly(exchanges, joined(parts), np.zeros(0, ANOMALY))

    def without_request(self) -> Ints:
        """Rows of exchanges with a response only."""
        return np.flatnonzero(self.pairs.request < 0)

    def requested_versions(self) -> npt.NDArray[np.int64]:
        """int64[n, 3]: distinct (connection, api key, api version) of the requests."""
        distinct = np.zeros((0, 3), np.int64)
        columns = [frame_tables.CONNECTION, frame_tables.API_KEY, frame_tables.VERSION]
        for first in range(0, len(self.requests.table), FRAMES_AT_ONCE):
            portion = self.requests.table[first : first + FRAMES_AT_ONCE]
            portion = portion[portion[:, frame_tables.KIND] != frame_tables.TOKEN][:, columns]
            distinct = np.unique(np.concatenate([distinct, portion]), axis=0)
        return distinct

    def _assembly(self, exchanges: Any, extents: Any, anomalies: Any) -> Assembly:
        return Assembly(
            self.endpoints, self.connections, exchanges, extents, anomalies,
            self.duplicate_packets, self.tls, self.carried, self.tcp,
        )  # fmt: skip

    def _exchanges(self, request: Ints, response: Ints) -> npt.NDArray[np.void]:
        """EXCHANGE rows from frame rows int64[n] of both directions, -1 if a side is missing."""
        exchanges = np.zeros(len(request), EXCHANGE)
        requests, responses = self.requests.table.reshape(-1), self.responses.table.reshape(-1)
        base = len(self.requests.extents)
        _fill_sides(exchanges, requests, responses, request, response, self.segments, base)
        _fill_heads(exchanges, requests, request, responses, response, self.pairs.status)
        holes, earlier = self.pairs.is_behind_hole, self.earlier.reshape(-1)
        _fill_queues(exchanges, request, responses, response, holes, earlier, self.segments)
        has_request = request >= 0
        pos = np.where(has_request, exchanges["request"]["pos"], exchanges["response"]["pos"])
        exchanges["exchange_id"] = exchange_ids(
            self.connections["connection_id"][exchanges["connection"]],
            np.where(has_request, REQUEST, RESPONSE),
            pos,
        )
        return exchanges

    def _gathered(self, start: Any, count: Ints) -> tuple[Ints, npt.NDArray[np.void]]:
        """(new starts, extents) of ranges of extents that are numbered as in `assembly()`."""
        rows, new_start = gather_ranges(start, count)
        base = len(self.requests.extents)
        extents = np.empty(len(rows), EXTENT)
        is_of_request = rows < base
        for table, mask, extent_rows in (
            (self.requests.extents, is_of_request, rows),
            (self.responses.extents, ~is_of_request, rows - base),
        ):
            if mask.all():
                return new_start, _extents(table[extent_rows], self.carried)
            extents[mask] = _extents(table[extent_rows[mask]], self.carried)
        return new_start, extents


@dataclass(frozen=True, slots=True)
class AssembledExchanges:
    """The exchanges of an assembly, in parts, with the methods of `Paired`.

    requests: int64[n, 3], distinct (connection, api key, api version) of the requests.
    """

    assembly: Assembly
    requests: Ints

    def __len__(self) -> int:
        """The number of exchanges."""
        return len(self.assembly.exchanges)

    def part(self, rows: slice | Ints) -> Assembly:
        """An Assembly of some exchanges, and all connections; no anomalies."""
        exchanges = self.assembly.exchanges[rows].copy()
        return replace(self.assembly, exchanges=exchanges, anomalies=np.zeros(0, ANOMALY))

    def without_request(self) -> Ints:
        """Rows of exchanges with a response only."""
        return np.flatnonzero(self.assembly.exchanges["request"]["size"] < 0)

    def requested_versions(self) -> Ints:
        """int64[n, 3]: distinct (connection, api key, api version) of the requests."""
        return self.requests


Exchanges = Paired | AssembledExchanges


def _extents(table: Ints, carried: Carried) -> npt.NDArray[np.void]:
    """EXTENT rows from the rows of a direction's extent table."""
    extents = np.zeros(len(table), EXTENT)
    for column, name in enumerate(("pos", "length", "source")):
        extents[name] = table[:, column]
    if len(carried.data):
        extents["transform"][extents["source"] == carried.source] = CARRIED
    return extents


@dataclass(frozen=True, slots=True)
class Ids:
    """Exchange ids of frames."""

    connection_id: npt.NDArray[np.int64]
    requests: Frames
    responses: Frames
    request_of: Ints

    def of_requests(self, rows: Ints) -> npt.NDArray[np.int64]:
        return self._of(self.requests, rows, REQUEST)

    def of_responses(self, rows: Ints) -> npt.NDArray[np.int64]:
        request_rows = self.request_of[rows]
        ids = self._of(self.responses, rows, RESPONSE)
        ids[request_rows >= 0] = self.of_requests(request_rows[request_rows >= 0])
        return ids

    def _of(self, frames: Frames, rows: Ints, direction: int) -> npt.NDArray[np.int64]:
        chosen = frames.table[rows]
        return exchange_ids(
            self.connection_id[chosen[:, frame_tables.CONNECTION]],
            np.full(len(chosen), direction),
            chosen[:, frame_tables.POS],
        )


def late_responses(
    requests: Frames, responses: Frames, request_of: Ints, segments: Any
) -> tuple[Ints, Ints]:
    """(rows, ns): responses that began before their requests ended, and by how much.

    SASL tokens are left out.
    """
    late_rows, late_ns = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for first in range(0, len(request_of), FRAMES_AT_ONCE):
        request = request_of[first : first + FRAMES_AT_ONCE]
        table = responses.table[first : first + FRAMES_AT_ONCE]
        rows = np.flatnonzero((request >= 0) & (table[:, frame_tables.KIND] != frame_tables.TOKEN))
        ended = segments["time_ns"][requests.table[request[rows], frame_tables.LAST]]
        late = ended - segments["time_ns"][table[rows, frame_tables.FIRST]]
        late_rows.append(first + rows[late > 0])
        late_ns.append(late[late > 0])
    return np.concatenate(late_rows), np.concatenate(late_ns)
