"""Frames, their pairs, and exchange rows made from both: all at once or part by part.

A large connection has too many exchanges to make at once, so `Paired` keeps the tables of frames
and makes rows on request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.arrays import Rows, copied, gather_ranges, joined
from kdissect.capture.scratch import Scratch, Written
from kdissect.jit import inlined, kernel, making_kernel
from kdissect.kafka import framing
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
from kdissect.kafka.frame_tables import EXTENTS, FRAME, TOKEN
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

    table: FRAME[n], by connection. extents: EXTENT. faults: as in `frame_tables.Tables`. start:
    int64[connections + 1], first row of each connection, and the end.
    """

    table: Rows
    extents: Rows
    faults: Rows
    start: Ints

    @staticmethod
    def of(walk: Walk, connection_count: int, scratch: Scratch) -> Frames:
        """All frames that `walk` finds in the streams of a direction.

        They are collected some at a time, because an array that grows inside a kernel is copied to
        fresh pages each time.
        """
        state = framing.walk_state()
        files = [Written(kind, scratch) for kind in (FRAME, EXTENT, ANOMALY)]
        extent_count = 0
        while state.connection < connection_count:
            *found, used = walk(state, FRAMES_AT_ONCE)
            parts = [table[:count] for table, count in zip(found, used, strict=True)]
            parts[0]["extent_start"] += extent_count
            parts[2]["extent_start"] += extent_count
            extent_count += int(used[EXTENTS])
            for file, part in zip(files, parts, strict=True):
                file.append(part)
        table, extents, faults = (file.array() for file in files)
        connections = scratch.copied(table["connection"])
        start = np.searchsorted(connections, np.arange(connection_count + 1))
        return Frames(table, extents, faults, start)

    def behind_hole(
        self, has_origin: npt.NDArray[np.bool_], scratch: Scratch
    ) -> npt.NDArray[np.uint8]:
        """uint8[frames]: whether unframed bytes, or unknown ones, directly precede the frame.

        has_origin: bool per connection, whether position 0 is known to be the stream's beginning.
        """
        is_behind_hole = scratch.empty(len(self.table), np.uint8)
        _behind_hole(self.table, self.start, has_origin.astype(np.uint8), is_behind_hole)
        return is_behind_hole

    def framed_bytes(self) -> Ints:
        """int64[connections]: captured bytes inside frames."""
        return _framed_bytes(self.table, len(self.start) - 1)

    def cut(self) -> Ints:
        """Rows of frames with missing bytes."""
        cut_rows = [np.zeros(0, np.int64)]
        for first in range(0, len(self.table), FRAMES_AT_ONCE):
            portion = self.table[first : first + FRAMES_AT_ONCE]
            cut_rows.append(np.flatnonzero(portion["captured"] != portion["size"] + 4) + first)
        return np.concatenate(cut_rows)


@making_kernel
def _framed_bytes(table: Any, connection_count: int) -> Any:
    total = np.zeros(connection_count, np.int64)
    for row in range(len(table)):
        total[table[row]["connection"]] += table[row]["captured"]
    return total


@kernel
def _behind_hole(table: Any, start: Any, has_origin: Any, found: Any) -> None:
    for connection in range(len(start) - 1):
        before = int64(0) if has_origin[connection] else int64(-1)
        for row in range(start[connection], start[connection + 1]):
            found[row] = table[row]["pos"] != before
            before = table[row]["pos"] + 4 + table[row]["size"]


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
    """Fill the SIDE of exchanges from their frame `row` (-1: no such side)."""
    for index in range(len(row)):
        if row[index] < 0:
            side[index]["size"] = -1
            side[index]["pos"] = -1
            side[index]["packet"] = -1
            side[index]["source"] = -1
            continue
        frame = table[row[index]]
        first = segments[frame["first"]]
        side[index]["time_ns"] = first["time_ns"]
        side[index]["end_time_ns"] = segments[frame["last"]]["time_ns"]
        side[index]["size"] = frame["size"]
        side[index]["pos"] = frame["pos"]
        side[index]["packet"] = first["packet"]
        side[index]["extent_start"] = frame["extent_start"] + extent_base
        side[index]["extent_count"] = frame["extent_count"]
        side[index]["source"] = first["source"]
        side[index]["is_whole"] = frame["captured"] == frame["size"] + 4


@kernel
def _fill_heads(
    exchanges: Any, requests: Any, request: Any, responses: Any, response: Any, status: Any
) -> None:
    """Fill the fields common to both sides, from the request's frame, or else from the
    response's."""
    for index in range(len(exchanges)):
        exchange = exchanges[index]
        if request[index] >= 0:
            frame = requests[request[index]]
            exchange["status"] = status[request[index]]
            exchange["api_key"] = np.int16(frame["api_key"])
            exchange["api_version"] = np.int16(frame["api_version"])
        else:
            frame = responses[response[index]]
            exchange["status"] = _REQUEST_MISSING
            exchange["api_key"] = NO_API
            exchange["api_version"] = NO_API
        exchange["connection"] = frame["connection"]
        exchange["correlation_id"] = np.int32(frame["correlation"])
        exchange["is_sasl_token"] = frame["kind"] == TOKEN


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
        connection = responses[row]["connection"]
        if row > 0 and responses[row - 1]["connection"] == connection:
            ended = segments[responses[row - 1]["last"]]["time_ns"]
            is_next = is_behind_hole[row] == 0
        else:
            ended = earlier[2 * connection + 1]
            is_next = responses[row]["pos"] == earlier[2 * connection]
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
        for first in range(0, len(self.requests.table), FRAMES_AT_ONCE):
            portion = self.requests.table[first : first + FRAMES_AT_ONCE]
            portion = portion[portion["kind"] != TOKEN]
            columns = [portion[name] for name in ("connection", "api_key", "api_version")]
            distinct = np.unique(np.concatenate([distinct, np.column_stack(columns)]), axis=0)
        return distinct

    def _assembly(self, exchanges: Any, extents: Any, anomalies: Any) -> Assembly:
        return Assembly(
            self.endpoints, self.connections, exchanges, extents, anomalies,
            self.duplicate_packets, self.tls, self.carried, self.tcp,
        )  # fmt: skip

    def _exchanges(self, request: Ints, response: Ints) -> npt.NDArray[np.void]:
        """EXCHANGE rows from frame rows int64[n] of both directions, -1 if a side is missing."""
        exchanges = np.zeros(len(request), EXCHANGE)
        requests, responses = self.requests.table, self.responses.table
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


def _extents(table: Rows, carried: Carried) -> Rows:
    """A copy of extents as framing wrote them, with the transform of carried bytes."""
    extents = copied(table)
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
            self.connection_id[chosen["connection"]], np.full(len(chosen), direction), chosen["pos"]
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
        rows = np.flatnonzero((request >= 0) & (table["kind"] != TOKEN))
        ended = segments["time_ns"][requests.table["last"][request[rows]]]
        late = ended - table["time"][rows]
        late_rows.append(first + rows[late > 0])
        late_ns.append(late[late > 0])
    return np.concatenate(late_rows), np.concatenate(late_ns)
