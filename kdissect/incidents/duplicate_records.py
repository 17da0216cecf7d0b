"""`duplicate_records`: a batch whose response was lost was written, and then written again.

An idempotent producer repeats a batch with its sequence number, and the broker refuses the copy
(KIP-98). Without idempotence, or from a producer with a new id or epoch, the broker takes both.
Offsets are the proof: those of later batches leave room for the batch without a response.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import CONNECTION_IDS, Evidence
from kdissect.incidents.incident import BAD, EVIDENCE_MAX, Incident, Kind
from kdissect.incidents.produced import make_produced
from kdissect.text import plural

KIND = Kind("duplicate_records", "partition", "the same records were written twice", "topics")

# The producer gives up after delivery.timeout.ms (2 minutes); an application may then write again.
AGAIN_S = 300


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the partitions with batches that were written twice."""
    if not make_produced(evidence):
        return
    rows = evidence.rows(
        f"""
        WITH lost AS (
          SELECT topic, partition, exchange_id, records, time, content FROM produced
          WHERE is_lost
        ), acked AS (
          FROM produced WHERE first_offset IS NOT NULL
        ), copies AS (
          SELECT l.topic, l.partition, l.exchange_id AS lost_id, l.records, l.time AS lost_time,
            s.exchange_id, s.time, s.response_time, s.first_offset,
            s.client, s.connection_id
          FROM lost l ASOF JOIN acked s
            ON s.topic = l.topic AND s.partition = l.partition AND s.content = l.content
              AND s.records = l.records AND s.time > l.time
          WHERE s.time <= l.time + INTERVAL {AGAIN_S} SECONDS
        ), proven AS (
          SELECT c.*, min(h.first_offset - h.room) AS hole
          FROM copies c JOIN acked h ON h.topic = c.topic AND h.partition = c.partition
            AND h.time > c.lost_time AND h.first_offset <= c.first_offset
            AND h.room BETWEEN c.records AND (SELECT sum(l.records) FROM lost l
              WHERE l.topic = h.topic AND l.partition = h.partition AND l.time < h.time)
          GROUP BY ALL
        )
        SELECT topic, partition, min(time) AS start, max(response_time) AS stop,
          count(DISTINCT exchange_id) AS requests, sum(records)::BIGINT AS records,
          arg_min(client, time) AS client, arg_min(broker, time) AS broker,
          arg_min(hole, time) AS first_offset,
          arg_min(first_offset, time) AS again_offset,
          flatten(list([lost_id, exchange_id] ORDER BY time))[:{EVIDENCE_MAX}] AS exchange_ids,
          {CONNECTION_IDS}
        FROM proven JOIN (SELECT connection_id, broker FROM sessions) USING (connection_id)
        GROUP BY topic, partition ORDER BY start, topic, partition
        """
    )
    for row in rows:
        partition = f"{row['topic']}-{row['partition']}"
        yield evidence.incident(
            row,
            KIND,
            BAD,
            partition,
            f"{row['client']} wrote {plural(row['records'], 'record')} to {partition} twice: at "
            f"offset {row['first_offset']:,}, in a request without a successful response, and "
            f"again at offset {row['again_offset']:,} with the same keys and values. "
            "An idempotent producer that lives on (enable.idempotence) would repeat the sequence "
            "number, and the broker would refuse the copy.",
        )
