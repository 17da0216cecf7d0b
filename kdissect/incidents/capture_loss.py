"""`capture_loss`: the capture lacks packets, which limits all other conclusions."""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.facts import PACKETS, Facts
from kdissect.incidents.model import BAD, EVIDENCE_MAX, WARN, Incident
from kdissect.text import byte_size, plural, share

# A larger share of missing bytes makes counts and latencies wrong, not only some rows.
SHARE_BAD = 0.001
_TCPDUMP = "tcpdump -i any -s 0 -B 65536 -w trace.pcap 'tcp port 9092'"
# The known bytes of each stream with a gap: the stream has a packet with the byte before `pos` at
# `time`. A broker answers in order, so a response is no older than a request that directly follows
# the previous request.
_ENDS = """
    SELECT connection_id, 'request' AS direction, request_pos + 1 AS pos, request_time AS time
    FROM near WHERE request_pos IS NOT NULL
    UNION ALL SELECT connection_id, 'request', request_pos + 4 + request_size, request_end_time
    FROM near WHERE request_end_time IS NOT NULL
    UNION ALL SELECT connection_id, 'response', response_pos + 1, response_time
    FROM near WHERE response_pos IS NOT NULL
    UNION ALL SELECT connection_id, 'response', response_pos + 4 + response_size,
      greatest(response_end_time, next_request_time)
    FROM near WHERE response_end_time IS NOT NULL
"""


def find(facts: Facts) -> Iterator[Incident]:
    """Yield the captures that lack bytes of Kafka connections between captured ones.

    An incident begins at the last packet before the first gap, in the gap's stream: the missing
    packet was sent after it.
    """
    facts.run(
        """
        CREATE TEMP TABLE gaps AS
        SELECT capture_id, packet, connection_id, direction, pos, byte_count FROM anomalies
        WHERE kind = 'gap' AND byte_count > 0
        """
    )
    if not facts.rows("FROM gaps LIMIT 1"):
        return
    rows = facts.rows(
        f"""
        WITH near AS (
          SELECT *, CASE WHEN lead(request_pos) OVER w = request_pos + 4 + request_size
            THEN lead(request_time) OVER w END AS next_request_time
          FROM requests WHERE connection_id IN (SELECT connection_id FROM gaps)
          WINDOW w AS (PARTITION BY connection_id ORDER BY request_pos)
        ), ends AS ({_ENDS}
        ), packets AS ({PACKETS}
        ), placed AS (
          SELECT g.*, e.time AS before FROM gaps g ASOF LEFT JOIN ends e
            ON e.connection_id = g.connection_id AND e.direction = g.direction AND e.pos <= g.pos
        ), timed AS (
          SELECT g.* EXCLUDE (before), p.time, coalesce(g.before, s.first_time) AS before
          FROM placed g ASOF LEFT JOIN packets p
            ON g.capture_id = p.capture_id AND p.packet <= g.packet
          LEFT JOIN sessions s USING (connection_id)
        ), totals AS (
          SELECT sum(request_byte_count + response_byte_count) AS bytes,
            sum(request_missing_byte_count + response_missing_byte_count) AS missing
          FROM connections WHERE is_kafka
        )
        SELECT c.path, c.capture_id, coalesce(arg_min(t.before, t.packet), c.first_time) AS start,
          greatest(start, coalesce(max(t.time), c.last_time)) AS stop, count(*) AS gaps,
          sum(t.byte_count)::BIGINT AS missing, count(DISTINCT t.connection_id) AS connections,
          any_value(totals.missing / (totals.missing + totals.bytes))::DOUBLE AS part,
          c.truncated_packet_count AS truncated,
          (SELECT count(*) FROM requests WHERE may_be_lost) AS unjudged,
          list(DISTINCT t.connection_id)[:{EVIDENCE_MAX}] AS connection_ids
        FROM timed t JOIN captures c USING (capture_id), totals
        GROUP BY c.path, c.capture_id, c.first_time, c.last_time, c.truncated_packet_count
        ORDER BY start, path
        """
    )
    for row in rows:
        cut = plural(row["truncated"] or 0, "packet")
        reason = (
            f"The snap length cut {cut}: capture with -s 0."
            if row["truncated"]
            else "Check tcpdump's count of packets dropped by kernel, and give it a larger buffer."
        )
        unjudged = (
            f"{plural(row['unjudged'], 'request')} without an answer could not be judged. "
            if row["unjudged"]
            else ""
        )
        yield Incident(
            "capture_loss",
            BAD if row["part"] >= SHARE_BAD else WARN,
            row["start"],
            row["stop"],
            row["path"],
            f"{byte_size(row['missing'])} ({share(row['part'])}) are missing in "
            f"{plural(row['gaps'], 'gap')} of {plural(row['connections'], 'connection')}. Counts "
            f"and latencies near them are lower bounds. {unjudged}{reason}",
            connection_ids=row["connection_ids"],
            next_command=_TCPDUMP,
        )
