"""A connection between windows: what is known of it, and what of its bytes is carried."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

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


LOOKING, KAFKA, TLS, LEFT = STATES = tuple(State)
OPENING = ("time_ns", "seq", "ack", "endpoints", "flags", "side")  # fields of the SYNs we make


@dataclass(slots=True)
class Flow:
    """A connection between windows; lists of two are by side.

    base: stream position of the first carried byte; seq: its sequence number; syn: that of position
    0, where a SYN told it; certain: the first carried byte is that of a frame. parts: carried
    segments (packed SEGMENT), whose `pos` is a place in the bytes beside them.
    shown: ids of finished exchanges that have carried bytes; gone: positions of requests among them
    that no response to come can answer.
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
    gone: Ints = field(default_factory=lambda: NO_IDS)
    open_count: int = 0  # exchanges begun
    has_loss: bool = False  # bytes of its responses are missing
    closed_at: int | None = None

    def keep(self, segments: bytes, data: bytes) -> None:
        self.parts.append((segments, data))
        self.size += len(data)
