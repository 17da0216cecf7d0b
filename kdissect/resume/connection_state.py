"""The state of a connection between two windows: its facts, and the bytes of its open frames.

A state is a Python object while windows are read. `pack_states` makes bytes of many, which a table
set keeps for a later append. They hold captured payload: of TLS its ciphertext, never a secret.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kdissect.capture.segments import ENDPOINTS, SEGMENT
from kdissect.kafka.assembly import CONNECTION
from kdissect.kafka.exchanges import NO_RESPONSE
from kdissect.tcp.facts import CONNECTION_FACTS, RTT_COUNT, SIDE_FACTS, TcpFacts, no_facts
from kdissect.tls.session import TlsState

Ints = npt.NDArray[np.int64]

_SECOND_NS = 1_000_000_000
HOLE_NS = 3 * _SECOND_NS  # a lost segment comes again within a few round trips, or seldom
HOLE_ACKED_NS = 10_000_000  # packets may be captured a little after their acknowledgement
HOLE_BYTES = 4 << 20  # of data after a hole: a window that large is hardly ever open
LINGER_NS = _SECOND_NS  # after a FIN or RST segments may still be on their way
LOOKED_AT_MAX = 256 << 10  # bytes of a connection in which nothing was recognised
TLS_HANDSHAKE_BYTES = 64 << 10  # in which both sides have said hello and shown certificates
TAIL_KEPT = 64 << 10  # bytes in no frame, of `tail_max`, that a search goes over again
DEFERRED_MIN = 256 << 10  # of a frame that are missing, so that the connection waits for them
CONFIRMING_BYTES = 8  # bytes that must follow a response whose request was not seen

HOLE_ACKED_BYTES = 64 << 10
LOOKED_AT_SMALL = 16 << 10  # up to here every new byte is looked at
CONFIRMED_BY = 3  # exchanges without an answer that make a connection Kafka's
FINISHED_AT_ONCE = 64 << 20  # carried bytes that are worked on together at the end

NO_NUMBER = -1  # sequence number that is not known
NO_IDS = np.zeros(0, np.int64)
NOTHING, WHOLE, REST = 0, 1, 2  # which part of a connection is carried


@dataclass(frozen=True, slots=True)
class CarryLimits:
    """connection_max: connections of which something is known; carried_max: bytes carried of all,
    connection_bytes_max: of one. passed_max: answers to later requests after which a request is
    complete without one. outstanding_max: requests of a connection that wait for an answer;
    outstanding_one_way_max: the same if the other direction was not captured. tail_max: bytes in
    no frame that are searched again."""

    connection_max: int = 16384
    carried_max: int = 256 << 20
    connection_bytes_max: int = 128 << 20
    passed_max: int = 64
    outstanding_max: int = 4096
    outstanding_one_way_max: int = 64
    tail_max: int = 1 << 20


# Limits of a table set: its rows are read later, so nothing hurries.
SET_LIMITS = CarryLimits(passed_max=4096, outstanding_one_way_max=4096, tail_max=64 << 20)


class Phase(IntEnum):
    """Of a connection between windows."""

    LOOKING = 0  # not recognised yet: all of it is carried
    KAFKA = 1  # in clear, or decrypted
    OVER = 2  # closed, or not of interest: nothing is carried, a SYN begins anew
    OTHER = 3  # not Kafka: its segments are counted, for `connections`


LOOKING, KAFKA, OVER, OTHER = PHASES = tuple(Phase)
OPENING = ("time_ns", "seq", "ack", "endpoints", "flags", "side")  # fields of the SYNs we make


def no_counts() -> npt.NDArray[np.void]:
    """CONNECTION[1] before the first segment."""
    row = np.zeros(1, CONNECTION)
    row["handshake_rtt_ns"] = -1
    return row


@dataclass(slots=True)
class ConnectionState:
    """A connection between windows; lists of two are by side.

    base: stream position of the first carried byte.
    seq: sequence number of the first carried byte.
    syn: sequence number of stream position 0, if a SYN was captured.
    certain: whether a frame begins with the first carried byte.
    last_response: stream position and time (ns) of the end of the last response before the carried
    bytes.
    parts: carried segments (packed SEGMENT) and their bytes; `pos` is a position in these bytes.
    emitted_ids: ids of exchanges that were emitted, while some of their bytes are still carried.
    closed_request_positions: stream positions of those requests among them that can get no response
    any more.
    tls: state that decrypts the carried bytes of Kafka over TLS; these begin at a TLS record.
    tcp: facts of all segments so far.

    before: CONNECTION[1], the counts without those of the carried bytes.
    last_packets: source and packet of the last byte of each side.
    """

    endpoints: bytes
    phase: Phase = LOOKING
    incarnation: int = 0
    first_time: int = 2**63 - 1
    last_time: int = -(2**63)
    client_side: int = 0
    base: list[int] = field(default_factory=lambda: [0, 0])
    seq: list[int] = field(default_factory=lambda: [NO_NUMBER, NO_NUMBER])
    syn: list[int] = field(default_factory=lambda: [NO_NUMBER, NO_NUMBER])
    certain: list[bool] = field(default_factory=lambda: [False, False])
    bits: list[int] = field(default_factory=lambda: [0, 0])
    last_packets: list[list[int]] = field(default_factory=lambda: [[-1, -1], [-1, -1]])
    last_ids: list[int] = field(default_factory=lambda: [NO_NUMBER, NO_NUMBER])
    last_response: list[int] = field(default_factory=lambda: [NO_RESPONSE, NO_RESPONSE])
    parts: list[tuple[bytes, bytes]] = field(default_factory=list)
    size: int = 0
    looked_at: int = 0
    needed: int = 0  # bytes of side `needed_side` that the open frame still needs
    needed_side: int = 0
    emitted_ids: Ints = field(default_factory=lambda: NO_IDS)
    closed_request_positions: Ints = field(default_factory=lambda: NO_IDS)
    open_count: int = 0  # exchanges begun
    has_loss: bool = False  # bytes of its responses are missing
    is_closed: bool = False
    before: npt.NDArray[np.void] = field(default_factory=no_counts)
    tls: TlsState | None = None
    tcp: TcpFacts = field(default_factory=lambda: no_facts(1))

    @property
    def is_resumed(self) -> bool:
        """Return whether a made SYN marks the first carried byte."""
        return self.phase is KAFKA or self.phase is OTHER

    def carry(self, segments: bytes, data: bytes) -> None:
        """Add SEGMENT rows, packed, and their bytes."""
        self.parts.append((segments, data))
        self.size += len(data)


# -- as bytes -------------------------------------------------------------------------------

# A state but for its carried bytes, ids and facts, of which it has so many.
_ROW = np.dtype(
    [
        ("endpoints", ENDPOINTS),
        ("phase", "u1"),
        ("client_side", "u1"),
        ("has_loss", "u1"),
        ("is_closed", "u1"),
        ("certain", "u1", (2,)),
        ("incarnation", "<i4"),
        ("open_count", "<i8"),
        ("first_time", "<i8"),
        ("last_time", "<i8"),
        ("base", "<i8", (2,)),
        ("seq", "<i8", (2,)),
        ("syn", "<i8", (2,)),
        ("bits", "<i8", (2,)),
        ("last_ids", "<i8", (2,)),
        ("last_response", "<i8", (2,)),
        ("last_packets", "<i8", (2, 2)),
        ("before", CONNECTION),
        ("tcp", CONNECTION_FACTS),
        ("tcp_sides", SIDE_FACTS, (2,)),
        ("segment_count", "<i8"),
        ("byte_count", "<i8"),
        ("emitted_count", "<i8"),
        ("closed_count", "<i8"),
        ("rtt_count", "<i8"),
    ]
)
_AS_THEY_ARE = ("client_side", "incarnation", "open_count", "first_time",
                "last_time", "base", "seq", "syn", "bits", "last_ids", "last_response",
                "last_packets")  # fmt: skip


def pack_states(states: Sequence[ConnectionState]) -> bytes:
    """States as bytes, for `unpack_states`."""
    rows = np.zeros(len(states), _ROW)
    blocks: list[list[bytes]] = [[], [], [], [], []]
    for row, state in zip(rows, states, strict=True):
        row["endpoints"] = np.frombuffer(state.endpoints, ENDPOINTS)[0]
        row["phase"], row["has_loss"], row["certain"] = state.phase, state.has_loss, state.certain
        row["is_closed"] = state.is_closed
        for name in _AS_THEY_ARE:
            row[name] = getattr(state, name)
        row["before"] = state.before[0]
        assert len(state.parts) <= 1
        segments, data = state.parts[0] if state.parts else (b"", b"")
        row["segment_count"], row["byte_count"] = len(segments) // SEGMENT.itemsize, len(data)
        row["emitted_count"] = len(state.emitted_ids)
        row["closed_count"] = len(state.closed_request_positions)
        row["tcp"], row["tcp_sides"] = state.tcp.connections[0], state.tcp.sides
        row["rtt_count"] = len(state.tcp.rtt)
        ids = state.emitted_ids.tobytes(), state.closed_request_positions.tobytes()
        parts = segments, data, *ids, state.tcp.rtt.tobytes()
        for block, part in zip(blocks, parts, strict=True):
            block.append(part)
    tls = json.dumps([state.tls and state.tls.to_json() for state in states]).encode()
    packed = [rows.tobytes(), *(b"".join(block) for block in blocks), tls]
    return b"".join([np.array([len(part) for part in packed], "<i8").tobytes(), *packed])


def unpack_states(data: bytes) -> list[ConnectionState]:
    """The states that `pack_states` was given. Raises ValueError for other bytes."""
    sizes = np.frombuffer(data, "<i8", 7).tolist()
    if min(sizes) < 0 or 56 + sum(sizes) != len(data):
        raise ValueError("states of connections: their sizes are not those of the bytes")
    bounds = np.cumsum([56, *sizes]).tolist()
    parts = [data[low:high] for low, high in itertools.pairwise(bounds)]
    rows = np.frombuffer(parts[0], _ROW)
    widths = {"segment_count": SEGMENT.itemsize, "byte_count": 1, "emitted_count": 8,
              "closed_count": 8, "rtt_count": RTT_COUNT.itemsize}  # fmt: skip
    blocks = []
    for part, (name, width) in zip(parts[1:6], widths.items(), strict=True):
        ends = np.cumsum(rows[name]) * width
        if (rows[name] < 0).any() or (len(ends) and ends[-1] != len(part)):
            raise ValueError("states of connections: their parts are not as long as they say")
        starts = ends - rows[name] * width
        blocks.append([part[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])
    states = []
    all_tls = json.loads(parts[6])
    if not isinstance(all_tls, list):
        raise ValueError("states of connections: those of TLS have another form")
    for number, (row, tls) in enumerate(zip(rows, all_tls, strict=True)):
        state = ConnectionState(row["endpoints"].tobytes(), Phase(int(row["phase"])))
        for name in _AS_THEY_ARE:
            setattr(state, name, row[name].tolist())
        state.has_loss, state.certain = bool(row["has_loss"]), (row["certain"] != 0).tolist()
        state.is_closed = bool(row["is_closed"])
        state.before = rows["before"][number : number + 1].copy()
        segments, payload, emitted, closed, rtt = (block[number] for block in blocks)
        state.tcp = TcpFacts(
            rows["tcp"][number : number + 1].copy(),
            rows["tcp_sides"][number].copy(),
            np.frombuffer(rtt, RTT_COUNT),
        )
        if segments:
            state.carry(segments, payload)
        state.emitted_ids = np.frombuffer(emitted, np.int64)
        state.closed_request_positions = np.frombuffer(closed, np.int64)
        state.tls = None if tls is None else TlsState.from_json(tls)
        states.append(state)
    return states
