"""`unanswered_requests`: connections closed before the response to a request.

A Fetch that waits for records when its client closes is none, nor is a request without a response
at the end of the capture: it may have come later.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import BROKERS, HELD_APIS, IDS, Evidence
from kdissect.incidents.incident import INFO, Incident, Kind
from kdissect.text import plural

KIND = Kind("unanswered_requests", "client", "a connection closed before a response", "errors")


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the unanswered requests of each client."""
    rows = evidence.rows(
        f"""
        SELECT r.client, min(r.time) AS start, max(s.last_time) AS stop, count(*) AS requests,
          sum(epoch_us(s.last_time - r.time)) / 1e3 AS lost_ms,
          list(DISTINCT api ORDER BY api) AS apis, {BROKERS}, {IDS}
        FROM requests r JOIN (SELECT connection_id, last_time FROM sessions) s
          USING (connection_id)
        WHERE r.status = 'connection_closed' AND r.is_unanswered AND r.api NOT IN {HELD_APIS}
        GROUP BY r.client ORDER BY start, r.client
        """
    )
    for row in rows:
        yield evidence.incident(
            row,
            KIND,
            INFO,
            row["client"],
            f"{plural(row['requests'], 'request')} ({', '.join(row['apis'])}) had no response "
            "before the connection was closed. Counted as lost: the time until then.",
            next_command=evidence.command("show", "--where", "status = 'connection_closed'"),
        )
