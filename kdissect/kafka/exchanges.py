"""Frames of both directions and their pairs, and the exchange rows that are made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kdissect.arrays import Bools, Ids, Indices, Row, Rows, take
from kdissect.capture.scratch import Scratch, Written
from kdissect.kafka import frame_tables, framing, response_bodies
from kdissect.kafka.assembly import ANOMALY, EXCHANGE, EXTENT, PairStatus
from kdissect.kafka.frame_tables import FRAME, HOLE, NO_FRAMES, NO_HOLE, TOKEN
from kdissect.kafka.walk import KafkaStreams
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.tcp.connection_ids import exchange_ids

NO_RESPONSE = -(1 << 62)  # no earlier response is known
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
        streams: KafkaStreams, walk: Row, asked: Frames | None, scratch: Scratch, extents: Written
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
        decoder = response_bodies.new_decoder()
        room = frame_tables.EXTENTS_AT_ONCE
        tables = frame_tables.new_tables(FRAMES_AT_ONCE, room)
        while walk["connection"] < connection_count:
            tables.used[:] = 0
            framing.walk_on(streams, walk, pending, pending_start, tables, decoder)
            frames, of_frames, of_faults = (
                table[:count] for table, count in zip(tables[:3], tables.used, strict=True)
            )
            base = extents.append(of_frames) // EXTENT.itemsize
            for table, file in ((frames, written), (of_faults, faults)):
                table["extent_start"] += base
                file.append(table)
            np.add.at(start, frames["connection"] + 1, 1)
            np.add.at(framed_bytes, frames["connection"], frames["captured"])
            if walk["extents_needed"] > room:
                room = int(walk["extents_needed"])
                tables = frame_tables.new_tables(FRAMES_AT_ONCE, room)
        return Frames(written.array(), np.cumsum(start), faults.array(), framed_bytes)


@dataclass(frozen=True, slots=True)
class Pairs:
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
        for first in range(0, len(exchanges), FRAMES_AT_ONCE):
            rows = slice(first, first + FRAMES_AT_ONCE)
            some, request, response = exchanges[rows], self.request[rows], self.response[rows]
            asked = request >= 0
            self._fill_heads(some, asked, request, response)
            for side, frames, row in (
                (some["request"], self.requests, request),
                (some["response"], self.responses, response),
            ):
                _fill_side(side, frames, row, segments)
            self._fill_queues(some, asked, response, segments, earlier)
            some["exchange_id"] = exchange_ids(
                connection_id[some["connection"]],
                np.where(asked, REQUEST, RESPONSE),
                np.where(asked, some["request"]["pos"], some["response"]["pos"]),
            )
        return exchanges

    def _fill_heads(
        self, exchanges: Rows, asked: Bools, request: Indices, response: Indices
    ) -> None:
        """Fill the fields common to both sides, from the request's frame, or else from the
        response's."""
        exchanges["status"] = PairStatus.REQUEST_MISSING
        exchanges["status"][asked] = self.requests["outcome"][request[asked]]
        for chosen, frames, row in (
            (asked, self.requests, request),
            (~asked, self.responses, response),
        ):
            frame = take(frames, row[chosen])
            exchanges["connection"][chosen] = frame["connection"]
            exchanges["correlation_id"][chosen] = frame["correlation"].astype(np.int32)
            exchanges["is_sasl_token"][chosen] = frame["kind"] == TOKEN
            exchanges["api_key"][chosen] = frame["api_key"]
            exchanges["api_version"][chosen] = frame["api_version"]

    def _fill_queues(
        self, exchanges: Rows, asked: Bools, response: Indices, segments: Rows, earlier: Rows
    ) -> None:
        """Set queued_ns: how long a request waited until the response before its own had left.

        A broker handles the requests of a connection one at a time, so a request starts when the
        previous response has left.
        """
        pairs = np.flatnonzero(asked & (response >= 0))
        row = response[pairs]
        frame, before = take(self.responses, row), take(self.responses, np.maximum(row - 1, 0))
        follows = (row > 0) & (before["connection"] == frame["connection"])
        last_pos = earlier["response_end"][frame["connection"]]
        last_time = earlier["response_time"][frame["connection"]]
        ended = np.where(follows, segments["time_ns"][before["last"]], last_time)
        is_next = np.where(follows, frame["hole"] == NO_HOLE, frame["pos"] == last_pos)
        until = np.minimum(ended, exchanges["response"]["time_ns"][pairs])
        queued = np.maximum(0, until - exchanges["request"]["end_time_ns"][pairs])
        # a response in the hole may have occupied the broker for longer
        queued[~is_next] = -1
        # nothing was queued before a stream's first response, unless one was lost before it
        is_first = ~follows & (last_pos == NO_RESPONSE)
        queued[is_first & (frame["hole"] != HOLE)] = 0
        exchanges["queued_ns"][pairs] = queued


def _fill_side(side: Rows, frames: Rows, row: Indices, segments: Rows) -> None:
    """Fill the SIDE of exchanges from their frames `row` (-1: no such side)."""
    for name in ("size", "pos", "packet", "source"):
        side[name] = -1
    there = np.flatnonzero(row >= 0)
    frame = take(frames, row[there])
    for name in ("size", "pos", "extent_start", "extent_count"):
        side[name][there] = frame[name]
    for name in ("time_ns", "packet", "source"):
        side[name][there] = segments[name][frame["first"]]
    side["end_time_ns"][there] = segments["time_ns"][frame["last"]]
    side["is_whole"][there] = frame["captured"] == frame["size"] + 4
