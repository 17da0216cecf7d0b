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
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import ACK, ENDPOINTS, FIN, RST, SEGMENT, SYN, SegmentBatch
from kdissect.capture.windows import Window, WindowSources
from kdissect.kafka.assemble import Known, assemble_streams
from kdissect.kafka.assembly import Assembly
from kdissect.kafka.framing import LAST_ID
from kdissect.kafka.options import StreamOptions
from kdissect.resume.completion import Settling
from kdissect.resume.connection_state import (
    FINISHED_AT_ONCE,
    KAFKA,
    LEFT,
    LINGER_NS,
    LOOKED_AT_SMALL,
    NO_NUMBER,
    OPENING,
    CarryLimits,
    Flow,
    Ints,
)


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
        self._flows: dict[bytes, Flow] = {}  # the one that was quiet for longest comes first
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
                flow = Flow(key)
            self._flows[key] = flow
            if flow.state is LEFT:
                begins = np.flatnonzero(segments["flags"][rows] & SYN)
                if not len(begins):
                    continue
                rows = rows[int(begins[0]) :]
                flow = self._flows[key] = Flow(key, incarnation=flow.incarnation + 1)
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

    def _waits(self, flow: Flow, sizes: tuple[int, int]) -> bool:
        """Whether so many more bytes of both sides cannot finish anything yet."""
        if flow.needed > 0:
            side = flow.needed_side
            flow.needed -= sizes[side]
            return flow.needed > 0 and sizes[1 - side] == 0
        grown = 2 * (flow.size + sum(sizes)) >= 3 * flow.looked_at
        return flow.state is not KAFKA and flow.looked_at > LOOKED_AT_SMALL and not grown

    def _defer(self, flow: Flow, window: Window, rows: Ints) -> None:
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
            np.repeat(np.arange(len(flows)), [len(flow.gone) for flow in flows]),
            np.concatenate([flow.gone - flow.base[flow.client_side] for flow in flows]),
        )
        assembly, streams, lost = assemble_streams(
            batch, sources, self.options, self.key_logs, known
        )
        settling = Settling(
            assembly,
            streams,
            lost,
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

    def _batch(self, window: Window, flows: list[Flow], rows: list[Ints]) -> SegmentBatch:
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


def _without_copies(flow: Flow, segments: Any, rows: Ints) -> Ints:
    """Without further copies of the SYNs that began the connection, whose bytes are gone."""
    some = segments[rows]
    begins = np.array(flow.syn, np.int64)[some["side"]]
    number = (some["seq"].astype(np.int64) + 1) & 0xFFFFFFFF
    return rows[((some["flags"] & SYN) == 0) | (number != begins)]


def _openings(flows: list[Flow]) -> Any:
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
