"""Rows of a table set that a later packet may change, and the counts that a later run adds to.

A connection that continues carries the segments from its open frames on. Assembled by themselves,
they make exactly the counts and anomalies that the next run makes of them again. So those anomalies
are open, and the connection's other counts are those of the bytes before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import SEGMENT, SYN
from kdissect.kafka.assembly import ANOMALY, DIRECTION, INFO, NO_DIRECTION, WARNING
from kdissect.kafka.assembly import Anomaly as Kind
from kdissect.protocol.model import REQUEST, SIDES
from kdissect.resume.completion import Bools, CompletionTracker
from kdissect.resume.connection_state import KAFKA, NO_NUMBER, OTHER, OVER, ConnectionState, Ints
from kdissect.tcp.connection_ids import mixed

BLANK = 0xFF  # reads as no request: its api key is none
WITHOUT_SECRETS = 2  # `b` of a CARRY_LIMIT: this run has no secrets of a connection over TLS
RESPONSE_HEAD = 9  # size, correlation id, and a byte that a search for responses looks at


@dataclass(frozen=True, slots=True)
class OpenRows:
    """exchanges: rows of the assembly's; connections, anomalies: bool by row."""

    exchanges: Ints
    connections: Bools
    anomalies: Bools


def open_rows(tracker: CompletionTracker, again: CompletionTracker | None) -> OpenRows:
    """The open rows of a window. again: the carried segments, assembled by themselves."""
    is_ignored = np.array([state.phase is OVER for state in tracker.states], np.bool_)
    is_open = tracker.is_last & ~tracker.is_over & ~is_ignored[tracker.pair]
    of = tracker.assembly.anomalies["connection"]
    is_resumed = np.array([state.is_resumed for state in tracker.states], np.bool_)[tracker.pair]
    anomalies = (is_open & ~is_resumed)[of]
    if again is not None:
        anomalies |= (is_open & is_resumed)[of] & np.isin(digests(tracker), digests(again))
    return OpenRows(tracker.open_rows, is_open, anomalies)


def count_before(tracker: CompletionTracker, again: CompletionTracker | None) -> None:
    """Set `before` of the states: counts without those that the carried segments make again."""
    connections = tracker.assembly.connections
    counted = np.zeros((len(tracker.states), 2), DIRECTION)
    if again is not None:
        some = np.flatnonzero(again.is_first)
        state_of = {id(state): number for number, state in enumerate(tracker.states)}
        number = [state_of[id(state)] for state in again.states]
        counted[np.array(number, np.int64)[again.pair[some]]] = again.counted[some]
    for connection in np.flatnonzero(tracker.is_last).tolist():
        pair = int(tracker.pair[connection])
        state = tracker.states[pair]
        if state.phase is OVER:
            continue
        row = connections[connection : connection + 1].copy()
        for name in DIRECTION.names or ():
            left = row["direction"][name][0] - counted[name][pair]
            if not state.is_resumed and name != "duplicate_segment_count":
                left[:] = 0  # all is carried, except second copies
            row["direction"][name][0] = left
        state.before = row


def digests(tracker: CompletionTracker) -> Ints:
    """int64[n]: a hash of each anomaly, without its references."""
    anomalies = tracker.assembly.anomalies
    ids = tracker.assembly.connections["connection_id"][anomalies["connection"]]
    state = ids.astype(np.uint64)
    for name in ANOMALY.names or ():
        if name not in ("connection", "extent_start", "extent_count"):
            state = mixed(state, anomalies[name].astype(np.int64))
    return state.view(np.int64)


# -- late packets and limits ----------------------------------------------------------------


