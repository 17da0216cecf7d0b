"""`retry_storm`: a client repeated a failing request without a pause."""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import BROKERS, IDS, Evidence, runs
from kdissect.incidents.incident import BAD, Incident, Kind
from kdissect.text import byte_size, duration, plural

KIND = Kind("retry_storm", "client", "a client repeated a failing request", "errors")

# With Kafka's defaults a client repeats a request after 100 ms, 200 ms, ... 1 s (KIP-580): 8 times
# in 5 s. An election of a leader takes less than that.
REQUESTS_MIN = 20
PAUSE_MS = 1000
LENGTH_MS = 2000
RATE_MIN = 3  # a second


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the storms of each client, API and error."""
    # by the times of the errors: requests that wait in a queue are no answer to them
    failing = """(
      SELECT * REPLACE (response_time AS time) FROM requests
      WHERE failed AND response_time IS NOT NULL AND NOT coalesce(is_broker, false)
    )"""
    rows = evidence.rows(
        f"""
        SELECT client, api, error_name AS error, run, min(request_time) AS start,
          max(time) AS stop, count(*) AS requests,
          sum(request_size) AS bytes, sum(duration_ms) AS lost_ms,
          {BROKERS},
          {IDS}
        FROM ({runs(failing, "client, api, error_name", PAUSE_MS)})
        WHERE api NOT IN ('SaslHandshake', 'SaslAuthenticate', 'Metadata')
        GROUP BY ALL
        HAVING requests >= {REQUESTS_MIN}
          AND stop - min(time) >= INTERVAL {LENGTH_MS} MILLISECONDS
          AND requests >= {RATE_MIN} * epoch(stop - start)
        ORDER BY start, client, api
        """
    )
    for row in rows:
        length_s = (row["stop"] - row["start"]).total_seconds()
        yield evidence.incident(
            row,
            KIND,
            BAD,
            row["client"],
            f"{row['client']} sent {plural(row['requests'], row['api'] + ' request')} "
            f"({byte_size(row['bytes'])}) in {duration(length_s * 1000)}, "
            f"{row['requests'] / length_s:,.1f} a second; "
            f"{', '.join(row['brokers'])} answered each with {row['error']}.",
        )
