"""A window: carried and new segments assembled together, and which exchanges are then complete.

Ids and counts are those of whole connections. See `carry` for the terms. A byte of a stream is
*settled* if no later packet can change what lies up to it: all bytes up to the first hole that a
retransmission, or a late capture, may still fill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import SYN, SegmentBatch
from kdissect.kafka.assemble import assemble_streams
from kdissect.kafka.assembly import DIRECTION, Assembly, PairStatus, Protocol
from kdissect.kafka.options import StreamOptions
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.resume.open_connection import (
    NEVER,
    NO_NUMBER,
    Ints,
    OpenConnection,
    Phase,
    Rows,
    earlier_state,
    is_resumed,
    new_rows,
    rows_of,
)
from kdissect.tcp.columns import NO_ACK, CloseReason
from kdissect.tcp.connection_ids import connection_ids, exchange_ids
from kdissect.tcp.reassembly import Streams
from kdissect.tls.plaintext import OpenedStream, TlsConnections

Bools = npt.NDArray[np.bool_]

LOOKED_AT_MAX = 256 << 10  # bytes of a connection in which nothing was recognised
_SECOND_NS = 1_000_000_000
CONFIRMING_BYTES = 8  # bytes that must follow a response whose request was not seen
CONFIRMED_BY = 3  # exchanges without an answer that make a connection Kafka's
PASSED_MAX = 64  # later requests with an answer, after which a request is complete without one
ONE_WAY_MAX = 64  # requests that wait for an answer, if no response was captured
NO_POSITION = 1 << 62


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of one direction, by exchange.

    stream: its number. has: whether the exchange has a frame there. pos, end: of the frame with its
    size prefix, from the first byte of the stream here on; in plaintext if it is decrypted.
    """

    stream: Ints
    has: Bools
    pos: Ints
    end: Ints


@dataclass(frozen=True, slots=True)
class Continued:
    """Connections of a window; stream 2 * connection + side is a row of `sides`.

    assembly: its ids, counts and positions are those of whole connections.
    By connection: before (OPEN, its state before the window), pair (of endpoints), is_last (of this
    pair), client (side), is_kafka, is_tls, is_unread_tls (it is not decrypted), last_time (ns),
    is_closed (both ways). is_stuck: it is Kafka over TLS whose rest cannot be decrypted, for want
    of secrets or after damage. is_given_up: besides, it was read before, or much of it is here.
    By stream: sides (SIDE); ends, position after the last byte; seq_of_start, sequence
    number of position 0 here, or NO_NUMBER.
    By segment: stream. By exchange: of (connection), lost (its response is known to be lost), and
    the `frames` of requests and of responses.
    """

    assembly: Assembly
    streams: Streams
    tls: TlsConnections
    before: Rows
    pair: Ints
    is_last: Bools
    client: Ints
    is_kafka: Bools
    is_tls: Bools
    is_unread_tls: Bools
    is_stuck: Bools
    is_given_up: Bools
    last_time: Ints
    is_closed: Bools
    sides: Rows
    ends: Ints
    seq_of_start: Ints
    stream: Ints
    of: Ints
    lost: Bools
    frames: tuple[Frames, Frames]

    def __len__(self) -> int:
        """The number of connections."""
        return len(self.pair)

    @property
    def first_time(self) -> Ints:
        """int64[connections]: time of the first packet of the whole connection, in ns."""
        times: Ints = self.assembly.connections["first_time_ns"]
        return times

    def streams_of(self, direction: int) -> Ints:
        """int64[connections]: the stream with the requests, or with the responses."""
        return 2 * np.arange(len(self)) + (self.client ^ direction)

    def opened_streams(self) -> Iterator[tuple[int, OpenedStream]]:
        """The decrypted streams of Kafka connections that continue."""
        for row, opened in self.tls.opened.items():
            if self.is_kafka[row] and not self.is_given_up[row]:
                yield from ((2 * row + side, opened[side]) for side in (0, 1))


