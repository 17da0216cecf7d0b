"""Incidents: the problems in a capture that users ask about, each with its evidence.

A kind of incident is a module with a function `find`. It asks the tables with SQL and yields an
`Incident` for each one that its evidence establishes; without evidence it yields nothing. `causes`
then removes incidents that another one explains. All kinds read tables only, so that sets that
Spark wrote and captures that were read in process give the same incidents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa
import pyarrow.dataset as pads

from kdissect.incidents import (
    broker_stall,
    broker_unreachable,
    capture_loss,
    clock_step,
    connection_storm,
    consumer_stuck,
    duplicate_records,
    idle_connection_cut,
    leader_change,
    login_failures,
    member_too_slow,
    metadata_storm,
    out_of_order_records,
    rebalance_loop,
    retry_storm,
    slow_upload,
    throttled,
    tls_failure,
    transaction_open,
)
from kdissect.incidents.causes import without_consequences
from kdissect.incidents.evidence import Evidence
from kdissect.incidents.model import (
    KINDS,
    SCHEMA,
    SEVERITIES,
    Incident,
    incident_table,
    json_rows,
)
from kdissect.sql import Database

__all__ = ["KINDS", "SCHEMA", "SEVERITIES", "find_incidents", "json_rows"]

# broker_unreachable also finds advertised_address_unreachable: both start from the same outages
_FINDERS: dict[str, Callable[[Evidence], Iterator[Incident]]] = {
    "broker_unreachable": broker_unreachable.find,
    "broker_stall": broker_stall.find,
    "idle_connection_cut": idle_connection_cut.find,
    "login_failures": login_failures.find,
    "tls_failure": tls_failure.find,
    "member_too_slow": member_too_slow.find,
    "rebalance_loop": rebalance_loop.find,
    "connection_storm": connection_storm.find,
    "metadata_storm": metadata_storm.find,
    "retry_storm": retry_storm.find,
    "consumer_stuck": consumer_stuck.find,
    "transaction_open": transaction_open.find,
    "duplicate_records": duplicate_records.find,
    "out_of_order_records": out_of_order_records.find,
    "leader_change": leader_change.find,
    "throttled": throttled.find,
    "slow_upload": slow_upload.find,
    "capture_loss": capture_loss.find,
    "clock_step": clock_step.find,
}


def find_incidents(tables: Mapping[str, pads.Dataset]) -> pa.Table:
    """Return the table `incidents` of a table set.

    tables: the rows of each table by name, such as ``exchanges`` and ``apis/Fetch``.
    """
    with Database(tables) as database:
        evidence = Evidence(database)
        found = [incident for find in _FINDERS.values() for incident in find(evidence)]
    return incident_table(without_consequences(found))
