"""Incidents: the problems in a capture that users ask about, each with its evidence.

A kind of incident is a module with its `KIND` and a function `find`. It asks the tables with SQL
and yields an `Incident` for each one that its evidence establishes; without evidence it yields
nothing. `causes` then removes incidents that another one explains. All kinds read tables only, so
that sets that Spark wrote and captures that were read in process give the same incidents.
"""

from __future__ import annotations

from importlib import import_module

import pyarrow as pa

from kdissect.incidents.causes import without_consequences
from kdissect.incidents.evidence import Evidence
from kdissect.incidents.incident import SCHEMA, SEVERITIES, Kind, incident_table, json_rows
from kdissect.sql import Database

__all__ = ["KINDS", "SCHEMA", "SEVERITIES", "find_incidents", "json_rows"]

# Modules of kinds, in the order of the documentation
_NAMES = (
    *("broker_unreachable", "broker_stall", "idle_connection_cut"),
    *("advertised_address_unreachable", "login_failures", "tls_failure", "rebalance_loop"),
    *("member_too_slow", "consumer_stuck", "transaction_open", "duplicate_records"),
    *("out_of_order_records", "connection_storm", "metadata_storm", "retry_storm"),
    *("leader_change", "throttled", "slow_upload", "capture_loss", "clock_step", "capture_unread"),
    *("request_errors", "refused_requests", "unanswered_requests", "slow_api", "slow_client"),
    *("long_rebalance", "failed_transactions", "malformed_data", "retransmissions"),
    "inefficient_batches",
)
_MODULES = [import_module(f"{__name__}.{name}") for name in _NAMES]
KINDS: dict[str, Kind] = {module.KIND.name: module.KIND for module in _MODULES}


def find_incidents(database: Database) -> pa.Table:
    """Return the table `incidents` of a table set. database: with the tables of `make_requests`."""
    evidence = Evidence(database)
    found = [incident for module in _MODULES for incident in module.find(evidence)]
    return incident_table(without_consequences(found))
