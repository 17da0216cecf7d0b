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

A window has four steps:

1. `ConnectionCarry`: which connections take part.
2. `AssembledWindow`: assemble carried and new segments; ids and counts are those of whole
   connections.
3. `Progress`: which bytes are settled, which exchanges are complete, where each stream resumes.
4. `next_state`: which state each connection has then, and which segments it carries.

An exchange is *complete* in these cases (`progress`):

- its frames are whole, and no later packet can change their bytes. It has both frames, or the other
  one cannot come: the request expects no response, or the request was not captured
- its response is lost: it would have been in missing bytes, and a later exchange is answered
- an exchange at least PASSED_MAX rows later is answered; until then its response may come out of
  order
- no more packets of it are read: the connection was closed a while ago, its endpoints were reused,
  or it was given up; `show` calls `finish` at the end of the capture

It is emitted once all exchanges before it are complete as well, so that each stream resumes at one
position. Bytes are final up to the first gap that may still be filled; `progress.Patience` says
how long that is.

A connection whose protocol is not known yet is carried whole, up to LOOKED_AT_MAX bytes. After that
it is followed for its counts, without carrying its bytes, until its next SYN. So Kafka traffic is
not found if so many bytes of something else come before it. A closed connection is followed in the
same way for a minute, once its exchanges are complete.

Kafka over TLS is carried as ciphertext, from the record with the first open frame on. The state
that `tls.session` needs to decrypt it is carried too; the secrets come from the key log each time.
A TLS connection without secrets is not read.

A connection is *given up* if its open exchanges are completed as they are. That happens in four
cases: it carries too many bytes when a window begins; it was idle for longest, and all together
exceed the limits; it would have to carry a message with secrets (`secret_apis`); or its TLS records
no longer decrypt. That last one is followed for its counts. Packets after any other make a new
connection, which is found from the middle on.

An anomaly of an exchange comes with the exchange. Any other one comes when the bytes at its place
are carried no more. A packet whose bytes come later than that is counted in `Counts.late`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kdissect.arrays import Ints, Rows, joined, take
from kdissect.capture.mapped_files import CARRIED_FROM, Sources
from kdissect.capture.segments import ACK, COUNTED_BEFORE, ENDPOINTS, SEGMENT, SYN, SegmentBatch
from kdissect.kafka.assembly import Assembly, Protocol
from kdissect.kafka.options import StreamOptions
from kdissect.kafka.pairing import CLOCKS_MAX_NS
from kdissect.resume.assembled_window import AssembledWindow
from kdissect.resume.next_state import final_anomalies, next_connections
from kdissect.resume.open_connection import (
    NEVER,
    NO_NUMBER,
    OpenConnection,
    is_resumed,
    new_connection,
    rows_of,
)
from kdissect.resume.progress import Patience, Progress

FINISHED_AT_ONCE = 64 << 20  # carried bytes that are worked on together at the end


@dataclass(frozen=True, slots=True)
class CarryLimits:
    """connection_max: connections of which something is known; carried_max: bytes carried of all,
    connection_bytes_max: of one."""

    connection_max: int = 16384
    carried_max: int = 256 << 20
    connection_bytes_max: int = 128 << 20


@dataclass(frozen=True, slots=True)
class CompletedExchanges:
    """assembly: the connections of a window, their complete exchanges, and the anomalies that no
    later packet changes. sources: where its extents are."""

    assembly: Assembly
    sources: Sources