def continued(
    connections: Sequence[OpenConnection],
    batch: SegmentBatch,
    sources: Sources,
    options: StreamOptions,
    key_logs: Sequence[Any],
) -> Continued:
    """Assemble the segments of a batch; connection n continues its pair of endpoints n."""
    assembly, streams, lost, tls = assemble_streams(
        batch, sources, options, key_logs, earlier_state(connections)
    )
    table, sides = streams.connections, streams.sides
    pair, is_first = table["pair"], table["incarnation"] == 0
    before = rows_of(connections)[pair]
    incarnation = before["incarnation"] + table["incarnation"]
    before[~is_first] = new_rows(before["endpoints"][~is_first])
    before["incarnation"] = incarnation
    client = assembly.connections["client_side"].astype(np.int64)
    is_kafka = assembly.connections["protocol"] == Protocol.KAFKA
    is_tls = assembly.connections["is_tls"] != 0
    was_kafka = before["phase"] == Phase.KAFKA
    is_stuck = is_tls & (is_kafka | was_kafka)
    for row, opened in tls.opened.items():
        is_stuck[row] &= not all(stream.can_resume for stream in opened)
    is_unread_tls = is_tls.copy()
    is_unread_tls[list(tls.opened)] = False
    captured = sides["byte_count"].reshape(-1, 2).sum(axis=1)
    has_fin = (sides["fin"] != NO_ACK).reshape(-1, 2).all(axis=1)
    stream = 2 * streams.connection.astype(np.int64) + streams.segments["side"]
    of = assembly.exchanges["connection"].astype(np.int64)
    restated = _connections(assembly, before, table)
    frames = (
        _frames(assembly.exchanges, REQUEST, of, client, tls),
        _frames(assembly.exchanges, RESPONSE, of, client, tls),
    )
    exchanges = _exchanges(assembly.exchanges, frames, before, restated["connection_id"])
    anomalies = _anomalies(assembly, exchanges["exchange_id"], before, client)
    return Continued(
        replace(assembly, connections=restated, exchanges=exchanges, anomalies=anomalies),
        streams,
        tls,
        before,
        pair,
        is_last=np.append(pair[1:] != pair[:-1], True)[: len(pair)],
        client=client,
        is_kafka=is_kafka,
        is_tls=is_tls,
        is_unread_tls=is_unread_tls,
        is_stuck=is_stuck,
        is_given_up=is_stuck & (was_kafka | (captured > LOOKED_AT_MAX)),
        last_time=restated["last_time_ns"],
        is_closed=has_fin | (table["close_reason"] == CloseReason.RST),
        sides=sides,
        ends=np.where(sides["has_data"] != 0, sides["high"] - sides["origin"], 0),
        seq_of_start=_seq_of_start(streams, sides, stream),
        stream=stream,
        of=of,
        lost=lost,
        frames=frames,
    )


def _connections(assembly: Assembly, before: Rows, table: Rows) -> npt.NDArray[np.void]:
    """CONNECTION rows with the times and counts of earlier windows."""
    connections, earlier = assembly.connections.copy(), before["connection"]
    for name in DIRECTION.names or ():
        connections["direction"][name] += earlier["direction"][name]
    first_time = np.minimum(table["first_time"], earlier["first_time_ns"])
    connections["first_time_ns"] = first_time
    connections["last_time_ns"] = np.maximum(table["last_time"], earlier["last_time_ns"])
    resumed = is_resumed(before)
    for name in ("handshake_seen", "is_tls", "protocol"):
        connections[name] = np.where(resumed, earlier[name], connections[name])
    # a handshake's last ACK is not carried, and the SYNs of a resumed connection are made
    has_rtt = resumed | (earlier["handshake_rtt_ns"] >= 0)
    rtt = connections["handshake_rtt_ns"]
    connections["handshake_rtt_ns"] = np.where(has_rtt, earlier["handshake_rtt_ns"], rtt)
    connections["connection_id"] = connection_ids(
        assembly.endpoints, table["pair"], first_time, before["incarnation"]
    )
    return connections


