"""Frames, what pairs them, and the rows of exchanges made of both: all at once, or some at a time.

A frame is 12 numbers in a flat table and an exchange is a row of 140 bytes, so those of a large
connection are not made together: `Paired` keeps the tables, and makes the rows that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.arrays import gather_ranges, joined
from kdissect.capture.file_arrays import Scratch, Written
from kdissect.capture.segments import ACK, FRAGMENT_PART
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
    TlsFacts,
)
from kdissect.kafka.frame_tables import EXTENT_WIDTH, FAULT_WIDTH, FRAME_WIDTH
from kdissect.kafka.pairing import NOT_ACKNOWLEDGED
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.tcp.byte_ranges import int64
from kdissect.tcp.connection_ids import exchange_ids

Ints = npt.NDArray[np.int64]
Walk = Callable[
    [framing.WalkState, int], Any
]  # `framing.some_requests` or `some_responses`: (state, most)

NO_ORIGIN = -(1 << 62)  # no sequence number
NO_RESPONSE = -(1 << 62)  # no position where a response ended
FRAMES_AT_ONCE = 1 << 15  # found between writes to files
_REQUEST_MISSING = int(PairStatus.REQUEST_MISSING)


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of one direction: table int64[n, FRAME_WIDTH], faults, extents, first row."""

    table: Ints
    extents: Ints
    faults: Ints
    start: Ints  # of each connection, and the end

    @staticmethod
    def of(walk: Walk, connection_count: int, scratch: Scratch) -> Frames:
        """All frames that the walk over the streams of a direction finds.

        Some at a time: arrays that a kernel makes larger and larger are fresh pages each time.
        """
        state = framing.walk_state()
        widths = (FRAME_WIDTH, EXTENT_WIDTH, FAULT_WIDTH)
        files = [Written(np.int64, scratch) for _ in widths]
        extent_count = 0
        while state.connection < connection_count:
            *found, used = walk(state, FRAMES_AT_ONCE)
            parts = [
                table[: n * width] for table, n, width in zip(found, used, widths, strict=True)
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
        """By frame: bytes directly before it are in no frame, or no one knows. has_origin: by
        connection, whether position 0 is known to be where the stream began."""
        found = scratch.empty(len(self.table), np.uint8)
        _behind_hole(self.table.reshape(-1), self.start, has_origin.astype(np.uint8), found)
        return found

    def acknowledged(self, segments: Any, origin: Ints, scratch: Scratch) -> Ints:
        """By frame: the position in the other stream, modulo 2^32, that the segment of its first
        byte acknowledges, or NOT_ACKNOWLEDGED. origin: by connection, the sequence number of
        position 0 there, or NO_ORIGIN."""
        found = scratch.empty(len(self.table), np.int64)
        _acknowledged(self.table.reshape(-1), segments, origin, found)
        return found

    def framed_bytes(self) -> Ints:
        """int64[connections]: captured bytes in the frames of each."""
        return _framed_bytes(self.table.reshape(-1), len(self.start) - 1)

    def cut(self) -> Ints:
        """Rows of which bytes are missing."""
        found = [np.zeros(0, np.int64)]
        for first in range(0, len(self.table), FRAMES_AT_ONCE):
            some = self.table[first : first + FRAMES_AT_ONCE]
            is_cut = some[:, frame_tables.CAPTURED] != some[:, frame_tables.FRAME_SIZE] + 4
            found.append(np.flatnonzero(is_cut) + first)
        return np.concatenate(found)


@making_kernel
def _starts(table: Any, connection_count: int) -> Any:
    """int64[n + 1]: the first row of each connection, in a flat table that is sorted by it."""
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
def _acknowledged(table: Any, segments: Any, origin: Any, found: Any) -> None:
    for row in range(len(found)):
        segment = segments[table[row * FRAME_WIDTH + frame_tables.FIRST]]
        first = origin[table[row * FRAME_WIDTH + frame_tables.CONNECTION]]
        has_ack = segment["flags"] & ACK and not segment["ip_id"] & FRAGMENT_PART
        found[row] = NOT_ACKNOWLEDGED
        if has_ack and first != NO_ORIGIN:
            found[row] = (int64(segment["ack"]) - first) & 0xFFFFFFFF


@making_kernel
def _late_rows(requests: Any, responses: Any, request_of: Any, segments: Any) -> Any:
    """(rows of responses, ns) that began before their requests ended; SASL tokens do not count."""
    count = 0
    for turn in range(2):
        if turn:
            rows = np.empty(count, np.int64)
            late = np.empty(count, np.int64)
            count = 0
        for row in range(len(request_of)):
            at = row * FRAME_WIDTH
            if request_of[row] < 0 or responses[at + frame_tables.KIND] == frame_tables.TOKEN:
                continue
            asked = requests[request_of[row] * FRAME_WIDTH + frame_tables.LAST]
            ended = segments[asked]["time_ns"]
            by = ended - segments[responses[at + frame_tables.FIRST]]["time_ns"]
            if by > 0:
                if turn:
                    rows[count] = row
                    late[count] = by
                count += 1
    return rows, late


@kernel
def _fill_sides(
    exchanges: Any, asked: Any, told: Any, request: Any, response: Any, segments: Any, base: int
) -> None:  # fmt: skip
    """Both sides of EXCHANGE; the extents of responses begin at `base`.

    Here, not in Python, since numpy takes the field of a single row for a contiguous array: it
    would compile again.
    """
    _fill_side(exchanges["request"], asked, request, segments, 0)
    _fill_side(exchanges["response"], told, response, segments, base)


@inlined
def _fill_side(side: Any, table: Any, row: Any, segments: Any, extent_base: int) -> None:
    """The SIDE rows of exchanges whose frame is `row` of a flat table (-1: they have none)."""
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
    """What exchanges say of both sides: as the request's frame tells, else the response's."""
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
    """Set queued_ns: how long a request was there while the response before its own was not done.

    A broker takes the requests of a connection one at a time, so the next one begins when the
    response before has left. earlier: of each connection two numbers, the position and the time at
    which the last response before these frames ended (NO_RESPONSE: there is none).
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
        # a response in the hole may have kept the broker busy for longer
        exchange["queued_ns"] = -1
        if is_next:
            until = min(ended, exchange["response"]["time_ns"])
            exchange["queued_ns"] = max(0, until - exchange["request"]["end_time_ns"])


@dataclass(frozen=True, slots=True)
class Pairs:
    """answer_of int64, status and is_lost uint8 of each request; request_of int64, came uint8
    (`pairing.pair`) and is_behind_hole uint8 of each response; request, response int64: their rows,
    of each exchange."""

    answer_of: Ints
    status: npt.NDArray[np.uint8]
    is_lost: npt.NDArray[np.uint8]
    request_of: Ints
    came: npt.NDArray[np.uint8]
    is_behind_hole: npt.NDArray[np.uint8]
    request: Ints
    response: Ints

    def lost(self) -> npt.NDArray[np.bool_]:
        """By exchange: whether its answer is known to be lost."""
        has_request = self.request >= 0
        lost = np.zeros(len(self.request), np.bool_)
        lost[has_request] = self.is_lost[self.request[has_request]] != 0
        return lost


@dataclass(frozen=True, slots=True)
class Paired:
    """What `Assembly` has, but for the exchanges, which are still frames and pairs of these.

    segments: SEGMENT, in assembly order. anomalies: their extents count as those of `assembly()`.
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

    def __len__(self) -> int:
        """How many exchanges there are."""
        return len(self.pairs.request)

    def assembly(self) -> Assembly:
        """All of it."""
        extents = joined(
            [_extents(found.extents, self.carried) for found in (self.requests, self.responses)]
        )
        exchanges = self._exchanges(self.pairs.request, self.pairs.response)
        return self._assembly(exchanges, extents, self.anomalies)

    def anomalous(self) -> Assembly:
        """All but the exchanges; of extents those that anomalies show."""
        anomalies = self.anomalies.copy()
        start, extents = self._gathered(
            anomalies["extent_start"], anomalies["extent_count"].astype(np.int64)
        )
        anomalies["extent_start"] = start
        return self._assembly(np.zeros(0, EXCHANGE), extents, anomalies)

    def part(self, rows: slice | Ints) -> Assembly:
        """Some exchanges with their extents, and all connections; no anomalies."""
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
        """Exchanges of which only the response is there."""
        return np.flatnonzero(self.pairs.request < 0)

    def requested_versions(self) -> npt.NDArray[np.int64]:
        """int64[n, 3]: connection, api key and api version of the requests, each once."""
        found = np.zeros((0, 3), np.int64)
        columns = [frame_tables.CONNECTION, frame_tables.API_KEY, frame_tables.VERSION]
        for first in range(0, len(self.requests.table), FRAMES_AT_ONCE):
            some = self.requests.table[first : first + FRAMES_AT_ONCE]
            some = some[some[:, frame_tables.KIND] != frame_tables.TOKEN][:, columns]
            found = np.unique(np.concatenate([found, some]), axis=0)
        return found

    def _assembly(self, exchanges: Any, extents: Any, anomalies: Any) -> Assembly:
        return Assembly(
            self.endpoints, self.connections, exchanges, extents, anomalies,
            self.duplicate_packets, self.tls, self.carried,
        )  # fmt: skip

    def _exchanges(self, request: Ints, response: Ints) -> npt.NDArray[np.void]:
        """EXCHANGE of the frames int64[n] of both directions, -1 where there is none."""
        exchanges = np.zeros(len(request), EXCHANGE)
        asked, told = self.requests.table.reshape(-1), self.responses.table.reshape(-1)
        base = len(self.requests.extents)
        _fill_sides(exchanges, asked, told, request, response, self.segments, base)
        _fill_heads(exchanges, asked, request, told, response, self.pairs.status)
        holes, earlier = self.pairs.is_behind_hole, self.earlier.reshape(-1)
        _fill_queues(exchanges, request, told, response, holes, earlier, self.segments)
        has_request = request >= 0
        pos = np.where(has_request, exchanges["request"]["pos"], exchanges["response"]["pos"])
        exchanges["exchange_id"] = exchange_ids(
            self.connections["connection_id"][exchanges["connection"]],
            np.where(has_request, REQUEST, RESPONSE),
            pos,
        )
        return exchanges

    def _gathered(self, start: Any, count: Ints) -> tuple[Ints, npt.NDArray[np.void]]:
        """Ranges of extents, counted as in `assembly()`: their new starts, and they alone."""
        rows, new_start = gather_ranges(start, count)
        base = len(self.requests.extents)
        extents = np.empty(len(rows), EXTENT)
        is_asked = rows < base
        for table, here, of in (
            (self.requests.extents, is_asked, rows),
            (self.responses.extents, ~is_asked, rows - base),
        ):
            if here.all():
                return new_start, _extents(table[of], self.carried)
            extents[here] = _extents(table[of[here]], self.carried)
        return new_start, extents


@dataclass(frozen=True, slots=True)
class AssembledExchanges:
    """The exchanges of an assembly, in parts as `Paired` gives them.

    requests: int64[n, 3], connection, api key and api version of the requests, each once.
    """

    assembly: Assembly
    requests: Ints

    def __len__(self) -> int:
        """How many exchanges there are."""
        return len(self.assembly.exchanges)

    def part(self, rows: slice | Ints) -> Assembly:
        """Some exchanges, and all connections; no anomalies."""
        exchanges = self.assembly.exchanges[rows].copy()
        return replace(self.assembly, exchanges=exchanges, anomalies=np.zeros(0, ANOMALY))

    def without_request(self) -> Ints:
        """Exchanges of which only the response was captured."""
        return np.flatnonzero(self.assembly.exchanges["request"]["size"] < 0)

    def requested_versions(self) -> Ints:
        """`requests`."""
        return self.requests


Exchanges = Paired | AssembledExchanges


def _extents(table: Ints, carried: Carried) -> npt.NDArray[np.void]:
    """EXTENT of rows of a direction's extents."""
    extents = np.zeros(len(table), EXTENT)
    for column, name in enumerate(("pos", "length", "source")):
        extents[name] = table[:, column]
    if len(carried.data):
        extents["transform"][extents["source"] == carried.source] = CARRIED
    return extents


@dataclass(frozen=True, slots=True)
class Ids:
    """Ids of the exchanges that frames belong to."""

    connection_id: npt.NDArray[np.int64]
    requests: Frames
    responses: Frames
    request_of: Ints

    def of_requests(self, rows: Ints) -> npt.NDArray[np.int64]:
        return self._of(self.requests, rows, REQUEST)

    def of_responses(self, rows: Ints) -> npt.NDArray[np.int64]:
        asked = self.request_of[rows]
        ids = self._of(self.responses, rows, RESPONSE)
        ids[asked >= 0] = self.of_requests(asked[asked >= 0])
        return ids

    def _of(self, frames: Frames, rows: Ints, direction: int) -> npt.NDArray[np.int64]:
        some = frames.table[rows]
        return exchange_ids(
            self.connection_id[some[:, frame_tables.CONNECTION]],
            np.full(len(some), direction),
            some[:, frame_tables.POS],
        )


def late_responses(
    requests: Frames, responses: Frames, request_of: Ints, segments: Any
) -> tuple[Ints, Ints]:
    """Responses that began before their requests ended: their rows, and by how many ns."""
    rows, late = _late_rows(
        requests.table.reshape(-1), responses.table.reshape(-1), request_of, segments
    )
    return rows, late
