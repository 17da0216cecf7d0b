"""Connections carried from window to window: exchanges as soon as they are complete, in bounded
memory.

Theory of operation
-------------------
The steps of `assemble` see all segments of a connection at once. Here the segments come in windows:
parts of a capture for `show`, the new captures of a run for ``--append``, the new files of a
micro-batch for a stream. The segments from the first open frame on are *carried* to the next
window, with their bytes. The same kernels then run over the carried and the new segments together.
A made SYN marks the first carried byte (`_openings`), and `kafka.assemble.EarlierState` has the
facts that the kernels would have found in the bytes before. So the rows are those of `assemble`.

A window has four steps, each a function of the results before it:

1. `continued`: assemble carried and new segments; ids and counts are those of whole connections.
2. `continued` too: which bytes are settled, and which exchanges are complete.
3. `next_window`: where each stream resumes, which state each connection has then, and which
   segments it carries.
4. `ConnectionCarry` here: which connections take part, and what becomes of those beyond a limit.

An exchange is *complete* in three cases:

- both of its frames are whole and no later packet can change their bytes
- its request expects no response, and its frame is whole
- no more packets of it can come: the connection was closed a while ago, its endpoints were reused,
  the capture ended, or a limit was reached

It is emitted once all exchanges before it are complete as well, so that each stream resumes at one
position. Bytes are final up to the first hole that may still be filled; `continued.Patience` says
how long that is. A request without a response, while later ones have theirs, is complete after
PASSED_MAX responses to later requests: until then its response may come out of order.

A connection whose protocol is not known yet is carried whole. Detection runs again each time it
has grown by half, up to LOOKED_AT_MAX bytes. After that the connection is followed for its counts,
without carrying its bytes, until its next SYN. So Kafka traffic is not found if so many bytes of
something else come before it.

Kafka over TLS is carried as ciphertext, from the record with the first open frame on. The state
that `tls.session` needs to decrypt it is carried too; the secrets come from the key log each time.
A TLS connection without secrets is not read. One whose records no longer decrypt is given up.

If there are more connections than the limits allow, the one that was idle for longest is completed
as it is, and counted in `Counts.given_up`. An anomaly of an exchange comes with the exchange. Any
other one comes when the bytes at its place are carried no more. A packet whose bytes come later
than that is counted in `Counts.late`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

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
from kdissect.kafka.assembly import Assembly
from kdissect.kafka.assembly import Protocol as Spoken
from kdissect.kafka.options import StreamOptions
from kdissect.kafka.pairing import CLOCKS_MAX_NS
from kdissect.resume.continued import (
    Bools,
    Continued,
    Patience,
    complete,
    continued,
    settled,
)
from kdissect.resume.next_window import (
    CarryLimits,
    carried_segments,
    final_anomalies,
    is_cut_short,
    must_end,
    next_connections,
    next_rows,
    payload,
    phases,
    resumption,
)
from kdissect.resume.open_connection import (
    NEVER,
    NO_NUMBER,
    Ints,
    OpenConnection,
    Phase,
    Rows,
    is_resumed,
    new_connection,
    rows_of,
)
from kdissect.tcp.reassembly import FAR_ONCE_CLOSED

FINISHED_AT_ONCE = 64 << 20  # carried bytes that are worked on together at the end


class SegmentWindow(Protocol):
    """Segments, and room for carried bytes: `hold` says at which position they are then."""

    @property
    def batch(self) -> SegmentBatch: ...

    def hold(self, data: bytes) -> int: ...

    def sources(self, paths: list[str]) -> Sources: ...


@dataclass(frozen=True, slots=True)
class CompletedExchanges:
    """rows: the complete exchanges of `assembly`. sources: where its extents are, except those of
    the bytes that it carries itself. The anomalies of `assembly` are those that no later packet
    changes. is_open: by connection, whether it goes on after the window."""

    assembly: Assembly
    sources: Sources
    rows: Ints
    is_open: Bools


@dataclass(slots=True)
class Counts:
    """What all windows so far have counted.

    kafka: connections that were recognised as Kafka's. unread: int64[len(Spoken)], the others by
    protocol. given_up: connections whose open exchanges were completed as they were, to make room
    or because a message with secrets must not be carried. limited: connections in which the search
    for Kafka ended. late: packets that came after their place was complete.
    """

    kafka: int = 0
    unread: Ints = field(default_factory=lambda: np.zeros(len(Spoken), np.int64))
    given_up: int = 0
    limited: int = 0
    late: int = 0


class ConnectionCarry:
    """The connections of a run between its windows."""

    def __init__(
        self,
        options: StreamOptions,
        key_logs: Sequence[Any] = (),
        limits: CarryLimits | None = None,
        patience: Patience | None = None,
        connections: Iterable[OpenConnection] = (),
        secret_apis: Set[int] = frozenset(),
    ) -> None:
        """secret_apis: keys of APIs whose messages are not carried; their connections end."""
        self.options = options
        self.key_logs: list[Any] = list(key_logs)
        self.limits, self.patience = limits or CarryLimits(), patience or Patience()
        self.secret_apis = secret_apis
        self.counts = Counts()
        # by endpoints; the one that was quiet for longest comes first
        self._open = {one.row["endpoints"].tobytes(): one for one in connections}

    def connections(self) -> list[OpenConnection]:
        """All of them, to be saved."""
        return list(self._open.values())

    def add(
        self, window: SegmentWindow, paths: list[str], now: int | None = None
    ) -> CompletedExchanges | None:
        """The exchanges that the window's packets complete; None if they can complete none.

        paths: of all captures. now: time in ns up to which packets have come (default: of the
        window's last one).
        """
        if now is None:
            now = int(window.batch.segments["time_ns"].max(initial=0))
        due = {key for key, one in self._open.items() if one.row["due"][0] <= now}
        taken, sources = self._taken(window.batch), window.sources(paths)
        for key in due - taken.keys():
            if self._open[key].phase is Phase.OVER:
                del self._open[key]
                due.remove(key)
        for key in list(taken):
            some = window.batch.segments[taken[key]]
            waiting = None if key in due else _still_waiting(self._open[key], some, sources)
            if waiting is not None:
                self._open[key] = waiting
                del taken[key]
        forced = self._beyond_limits(taken.keys() | due)
        if not (taken or due or forced):
            return None
        return self._advance(window, paths, taken, due | forced, forced, now)

    def finish(self, window: Window, paths: list[str]) -> Iterator[CompletedExchanges]:
        """The open exchanges of all connections, once nothing more comes; in bounded memory.

        window: the last one; its buffer is used again.
        """
        waiting = [key for key, one in self._open.items() if one.segments]
        empty = Window(window.batch, window.buffer, 0, [])
        while waiting:
            some: set[bytes] = set()
            size = 0
            while waiting and (not some or size < FINISHED_AT_ONCE):
                key = waiting.pop()
                some.add(key)
                size += self._open[key].size
            empty.used = 0
            yield self._advance(empty, paths, {}, some, some, 0)

    # -- what takes part --------------------------------------------------------------------

    def _taken(self, batch: SegmentBatch) -> dict[bytes, Ints]:
        """Rows of the segments by connection, without those that come too late."""
        segments = batch.segments
        if not len(segments):
            return {}
        raw = batch.endpoints.tobytes()
        pairs = segments["endpoints"]
        order = np.argsort(pairs, kind="stable")
        starts = np.flatnonzero(np.diff(pairs[order], prepend=-1))
        taken = {}
        for pair, rows in zip(
            pairs[order[starts]].tolist(), np.split(order, starts[1:]), strict=True
        ):
            key = raw[pair * ENDPOINTS.itemsize : (pair + 1) * ENDPOINTS.itemsize]
            one = self._open.pop(key, None) or new_connection(key)
            count = len(rows)
            if one.phase is Phase.OVER:
                rows = rows[_begins_anew(one.row[0], segments[rows]) :]
                if len(rows):
                    one = new_connection(key, int(one.row["incarnation"][0]) + 1)
                self.counts.late += count - len(rows)
            elif is_resumed(one.row)[0]:
                rows = self._without_earlier(one.row[0], segments, rows)
            self._open[key] = one
            if len(rows):
                taken[key] = rows
        return taken

    def _without_earlier(self, row: np.void, segments: npt.NDArray[np.void], rows: Ints) -> Ints:
        """Rows without further copies of the connection's SYNs, whose bytes are released, and
        without packets of an earlier connection."""
        some = segments[rows]
        number = (some["seq"].astype(np.int64) + 1) & 0xFFFFFFFF
        is_copy = (some["flags"] & SYN != 0) & (number == _begin(row)[some["side"]])
        first_time = row["connection"]["first_time_ns"]
        is_earlier = some["time_ns"] < first_time - CLOCKS_MAX_NS
        self.counts.late += int((is_earlier & (some["length"] > 0)).sum())
        return rows[~is_copy & ~is_earlier]

    def _beyond_limits(self, busy: Set[bytes]) -> set[bytes]:
        """Connections to be given up, the quietest ones first, but none of the `busy` ones.

        Those without an open exchange are forgotten here.
        """
        limits = self.limits
        excess = len(self._open) - limits.connection_max
        size = sum(one.size for one in self._open.values())
        if excess > 0:
            excess += limits.connection_max // 16  # not one at a time
        chosen: set[bytes] = set()
        if excess > 0 or size > limits.carried_max:
            for key, one in list(self._open.items()):
                if excess <= 0 and size <= limits.carried_max:
                    break
                if key in busy:
                    continue
                excess -= 1
                size -= one.size
                if one.row["exchange_count"][0]:
                    chosen.add(key)
                else:
                    del self._open[key]
        else:
            most = limits.connection_bytes_max
            chosen = {key for key, one in self._open.items() if one.size > most}
        self.counts.given_up += len(chosen)
        return chosen

    # -- a window's work --------------------------------------------------------------------

    def _advance(
        self, window: SegmentWindow, paths: list[str], taken: dict[bytes, Ints],
        others: set[bytes], forced: set[bytes], now: int,
    ) -> CompletedExchanges:  # fmt: skip
        """others: connections that take part, also without new packets. forced: those that end
        here."""
        keys = [*taken, *(others - taken.keys())]
        connections = [self._open[key] for key in keys]
        batch = _batch(window, connections, list(taken.values()))
        sources = window.sources(paths)
        c = continued(connections, batch, sources, self.options, self.key_logs)
        is_forced = np.array([key in forced for key in keys], np.bool_)[c.pair]
        closed_ns = self.patience.closed_ns
        is_over = ~c.is_last | is_forced | (c.is_closed & (c.last_time + closed_ns <= now))
        ready = settled(c, self.patience, now)
        done = complete(c, ready, is_over)
        at = resumption(c, ready, done)
        is_cut = must_end(c, at, done, self.limits, self.secret_apis) & ~is_over
        if is_cut.any():
            is_over |= is_cut
            done = complete(c, ready, is_over)
            at = resumption(c, ready, done)
        phase = phases(c, done.is_confirmed, is_over, bool(self.key_logs))
        self._count(c, phase, is_cut)
        rows = next_rows(c, at, ready, done, phase, closed_ns)
        kept, data = carried_segments(c, at, ready, phase, sources)
        self._keep(keys, c, next_connections(c, rows, at, kept, data), is_forced | is_cut)
        assembly = replace(c.assembly, anomalies=final_anomalies(c, phase, at.carried, done))
        is_open = c.is_last & ~is_over
        return CompletedExchanges(assembly, sources, np.flatnonzero(done.is_done), is_open)

    def _count(self, c: Continued, phase: Ints, is_cut: Bools) -> None:
        counts, was_unknown = self.counts, c.before["phase"] == Phase.LOOKING
        counts.kafka += int((was_unknown & (phase == Phase.KAFKA) & c.is_last).sum())
        is_other = was_unknown & (phase != Phase.LOOKING) & (phase != Phase.KAFKA) & ~c.is_kafka
        protocols = c.assembly.connections["protocol"][is_other]
        counts.unread += np.bincount(protocols, minlength=len(Spoken))
        counts.given_up += int(is_cut.sum())
        counts.limited += int(is_cut_short(c, phase).sum())
        counts.late += _late_count(c)

    def _keep(
        self, keys: list[bytes], c: Continued, connections: list[OpenConnection], is_gone: Bools
    ) -> None:
        """Replace the connections by those after the window; what follows one that is gone is
        found from the middle on."""
        last = np.flatnonzero(c.is_last)
        after = dict(zip(c.pair[last].tolist(), connections, strict=True))
        gone = set(c.pair[last[is_gone[last]]].tolist())
        for number, key in enumerate(keys):
            if number in gone:
                del self._open[key]
            elif number in after:
                self._open[key] = after[number]
            else:  # it took part with neither new nor carried segments
                self._open[key].row["due"] = NEVER


def _batch(
    window: SegmentWindow, connections: list[OpenConnection], rows: list[Ints]
) -> SegmentBatch:
    """Openings, carried segments and the window's rows (of the first connections) together."""
    states = rows_of(connections)
    parts = [_openings(states)]
    carried = b"".join(one.segments for one in connections)
    if carried:
        start = window.hold(b"".join(one.data for one in connections))
        kept = np.frombuffer(carried, SEGMENT).copy()
        counts = [len(one.segments) // SEGMENT.itemsize for one in connections]
        sizes = np.array([one.size for one in connections], np.int64)
        kept["pos"] += np.repeat(start + np.cumsum(sizes) - sizes, counts)
        kept["endpoints"] = np.repeat(np.arange(len(connections)), counts)
        parts.append(kept[np.lexsort((kept["packet"], kept["source"]))])
    if rows:
        new = window.batch.segments[np.sort(np.concatenate(rows))]
        number_of = np.zeros(len(window.batch.endpoints), np.int32)
        for number, some in enumerate(rows):
            number_of[window.batch.segments["endpoints"][some[0]]] = number
        new["endpoints"] = number_of[new["endpoints"]]
        parts.append(new)
    return SegmentBatch(states["endpoints"].copy(), np.concatenate(parts))


def _openings(states: Rows) -> npt.NDArray[np.void]:
    """The SYNs that make the carried bytes of resumed connections begin at a known position."""
    made = []
    client = states["earlier"]["client_side"].astype(np.int64)
    for number in np.flatnonzero(is_resumed(states)).tolist():
        seq = states["seq"][number].tolist()
        for side in (client[number], 1 - client[number]):
            if seq[side] == NO_NUMBER:
                continue
            row = np.zeros(1, SEGMENT)
            row["time_ns"] = states["connection"]["first_time_ns"][number]
            row["seq"], row["flags"] = (seq[side] - 1) & 0xFFFFFFFF, SYN
            if side != client[number] and seq[1 - side] != NO_NUMBER:
                row["ack"], row["flags"] = seq[1 - side], SYN | ACK
            row["endpoints"], row["side"], row["ip_id"] = number, side, COUNTED_BEFORE
            made.append(row)
    return np.concatenate([np.zeros(0, SEGMENT), *made])


def _still_waiting(
    one: OpenConnection, segments: npt.NDArray[np.void], sources: Sources
) -> OpenConnection | None:
    """The connection with these segments, if they cannot complete anything yet."""
    if (segments["flags"] & (SYN | FIN | RST)).any():
        return None
    sizes = np.bincount(segments["side"], segments["captured"], 2).astype(np.int64).tolist()
    enough = one.enough[0] - sizes[0], one.enough[1] - sizes[1]
    if min(enough) <= 0:
        return None
    captured = segments["captured"].astype(np.int64)
    data = payload(segments, sources)
    segments["pos"] = one.size + np.cumsum(captured) - captured
    one.segments.extend(segments.tobytes())
    one.data.extend(data.data)
    return replace(one, enough=enough)


def _begins_anew(row: np.void, segments: npt.NDArray[np.void]) -> int:
    """Index of the first segment that is not of the connection before, which is over; as
    `reassembly` decides it."""
    is_syn = (segments["flags"] & SYN) != 0
    number = (segments["seq"].astype(np.int64) + is_syn) & 0xFFFFFFFF
    begins = is_syn & (number != _begin(row)[segments["side"]])
    last = row["seq"][segments["side"]]
    away = np.abs(((number - last + 0x80000000) & 0xFFFFFFFF) - 0x80000000)
    is_far = (away > FAR_ONCE_CLOSED) & (segments["length"] > 0) & (last != NO_NUMBER)
    begins |= ~is_syn & is_far & ((segments["flags"] & RST) == 0)
    return int(begins.argmax()) if begins.any() else len(segments)


def _begin(row: np.void) -> Ints:
    """int64[2]: sequence number of the first byte of a connection's streams; -1 if unknown."""
    header = np.zeros(2, np.int64)
    header[row["earlier"]["client_side"]] = row["tcp"]["proxy_byte_count"]
    begin = (row["seq"] - row["base"] - header) & 0xFFFFFFFF
    return np.where(row["seq"] == NO_NUMBER, NO_NUMBER, begin)


def _late_count(c: Continued) -> int:
    """Number of new packets with bytes before those that the streams begin with here, if such bytes
    were missing."""
    segments, resumed = c.streams.segments, is_resumed(c.before)
    start, connection = c.seq_of_start[c.stream], c.stream >> 1
    number = segments["seq"].astype(np.int64) + ((segments["flags"] & SYN) != 0)
    pos = ((number - start + 0x80000000) & 0xFFFFFFFF) - 0x80000000
    is_late = resumed[connection] & (segments["ip_id"] & COUNTED_BEFORE == 0)
    is_late &= (c.streams.mark == 0) & (segments["length"] > 0) & (start != NO_NUMBER) & (pos < 0)
    rows = np.flatnonzero(is_late)
    way = c.client[connection[rows]] ^ segments["side"][rows]
    missing = c.before["connection"]["direction"]["missing_byte_count"]
    was_missing = missing[connection[rows], way] > 0
    is_before_all = pos[rows] < -c.before["base"].reshape(-1)[c.stream[rows]]
    return int((was_missing | is_before_all).sum())


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
