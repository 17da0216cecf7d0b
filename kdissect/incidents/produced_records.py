"""Produced batches: written twice, in another order than they were sent, or inefficient.

The table `sent` has the batches that producers sent, with the offsets that brokers gave them. A row
is a partition of a Produce request; `first_offset` and `error` are those of its response, null
without one. `is_lost`: the batch may have been appended, or not, and its producer cannot know;
false if the capture may lack the response.

The table `produced` has two more columns. `content` is a hash of keys and values, for batches that
may be copies of another one; null without values. `room`: offsets between a batch and the one
before it, which may belong to a batch without an offset; null for the first batch of a partition.
"""

from __future__ import annotations

from kdissect.incidents.evidence import CONNECTION_IDS, IDS, PARTITION_NAME
from kdissect.incidents.incident import BAD, EVIDENCE_MAX, INFO
from kdissect.incidents.kind import kind
from kdissect.protocol.error_codes import ErrorCode
from kdissect.sql.requests import PRODUCE_ANSWERS, codes
from kdissect.tables.schemas import Row
from kdissect.text import byte_size, decimal, plural

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
      sum(record_count)::BIGINT AS records, min(base_timestamp_ms) AS base_ms,
      max(max_timestamp_ms) AS max_ms
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
      -- without any value, all of them may be hidden, and prove nothing
      CASE WHEN count(value) > 0
        THEN hash(list((key, value) ORDER BY batch_index, record_index)) END AS content
    FROM records WHERE source = 'produce' AND exchange_id IN ({_MAY_BE_COPIES}) GROUP BY ALL
"""
SENT = f"""
    WITH batches AS ({_BATCHES}), offsets AS ({PRODUCE_ANSWERS})
    SELECT b.* EXCLUDE (name, topic_id), r.client, r.connection_id, r.time, r.response_time,
      o.error, CASE WHEN o.error = 0 AND o.base_offset >= 0 THEN o.base_offset END AS first_offset,
      coalesce(o.error IN ({codes(_UNDECIDED)}), r.is_unanswered) AS is_lost
    FROM batches b JOIN requests r USING (exchange_id)
    LEFT JOIN offsets o ON o.exchange_id = b.exchange_id AND o.partition = b.partition
      AND (o.topic = b.name OR o.topic_id = b.topic_id)
"""
_PRODUCED = f"""
    SELECT s.*, c.content, first_offset - lag(first_offset + records)
      OVER (PARTITION BY topic, partition ORDER BY first_offset NULLS LAST) AS room
    FROM sent s LEFT JOIN ({_CONTENTS}) c USING (exchange_id, topic, partition)
"""
# The producer gives up after delivery.timeout.ms (2 minutes); an application may then write again.
AGAIN_S = 300
# A row for each partition with batches that were written twice. An idempotent producer repeats a
# batch with its sequence number, and the broker refuses the copy (KIP-98). Without idempotence, or
# from a producer with a new id or epoch, the broker takes both. Offsets are the proof: those of
# later batches leave room for the batch without a response.
_DUPLICATES = f"""
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
_TABLES = {"produced": _PRODUCED}


@kind("topics", BAD, PARTITION_NAME, "sent WHERE is_lost", _DUPLICATES, tables=_TABLES)
def duplicate_records(row: Row) -> str:
    """Return the text of the copies in a partition."""
    return (
        f"{row['client']} wrote {plural(row['records'], 'record')} to "
        f"{row['topic']}-{row['partition']} twice: at "
        f"offset {row['first_offset']:,}, in a request without a successful response, and "
        f"again at offset {row['again_offset']:,} with the same keys and values. "
        "An idempotent producer that lives on (enable.idempotence) would repeat the sequence "
        "number, and the broker would refuse the copy."
    )


# A broker has appended a batch that it refuses with this error.
_APPENDED = f"{ErrorCode.DUPLICATE_SEQUENCE_NUMBER:d}"
_FAILED = f"is_lost OR error NOT IN (0, {_APPENDED})"
# The batches in partitions with a failed one. Each row names the first attempt of its batch.
# `is_repetition`: it is the only attempt with an offset, and all attempts have the same records.
_SENDS = f"""
    WITH failed AS (
      SELECT DISTINCT topic, partition FROM produced
      WHERE {_FAILED}
    ), tried AS (
      SELECT p.* FROM produced p JOIN failed USING (topic, partition) WHERE base_ms >= 0
    ), attempts AS (
      SELECT {SAME_BATCH}, min(time) AS first_time, arg_min(exchange_id, time) AS first_id,
        arg_min(connection_id, time) AS first_connection_id, bool_or(is_lost) AS may_be_there,
        count(first_offset) = 1 AND min(content) = max(content)
          AND count(content) = count(*) AS is_one_batch
      FROM tried GROUP BY {SAME_BATCH} HAVING count(*) > 1
    )
    SELECT t.*, coalesce(first_time, time) AS sent, coalesce(first_id, exchange_id) AS first_id,
      coalesce(first_connection_id, connection_id) AS first_connection_id,
      coalesce(may_be_there, is_lost) AS may_be_there,
      coalesce(is_one_batch AND time > first_time, false) AS is_repetition
    FROM tried t LEFT JOIN attempts USING ({SAME_BATCH})
"""


