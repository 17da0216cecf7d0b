"""`duplicate_records`: a batch whose response was lost was written, and then written again.

An idempotent producer repeats a batch with its sequence number, and the broker refuses the copy
(KIP-98). Without idempotence, or from a producer with a new id or epoch, the broker takes both.
Offsets are the proof: those of later batches leave room for the batch without a response.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.facts import Facts, follow
from kdissect.incidents.model import BAD, EVIDENCE_MAX, Incident
from kdissect.protocol.error_codes import ErrorCode
from kdissect.text import plural

# The producer gives up after delivery.timeout.ms (2 minutes); an application may then write again.
AGAIN_S = 300
# A broker that answers with one of these may have appended the batch already.
_UNDECIDED = (ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND)


def find(facts: Facts) -> Iterator[Incident]:
    """Yield the partitions with batches that were written twice."""
    if not facts.has("records") or not facts.has_field(
        "api_produce", "response", "responses", "partition_responses", "base_offset"
    ):
        return
    codes = ", ".join(f"{code:d}" for code in _UNDECIDED)
    has_ids = facts.has_field("api_produce", "response", "responses", "topic_id")
    same_topic = "o.name = b.topic" + (" OR o.topic_id = b.topic_id" if has_ids else "")
    topic_id = "t.topic_id" if has_ids else "NULL"
    rows = facts.rows(
        f"""
        WITH batches AS (
          SELECT b.exchange_id, b.topic, b.topic_id, b.partition, b.record_count AS records,
            r.client, r.broker, r.connection_id, r.time, r.response_time, r.status
          FROM record_batches b JOIN requests r USING (exchange_id)
          WHERE b.source = 'produce' AND b.record_count > 0
        ), topics AS (
          SELECT exchange_id, unnest(response.responses) AS t FROM api_produce
          WHERE response IS NOT NULL
        ), offsets AS (
          SELECT exchange_id, t.name AS name, {topic_id} AS topic_id,
            unnest(t.partition_responses) AS p FROM topics
        ), answered AS (
          SELECT b.*, o.p.base_offset AS first_offset, o.p.error_code AS error
          FROM batches b JOIN offsets o ON o.exchange_id = b.exchange_id
            AND o.p.index = b.partition AND ({same_topic})
        ), lost AS (
          SELECT topic, partition, exchange_id, records, time FROM batches
          WHERE response_time IS NULL AND status IN ('response_missing', 'connection_closed')
          UNION ALL
          SELECT topic, partition, exchange_id, records, time FROM answered
          WHERE error IN ({codes})
        ), acked AS (
          SELECT *, first_offset - lag(first_offset + records)
            OVER (PARTITION BY topic, partition ORDER BY first_offset) AS room
          FROM answered WHERE error = 0 AND first_offset >= 0
        ), contents AS (
          SELECT exchange_id, topic, partition,
            hash(list((key, value) ORDER BY batch_index, record_index)) AS content
          FROM records WHERE source = 'produce'
            AND (topic, partition) IN (SELECT (topic, partition) FROM lost)
          GROUP BY ALL
        ), copies AS (
          SELECT l.topic, l.partition, l.exchange_id AS lost_id, l.records, l.time AS lost_time,
            s.exchange_id, s.time, s.response_time, s.first_offset,
            s.client, s.broker, s.connection_id
          FROM (SELECT * FROM lost JOIN contents USING (exchange_id, topic, partition)) l
          ASOF JOIN (SELECT * FROM acked JOIN contents USING (exchange_id, topic, partition)) s
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
          list(DISTINCT connection_id)[:{EVIDENCE_MAX}] AS connection_ids
        FROM proven GROUP BY topic, partition ORDER BY start, topic, partition
        """
    )
    for row in rows:
        partition = f"{row['topic']}-{row['partition']}"
        yield Incident(
            "duplicate_records",
            BAD,
            row["start"],
            row["stop"],
            partition,
            f"{row['client']} wrote {plural(row['records'], 'record')} to {partition} twice: at "
            f"offset {row['first_offset']:,}, in a request without a successful response, and "
            f"again at offset {row['again_offset']:,} with the same keys and values. "
            "An idempotent producer that lives on (enable.idempotence) would repeat the sequence "
            "number, and the broker would refuse the copy.",
            row["requests"],
            None,
            row["exchange_ids"],
            row["connection_ids"],
            facts.command("show", *follow(row["connection_ids"])),
            frozenset((row["broker"],)),
        )
