"""Which exchanges of carried connections are finished, and what of these is carried on.

See `resumed` for the words and the theory of operation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import ACK, FIN, RST, SEGMENT, SYN
from kdissect.kafka.assembly import EXTENT, Assembly, CloseReason, PairStatus, Protocol
from kdissect.kafka.frame_search import RESERVED, RESERVED_COUNT
from kdissect.kafka.framing import ASKS_VERSIONS, HAS_ASKED, IN_TOKENS, RESUMED, YOUNG
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.resume.connection_state import (
    CONFIRMED_BY,
    DEFERRED_MIN,
    HOLE_ACKED_BYTES,
    HOLE_ACKED_NS,
    HOLE_BYTES,
    HOLE_NS,
    KAFKA,
    LEFT,
    LOOKED_AT_MAX,
    LOOKING,
    NO_IDS,
    NO_NUMBER,
    NOTHING,
    OUTSTANDING_MAX,
    OUTSTANDING_ONE_WAY_MAX,
    PASSED_MAX,
    REST,
    STATES,
    TAIL_KEPT,
    TAIL_MAX,
    TLS,
    TLS_BYTES_MAX,
    UNASKED_BEHIND,
    WHOLE,
    Flow,
    Ints,
    State,
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

RESERVED_IDS = np.arange(RESERVED, RESERVED + RESERVED_COUNT)


class Settling:
    """Which exchanges of a batch are finished, and what of its connections is carried on.

    lost: bool by exchange, see `assemble_streams`; due, is_forced: bool by flow. `rows` are the
    finished exchanges that were not given before.
    """

    def __init__(
        self,
        assembly: Assembly,
        streams: Streams,
        lost: npt.NDArray[np.bool_],
        flows: list[Flow],
        is_due: Any,
        is_forced: Any,
        has_key_logs: bool,
    ) -> None:
        self.assembly, self.streams, self.flows = assembly, streams, flows
        self.lost = lost
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
        self.is_over = ~self.is_last | is_forced[self.pair] | (is_due[self.pair] & self.is_first)
        # by stream, 2 * connection + side
        rows = np.arange(self.count)
        self.stream_of = [2 * rows + self.client, 2 * rows + 1 - self.client]
        base = np.array([flow.base for flow in flows], np.int64)
        self.base = np.where(self.is_first[:, None], base[self.pair], 0).reshape(-1)
        bits = np.array([flow.bits for flow in flows], np.int64)
        self.bits = np.where(self.is_first[:, None], bits[self.pair], 0).reshape(-1)
        self.rows = np.zeros(0, np.int64)

    # -- finished exchanges -----------------------------------------------------------------

    def run(self) -> None:
        """Ids and positions as of the whole connections; then `rows`, and where to go on."""
        exchanges = self.assembly.exchanges
        of = exchanges["connection"].astype(np.int64)
        self._tell_connections()
        ids = self.assembly.connections["connection_id"]
        has, pos, end, settled = [], [], [], []
        limit = self._limits()
        number = [self.stream_of[side][of] for side in (REQUEST, RESPONSE)]
        for side, name in enumerate(("request", "response")):
            column = exchanges[name]
            has.append(column["size"] >= 0)
            pos.append(column["pos"].copy())
            end.append(column["pos"] + 4 + column["size"])
            inside = np.where(
                self.is_tls[of], column["is_whole"] != 0, end[side] <= limit[number[side]]
            )
            settled.append(~has[side] | inside | self.is_over[of])
            column["pos"] = np.where(has[side], pos[side] + self.base[number[side]], -1)
        asked, answered = has
        place = np.where(asked, exchanges["request"]["pos"], exchanges["response"]["pos"])
        exchanges["exchange_id"] = exchange_ids(ids[of], np.where(asked, REQUEST, RESPONSE), place)

        is_silent = (exchanges["status"] == PairStatus.NO_RESPONSE_EXPECTED) & ~answered
        over = self.is_over[of]
        done = asked & answered & settled[0] & settled[1]
        is_answered = done.copy()
        done |= is_silent & settled[0]
        is_followed = end[1] + UNASKED_BEHIND <= limit[number[1]]
        # a request in a hole that may still be filled could be the one
        has_all = ~np.isin(number[0], self.open_holes)
        done |= ~asked & settled[1] & ((is_followed & has_all) | self.is_tls[of])
        waiting = asked & ~answered & ~is_silent
        passed = self._passed(of, is_answered, waiting)
        done |= waiting & settled[0] & passed
        done |= over

        shown = [flow.shown for flow in self.flows if len(flow.shown)]
        before = np.zeros(len(exchanges), np.bool_)
        if shown:
            before = np.isin(exchanges["exchange_id"], np.concatenate(shown))
        confirmed = np.array([flow.state is not LOOKING for flow in self.flows])
        confirmed = confirmed[self.pair] & self.is_first | self.is_over
        confirmed[of[is_answered]] = True
        confirmed |= np.bincount(of[done], minlength=self.count) >= CONFIRMED_BY
        self.confirmed = confirmed
        done &= confirmed[of]
        self.rows = np.flatnonzero(done & ~before)
        self._tell_losses(of, before & ~is_silent, waiting)
        gone = (done | before) & asked & ~is_silent
        self._places(of, number, has, pos, end, done | before, gone, limit, ids)

    def _tell_losses(self, of: Ints, before: Any, waiting: Any) -> None:
        """An answer that did not come before those of later requests, which are known no more to
        `pairing`, was lost in the capture."""
        had_loss = np.array([flow.has_loss for flow in self.flows])[self.pair] & self.is_first
        response = self.sides[self.stream_of[1]]
        self.has_loss = had_loss | (response[:, END] > response[:, BYTE_COUNT])
        exchanges = self.assembly.exchanges
        last = np.full(self.count, -1, np.int64)
        last[of[before]] = np.flatnonzero(before)
        is_closed = exchanges["status"] == PairStatus.CONNECTION_CLOSED
        lost = waiting & is_closed & self.has_loss[of] & (np.arange(len(of)) < last[of])
        exchanges["status"][lost] = PairStatus.RESPONSE_MISSING

    def _tell_connections(self) -> None:
        """Connection ids from what is known of the connections' beginnings."""
        first = self.connections[:, FIRST_TIME]
        earlier = np.array([flow.first_time for flow in self.flows], np.int64)[self.pair]
        self.first_time = np.where(self.is_first, np.minimum(first, earlier), first)
        before = np.array([flow.incarnation for flow in self.flows], np.int64)[self.pair]
        self.incarnation = self.connections[:, INCARNATION] + before
        self.assembly.connections["connection_id"] = connection_ids(
            self.assembly.endpoints, self.pair, self.first_time, self.incarnation
        )

    def _limits(self) -> Ints:
        """By stream: up to which position its bytes are settled."""
        sides = self.sides
        self.ends = np.where(sides[:, HAS_DATA] != 0, sides[:, HIGH] - sides[:, ORIGIN], 0)
        limit = self.ends.copy()
        open_kafka = np.repeat(self.is_kafka & ~self.is_over & ~self.is_tls, 2)
        for stream in np.flatnonzero((sides[:, GAP_COUNT] > 0) & open_kafka).tolist():
            limit[stream] = self._settled_end(stream)
        self.open_holes = np.flatnonzero(limit < self.ends)
        return limit

    def _settled_end(self, stream: int) -> int:
        """Where the first hole of a stream begins that may still be filled."""
        side = self.sides[stream]
        pieces, segments = self.streams.pieces, self.streams.segments
        rows = slice(int(side[PIECE_START]), int(side[PIECE_STOP]))
        begin = pieces.pos[rows]
        if not len(begin):
            return 0
        end = begin + pieces.length[rows]
        owner = pieces.segment[rows]
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

    def _passed(self, of: Ints, is_answered: Any, waiting: Any) -> npt.NDArray[np.bool_]:
        """Requests whose answer is not waited for any longer."""
        index = np.arange(len(of))
        last = np.full(self.count, -1, np.int64)
        np.maximum.at(last, of[is_answered], index[is_answered])
        passed: npt.NDArray[np.bool_] = index + PASSED_MAX <= last[of]
        passed |= self.lost & (index < last[of])
        is_one_way = (self.sides[self.stream_of[1], HAS_DATA] == 0) & (
            self.bits[self.stream_of[1]] & RESUMED == 0
        )
        most = np.where(is_one_way, OUTSTANDING_ONE_WAY_MAX, OUTSTANDING_MAX)
        open_count = np.bincount(of[waiting], minlength=self.count)
        for connection in np.flatnonzero(open_count > most).tolist():
            rows = np.flatnonzero(waiting & (of == connection))
            passed[rows[: len(rows) - int(most[connection]) // 2]] = True
        return passed

    def _places(
        self, of: Ints, number: list[Ints], has: list[Any], pos: list[Ints], end: list[Ints],
        done: Any, gone: Any, limit: Ints, ids: Any,
    ) -> None:  # fmt: skip
        """Where each stream goes on, and what the kernels must know there.

        gone: requests that no response to come can answer.
        """
        streams = 2 * self.count
        none = 1 << 62
        hold, covered = np.full(streams, none, np.int64), np.zeros(streams, np.int64)
        framed = np.zeros(streams, np.int64)
        for side in (0, 1):
            some = has[side] & ~done
            np.minimum.at(hold, number[side][some], pos[side][some])
            some = has[side] & done
            np.maximum.at(covered, number[side][some], end[side][some])
            np.maximum.at(framed, number[side][has[side]], end[side][has[side]])
        resume = np.minimum(hold, covered)
        is_framed = framed > 0
        is_certain = (self.sides[:, HAS_SYN] != 0) | is_framed
        # a search that finds nothing does not go over all of it again
        lost = (hold == none) & (limit - covered > TAIL_MAX) & np.repeat(self.is_kafka, 2)
        resume[lost] = limit[lost] - TAIL_KEPT
        is_certain[lost] = False
        self.resume, self.is_certain = resume, is_certain
        self.missing = np.where(is_framed, framed - self.ends, 0)

        bits = np.where((covered > 0) & (covered <= resume), RESUMED, self.bits & RESUMED)
        bits |= self.bits & HAS_ASKED
        bits = bits | self._are_young(of, number, has, pos, done)
        answers = np.unique(of[has[0] & done])
        bits[self.stream_of[1][answers]] |= HAS_ASKED
        self._tell_last_ids(of, number, has, pos, done)
        self.new_bits = np.where(bits & RESUMED, bits, bits & HAS_ASKED)

        kept = np.flatnonzero(
            done
            & (
                (has[0] & (pos[0] >= resume[number[0]]))
                | (has[1] & (pos[1] >= resume[number[1]]))
                | self.is_tls[of]
            )
        )
        again = np.flatnonzero(gone & (pos[0] >= resume[number[0]]))
        self.gone_of = of[again]
        self.gone_pos = pos[0][again] + self.base[number[0][again]]
        both = kept[has[0][kept] & has[1][kept]]
        self.kept_of = np.concatenate([of[kept], of[both]])
        exchanges = self.assembly.exchanges
        response = exchanges["response"]["pos"][both]
        self.kept_ids = np.concatenate(
            [
                exchanges["exchange_id"][kept],
                exchange_ids(ids[of[both]], np.full(len(both), RESPONSE), response),
            ]
        )
        self.open_count = np.bincount(of[~done], minlength=self.count)

    def _are_young(
        self, of: Ints, number: list[Ints], has: list[Any], pos: list[Ints], done: Any
    ) -> Ints:
        """By stream: YOUNG and IN_TOKENS as of the place where it goes on."""
        exchanges = self.assembly.exchanges
        key, version = exchanges["api_key"], exchanges["api_version"]
        is_token = exchanges["is_sasl_token"] != 0
        is_handshake = (key == ApiKey.SASL_HANDSHAKE) & (version == 0)
        is_early = is_token | (key == ApiKey.SASL_HANDSHAKE) | (key == ASKS_VERSIONS)
        young = (self.bits & RESUMED == 0) | (self.bits & YOUNG != 0)
        tokens = self.bits & IN_TOKENS != 0
        for side in (0, 1):
            some = np.flatnonzero(has[side] & done & (pos[side] < self.resume[number[side]]))
            some = some[np.argsort(pos[side][some], kind="stable")]
            tokens[number[side][some]] = (is_token | is_handshake)[some]  # the last one stays
            young[number[side][some[~is_early[some]]]] = False
        return YOUNG * young.astype(np.int64) | IN_TOKENS * tokens.astype(np.int64)

    def _tell_last_ids(
        self, of: Ints, number: list[Ints], has: list[Any], pos: list[Ints], done: Any
    ) -> None:
        """By stream: the correlation id of the last frame before the place where it goes on."""
        before = np.array([flow.last_ids for flow in self.flows], np.int64)
        self.last_ids = np.where(self.is_first[:, None], before[self.pair], NO_NUMBER).reshape(-1)
        ids = self.assembly.exchanges["correlation_id"].astype(np.int64) & 0xFFFFFFFF
        is_token = self.assembly.exchanges["is_sasl_token"] != 0
        for side in (0, 1):
            some = np.flatnonzero(
                has[side]
                & done
                & ~is_token
                & ~np.isin(ids, RESERVED_IDS)
                & (pos[side] < self.resume[number[side]])
            )
            some = some[np.argsort(pos[side][some], kind="stable")]
            self.last_ids[number[side][some]] = ids[some]  # the last one stays

    # -- what is carried on -----------------------------------------------------------------

    def carry_on(self, sources: Sources) -> int:
        """Bring the flows up to date; how many of them turned out to be Kafka's."""
        states = self._states()
        seq_of_start = self._numbers()
        by_state = {LOOKING: WHOLE, TLS: WHOLE, KAFKA: REST, LEFT: NOTHING}
        mode = np.array([by_state[state] for state in states], np.int64)
        mode[~self.is_last] = NOTHING
        kept, data = self._kept(mode, seq_of_start, sources)
        bounds = np.searchsorted(kept["endpoints"], np.arange(self.count + 1))
        byte_bounds = np.concatenate([[0], np.cumsum(kept["captured"], dtype=np.int64)])
        first_byte = byte_bounds[bounds]
        kept["pos"] = byte_bounds[:-1] - first_byte[kept["endpoints"]]
        packed, plain = kept.tobytes(), data.tobytes()
        at, byte_at = (bounds * SEGMENT.itemsize).tolist(), first_byte.tolist()
        facts = Facts(self, seq_of_start)
        found = 0
        for connection in np.flatnonzero(self.is_last).tolist():
            flow = self.flows[self.pair[connection]]
            state = states[connection]
            found += state in (KAFKA, TLS) and flow.state is LOOKING
            facts.tell(flow, connection, state)
            flow.parts, flow.size = [], 0
            if at[connection] < at[connection + 1]:
                here = slice(byte_at[connection], byte_at[connection + 1])
                flow.keep(packed[at[connection] : at[connection + 1]], plain[here])
            flow.looked_at = flow.size
        return found

    def _states(self) -> list[State]:
        sides = self.sides
        captured = sides[:, BYTE_COUNT].reshape(-1, 2).sum(axis=1)
        known = np.array([flow.state is KAFKA for flow in self.flows])[self.pair] & self.is_first
        known |= self.confirmed
        states = np.where(captured <= LOOKED_AT_MAX, LOOKING, LEFT)
        states = np.where(self.is_kafka, np.where(known, KAFKA, LOOKING), states)
        is_kept = (captured <= TLS_BYTES_MAX) & self.has_key_logs
        states = np.where(self.is_tls, np.where(is_kept, TLS, LEFT), states)
        states = np.where(self.is_over, LEFT, states)
        return [STATES[state] for state in states.tolist()]

    def _numbers(self) -> Ints:
        """By stream: the sequence number of its position 0, NO_NUMBER where nothing tells it."""
        segments, pieces = self.streams.segments, self.streams.pieces
        stream = 2 * self.streams.connection.astype(np.int64) + segments["side"]
        numbers = np.full(2 * self.count, NO_NUMBER, np.int64)
        start, stop = self.sides[:, PIECE_START], self.sides[:, PIECE_STOP]
        some = np.flatnonzero(stop > start)
        piece = start[some]
        row = pieces.segment[piece]
        inside = pieces.file_pos[piece] - segments["pos"][row] - pieces.pos[piece]
        is_syn = (segments["flags"][row] & SYN) != 0
        numbers[some] = (segments["seq"][row].astype(np.int64) + is_syn + inside) & 0xFFFFFFFF
        rows = np.flatnonzero(segments["flags"] & SYN)[::-1]  # the first one stays
        numbers[stream[rows]] = (segments["seq"][rows].astype(np.int64) + 1) & 0xFFFFFFFF
        self.stream = stream
        return numbers

    def _kept(self, mode: Ints, seq_of_start: Ints, sources: Sources) -> tuple[Any, Any]:
        """Segments to carry, by connection (in `endpoints`), cut where the carried bytes begin;
        and their bytes."""
        segments, mark = self.streams.segments, self.streams.mark
        connection, stream = self.streams.connection.astype(np.int64), self.stream
        flags, length = segments["flags"], segments["length"].astype(np.int64)
        is_control = (flags & (FIN | RST)) != 0
        whole = (mode[connection] == WHOLE) & (mark != DUPLICATE)
        whole &= (length > 0) | ((flags & (SYN | FIN | RST)) != 0)
        rest = (mode[connection] == REST) & (mark == 0)
        wanted = (seq_of_start + self.resume) & 0xFFFFFFFF
        number = segments["seq"].astype(np.int64) + ((flags & SYN) != 0)
        ahead = ((number - wanted[stream] + 0x80000000) & 0xFFFFFFFF) - 0x80000000
        is_known = seq_of_start[stream] != NO_NUMBER
        has_bytes = rest & is_known & (length > 0) & (ahead + length > 0)
        rows = np.flatnonzero(whole | has_bytes | (rest & is_control))
        rows = np.union1d(rows, self._acknowledgements(mode)) if len(self.open_holes) else rows
        kept = segments[rows]
        cut = np.where(is_known, np.clip(-ahead, 0, length), 0)[rows]
        is_rest = ~whole[rows]
        cut[~is_rest] = 0
        only_ack = is_rest & ~has_bytes[rows]
        cut[only_ack] = length[rows][only_ack]
        kept["seq"] = np.where(is_rest, number[rows] + cut, segments["seq"][rows]) & 0xFFFFFFFF
        kept["flags"] = np.where(is_rest, kept["flags"] & (0xFF ^ SYN), kept["flags"])
        captured = kept["captured"].astype(np.int64)
        kept["pos"] += np.minimum(cut, captured)
        kept["captured"] = np.maximum(captured - cut, 0)
        kept["length"] -= cut.astype(np.int32)
        kept["endpoints"] = connection[rows]
        extents = np.zeros(len(kept), EXTENT)
        for name, column in (("pos", "pos"), ("length", "captured"), ("source", "source")):
            extents[name] = kept[column]
        extents = extents[extents["length"] > 0]
        return kept, sources.gather(extents) if len(extents) else np.zeros(0, np.uint8)

    def _acknowledgements(self, mode: Ints) -> Ints:
        """The last acknowledgement of each stream with a hole that may still be filled."""
        segments = self.streams.segments
        rows = []
        for stream in self.open_holes.tolist():
            if mode[stream >> 1] == REST:
                mine = np.flatnonzero((self.stream == stream ^ 1) & (segments["flags"] & ACK != 0))
                rows += mine[-1:].tolist()
        return np.array(rows, np.int64)


class Facts:
    """What `Settling` found, as plain numbers for the flows."""

    def __init__(self, settling: Settling, seq_of_start: Ints) -> None:
        sides, connections = settling.sides, settling.connections
        self.is_first = settling.is_first.tolist()
        self.first_time = settling.first_time.tolist()
        self.last_time = connections[:, LAST_TIME].tolist()
        self.incarnation = settling.incarnation.tolist()
        self.client = settling.client.tolist()
        self.has_loss = settling.has_loss.tolist()
        self.open_count = settling.open_count.tolist()
        self.resume = settling.resume.tolist()
        self.base = settling.base.tolist()
        self.seq = seq_of_start.tolist()
        self.has_syn = (sides[:, HAS_SYN] != 0).tolist()
        self.is_certain = settling.is_certain.tolist()
        self.last_ids = settling.last_ids.tolist()
        self.bits = settling.new_bits.tolist()
        self.missing = settling.missing.tolist()
        has_fin = (sides[:, FIN_AT] != NO_ACK).reshape(-1, 2).all(axis=1)
        self.is_closed = (has_fin | (connections[:, CLOSE_REASON] == CloseReason.RST)).tolist()
        self.shown: dict[int, list[int]] = {}
        for connection, ident in zip(
            settling.kept_of.tolist(), settling.kept_ids.tolist(), strict=True
        ):
            self.shown.setdefault(connection, []).append(ident)
        self.gone: dict[int, list[int]] = {}
        for connection, pos in zip(
            settling.gone_of.tolist(), settling.gone_pos.tolist(), strict=True
        ):
            self.gone.setdefault(connection, []).append(pos)

    def tell(self, flow: Flow, connection: int, state: State) -> None:
        """Bring a flow up to date with its last connection."""
        is_first = self.is_first[connection]
        last_time = self.last_time[connection]
        flow.first_time = self.first_time[connection]
        flow.last_time = max(flow.last_time, last_time) if is_first else last_time
        flow.incarnation = self.incarnation[connection]
        flow.client_side = self.client[connection]
        flow.has_loss = self.has_loss[connection]
        flow.needed = 0
        if not self.is_closed[connection]:
            flow.closed_at = None
        elif flow.closed_at is None or not is_first:
            flow.closed_at = flow.last_time
        flow.state = state
        if state is LEFT:
            flow.shown, flow.gone, flow.bits, flow.open_count = NO_IDS, NO_IDS, [0, 0], 0
            return
        ids = self.shown.get(connection)
        flow.shown = NO_IDS if ids is None else np.array(ids, np.int64)
        gone = self.gone.get(connection)
        flow.gone = NO_IDS if gone is None or state is not KAFKA else np.array(gone, np.int64)
        flow.open_count = self.open_count[connection]
        for side in (0, 1):
            stream = 2 * connection + side
            resume = self.resume[stream] if state is KAFKA else 0
            if not is_first:
                flow.syn[side] = NO_NUMBER
            if self.has_syn[stream] and self.base[stream] == 0:
                flow.syn[side] = self.seq[stream]
            if self.seq[stream] != NO_NUMBER:
                flow.seq[side] = (self.seq[stream] + resume) & 0xFFFFFFFF
            elif not is_first:
                flow.seq[side] = NO_NUMBER
            flow.base[side] = self.base[stream] + resume
            flow.certain[side] = self.is_certain[stream]
            flow.bits[side] = self.bits[stream] if state is KAFKA else 0
            flow.last_ids[side] = self.last_ids[stream] if state is KAFKA else NO_NUMBER
            if state is KAFKA and self.missing[stream] >= DEFERRED_MIN:
                flow.needed, flow.needed_side = self.missing[stream], side
