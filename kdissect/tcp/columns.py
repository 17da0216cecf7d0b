"""Columns of the flat int64 tables that reassembly fills: sides, connections, conflicts."""

from __future__ import annotations

from enum import IntEnum

DUPLICATE, PROBE, UNUSED = 1, 2, 4  # marks of a segment; UNUSED: its sequence number is meaningless
NO_ACK = -(1 << 62)  # no acknowledgment

# The columns of `Streams.sides`: facts of a stream, which is one side of a connection.
SIDE_FIELDS = (
    "origin",  # unwrapped sequence number of position 0
    "has_syn",
    "has_data",
    "low",  # lowest and highest unwrapped sequence number of its data
    "high",
    "fin",  # unwrapped sequence number after the FIN's data, or NO_ACK
    "ack_low",  # lowest and highest number the peer acknowledged, or NO_ACK
    "ack_high",
    "is_messy",  # out of order or overlapping
    "data_count",  # segments with payload that is used
    "segment_count",
    "duplicate_count",
    "retransmitted_count",
    "out_of_order_count",
    "byte_count",
    "gap_count",
    "end",  # position after the last byte known to exist
    "piece_start",
    "piece_stop",
    "header_size",  # bytes of a PROXY protocol header before position 0
)
(
    ORIGIN, HAS_SYN, HAS_DATA, LOW, HIGH, FIN_AT, ACK_LOW, ACK_HIGH, IS_MESSY, DATA_COUNT,
    SEGMENT_COUNT, DUPLICATE_COUNT, RETRANSMITTED_COUNT, OUT_OF_ORDER_COUNT, BYTE_COUNT, GAP_COUNT,
    END, PIECE_START, PIECE_STOP, HEADER_SIZE,
) = range(len(SIDE_FIELDS))  # fmt: skip
SIDE_WIDTH = len(SIDE_FIELDS)

# The columns of `Streams.connections`.
CONNECTION_FIELDS = (
    "pair",
    "incarnation",
    "first_time",
    "last_time",
    "syn_time",
    "syn_ack_time",
    "rtt",
    "client_side",  # -1: the handshake was not captured
    "close_reason",
    "first_segment",
)
(
    PAIR, INCARNATION, FIRST_TIME, LAST_TIME, SYN_TIME, SYN_ACK_TIME, RTT, CLIENT_SIDE,
    CLOSE_REASON, FIRST_SEGMENT,
) = range(len(CONNECTION_FIELDS))  # fmt: skip
CONNECTION_WIDTH = len(CONNECTION_FIELDS)

CONFLICT_WIDTH = 4  # stream (2 * connection + side), segment, position, differing bytes


class CloseReason(IntEnum):
    """Values of connections.close_reason; the table has the names in lower case."""

    CAPTURE_END = 0
    FIN = 1
    RST = 2
    REUSED = 3
    IDLE = 4
