"""`out_of_order_records`: a batch got a higher offset than one that its producer sent later.

A producer without idempotence has several requests in flight. If one fails and the next one does
not, the repetition comes after it (max.in.flight.requests.per.connection). Sequence numbers prevent
that (KIP-98), so sequences in another order than the offsets are a fault of the broker.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import CONNECTION_IDS, Evidence, Row
from kdissect.incidents.incident import BAD, Incident, Kind
from kdissect.incidents.produced import SAME_BATCH, make_produced
from kdissect.protocol.error_codes import ErrorCode
from kdissect.text import plural

KIND = Kind(
    "out_of_order_records",
    "partition",
    "records were written in another order than they were sent",
    "topics",
)

# Sequence numbers go on at 0 after 2^31 - 1 (KIP-98): a larger difference is such a wrap.
_SEQUENCE_STEP_MAX = 1 << 30
# A broker has appended a batch that it refuses with this error.
_APPENDED = f"{ErrorCode.DUPLICATE_SEQUENCE_NUMBER:d}"
_EARLY = "e.exchange_id AS early_id, e.first_offset AS early_offset"
_COLUMNS = "l.exchange_id, l.first_id, l.topic, l.partition, l.records, l.first_offset"


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the partitions with batches that lie in another order than they were sent."""
    if not make_produced(evidence):
        return
    evidence.run(_sends())
    late = " UNION ALL ".join((_by_sequence(), _by_repetition()))
    rows = evidence.rows(
        f"""
        WITH late AS (
          FROM ({late}) QUALIFY row_number() OVER (
            PARTITION BY exchange_id, topic, partition ORDER BY early_offset) = 1
        ), shown AS (
          SELECT l.*, r.client, r.broker, r.connection_id, r.response_time,
            e.request_packet AS packet, f.request_packet AS first_packet,
            g.request_packet AS early_packet
          FROM late l JOIN requests r USING (exchange_id) JOIN exchanges e USING (exchange_id)
          JOIN exchanges f ON f.exchange_id = l.first_id
          JOIN exchanges g ON g.exchange_id = l.early_id
        )
        SELECT topic, partition, min(response_time) AS start, max(response_time) AS stop,
          count(DISTINCT exchange_id) AS requests, sum(records)::BIGINT AS records,
          min_by(shown, response_time) AS first,
          flatten(list([early_id, first_id, exchange_id] ORDER BY response_time)) AS exchange_ids,
          {CONNECTION_IDS}
        FROM shown GROUP BY topic, partition ORDER BY start, topic, partition
        """
    )
    for row in rows:
        partition = f"{row['topic']}-{row['partition']}"
        yield evidence.incident(
            row,
            KIND,
            BAD,
            partition,
            f"{row['first']['client']} wrote {plural(row['records'], 'record')} to {partition} out "
            f"of order. {_proof(row['first'])}",
            exchange_ids=list(dict.fromkeys(row["exchange_ids"])),
            brokers=frozenset((row["first"]["broker"],)),
        )


def _proof(first: Row) -> str:
    """Return the sentences about the first batch that came late, and their consequence."""
    offsets = f"offset {first['first_offset']:,}", f"offset {first['early_offset']:,}"
    if first["sequence"] is not None:
        return (
            f"Sequence number {first['sequence']:,} (packet {first['packet']:,}) got {offsets[0]}, "
            f"and the later one {first['early_sequence']:,} (packet {first['early_packet']:,}) got "
            f"{offsets[1]}. The broker should have refused that: look at its log."
        )
    return (
        f"Its batch in packet {first['first_packet']:,} failed. The repetition in packet "
        f"{first['packet']:,} got {offsets[0]}, and a batch that was sent after the first attempt, "
        f"in packet {first['early_packet']:,}, got {offsets[1]}. Set enable.idempotence, or "
        "max.in.flight.requests.per.connection to 1."
    )


