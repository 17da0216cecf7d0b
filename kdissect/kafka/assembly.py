"""The result of `assemble_streams`: connections, exchanges, extents of their bytes, anomalies.

All are structured arrays without payload. A *stream position* counts payload bytes of one
direction. Position 0 is the first byte after the SYN, or the captured byte with the lowest
sequence number if there is no SYN. It never wraps. Direction 0 is request (client to broker), 1 is
response.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from kdissect.arrays import Bytes, Ints, Positions, Rows
from kdissect.tcp.measurements import TcpFacts, no_facts
from kdissect.tls.handshake import TlsFacts

NO_DIRECTION = 2


class Protocol(IntEnum):
    """Values of connections.protocol; the table has the names in lower case."""

    NONE = 0
    KAFKA = 1
    TLS = 2
    HTTP = 3
    HTTP2 = 4
    ZOOKEEPER = 5
    OTHER = 6


class PairStatus(IntEnum):
    """Values of exchanges.status; the table has the names in lower case."""

    PAIRED = 0
    NO_RESPONSE_EXPECTED = 1
    REQUEST_MISSING = 2
    RESPONSE_MISSING = 3
    CONNECTION_CLOSED = 4


class Anomaly(IntEnum):
    """Values of anomalies.kind; the table has the names in lower case."""

    CAPTURE_CUT = 0
    PACKET_CUT = 1
    GAP = 2
    OVERLAP_CONFLICT = 3
    UNFRAMED_BYTES = 4
    MALFORMED_MESSAGE = 5
    UNKNOWN_API = 6
    UNKNOWN_VERSION = 7
    WRONG_CRC = 8
    RECORD_COUNT_MISMATCH = 9
    UNKNOWN_MAGIC = 10
    DECOMPRESSION_FAILED = 11
    DECOMPRESSION_LIMIT = 12
    LIMIT = 13
    RESPONSE_WITHOUT_REQUEST = 14
    DUPLICATE_RESPONSE = 15
    OUT_OF_ORDER_RESPONSE = 16
    SEQUENCE_GAP = 17
    SEQUENCE_DUPLICATE = 18
    INVALID_UTF8 = 19
    NEGATIVE_LATENCY = 20
    SURPLUS_BYTES = 21
    MALFORMED_RECORDS = 22
    PARTIAL_FRAME = 23
    MALFORMED_EMBEDDED = 24
    NOT_DECRYPTED = 25
    LOST_FRAGMENTS = 26
    CAPTURE_MISSING = 27
    NOT_A_CAPTURE = 28
    LATE_PACKETS = 29
    LATE_NAMES = 30
    CARRY_LIMIT = 31
    PROXY_HEADER = 32


# Where bytes of a stream lie. source: the capture that they came from, or -1: `length` bytes are
# missing (a gap or a cut). pos: in the capture file, or from CARRIED_FROM on in the assembly's
# carried bytes.
EXTENT = np.dtype([("pos", "<i8"), ("length", "<i8"), ("source", "<i8")])

# Counters of one direction; "Accounts" in docs/tables.md defines each.
DIRECTION = np.dtype(
    [
        ("byte_count", "<i8"),
        ("framed_byte_count", "<i8"),
        ("unframed_byte_count", "<i8"),
        ("missing_byte_count", "<i8"),
        ("segment_count", "<i8"),
        ("retransmitted_segment_count", "<i8"),
        ("out_of_order_segment_count", "<i8"),
        ("duplicate_segment_count", "<i8"),
        ("gap_count", "<i8"),
    ]
)

CONNECTION = np.dtype(
    [
        ("connection_id", "<i8"),
        ("first_time_ns", "<i8"),
        ("last_time_ns", "<i8"),
        ("handshake_rtt_ns", "<i8"),  # SYN to the handshake's last ACK; -1 unknown
        ("endpoints", "<i4"),  # index into the batch's endpoints
        ("client_side", "u1"),  # 0: endpoint a is the client
        ("handshake_seen", "u1"),
        ("is_tls", "u1"),
        ("protocol", "u1"),
        ("close_reason", "u1"),
        ("direction", DIRECTION, (2,)),
    ]
)

# One side of an exchange. `size` is the value of the size prefix (-1: no such side).
# extents[extent_start:extent_start + extent_count] are the frame's bytes *without* the prefix,
# gaps included (source -1). `is_whole`: every byte was captured.
SIDE = np.dtype(
    [
        ("time_ns", "<i8"),  # of the segment with the first byte (of the size prefix)
        ("end_time_ns", "<i8"),  # of the segment with the last captured byte
        ("size", "<i8"),
        ("pos", "<i8"),  # stream position of the size prefix
        ("packet", "<i8"),  # of the first byte
        ("extent_start", "<i8"),
        ("extent_count", "<i4"),
        ("source", "<i4"),  # of the first byte
        ("is_whole", "u1"),
    ]
)

NO_API = -1  # api_key of SASL tokens without Kafka header, and of a response without its request

EXCHANGE = np.dtype(
    [
        ("exchange_id", "<i8"),
        ("connection", "<i4"),  # index into connections
        ("correlation_id", "<i4"),
        ("api_key", "<i2"),
        ("api_version", "<i2"),
        ("status", "u1"),  # PairStatus
        ("is_sasl_token", "u1"),
        ("confidence", "<f4"),  # of an api_key and api_version inferred from the response; else 0
        ("queued_ns", "<i8"),  # until the response before had left; -1 unknown, 0 without a pair
        ("request", SIDE),
        ("response", SIDE),
    ]
)

# A fault seen in a stream.
ANOMALY = np.dtype(
    [
        ("kind", "u1"),
        ("direction", "u1"),
        ("connection", "<i4"),  # index into connections, -1 none
        ("source", "<i4"),  # -1 none
        ("packet", "<i8"),  # -1 none
        ("pos", "<i8"),  # stream position, -1 none
        ("byte_count", "<i8"),
        ("exchange_id", "<i8"),  # 0 none
        ("reason", "u1"),  # which of the texts of its kind applies (`tables.anomalies`)
        # for its text: a size (of UNFRAMED_BYTES what was read there, or -1), a correlation id, ns
        ("number", "<i8"),
        ("other", "<i8"),  # the limit, or the correlation id before
        ("extent_start", "<i8"),  # bytes to show in anomalies.data, as for SIDE
        ("extent_count", "<i4"),
    ]
)


@dataclass(frozen=True, slots=True)
class Carried:
    """Bytes that no capture of this run contains as they are: decrypted ones, and those of open
    connections that an earlier run or window read. They travel with the rows.

    data: uint8, the bytes. start: int64[n], ascending; from start[i] on the bytes were decrypted
    from the packet at file_pos[i] (int64) of their capture.
    """

    data: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))
    start: Positions = field(default_factory=lambda: np.zeros(0, np.int64))
    file_pos: Positions = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class Assembly:
    """The result of assembling a SegmentBatch; rows refer to each other by index.

    duplicate_packets: int64[n], per source, segments that are second copies of a packet. tls:
    handshake facts by connection row. carried: bytes of extents that are in no capture. tcp: facts
    of the connections' segments.
    """

    endpoints: Rows  # capture.segments.ENDPOINTS
    connections: Rows  # CONNECTION
    exchanges: Rows  # EXCHANGE, by connection, then in order of the first byte
    extents: Rows  # EXTENT
    anomalies: Rows  # ANOMALY
    duplicate_packets: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    tls: dict[int, TlsFacts] = field(default_factory=dict)
    carried: Carried = field(default_factory=Carried)
    tcp: TcpFacts = field(default_factory=lambda: no_facts(0))
