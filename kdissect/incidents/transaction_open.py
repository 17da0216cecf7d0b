"""`transaction_open`: a transaction that did not end kept records from read_committed readers.

A broker gives such readers the records below the last stable offset (LSO, KIP-98): the first offset
of an open transaction. Fetch responses show it below the high watermark, and at the same value.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import BROKERS, CONNECTION_IDS, Evidence, lasted_ms
from kdissect.incidents.incident import BAD, EVIDENCE_MAX, WARN, Incident, Kind
from kdissect.sql.partitions import fetch_answers
from kdissect.text import duration, plural

KIND = Kind(
    "transaction_open",
    "transactional ID",
    "an open transaction kept records from readers",
    "transactions",
)

# Kafka Streams ends a transaction each 100 ms, connectors each few seconds.
BLOCKED_S = 5
LONG_S = 10
_READ_COMMITTED = 1


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the transactions that blocked readers, or the partitions if none was captured."""
    answers = fetch_answers(evidence.database, f"request.isolation_level = {_READ_COMMITTED}")
    if answers is None or not evidence.has_field("api_fetch", "request", "isolation_level"):
        return
    rows = evidence.rows(
        f"""
        WITH states AS (
          -- a fetch session leaves out partitions that did not change (KIP-227)
          SELECT p.*, r.response_time AS time, r.client, r.broker, r.connection_id,
            coalesce(lead(r.response_time) OVER (PARTITION BY r.connection_id, p.topic, p.partition
              ORDER BY r.response_time), l.time) AS until
          FROM ({answers}) p JOIN requests r USING (exchange_id) JOIN (
            SELECT connection_id, max(response_time) AS time FROM requests WHERE api = 'Fetch'
            GROUP BY connection_id) l USING (connection_id)
          WHERE p.topic IS NOT NULL
        ), blocked AS (
          SELECT client, broker, topic, partition, stable, min(time) AS start,
            max(time) AS last_seen, max(until) AS stop, max(high) AS high, count(*) AS requests,
            list(exchange_id ORDER BY time)[:{EVIDENCE_MAX}] AS exchange_ids,
            arg_min(connection_id, time) AS connection_id
          FROM states WHERE error = 0 AND stable >= 0 AND stable < high
          GROUP BY client, broker, topic, partition, stable
          HAVING max(until) - min(time) >= INTERVAL {BLOCKED_S} SECONDS
        ), written AS (
          SELECT transactional_id, producer_id, begin_time, end_time,
            unnest(partitions) AS written FROM transactions
        ), causes AS (
          SELECT b.*, w.transactional_id, w.producer_id, w.begin_time, w.end_time,
            row_number() OVER (PARTITION BY b.client, b.topic, b.partition, b.stable
              ORDER BY w.begin_time NULLS LAST) AS place
          FROM blocked b LEFT JOIN written w ON w.written.topic = b.topic
            AND w.written.partition = b.partition AND w.begin_time <= b.start
            AND coalesce(w.end_time, b.stop) >= b.stop - INTERVAL 1 SECOND
        )
        SELECT transactional_id, producer_id,
          CASE WHEN producer_id IS NULL THEN topic || '-' || partition END AS unknown_at,
          coalesce(begin_time, min(start)) AS start,
          coalesce(end_time, max(stop)) AS stop, end_time IS NULL AS is_open,
          list_sort(list(DISTINCT topic || '-' || partition)) AS partitions,
          max(high - stable) AS waiting,
          list(DISTINCT client ORDER BY client) AS clients,
          {BROKERS},
          sum(requests)::BIGINT AS requests, arg_min(stable, start) AS stable,
          max(epoch_us(stop) - epoch_us(start)) / 1e3 AS lost_ms,
          flatten(list(exchange_ids ORDER BY start))[:{EVIDENCE_MAX}] AS exchange_ids,
          {CONNECTION_IDS}
        FROM causes WHERE place = 1
          -- without its transaction, only responses with the partition prove that it was open
          AND (producer_id IS NOT NULL OR last_seen - start >= INTERVAL {BLOCKED_S} SECONDS)
        GROUP BY transactional_id, producer_id, begin_time, end_time, unknown_at
        ORDER BY start, unknown_at
        """
    )
    for row in rows:
        length_ms = lasted_ms(row)
        where = ", ".join(sorted(row["partitions"])[:3])
        if row["producer_id"] is None:
            subject = row["unknown_at"]
            cause = "A transaction whose begin was not captured"
        else:
            subject = row["transactional_id"] or f"producer {row['producer_id']}"
            cause = f"The transaction of {subject} (producer id {row['producer_id']})"
        state = "was still open at the end" if row["is_open"] else "ended"
        yield evidence.incident(
            row,
            KIND,
            BAD if length_ms >= LONG_S * 1000 else WARN,
            subject,
            f"{cause} {state} after {duration(length_ms)}. Until then "
            f"{', '.join(row['clients'][:3])} could not read beyond offset {row['stable']:,} of "
            f"{where}, though {plural(row['waiting'], 'offset')} followed. "
            "kafka-transactions.sh find-hanging shows such transactions, abort ends them.",
        )
