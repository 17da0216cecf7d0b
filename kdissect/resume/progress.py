"""How far a window brings its connections: what is settled, what is complete, where each resumes.

See `carry` for the terms. A byte of a stream is *settled* if no later packet can change what lies
up to it: all bytes up to the first gap that a retransmission, or a late capture, may still fill.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from kdissect.arrays import Bools, Ints
from kdissect.codec.internal_records import names_metadata_log
from kdissect.kafka.assembly import PairStatus, Protocol
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.resume.assembled_window import AssembledWindow
from kdissect.resume.open_connection import NEVER, is_resumed
from kdissect.tcp.columns import NO_ACK
from kdissect.tcp.reassembly import TIME_WAIT_NS
from kdissect.tls.plaintext import OpenedStream
from kdissect.tls.session import RecordPoint

_SECOND_NS = 1_000_000_000
CONFIRMING_BYTES = 8  # bytes that must follow a response whose request was not seen
CONFIRMED_BY = 3  # exchanges without an answer that make a connection Kafka's
LOOKED_AT_MAX = 256 << 10  # bytes of a connection in which nothing was recognised
# After it no answer comes any more, and a connection that one side has closed, or that no data ever
# came on, is over. Clients wait for 30 s, a member that joins for max.poll.interval.ms (5 minutes),
# and brokers close idle connections after 10 minutes.
QUIET_NS = 600 * _SECOND_NS
PASSED_MAX = 64  # rows to a later answered exchange that make a request complete without response
NO_POSITION = 1 << 62
TLS_HANDSHAKE_BYTES = 64 << 10  # in which both sides have said hello and shown certificates
_HEAD = 64  # bytes of a response that say that it reads the metadata log: that is its only topic
TAIL_MAX, TAIL_KEPT = 1 << 20, 64 << 10  # bytes in no frame; of these, searched again
# Protocols that the first bytes of a connection decide, whatever comes later.
_DECIDED_AT_ONCE = np.array([Protocol.HTTP, Protocol.HTTP2, Protocol.ZOOKEEPER])


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for packets that may still come.

    A gap is given up `gap_ns` after the packet behind it, or if `gap_bytes` lie behind it. If
    the peer acknowledged its bytes, the capture lost them: then `acked_ns` or `acked_bytes` are
    enough. closed_ns: after the last packet of a closed connection. begin_ns: for the first bytes
    of a connection whose SYN was not captured.
    """

    gap_ns: int = 3 * _SECOND_NS  # a lost segment comes again within a few round trips, or seldom
    gap_bytes: int = 4 << 20  # a window that large is hardly ever open
    acked_ns: int = 10_000_000  # packets may be captured a little after their acknowledgement
    acked_bytes: int = 64 << 10
    closed_ns: int = _SECOND_NS
    begin_ns: int = 0

    @staticmethod
    def until(late_ns: int, begin_ns: int) -> Patience:
        """Wait so long for a late capture, however many bytes follow a gap."""
        return Patience(late_ns, NO_POSITION, late_ns, NO_POSITION, late_ns, begin_ns)

    @property
    def is_for_late(self) -> bool:
        """Return whether it waits for late captures."""
        return self.gap_bytes == NO_POSITION


@dataclass(frozen=True, slots=True)
class Settled:
    """What no packet after a window can change.

    By stream: limit, the position up to which bytes are settled. has_gap: one that may still be
    filled. opened: the numbers of decrypted streams of Kafka connections that continue, with their
    plaintext.

    By connection: is_given_up: it is stuck, and was read before, has many bytes here, or has no gap
    that can be filled any more. begin_until: a late capture may bring its first bytes until then
    (ns); may_begin: that time is not over. until: when it changes without new packets (ns), or
    NEVER.
    """

    limit: Ints
    has_gap: Bools
    opened: list[tuple[int, OpenedStream]]
    is_given_up: Bools
    begin_until: Ints
    may_begin: Bools
    until: Ints


