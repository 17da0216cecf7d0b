"""Finds the fatal alert by which a side refused or ended a TLS handshake (RFC 8446, section 6)."""

from __future__ import annotations

import ssl
from collections.abc import Iterable

from kdissect.arrays import Indices, Marks
from kdissect.tcp.byte_ranges import Pieces, first_bytes, read_bytes
from kdissect.tcp.reassembly import Streams
from kdissect.tls import records
from kdissect.tls.cipher_suites import Suite
from kdissect.tls.records import TLS_HEADER_SIZE, Record, each_record, walk_records

ENCRYPTED = "encrypted"
_FATAL = 2
_SIZE = 2  # of an alert: level and description
_DESCRIPTIONS = {
    each.value: each.name.removeprefix("ALERT_DESCRIPTION_").lower()
    for each in ssl.AlertDescription
} | {
    # RFC 8446, section 6, beyond what Python knows, or spelt as there
    86: "inappropriate_fallback",
    90: "user_canceled",
    109: "missing_extension",
    116: "certificate_required",
    120: "no_application_protocol",
}


def first_alerts(streams: Streams, has_origin: Marks, chosen: Indices) -> dict[int, str]:
    """Return the fatal alerts that chosen streams begin with, by the number of the stream.

    A broker sends one if a client speaks no TLS to its TLS listener.
    """
    first = first_bytes(streams.pieces, streams.sides[chosen])
    alerts: dict[int, str] = {}
    for stream in chosen[first == records.ALERT].tolist():
        table = walk_records(streams.pieces, streams.sides, stream, has_origin)
        if alert := fatal_alert(streams.pieces, each_record(table[:1]), None, False):
            alerts[stream] = alert
    return alerts


def fatal_alert(
    pieces: Pieces, found: Iterable[Record], suite: Suite | None, is_client: bool
) -> str | None:
    """Return the description of a side's fatal alert before its first encrypted handshake message.

    found: the side's records. The client's first encrypted record of TLS 1.3 is an alert if it has
    the size of one, because all handshake messages are larger. It gives ENCRYPTED.
    """
    is_13 = suite is not None and suite.is_13
    for record in found:
        kind, size = record.kind, record.size
        if kind == records.ALERT and size == record.captured == TLS_HEADER_SIZE + _SIZE:
            start = record.pos + TLS_HEADER_SIZE
            level, description = read_bytes(pieces, record.piece, start, _SIZE)
            if level == _FATAL:
                return _DESCRIPTIONS.get(description, f"alert_{description}")
        elif kind == records.APPLICATION and suite is not None and is_13 and is_client:
            # RFC 8446, 5.2: the alert, a byte with its type, and the tag
            is_alert = size == TLS_HEADER_SIZE + _SIZE + 1 + suite.tag_size
            return ENCRYPTED if is_alert else None
        elif kind != records.HANDSHAKE and not (kind == records.CHANGE_CIPHER and is_13):
            return None
    return None
