"""Decides which exchanges are complete, and which bytes to carry into the next window.

See `carry` for the terms and the theory of operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.arrays import gather_ranges, is_any_of
from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import ACK, COUNTED_BEFORE, FIN, RST, SEGMENT, SYN
from kdissect.kafka.assembly import (
    DIRECTION,
    EXTENT,
    Anomaly,
    Assembly,
    CloseReason,
    PairStatus,
    Protocol,
)
from kdissect.kafka.exchanges import NO_RESPONSE
from kdissect.kafka.frame_search import RESERVED, RESERVED_COUNT
from kdissect.kafka.framing import HAS_ASKED, IN_TOKENS, RESUMED, YOUNG
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.resume.connection_state import (
    CONFIRMED_BY,
    CONFIRMING_BYTES,
    DEFERRED_MIN,
    HOLE_ACKED_BYTES,
    HOLE_ACKED_NS,
    HOLE_BYTES,
    HOLE_NS,
    KAFKA,
    LINGER_NS,
    LOOKED_AT_MAX,
    LOOKING,
    NO_IDS,
    NO_NUMBER,
    NOTHING,
    OTHER,
    OVER,
    PHASES,
    REST,
    TAIL_KEPT,
    TLS_HANDSHAKE_BYTES,
    WHOLE,
    CarryLimits,
    ConnectionState,
    Ints,
    Phase,
    no_counts,
)
from kdissect.tcp.columns import (
    ACK_HIGH,
    BYTE_COUNT,
    CLOSE_REASON,
    CONNECTION_WIDTH,
    DUPLICATE,
    END,
    FIN_AT,
    FIRST_TIME,
    GAP_COUNT,
    HAS_DATA,
    HAS_SYN,
    HEADER_SIZE,
    HIGH,
    INCARNATION,
    LAST_TIME,
    NO_ACK,
    ORIGIN,
    PAIR,
    PIECE_START,
    PIECE_STOP,
    SIDE_WIDTH,
)
from kdissect.tcp.connection_ids import connection_ids, exchange_ids
from kdissect.tcp.reassembly import Streams
from kdissect.tls.plaintext_ranges import OpenedStream, TlsConnections
from kdissect.tls.session import TlsState

Bools = npt.NDArray[np.bool_]
RESERVED_IDS = np.arange(RESERVED, RESERVED + RESERVED_COUNT)
# Protocols that the first bytes of a connection decide, whatever comes later.
_DECIDED_AT_ONCE = np.array([Protocol.HTTP, Protocol.HTTP2, Protocol.ZOOKEEPER])
_MODES = {LOOKING: WHOLE, KAFKA: REST, OTHER: REST, OVER: NOTHING}


class CompletionTracker:
    """Decides which exchanges of a batch are complete, and which segments are carried on.

    lost: bool by exchange, see `assemble_streams`. is_forced: bool by state, the connection ends
    here. secret_apis: keys of APIs whose messages must not be carried; with any, SASL tokens must
    not either. `rows` are the complete exchanges that were not emitted before. `unread` counts the
    connections that turned out not to be Kafka's, by Protocol. `limited_count` counts connections
    that a limit kept from being followed as they are, `late_count` packets with bytes that came
    after the exchanges around them were emitted.
    """

    def __init__(
        self,
        assembly: Assembly,
        streams: Streams,
        lost: Bools,
        tls: TlsConnections,
        states: list[ConnectionState],
        is_forced: Any,
        has_key_logs: bool,
        limits: CarryLimits,
        now_ns: int,
        secret_apis: Set[int] = frozenset(),
    ) -> None:
        self.assembly, self.streams, self.states = assembly, streams, states
        self.lost, self.tls, self.limits, self.secret_apis = lost, tls, limits, secret_apis
        self.has_key_logs = has_key_logs
        self.connections = streams.connections.reshape(-1, CONNECTION_WIDTH)
        self.sides = streams.sides.reshape(-1, SIDE_WIDTH)
        self.count = len(self.connections)
        self.pair = self.connections[:, PAIR]
        self.is_first = self.connections[:, INCARNATION] == 0
        self.is_last = np.append(self.pair[1:] != self.pair[:-1], True)[: self.count]
        self.client = assembly.connections["client_side"].astype(np.int64)
        self.is_kafka = assembly.connections["protocol"] == Protocol.KAFKA
        self.is_tls = assembly.connections["is_tls"] != 0
        self.is_opened = np.zeros(self.count, np.bool_)  # TLS that is decrypted
        self.is_opened[list(tls.opened)] = True
        phase = np.array([state.phase for state in states], np.int64)
        self.phase = np.where(self.is_first, phase[self.pair], LOOKING)  # before this window
        last_time = np.array([state.last_time for state in states], np.int64)[self.pair]
        self.last_time = self.connections[:, LAST_TIME].copy()
        self.last_time[self.is_first] = np.maximum(self.last_time, last_time)[self.is_first]
        has_fin = (self.sides[:, FIN_AT] != NO_ACK).reshape(-1, 2).all(axis=1)
        self.is_closed = has_fin | (self.connections[:, CLOSE_REASON] == CloseReason.RST)
        self.is_over = ~self.is_last | is_forced[self.pair]
        self.is_over |= self.is_closed & (self.last_time < now_ns - LINGER_NS)
        # Kafka over TLS whose rest cannot be decrypted: for want of its secrets, or after damage
        self.is_stuck = self.is_tls & (self.is_kafka | (self.phase == KAFKA))
        for row, opened in tls.opened.items():
            self.is_stuck[row] &= not all(stream.can_resume for stream in opened)
        self.captured = self.sides[:, BYTE_COUNT].reshape(-1, 2).sum(axis=1)
        was_read = (self.phase == KAFKA) | (self.captured > LOOKED_AT_MAX)
        self.is_given_up = self.is_stuck & was_read
        # by stream, 2 * connection + side
        rows = np.arange(self.count)
        self.stream_of = [2 * rows + self.client, 2 * rows + 1 - self.client]
        base = np.array([state.base for state in states], np.int64)
        self.base = np.where(self.is_first[:, None], base[self.pair], 0).reshape(-1)
        bits = np.array([state.bits for state in states], np.int64)
        self.bits = np.where(self.is_first[:, None], bits[self.pair], 0).reshape(-1)
        self.last_packet = np.full((2 * self.count, 2), -1)
        self.rows = np.zeros(0, np.int64)
        self.unread = np.zeros(len(Protocol), np.int64)
        self.limited_count = self.late_count = 0

    # -- as of the whole connections --------------------------------------------------------

    def restate(self) -> None:
        """Ids, positions and counts as of the whole connections."""
        self.seq_of_start = self._numbers()
        exchanges, connections = self.assembly.exchanges, self.assembly.connections
        first = self.connections[:, FIRST_TIME]
        earlier = np.array([state.first_time for state in self.states], np.int64)[self.pair]
        self.first_time = np.where(self.is_first, np.minimum(first, earlier), first)
        before = np.array([state.incarnation for state in self.states], np.int64)[self.pair]
        self.incarnation = self.connections[:, INCARNATION] + before
        connections["connection_id"] = connection_ids(
            self.assembly.endpoints, self.pair, self.first_time, self.incarnation
        )
        of = self.of = exchanges["connection"].astype(np.int64)
        self.number = [self.stream_of[way][of] for way in (REQUEST, RESPONSE)]
        self.has, self.pos, self.end = [], [], []
        for way, name in enumerate(SIDES):
            column = exchanges[name]
            self.has.append(column["size"] >= 0)
            self.pos.append(column["pos"].copy())
            self._count_plaintext(way)
            self.end.append(self.pos[way] + 4 + column["size"])
            moved = column["pos"] + self.base[self.number[way]]
            column["pos"] = np.where(self.has[way], moved, -1)
        asked = self.has[REQUEST]
        position = np.where(asked, exchanges["request"]["pos"], exchanges["response"]["pos"])
        ids = exchange_ids(
            connections["connection_id"][of], np.where(asked, REQUEST, RESPONSE), position
        )
        old_ids = exchanges["exchange_id"].copy()
        exchanges["exchange_id"] = ids
        emitted = [state.emitted_ids for state in self.states if len(state.emitted_ids)]
        self.emitted = np.concatenate([NO_IDS, *emitted])
        self._restate_connections()
        self._restate_anomalies(old_ids)

    def _count_plaintext(self, way: int) -> None:
        """Positions of decrypted frames as of the plaintext, in which their sizes count."""
        for row, sides in self.tls.opened.items():
            low, high = np.searchsorted(self.of, [row, row + 1]).tolist()
            frames = low + np.flatnonzero(self.has[way][low:high])
            if len(frames):
                table = sides[int(self.client[row]) ^ way].table
                pos = self.pos[way][frames]
                record = table[np.searchsorted(table["tcp_pos"], pos, "right") - 1]
                self.pos[way][frames] = pos - record["tcp_pos"] + record["pos"]

    def _restate_connections(self) -> None:
        connections = self.assembly.connections
        before = np.concatenate([no_counts()[:0], *(state.before for state in self.states)])
        before = before[self.pair]
        for name in DIRECTION.names or ():
            earlier = np.where(self.is_first[:, None], before["direction"][name], 0)
            connections["direction"][name] += earlier
        connections["first_time_ns"] = self.first_time
        connections["last_time_ns"] = self.last_time
        is_resumed = (self.phase == KAFKA) | (self.phase == OTHER)
        for name in ("handshake_seen", "is_tls", "protocol"):
            connections[name] = np.where(is_resumed, before[name], connections[name])
        # a handshake's last ACK is not carried, and the SYNs of a continued connection are made
        has_rtt = is_resumed | (self.is_first & (before["handshake_rtt_ns"] >= 0))
        rtt = connections["handshake_rtt_ns"]
        connections["handshake_rtt_ns"] = np.where(has_rtt, before["handshake_rtt_ns"], rtt)
        self._count_late(before["direction"]["missing_byte_count"])

    def _count_late(self, missing: Ints) -> None:
        """Count packets with bytes before those that the streams begin with here, if such bytes
        were missing."""
        segments, stream = self.streams.segments, self.stream
        start = self.seq_of_start[stream]
        number = segments["seq"].astype(np.int64) + ((segments["flags"] & SYN) != 0)
        pos = ((number - start + 0x80000000) & 0xFFFFFFFF) - 0x80000000
        connection = stream >> 1
        is_late = (segments["ip_id"] & COUNTED_BEFORE == 0) & (self.streams.mark == 0)
        is_late &= ((self.phase == KAFKA) | (self.phase == OTHER))[connection]
        is_late &= (segments["length"] > 0) & (start != NO_NUMBER) & (pos < 0)
        rows = np.flatnonzero(is_late)
        way = self.client[connection[rows]] ^ segments["side"][rows]
        may_fill = missing[connection[rows], way] > 0
        self.late_count = int((may_fill | (pos[rows] < -self.base[stream[rows]])).sum())

    def _restate_anomalies(self, old_ids: Ints) -> None:
        anomalies, exchanges = self.assembly.anomalies, self.assembly.exchanges
        self._find_last_packets()
        there = np.flatnonzero(anomalies["exchange_id"] != 0)
        order = np.argsort(old_ids)
        found = order[np.searchsorted(old_ids[order], anomalies["exchange_id"][there])]
        anomalies["exchange_id"][there] = exchanges["exchange_id"][found]
        of = anomalies["connection"].astype(np.int64)
        way = anomalies["direction"].astype(np.int64) & 1
        stream = 2 * of + (self.client[of] ^ way)
        has_place = (anomalies["direction"] <= RESPONSE) & (anomalies["pos"] >= 0)
        anomalies["pos"] += np.where(has_place, self.base[stream], 0)
        # a hole after the last byte, which came before this window
        after = np.flatnonzero((anomalies["kind"] == Anomaly.GAP) & (anomalies["packet"] < 0))
        anomalies["source"][after], anomalies["packet"][after] = self.last_packet[stream[after]].T
        self.exchange_of_anomaly = np.full(len(anomalies), -1)
        self.exchange_of_anomaly[there] = found

    def _find_last_packets(self) -> None:
        """By stream: last_packet int64[2], source and packet of its last byte; last_end, where it
        ends in this window, of decrypted ones as of the plaintext."""
        pieces, segments = self.streams.pieces, self.streams.segments
        before = np.array([state.last_packets for state in self.states], np.int64)
        self.last_packet = np.where(self.is_first[:, None, None], before[self.pair], -1)
        self.last_packet = self.last_packet.reshape(-1, 2)
        self.last_end = np.zeros(2 * self.count, np.int64)
        some = np.flatnonzero(self.sides[:, PIECE_STOP] > self.sides[:, PIECE_START])
        last = self.sides[some, PIECE_STOP] - 1
        self.last_end[some] = pieces["end"][last]
        for connection, opened in self.tls.opened.items():
            self.last_end[2 * connection : 2 * connection + 2] = [one.end for one in opened]
        row = pieces["segment"][last]
        self.last_packet[some] = np.stack([segments["source"][row], segments["packet"][row]], 1)

    # -- complete exchanges -----------------------------------------------------------------

    def run(self) -> None:
        """`restate`, then find `rows`, and the positions where the streams resume."""
        self.restate()
        self._decide()
        self.must_end = self._must_end()
        if self.must_end.any():
            self.is_over |= self.must_end
            self._decide()

    def _decide(self) -> None:
        exchanges, of = self.assembly.exchanges, self.of
        limit = self._limits()
        has, end, number = self.has, self.end, self.number
        has_request, has_response = has
        over = (self.is_over | self.is_given_up)[of]
        settled = []
        for way in (REQUEST, RESPONSE):
            settled.append(~has[way] | (end[way] <= limit[number[way]]) | over)

        is_silent = (exchanges["status"] == PairStatus.NO_RESPONSE_EXPECTED) & ~has_response
        done = has_request & has_response & settled[0] & settled[1]
        is_answered = done.copy()
        done |= is_silent & settled[0]
        is_followed = end[1] + CONFIRMING_BYTES <= limit[number[1]]
        # a request in a hole that may still be filled could be the one
        has_all = ~np.isin(number[0], self.open_holes)
        done |= ~has_request & settled[1] & is_followed & has_all
        waiting = has_request & ~has_response & ~is_silent
        done |= waiting & settled[0] & self._passed(is_answered, waiting)
        done |= over

        before = is_any_of(exchanges["exchange_id"], np.abs(self.emitted))
        confirmed = (self.phase != LOOKING) | self.is_over
        confirmed[of[is_answered]] = True
        confirmed |= np.bincount(of[done], minlength=self.count) >= CONFIRMED_BY
        confirmed &= ~self.is_stuck | self.is_given_up | self.is_over
        self.confirmed = confirmed
        done &= confirmed[of]
        self.rows = np.flatnonzero(done & ~before)
        self.is_done = done | before
        response = self.sides[self.stream_of[1]]
        had_loss = np.array([state.has_loss for state in self.states], np.bool_)[self.pair]
        had_loss &= self.is_first
        self.has_loss = had_loss | (response[:, END] > response[:, BYTE_COUNT])
        gone = self.is_done & has_request & ~is_silent
        self._resume_positions(self.is_done, gone, limit)

    def _must_end(self) -> Bools:
        """bool[connections]: its carried bytes would be too many, or have a message with
        secrets."""
        size = np.maximum(self.ends - self.carried_from, 0).reshape(-1, 2).sum(axis=1)
        size[~self.is_last | self.is_over] = 0
        found = size > self.limits.connection_bytes_max
        found |= (size > 0) & (size.sum() > self.limits.carried_max)
        exchanges = self.assembly.exchanges
        is_secret = np.isin(exchanges["api_key"], list(self.secret_apis))
        is_secret |= (exchanges["is_sasl_token"] != 0) & bool(self.secret_apis)
        is_secret &= ~self.is_tls[self.of]
        is_carried = ~self.confirmed[self.of]
        for way in (REQUEST, RESPONSE):
            is_carried |= self.has[way] & (self.pos[way] >= self.resume[self.number[way]])
        found[self.of[is_secret & is_carried]] = True
        return found & self.is_last & ~self.is_over

    def _final_anomalies(self, phases: Ints) -> npt.NDArray[np.void]:
        """The anomalies that come with this window: those of an exchange come with it, others when
        the bytes of their place are carried no more."""
        anomalies = self.assembly.anomalies
        of = anomalies["connection"].astype(np.int64)
        way = anomalies["direction"].astype(np.int64) & 1
        stream = 2 * of + (self.client[of] ^ way)
        has_place = (anomalies["direction"] <= RESPONSE) & (anomalies["pos"] >= 0)
        is_final = phases[of] != LOOKING
        left = self.carried_from[stream] + self.base[stream] - anomalies["pos"]
        is_open = has_place & (phases[of] != OVER)
        is_final &= ~is_open | (left > 0)
        is_run = is_open & np.isin(anomalies["kind"], (Anomaly.GAP, Anomaly.UNFRAMED_BYTES))
        is_new = np.zeros(len(self.of) + 1, np.bool_)
        is_new[self.rows] = True
        with_exchange = self.exchange_of_anomaly >= 0
        is_final = np.where(with_exchange, is_new[self.exchange_of_anomaly], is_final)
        size = anomalies["byte_count"]
        anomalies["byte_count"] = np.where(is_run & is_final, np.minimum(size, left), size)
        return anomalies[is_final]

    def _limits(self) -> Ints:
        """By stream: up to which position its bytes are settled; of decrypted ones, plaintext."""
        sides = self.sides
        self.ends = np.where(sides[:, HAS_DATA] != 0, sides[:, HIGH] - sides[:, ORIGIN], 0)
        limit = self.ends.copy()
        is_open = np.repeat(self.is_kafka & ~self.is_over, 2)
        for stream in np.flatnonzero((sides[:, GAP_COUNT] > 0) & is_open).tolist():
            limit[stream] = self._settled_end(stream)
        self.open_holes = np.flatnonzero(limit < self.ends)
        self.frame_ends = self.ends.copy()
        for stream, opened in self._opened_streams():
            is_settled = limit[stream] == self.ends[stream]
            self.frame_ends[stream] = opened.end
            limit[stream] = opened.end if is_settled else opened.settled(int(limit[stream]))
        return limit

    def _opened_streams(self) -> Iterator[tuple[int, OpenedStream]]:
        """The decrypted streams of Kafka connections that continue."""
        for row, opened in self.tls.opened.items():
            if self.is_kafka[row] and not self.is_given_up[row]:
                yield from ((2 * row + side, opened[side]) for side in (0, 1))

    def _settled_end(self, stream: int) -> int:
        """The position of a stream's first hole that may still be filled, or its end."""
        side = self.sides[stream]
        pieces, segments = self.streams.pieces, self.streams.segments
        rows = slice(int(side[PIECE_START]), int(side[PIECE_STOP]))
        begin = pieces["pos"][rows]
        if not len(begin):
            return 0
        end = pieces["end"][rows]
        owner = pieces["segment"][rows]
        before = np.concatenate([[0], end[:-1]])
        is_hole = begin > before
        # bytes that a snap length cut do not come
        cut = (segments["length"][owner] - segments["captured"][owner]).astype(np.int64)
        is_hole[1:] &= begin[1:] > end[:-1] + cut[:-1]
        last_time = self.connections[stream >> 1, LAST_TIME]
        acked = side[ACK_HIGH] - side[ORIGIN] if side[ACK_HIGH] != NO_ACK else -1
        for at in np.flatnonzero(is_hole).tolist():
            waited = int(last_time - segments["time_ns"][owner[at]])
            behind = int(end[-1] - begin[at])
            is_lost = acked >= begin[at] and (waited >= HOLE_ACKED_NS or behind >= HOLE_ACKED_BYTES)
            if not (is_lost or waited >= HOLE_NS or behind >= HOLE_BYTES):
                return int(before[at])
        return int(self.ends[stream])

    def _passed(self, is_answered: Any, waiting: Any) -> Bools:
        """Requests whose response is not expected any longer."""
        of, limits = self.of, self.limits
        index = np.arange(len(of))
        last = np.full(self.count, -1, np.int64)
        np.maximum.at(last, of[is_answered], index[is_answered])
        is_lost = self.lost & (index < last[of])
        passed: Bools = index + limits.passed_max <= last[of]
        is_one_way = (self.sides[self.stream_of[1], HAS_DATA] == 0) & (
            self.bits[self.stream_of[1]] & RESUMED == 0
        )
        most = np.where(is_one_way, limits.outstanding_one_way_max, limits.outstanding_max)
        open_count = np.bincount(of[waiting], minlength=self.count)
        for connection in np.flatnonzero(open_count > most).tolist():
            rows = np.flatnonzero(waiting & (of == connection))
            passed[rows[: len(rows) - int(most[connection]) // 2]] = True
        self.is_limited = np.zeros(self.count, np.bool_)
        self.is_limited[of[passed & waiting & ~is_lost & ~self.is_over[of]]] = True
        return passed | is_lost

    def _resume_positions(self, done: Any, gone: Any, limit: Ints) -> None:
        """The positions where the streams resume, and the facts that the kernels need there.

        gone: requests that no response to come can answer.
        """
        of, number, has, pos, end = self.of, self.number, self.has, self.pos, self.end
        streams = 2 * self.count
        none = 1 << 62
        hold, covered = np.full(streams, none, np.int64), np.zeros(streams, np.int64)
        first, framed = hold.copy(), covered.copy()
        for side in (0, 1):
            some = has[side] & ~done
            np.minimum.at(hold, number[side][some], pos[side][some])
            some = has[side] & done
            np.maximum.at(covered, number[side][some], end[side][some])
            some = has[side]
            np.minimum.at(first, number[side][some], pos[side][some])
            np.maximum.at(framed, number[side][some], end[side][some])
            # a hole at the end of the last frame may still grow
            some = has[side] & (end[side] > self.last_end[number[side]])
            np.minimum.at(hold, number[side][some], pos[side][some])
        resume = np.minimum(hold, covered)
        is_framed = framed > 0
        is_certain = (self.sides[:, HAS_SYN] != 0) | is_framed
        # a search that finds nothing does not go over all of it again
        tail_max = self.limits.tail_max
        lost = (hold == none) & (limit - covered > tail_max) & np.repeat(self.is_kafka, 2)
        resume[lost] = limit[lost] - TAIL_KEPT
        is_certain[lost] = False
        self.missing = np.where(is_framed, framed - self.frame_ends, 0)

        bits = np.where(first < resume, RESUMED, self.bits & RESUMED)
        bits |= self.bits & HAS_ASKED
        self.resume, self.is_certain = resume, is_certain
        bits = bits | self._are_young(done)
        answers = np.unique(of[has[0] & done])
        bits[self.stream_of[1][answers]] |= HAS_ASKED
        self.new_bits = np.where(bits & RESUMED, bits, bits & HAS_ASKED)
        others = np.repeat(~self.is_kafka | self.is_given_up | (self.phase == OTHER), 2)
        resume[others] = self.ends[others]
        self._find_records()
        self._find_last_frames(done)
        kept = np.flatnonzero(
            done
            & ((has[0] & (pos[0] >= resume[number[0]])) | (has[1] & (pos[1] >= resume[number[1]])))
        )
        again = np.flatnonzero(gone & (pos[0] >= resume[number[0]]))
        self.gone_of = of[again]
        exchanges = self.assembly.exchanges
        self.gone_pos = exchanges["request"]["pos"][again]
        both = kept[has[0][kept] & has[1][kept]]
        self.kept_of = np.concatenate([of[kept], of[both]])
        ids = self.assembly.connections["connection_id"]
        response = exchanges["response"]["pos"][both]
        self.kept_ids = np.concatenate(
            [
                exchanges["exchange_id"][kept],
                -exchange_ids(ids[of[both]], np.full(len(both), RESPONSE), response),
            ]
        )
        self.open_count = np.bincount(of[~done], minlength=self.count)

    def _find_records(self) -> None:
        """By stream: the TCP position to carry it from; of decrypted ones, also the record."""
        self.carried_from, self.points = self.resume.copy(), {}
        for stream, opened in self._opened_streams():
            if opened.can_resume:
                self.carried_from[stream], self.points[stream] = opened.point(
                    int(self.resume[stream])
                )

    def _are_young(self, done: Any) -> Ints:
        """By stream: YOUNG and IN_TOKENS as of the position where it resumes."""
        exchanges = self.assembly.exchanges
        key, version = exchanges["api_key"], exchanges["api_version"]
        is_token = exchanges["is_sasl_token"] != 0
        is_handshake = (key == ApiKey.SASL_HANDSHAKE) & (version == 0)
        is_early = is_token | (key == ApiKey.SASL_HANDSHAKE) | (key == ApiKey.API_VERSIONS)
        young = (self.bits & RESUMED == 0) | (self.bits & YOUNG != 0)
        tokens = self.bits & IN_TOKENS != 0
        for side in (0, 1):
            some, number = self._before_resume(side, done), self.number[side]
            tokens[number[some]] = (is_token | is_handshake)[some]  # the last one stays
            young[number[some[~is_early[some]]]] = False
        return YOUNG * young.astype(np.int64) | IN_TOKENS * tokens.astype(np.int64)

    def _find_last_frames(self, done: Any) -> None:
        """By stream: the correlation id of the last frame before the position where it resumes. By
        connection: end position and end time of the last response before it."""
        before = np.array([state.last_ids for state in self.states], np.int64)
        self.last_ids = np.where(self.is_first[:, None], before[self.pair], NO_NUMBER).reshape(-1)
        ids = self.assembly.exchanges["correlation_id"].astype(np.int64) & 0xFFFFFFFF
        is_token = self.assembly.exchanges["is_sasl_token"] != 0
        for side in (0, 1):
            some = self._before_resume(side, done & ~is_token & ~np.isin(ids, RESERVED_IDS))
            self.last_ids[self.number[side][some]] = ids[some]  # the last one stays
        responses = np.array([state.last_response for state in self.states], np.int64).reshape(
            -1, 2
        )
        self.last_response = np.where(self.is_first[:, None], responses[self.pair], NO_RESPONSE)
        some = self._before_resume(RESPONSE, done)
        number = self.number[RESPONSE][some]
        end = self.end[RESPONSE][some] - self.resume[number]
        end += self.carried_from[number] + self.base[number]
        end_time = self.assembly.exchanges["response"]["end_time_ns"][some]
        self.last_response[self.of[some]] = np.stack([end, end_time], 1)

    def _before_resume(self, side: int, chosen: Any) -> Ints:
        """Chosen exchanges with a frame before the position where its stream resumes, in order."""
        pos = self.pos[side]
        some = np.flatnonzero(chosen & self.has[side] & (pos < self.resume[self.number[side]]))
        return some[np.argsort(pos[some], kind="stable")]

    # -- carried segments and states --------------------------------------------------------

    def carry_on(self, sources: Sources) -> int:
        """Bring the states up to date; how many of them turned out to be Kafka's."""
        phases = self._phases()
        next_phase = np.array(phases, np.int64)
        self.unread = self._unread(next_phase)
        self.before = self._counts_before(next_phase)
        self.limited_count += int(self._are_cut_short(next_phase).sum())
        self.assembly = replace(self.assembly, anomalies=self._final_anomalies(next_phase))
        mode = np.array([_MODES[phase] for phase in phases], np.int64)
        mode[~self.is_last] = NOTHING
        kept, data = self._carried(mode, sources)
        bounds = np.searchsorted(kept["endpoints"], np.arange(self.count + 1))
        byte_bounds = np.concatenate([[0], np.cumsum(kept["captured"], dtype=np.int64)])
        first_byte = byte_bounds[bounds]
        kept["pos"] = byte_bounds[:-1] - first_byte[kept["endpoints"]]
        packed, plain = kept.tobytes(), data.tobytes()
        at, byte_at = (bounds * SEGMENT.itemsize).tolist(), first_byte.tolist()
        update = _StateUpdate(self)
        recognised = 0
        for connection in np.flatnonzero(self.is_last).tolist():
            state = self.states[self.pair[connection]]
            phase = phases[connection]
            recognised += phase is KAFKA and state.phase is LOOKING
            update.apply(state, connection, phase)
            state.parts, state.size = [], 0
            if at[connection] < at[connection + 1]:
                here = slice(byte_at[connection], byte_at[connection + 1])
                state.carry(packed[at[connection] : at[connection + 1]], plain[here])
            state.looked_at = state.size
        return recognised

    def _unread(self, phases: Ints) -> Ints:
        """int64[len(Protocol)]: connections that turn out here not to be Kafka's."""
        ended = (self.phase == LOOKING) & (phases != LOOKING) & (phases != KAFKA) & ~self.is_kafka
        protocols = self.assembly.connections["protocol"][ended]
        return np.bincount(protocols, minlength=len(Protocol))

    def _are_cut_short(self, phases: Ints) -> Bools:
        """bool[connections]: a limit ends requests, or the search for Kafka, in a connection that
        goes on."""
        is_decided = np.isin(self.assembly.connections["protocol"], _DECIDED_AT_ONCE)
        is_decided |= self.is_tls & ~self.is_opened & (self.phase != KAFKA)
        is_ignored = (phases == OTHER) & (self.phase != OTHER) & ~is_decided
        return (self.is_limited | is_ignored) & self.is_last

    def _phases(self) -> list[Phase]:
        """By connection: its phase after this window."""
        most = np.full(self.count, LOOKED_AT_MAX)
        # key logs may come a little later than the records
        is_unread = self.is_tls & ~self.is_opened
        most[is_unread] = TLS_HANDSHAKE_BYTES * self.has_key_logs
        phases = np.where(self.captured <= most, LOOKING, OTHER)
        is_decided = np.isin(self.assembly.connections["protocol"], _DECIDED_AT_ONCE)
        phases[is_decided | (self.phase == OTHER)] = OTHER
        phases = np.where(self.is_kafka, np.where(self.confirmed, KAFKA, LOOKING), phases)
        phases[self.is_given_up] = OTHER
        phases = np.where(self.is_over, OVER, phases)
        return [PHASES[phase] for phase in phases.tolist()]

    def _counts_before(self, phases: Ints) -> npt.NDArray[np.void]:
        """CONNECTION rows without the counts that the carried bytes give again."""
        connections = self.assembly.connections.copy()
        counts = connections["direction"]
        again = self._carried_counts()
        for way in (REQUEST, RESPONSE):
            for name, values in again.items():
                here = counts[name][:, way]
                counts[name][:, way] = here - values[self.stream_of[way]]
                counts[name][phases == LOOKING, way] = 0
        return connections

    def _carried_counts(self) -> dict[str, Ints]:
        """By stream: counts of the bytes from the position on where it resumes."""
        sides, streams, start = self.sides, 2 * self.count, self.carried_from
        count = sides[:, PIECE_STOP] - sides[:, PIECE_START]
        index, first = gather_ranges(sides[:, PIECE_START], count)
        pieces, stream = self.streams.pieces[index], np.repeat(np.arange(streams), count)
        end_before = np.append(0, pieces["end"])[:-1]
        end_before[first[count > 0]] = 0
        size = np.maximum(pieces["end"] - np.maximum(pieces["pos"], start[stream]), 0)
        is_hole = pieces["pos"] > np.maximum(end_before, start[stream])
        byte_count = np.zeros(streams, np.int64)
        np.add.at(byte_count, stream, size)
        last = np.zeros(streams, np.int64)
        np.maximum.at(last, stream, pieces["end"])
        gaps = np.bincount(stream[is_hole], minlength=streams)
        gaps += sides[:, END] > np.maximum(last, start)
        framed = np.zeros(streams, np.int64)
        there = np.append(0, np.cumsum(
            np.where(self.assembly.extents["source"] >= 0, self.assembly.extents["length"], 0)
        ))  # fmt: skip
        for way, name in enumerate(SIDES):
            rows = np.flatnonzero(self.has[way] & (self.pos[way] >= self.resume[self.number[way]]))
            frames = self.assembly.exchanges[name][rows]
            first = frames["extent_start"]
            captured = there[first + frames["extent_count"]] - there[first] + 4
            np.add.at(framed, self.number[way][rows], captured)
        unframed = byte_count - framed
        for one, opened in self._opened_streams():
            text = opened.table
            inside = text["pos"] + text["length"] - np.maximum(text["pos"], self.resume[one])
            lost = sum(count for pos, count, _ in opened.lost if pos >= start[one])
            unframed[one] = np.maximum(inside, 0).sum() - framed[one] + lost
        return {
            "byte_count": byte_count,
            "framed_byte_count": byte_count - unframed,
            "unframed_byte_count": unframed,
            "missing_byte_count": np.maximum(sides[:, END] - start, 0) - byte_count,
            "gap_count": gaps,
        }

    def _numbers(self) -> Ints:
        """By stream: the sequence number of its position 0, or NO_NUMBER if it is unknown."""
        segments, pieces = self.streams.segments, self.streams.pieces
        stream = 2 * self.streams.connection.astype(np.int64) + segments["side"]
        numbers = np.full(2 * self.count, NO_NUMBER, np.int64)
        start, stop = self.sides[:, PIECE_START], self.sides[:, PIECE_STOP]
        some = np.flatnonzero(stop > start)
        piece = start[some]
        row = pieces["segment"][piece]
        inside = pieces["file_pos"][piece] - segments["pos"][row] - pieces["pos"][piece]
        is_syn = (segments["flags"][row] & SYN) != 0
        numbers[some] = (segments["seq"][row].astype(np.int64) + is_syn + inside) & 0xFFFFFFFF
        rows = np.flatnonzero(segments["flags"] & SYN)[::-1]  # the first one stays
        before = self.sides[stream[rows], HEADER_SIZE]
        numbers[stream[rows]] = (segments["seq"][rows].astype(np.int64) + 1 + before) & 0xFFFFFFFF
        self.stream = stream
        return numbers

    def _carried(self, mode: Ints, sources: Sources) -> tuple[Any, Any]:
        """Segments to carry, by connection (in `endpoints`), cut where the carried bytes begin;
        and their bytes."""
        segments, mark = self.streams.segments, self.streams.mark
        connection, stream = self.streams.connection.astype(np.int64), self.stream
        seq_of_start = self.seq_of_start
        flags, length = segments["flags"], segments["length"].astype(np.int64)
        is_real = segments["packet"] > 0  # no SYN of ours
        whole = (mode[connection] == WHOLE) & (mark != DUPLICATE)
        whole &= (length > 0) | ((flags & (SYN | FIN | RST)) != 0)
        rest = (mode[connection] == REST) & is_real
        wanted = (seq_of_start + self.carried_from) & 0xFFFFFFFF
        number = segments["seq"].astype(np.int64) + ((flags & SYN) != 0)
        ahead = ((number - wanted[stream] + 0x80000000) & 0xFFFFFFFF) - 0x80000000
        is_known = seq_of_start[stream] != NO_NUMBER
        has_bytes = rest & (mark == 0) & is_known & (length > 0) & (ahead + length > 0)
        is_end = rest & ((flags & (FIN | RST)) != 0) & (mark == 0)  # as a segment without bytes
        is_end[self._acknowledgements(mode)] = True
        rows = np.flatnonzero(whole | has_bytes | is_end)
        kept = segments[rows]
        cut = np.where(is_known, np.clip(-ahead, 0, length), 0)
        cut = np.where(is_end & ~has_bytes, length, cut)
        cut[whole] = 0
        cut = cut[rows]
        is_rest = ~whole[rows]
        kept["seq"] = np.where(is_rest, number[rows] + cut, segments["seq"][rows]) & 0xFFFFFFFF
        kept["flags"] = np.where(is_rest, kept["flags"] & (0xFF ^ SYN), kept["flags"])
        captured = kept["captured"].astype(np.int64)
        kept["pos"] += np.minimum(cut, captured)
        captured = np.maximum(captured - cut, 0)
        kept["captured"] = np.where(whole[rows] | has_bytes[rows], captured, 0)
        kept["length"] -= cut.astype(np.int32)
        kept["endpoints"] = connection[rows]
        kept["ip_id"] |= COUNTED_BEFORE
        extents = np.zeros(len(kept), EXTENT)
        for name, column in (("pos", "pos"), ("length", "captured"), ("source", "source")):
            extents[name] = kept[column]
        extents = extents[extents["length"] > 0]
        return kept, sources.gather(extents) if len(extents) else np.zeros(0, np.uint8)

    def _acknowledgements(self, mode: Ints) -> Ints:
        """The last acknowledgement of each stream with a hole that may still be filled, or of bytes
        after the captured ones."""
        segments = self.streams.segments
        rows = []
        is_short = self.sides[:, END] > self.ends
        for stream in np.union1d(self.open_holes, np.flatnonzero(is_short)).tolist():
            if mode[stream >> 1] == REST:
                mine = np.flatnonzero((self.stream == stream ^ 1) & (segments["flags"] & ACK != 0))
                rows += mine[-1:].tolist()
        return np.array(rows, np.int64)


class _StateUpdate:
    """Results of a `CompletionTracker` for the states, as Python numbers."""

    def __init__(self, tracker: CompletionTracker) -> None:
        sides = tracker.sides
        self.is_first = tracker.is_first.tolist()
        self.first_time = tracker.first_time.tolist()
        self.last_time = tracker.last_time.tolist()
        self.incarnation = tracker.incarnation.tolist()
        self.client = tracker.client.tolist()
        self.has_loss = tracker.has_loss.tolist()
        self.open_count = tracker.open_count.tolist()
        self.resume = tracker.carried_from.tolist()
        self.tls = _tls_states(tracker)
        self.facts = tracker.streams.facts
        self.base = tracker.base.tolist()
        self.seq = tracker.seq_of_start.tolist()
        self.syn = ((tracker.seq_of_start - sides[:, HEADER_SIZE]) & 0xFFFFFFFF).tolist()
        self.has_syn = (sides[:, HAS_SYN] != 0).tolist()
        self.is_certain = tracker.is_certain.tolist()
        self.last_ids = tracker.last_ids.tolist()
        self.last_response = tracker.last_response.tolist()
        self.bits = tracker.new_bits.tolist()
        self.missing = tracker.missing.tolist()
        self.is_closed = tracker.is_closed.tolist()
        self.end = tracker.ends.tolist()
        self.last_packet = tracker.last_packet.tolist()
        self.before = tracker.before
        self.emitted = _by_connection(tracker.kept_of, tracker.kept_ids)
        self.gone = _by_connection(tracker.gone_of, tracker.gone_pos)

    def apply(self, state: ConnectionState, connection: int, phase: Phase) -> None:
        """Bring a state up to date with its last connection."""
        is_first = self.is_first[connection]
        state.first_time = self.first_time[connection]
        state.last_time = self.last_time[connection]
        state.incarnation = self.incarnation[connection]
        state.client_side = self.client[connection]
        state.has_loss = self.has_loss[connection]
        state.needed = 0
        state.before = self.before[connection : connection + 1]
        state.is_closed = self.is_closed[connection]
        state.phase = phase
        state.tls = self.tls.get(connection) if phase is KAFKA else None
        state.tcp = self.facts.of(connection)
        ids = self.emitted.get(connection)
        state.emitted_ids = NO_IDS if ids is None else np.array(ids, np.int64)
        gone = self.gone.get(connection)
        state.closed_request_positions = (
            NO_IDS if gone is None or phase is not KAFKA else np.array(gone, np.int64)
        )
        state.last_response = self.last_response[connection]
        state.open_count = self.open_count[connection]
        if phase is OVER:
            state.emitted_ids, state.closed_request_positions = NO_IDS, NO_IDS
            state.bits, state.open_count = [0, 0], 0
        for side in (0, 1):
            stream = 2 * connection + side
            resume = self.resume[stream] if state.is_resumed else 0
            if not is_first:
                state.syn[side] = NO_NUMBER
            if self.has_syn[stream] and self.base[stream] == 0 and state.syn[side] == NO_NUMBER:
                state.syn[side] = self.syn[stream]
            if phase is OVER:
                resume = self.end[stream]
            if self.seq[stream] != NO_NUMBER:
                state.seq[side] = (self.seq[stream] + resume) & 0xFFFFFFFF
            elif not is_first:
                state.seq[side] = NO_NUMBER
            state.base[side] = self.base[stream] + resume
            state.last_packets[side] = self.last_packet[stream]
            state.certain[side] = self.is_certain[stream]
            state.bits[side] = self.bits[stream] if phase is KAFKA else 0
            state.last_ids[side] = self.last_ids[stream] if phase is KAFKA else NO_NUMBER
            if phase is KAFKA and self.missing[stream] >= DEFERRED_MIN:
                state.needed, state.needed_side = self.missing[stream], side


def _tls_states(tracker: CompletionTracker) -> dict[int, TlsState]:
    """By connection: the state from which its decryption resumes."""
    points = tracker.points
    return {
        row: TlsState(session, (points[2 * row], points[2 * row + 1]))
        for row, session in tracker.tls.sessions.items()
        if 2 * row in points and 2 * row + 1 in points
    }


def _by_connection(of: Ints, values: Ints) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for connection, value in zip(of.tolist(), values.tolist(), strict=True):
        found.setdefault(connection, []).append(value)
    return found