class Progress:
    """How far a window brings its connections.

    settled: what no later packet changes. is_done: bool[exchanges], the complete ones; of a
    connection, they come before all others, and so do their frames in both streams.

    By stream: pos, where the next window begins, after the last complete frame; in plaintext, if
    the stream is decrypted. carried: the same in the TCP stream, which may begin with a part of a
    TLS record before. is_boundary: a frame begins there. points: where decryption resumes.

    By connection: protocol after the window, as in OPEN. is_over: no more packets come that change
    its exchanges. is_gone: nothing is kept of it. has_secret: its open exchanges have a message
    that must not be carried. is_limited: a limit ends the search for Kafka. due: when it changes
    without new packets (ns), or NEVER.
    """

    def __init__(
        self,
        window: AssembledWindow,
        patience: Patience,
        now: int,
        is_forced: Bools,
        secret_apis: Set[int] = frozenset(),
        has_key_logs: bool = False,
    ) -> None:
        """now: time in ns up to which packets have come. is_forced: bool[connections], it ends
        here. secret_apis: keys of APIs whose messages must not be carried; with any, SASL tokens
        and records of the metadata log must not either. has_key_logs: secrets of TLS may come a
        little later than its records."""
        self.settled = settled = _settled(window, patience, now)
        quiet_ns = max(QUIET_NS, patience.closed_ns)
        until = window.last_time + np.where(window.is_closed, patience.closed_ns, quiet_ns)
        is_ending = window.is_closed | window.is_closing | ~window.had_data
        is_over = ~window.is_last | is_forced | (is_ending & (until <= now))
        unanswered = now - quiet_ns
        self.is_done, open_from, is_confirmed = _completed(window, settled, is_over, unanswered)
        self.has_secret = _has_secret(window, self.is_done, secret_apis)
        if self.has_secret.any():
            is_over |= self.has_secret
            self.is_done, open_from, is_confirmed = _completed(window, settled, is_over, unanswered)
        self.is_over = is_over
        self.protocol, self.is_limited = _protocols(
            window, settled, is_over, is_confirmed, has_key_logs
        )
        self.pos, self.is_boundary = _resumed(
            window, settled, self.is_done, open_from, self.protocol
        )
        self.carried, self.points = self.pos.copy(), dict[int, RecordPoint]()
        for number, stream in settled.opened:
            if stream.can_resume and self.protocol[number >> 1] == Protocol.KAFKA:
                self.carried[number], self.points[number] = stream.point(int(self.pos[number]))
        forgotten = window.last_time + max(TIME_WAIT_NS, patience.closed_ns)
        self.is_gone = is_forced | self.has_secret | (is_over & (forgotten <= now))
        due = np.minimum(np.where(until > now, until, NEVER), settled.until)
        self.due = np.where(is_over, forgotten, due)


def _settled(window: AssembledWindow, patience: Patience, now: int) -> Settled:
    """Find what may still come at the time `now`."""
    begin_until = window.before["may_begin_until"].copy()
    is_new = begin_until == NEVER
    first_time = window.assembly.connections["first_time_ns"]
    begin_until[is_new] = first_time[is_new] + patience.begin_ns
    has_syn = (window.sides["has_syn"] != 0).reshape(-1, 2).any(axis=1)
    is_looking = window.earlier_protocol == Protocol.NONE
    may_begin = (begin_until > now) & ~has_syn & is_looking
    until = np.where(may_begin, begin_until, NEVER)
    limit = window.ends.copy()
    is_searched = (window.sides["gap_count"] > 0) & np.repeat(window.is_kafka, 2)
    for stream in np.flatnonzero(is_searched).tolist():
        limit[stream], when = _first_gap(window, stream, patience, now)
        until[stream >> 1] = min(until[stream >> 1], when)
    has_gap = limit < window.ends
    was_kafka = window.earlier_protocol == Protocol.KAFKA
    # no packet can come with which the rest could be decrypted
    is_late = ~has_gap.reshape(-1, 2).any(axis=1)
    is_late |= was_kafka | (window.captured > LOOKED_AT_MAX)
    is_given_up = window.is_stuck & is_late
    opened = [
        (2 * row + side, stream)
        for row, streams in window.tls.opened.items()
        if window.is_kafka[row] and not is_given_up[row]
        for side, stream in enumerate(streams)
    ]
    for number, text in opened:
        limit[number] = text.settled(int(limit[number])) if has_gap[number] else text.end
    return Settled(limit, has_gap, opened, is_given_up, begin_until, may_begin, until)


