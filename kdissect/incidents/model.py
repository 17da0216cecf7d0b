"""The table `incidents`: its columns, the names of its kinds, and its rows as Python values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa

from kdissect.tables.arrow_arrays import TIME_TYPE
from kdissect.text import rfc3339, visible

BAD, WARN, INFO = "bad", "warn", "info"
SEVERITIES = (BAD, WARN, INFO)  # the worst first

# Kind -> (its subject, its meaning). docs/incidents.md has a section for each.
KINDS = {
    "broker_unreachable": ("broker", "connection attempts to a broker failed"),
    "broker_stall": ("broker", "a broker answered no connection for a while"),
    "idle_connection_cut": ("client", "an idle connection was dead when its client used it"),
    "advertised_address_unreachable": (
        "address",
        "an address that Metadata advertised was never reached",
    ),
    "login_failures": ("client", "SASL logins were refused"),
    "tls_failure": (
        "broker",
        "TLS handshakes failed, one side spoke no TLS, or a certificate expires",
    ),
    "rebalance_loop": ("group", "a group rebalanced again and again"),
    "member_too_slow": ("group", "a member left its group because it polled too late"),
    "consumer_stuck": (
        "partition",
        "a consumer fetched the same offset again and again, though the log has more",
    ),
    "transaction_open": ("transactional ID", "an open transaction kept records from readers"),
    "duplicate_records": ("partition", "the same records were written twice"),
    "out_of_order_records": (
        "partition",
        "records were written in another order than they were sent",
    ),
    "connection_storm": ("client", "a client opened many short connections"),
    "metadata_storm": ("client", "a client sent Metadata requests without need"),
    "retry_storm": ("client", "a client repeated a failing request"),
    "leader_change": ("partition", "the leader of partitions changed"),
    "throttled": ("client", "a quota made a client wait"),
    "slow_upload": ("client", "requests took long to arrive"),
    "capture_loss": ("capture", "the capture lacks packets that were sent"),
    "clock_step": ("capture", "the clock of the capturing machine jumped"),
}

_IDS = pa.list_(pa.int64())
SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("severity", pa.string()),
        ("start_time", TIME_TYPE),
        ("end_time", TIME_TYPE),
        ("subject", pa.string()),
        ("request_count", pa.int64()),
        ("time_lost_ms", pa.float64()),
        ("evidence", pa.struct([("exchange_ids", _IDS), ("connection_ids", _IDS)])),
        ("text", pa.string()),
        ("next_command", pa.string()),
    ]
)
EVIDENCE_MAX = 10  # ids of exchanges and of connections that a row names
_SUBJECT_MAX, _TEXT_MAX = 300, 1000  # characters


@dataclass(frozen=True, slots=True)
class Incident:
    """A row of `incidents`.

    brokers, client: addresses of the brokers and the client that it explains, for the search for
    causes.
    """

    kind: str
    severity: str
    start: datetime
    end: datetime
    subject: str
    text: str
    request_count: int = 0
    time_lost_ms: float | None = None
    exchange_ids: Sequence[int] = ()
    connection_ids: Sequence[int] = ()
    next_command: str = ""
    brokers: frozenset[str] = frozenset()
    client: str = ""


def incident_table(incidents: Iterable[Incident]) -> pa.Table:
    """Return the rows of incidents, the worst first, then in order of time."""
    ranked = sorted(incidents, key=_rank)
    columns = {
        "kind": [row.kind for row in ranked],
        "severity": [row.severity for row in ranked],
        "start_time": [row.start for row in ranked],
        "end_time": [row.end for row in ranked],
        "subject": [visible(row.subject, _SUBJECT_MAX) for row in ranked],
        "request_count": [row.request_count for row in ranked],
        "time_lost_ms": [row.time_lost_ms for row in ranked],
        "evidence": [
            {
                "exchange_ids": list(row.exchange_ids)[:EVIDENCE_MAX],
                "connection_ids": list(row.connection_ids)[:EVIDENCE_MAX],
            }
            for row in ranked
        ],
        "text": [visible(row.text, _TEXT_MAX) for row in ranked],
        "next_command": [visible(row.next_command) for row in ranked],
    }
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _rank(row: Incident) -> tuple[int, datetime, str, str]:
    return SEVERITIES.index(row.severity), row.start, row.kind, row.subject


def json_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows of `incidents` as JSON has them.

    Times are RFC 3339. Ids are texts, because they exceed the integers of many JSON readers.
    """
    rows = table.to_pylist()
    for row in rows:
        for name in ("start_time", "end_time"):
            row[name] = rfc3339(row[name], "microseconds")
        row["evidence"] = {
            name: [str(number) for number in ids] for name, ids in row["evidence"].items()
        }
    return rows
