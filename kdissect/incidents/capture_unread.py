"""`capture_unread`: parts of the capture say nothing; other conclusions are of the rest.

A damaged file, connections whose TLS was not decrypted, connections of which one direction was
captured, and captures without any Kafka.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import CONNECTION_IDS, Evidence
from kdissect.incidents.incident import INFO, WARN, Incident, Kind
from kdissect.sql.sessions import UNREAD_TLS
from kdissect.text import plural

KIND = Kind("capture_unread", "capture", "parts of the capture could not be read", "overview")


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield each reason once."""
    for row in evidence.rows(
        """
        SELECT path, error, first_time AS start, last_time AS stop FROM captures
        WHERE error IS NOT NULL AND format <> 'unknown' AND first_time IS NOT NULL
        ORDER BY start, path
        """
    ):
        yield evidence.incident(
            row, KIND, WARN, row["path"], f"The file could not be read to its end: {row['error']}"
        )
    halves = "least(request_segment_count, response_segment_count) = 0"
    # a connection that carries bytes was acknowledged: those packets were not captured
    one_way = f"is_kafka AND {halves} AND request_segment_count + response_segment_count > 0"
    reasons = (
        (UNREAD_TLS, INFO, "with TLS that was not decrypted: only their handshakes are known. A "
         "key log decrypts them (--keylog FILE)."),
        (one_way, WARN, "captured in one direction: latency is unknown, and so are errors without "
         "responses."),
        ("NOT EXISTS (FROM sessions WHERE is_kafka OR is_tls)", INFO, "without any Kafka traffic."),
    )  # fmt: skip
    for condition, severity, reason in reasons:
        for row in evidence.rows(
            f"""
            SELECT count(*) AS connections, min(first_time) AS start, max(last_time) AS stop,
              {CONNECTION_IDS}
            FROM sessions WHERE {condition} HAVING start IS NOT NULL
            """
        ):
            text = f"{plural(row['connections'], 'connection')} {reason}"
            yield evidence.incident(row, KIND, severity, evidence.captures, text)
