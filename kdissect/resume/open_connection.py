"""An open connection between two windows: what is known of it, and the bytes of its open frames.

`to_table` makes rows of them, which a table set or a stream keeps. These hold captured payload, of
TLS its ciphertext. The secrets of TLS are not kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from kdissect.arrays import Bools, Ints, Rows, joined
from kdissect.capture.segments import ENDPOINTS, SEGMENT
from kdissect.kafka.assemble import EARLIER, EarlierState
from kdissect.kafka.assembly import CONNECTION, Protocol
from kdissect.kafka.exchanges import NO_RESPONSE
from kdissect.kafka.walk import new_streams
from kdissect.tcp.measurements import CONNECTION_FACTS, RTT_COUNT, SIDE_FACTS, TcpFacts, no_facts
from kdissect.tls.session import TlsState

NO_NUMBER = -1  # sequence number that is not known
NEVER = 2**63 - 1  # a time that does not come


# The state of a connection between two windows. A field with two values has one for each side. The
# protocol in `earlier` decides what the next window gets:
#
#     protocol  the connection is           carried segments           bytes in `connection`
#     NONE      not recognised yet          all                        none
#     KAFKA     in clear text or decrypted  from the first open frame  those before
#     OTHER     not Kafka's, or over        none                       all
#
# A connection with KAFKA or OTHER is *resumed*: a SYN that is made for it marks its first byte.
OPEN = np.dtype([
    ("endpoints", ENDPOINTS),
    ("exchange_count", "<i8"),  # open exchanges
    ("may_begin_until", "<i8"),  # ns since 1970 until when a late capture may bring its first bytes
    ("due", "<i8"),  # time (ns) from which it changes without new packets, or NEVER
    ("base", "<i8", (2,)),  # stream position of the first carried byte
    ("seq", "<i8", (2,)),  # its sequence number, or NO_NUMBER
    ("earlier", EARLIER),
    ("connection", CONNECTION),  # its counts, and the times of its first and last packet
    ("tcp", CONNECTION_FACTS),
    ("tcp_sides", SIDE_FACTS, (2,)),
])  # fmt: skip


def new_rows(endpoints: Rows) -> Rows:
    """OPEN[n] before the first segment of connections with these endpoints."""
    rows = np.zeros(len(endpoints), OPEN)
    rows["endpoints"] = endpoints
    rows["may_begin_until"] = rows["due"] = NEVER
    rows["seq"] = NO_NUMBER
    rows["earlier"]["response_end"] = NO_RESPONSE
    rows["earlier"]["streams"] = new_streams(np.zeros(1, np.uint8))[0]
    rows["connection"]["handshake_rtt_ns"] = -1
    rows["connection"]["first_time_ns"] = NEVER
    rows["connection"]["last_time_ns"] = -(2**63)
    facts = no_facts(1)
    rows["tcp"], rows["tcp_sides"] = facts.connections[0], facts.sides[0]
    return rows


@dataclass(frozen=True, slots=True)
class OpenConnection:
    """row: OPEN[1]. segments: the carried ones (SEGMENT); `pos` is a position in `data`,
    their bytes. rtt: counts of round-trip times. tls: state that decrypts the carried bytes of
    Kafka over TLS, which begin at a record."""

    row: Rows
    segments: Rows = field(default_factory=lambda: np.zeros(0, SEGMENT))
    data: bytes = b""
    rtt: Rows = field(default_factory=lambda: np.zeros(0, RTT_COUNT))
    tls: TlsState | None = None

    @property
    def size(self) -> int:
        """Number of carried bytes."""
        return len(self.data)

    @property
    def protocol(self) -> Protocol:
        return Protocol(int(self.row["earlier"]["protocol"][0]))


def new_connection(endpoints: bytes) -> OpenConnection:
    """A connection before its first segment."""
    return OpenConnection(new_rows(np.frombuffer(endpoints, ENDPOINTS)))


def rows_of(connections: Sequence[OpenConnection]) -> Rows:
    """OPEN[n], a copy."""
    return joined([np.zeros(0, OPEN), *(one.row for one in connections)])


def is_resumed(rows: Rows) -> Bools:
    """bool[n]: whether a made SYN marks the first carried byte."""
    resumed: Bools = rows["earlier"]["protocol"] != Protocol.NONE
    return resumed


def earlier_state(connections: Sequence[OpenConnection]) -> EarlierState:
    """The connections as the kernels continue them."""
    rows = rows_of(connections)
    rtt = joined([np.zeros(0, RTT_COUNT), *(one.rtt for one in connections)])
    rtt["stream"] += 2 * np.repeat(np.arange(len(rows)), [len(one.rtt) for one in connections])
    return EarlierState(
        rows["earlier"].copy(),
        {number: one.tls for number, one in enumerate(connections) if one.tls is not None},
        TcpFacts(rows["tcp"].copy(), rows["tcp_sides"].reshape(-1), rtt),
    )


def keep_sources(connections: Sequence[OpenConnection], count: int, kept: int) -> Ints:
    """Renumber the sources of carried segments; returns which of the `count` sources are left:
    those of such segments, and the last `kept` ones."""
    is_used = np.arange(count) >= count - kept
    for one in connections:
        is_used[one.segments["source"]] = True
    number = np.cumsum(is_used) - 1
    for one in connections:
        one.segments["source"] = number[one.segments["source"]]
    return np.flatnonzero(is_used)


# -- as rows of a table ---------------------------------------------------------------------

_BYTES = pa.binary()
OPEN_SCHEMA = pa.schema(
    {"row": pa.binary(OPEN.itemsize), "segments": _BYTES, "data": _BYTES, "rtt": _BYTES}
    | {"tls": pa.string()}  # JSON
)


def to_table(connections: Sequence[OpenConnection]) -> pa.Table:
    """A row for each connection, for `from_table`."""
    columns = (
        [one.row.tobytes() for one in connections],
        [one.segments.tobytes() for one in connections],
        [one.data for one in connections],
        [one.rtt.tobytes() for one in connections],
        [one.tls and json.dumps(one.tls.to_json()) for one in connections],
    )
    arrays = [pa.array(*pair) for pair in zip(columns, OPEN_SCHEMA.types, strict=True)]
    return pa.table(arrays, schema=OPEN_SCHEMA)


def endpoints_of(table: pa.Table) -> Rows:
    """ENDPOINTS[n] of the rows of a table of connections."""
    rows = np.frombuffer(b"".join(table["row"].to_pylist()), OPEN)
    return rows["endpoints"].copy()


def from_table(table: pa.Table) -> list[OpenConnection]:
    """The connections that `to_table` was given. Raises ValueError for another table."""
    if not table.schema.equals(OPEN_SCHEMA):
        raise ValueError("open connections: the columns are those of another version")
    return [
        OpenConnection(
            np.frombuffer(row, OPEN).copy(),
            np.frombuffer(segments, SEGMENT).copy(),
            data,
            np.frombuffer(rtt, RTT_COUNT),
            None if tls is None else TlsState.from_json(json.loads(tls)),
        )
        for row, segments, data, rtt, tls in zip(
            *(column.to_pylist() for column in table.columns), strict=True
        )
    ]
