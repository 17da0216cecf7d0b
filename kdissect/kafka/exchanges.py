"""Frames of both directions and their pairs, and the exchange rows that are made from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.arrays import Rows
from kdissect.capture.scratch import Scratch, Written
from kdissect.jit import inlined, kernel, making_kernel
from kdissect.kafka import framing
from kdissect.kafka.assembly import ANOMALY, EXCHANGE, EXTENT, NO_API, PairStatus
from kdissect.kafka.frame_tables import FRAME, TOKEN, Tables
from kdissect.kafka.pairing import RequestRows, ResponseRows
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.tcp.byte_ranges import int64
from kdissect.tcp.connection_ids import exchange_ids

Ints = npt.NDArray[np.int64]
# `framing.some_requests` or `some_responses`: (state, most)
Walk = Callable[[framing.WalkState, int], Tables]

NO_RESPONSE = -(1 << 62)  # no earlier response is known
FRAMES_AT_ONCE = 1 << 15  # frames found, or exchanges looked at, between writes to files
_REQUEST_MISSING = int(PairStatus.REQUEST_MISSING)


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of one direction.

    table: FRAME[n], by connection. faults: as in `frame_tables.Tables`. start:
    int64[connections + 1], first row of each connection, and the end.
    """

    table: Rows
    faults: Rows
    start: Ints

    @staticmethod
    def of(walk: Walk, connection_count: int, scratch: Scratch, extents: Written) -> Frames:
        """All frames that `walk` finds in the streams of a direction; their extents are appended.

        They are collected some at a time, because an array that grows inside a kernel is copied to
        fresh pages each time.
        """
        state = framing.walk_state()
        written, faults = Written(FRAME, scratch), Written(ANOMALY, scratch)
        while state.connection < connection_count:
            found = walk(state, FRAMES_AT_ONCE)
            frames, of_frames, of_faults = (
                table[:count] for table, count in zip(found[:3], found.used, strict=True)
            )
            base = extents.append(of_frames) // EXTENT.itemsize
            for table, file in ((frames, written), (of_faults, faults)):
                table["extent_start"] += base
                file.append(table)
        table = written.array()
        connections = scratch.copied(table["connection"])
        start = np.searchsorted(connections, np.arange(connection_count + 1))
        return Frames(table, faults.array(), start)

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
    exchanges: Any, requests: Any, responses: Any, request: Any, response: Any, segments: Any
) -> None:
    """Fill both sides of EXCHANGE rows.

    This is a kernel of its own, because NumPy reports the field of a single row as contiguous, and
    the kernel would be compiled a second time.
    """
    _fill_side(exchanges["request"], requests, request, segments)
    _fill_side(exchanges["response"], responses, response, segments)


@inlined
def _fill_side(side: Any, table: Any, row: Any, segments: Any) -> None:
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
        side[index]["extent_start"] = frame["extent_start"]
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
    """Requests and responses with what `pairing.pair` found of them.

    request, response: int64[exchanges], frame rows or -1.
    """

    requests: RequestRows
    responses: ResponseRows
    request: Ints
    response: Ints

    def lost(self) -> npt.NDArray[np.bool_]:
        """bool[exchanges]: whether the response is known to be lost."""
        has_request = self.request >= 0
        lost = np.zeros(len(self.request), np.bool_)
        lost[has_request] = self.requests.is_lost[self.request[has_request]] != 0
        return lost

    def exchanges(
        self, connection_id: Ints, segments: Rows, earlier: Ints, scratch: Scratch
    ) -> Rows:
        """EXCHANGE[n]. segments: SEGMENT, in assembly order. earlier: int64[connections, 2], see
        `_fill_queues`."""
        exchanges = scratch.zeros(len(self.request), EXCHANGE)
        requests, responses = self.requests.rows, self.responses.rows
        for first in range(0, len(exchanges), FRAMES_AT_ONCE):
            rows = slice(first, first + FRAMES_AT_ONCE)
            some, request, response = exchanges[rows], self.request[rows], self.response[rows]
            _fill_sides(some, requests, responses, request, response, segments)
            _fill_heads(some, requests, request, responses, response, self.requests.status)
            holes = self.responses.is_behind_hole
            _fill_queues(some, request, responses, response, holes, earlier.reshape(-1), segments)
            asked = request >= 0
            some["exchange_id"] = exchange_ids(
                connection_id[some["connection"]],
                np.where(asked, REQUEST, RESPONSE),
                np.where(asked, some["request"]["pos"], some["response"]["pos"]),
            )
        return exchanges