def _sends() -> str:
    """Return SQL that makes a table of the batches in partitions with a failed one.

    Each row names the first attempt of its batch. `is_repetition`: it is the only attempt with an
    offset, and all attempts have the same records.
    """
    return f"""
        CREATE TEMP TABLE sends AS
        WITH failed AS (
          SELECT DISTINCT topic, partition FROM produced
          WHERE is_lost OR error NOT IN (0, {_APPENDED})
        ), tried AS (
          SELECT p.* FROM produced p JOIN failed USING (topic, partition) WHERE base_ms >= 0
        ), attempts AS (
          SELECT {SAME_BATCH}, min(time) AS first_time, arg_min(exchange_id, time) AS first_id,
            arg_min(connection_id, time) AS first_connection_id, bool_or(is_lost) AS may_be_there,
            count(first_offset) = 1 AND min(content) = max(content)
              AND count(content) = count(*) AS is_one_batch
          FROM tried GROUP BY {SAME_BATCH} HAVING count(*) > 1
        )
        SELECT t.*, epoch_us(coalesce(first_time, time)) AS sent,
          coalesce(first_id, exchange_id) AS first_id,
          coalesce(first_connection_id, connection_id) AS first_connection_id,
          coalesce(may_be_there, is_lost) AS may_be_there,
          coalesce(is_one_batch AND time > first_time, false) AS is_repetition
        FROM tried t LEFT JOIN attempts USING ({SAME_BATCH})
    """


def _by_sequence() -> str:
    """Return SQL for batches of a producer id and epoch behind one with a higher sequence."""
    source = """(
      SELECT *, sequence AS low, sequence AS high, sequence AS sent, exchange_id AS first_id
      FROM produced WHERE first_offset IS NOT NULL AND producer_id >= 0 AND sequence >= 0)"""
    key = "topic, partition, producer_id, producer_epoch"
    return f"""
        SELECT {_COLUMNS}, {_EARLY}, l.sequence, e.sequence AS early_sequence
        {_overtaken(source, key)}
        WHERE l.latest - l.sent < {_SEQUENCE_STEP_MAX}
    """


def _by_repetition() -> str:
    """Return SQL for repeated batches behind one that the same producer first sent after them.

    Its records are newer as well, because librdkafka may put failed records into other batches.
    Requests of one connection have one producer; clients with equal names may be several. If the
    first attempt may have been appended, the offsets must leave no room for it.
    """
    source = """(SELECT *, base_ms AS low, max_ms AS high FROM sends
      WHERE first_offset IS NOT NULL)"""
    key = "client, topic, partition"
    overtaken = " UNION ALL ".join(
        f"SELECT l.*, {_EARLY} {_overtaken(source, f'{key}, {connection}')} WHERE l.is_repetition"
        for connection in ("first_connection_id", "connection_id")
    )
    return f"""
        SELECT {_COLUMNS}, early_id, early_offset, NULL::INTEGER AS sequence,
          NULL::INTEGER AS early_sequence
        FROM ({overtaken}) l
        WHERE NOT may_be_there OR NOT EXISTS (
          FROM produced h WHERE h.topic = l.topic AND h.partition = l.partition
            AND epoch_us(h.time) > l.sent AND h.first_offset <= l.first_offset
            AND coalesce(h.room, h.first_offset) >= l.records)
    """


def _overtaken(source: str, key: str) -> str:
    """Return SQL, from FROM on, for rows `l` of a source behind a row `e` that was sent later.

    The rows of a key have the order of `low`, which for `e` is beyond `high` of `l`. A response
    before that of `l` proves that `e` was there first, even if the log was cut in between.
    """
    equal = " AND ".join(f"e.{name} = l.{name}" for name in key.split(", "))
    return f"""
        FROM (
          SELECT *, max(low) OVER (PARTITION BY {key} ORDER BY first_offset
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS latest
          FROM {source} QUALIFY latest > high
        ) l JOIN {source} e ON {equal} AND e.low = l.latest AND e.sent > l.sent
          AND e.first_offset < l.first_offset AND e.response_time <= l.response_time
    """