def late_and_limited(tracker: CompletionTracker) -> Any:
    """ANOMALY rows of packets whose exchanges were complete already, and of connections that
    continue after a limit or without TLS secrets. To be called before the states are updated."""
    assert tracker.set_run is not None
    segments, stream = tracker.streams.segments, tracker.stream
    connection = tracker.streams.connection.astype(np.int64)
    is_new = segments["source"] >= tracker.set_run.source_count
    is_resumed = (tracker.phase == KAFKA) | (tracker.phase == OTHER)
    number = segments["seq"].astype(np.int64) + ((segments["flags"] & SYN) != 0)
    start = tracker.seq_of_start[stream]
    pos = ((number - start + 0x80000000) & 0xFFFFFFFF) - 0x80000000
    is_early = is_new & is_resumed[connection] & (tracker.streams.mark == 0) & (pos < 0)
    is_early &= (segments["length"] > 0) & (start != NO_NUMBER)
    rows = np.flatnonzero(is_early)
    made: list[Any] = []
    if len(rows):  # bytes that came before change nothing, unless they were missing
        missing = np.array([state.before["direction"]["missing_byte_count"][0]
                            for state in tracker.states])  # fmt: skip
        of, side = connection[rows], segments["side"][rows].astype(np.int64)
        way = tracker.client[of] ^ side
        is_late = missing[tracker.pair[of], way] > 0
        is_late |= pos[rows] < -tracker.base[stream[rows]]
        rows, way = rows[is_late], way[is_late]
        _, first, number = np.unique(stream[rows], return_index=True, return_inverse=True)
        late = np.zeros(len(first), ANOMALY)
        late["kind"], late["severity"] = Kind.LATE_PACKETS, WARNING
        late["direction"], late["connection"] = way[first], connection[rows[first]]
        late["source"], late["packet"] = (
            segments[name][rows[first]] for name in ("source", "packet")
        )
        late["pos"] = -1
        late["a"] = np.bincount(number, minlength=len(first))
        late["byte_count"] = np.bincount(number, segments["length"][rows], len(first))
        made.append(late)
    limited: list[tuple[int, int, int]] = []
    for row in np.unique(connection[is_new]).tolist():
        state = tracker.states[tracker.pair[row]]
        if tracker.is_first[row] and state.limited_count:
            limited.append((row, state.limited_count, int(state.phase is OTHER)))
            state.limited_count = 0
    is_without_secrets = tracker.is_first & (tracker.phase == KAFKA) & ~tracker.is_kafka
    for row in np.flatnonzero(is_without_secrets).tolist():
        limited.append((row, tracker.states[tracker.pair[row]].open_count, WITHOUT_SECRETS))
    if limited:
        ended = np.zeros(len(limited), ANOMALY)
        ended["kind"], ended["severity"], ended["direction"] = Kind.CARRY_LIMIT, INFO, NO_DIRECTION
        for name in ("source", "packet", "pos"):
            ended[name] = -1
        for name, values in zip(("connection", "a", "b"), zip(*limited, strict=True), strict=True):
            ended[name] = values
        made.append(ended)
    return np.concatenate([np.zeros(0, ANOMALY), *made])


# -- secrets --------------------------------------------------------------------------------


def blank_secrets(tracker: CompletionTracker, sources: Sources) -> bool:
    """Overwrite carried messages with secrets that are complete. True if one is not complete."""
    assert tracker.set_run is not None
    secret_apis = tracker.set_run.secret_apis
    exchanges = tracker.assembly.exchanges
    is_secret = np.isin(exchanges["api_key"], list(secret_apis))
    is_secret |= (exchanges["is_sasl_token"] != 0) & bool(secret_apis)
    is_kept = (
        (tracker.is_last & ~tracker.is_over)[tracker.of] & is_secret & ~(tracker.is_tls[tracker.of])
    )
    some = np.flatnonzero(is_kept & tracker.is_done)
    for connection in np.unique(tracker.of[some]).tolist():
        state = tracker.states[tracker.pair[connection]]
        if state.parts:
            rows = some[tracker.of[some] == connection]
            _blank(tracker, sources, state, connection, rows)
    return bool((is_kept & ~tracker.is_done).any())


def _blank(
    tracker: CompletionTracker, sources: Sources, state: ConnectionState, connection: int,
    rows: Ints,
) -> None:  # fmt: skip
    packed, data = state.parts[0]
    segments = np.frombuffer(packed, SEGMENT)
    stream = 2 * connection + segments["side"].astype(np.int64)
    number = segments["seq"].astype(np.int64) + ((segments["flags"] & SYN) != 0)
    start = ((number - tracker.seq_of_start[stream] + 0x80000000) & 0xFFFFFFFF) - 0x80000000
    blanked = bytearray(data)
    for way, name in enumerate(SIDES):
        segment_rows = np.flatnonzero(stream == tracker.stream_of[way][connection])
        for row in rows[tracker.has[way][rows]].tolist():
            exchange = tracker.assembly.exchanges[row]
            low = int(tracker.pos[way][row]) + RESPONSE_HEAD
            if exchange["is_sasl_token"]:
                low = int(tracker.pos[way][row]) + 4
            elif way == REQUEST:
                first = int(exchange[name]["extent_start"])
                extents = tracker.assembly.extents[
                    first : first + int(exchange[name]["extent_count"])
                ]
                size = int.from_bytes(sources.gather(extents)[8:10].tobytes(), "big", signed=True)
                low = int(tracker.pos[way][row]) + 14 + max(0, size)
            high = int(tracker.end[way][row])
            for at in segment_rows[
                (start[segment_rows] < high)
                & (start[segment_rows] + segments["captured"][segment_rows] > low)
            ]:
                pos, begin = int(segments["pos"][at]), int(start[at])
                a = max(0, low - begin)
                b = max(a, min(int(segments["captured"][at]), high - begin))
                blanked[pos + a : pos + b] = bytes([BLANK]) * (b - a)
    state.parts[0] = packed, bytes(blanked)