def _overtaken(connection: str) -> str:
    """Return SQL of repeated batches behind one that the same producer first sent after them.

    The records of that one are newer as well, because librdkafka may put failed records into other
    batches. A response before that of the repetition proves that it was there first, even if the
    log was cut in between.
    """
    key = f"client, topic, partition, {connection}"
    return f"""
        SELECT l.*, e.exchange_id AS early_id, e.first_offset AS early_offset
        FROM (
          SELECT *, max(base_ms) OVER (PARTITION BY {key} ORDER BY first_offset
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS latest_ms
          FROM sends WHERE first_offset IS NOT NULL QUALIFY latest_ms > max_ms AND is_repetition
        ) l JOIN sends e USING ({key})
        WHERE e.base_ms = l.latest_ms AND e.sent > l.sent AND e.first_offset < l.first_offset
          AND e.response_time <= l.response_time
    """


# A row for each partition with batches that lie in another order than they were sent. A producer
# without idempotence has several requests in flight. If one fails and the next one does not, the
# repetition comes after it (max.in.flight.requests.per.connection). Sequence numbers prevent that
# (KIP-98). Requests of one connection have one producer; clients with equal names may be several.
# If the first attempt may have been appended, the offsets must leave no room for it.
_OVERTAKEN = f"""
    WITH overtaken AS ({_overtaken("first_connection_id")}
      UNION ALL {_overtaken("connection_id")}
    ), late AS (
      FROM overtaken l
      WHERE NOT may_be_there OR NOT EXISTS (
        FROM produced h WHERE h.topic = l.topic AND h.partition = l.partition
          AND h.time > l.sent AND h.first_offset <= l.first_offset
          AND coalesce(h.room, h.first_offset) >= l.records)
      QUALIFY row_number() OVER (
        PARTITION BY exchange_id, topic, partition ORDER BY early_offset) = 1
    ), shown AS (
      SELECT l.*, s.broker, e.request_packet AS packet, f.request_packet AS first_packet,
        g.request_packet AS early_packet
      FROM late l JOIN sessions s USING (connection_id) JOIN exchanges e USING (exchange_id)
      JOIN exchanges f ON f.exchange_id = l.first_id
      JOIN exchanges g ON g.exchange_id = l.early_id
    )
    SELECT topic, partition, min(response_time) AS start, max(response_time) AS stop,
      count(DISTINCT exchange_id) AS requests, sum(records)::BIGINT AS records,
      min_by(shown, response_time) AS first, [min_by(broker, response_time)] AS brokers,
      flatten(list([early_id, first_id, exchange_id] ORDER BY response_time)) AS exchange_ids,
      {CONNECTION_IDS}
    FROM shown GROUP BY topic, partition ORDER BY start, topic, partition
"""
_SENT_TABLES = {**_TABLES, "sends": _SENDS}


@kind("topics", BAD, PARTITION_NAME, f"sent WHERE {_FAILED}", _OVERTAKEN, tables=_SENT_TABLES)
def out_of_order_records(row: Row) -> str:
    """Return the text of the batches in a partition."""
    first = row["first"]
    return (
        f"{first['client']} wrote {plural(row['records'], 'record')} to "
        f"{row['topic']}-{row['partition']} out of "
        f"order. Its batch in packet {first['first_packet']:,} failed. The repetition in "
        f"packet {first['packet']:,} got offset {first['first_offset']:,}, and a batch that "
        f"was sent after the first attempt, in packet {first['early_packet']:,}, got offset "
        f"{first['early_offset']:,}. Set enable.idempotence, or "
        "max.in.flight.requests.per.connection to 1."
    )


PLAIN_BYTES_MIN = 1_000_000
SMALL_RECORDS, SMALL_BATCHES_MIN = 2, 1000
# A row for each producer that writes many bytes in batches of single records, or uncompressed.
# linger.ms, batch.size and compression.type of the producer decide.
_INEFFICIENT = f"""
    SELECT r.client, min(r.time) AS start, max(r.time) AS stop, count(*) AS batches,
      sum(b.record_count) / count(*) AS batch_records,
      coalesce(sum(b.size) FILTER (b.codec = 'none'), 0)::BIGINT AS plain,
      sum(b.size)::BIGINT AS bytes, {IDS}
    FROM record_batches b JOIN (
      SELECT exchange_id, connection_id, client, time FROM requests) r USING (exchange_id)
    WHERE b.source = 'produce' AND NOT coalesce(b.is_control, false) GROUP BY r.client
    HAVING plain >= {PLAIN_BYTES_MIN}
      OR batches >= {SMALL_BATCHES_MIN} AND batch_records < {SMALL_RECORDS}
    ORDER BY start, r.client
"""
_WRITES = "record_batches WHERE source = 'produce'"
_SIZES = (
    'kdissect sql {source} "select topic, codec, sum(size), avg(record_count) from record_batches '
    "where source = 'produce' group by all order by 3 desc\""
)


@kind("topics", INFO, "client", _WRITES, _INEFFICIENT, command=_SIZES)
def inefficient_batches(row: Row) -> str:
    """Return the text of a producer's batches."""
    return (
        f"{plural(row['batches'], 'batch', 'batches')} have "
        f"{decimal(row['batch_records'])} records on average, and {byte_size(row['plain'])} of "
        f"{byte_size(row['bytes'])} are not compressed."
    )
