"""Incidents: the problems in a capture that users ask about, each with its evidence.

A kind of incident is a query with a row for each incident, and a function that writes the text of a
row (`kind`). The queries read tables only, so that sets that Spark wrote and captures that were
read in process give the same incidents. `causes` then removes incidents that another one explains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

import pyarrow as pa

from kdissect.incidents.causes import without_consequences
from kdissect.incidents.incident import SEVERITIES, Incident, incident_table, json_rows
from kdissect.incidents.kind import KINDS, QUERIES, Arguments, make_table
from kdissect.incidents.leader_changes import LEADERS
from kdissect.incidents.produced_records import SENT
from kdissect.pipeline.filters import time_ns
from kdissect.pipeline.selection import Selection
from kdissect.sql import Database
from kdissect.sql.requests import quantile

# Modules with kinds
_MODULES = (
    *("outages", "broker_stall", "connections", "security", "groups", "consumer_stuck"),
    *("transactions", "produced_records", "storms", "leader_changes", "slowness", "captures"),
    "errors",
)
for _module in _MODULES:
    import_module(f"{__name__}.{_module}")

__all__ = ["KINDS", "SEVERITIES", "Arguments", "find_incidents", "json_rows"]


def find_incidents(
    database: Database,
    arguments: Arguments,
    written: Sequence[Selection],
    selection: Selection | None = None,
    exchange_ids: pa.Array | None = None,
) -> pa.Table:
    """Return the table `incidents` of a table set.

    database: with the tables of `make_requests`. arguments: of a command that reads the set,
    by verb. written: the exchanges that each set was written with; what others would show is
    unknown, and the texts say so. selection: keeps the incidents in its time that are of a client
    or a connection of the exchanges of its other filters, `exchange_ids` (int64).
    """
    made: dict[str, bool] = {}
    make_table(database, made, "sent", SENT)
    make_table(database, made, "leaders", LEADERS)
    for name, part in (("p50", 0.5), ("p95", 0.95)):
        database.run(f"CREATE TEMP MACRO {name}(value) AS {quantile(database, 'value', part)}")
    ends = [one.time_to_ns for one in written if one.time_to_ns is not None]
    end = f"to_timestamp({max(ends)} / 1e9)" if len(ends) == len(written) else "NULL"
    database.run(f"CREATE TEMP MACRO seen_until(time) AS least(time, {end})")
    captures = database.rows("SELECT path FROM captures ORDER BY first_time, path")
    paths = [row["path"] for row in captures] or ["CAPTURE"]
    found = [one for query in QUERIES for one in query.find(database, made, paths, arguments)]
    if selection is not None:
        found = _chosen(database, found, selection, exchange_ids)
    if not all(one.is_empty for one in written):
        choices = " or ".join(dict.fromkeys(map(str, written)))
        note = f" kdissect saw only these exchanges: {choices}."
        found = [replace(one, text=one.text + note) for one in found]
    return incident_table(without_consequences(found))


def _chosen(
    database: Database, incidents: list[Incident], selection: Selection, exchange_ids: pa.Array
) -> list[Incident]:
    database.create("chosen", pa.table({"exchange_id": exchange_ids}))
    names = database.rows(
        "SELECT unnest([client, connection_id::VARCHAR]) AS name, "
        "bool_or(exchange_id IN (FROM chosen)) AS is_chosen FROM requests GROUP BY name"
    )
    is_chosen = {row["name"]: row["is_chosen"] for row in names}
    first, last = selection.time_from_ns or 0, selection.time_to_ns or math.inf

    def concerns(one: Incident) -> bool:
        of = {is_chosen.get(name) for name in (*one.clients, *map(str, one.connection_ids))}
        # failed handshakes and faults of the capture have no exchange: they may concern each
        return True in of or False not in of

    return [
        one
        for one in filter(concerns, incidents)
        if first <= time_ns(one.end) and time_ns(one.start) < last
    ]
