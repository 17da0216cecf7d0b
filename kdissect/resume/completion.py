"""Which exchanges of a window are complete. See `carry` for the terms.

A byte of a stream is *settled* if no later packet can change what lies up to it: all bytes up to
the first hole that a retransmission, or a late capture, may still fill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kdissect.kafka.assembly import PairStatus
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.resume.continued import Bools, Continued
from kdissect.resume.open_connection import NEVER, Ints, Phase
from kdissect.tcp.columns import NO_ACK

_SECOND_NS = 1_000_000_000
CONFIRMING_BYTES = 8  # bytes that must follow a response whose request was not seen
CONFIRMED_BY = 3  # exchanges without an answer that make a connection Kafka's
PASSED_MAX = 64  # later requests with an answer, after which a request is complete without one
ONE_WAY_MAX = 64  # requests that wait for an answer, if no response was captured
NO_POSITION = 1 << 62


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for packets that may still come.

    A hole is given up `hole_ns` after the packet behind it, or if `hole_bytes` lie behind it. If
    the peer acknowledged its bytes, the capture lost them: then `acked_ns` or `acked_bytes` are
    enough. closed_ns: after the last packet of a closed connection. begin_ns: for the first bytes
    of a connection whose SYN was not captured.
    """

    hole_ns: int = 3 * _SECOND_NS  # a lost segment comes again within a few round trips, or seldom
    hole_bytes: int = 4 << 20  # a window that large is hardly ever open
    acked_ns: int = 10_000_000  # packets may be captured a little after their acknowledgement
    acked_bytes: int = 64 << 10
    closed_ns: int = _SECOND_NS
    begin_ns: int = 0

    @staticmethod
    def until(late_ns: int, begin_ns: int) -> Patience:
        """Wait so long for a late capture, however many bytes follow a hole."""
        return Patience(late_ns, NO_POSITION, late_ns, NO_POSITION, late_ns, begin_ns)


@dataclass(frozen=True, slots=True)
class Settled:
    """What packets may still change.

    limit: int64[streams], the position up to which bytes are settled; in plaintext, if the stream
    is decrypted. has_hole: bool[streams], a hole may still be filled. may_begin: bool[connections],
    a late capture may bring bytes before its first ones, until `begin_until` (int64, ns). until:
    int64[connections], when the first of all this is given up, or NEVER.
    """

    limit: Ints
    has_hole: Bools
    may_begin: Bools
    begin_until: Ints
    until: Ints


def settled(c: Continued, patience: Patience, now: int) -> Settled:
    """Find what may still come at the time `now` (ns)."""
    begin_until = c.before["may_begin_until"].copy()
    is_new = begin_until == NEVER
    begin_until[is_new] = c.first_time[is_new] + patience.begin_ns
    has_syn = (c.sides["has_syn"] != 0).reshape(-1, 2).any(axis=1)
    may_begin = (begin_until > now) & ~has_syn & (c.before["phase"] == Phase.LOOKING)
    limit, until = c.ends.copy(), np.where(may_begin, begin_until, NEVER)
    is_searched = (c.sides["gap_count"] > 0) & np.repeat(c.is_kafka, 2)
    for stream in np.flatnonzero(is_searched).tolist():
        limit[stream], when = _first_hole(c, stream, patience, now)
        until[stream >> 1] = min(until[stream >> 1], when)
    has_hole = limit < c.ends
    for stream, opened in c.opened_streams():
        is_whole = not has_hole[stream]
        limit[stream] = opened.end if is_whole else opened.settled(int(limit[stream]))
    return Settled(limit, has_hole, may_begin, begin_until, until)


def _first_hole(c: Continued, stream: int, patience: Patience, now: int) -> tuple[int, int]:
    """(position of a stream's first hole that may still be filled, when it is given up); without
    one, the end of the stream and NEVER."""
    side, segments = c.sides[stream], c.streams.segments
    pieces = c.streams.pieces[side["piece_start"] : side["piece_stop"]]
    begin, end, owner = pieces["pos"], pieces["end"], pieces["segment"]
    before = np.append(0, end)[:-1]
    is_hole = begin > before
    # bytes that a snap length cut do not come
    cut = (segments["length"][owner] - segments["captured"][owner]).astype(np.int64)
    is_hole[1:] &= begin[1:] > end[:-1] + cut[:-1]
    waited = now - segments["time_ns"][owner]
    behind = end[-1:] - begin
    acked = side["ack_high"] - side["origin"] if side["ack_high"] != NO_ACK else -1
    is_lost = (waited >= patience.acked_ns) | (behind >= patience.acked_bytes)
    is_given_up = (waited >= patience.hole_ns) | (behind >= patience.hole_bytes)
    is_given_up |= is_lost & (acked >= begin)
    holes = np.flatnonzero(is_hole & ~is_given_up)
    if not len(holes):
        return int(c.ends[stream]), NEVER
    when = int(segments["time_ns"][owner[holes[0]]]) + patience.hole_ns
    return int(before[holes[0]]), when


