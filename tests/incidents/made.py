"""Rows of small table sets, and the incidents that kdissect finds in them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from kdissect.tables.schemas import COUNTERS
from tests.report.made import SECOND_US, START_US, Row, tables

__all__ = ["FETCH_REQUEST", "SECOND_US", "START_US", "Row", "at", "connection", "found"]

_COUNTS = {f"{side}_{name}": 0 for side in ("request", "response") for name in COUNTERS}
LENGTH_S = 60  # of the captures

_ASKED = pa.struct([("partition", pa.int32()), ("fetch_offset", pa.int64())])
FETCH_REQUEST = pa.struct(
    [
        ("replica_id", pa.int32()),
        ("replica_state", pa.struct([("replica_id", pa.int32())])),
        ("max_bytes", pa.int32()),
        ("isolation_level", pa.int8()),
        ("topics", pa.list_(pa.struct([("topic", pa.string()), ("partitions", pa.list_(_ASKED))]))),
    ]
)


def at(seconds: float) -> int:
    """Return a time so many seconds after the start, as the tables have it."""
    return START_US + round(seconds * SECOND_US)


def connection(number: int = 1, **values: Any) -> Row:
    """A row of `connections`: an open connection of one client to one broker."""
    row: Row = {
        "connection_id": number,
        "client_ip": "10.0.0.1",
        "client_port": 50000 + number,
        "broker_ip": "10.0.0.9",
        "broker_port": 9092,
        "first_time": at(0),
        "last_time": at(LENGTH_S),
        "handshake_seen": True,
        "close_reason": "capture_end",
        "is_kafka": True,
        "is_tls": False,
        "protocol": "kafka",
        "client_ids": ["app"],
    }
    return _COUNTS | row | values


def found(**rows: Any) -> list[Row]:
    """Return the incidents of a table set of these rows, in a capture of a minute."""
    capture = {
        "capture_id": 7,
        "path": "trace.pcap",
        "format": "pcap",
        "first_time": at(0),
        "last_time": at(LENGTH_S),
    }
    rows.setdefault("captures", [capture])
    incidents: list[Row] = tables(**rows).incidents().to_pylist()
    return incidents
