"""The table `produced`: batches that producers sent, with the offsets that brokers gave them.

Two kinds of incidents read it. A row is a partition of a Produce request; `first_offset` and
`error` are those of its response, null without one. `is_lost`: the batch may have been appended, or
not, and its producer cannot know; false if the capture may lack the response. `content` is a hash
of keys and values, for batches that may be copies of another one. `room`: offsets between a batch
and the one before it, which may belong to a batch without an offset; null for the first batch of a
partition.
"""

from __future__ import annotations

from kdissect.incidents.evidence import Evidence
from kdissect.protocol.error_codes import ErrorCode
from kdissect.sql.partitions import produce_answers

# A broker that answers with one of these may have appended the batch already.
_UNDECIDED = (
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    ErrorCode.UNKNOWN_SERVER_ERROR,
)
# Attempts to send one batch: a producer that repeats it keeps the timestamps of its records.
SAME_BATCH = "client, topic, partition, base_ms, max_ms, records"

_BATCHES = """
    SELECT exchange_id, topic AS name, topic_id, coalesce(topic, topic_id) AS topic, partition,
      sum(record_count)::BIGINT AS records, any_value(producer_id) AS producer_id,
      any_value(producer_epoch) AS producer_epoch, min(base_sequence) AS sequence,
      min(base_timestamp_ms) AS base_ms, max(max_timestamp_ms) AS max_ms
    FROM record_batches WHERE source = 'produce' AND record_count > 0
    GROUP BY exchange_id, topic, topic_id, partition
"""
# Copies have the same batch or, from another producer, as many records as a lost batch.
_MAY_BE_COPIES = f"""
    SELECT exchange_id
    FROM sent SEMI JOIN (FROM sent WHERE first_offset IS NULL) USING (topic, partition)
    QUALIFY count(*) OVER (PARTITION BY {SAME_BATCH}) > 1
      OR bool_or(is_lost) OVER (PARTITION BY topic, partition, records)
"""
_CONTENTS = f"""
    SELECT exchange_id, coalesce(topic, topic_id) AS topic, partition,
      hash(list((key, value) ORDER BY batch_index, record_index)) AS content
    FROM records WHERE source = 'produce' AND exchange_id IN ({_MAY_BE_COPIES}) GROUP BY ALL
"""
_NO_CONTENTS = "SELECT exchange_id, topic, partition, NULL::UBIGINT AS content FROM sent LIMIT 0"


def make_produced(evidence: Evidence) -> bool:
    """Create the table, once; return False if no response in the set has an offset."""
    answers = produce_answers(evidence.database)
    if answers is None:
        return False
    codes = ", ".join(f"{code:d}" for code in _UNDECIDED)
    evidence.run(
        f"""
        CREATE TEMP TABLE IF NOT EXISTS sent AS
        WITH batches AS ({_BATCHES}), offsets AS ({answers})
        SELECT b.* EXCLUDE (name, topic_id), r.client, r.connection_id, r.time, r.response_time,
          o.error,
          CASE WHEN o.error = 0 AND o.base_offset >= 0 THEN o.base_offset END AS first_offset,
          coalesce(o.error IN ({codes}), r.is_unanswered) AS is_lost
        FROM batches b JOIN requests r USING (exchange_id)
        LEFT JOIN offsets o ON o.exchange_id = b.exchange_id AND o.partition = b.partition
          AND (o.topic = b.name OR o.topic_id = b.topic_id);

        CREATE TEMP TABLE IF NOT EXISTS produced AS
        SELECT s.*, c.content, first_offset - lag(first_offset + records)
          OVER (PARTITION BY topic, partition ORDER BY first_offset NULLS LAST) AS room
        FROM sent s LEFT JOIN ({_CONTENTS if evidence.database.has("records") else _NO_CONTENTS}) c
          USING (exchange_id, topic, partition)
        """
    )
    return True
