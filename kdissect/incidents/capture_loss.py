"""`capture_loss`: the capture lacks packets, which limits all other conclusions."""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import PACKETS, Evidence
from kdissect.incidents.incident import BAD, EVIDENCE_MAX, WARN, Incident, Kind
from kdissect.text import byte_size, plural, share

KIND = Kind("capture_loss", "capture", "the capture lacks packets that were sent", "overview")

# A larger share of missing bytes makes counts and latencies wrong, not only some rows.
SHARE_BAD = 0.001
_TCPDUMP = "tcpdump -i any -s 0 -B 65536 -w trace.pcap 'tcp port 9092'"
# The known bytes of each stream with a gap: packet `packet` has the byte before `pos`, at `time`.
# A broker answers in order, so a response is no older than a request that directly follows the
# previous request.
_ENDS = """
    SELECT connection_id, 'request' AS direction, request_capture_id AS capture_id,
      request_packet AS packet, request_pos + 1 AS pos, request_time AS time
    FROM near WHERE request_pos IS NOT NULL
    UNION ALL SELECT connection_id, 'request', request_capture_id, request_packet,
      request_pos + 4 + request_size, request_end_time
    FROM near WHERE request_end_time IS NOT NULL
    UNION ALL SELECT connection_id, 'response', response_capture_id, response_packet,
      response_pos + 1, response_time
    FROM near WHERE response_pos IS NOT NULL
    UNION ALL SELECT connection_id, 'response', response_capture_id, response_packet,
      response_pos + 4 + response_size, greatest(response_end_time, next_request_time)
    FROM near WHERE response_end_time IS NOT NULL
"""
# Each gap's packets were sent after `before` and before `after`. The packet of a gap follows it; at
# the end of a stream there is none, and FIN or RST shows the gap.
_BOUNDS = f"""
    WITH near AS (
      SELECT *, CASE WHEN lead(request_pos) OVER w = request_pos + 4 + request_size
        THEN lead(request_time) OVER w END AS next_request_time
      FROM exchanges WHERE connection_id IN (SELECT connection_id FROM gaps)
      WINDOW w AS (PARTITION BY connection_id ORDER BY request_pos)
    ), ends AS ({_ENDS}
    ), packets AS ({PACKETS}
    ), placed AS (
      SELECT g.*, e.time AS before,
        coalesce(e.capture_id = g.capture_id AND e.packet >= g.packet, false) AS is_last
      FROM gaps g ASOF LEFT JOIN ends e
        ON e.connection_id = g.connection_id AND e.direction = g.direction AND e.pos <= g.pos
    ), bounded AS (
      SELECT g.* EXCLUDE (before), coalesce(g.before, s.first_time) AS before,
        CASE WHEN NOT is_last AND p.time IS NOT NULL THEN p.time ELSE s.last_time END AS after
      FROM placed g ASOF LEFT JOIN packets p
        ON g.capture_id = p.capture_id AND p.packet >= g.packet
      LEFT JOIN sessions s USING (connection_id)
    )
    -- a response whose request is missing was sent after that request
    SELECT b.* EXCLUDE (after), least(b.after, (SELECT min(r.response_time) FROM near r
      WHERE r.connection_id = b.connection_id AND b.direction = 'request'
        AND r.status = 'request_missing' AND r.response_time BETWEEN b.before AND b.after
      )) AS after
    FROM bounded b
"""


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the captures that lack bytes of Kafka connections between captured ones.

    It begins when the first gap was over at the latest. It ends in the middle of the bounds of the
    last gap. Gaps that may be from one moment begin and end with the bounds that they share.
    """
    evidence.run(
        """
        CREATE TEMP TABLE gaps AS
        SELECT capture_id, packet, connection_id, direction, pos, byte_count FROM anomalies
        WHERE kind = 'gap' AND byte_count > 0
        """
    )
    if not evidence.rows("FROM gaps LIMIT 1"):
        return
    rows = evidence.rows(
        f"""
        WITH timed AS ({_BOUNDS}
        ), totals AS (
          SELECT sum(request_byte_count + response_byte_count) AS bytes,
            sum(request_missing_byte_count + response_missing_byte_count) AS missing
          FROM connections WHERE is_kafka
        )
        SELECT c.path, c.capture_id,
          min(t.after) AS first_after, max(t.before) AS last_before,
          coalesce(least(last_before, first_after), c.first_time) AS start,
          CASE WHEN last_before <= first_after THEN first_after
            ELSE coalesce(last_before + (arg_max(t.after, t.before) - last_before) / 2,
              c.last_time) END AS stop,
          count(*) AS gaps,
          sum(t.byte_count)::BIGINT AS missing, count(DISTINCT t.connection_id) AS connections,
          any_value(totals.missing / (totals.missing + totals.bytes))::DOUBLE AS part,
          c.truncated_packet_count AS truncated,
          (SELECT count(*) FROM requests WHERE may_be_lost) AS unjudged,
          list(DISTINCT t.connection_id ORDER BY t.connection_id)[:{EVIDENCE_MAX}] AS connection_ids
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
        yield evidence.incident(
            row,
            KIND,
            BAD if row["part"] >= SHARE_BAD else WARN,
            row["path"],
            f"{byte_size(row['missing'])} ({share(row['part'])}) are missing in "
            f"{plural(row['gaps'], 'gap')} of {plural(row['connections'], 'connection')}. Counts "
            f"and latencies near them are lower bounds. {unjudged}{reason}",
            next_command=_TCPDUMP,
        )
