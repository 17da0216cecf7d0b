"""`broker_stall`: a broker sent no response on any connection while requests waited.

A long garbage collection, a stopped process or a blocked disk looks like this: all connections are
silent, then all responses come at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.facts import Facts
from kdissect.incidents.model import BAD, EVIDENCE_MAX, Incident
from kdissect.text import duration, plural

# Shorter pauses are usual: a young collection takes 100 ms, a slow disk write some hundreds.
STALL_MS = 1000
# A broker that runs again works off its queue at once; later responses are slow for other reasons.
RELEASE_MS = 500
# A broker answers these from memory. Other requests may wait for a disk, a replica or a controller.
QUICK_APIS = (
    *("ApiVersions", "Metadata", "Heartbeat", "FindCoordinator", "ListOffsets", "OffsetFetch"),
    *("Fetch", "SaslHandshake", "SaslAuthenticate"),
)

POLLS = ("Fetch", "ShareFetch")


def find(facts: Facts) -> Iterator[Incident]:
    """Yield the stalls of each broker.

    Waiting requests of two connections prove a stall, or those of one connection with a request of
    QUICK_APIS. A long poll that ended in time proves nothing.
    """
    polls = ", ".join(f"'{api}'" for api in POLLS)
    quick = ", ".join(f"'{api}'" for api in QUICK_APIS)
    rows = facts.rows(
        f"""
        WITH responses AS (
          SELECT broker, response_time,
            lag(response_time) OVER (PARTITION BY broker ORDER BY response_time) AS previous
          FROM requests WHERE response_time IS NOT NULL
        ), silences AS (
          SELECT broker, previous AS silent_from, response_time AS silent_to FROM responses
          WHERE ms_between(previous, response_time) >= {STALL_MS}
        ), waiting AS (
          SELECT s.broker, s.silent_from, s.silent_to, r.*,
            greatest(request_end_time, silent_from) AS waits_from
          FROM silences s JOIN requests r ON r.broker = s.broker
            AND r.response_time BETWEEN s.silent_to
              AND s.silent_to + INTERVAL {RELEASE_MS} MILLISECONDS
            AND r.request_end_time < s.silent_to
          WHERE r.wait = 'answer' AND r.service_ms IS NOT NULL
            AND ms_between(waits_from, s.silent_to) >= {RELEASE_MS}
        )
        SELECT broker, silent_from, silent_to, count(*) AS requests,
          count(DISTINCT connection_id) AS connections, count(DISTINCT client) AS clients,
          count(*) FILTER (api IN ({quick})) AS quick_requests,
          -- a poll that was on hold when the silence began does not show when the stall did
          min(waits_from) FILTER (waits_from > silent_from OR api NOT IN ({polls})) AS first_wait,
          max(epoch_us(silent_to) - epoch_us(waits_from)) / 1e3 AS longest_ms,
          sum(epoch_us(response_time) - epoch_us(waits_from)) / 1e3 AS lost_ms,
          list(exchange_id ORDER BY waits_from, exchange_id)[:{EVIDENCE_MAX}] AS exchange_ids,
          list(DISTINCT connection_id ORDER BY connection_id)[:{EVIDENCE_MAX}] AS connection_ids
        FROM waiting GROUP BY ALL
        HAVING longest_ms >= {STALL_MS} AND (connections > 1 OR quick_requests > 0)
        ORDER BY silent_from, broker
        """
    )
    for row in rows:
        start, end = row["first_wait"] or row["silent_from"], row["silent_to"]
        length = duration((end - start).total_seconds() * 1000)
        yield Incident(
            "broker_stall",
            BAD,
            start,
            end,
            row["broker"],
            f"{row['broker']} sent no response on any connection for {length}. "
            f"{plural(row['requests'], 'request')} of {plural(row['connections'], 'connection')} "
            f"({plural(row['clients'], 'client')}) waited; the responses came at once after it. "
            "Look at the broker's garbage collection log, its disk and its CPU at that time.",
            row["requests"],
            row["lost_ms"],
            row["exchange_ids"],
            row["connection_ids"],
            facts.follow(row["connection_ids"]),
            frozenset((row["broker"],)),
        )
