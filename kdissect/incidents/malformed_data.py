"""`malformed_data`: bytes of Kafka connections that break the rules of the protocol."""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import IDS, Evidence
from kdissect.incidents.incident import INFO, Incident, Kind
from kdissect.text import plural

KIND = Kind("malformed_data", "capture", "data breaks the rules of the protocol", "anomalies")


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield one incident of the serious anomalies, if there are any but missing bytes."""
    for row in evidence.rows(
        f"""
        SELECT list(DISTINCT kind ORDER BY kind) AS kinds, count(*) AS anomalies,
          count(DISTINCT exchange_id) AS requests, min(coalesce(time, first_time)) AS start,
          max(coalesce(time, last_time)) AS stop, {IDS}
        FROM (SELECT kind, exchange_id, connection_id FROM anomalies
          WHERE severity = 'error' AND kind <> 'gap')
        LEFT JOIN (SELECT exchange_id, time FROM requests) USING (exchange_id)
        LEFT JOIN (SELECT connection_id, first_time, last_time FROM sessions)
          USING (connection_id)
        HAVING start IS NOT NULL
        """
    ):
        count = plural(row["anomalies"], "serious anomaly", "serious anomalies")
        yield evidence.incident(
            row,
            KIND,
            INFO,
            evidence.captures,
            f"{count}: {', '.join(row['kinds'])}.",
            next_command=evidence.command("sql", "from anomalies where severity = 'error'"),
        )