def _completed(
    window: AssembledWindow, settled: Settled, is_over: Bools, unanswered: int
) -> tuple[Bools, Ints, Bools]:
    """(the complete exchanges; by stream, where the first frame of any other exchange begins, or
    NO_POSITION; the connections that are Kafka's beyond doubt, if they look like it).

    unanswered: no request that ended up to this time (ns) gets an answer any more."""
    exchanges, connection = window.assembly.exchanges, window.connection_of
    requests, responses = window.frames
    ends_here = (is_over | settled.is_given_up)[connection]
    is_settled = [
        ~frames.has | (frames.end <= settled.limit[frames.stream]) | ends_here
        for frames in window.frames
    ]
    is_silent = (exchanges["status"] == PairStatus.NO_RESPONSE_EXPECTED) & ~responses.has
    is_answered = requests.has & responses.has & is_settled[REQUEST] & is_settled[RESPONSE]
    done = ends_here | is_answered | (is_silent & is_settled[REQUEST])
    # without a request: the next frame confirms it, and no gap may still bring the request
    is_followed = responses.end + CONFIRMING_BYTES <= settled.limit[responses.stream]
    is_alone = ~requests.has & is_settled[RESPONSE]
    done |= is_alone & is_followed & ~settled.has_gap[requests.stream]
    # without a response: it is lost, long due, or too many later requests were answered
    waiting = requests.has & ~responses.has & ~is_silent & is_settled[REQUEST]
    last, index = np.full(len(window), -1), np.arange(len(connection))
    np.maximum.at(last, connection[is_answered], index[is_answered])
    done |= waiting & window.is_lost & (index < last[connection])
    done |= waiting & (exchanges["request"]["end_time_ns"] <= unanswered)
    # of a connection without captured responses, all requests count
    was_framed = window.before["earlier"]["streams"]["was_framed"].reshape(-1) != 0
    has_response = was_framed | (window.sides["has_data"] != 0)
    is_one_way = ~has_response[responses.stream]
    np.maximum.at(last, connection[is_one_way], index[is_one_way])
    done |= waiting & (index + PASSED_MAX <= last[connection])

    confirmed = (window.earlier_protocol != Protocol.NONE) | is_over
    confirmed[connection[is_answered]] = True
    confirmed |= np.bincount(connection[done], minlength=len(window)) >= CONFIRMED_BY
    confirmed &= (~window.is_stuck | settled.is_given_up) & ~settled.may_begin | is_over
    is_done, open_from = _before_open_ones(window, done & confirmed[connection])
    return is_done, open_from, confirmed


def _has_secret(window: AssembledWindow, is_done: Bools, secret_apis: Set[int]) -> Bools:
    """bool[connections]: in plaintext, with a message in an open exchange that is not carried: of
    these APIs, a SASL token, or records of the metadata log."""
    exchanges = window.assembly.exchanges
    is_secret = np.isin(exchanges["api_key"], list(secret_apis))
    is_secret |= (exchanges["is_sasl_token"] != 0) & bool(secret_apis)
    is_open = ~is_done & ~window.is_tls[window.connection_of] & bool(secret_apis)
    for row in np.flatnonzero(is_open & (exchanges["response"]["extent_count"] > 0)).tolist():
        is_secret[row] |= names_metadata_log(window.response_bytes(row)[:_HEAD])
    connection = window.connection_of[is_secret & ~is_done]
    has_secret = np.zeros(len(window), np.bool_)
    has_secret[connection] = ~window.is_tls[connection]
    return has_secret


def _protocols(
    window: AssembledWindow,
    settled: Settled,
    is_over: Bools,
    is_confirmed: Bools,
    has_key_logs: bool,
) -> tuple[Ints, Bools]:
    """By connection: (its protocol after the window, whether a limit ends the search)."""
    before = window.earlier_protocol
    is_decided = np.isin(window.assembly.connections["protocol"], _DECIDED_AT_ONCE)
    most = np.where(window.is_unread_tls, TLS_HANDSHAKE_BYTES * has_key_logs, LOOKED_AT_MAX)
    ends = is_decided | (window.captured > most) | (before == Protocol.OTHER)
    protocol: Ints = np.where(ends, Protocol.OTHER, Protocol.NONE)
    is_kafka = np.where(is_confirmed, Protocol.KAFKA, Protocol.NONE)
    protocol[window.is_kafka] = is_kafka[window.is_kafka]
    protocol[settled.is_given_up | is_over] = Protocol.OTHER
    is_limited = (protocol == Protocol.OTHER) & (before != Protocol.OTHER) & ~is_over
    is_limited &= ~is_decided & ~(window.is_unread_tls & (before != Protocol.KAFKA))
    return protocol, is_limited


