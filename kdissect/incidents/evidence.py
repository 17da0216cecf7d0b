"""The evidence of incidents: the tables that kinds of incidents ask, and their commands.

`Evidence` is a DuckDB database over the views of a table set, with the tables of `make_requests`.
`find_incidents` adds `sent` and `leaders`, and kinds of incidents add their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from kdissect.incidents.incident import EVIDENCE_MAX, Incident
from kdissect.sql import Database
from kdissect.tables.schemas import Row
from kdissect.text import shell_word

# A broker holds back the responses of these until records or members arrive, so that a request
# without a response is no sign of a fault until its time is over.
HELD_APIS = "('Fetch', 'ShareFetch', 'JoinGroup', 'SyncGroup')"
# SQL of the columns that `Evidence.incident` takes, over rows of requests
CONNECTION_IDS = f"list_sort(list(DISTINCT connection_id))[:{EVIDENCE_MAX}] AS connection_ids"
IDS = (
    "list(exchange_id ORDER BY time, exchange_id) FILTER (exchange_id IS NOT NULL)"
    f"[:{EVIDENCE_MAX}] AS exchange_ids, {CONNECTION_IDS}"
)
PARTIES = "list_sort(list(DISTINCT broker)) AS brokers, list_sort(list(DISTINCT client)) AS clients"


def lasted_ms(row: Row) -> float:
    """Return the time from `start` to `stop`."""
    length: timedelta = row["stop"] - row["start"]
    return length.total_seconds() * 1000


def runs(source: str, key: str, pause_ms: int) -> str:
    """Return SQL for the rows of `source` with a column `run`: its number among those of a key.

    A run is of events that follow one another without a long pause. source: a table or a query in
    parentheses, with a column `time`. pause_ms: ends a run.
    """
    return f"""
      SELECT *, count(*) FILTER (is_first) OVER (PARTITION BY {key} ORDER BY time) AS run
      FROM (
        SELECT *, coalesce(ms_between(lag(time) OVER (PARTITION BY {key} ORDER BY time), time)
          > {pause_ms}, true) AS is_first
        FROM {source}
      )
    """


def _parties(row: Row, party: str) -> frozenset[str]:
    return frozenset(row.get(f"{party}s") or filter(None, [row.get(party)]))


class Evidence:
    """The prepared tables of one table set. `run` and `rows` are its database's.

    captures: the subject of incidents of the whole capture.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.run, self.rows = database.run, database.rows
        captures = self.rows("SELECT capture_id, path FROM captures ORDER BY first_time, path")
        self._paths: dict[int, str] = {row["capture_id"]: row["path"] for row in captures}
        more = f" and {len(captures) - 1:,} more" if captures[1:] else ""
        self.captures: str = f"{captures[0]['path']}{more}" if captures else "CAPTURE"

    def has(self, rows: str) -> bool:
        """Return whether there are such rows. rows: SQL, as it follows FROM.

        It takes less than a tenth of the time that a kind's query takes to plan.
        """
        return bool(self.rows(f"SELECT 1 FROM {rows} LIMIT 1"))

    def incident(self, row: Row, severity: str, subject: str, text: str, **fields: Any) -> Incident:
        """Return an incident with the times, counts, ids, brokers and clients of a row.

        row: `start`, `stop`, and each of `requests`, `lost_ms`, `exchange_ids`, `connection_ids`,
        `broker` or `brokers`, and `client` or `clients` that its query selects. fields: of the
        incident; they come first.
        """
        ids, lost_ms = row.get("connection_ids") or [], row.get("lost_ms")
        incident = Incident(
            severity,
            row["start"],
            row["stop"],
            subject,
            text,
            request_count=row.get("requests", 0),
            # a sum's last digits depend on the order of its terms
            time_lost_ms=None if lost_ms is None else round(lost_ms, 6),
            exchange_ids=row.get("exchange_ids", ()),
            connection_ids=ids,
            next_command=self.follow(ids) if ids else "",
            brokers=_parties(row, "broker"),
            clients=_parties(row, "client"),
        )
        return replace(incident, **fields)

    def command(self, verb: str, *options: str, capture_id: int | None = None) -> str:
        """Return a kdissect command over a capture, quoted for a shell."""
        first = next(iter(self._paths.values()), "CAPTURE")
        path = first if capture_id is None else self._paths.get(capture_id, first)
        return " ".join(shell_word(word) for word in ("kdissect", verb, path, *options))

    def follow(self, connection_ids: Sequence[int]) -> str:
        """Return the command that shows the first connection, so that the command stays short."""
        return self.command("show", "--connection", str(connection_ids[0]))