@dataclass(slots=True)
class Counts:
    """What all windows so far have counted.

    kafka: connections that were recognised as Kafka's. unread: int64[len(Protocol)], the others by
    protocol. given_up: connections whose open exchanges were completed as they were, to make room
    or because a message with secrets must not be carried. limited: connections in which the search
    for Kafka ended. late: packets that came after their place was complete.
    """

    kafka: int = 0
    unread: Ints = field(default_factory=lambda: np.zeros(len(Protocol), np.int64))
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
        self, batch: SegmentBatch, sources: Sources, now: int | None = None
    ) -> CompletedExchanges:
        """The exchanges that new packets complete.

        sources: all captures; their bytes, as far as `batch` needs them. now: time in ns up to
        which packets have come (default: of the last one here).
        """
        if now is None:
            now = int(batch.segments["time_ns"].max(initial=0))
        due = {key for key, one in self._open.items() if one.row["due"][0] <= now}
        taken = self._taken(batch)
        forced = self._beyond_limits(taken.keys() | due)
        return self._advance(batch, sources, taken, due | forced, forced, now)

    def finish(self, sources: Sources) -> Iterator[CompletedExchanges]:
        """The open exchanges of all connections, once nothing more comes; in bounded memory."""
        waiting = [key for key, one in self._open.items() if one.protocol != Protocol.OTHER]
        while waiting:
            some: set[bytes] = set()
            size = 0
            while waiting and (not some or size < FINISHED_AT_ONCE):
                key = waiting.pop()
                some.add(key)
                size += self._open[key].size
            yield self._advance(SegmentBatch.concat([]), sources, {}, some, some, 0)

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
            if is_resumed(one.row)[0]:
                rows = self._without_earlier(one.row[0], segments, rows)
            self._open[key] = one
            if len(rows):
                taken[key] = rows
        return taken

    def _without_earlier(self, row: np.void, segments: Rows, rows: Ints) -> Ints:
        """Rows without further copies of the connection's SYNs, whose bytes are released, and
        without packets of an earlier connection, which only a late capture brings."""
        some = segments[rows]
        header = np.zeros(2, np.int64)
        header[row["earlier"]["client_side"]] = row["tcp"]["proxy_byte_count"]
        begin = (row["seq"] - row["base"] - header) & 0xFFFFFFFF
        number = (some["seq"].astype(np.int64) + 1) & 0xFFFFFFFF
        is_copy = (some["flags"] & SYN != 0) & (number == begin[some["side"]])
        is_copy &= row["seq"][some["side"]] != NO_NUMBER
        first_time = row["connection"]["first_time_ns"]
        # without late captures, an earlier time only shows that a clock stepped back
        is_earlier = some["time_ns"] < first_time - CLOCKS_MAX_NS
        is_earlier &= self.patience.is_for_late
        self.counts.late += int((is_earlier & (some["length"] > 0)).sum())
        return rows[~is_copy & ~is_earlier]

    def _beyond_limits(self, busy: Set[bytes]) -> set[bytes]:
        """Connections to be given up: those that carry too much, and if all together do, those that
        were idle for longest and are not `busy`."""
        limits = self.limits
        chosen = {key for key, one in self._open.items() if one.size > limits.connection_bytes_max}
        excess = len(self._open) - limits.connection_max
        if excess > 0:
            excess += limits.connection_max // 16  # not one at a time
        size = sum(one.size for one in self._open.values())
        for key, one in self._open.items():
            if excess <= 0 and size <= limits.carried_max:
                break
            if key not in busy:
                chosen.add(key)
                excess -= 1
                size -= one.size
        self.counts.given_up += sum(self._open[key].protocol != Protocol.OTHER for key in chosen)
        return chosen

    # -- a window's work --------------------------------------------------------------------

    def _advance(
        self,
        batch: SegmentBatch,
        sources: Sources,
        taken: dict[bytes, Ints],
        others: set[bytes],
        forced: set[bytes],
        now: int,
    ) -> CompletedExchanges:
        """others: connections that take part, also without new packets. forced: those that end
        here."""
        keys = [*taken, *(others - taken.keys())]
        connections = [self._open[key] for key in keys]
        batch, sources = _with_carried(batch, sources, connections, list(taken.values()))
        window = AssembledWindow(connections, batch, sources, self.options, self.key_logs)
        is_forced = np.array([key in forced for key in keys], np.bool_)[window.endpoints]
        progress = Progress(
            window, self.patience, now, is_forced, self.secret_apis, bool(self.key_logs)
        )
        self._count(window, progress)
        self._keep(keys, window, next_connections(window, progress, sources))
        assembly = replace(
            window.assembly,
            exchanges=take(window.assembly.exchanges, np.flatnonzero(progress.is_done)),
            anomalies=final_anomalies(window, progress),
        )
        return CompletedExchanges(assembly, sources.carrying(assembly.carried.data))

    def _count(self, window: AssembledWindow, progress: Progress) -> None:
        counts, was_unknown = self.counts, window.earlier_protocol == Protocol.NONE
        counts.kafka += int(
            (was_unknown & window.is_kafka & (progress.protocol != Protocol.NONE)).sum()
        )
        is_other = was_unknown & (progress.protocol == Protocol.OTHER) & ~window.is_kafka
        protocols = window.assembly.connections["protocol"][is_other]
        counts.unread += np.bincount(protocols, minlength=len(Protocol))
        counts.given_up += int(progress.has_secret.sum())
        counts.limited += int(progress.is_limited.sum())
        counts.late += _late_count(window)

    def _keep(
        self, keys: list[bytes], window: AssembledWindow, after: dict[int, OpenConnection]
    ) -> None:
        """Replace the connections by those after the window; what follows one that is gone is
        found from the middle on."""
        there = set(window.endpoints.tolist())
        for number, key in enumerate(keys):
            if number in after:
                self._open[key] = after[number]
            elif number in there:
                del self._open[key]
            else:  # it took part with neither new nor carried segments
                self._open[key].row["due"] = NEVER


