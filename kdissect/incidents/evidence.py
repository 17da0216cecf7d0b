"""The evidence of incidents: the tables that kinds of incidents ask, and their commands.

`Evidence` is a DuckDB database over the views of a table set, with the tables of `sql.requests`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from kdissect.incidents.model import Incident
from kdissect.sql import Database
from kdissect.sql.requests import endpoint, make_requests
from kdissect.text import shell_word

Row = dict[str, Any]
# A broker holds back the responses of these until records or members arrive, so that a request
# without a response is no sign of a fault until its time is over.
HELD_APIS = "('Fetch', 'ShareFetch', 'JoinGroup', 'SyncGroup')"
# SQL of packets with known times: the first of each request and response
PACKETS = """
  SELECT request_capture_id AS capture_id, request_packet AS packet, request_time AS time
  FROM exchanges WHERE request_packet IS NOT NULL
  UNION ALL SELECT response_capture_id, response_packet, response_time
  FROM exchanges WHERE response_packet IS NOT NULL
"""


def lasted_ms(row: Row) -> float:
    """Return the time from `start` to `stop`."""
    length: timedelta = row["stop"] - row["start"]
    return length.total_seconds() * 1000


class Evidence:
    """The prepared tables of one table set."""

    def __init__(self, database: Database) -> None:
        self.has, self.has_field = database.has, database.has_field
        self.run, self.rows = database.run, database.rows
        make_requests(database)
        captures = self.rows("SELECT capture_id, path FROM captures")
        self._paths: dict[int, str] = {row["capture_id"]: row["path"] for row in captures}

    def with_topic(self, source: str, *path: str) -> str:
        """Return SQL for the rows of `source` with `topic`: the name of the topic `t` of Fetch.

        Since version 13 Fetch has ids of topics instead (KIP-516). path: of `t` in `api_fetch`.
        """
        name = "s.t.topic" if self.has_field("api_fetch", *path, "topic") else "NULL"
        if not self.has_field("api_fetch", *path, "topic_id"):
            return f"(SELECT s.*, {name} AS topic FROM {source} s)"
        return f"""(SELECT s.*, coalesce({name}, n.topic) AS topic
            FROM {source} s LEFT JOIN topic_names n ON n.topic_id = s.t.topic_id)"""

    def incident(
        self, row: Row, kind: str, severity: str, subject: str, text: str, **fields: Any
    ) -> Incident:
        """Return an incident with the times, counts, ids and brokers of a row.

        row: `start`, `stop`, and each of `requests`, `lost_ms`, `exchange_ids`, `connection_ids`,
        `broker` and `brokers` that its query selects. fields: of the incident; they come first.
        """
        ids = row.get("connection_ids") or []
        brokers = row["brokers"] if "brokers" in row else filter(None, [row.get("broker")])
        incident = Incident(
            kind,
            severity,
            row["start"],
            row["stop"],
            subject,
            text,
            request_count=row.get("requests", 0),
            time_lost_ms=row.get("lost_ms"),
            exchange_ids=row.get("exchange_ids", ()),
            connection_ids=ids,
            next_command=self.follow(ids) if ids else "",
            brokers=frozenset(brokers),
        )
        return replace(incident, **fields)

    def addresses(self, node_id: int) -> frozenset[str]:
        """Return the addresses that Metadata names for a node."""
        rows = self.rows(
            f"SELECT {endpoint('ip', 'port')} AS address FROM brokers "
            f"WHERE ip IS NOT NULL AND node_id = {node_id:d}"
        )
        return frozenset(row["address"] for row in rows)

    def command(self, verb: str, *options: str, capture_id: int | None = None) -> str:
        """Return a kdissect command over a capture, quoted for a shell."""
        first = next(iter(self._paths.values()), "CAPTURE")
        path = self._paths.get(capture_id, first) if capture_id is not None else first
        return " ".join(shell_word(word) for word in ("kdissect", verb, path, *options))

    def follow(self, connection_ids: Sequence[int]) -> str:
        """Return the command that shows the first connection, so that the command stays short."""
        return self.command("show", "--follow", str(connection_ids[0]))
