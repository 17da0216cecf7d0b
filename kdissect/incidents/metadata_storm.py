"""`metadata_storm`: a client sent Metadata requests without a pause.

A client needs them when it starts, after an error, and every metadata.max.age.ms (5 minutes).
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import BROKERS, IDS, Evidence, runs
from kdissect.incidents.incident import WARN, Incident, Kind
from kdissect.text import byte_size, duration, plural

KIND = Kind("metadata_storm", "client", "a client sent Metadata requests without need", "traffic")

# A client that starts sends up to 17 within seconds. Waiting for a new topic or leader, it sends
# one each retry.backoff.ms: 100 ms, and up to 1 s apart (KIP-580). Monitors ask once a second or,
# if they are eager, twice.
REQUESTS_MIN = 30
PAUSE_MS = 1000
LENGTH_MS = 3000
RATE_MIN = 3  # a second


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the storms of each client."""
    metadata_requests = (
        "(SELECT * FROM requests WHERE api = 'Metadata' AND NOT coalesce(is_broker, false))"
    )
    rows = evidence.rows(
        f"""
        SELECT client, run, min(time) AS start, max(coalesce(response_time, time)) AS stop,
          count(*) AS requests, sum(request_size) + sum(response_size) AS bytes,
          mode(error_name) FILTER (failed) AS error, sum(duration_ms) AS lost_ms,
          {BROKERS},
          {IDS}
        FROM ({runs(metadata_requests, "client", PAUSE_MS)})
        GROUP BY client, run
        HAVING requests >= {REQUESTS_MIN}
          AND stop - start >= INTERVAL {LENGTH_MS} MILLISECONDS
          AND requests >= {RATE_MIN} * epoch(stop - start)
        ORDER BY start, client
        """
    )
    for row in rows:
        length_s = (row["stop"] - row["start"]).total_seconds()
        error = f" Their most frequent error: {row['error']}." if row["error"] else ""
        yield evidence.incident(
            row,
            KIND,
            WARN,
            row["client"],
            f"{row['client']} sent {plural(row['requests'], 'Metadata request')} in "
            f"{duration(length_s * 1000)}, {row['requests'] / length_s:,.1f} a second; requests "
            f"and responses have {byte_size(row['bytes'])}.{error}",
        )
