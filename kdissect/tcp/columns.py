"""Rows that reassembly fills: sides, connections, conflicts; and the marks of segments."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

# Marks of a segment. UNUSED: its sequence number is meaningless. IGNORED: its receiver ignores it.
DUPLICATE, PROBE, UNUSED, IGNORED = 1, 2, 4, 8
NO_ACK = -(1 << 62)  # no acknowledgment

# Facts of a stream, which is one side of a connection. Numbers are unwrapped sequence numbers.
SIDE = np.dtype(
    [
        ("origin", "i8"),  # number of position 0
        ("has_syn", "i8"),
        ("has_data", "i8"),
        ("low", "i8"),  # lowest and highest number of its data
        ("high", "i8"),
        ("fin", "i8"),  # number after the FIN's data, or NO_ACK
        ("ack_low", "i8"),  # lowest and highest number the peer acknowledged, or NO_ACK
        ("ack_high", "i8"),
        ("is_messy", "i8"),  # out of order or overlapping
        ("data_count", "i8"),  # segments with payload that is used
        ("segment_count", "i8"),
        ("duplicate_count", "i8"),
        ("retransmitted_count", "i8"),
        ("out_of_order_count", "i8"),
        ("byte_count", "i8"),
        ("gap_count", "i8"),
        ("end", "i8"),  # position after the last byte known to exist
        ("piece_start", "i8"),
        ("piece_stop", "i8"),
        ("header_size", "i8"),  # bytes of a PROXY protocol header before position 0
    ]
)

CONNECTION = np.dtype(
    [
        ("pair", "i8"),
        ("first_time", "i8"),
        ("last_time", "i8"),
        ("syn_time", "i8"),
        ("syn_ack_time", "i8"),
        ("rtt", "i8"),
        ("client_side", "i8"),  # -1: the handshake was not captured
        ("close_reason", "i8"),
    ]
)

# A segment whose bytes differ from those captured first. stream: 2 * connection + side.
CONFLICT = np.dtype([("stream", "i8"), ("segment", "i8"), ("pos", "i8"), ("byte_count", "i8")])


class CloseReason(IntEnum):
    """Values of connections.close_reason; the table has the names in lower case."""

    CAPTURE_END = 0
    FIN = 1
    RST = 2
    REUSED = 3