def _with_carried(
    batch: SegmentBatch, sources: Sources, connections: list[OpenConnection], rows: list[Ints]
) -> tuple[SegmentBatch, Sources]:
    """(openings, carried segments and rows of the batch (of the first connections) together; the
    sources with the carried bytes)."""
    states = rows_of(connections)
    kept = joined([np.zeros(0, SEGMENT), *(one.segments for one in connections)])
    counts = [len(one.segments) for one in connections]
    sizes = np.array([one.size for one in connections], np.int64)
    start = CARRIED_FROM + len(sources.carried) + np.cumsum(sizes) - sizes
    kept["pos"] += np.repeat(start, counts)
    kept["endpoints"] = np.repeat(np.arange(len(connections)), counts)
    data = b"".join([sources.carried.tobytes(), *(one.data for one in connections)])
    new = take(batch.segments, np.sort(np.concatenate([np.zeros(0, np.int64), *rows])))
    number_of = np.zeros(len(batch.endpoints), np.int32)
    for number, some in enumerate(rows):
        number_of[batch.segments["endpoints"][some[0]]] = number
    new["endpoints"] = number_of[new["endpoints"]]
    order = np.lexsort((kept["packet"], kept["source"]))
    segments = joined([_openings(states), take(kept, order), new])
    together = SegmentBatch(states["endpoints"].copy(), segments)
    return together, sources.carrying(np.frombuffer(data, np.uint8))


def _openings(states: Rows) -> Rows:
    """The SYNs that make the carried bytes of resumed connections begin at a known position."""
    is_made = is_resumed(states)[:, None] & (states["seq"] != NO_NUMBER)
    number, side = np.nonzero(is_made)
    seq, peer = states["seq"][number, side], states["seq"][number, 1 - side]
    is_client = side == states["earlier"]["client_side"][number]
    made = np.zeros(len(number), SEGMENT)
    made["time_ns"] = states["connection"]["first_time_ns"][number]
    made["seq"], made["flags"] = (seq - 1) & 0xFFFFFFFF, SYN
    answers = ~is_client & (peer != NO_NUMBER)
    made["ack"][answers] = peer[answers]
    made["flags"][answers] |= ACK
    made["endpoints"], made["side"], made["marks"] = number, side, COUNTED_BEFORE
    return made[np.lexsort((~is_client, number))]


def _late_count(window: AssembledWindow) -> int:
    """Number of new packets with bytes before those that the streams begin with here, if such bytes
    were missing."""
    segments, resumed = window.streams.segments, is_resumed(window.before)
    start, connection = window.seq_of_start[window.segment_stream], window.segment_stream >> 1
    number = segments["seq"].astype(np.int64) + ((segments["flags"] & SYN) != 0)
    pos = ((number - start + 0x80000000) & 0xFFFFFFFF) - 0x80000000
    is_late = resumed[connection] & (segments["marks"] & COUNTED_BEFORE == 0)
    is_late &= (
        (window.streams.mark == 0) & (segments["length"] > 0) & (start != NO_NUMBER) & (pos < 0)
    )
    rows = np.flatnonzero(is_late)
    way = window.client_side[connection[rows]] ^ segments["side"][rows]
    missing = window.before["connection"]["direction"]["missing_byte_count"]
    was_missing = missing[connection[rows], way] > 0
    is_before_all = pos[rows] < -window.before["base"].reshape(-1)[window.segment_stream[rows]]
    return int((was_missing | is_before_all).sum())