@dataclass(frozen=True, slots=True)
class Complete:
    """is_done: bool[exchanges], the complete ones; of a connection, they come before all others,
    and so do their frames in both streams. open_from: int64[streams], where the first frame of any
    other exchange begins, or NO_POSITION. is_confirmed: bool[connections], it is Kafka's beyond
    doubt."""

    is_done: Bools
    open_from: Ints
    is_confirmed: Bools


def complete(c: Continued, ready: Settled, is_over: Bools) -> Complete:
    """Find the complete exchanges. is_over: bool[connections], no more packets come."""
    exchanges, of, (requests, responses) = c.assembly.exchanges, c.of, c.frames
    ends_here = (is_over | c.is_given_up)[of]
    is_settled = [
        ~frames.has | (frames.end <= ready.limit[frames.stream]) | ends_here for frames in c.frames
    ]
    is_silent = (exchanges["status"] == PairStatus.NO_RESPONSE_EXPECTED) & ~responses.has
    is_answered = requests.has & responses.has & is_settled[REQUEST] & is_settled[RESPONSE]
    done = ends_here | is_answered | (is_silent & is_settled[REQUEST])
    # without a request: the next frame confirms it, and no hole may still bring the request
    is_followed = responses.end + CONFIRMING_BYTES <= ready.limit[responses.stream]
    is_alone = ~requests.has & is_settled[RESPONSE]
    done |= is_alone & is_followed & ~ready.has_hole[requests.stream]
    waiting = requests.has & ~responses.has & ~is_silent
    last = np.full(len(c), -1)
    np.maximum.at(last, of[is_answered], np.flatnonzero(is_answered))
    is_lost = c.lost & (np.arange(len(of)) < last[of])
    done |= waiting & is_settled[REQUEST] & (is_lost | _passed(c, waiting, last))

    confirmed = (c.before["phase"] != Phase.LOOKING) | is_over
    confirmed[of[is_answered]] = True
    confirmed |= np.bincount(of[done], minlength=len(c)) >= CONFIRMED_BY
    confirmed &= ~c.is_stuck | c.is_given_up | is_over
    confirmed &= ~ready.may_begin | is_over
    is_done, open_from = _before_open_ones(c, done & confirmed[of])
    return Complete(is_done, open_from, confirmed)


def _passed(c: Continued, waiting: Bools, last: Ints) -> Bools:
    """Requests that have waited for too many others. last: by connection, its last answered one."""
    of, responses = c.of, c.streams_of(RESPONSE)
    passed: Bools = np.arange(len(of)) + PASSED_MAX <= last[of]
    was_framed = c.before["earlier"]["streams"]["was_framed"].reshape(-1)[responses] != 0
    is_one_way = (c.sides["has_data"][responses] == 0) & ~was_framed
    open_count = np.bincount(of[waiting], minlength=len(c))
    for connection in np.flatnonzero(is_one_way & (open_count > ONE_WAY_MAX)).tolist():
        rows = np.flatnonzero(waiting & (of == connection))
        passed[rows[: len(rows) - ONE_WAY_MAX // 2]] = True
    return passed


def _before_open_ones(c: Continued, done: Any) -> tuple[Bools, Ints]:
    """`Complete.is_done` and `open_from`: the exchanges `done` before the first other one, without
    those whose frame comes after one of an open exchange."""
    index = np.arange(len(done))
    first = np.full(len(c), len(done))
    np.minimum.at(first, c.of[~done], index[~done])
    while True:
        is_done: Bools = index < first[c.of]
        open_from = np.full(2 * len(c), NO_POSITION)
        clash = np.zeros(len(done), np.bool_)
        for frames in c.frames:
            rows = frames.has & ~is_done
            np.minimum.at(open_from, frames.stream[rows], frames.pos[rows])
        for frames in c.frames:
            clash |= is_done & frames.has & (frames.pos > open_from[frames.stream])
        if not clash.any():
            return is_done, open_from
        np.minimum.at(first, c.of[clash], index[clash])
