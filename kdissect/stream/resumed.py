"""Connections read window by window: exchanges as soon as they are complete, in bounded memory.

Theory of operation
-------------------
The steps of `assemble` see all segments of a connection at once. Here a connection's segments come
in windows, and what a window leaves open is *carried* to the next one: the segments from the first
frame on that belongs to no finished exchange, with their bytes. The same kernels then run over the
carried and the new segments together. Where the carried bytes begin is a boundary that is certain,
which a SYN made for the purpose tells the kernels (`_openings`), and `Known` says what they would
have learnt from the bytes before. So the rows are those of `assemble`; positions and ids are moved
back to where the connection began.

An exchange is *finished* when both of its frames are whole and *settled*, its request wants no
answer, or nothing more can come: the connection was closed a while ago, its endpoints were used
again, the capture ended, a limit was reached. Bytes are settled up to the first hole that may
still be filled. A hole is given up when the peer acknowledged it (then it is the capture that lost
it), after HOLE_NS, or when much came behind it. A request that was passed over is finished when
PASSED_MAX later ones were answered, since an answer out of order may be late.

A connection that is not recognised yet is carried whole and looked at again each time it has grown
by half, up to LOOKED_AT_MAX bytes; then it is left alone until its next SYN. So Kafka that starts
later than that on a connection which begins with something else is not found.

TLS with a key log is carried whole too, up to TLS_BYTES_MAX, because its records tell their numbers
from the first one on only.

What exceeds the limits is finished as it is, the connection that was quiet for longest first, and
counted in `given_up`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture.index import ACK, ENDPOINTS, FIN, RST, SEGMENT, SYN, SegmentBatch
from kdissect.capture.source import Sources
from kdissect.capture.windows import Window, WindowSources
from kdissect.stream.assemble import Known, assemble_streams
from kdissect.stream.columns import (
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
from kdissect.stream.framing import HAS_ASKED, IN_TOKENS, LAST_ID, RESUMED
from kdissect.stream.ids import connection_ids, exchange_ids
from kdissect.stream.index import (
    EXTENT,
    REQUEST,
    RESPONSE,
    Assembly,
    CloseReason,
    PairStatus,
    Protocol,
)
from kdissect.stream.options import StreamOptions
from kdissect.stream.reassembly import Streams

Ints = npt.NDArray[np.int64]

SECOND_NS = 1_000_000_000
HOLE_NS = 3 * SECOND_NS  # a lost segment comes again within a few round trips, or seldom
HOLE_ACKED_NS = 10_000_000  # packets may be captured a little after their acknowledgement
HOLE_BYTES = 4 << 20  # of data behind a hole: a window that large is hardly ever open
LINGER_NS = SECOND_NS  # after a FIN or RST segments may still be on their way
PASSED_MAX = 64
OUTSTANDING_MAX = 4096  # requests of a connection that wait for an answer
OUTSTANDING_ONE_WAY_MAX = 64  # the same, where the other direction was not captured
LOOKED_AT_MAX = 256 << 10
TLS_BYTES_MAX = 64 << 20
TAIL_MAX, TAIL_KEPT = 1 << 20, 64 << 10  # bytes in no frame that a search goes over again
DEFERRED_MIN = 256 << 10  # of a frame that are missing, so that the connection waits for them
SASL_HANDSHAKE = 17
UNASKED_BEHIND = 8  # bytes that must follow a response whose request was not seen

HOLE_ACKED_BYTES = 64 << 10
LOOKED_AT_SMALL = 16 << 10  # up to here every new byte is looked at
CONFIRMED_BY = 3  # exchanges without an answer that make a connection Kafka's
FINISHED_AT_ONCE = 64 << 20  # carried bytes that are worked on together at the end

NO_NUMBER = -1  # sequence number that is not known
NO_IDS = np.zeros(0, np.int64)
NOTHING, WHOLE, REST = 0, 1, 2  # what of a connection is carried


@dataclass(frozen=True, slots=True)
class CarryLimits:
    """connection_max: connections of which something is known; carried_max: bytes kept of all,
    connection_bytes_max: of one."""

    connection_max: int = 16384
    carried_max: int = 256 << 20
    connection_bytes_max: int = 128 << 20


class State(IntEnum):
    """Of a connection between windows."""

    LOOKING = 0  # not recognised yet: all of it is carried
    KAFKA = 1
    TLS = 2  # with key logs: all of it is carried
    LEFT = 3  # something else, or over: nothing is carried, a SYN begins anew


LOOKING, KAFKA, TLS, LEFT = _STATES = tuple(State)
OPENING = ("time_ns", "seq", "ack", "endpoints", "flags", "side")  # fields of the SYNs we make


@dataclass(slots=True)
class _Flow:
    """A connection between windows; lists of two are by side.

    base: stream position of the first carried byte; seq: its sequence number; syn: that of position
    0, where a SYN told it; certain: the first carried byte is that of a frame. parts: carried
    segments (packed SEGMENT), whose `pos` is a place in the bytes beside them.
    shown: ids of finished exchanges that have carried bytes.
    """

    endpoints: bytes
    state: State = LOOKING
    incarnation: int = 0
    first_time: int = 2**63 - 1
    last_time: int = -(2**63)
    client_side: int = 0
    base: list[int] = field(default_factory=lambda: [0, 0])
    seq: list[int] = field(default_factory=lambda: [NO_NUMBER, NO_NUMBER])
    syn: list[int] = field(default_factory=lambda: [NO_NUMBER, NO_NUMBER])
    certain: list[bool] = field(default_factory=lambda: [False, False])
    bits: list[int] = field(default_factory=lambda: [0, 0])
    last_ids: list[int] = field(default_factory=lambda: [NO_NUMBER, NO_NUMBER])
    parts: list[tuple[bytes, bytes]] = field(default_factory=list)
    size: int = 0
    looked_at: int = 0
    needed: int = 0  # bytes of side `needed_side` that the open frame still needs
    needed_side: int = 0
    shown: Ints = field(default_factory=lambda: NO_IDS)
    open_count: int = 0  # exchanges begun
    has_loss: bool = False  # bytes of its responses are missing
    closed_at: int | None = None

    def keep(self, segments: bytes, data: bytes) -> None:
        self.parts.append((segments, data))
        self.size += len(data)


@dataclass(frozen=True, slots=True)
class Finished:
    """rows: the exchanges of `assembly` that are finished and were not given before. sources: where
    its extents are, but for what it carries."""

    assembly: Assembly
    sources: Sources
    rows: Ints


class Resumed:
    """The connections of a run between its windows."""

    def __init__(
        self,
        options: StreamOptions,
        key_logs: Sequence[Any] = (),
        limits: CarryLimits | None = None,
    ) -> None:
        self.options = options
        self.key_logs: list[Any] = list(key_logs)
        self.limits = limits or CarryLimits()
        self.given_up = 0  # connections whose open exchanges were finished by a limit
        self.connection_count = 0  # that were recognised as Kafka's
        self._flows: dict[bytes, _Flow] = {}  # the one that was quiet for longest comes first
        self._closing: dict[bytes, int] = {}  # when they were closed
        self._size = 0

    def add(self, window: Window, paths: list[str]) -> Finished | None:
        """What the window's packets finish; None where they finish nothing. `paths`: captures."""
        segments = window.batch.segments
        if not len(segments):
            return None
        now = int(segments["time_ns"].max())
        due = {key for key, when in self._closing.items() if now - when > LINGER_NS}
        taken = self._taken(window)
        return self._run(window, paths, taken, due, self._beyond_limits(taken.keys() | due))

    def finish(self, window: Window, paths: list[str]) -> Iterator[Finished]:
        """The open exchanges of all connections, once nothing more comes; in bounded memory.

        `window` gives its buffer, which the next result uses again.
        """
        waiting = [key for key, flow in self._flows.items() if flow.parts]
        while waiting:
            some: set[bytes] = set()
            size = 0
            while waiting and (not some or size < FINISHED_AT_ONCE):
                key = waiting.pop()
                some.add(key)
                size += self._flows[key].size
            empty = Window(window.batch, window.buffer, 0, [])
            found = self._run(empty, paths, {}, set(), some)
            if found is not None:
                yield found

    # -- what takes part --------------------------------------------------------------------

    def _taken(self, window: Window) -> dict[bytes, Ints]:
        """Rows of the window's segments by connection, of those that are looked at now."""
        segments = window.batch.segments
        raw = window.batch.endpoints.tobytes()
        pairs = segments["endpoints"]
        order = np.argsort(pairs, kind="stable")
        starts = np.flatnonzero(np.diff(pairs[order], prepend=-1))
        flags = np.bitwise_or.reduceat(segments["flags"][order], starts).tolist()
        captured = segments["captured"].astype(np.int64)[order]
        on_b = np.where(segments["side"][order] == 1, captured, 0)
        sizes = np.add.reduceat(captured, starts).tolist()
        sizes_b = np.add.reduceat(on_b, starts).tolist()
        first = pairs[order[starts]].tolist()
        bounds = [*starts.tolist(), len(order)]
        taken = {}
        for number, pair in enumerate(first):
            key = raw[pair * ENDPOINTS.itemsize : (pair + 1) * ENDPOINTS.itemsize]
            rows = order[bounds[number] : bounds[number + 1]]
            flow = self._flows.pop(key, None)
            if flow is None:
                flow = _Flow(key)
            self._flows[key] = flow
            if flow.state is LEFT:
                begins = np.flatnonzero(segments["flags"][rows] & SYN)
                if not len(begins):
                    continue
                rows = rows[int(begins[0]) :]
                flow = self._flows[key] = _Flow(key, incarnation=flow.incarnation + 1)
                self._closing.pop(key, None)
            if flags[number] & SYN and flow.state is KAFKA:
                rows = _without_copies(flow, segments, rows)
                if not len(rows):
                    continue
            by_side = (sizes[number] - sizes_b[number], sizes_b[number])
            if not flags[number] & (SYN | FIN | RST) and self._waits(flow, by_side):
                self._defer(flow, window, rows)
                continue
            taken[key] = rows
        return taken

    def _waits(self, flow: _Flow, sizes: tuple[int, int]) -> bool:
        """Whether so many more bytes of both sides cannot finish anything yet."""
        if flow.needed > 0:
            side = flow.needed_side
            flow.needed -= sizes[side]
            return flow.needed > 0 and sizes[1 - side] == 0
        grown = 2 * (flow.size + sum(sizes)) >= 3 * flow.looked_at
        return flow.state is not KAFKA and flow.looked_at > LOOKED_AT_SMALL and not grown

    def _defer(self, flow: _Flow, window: Window, rows: Ints) -> None:
        some = window.batch.segments[rows]
        some = some[some["captured"] > 0]
        parts = [
            window.buffer[pos : pos + size]
            for pos, size in zip(some["pos"].tolist(), some["captured"].tolist(), strict=True)
        ]
        captured = some["captured"].astype(np.int64)
        some["pos"] = np.cumsum(captured) - captured
        self._size -= flow.size
        flow.keep(some.tobytes(), np.concatenate(parts).tobytes() if parts else b"")
        self._size += flow.size

    def _beyond_limits(self, busy: Set[bytes]) -> set[bytes]:
        """Connections to be given up, the quietest ones first, but none of the `busy` ones.

        Those without an open exchange are forgotten here.
        """
        limits = self.limits
        excess, size = len(self._flows) - limits.connection_max, self._size
        if excess > 0:
            excess += limits.connection_max // 16  # not one at a time
        chosen: set[bytes] = set()
        if excess > 0 or size > limits.carried_max:
            for key, flow in list(self._flows.items()):
                if excess <= 0 and size <= limits.carried_max:
                    break
                if key in busy:
                    continue
                excess -= 1
                size -= flow.size
                if flow.open_count:
                    chosen.add(key)
                else:
                    self._forget(key)
        elif size > limits.connection_bytes_max:
            most = limits.connection_bytes_max
            chosen = {key for key, flow in self._flows.items() if flow.size > most}
        self.given_up += len(chosen)
        return chosen

    def _forget(self, key: bytes) -> None:
        self._size -= self._flows.pop(key).size
        self._closing.pop(key, None)

    # -- a window's work --------------------------------------------------------------------

    def _run(
        self,
        window: Window,
        paths: list[str],
        taken: dict[bytes, Ints],
        due: set[bytes],
        forced: set[bytes],
    ) -> Finished | None:
        """due: connections closed a while ago; forced: connections that end here."""
        keys = [*taken, *((due | forced) - taken.keys())]
        if not keys:
            return None
        flows = [self._flows[key] for key in keys]
        batch = self._batch(window, flows, list(taken.values()))
        if not len(batch.segments):
            for key in forced:
                self._forget(key)
            for key in due:
                self._closing.pop(key, None)
            return None
        sources: Sources = WindowSources(paths, window.buffer[: window.used])
        bits = np.array([flow.bits for flow in flows], np.int64).reshape(-1)
        bits |= np.array([flow.last_ids for flow in flows], np.int64).reshape(-1) + 1 << LAST_ID
        known = Known(
            bits,
            np.array([flow.state is KAFKA for flow in flows], np.uint8),
            np.array([flow.client_side for flow in flows], np.uint8),
        )
        assembly, streams = assemble_streams(batch, sources, self.options, self.key_logs, known)
        settling = _Settling(
            assembly,
            streams,
            flows,
            np.array([key in due for key in keys]),
            np.array([key in forced for key in keys]),
            bool(self.key_logs),
        )
        settling.run()
        self._size -= sum(flow.size for flow in flows)
        self.connection_count += settling.carry_on(sources)
        self._size += sum(flow.size for flow in flows)
        for key, flow in zip(keys, flows, strict=True):
            if key in forced:
                self._forget(key)
            elif flow.closed_at is not None and flow.state is not LEFT:
                self._closing[key] = flow.closed_at
            else:
                self._closing.pop(key, None)
        if not len(settling.rows):
            return None
        return Finished(assembly, sources, settling.rows)

    def _batch(self, window: Window, flows: list[_Flow], rows: list[Ints]) -> SegmentBatch:
        """Openings, carried segments and the window's rows (of the first connections) together."""
        endpoints = np.frombuffer(b"".join(flow.endpoints for flow in flows), ENDPOINTS)
        parts = [_openings(flows)]
        kept = [(number, *part) for number, flow in enumerate(flows) for part in flow.parts]
        if kept:
            data = b"".join(part[2] for part in kept)
            start = window.reserve(len(data))
            window.buffer[start : start + len(data)] = np.frombuffer(data, np.uint8)
            some = np.frombuffer(b"".join(part[1] for part in kept), SEGMENT).copy()
            counts = [len(part[1]) // SEGMENT.itemsize for part in kept]
            sizes = np.array([len(part[2]) for part in kept], np.int64)
            some["pos"] += np.repeat(start + np.cumsum(sizes) - sizes, counts)
            some["endpoints"] = np.repeat(np.array([part[0] for part in kept], np.int32), counts)
            if bool((some["packet"][1:] < some["packet"][:-1]).any()):
                some = some[np.lexsort((some["packet"], some["source"]))]
            parts.append(some)
        if rows:
            new = window.batch.segments[np.sort(np.concatenate(rows))]
            number_of = np.zeros(len(window.batch.endpoints), np.int32)
            for number, some_rows in enumerate(rows):
                number_of[window.batch.segments["endpoints"][some_rows[0]]] = number
            new["endpoints"] = number_of[new["endpoints"]]
            parts.append(new)
        return SegmentBatch(endpoints, np.concatenate(parts))


def _without_copies(flow: _Flow, segments: Any, rows: Ints) -> Ints:
    """Without further copies of the SYNs that began the connection, whose bytes are gone."""
    some = segments[rows]
    begins = np.array(flow.syn, np.int64)[some["side"]]
    number = (some["seq"].astype(np.int64) + 1) & 0xFFFFFFFF
    return rows[((some["flags"] & SYN) == 0) | (number != begins)]


def _openings(flows: list[_Flow]) -> Any:
    """The SYNs that make the carried bytes of recognised connections begin at a boundary."""
    made: list[tuple[int, int, int, int, int, int]] = []
    for number, flow in enumerate(flows):
        if flow.state is not KAFKA:
            continue
        client = flow.client_side
        for side in (client, 1 - client):
            if flow.certain[side]:
                acked = flow.seq[client] if side != client else NO_NUMBER
                flags = SYN if acked == NO_NUMBER else SYN | ACK
                before = (flow.seq[side] - 1) & 0xFFFFFFFF
                made.append((flow.first_time, before, max(0, acked), number, flags, side))
    rows = np.zeros(len(made), SEGMENT)
    for name, values in zip(OPENING, zip(*made, strict=True), strict=False):
        rows[name] = values
    return rows


class _Settling:
    """Which exchanges of a batch are finished, and what of its connections is carried on.

    due, is_forced: bool by flow. `rows` are the finished exchanges that were not given before.
    """

    def __init__(
        self,
        assembly: Assembly,
        streams: Streams,
        flows: list[_Flow],
        is_due: Any,
        is_forced: Any,
        has_key_logs: bool,
    ) -> None:
        self.assembly, self.streams, self.flows = assembly, streams, flows
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
        done |= waiting & settled[0] & self._passed(of, is_answered, waiting)
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
        self._places(of, number, has, pos, end, done | before, limit, ids)

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
        done: Any, limit: Ints, ids: Any,
    ) -> None:  # fmt: skip
        """Where each stream goes on, and what the kernels must know there."""
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
        answers = np.unique(of[has[0] & done])
        bits[self.stream_of[1][answers]] |= HAS_ASKED
        self._tell_last_ids(of, number, has, pos, done)
        # the last request before the place where its stream goes on
        some = np.flatnonzero(has[0] & done & (pos[0] < resume[number[0]]))
        exchanges = self.assembly.exchanges
        last = np.full(self.count, -1, np.int64)
        last[of[some]] = some  # in order: the last one stays
        known = last >= 0
        ask = self.stream_of[0]
        bits[ask[~known]] |= self.bits[ask[~known]] & IN_TOKENS
        before = exchanges[last[known]]
        in_tokens = (before["is_sasl_token"] != 0) | (
            (before["api_key"] == SASL_HANDSHAKE) & (before["api_version"] == 0)
        )
        bits[ask[known]] |= np.where(in_tokens, IN_TOKENS, 0)
        self.new_bits = np.where(bits & RESUMED, bits, bits & HAS_ASKED)

        kept = np.flatnonzero(
            done
            & (
                (has[0] & (pos[0] >= resume[number[0]]))
                | (has[1] & (pos[1] >= resume[number[1]]))
                | self.is_tls[of]
            )
        )
        both = kept[has[0][kept] & has[1][kept]]
        self.kept_of = np.concatenate([of[kept], of[both]])
        response = exchanges["response"]["pos"][both]
        self.kept_ids = np.concatenate(
            [
                exchanges["exchange_id"][kept],
                exchange_ids(ids[of[both]], np.full(len(both), RESPONSE), response),
            ]
        )
        self.open_count = np.bincount(of[~done], minlength=self.count)

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
                has[side] & done & ~is_token & (pos[side] < self.resume[number[side]])
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
        facts = _Facts(self, seq_of_start)
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
        return [_STATES[state] for state in states.tolist()]

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


class _Facts:
    """What `_Settling` found, as plain numbers for the flows."""

    def __init__(self, settling: _Settling, seq_of_start: Ints) -> None:
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

    def tell(self, flow: _Flow, connection: int, state: State) -> None:
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
            flow.shown, flow.bits, flow.open_count = NO_IDS, [0, 0], 0
            return
        ids = self.shown.get(connection)
        flow.shown = NO_IDS if ids is None else np.array(ids, np.int64)
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