def _resumed(
    window: AssembledWindow, settled: Settled, is_done: Bools, open_from: Ints, protocol: Ints
) -> tuple[Ints, Bools]:
    """By stream: (where it resumes, after its complete frames; whether a frame begins there)."""
    pos = np.zeros(2 * len(window), np.int64)
    for frames in window.frames:
        rows = frames.has & is_done
        np.maximum.at(pos, frames.stream[rows], frames.end[rows])
    was_boundary = window.before["earlier"]["streams"]["is_boundary"].reshape(-1) != 0
    begins = np.repeat(is_resumed(window.before), 2)
    begins_there = np.where(begins, was_boundary, window.sides["has_syn"] != 0)
    is_boundary = begins_there | (pos > 0)
    # a search that finds nothing does not go over all of it again
    is_lost = (open_from == NO_POSITION) & (settled.limit - pos > TAIL_MAX)
    is_lost &= np.repeat(protocol == Protocol.KAFKA, 2)
    pos[is_lost] = settled.limit[is_lost] - TAIL_KEPT
    is_boundary[is_lost] = False
    # of other connections no byte is read any more
    is_unread = np.repeat(protocol == Protocol.OTHER, 2)
    pos[is_unread] = window.ends[is_unread]
    return pos, is_boundary


def _first_gap(
    window: AssembledWindow, stream: int, patience: Patience, now: int
) -> tuple[int, int]:
    """(position of a stream's first gap that may still be filled, when it is given up); without
    one, the end of the stream and NEVER."""
    side, segments = window.sides[stream], window.streams.segments
    pieces = window.streams.pieces[side["piece_start"] : side["piece_stop"]]
    begin, end, owner = pieces["pos"], pieces["end"], pieces["segment"]
    before = np.append(0, end)[:-1]
    is_gap = begin > before
    # bytes that a snap length cut do not come
    cut = (segments["length"][owner] - segments["captured"][owner]).astype(np.int64)
    is_gap[1:] &= begin[1:] > end[:-1] + cut[:-1]
    acked = side["ack_high"] - side["origin"] if side["ack_high"] != NO_ACK else -1
    is_lost = acked >= begin
    given_up_at = segments["time_ns"][owner] + np.where(is_lost, patience.acked_ns, patience.gap_ns)
    most_bytes = np.where(is_lost, patience.acked_bytes, patience.gap_bytes)
    is_given_up = (given_up_at <= now) | (end[-1:] - begin >= most_bytes)
    gaps = np.flatnonzero(is_gap & ~is_given_up)
    if not len(gaps):
        return int(window.ends[stream]), NEVER
    return int(before[gaps[0]]), int(given_up_at[gaps[0]])


def _before_open_ones(window: AssembledWindow, done: Bools) -> tuple[Bools, Ints]:
    """(the exchanges `done` before the first other one, without those whose frame comes after one
    of an open exchange; int64[streams], where the first frame of any other exchange begins, or
    NO_POSITION)."""
    index = np.arange(len(done))
    first = np.full(len(window), len(done))
    np.minimum.at(first, window.connection_of[~done], index[~done])
    while True:
        is_done: Bools = index < first[window.connection_of]
        open_from = np.full(2 * len(window), NO_POSITION)
        clash = np.zeros(len(done), np.bool_)
        for frames in window.frames:
            rows = frames.has & ~is_done
            np.minimum.at(open_from, frames.stream[rows], frames.pos[rows])
        for frames in window.frames:
            clash |= is_done & frames.has & (frames.pos > open_from[frames.stream])
        if not clash.any():
            return is_done, open_from
        np.minimum.at(first, window.connection_of[clash], index[clash])
