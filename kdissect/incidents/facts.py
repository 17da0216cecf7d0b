"""Tables that several kinds of incidents read, in a DuckDB database over the views of a table set.

- `requests`: an exchange a row, with `client` (name and address) and `broker` (address and port).
  `failed`: it has an error that is no routine step. `is_unanswered`: the broker did not respond.
  `is_not_leader`: the broker no longer led a partition.
- `sessions`: a connection a row, with `client`, `broker` and `is_broker` (a broker opened it).
- `topic_names`: a topic id a row, with `topic`.

The macro `ms_between(earlier, later)` returns the milliseconds between two times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from kdissect.incidents.model import Incident
from kdissect.protocol.error_codes import ErrorCode
from kdissect.sql import Database, view_name
from kdissect.sql.exchange_facts import broker_connections, endpoint, is_fault, topic_names
from kdissect.sql.unanswered import unanswered
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
# SQL of a client as `text.client` writes it
_CLIENT = "coalesce(nullif({id}, ''), '(none)') || ' @ ' || {ip}"


def lasted_ms(row: Row) -> float:
    """Return the time from `start` to `stop`."""
    length: timedelta = row["stop"] - row["start"]
    return length.total_seconds() * 1000


class Facts:
    """The prepared tables of one table set.

    schemas: of the tables of the set, by their names. first, last: time of the first and the last
    packet, None without packets.
    """

    def __init__(self, database: Database, schemas: Mapping[str, pa.Schema]) -> None:
        self._database = database
        self._views = {view_name(name): schema for name, schema in schemas.items()}
        self._prepare()
        captures = self.rows("SELECT capture_id, path, first_time, last_time FROM captures")
        self._paths: dict[int, str] = {row["capture_id"]: row["path"] for row in captures}
        ends = [row for row in captures if row["first_time"] is not None]
        self.first: datetime | None = min((row["first_time"] for row in ends), default=None)
        self.last: datetime | None = max((row["last_time"] for row in ends), default=None)

    def has(self, view: str) -> bool:
        """Return whether the set has the table of a view, such as ``api_fetch``."""
        return view in self._views

    def has_field(self, view: str, *path: str) -> bool:
        """Return whether a view has a column with these nested fields; lists are looked into."""
        if view not in self._views:
            return False
        kind: Any = pa.struct(list(self._views[view]))
        for name in path:
            while pa.types.is_list(kind):
                kind = kind.value_type
            if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
                return False
            kind = kind.field(name).type
        return True

    def with_topic(self, source: str, *path: str) -> str:
        """Return SQL for the rows of `source` with `topic`: the name of the topic `t` of Fetch.

        Since version 13 Fetch has ids of topics instead (KIP-516). path: of `t` in `api_fetch`.
        """
        name = "s.t.topic" if self.has_field("api_fetch", *path, "topic") else "NULL"
        if not self.has_field("api_fetch", *path, "topic_id"):
            return f"(SELECT s.*, {name} AS topic FROM {source} s)"
        return f"""(SELECT s.*, coalesce({name}, n.topic) AS topic
            FROM {source} s LEFT JOIN topic_names n ON n.topic_id = s.t.topic_id)"""

    def run(self, statement: str) -> None:
        """Run a statement that makes a temporary table."""
        self._database.run(statement)

    def rows(self, query: str) -> list[Row]:
        """Return all rows of a query as plain values."""
        return self._database.rows(query)

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

    def _prepare(self) -> None:
        # DuckDB subtracts times with time zones in a calendar, which takes ten times as long
        self.run(
            "CREATE TEMP MACRO ms_between(earlier, later) AS "
            "(epoch_us(later) - epoch_us(earlier)) / 1e3"
        )
        brokers = broker_connections("api_fetch" in self._views)
        self.run(
            f"""
            CREATE TEMP TABLE sessions AS
            SELECT *, {_CLIENT.format(id="client_ids[1]", ip="client_ip")} AS client,
              {endpoint("client_ip", "client_port")} AS client_address,
              {endpoint("broker_ip", "broker_port")} AS broker,
              connection_id IN ({brokers}) AS is_broker
            FROM connections
            """
        )
        self.run(
            f"""
            CREATE TEMP TABLE requests AS
            SELECT e.exchange_id, e.connection_id, e.api_name AS api,
              {_CLIENT.format(id="e.client_id", ip="e.client_ip")} AS client, s.broker,
              coalesce(e.request_time, e.response_time) AS time, e.request_time,
              e.request_end_time, e.response_time, e.response_end_time, e.wait, e.service_ms,
              e.upload_ms, e.duration_ms, e.status, e.error_code, e.error_name,
              coalesce(list_contains(e.error_codes, {ErrorCode.NOT_LEADER_OR_FOLLOWER:d}), false)
                AS is_not_leader,
              e.throttle_time_ms, e.request_size, e.response_size,
              {is_fault("e.api_name", "e.error_codes")} AS failed,
              NOT coalesce(u.may_be_lost, true) AS is_unanswered, u.may_be_lost, s.is_broker
            FROM exchanges e LEFT JOIN sessions s USING (connection_id)
            LEFT JOIN ({unanswered()}) u USING (exchange_id)
            """
        )
        self.run(f"CREATE TEMP TABLE topic_names AS {topic_names()}")
