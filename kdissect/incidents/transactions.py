"""Transactions that blocked readers, or of which no commit was captured."""

from __future__ import annotations

from kdissect.incidents.evidence import CONNECTION_IDS, IDS, PARTIES, PARTITION_NAME
from kdissect.incidents.incident import BAD, EVIDENCE_MAX, INFO, WARN
from kdissect.incidents.kind import kind, lasted_ms
from kdissect.sql.requests import fetch_answers
from kdissect.tables.schemas import Row
from kdissect.text import duration, plural

# Kafka Streams ends a transaction each 100 ms, connectors each few seconds.
BLOCKED_S = 5
LONG_S = 10
_READ_COMMITTED = 1
_COMMITTED = f"request.isolation_level = {_READ_COMMITTED}"
# A row for each transaction that blocked readers, or for the partitions if none was captured. A
# broker gives read_committed readers the records below the last stable offset (LSO, KIP-98): the
# first offset of an open transaction. Fetch responses show it below the high watermark, and at the
# same value.
_BLOCKING = f"""
    WITH states AS (
      -- a fetch session leaves out partitions that did not change (KIP-227)
      SELECT p.*, r.response_time AS time, r.client, r.broker, r.connection_id,
        coalesce(lead(r.response_time) OVER (PARTITION BY r.connection_id, p.topic, p.partition
          ORDER BY r.response_time), l.time) AS until,
        max(p.stable) OVER (
          PARTITION BY p.topic, p.partition ORDER BY r.response_time DESC) AS highest_later
      FROM ({fetch_answers(_COMMITTED)}) p JOIN requests r USING (exchange_id) JOIN (
        SELECT connection_id, max(response_time) AS time FROM requests WHERE api = 'Fetch'
        GROUP BY connection_id) l USING (connection_id)
      WHERE p.topic IS NOT NULL
    ), blocked AS (
      SELECT client, broker, topic, partition, stable, min(time) AS start,
        max(time) AS last_seen, max(until) AS stop, max(high) AS high, count(*) AS requests,
        max(highest_later) > stable AS has_ended,
        list(exchange_id ORDER BY time)[:{EVIDENCE_MAX}] AS exchange_ids,
        arg_min(connection_id, time) AS connection_id
      FROM states WHERE error = 0 AND stable >= 0 AND stable < high
      GROUP BY client, broker, topic, partition, stable
      HAVING max(until) - min(time) >= INTERVAL {BLOCKED_S} SECONDS
    ), written AS (
      SELECT transactional_id, producer_id, begin_time, end_time,
        unnest(partitions, recursive := true) FROM transactions
    ), firsts AS (
      -- the offset of a transaction's first batch in a partition; null if no response gave it
      SELECT producer_id, begin_time, topic, partition,
        first(first_offset ORDER BY time) AS first_offset
      FROM (SELECT producer_id, begin_time, unnest(exchange_ids) AS exchange_id FROM transactions)
      JOIN sent USING (exchange_id) GROUP BY ALL
    ), causes AS (
      SELECT b.*, w.transactional_id, w.producer_id, w.begin_time, w.end_time,
        row_number() OVER (PARTITION BY b.client, b.topic, b.partition, b.stable
          ORDER BY w.begin_time NULLS LAST) AS place
      FROM blocked b LEFT JOIN (
        FROM written LEFT JOIN firsts USING (producer_id, begin_time, topic, partition)
      ) w ON w.topic = b.topic AND w.partition = b.partition AND w.begin_time <= b.start
        AND coalesce(w.end_time, b.stop) >= b.stop - INTERVAL 1 SECOND
        AND coalesce(w.first_offset = b.stable, true)
    )
    SELECT transactional_id, producer_id,
      CASE WHEN producer_id IS NULL THEN {PARTITION_NAME} END AS unknown_at,
      coalesce(begin_time, min(start)) AS start,
      coalesce(end_time, max(stop)) AS stop,
      end_time IS NULL AND NOT bool_or(has_ended) AS is_open,
      list_sort(list(DISTINCT {PARTITION_NAME})) AS partitions,
      max(high - stable) AS waiting,
      {PARTIES},
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
_SEVERITY = f"if(ms_between(start, stop) >= {LONG_S} * 1000, '{BAD}', '{WARN}')"
_WHOSE = "coalesce(unknown_at, nullif(transactional_id, ''), 'producer ' || producer_id)"


@kind("transactions", _SEVERITY, _WHOSE, f"api_fetch WHERE {_COMMITTED}", _BLOCKING)
def transaction_open(row: Row) -> str:
    """Return the text of a transaction."""
    cause = "A transaction whose begin was not captured"
    if row["producer_id"] is not None:
        name = row["transactional_id"] or f"producer {row['producer_id']}"
        cause = f"The transaction of {name} (producer id {row['producer_id']})"
    state = "was still open at the end" if row["is_open"] else "ended"
    return (
        f"{cause} {state} after {duration(lasted_ms(row))}. Until then "
        f"{', '.join(row['clients'][:3])} could not read beyond offset {row['stable']:,} of "
        f"{', '.join(row['partitions'][:3])}, though {plural(row['waiting'], 'offset')} followed. "
        "kafka-transactions.sh find-hanging shows such transactions, abort ends them."
    )


_WORDS = {"abort": "aborted", "fenced": "fenced", "open": "without an end in the capture"}
_COUNTS = ", ".join(f"count(*) FILTER (outcome = '{name}') AS {name}" for name in _WORDS)
# A row for all producers
_UNCOMMITTED = f"""
    SELECT count(*) AS failed, min(time) AS start, max(until) AS stop, {_COUNTS},
      (SELECT count(*) FROM transactions) AS transactions,
      mode(transactional_id ORDER BY transactional_id) AS most,
      count(DISTINCT transactional_id) AS producers, {PARTIES}, {IDS}
    FROM (
      SELECT transactional_id, outcome, exchange_ids[1] AS exchange_id,
        coalesce(begin_time, end_time) AS time, coalesce(end_time, begin_time) AS until
      FROM transactions WHERE outcome <> 'commit')
    LEFT JOIN (
      SELECT exchange_id, connection_id, broker, client FROM requests) USING (exchange_id)
    HAVING start IS NOT NULL
"""
# names the producer with most such transactions
_PRODUCERS = """coalesce(nullif(most, ''), '(none)')
  || if(producers > 1, ' and ' || format('{:,}', producers - 1) || ' more', '')"""
_SIGNS = "transactions where outcome <> 'commit'"
_LIST = f'kdissect sql {{source}} "from {_SIGNS}"'


@kind("transactions", INFO, _PRODUCERS, _SIGNS, _UNCOMMITTED, command=_LIST)
def failed_transactions(row: Row) -> str:
    """Return the text of the transactions of all producers."""
    said = ", ".join(f"{row[name]:,} {word}" for name, word in _WORDS.items() if row[name])
    return (
        f"No commit was captured of {row['failed']:,} of "
        f"{plural(row['transactions'], 'transaction')}: {said}."
    )
