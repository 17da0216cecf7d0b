"""An incident, and the table `incidents`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from kdissect.tables.schemas import INCIDENTS, Row
from kdissect.text import rfc3339, visible

# bad: requests failed, records were lost, or clients stood still. warn: clients lost time.
# info: operators want to know; it may be no fault, even if requests failed or waited.
BAD, WARN, INFO = "bad", "warn", "info"
SEVERITIES = (BAD, WARN, INFO)  # the worst first

EVIDENCE_MAX = 10  # ids of exchanges and of connections that a row names
_SUBJECT_MAX, _TEXT_MAX = 300, 1000  # characters


@dataclass(frozen=True, slots=True)
class Incident:
    """A row of `incidents`.

    brokers, clients: addresses of the brokers and names of the clients that it is about. One
    incident explains another only if these match (`causes`).
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
    clients: frozenset[str] = frozenset()


def incident_table(incidents: Iterable[Incident]) -> pa.Table:
    """Return the rows of incidents, the worst first, then in order of time."""
    rows = [
        {
            "kind": one.kind,
            "severity": one.severity,
            "start_time": one.start,
            "end_time": one.end,
            "subject": visible(one.subject, _SUBJECT_MAX),
            "request_count": one.request_count,
            "time_lost_ms": one.time_lost_ms,
            "evidence": {
                "exchange_ids": list(one.exchange_ids)[:EVIDENCE_MAX],
                "connection_ids": list(one.connection_ids)[:EVIDENCE_MAX],
            },
            "text": visible(one.text, _TEXT_MAX),
            "next_command": visible(one.next_command),
        }
        for one in sorted(incidents, key=_rank)
    ]
    return pa.Table.from_pylist(rows, INCIDENTS)


def _rank(one: Incident) -> tuple[int, datetime, str, str]:
    return SEVERITIES.index(one.severity), one.start, one.kind, one.subject


def json_rows(table: pa.Table) -> list[Row]:
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
