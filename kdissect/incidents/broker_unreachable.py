"""`broker_unreachable`: clients lost a broker, and their attempts to connect again failed.

The outage begins with the broker's first silence: a connection that it closed, a request that it
did not answer, or a failed attempt. It ends with the next connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from kdissect.incidents.attempts import FAILED, PROVEN
from kdissect.incidents.facts import HELD_APIS, Facts, follow
from kdissect.incidents.model import BAD, EVIDENCE_MAX, Incident
from kdissect.text import duration, plural

# One refused SYN is a client that came late to a stop, or early to a start.
ATTEMPTS_MIN = 2
# The silence before the first failed attempt that belongs to the outage: request.timeout.ms is
# 30 s by default, and a client connects again after it.
SILENCE_S = 60


def find(facts: Facts) -> Iterator[Incident]:
    """Yield the outages of each broker that the capture has also seen at work."""
    rows = facts.rows(
        f"""
        WITH attempts AS (
          SELECT broker, first_time AS time, last_time, connection_id, client_ip,
            ({FAILED}) AS is_failed, coalesce(refused, false) AS is_refused, {PROVEN} AS is_proven
          FROM sessions WHERE syn_count > 0 AND (handshake_seen OR ({FAILED}))
        ), runs AS (
          SELECT *, count(*) FILTER (NOT is_failed)
              OVER (PARTITION BY broker ORDER BY time, is_failed) AS run,
            min(time) FILTER (NOT is_failed) OVER (PARTITION BY broker ORDER BY time, is_failed
              ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) AS back
          FROM attempts
        ), outages AS (
          SELECT broker, run, min(time) AS failed_from, max(last_time) AS failed_to,
            max(back) AS back, count(*) AS attempts, bool_or(is_proven) AS is_proven,
            bool_or(is_refused) AS is_refused, count(DISTINCT client_ip) AS hosts,
            list(connection_id ORDER BY time)[:{EVIDENCE_MAX}] AS connection_ids
          FROM runs WHERE is_failed GROUP BY broker, run
          HAVING attempts >= {ATTEMPTS_MIN} AND is_proven
        ), answered AS (
          SELECT o.*, (SELECT max(response_end_time) FROM requests r
            WHERE r.broker = o.broker AND r.response_end_time <= o.failed_from) AS answered
          FROM outages o
        ), closed AS (
          SELECT a.*, (SELECT min(s.last_time) FROM sessions s WHERE s.broker = a.broker
            AND s.closed_by = 'broker' AND s.handshake_seen AND s.last_time <= a.failed_from
            AND s.last_time >= a.failed_from - INTERVAL {SILENCE_S} SECONDS
            AND s.last_time >= a.answered) AS closed
          FROM answered a WHERE answered IS NOT NULL
        ), waiting AS (
          SELECT broker, exchange_id, client, request_time FROM requests
          WHERE status IN ('response_missing', 'connection_closed') AND api NOT IN {HELD_APIS}
        )
        SELECT c.*, count(w.exchange_id) AS requests, count(DISTINCT w.client) AS clients,
          min(w.request_time) AS waiting_from,
          list(w.exchange_id ORDER BY w.request_time)[:{EVIDENCE_MAX}] AS exchange_ids
        FROM closed c LEFT JOIN waiting w ON w.broker = c.broker AND w.request_time > answered
          AND w.request_time BETWEEN failed_from - INTERVAL {SILENCE_S} SECONDS
            AND coalesce(back, failed_to)
        GROUP BY ALL ORDER BY failed_from, c.broker
        """
    )
    for row in rows:
        signs = (row["failed_from"], row["closed"], row["waiting_from"])
        start = min(sign for sign in signs if sign is not None)
        end = row["back"] or row["failed_to"]
        how = "refused (RST)" if row["is_refused"] else "left without an answer (no SYN-ACK)"
        back = (
            f"It accepted a connection again after {_length(start, end)}"
            if row["back"]
            else f"It accepted none until the capture's end, {_length(start, end)} later"
        )
        lost = (
            f"; {plural(row['requests'], 'request')} of {plural(row['clients'], 'client')} "
            "had no response"
            if row["requests"]
            else ""
        )
        yield Incident(
            "broker_unreachable",
            BAD,
            start,
            end,
            row["broker"],
            f"{row['broker']} was unreachable: {plural(row['attempts'], 'connection attempt')} "
            f"of {plural(row['hosts'], 'host')} {how}{lost}. {back}.",
            row["requests"],
            (end - start).total_seconds() * 1000,
            row["exchange_ids"] or [],
            row["connection_ids"],
            facts.command("show", *follow(row["connection_ids"])),
            frozenset((row["broker"],)),
        )


def _length(start: datetime, end: datetime) -> str:
    return duration((end - start).total_seconds() * 1000)
