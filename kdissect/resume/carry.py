"""Connections carried from window to window: exchanges as soon as they are complete, in bounded
memory.

Theory of operation
-------------------
The steps of `assemble` see all segments of a connection at once. Here the segments come in windows.
The segments from the first frame of an open exchange on are *carried* to the next window, with
their bytes. The same kernels then run over the carried and the new segments together. A made SYN
marks the first carried byte (`_openings`), and `EarlierState` has the facts that the kernels would
have found in the bytes before. So the rows are those of `assemble`; positions and ids are restated
as of the whole connection.

An exchange is *complete* in three cases:

- both of its frames are whole and no later packet can change their bytes
- its request expects no response, and its frame is whole
- no more packets of it can come: the connection was closed a while ago, its endpoints were reused,
  the capture ended, or a limit was reached

Bytes are final up to the first hole that a retransmission may still fill. A hole is given up when
the peer acknowledged its bytes (then the capture lost them), after HOLE_NS, or when many bytes
follow it. A request without a response, while later ones have theirs, is complete after
`passed_max` responses to later requests: until then its response may come out of order.

A connection whose protocol is not known yet is carried whole. Detection runs again each time it
has grown by half, up to LOOKED_AT_MAX bytes. After that the connection is ignored until its next
SYN. So Kafka traffic is not found if so many bytes of something else come before it.

Kafka over TLS is carried as ciphertext, from the record with the first open frame on. The state
that `tls.session` needs to decrypt it is carried too; the secrets come from the key log each time.
A TLS connection without secrets is not read. One whose records no longer decrypt is given up.

If there are more connections than the limits allow, the one that was idle for longest is completed
as it is, and counted in `given_up`.

Other connections are followed for their counts, without carrying their bytes.

An anomaly of an exchange comes with the exchange. Any other one comes when the bytes at its place
are carried no more. A packet whose bytes come later than that is counted in `late_count`.

A run with ``--append`` has a carry for each bucket: its window is all packets of the run's
captures, its first states are those that the run before saved (`connection_state.pack_states`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import (
    ACK,
    COUNTED_BEFORE,
    ENDPOINTS,
    FIN,
    RST,
    SEGMENT,
    SYN,
    SegmentBatch,
)
from kdissect.capture.windows import Window
from kdissect.kafka.assemble import EarlierState, assemble_streams
from kdissect.kafka.assembly import Assembly
from kdissect.kafka.assembly import Protocol as Spoken
from kdissect.kafka.exchanges import NO_RESPONSE
from kdissect.kafka.framing import LAST_ID
from kdissect.kafka.options import StreamOptions
from kdissect.resume.completion import Bools, CompletionTracker
from kdissect.resume.connection_state import (
    FINISHED_AT_ONCE,
    KAFKA,
    LINGER_NS,
    LOOKED_AT_SMALL,
    NO_IDS,
    NO_NUMBER,
    OPENING,
    OTHER,
    OVER,
    CarryLimits,
    ConnectionState,
    Ints,
)
from kdissect.tcp.facts import joined_facts
from kdissect.tcp.reassembly import FAR_ONCE_CLOSED

NO_TIME = -(2**63)  # of a window without packets, in which nothing is late


class SegmentWindow(Protocol):
    """Segments, and room for carried bytes: `hold` says at which position they are then."""

    @property
    def batch(self) -> SegmentBatch: ...

    def hold(self, data: bytes) -> int: ...

    def sources(self, paths: list[str]) -> Sources: ...


@dataclass(frozen=True, slots=True)
class CompletedExchanges:
    """rows: the exchanges of `assembly` that are complete and were not emitted before. sources:
    where its extents are, except those of the bytes that it carries itself. The anomalies of
    `assembly` are those that no later packet changes. is_open: by connection, whether it goes on
    after the window."""

    assembly: Assembly
    sources: Sources
    rows: Ints
    is_open: Bools


class CarriedBytes:
    """A `SegmentWindow` over captures: carried bytes stand in for those of earlier captures."""

    def __init__(self, batch: SegmentBatch, sources: Sources, earlier_count: int) -> None:
        self.batch = batch
        self._sources, self._earlier_count = sources, earlier_count
        self._data = np.zeros(0, np.uint8)

    def hold(self, data: bytes) -> int:
        self._data = np.frombuffer(data, np.uint8)
        return 0

    def sources(self, paths: list[str]) -> Sources:
        sources = self._sources
        if self._earlier_count:
            sources = sources.standing_in(self._earlier_count, self._data)
        return sources


class ConnectionCarry:
    """The connections of a run between its windows."""

    def __init__(
        self,
        options: StreamOptions,
        key_logs: Sequence[Any] = (),
        limits: CarryLimits | None = None,
        states: Iterable[ConnectionState] = (),
        secret_apis: Set[int] = frozenset(),
    ) -> None:
        """secret_apis: keys of APIs whose messages are not carried; their connections end."""
        self.options = options
        self.secret_apis = secret_apis
        self.key_logs: list[Any] = list(key_logs)
        self.limits = limits or CarryLimits()
        self.given_up = 0  # connections whose open exchanges were completed to make room
        self.limited_count = 0  # connections that another limit cut short
        self.late_count = 0  # packets that came after their place was complete
        self.connection_count = 0  # that were recognised as Kafka's
        self.unread = np.zeros(len(Spoken), np.int64)  # connections by protocol
        # the one that was quiet for longest comes first
        self._states = {state.endpoints: state for state in states}
        self._closing: dict[bytes, int] = {}  # when they were closed
        self._size = 0

    def add(self, window: Window, paths: list[str]) -> CompletedExchanges | None:
        """The exchanges that the window's packets complete, or None. `paths`: of all captures."""
        segments = window.batch.segments
        if not len(segments):
            return None
        now = int(segments["time_ns"].max())
        due = {key for key, when in self._closing.items() if now - when > LINGER_NS}
        taken = self._taken(window.batch)
        for key in list(taken):
            if self._waits(window.batch, key, taken[key]):
                self._defer(window, key, taken.pop(key))
        forced = self._beyond_limits(taken.keys() | due)
        if not (taken or due or forced):
            return None
        found = self._run(window, paths, taken, due, forced, now)
        return found if len(found.rows) or len(found.assembly.anomalies) else None

    def finish(self, window: Window, paths: list[str]) -> Iterator[CompletedExchanges]:
        """The open exchanges of all connections, once nothing more comes; in bounded memory.

        `window` gives its buffer, which the next result uses again.
        """
        waiting = [key for key, state in self._states.items() if state.parts]
        while waiting:
            some: set[bytes] = set()
            size = 0
            while waiting and (not some or size < FINISHED_AT_ONCE):
                key = waiting.pop()
                some.add(key)
                size += self._states[key].size
            empty = Window(window.batch, window.buffer, 0, [])
            yield self._run(empty, paths, {}, set(), some, NO_TIME)

    def append(self, window: CarriedBytes, now: int) -> CompletedExchanges:
        """All packets of some captures as one window, whose time is `now`. All states take part, so
        that the result has a row for each connection."""
        taken = self._taken(window.batch)
        forced = self._beyond_limits(taken.keys())
        others = {key for key, state in self._states.items() if state.phase is not OVER}
        return self._run(window, [], taken, others - taken.keys(), forced, now)

    def states(self) -> list[ConnectionState]:
        """All of them, to be saved."""
        return list(self._states.values())

    # -- what takes part --------------------------------------------------------------------

    def _taken(self, batch: SegmentBatch) -> dict[bytes, Ints]:
        """Rows of the segments by connection, of those that are not ignored."""
        segments = batch.segments
        if not len(segments):
            return {}
        raw = batch.endpoints.tobytes()
        pairs = segments["endpoints"]
        order = np.argsort(pairs, kind="stable")
        starts = np.flatnonzero(np.diff(pairs[order], prepend=-1))
        has_syn = np.logical_or.reduceat((segments["flags"][order] & SYN) != 0, starts).tolist()
        first = pairs[order[starts]].tolist()
        bounds = [*starts.tolist(), len(order)]
        taken = {}
        for number, pair in enumerate(first):
            key = raw[pair * ENDPOINTS.itemsize : (pair + 1) * ENDPOINTS.itemsize]
            rows = order[bounds[number] : bounds[number + 1]]
            count = len(rows)
            state = self._states.pop(key, None)
            if state is None:
                state = ConnectionState(key)
            self._states[key] = state
            if state.phase is OVER:
                rows = rows[_begins_anew(state, segments[rows]) :]
                self.late_count += count - len(rows)
                if len(rows):
                    incarnation = state.incarnation + 1
                    self._states[key] = ConnectionState(key, incarnation=incarnation)
                    self._closing.pop(key, None)
            elif has_syn[number] and state.is_resumed:
                rows = _without_copies(state, segments, rows)
            if len(rows):
                taken[key] = rows
        return taken

    def _waits(self, batch: SegmentBatch, key: bytes, rows: Ints) -> bool:
        """Return whether these segments cannot complete anything yet."""
        state, segments = self._states[key], batch.segments[rows]
        if (segments["flags"] & (SYN | FIN | RST)).any():
            return False
        sizes = np.bincount(segments["side"], segments["captured"], 2)
        if state.needed > 0:
            side = state.needed_side
            state.needed -= int(sizes[side])
            return state.needed > 0 and sizes[1 - side] == 0
        grown = 2 * (state.size + sizes.sum()) >= 3 * state.looked_at
        return state.phase is not KAFKA and state.looked_at > LOOKED_AT_SMALL and not grown

    def _defer(self, window: Window, key: bytes, rows: Ints) -> None:
        state = self._states[key]
        some = window.batch.segments[rows]
        parts = [
            window.buffer[pos : pos + size]
            for pos, size in zip(some["pos"].tolist(), some["captured"].tolist(), strict=True)
        ]
        captured = some["captured"].astype(np.int64)
        some["pos"] = np.cumsum(captured) - captured
        self._size -= state.size
        state.carry(some.tobytes(), np.concatenate(parts).tobytes() if parts else b"")
        self._size += state.size

    def _beyond_limits(self, busy: Set[bytes]) -> set[bytes]:
        """Connections to be given up, the quietest ones first, but none of the `busy` ones.

        Those without an open exchange are forgotten here.
        """
        limits = self.limits
        excess, size = len(self._states) - limits.connection_max, self._size
        if excess > 0:
            excess += limits.connection_max // 16  # not one at a time
        chosen: set[bytes] = set()
        if excess > 0 or size > limits.carried_max:
            for key, state in list(self._states.items()):
                if excess <= 0 and size <= limits.carried_max:
                    break
                if key in busy:
                    continue
                excess -= 1
                size -= state.size
                if state.open_count:
                    chosen.add(key)
                else:
                    self._forget(key)
        elif size > limits.connection_bytes_max:
            most = limits.connection_bytes_max
            chosen = {key for key, state in self._states.items() if state.size > most}
        self.given_up += len(chosen)
        return chosen

    def _forget(self, key: bytes) -> None:
        self._size -= self._states.pop(key).size
        self._closing.pop(key, None)

    # -- a window's work --------------------------------------------------------------------

    def _run(
        self,
        window: SegmentWindow,
        paths: list[str],
        taken: dict[bytes, Ints],
        others: set[bytes],
        forced: set[bytes],
        now: int,
    ) -> CompletedExchanges:
        """others: connections that take part without new packets. forced: those that end here."""
        keys = [*taken, *((others | forced) - taken.keys())]
        states = [self._states[key] for key in keys]
        batch = self._batch(window, states, list(taken.values()))
        sources = window.sources(paths)
        assembly, streams, lost, tls = assemble_streams(
            batch, sources, self.options, self.key_logs, _earlier_state(states)
        )
        is_forced = np.array([key in forced for key in keys], np.bool_)
        tracker = CompletionTracker(
            assembly, streams, lost, tls, states, is_forced, bool(self.key_logs), self.limits, now,
            self.secret_apis,
        )  # fmt: skip
        tracker.run()
        self._size -= sum(state.size for state in states)
        self.connection_count += tracker.carry_on(sources)
        self.unread += tracker.unread
        self.given_up += int(tracker.must_end.sum())
        self.limited_count += tracker.limited_count
        self.late_count += tracker.late_count
        self._size += sum(state.size for state in states)
        # what follows is found from the middle on
        forced = forced | {keys[pair] for pair in tracker.pair[tracker.must_end].tolist()}
        for key, state in zip(keys, states, strict=True):
            if key in forced:
                self._forget(key)
            elif state.is_closed and state.phase is not OVER:
                self._closing[key] = state.last_time
            else:
                self._closing.pop(key, None)
        is_open = tracker.is_last & ~tracker.is_over
        return CompletedExchanges(tracker.assembly, sources, tracker.rows, is_open)

    def _batch(
        self, window: SegmentWindow, states: list[ConnectionState], rows: list[Ints]
    ) -> SegmentBatch:
        """Openings, carried segments and the window's rows (of the first connections) together."""
        endpoints = np.frombuffer(b"".join(state.endpoints for state in states), ENDPOINTS)
        parts = [_openings(states)]
        kept = [(number, *part) for number, state in enumerate(states) for part in state.parts]
        if kept:
            start = window.hold(b"".join(part[2] for part in kept))
            some = np.frombuffer(b"".join(part[1] for part in kept), SEGMENT).copy()
            counts = [len(part[1]) // SEGMENT.itemsize for part in kept]
            sizes = np.array([len(part[2]) for part in kept], np.int64)
            some["pos"] += np.repeat(start + np.cumsum(sizes) - sizes, counts)
            some["endpoints"] = np.repeat(np.array([part[0] for part in kept], np.int32), counts)
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


def no_segments() -> SegmentBatch:
    return SegmentBatch(np.zeros(0, ENDPOINTS), np.zeros(0, SEGMENT))


def _earlier_state(states: list[ConnectionState]) -> EarlierState:
    """Facts that the kernels would have found in the bytes before the carried ones."""
    bits = np.array([state.bits for state in states], np.int64).reshape(-1)
    bits |= np.array([state.last_ids for state in states], np.int64).reshape(-1) + 1 << LAST_ID
    closed = [state.closed_request_positions for state in states]
    return EarlierState(
        bits,
        np.array([_spoken(state) for state in states], np.uint8),
        np.array([state.client_side for state in states], np.uint8),
        np.repeat(np.arange(len(states)), [len(positions) for positions in closed]),
        np.concatenate(
            [
                NO_IDS,
                *(
                    positions - state.base[state.client_side]
                    for positions, state in zip(closed, states, strict=True)
                ),
            ]
        ),
        np.array([state.has_loss and state.is_resumed for state in states], np.uint8),
        np.array(
            [not state.is_resumed or certain for state in states for certain in state.certain],
            np.uint8,
        ),
        np.array([_last_response(state) for state in states], np.int64).reshape(-1, 2),
        {number: state.tls for number, state in enumerate(states) if state.tls is not None},
        joined_facts([state.tcp for state in states]),
    )


def _last_response(state: ConnectionState) -> tuple[int, int]:
    """End of the last response before the carried bytes: position in these, and time (ns)."""
    pos, time_ns = state.last_response
    if not state.is_resumed or pos == NO_RESPONSE:
        return NO_RESPONSE, NO_RESPONSE
    return pos - state.base[1 - state.client_side], time_ns


def _spoken(state: ConnectionState) -> int:
    """The known protocol of a connection. TLS that is not read is OTHER: the position of its next
    record is unknown."""
    if state.phase is OTHER:
        spoken = int(state.before["protocol"][0])
        return Spoken.OTHER if spoken in (Spoken.NONE, Spoken.KAFKA, Spoken.TLS) else spoken
    return Spoken.KAFKA if state.phase is KAFKA else Spoken.NONE


def _begins_anew(state: ConnectionState, segments: Any) -> int:
    """Index of the first of some segments that is not of the connection before; as `reassembly`
    decides it."""
    is_syn = (segments["flags"] & SYN) != 0
    side = segments["side"]
    number = (segments["seq"].astype(np.int64) + is_syn) & 0xFFFFFFFF
    begins = is_syn & (number != np.array(state.syn, np.int64)[side])
    last = np.array(state.seq, np.int64)[side]
    away = np.abs(((number - last + 0x80000000) & 0xFFFFFFFF) - 0x80000000)
    is_far = (away > FAR_ONCE_CLOSED) & (segments["length"] > 0) & (last != NO_NUMBER)
    begins |= ~is_syn & is_far & ((segments["flags"] & RST) == 0)
    return int(begins.argmax()) if begins.any() else len(segments)


def _without_copies(state: ConnectionState, segments: Any, rows: Ints) -> Ints:
    """Remove further copies of the SYNs that began the connection: their bytes are released."""
    some = segments[rows]
    begins = np.array(state.syn, np.int64)[some["side"]]
    number = (some["seq"].astype(np.int64) + 1) & 0xFFFFFFFF
    return rows[((some["flags"] & SYN) == 0) | (number != begins)]


def _openings(states: list[ConnectionState]) -> Any:
    """The SYNs that make the carried bytes of resumed connections begin at a known position."""
    made: list[tuple[int, int, int, int, int, int]] = []
    for number, state in enumerate(states):
        if not state.is_resumed:
            continue
        client = state.client_side
        for side in (client, 1 - client):
            if state.seq[side] != NO_NUMBER:
                acked = state.seq[client] if side != client else NO_NUMBER
                flags = SYN if acked == NO_NUMBER else SYN | ACK
                before = (state.seq[side] - 1) & 0xFFFFFFFF
                made.append((state.first_time, before, max(0, acked), number, flags, side))
    rows = np.zeros(len(made), SEGMENT)
    rows["ip_id"] = COUNTED_BEFORE
    for name, values in zip(OPENING, zip(*made, strict=True), strict=False):
        rows[name] = values
    return rows