def _frames(
    exchanges: npt.NDArray[np.void], way: int, of: Ints, client: Ints, tls: TlsConnections
) -> Frames:
    column = exchanges[SIDES[way]]
    has, pos = column["size"] >= 0, column["pos"].copy()
    for row, opened in tls.opened.items():
        low, high = np.searchsorted(of, [row, row + 1]).tolist()
        rows = low + np.flatnonzero(has[low:high])
        if len(rows):  # sizes count plaintext, so positions must do as well
            records = opened[int(client[row]) ^ way].table
            record = records[np.searchsorted(records["tcp_pos"], pos[rows], "right") - 1]
            pos[rows] += record["pos"] - record["tcp_pos"]
    return Frames(2 * of + (client[of] ^ way), has, pos, pos + 4 + column["size"])


def _exchanges(
    exchanges: npt.NDArray[np.void], frames: tuple[Frames, Frames], before: Rows, ids: Ints
) -> npt.NDArray[np.void]:
    """EXCHANGE rows with positions in whole streams, and ids made from them."""
    exchanges, base = exchanges.copy(), before["base"].reshape(-1)
    for name, frame in zip(SIDES, frames, strict=True):
        pos = exchanges[name]["pos"] + base[frame.stream]
        exchanges[name]["pos"] = np.where(frame.has, pos, -1)
    asked = frames[REQUEST].has
    exchanges["exchange_id"] = exchange_ids(
        ids[exchanges["connection"]],
        np.where(asked, REQUEST, RESPONSE),
        np.where(asked, exchanges["request"]["pos"], exchanges["response"]["pos"]),
    )
    return exchanges


def _anomalies(
    assembly: Assembly, exchange_ids: Ints, before: Rows, client: Ints
) -> npt.NDArray[np.void]:
    """ANOMALY rows with the new ids of exchanges, and positions in whole streams."""
    anomalies = assembly.anomalies.copy()
    rows, exchange = exchanges_of(anomalies, assembly.exchanges["exchange_id"])
    anomalies["exchange_id"][rows] = exchange_ids[exchange]
    stream, has_place = places_of(anomalies, client)
    anomalies["pos"] += np.where(has_place, before["base"].reshape(-1)[stream], 0)
    return anomalies


def exchanges_of(anomalies: npt.NDArray[np.void], ids: Ints) -> tuple[Ints, Ints]:
    """(rows of the anomalies of an exchange, rows of these exchanges in `ids`)."""
    rows = np.flatnonzero(anomalies["exchange_id"] != 0)
    order = np.argsort(ids)
    return rows, order[np.searchsorted(ids[order], anomalies["exchange_id"][rows])]


def places_of(anomalies: npt.NDArray[np.void], client: Ints) -> tuple[Ints, Bools]:
    """(stream of each anomaly; whether it has a position in it)."""
    of, direction = anomalies["connection"].astype(np.int64), anomalies["direction"]
    has_place = (direction <= RESPONSE) & (anomalies["pos"] >= 0)
    return 2 * of + (client[of] ^ (direction.astype(np.int64) & 1)), has_place


def _seq_of_start(streams: Streams, sides: Rows, stream: Ints) -> Ints:
    segments, pieces = streams.segments, streams.pieces
    numbers = np.full(len(sides), NO_NUMBER, np.int64)
    some = np.flatnonzero(sides["piece_stop"] > sides["piece_start"])
    piece = sides["piece_start"][some]
    row = pieces["segment"][piece]
    inside = pieces["file_pos"][piece] - segments["pos"][row] - pieces["pos"][piece]
    is_syn = (segments["flags"][row] & SYN) != 0
    numbers[some] = (segments["seq"][row].astype(np.int64) + is_syn + inside) & 0xFFFFFFFF
    rows = np.flatnonzero(segments["flags"] & SYN)[::-1]  # the first one stays
    before = sides["header_size"][stream[rows]]
    numbers[stream[rows]] = (segments["seq"][rows].astype(np.int64) + 1 + before) & 0xFFFFFFFF
    return numbers


# -- complete exchanges ---------------------------------------------------------------------


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
