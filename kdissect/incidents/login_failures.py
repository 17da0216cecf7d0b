"""`login_failures`: SASL logins that a broker refused."""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import Evidence
from kdissect.incidents.incident import BAD, EVIDENCE_MAX, INFO, Incident, Kind
from kdissect.sql.sessions import REFUSALS
from kdissect.text import plural

KIND = Kind("login_failures", "client", "SASL logins were refused", "errors")

# A user who mistypes a password tries again once or twice; a program goes on.
LOOP_MIN = 3
# Failures farther apart are separate incidents: clients retry within seconds (back-off 1 s).
PAUSE_S = 60


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the failed logins of each client at each broker."""
    codes = ", ".join(f"{code:d}" for code in REFUSALS)
    rows = evidence.rows(
        f"""
        WITH logins AS (
          SELECT connection_id, time AS began FROM requests WHERE api = 'SaslHandshake'
        ), refusals AS (
          FROM requests WHERE api IN ('SaslAuthenticate', 'SaslHandshake')
            AND error_code IN ({codes})
          -- before KIP-152 a broker closes the connection instead of an answer to a token
          UNION ALL SELECT r.* REPLACE (s.last_time AS response_time, s.client AS client)
          FROM requests r JOIN sessions s USING (connection_id)
          WHERE r.api = 'SaslToken' AND r.status = 'connection_closed' AND s.closed_by = 'broker'
        ), refused AS (
          SELECT r.*, s.principal, s.sasl_mechanism, coalesce(l.began, r.time) AS began,
            r.time - lag(r.time) OVER (PARTITION BY r.client, r.broker ORDER BY r.time)
              > INTERVAL {PAUSE_S} SECONDS AS is_new
          FROM refusals r JOIN sessions s USING (connection_id)
          ASOF LEFT JOIN logins l ON l.connection_id = r.connection_id AND l.began <= r.time
        ), runs AS (
          SELECT *, count(*) FILTER (is_new)
            OVER (PARTITION BY client, broker ORDER BY time) AS run FROM refused
        )
        SELECT client, broker, min(began) AS start, max(response_time) AS stop,
          count(*) AS requests, count(DISTINCT connection_id) AS connections,
          list(DISTINCT principal ORDER BY principal) FILTER (principal IS NOT NULL) AS principals,
          list(DISTINCT sasl_mechanism ORDER BY sasl_mechanism)
            FILTER (sasl_mechanism IS NOT NULL) AS mechanisms,
          mode(error_name) AS error, sum(duration_ms) AS lost_ms,
          list(exchange_id ORDER BY time)[:{EVIDENCE_MAX}] AS exchange_ids,
          list(connection_id ORDER BY time)[:{EVIDENCE_MAX}] AS connection_ids
        FROM runs GROUP BY client, broker, run ORDER BY start, client
        """
    )
    for row in rows:
        seconds = (row["stop"] - row["start"]).total_seconds()
        pace = f" in {seconds:,.0f} s" if seconds >= 1 else ""
        user = ", ".join(row["principals"] or []) or "an unknown principal"
        mechanism = ", ".join(row["mechanisms"] or []) or "SASL"
        yield evidence.incident(
            row,
            KIND,
            BAD if row["requests"] >= LOOP_MIN else INFO,
            row["client"],
            f"{row['broker']} refused {plural(row['requests'], 'login')}{pace} "
            f"of {user} by {mechanism}: {row['error'] or 'it closed the connection'}.",
        )
