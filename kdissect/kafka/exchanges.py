"""Frames of both directions and their pairs, and the exchange rows that are made from them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kdissect.arrays import Bools, Ids, Indices, Rows, Struct
from kdissect.capture.scratch import Scratch, Written
from kdissect.jit import inlined, int64, kernel
from kdissect.kafka import frame_tables, framing, response_bodies
from kdissect.kafka.assembly import ANOMALY, EXCHANGE, EXTENT, PairStatus
from kdissect.kafka.frame_tables import BREAK, FRAME, NO_BREAK, NO_FRAMES, TOKEN
from kdissect.kafka.walk import KafkaStreams
from kdissect.tcp.connection_ids import exchange_ids

NO_RESPONSE = -(1 << 62)  # no earlier response is known
_REQUEST_MISSING = int64(PairStatus.REQUEST_MISSING)
FRAMES_AT_ONCE = 1 << 15  # frames found, or exchanges looked at, between writes to files


class Frames(NamedTuple):
    """The frames of one direction.

    table: FRAME[n], by connection. start: int64[connections + 1], first row of each connection, and
    the end. faults: as in `frame_tables.Tables`. framed_bytes: int64[connections], captured bytes
    inside frames.
    """

    table: Rows
    start: Indices
    faults: Rows
    framed_bytes: Indices

    @staticmethod
    def of(
        streams: KafkaStreams,
        walk: Struct,
        asked: Frames | None,
        scratch: Scratch,
        extents: Written,
    ) -> Frames:
        """All frames that a new walk finds in the streams of its direction; their extents are
        appended. asked: for a walk over responses, the requests."""
        connection_count = len(streams.protocol)
        pending, pending_start = NO_FRAMES, np.zeros(connection_count + 1, np.int64)
        if asked is not None:
            pending, pending_start = asked.table, asked.start
        written, faults = Written(FRAME, scratch), Written(ANOMALY, scratch)
        start = np.zeros(connection_count + 1, np.int64)
        framed_bytes = np.zeros(connection_count, np.int64)
        api_keys = np.flatnonzero(np.bincount(pending["api_key"] + 1)) - 1
        decoder = response_bodies.new_decoder(api_keys.tolist())
        room = frame_tables.EXTENTS_AT_ONCE
        tables = frame_tables.new_tables(FRAMES_AT_ONCE, room)
        while walk["connection"] < connection_count:
            tables.used[:] = 0
            first = int(walk["connection"])
            framing.walk_on(streams, walk, pending, pending_start, tables, decoder)
            frames, of_frames, of_faults = (
                table[:count] for table, count in zip(tables[:3], tables.used, strict=True)
            )
            base = extents.append(of_frames) // EXTENT.itemsize
            for table, file in ((frames, written), (of_faults, faults)):
                table["extent_start"] += base
                file.append(table)
            of = frames["connection"] - first
            counts, sizes = np.bincount(of), np.bincount(of, frames["captured"])
            start[first + 1 :][: len(counts)] += counts
            framed_bytes[first:][: len(sizes)] += sizes.astype(np.int64)
            if walk["extents_needed"] > room:
                room = int(walk["extents_needed"])
                tables = frame_tables.new_tables(FRAMES_AT_ONCE, room)
        return Frames(written.array(), np.cumsum(start), faults.array(), framed_bytes)


class Pairs(NamedTuple):
    """FRAME rows of both directions, paired. request, response: int64[exchanges], the row of each
    side of an exchange, or -1."""

    requests: Rows
    responses: Rows
    request: Indices
    response: Indices

    def lost(self) -> Bools:
        """bool[exchanges]: whether the response is known to be lost."""
        has_request = self.request >= 0
        lost = np.zeros(len(self.request), np.bool_)
        lost[has_request] = self.requests["is_lost"][self.request[has_request]] != 0
        return lost

    def exchanges(
        self, connection_id: Ids, segments: Rows, earlier: Rows, scratch: Scratch
    ) -> Rows:
        """EXCHANGE[n]. segments: SEGMENT, in assembly order. earlier: EARLIER of the connections,
        which has the last response before these frames."""
        exchanges = scratch.zeros(len(self.request), EXCHANGE)
        _fill(exchanges, self, segments, earlier)
        for first in range(0, len(exchanges), FRAMES_AT_ONCE):
            some = exchanges[first : first + FRAMES_AT_ONCE]
            some["exchange_id"] = exchange_ids(some, connection_id)
        return exchanges


@kernel
def _fill(exchanges: Rows, pairs: Pairs, segments: Rows, earlier: Rows) -> None:
    """Fill all fields of exchanges, which are 0, but their ids."""
    requests, responses = pairs.requests, pairs.responses
    for row in range(len(exchanges)):
        exchange, asked, answer = exchanges[row], pairs.request[row], pairs.response[row]
        _fill_side(exchange["request"], requests, asked, segments)
        _fill_side(exchange["response"], responses, answer, segments)
        frame = requests[asked] if asked >= 0 else responses[answer]
        exchange["status"] = frame["outcome"] if asked >= 0 else _REQUEST_MISSING
        exchange["connection"] = frame["connection"]
        exchange["correlation_id"] = np.int32(frame["correlation"])
        exchange["is_sasl_token"] = frame["kind"] == TOKEN
        exchange["api_key"] = frame["api_key"]
        exchange["api_version"] = frame["api_version"]
        if asked >= 0 and answer >= 0:
            known = earlier[frame["connection"]]
            exchange["queued_ns"] = _queued_ns(exchange, responses, answer, segments, known)


@inlined
def _fill_side(side: Struct, frames: Rows, row: int, segments: Rows) -> None:
    """Fill a SIDE from its frame `row` (-1: no such side)."""
    if row < 0:
        side["size"] = -1
        side["pos"] = -1
        side["packet"] = -1
        side["source"] = -1
        return
    frame = frames[row]
    first = segments[frame["first"]]
    side["size"] = frame["size"]
    side["pos"] = frame["pos"]
    side["extent_start"] = frame["extent_start"]
    side["extent_count"] = frame["extent_count"]
    side["time_ns"] = first["time_ns"]
    side["packet"] = first["packet"]
    side["source"] = first["source"]
    side["end_time_ns"] = segments[frame["last"]]["time_ns"]
    side["is_whole"] = frame["captured"] == frame["size"] + 4


@inlined
def _queued_ns(exchange: Struct, responses: Rows, row: int, segments: Rows, earlier: Struct) -> int:
    """How long a request waited until the response before its own, which is `row`, had left; -1 if
    that is not known.

    A broker handles the requests of a connection one at a time, so a request starts when the
    previous response has left, whatever that one answered. earlier: EARLIER of the connection.
    """
    frame = responses[row]
    if row > 0 and responses[row - 1]["connection"] == frame["connection"]:
        is_next = frame["before"] == NO_BREAK
        ended = segments[responses[row - 1]["last"]]["time_ns"]
    elif earlier["response_end"] != NO_RESPONSE:
        is_next = frame["pos"] == earlier["response_end"]
        ended = earlier["response_time"]
    else:
        # Nothing was before a stream's first response, as far as the capture shows.
        is_next = frame["before"] != BREAK
        ended = exchange["request"]["end_time_ns"]
    if not is_next:
        return int64(-1)  # a response in the break may have occupied the broker for longer
    until = min(ended, exchange["response"]["time_ns"])
    return max(int64(0), until - exchange["request"]["end_time_ns"])
