"""Incidents: the problems in a capture that users ask about, each with its evidence.

A kind of incident is a query with a row for each incident, and a function that writes the text of a
row (`kind`). The queries read tables only, so that sets that Spark wrote and captures that were
read in process give the same incidents. `causes` then removes incidents that another one explains.
"""

from __future__ import annotations

from importlib import import_module

import pyarrow as pa

from kdissect.incidents.causes import without_consequences
from kdissect.incidents.incident import SEVERITIES, incident_table, json_rows
from kdissect.incidents.kind import KINDS, QUERIES, Arguments, make_table
from kdissect.incidents.leader_changes import LEADERS
from kdissect.incidents.produced_records import SENT
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


def find_incidents(database: Database, arguments: Arguments) -> pa.Table:
    """Return the table `incidents` of a table set.

    database: with the tables of `make_requests`. arguments: of a command that reads the set,
    by verb.
    """
    made: dict[str, bool] = {}
    make_table(database, made, "sent", SENT)
    make_table(database, made, "leaders", LEADERS)
    for name, part in (("p50", 0.5), ("p95", 0.95)):
        database.run(f"CREATE TEMP MACRO {name}(value) AS {quantile(database, 'value', part)}")
    captures = database.rows("SELECT path FROM captures ORDER BY first_time, path")
    paths = [row["path"] for row in captures] or ["CAPTURE"]
    found = [one for query in QUERIES for one in query.find(database, made, paths, arguments)]
    return incident_table(without_consequences(found))
