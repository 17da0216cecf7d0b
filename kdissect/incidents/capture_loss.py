"""`capture_loss`: the capture lacks packets, which limits all other conclusions."""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.facts import Facts
from kdissect.incidents.model import BAD, EVIDENCE_MAX, WARN, Incident
from kdissect.text import byte_size, plural, share

# A larger share of missing bytes makes counts and latencies wrong, not only some rows.
SHARE_BAD = 0.001
_TCPDUMP = "tcpdump -i any -s 0 -B 65536 -w trace.pcap 'tcp port 9092'"
# Packets with known times, from which the time of any packet follows.
_PACKETS = """
    SELECT request_capture_id AS capture_id, request_packet AS packet, request_time AS time
    FROM exchanges WHERE request_packet IS NOT NULL
    UNION ALL SELECT response_capture_id, response_packet, response_time
    FROM exchanges WHERE response_packet IS NOT NULL
"""


def find(facts: Facts) -> Iterator[Incident]:
    """Yield the captures that lack bytes of Kafka connections between captured ones."""
    rows = facts.rows(
        f"""
        WITH gaps AS (
          SELECT a.capture_id, a.packet, a.connection_id, a.byte_count FROM anomalies a
          WHERE a.kind = 'gap' AND a.byte_count > 0
        ), packets AS ({_PACKETS}), timed AS (
          SELECT g.*, p.time FROM gaps g ASOF LEFT JOIN packets p
            ON g.capture_id = p.capture_id AND p.packet <= g.packet
        ), totals AS (
          SELECT sum(request_byte_count + response_byte_count) AS bytes,
            sum(request_missing_byte_count + response_missing_byte_count) AS missing
          FROM connections WHERE is_kafka
        )
        SELECT c.path, c.capture_id, coalesce(min(t.time), c.first_time) AS start,
          coalesce(max(t.time), c.last_time) AS stop, count(*) AS gaps,
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
