"""Throttling: who had to wait for a quota. It sums `throttle_time_ms` of responses (KIP-219)."""

from __future__ import annotations

from kdissect.report.document import Document, Listing, Options, Section, listed
from kdissect.sql import Database


def collect(database: Database, _: Options) -> Document:
    """Make the table `throttling`, a client, API and broker a row; return its totals and rows."""
    database.run(
        """
        CREATE TEMP TABLE throttling AS
        SELECT client_id, client_ip, api, broker, count(*) AS responses,
          sum(throttle_time_ms)::BIGINT AS throttle_ms, max(throttle_time_ms) AS throttle_ms_max,
          min(response_time) AS first_time, max(response_time) AS last_time,
          arg_max(response_packet, throttle_time_ms) AS packet,
          arg_max(capture_id, throttle_time_ms) AS capture_id
        FROM requests WHERE throttle_time_ms > 0 GROUP BY ALL
        """
    )
    total = database.row(
        "SELECT coalesce(sum(responses), 0)::BIGINT AS responses, "
        "coalesce(sum(throttle_ms), 0)::BIGINT AS throttle_ms, "
        "max(throttle_ms_max) AS throttle_ms_max FROM throttling"
    )
    return {**total, "clients": listed(database, "throttling", "throttle_ms DESC, client_id, api")}


def section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["throttling"]
    listing = Listing("throttling", d["clients"])
    return Section(
        "throttling",
        "Throttling",
        [listing] if d["responses"] else [],
        "No response has a throttle time.",
        badge=d["responses"],
    )
