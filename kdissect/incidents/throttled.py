"""`throttled`: a quota made a client wait.

The broker names the wait in its response (`throttle_time_ms`); since Kafka 2.0 it also ignores the
connection for that time (KIP-219).
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import BROKERS, IDS, Evidence, lasted_ms, runs
from kdissect.incidents.incident import INFO, WARN, Incident, Kind
from kdissect.text import duration, plural, share

KIND = Kind("throttled", "client", "a quota made a client wait", "throttling")

# Quotas are averages over seconds (quota.window.num * quota.window.size.seconds: 11 s).
PAUSE_MS = 30_000
# Shorter waits are what a quota is for; a client notices them no more than a slow network.
WAIT_MS = 1000
# A quota of requests throttles every API (KIP-124), and one of bytes only these.
_QUOTAS = {("Produce",): "of bytes written ", ("Fetch",): "of bytes read "}


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the waits of each client, with the quota that its APIs suggest."""
    waits = """(
      SELECT * REPLACE (response_time AS time) FROM requests WHERE throttle_time_ms > 0
    )"""
    rows = evidence.rows(
        f"""
        SELECT client, run, list(DISTINCT api ORDER BY api) AS apis, min(time) AS start,
          max(time + to_milliseconds(throttle_time_ms)) AS stop, count(*) AS requests,
          sum(throttle_time_ms)::DOUBLE AS lost_ms, max(throttle_time_ms) AS longest_ms,
          {BROKERS},
          {IDS}
        FROM ({runs(waits, "client", PAUSE_MS)})
        GROUP BY client, run ORDER BY start, client
        """
    )
    for row in rows:
        length_ms = lasted_ms(row)
        quota = _QUOTAS.get(tuple(row["apis"]), "")
        responses = plural(row["requests"], "response") + f" ({', '.join(row['apis'])})"
        yield evidence.incident(
            row,
            KIND,
            WARN if row["lost_ms"] >= WAIT_MS else INFO,
            row["client"],
            f"A quota {quota}made {row['client']} wait {duration(row['lost_ms'])} in "
            f"{duration(length_ms)} ({share(min(1, row['lost_ms'] / length_ms))} of the time): "
            f"{responses}, the longest wait "
            f"{duration(row['longest_ms'])}.",
        )
