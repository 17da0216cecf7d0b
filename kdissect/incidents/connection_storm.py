"""`connection_storm`: a client opened many short connections, such as a producer per record.

Each one costs the broker a thread's time, TLS and SASL handshakes, and a Metadata response.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import Evidence, lasted_ms, runs
from kdissect.incidents.incident import EVIDENCE_MAX, WARN, Incident, Kind
from kdissect.text import duration, plural

KIND = Kind("connection_storm", "client", "a client opened many short connections", "network")

# Clients open a few connections to each broker when they start; a test program that starts
# several clients opened 21 within a second.
CONNECTIONS_MIN = 30
PAUSE_MS = 2000
LENGTH_MS = 2000  # many clients that start at once are no storm
RATE_MIN = 2  # a second
SHORT_S = 5  # connections of pooled clients live for minutes (connections.max.idle.ms: 9 min)


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the storms of each client."""
    opened = f"""(
      SELECT *, first_time AS time FROM sessions
      WHERE handshake_seen AND (is_kafka OR is_tls) AND NOT is_broker
        AND last_time - first_time < INTERVAL {SHORT_S} SECONDS
    )"""
    rows = evidence.rows(
        f"""
        SELECT client, broker, run, min(time) AS start, max(time) AS stop,
          count(*) AS connections,
          list(connection_id ORDER BY time)[:{EVIDENCE_MAX}] AS connection_ids
        FROM ({runs(opened, "client, broker", PAUSE_MS)})
        GROUP BY ALL
        HAVING connections >= {CONNECTIONS_MIN}
          AND stop - start >= INTERVAL {LENGTH_MS} MILLISECONDS
          AND connections >= {RATE_MIN} * epoch(stop - start)
        ORDER BY start, client
        """
    )
    for row in rows:
        length_ms = lasted_ms(row)
        rate = row["connections"] / (length_ms / 1000)
        yield evidence.incident(
            row,
            KIND,
            WARN,
            row["client"],
            f"{row['client']} opened {plural(row['connections'], 'connection')} to "
            f"{row['broker']} in {duration(length_ms)}, {rate:,.1f} a second, "
            f"none open for {SHORT_S} s. An application should keep one client and share it.",
        )
