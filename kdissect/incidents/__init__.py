"""Incidents: the problems in a capture that users ask about, each with its evidence.

A kind of incident is a function that `incident.kind` registers. It asks the tables with SQL and
yields an `Incident` for each one that its evidence establishes; without evidence it yields nothing.
It is called only if its signs are there, since planning its queries takes longer than most captures
need to answer them.
`causes` then removes incidents that another one explains. All kinds read tables only, so that sets
that Spark wrote and captures that were read in process give the same incidents.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pyarrow as pa

from kdissect.incidents.causes import without_consequences
from kdissect.incidents.evidence import Evidence
from kdissect.incidents.incident import KINDS, SEVERITIES, incident_table, json_rows
from kdissect.incidents.leader_changes import make_leaders
from kdissect.incidents.produced_records import make_sent
from kdissect.sql import Database

# Modules with kinds
_MODULES = (
    *("outages", "broker_stall", "connections", "security", "groups", "consumer_stuck"),
    *("transactions", "produced_records", "storms", "leader_changes", "slowness", "captures"),
    "errors",
)
for _module in _MODULES:
    import_module(f"{__name__}.{_module}")

__all__ = ["KINDS", "SEVERITIES", "find_incidents", "json_rows"]


def find_incidents(database: Database) -> pa.Table:
    """Return the table `incidents` of a table set. database: with the tables of `make_requests`."""
    evidence = Evidence(database)
    make_sent(evidence)
    make_leaders(evidence)
    found = [
        replace(incident, kind=name)
        for name, kind in KINDS.items()
        if evidence.has(kind.signs)
        for incident in kind.find(evidence)
    ]
    return incident_table(without_consequences(found))
