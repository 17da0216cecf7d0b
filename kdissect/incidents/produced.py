"""The table `produced`: batches that producers sent, with the offsets that brokers gave them.

Two kinds of incidents read it. A row is a partition of a Produce request; `first_offset` and
`error` are those of its response, null without one.
"""

from __future__ import annotations

from kdissect.incidents.facts import Facts
from kdissect.protocol.error_codes import ErrorCode

# A broker that answers with one of these may have appended the batch already.
_UNDECIDED = (
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    ErrorCode.UNKNOWN_SERVER_ERROR,
)


def make_produced(facts: Facts) -> bool:
    """Create the table, once; return False if no response in the set has an offset.

    Its column `is_lost` means that the batch may have been appended, or not.
    """
    if not facts.has_field(
        "api_produce", "response", "responses", "partition_responses", "base_offset"
    ):
        return False
    codes = ", ".join(f"{code:d}" for code in _UNDECIDED)
    has_ids = facts.has_field("api_produce", "response", "responses", "topic_id")
    same_topic = "o.name = b.name" + (" OR o.topic_id = b.topic_id" if has_ids else "")
    topic_id = "t.topic_id" if has_ids else "NULL"
    facts.run(
        f"""
        CREATE TEMP TABLE IF NOT EXISTS produced AS
        WITH batches AS (
          SELECT exchange_id, topic AS name, topic_id, coalesce(topic, topic_id) AS topic,
            partition, sum(record_count)::BIGINT AS records, any_value(producer_id) AS producer_id,
            any_value(producer_epoch) AS producer_epoch, min(base_sequence) AS sequence,
            min(base_timestamp_ms) AS base_ms, max(max_timestamp_ms) AS max_ms
          FROM record_batches WHERE source = 'produce' AND record_count > 0
          GROUP BY exchange_id, topic, topic_id, partition
        ), topics AS (
          SELECT exchange_id, unnest(response.responses) AS t FROM api_produce
          WHERE response IS NOT NULL
        ), offsets AS (
          SELECT exchange_id, t.name AS name, {topic_id} AS topic_id,
            unnest(t.partition_responses) AS p FROM topics
        )
        SELECT b.* EXCLUDE (name, topic_id), r.client, r.broker, r.connection_id, r.time,
          r.request_packet AS packet, r.response_time, o.p.error_code AS error,
          CASE WHEN o.p.error_code = 0 AND o.p.base_offset >= 0 THEN o.p.base_offset END
            AS first_offset,
          coalesce(o.p.error_code IN ({codes}), r.response_time IS NULL
            AND r.status IN ('response_missing', 'connection_closed')) AS is_lost
        FROM batches b JOIN requests r USING (exchange_id) LEFT JOIN offsets o
          ON o.exchange_id = b.exchange_id AND o.p.index = b.partition AND ({same_topic})
        """
    )
    return True


# SQL for the batches with offsets. `room`: offsets between a batch and the one before it, which
# may belong to a batch without an offset; null for the first batch of a partition.
ACKNOWLEDGED = """
  SELECT *, first_offset - lag(first_offset + records)
    OVER (PARTITION BY topic, partition ORDER BY first_offset) AS room
  FROM produced WHERE first_offset IS NOT NULL
"""


def contents(condition: str) -> str:
    """Return SQL for `content`, a hash of keys and values, of the batches in Produce requests.

    condition: SQL over columns of `records` that chooses batches.
    """
    return f"""
      SELECT exchange_id, coalesce(topic, topic_id) AS topic, partition,
        hash(list((key, value) ORDER BY batch_index, record_index)) AS content
      FROM records WHERE source = 'produce' AND {condition}
      GROUP BY ALL
    """
