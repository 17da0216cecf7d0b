"""`retransmissions`: TCP sent many segments of Kafka connections again."""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import Evidence
from kdissect.incidents.incident import INFO, Incident, Kind
from kdissect.text import plural, share

KIND = Kind("retransmissions", "capture", "TCP sent many segments again", "network")
SHARE_MIN = 0.01
_AGAIN = "(request_retransmitted_segment_count + response_retransmitted_segment_count)"
_ALL = "(request_segment_count + response_segment_count)"


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield one incident of all connections, which names the worst."""
    for row in evidence.rows(
        f"""
        SELECT sum({_AGAIN})::BIGINT AS again, again / sum({_ALL}) AS part,
          min(first_time) AS start, max(last_time) AS stop,
          arg_max(client_address || ' to ' || broker, {_AGAIN}) AS worst,
          arg_max(client, {_AGAIN}) AS client, max({_AGAIN}) AS worst_again,
          [arg_max(connection_id, {_AGAIN})] AS connection_ids
        FROM sessions WHERE is_kafka HAVING again >= {SHARE_MIN} * sum({_ALL}) AND again > 0
        """
    ):
        yield evidence.incident(
            row,
            KIND,
            INFO,
            evidence.captures,
            f"{plural(row['again'], 'segment')} ({share(row['part'])}) were sent again, "
            f"{row['worst_again']:,} of them on {row['worst']} ({row['client']}).",
        )
