"""A consumer that fetched the same offset again and again, though the log has more.

Its position does not move, so the responses are of no use to it: a batch larger than it accepts, an
error of the partition, or bytes that it cannot decode.
"""

from __future__ import annotations

from kdissect.incidents.evidence import PARTIES, PARTITION_NAME
from kdissect.incidents.incident import BAD, EVIDENCE_MAX
from kdissect.incidents.kind import kind, lasted_ms
from kdissect.protocol.error_codes import error_name
from kdissect.sql.requests import FETCH_POSITIONS, fetch_answers
from kdissect.tables.schemas import Row
from kdissect.text import byte_size, duration, plural

# A consumer may repeat an offset after a lost connection or a rebalance; then it moves on.
REPEATS_MIN = 4
LENGTH_MS = 5000
# A consumer that repeats a Fetch, or an application that fails on a record and seeks back to it,
# waits less than this in between. One that reads a topic anew from time to time waits longer.
PAUSE_MS = 30_000

_IN_SESSIONS = fetch_answers("request.session_epoch > 0")
# An incremental Fetch leaves out the partitions whose positions did not change, and the broker
# answers for them too (KIP-227): such a request repeats the last position of its connection.
_POSITIONS = f"""
    WITH named AS (
      SELECT p.*, r.client, r.connection_id, r.time
      FROM ({FETCH_POSITIONS}) p JOIN requests r USING (exchange_id)
      WHERE p.topic IS NOT NULL AND NOT coalesce(r.is_broker, false)
    )
    SELECT * EXCLUDE (named, known), unnest(known)
    FROM (
      SELECT *, last_value(named IGNORE NULLS) OVER (PARTITION BY connection_id, topic, partition
        ORDER BY time ROWS UNBOUNDED PRECEDING) AS known
      FROM (
        SELECT exchange_id, topic, partition, connection_id, time,
          struct_pack(client, position, max_bytes, is_committed) AS named FROM named
        UNION ALL BY NAME
        SELECT exchange_id, topic, partition, connection_id, time
        FROM ({_IN_SESSIONS}) JOIN requests USING (exchange_id)
        ANTI JOIN named USING (exchange_id, topic, partition) WHERE NOT is_broker
      )
    ) WHERE known IS NOT NULL
"""
# A request repeats a position if the request before it had the same one, or if an earlier one of
# its connection had: a consumer that seeks back has fetched more in between. Clients of one name
# may be several consumers, and then they have several connections. A longer pause ends a run.
_REPEATED = f"""
    WITH frequent AS (
      SELECT DISTINCT client, topic, partition FROM fetch_positions
      GROUP BY client, topic, partition, position HAVING count(*) >= {REPEATS_MIN}
    ), repetitions AS (
      SELECT *, ms_between(lag(time) OVER same, time) <= {PAUSE_MS} AS is_soon,
        is_soon AND (connection_id = lag(connection_id) OVER same
          OR position = lag(position) OVER (PARTITION BY client, topic, partition ORDER BY time)
        ) AS is_repetition
      FROM fetch_positions SEMI JOIN frequent USING (client, topic, partition)
      WINDOW same AS (PARTITION BY client, topic, partition, position ORDER BY time)
    ), runs AS (
      SELECT *, count(*) FILTER (NOT is_soon)
        OVER (PARTITION BY client, topic, partition, position ORDER BY time) AS run
      FROM repetitions
    )
    FROM runs QUALIFY count(*) FILTER (is_repetition)
      OVER (PARTITION BY client, topic, partition, position, run) >= {REPEATS_MIN - 1}
"""
_ANSWERS = fetch_answers("exchange_id IN (SELECT exchange_id FROM repeated_positions)")
# A row for each partition in which a consumer does not advance
_STUCK = f"""
    WITH states AS (
      -- other responses name another replica to read from (KIP-392)
      SELECT *, CASE WHEN stable IS NULL THEN high WHEN stable >= 0 THEN stable END AS limit_at
      FROM ({_ANSWERS}) WHERE coalesce(replica, -1) < 0
    ), useless AS (
      SELECT r.*, s.error, s.high, b.batch_size, q.broker, q.response_time
      FROM repeated_positions r JOIN states s USING (exchange_id, topic, partition)
      JOIN requests q USING (exchange_id) LEFT JOIN (
        SELECT exchange_id, topic, partition, max(size) AS batch_size FROM record_batches
        WHERE source = 'fetch' GROUP BY ALL) b USING (exchange_id, topic, partition)
      WHERE s.error != 0
        OR s.high > r.position AND (NOT r.is_committed OR s.limit_at > r.position)
    ), stuck AS (
      SELECT client, topic, partition, position, min(response_time) AS first_response,
        max(response_time) AS stop, count(*) AS requests, max(high) AS high,
        max(batch_size) AS batch_size, any_value(max_bytes) AS max_bytes,
        mode(error ORDER BY error) FILTER (error != 0) AS error, min(time) AS since,
        {PARTIES},
        list(exchange_id ORDER BY time)[:{EVIDENCE_MAX}] AS exchange_ids,
        list(connection_id ORDER BY time)[:{EVIDENCE_MAX}] AS connection_ids
      FROM useless GROUP BY client, topic, partition, position, run
      HAVING count(*) >= {REPEATS_MIN}
        AND max(time) - min(time) >= INTERVAL {LENGTH_MS} MILLISECONDS
    )
    SELECT *, least(first_response, later) AS start, ms_between(start, stop) AS lost_ms
    FROM (
      -- An application that seeks back again and again fetches later positions in between. It had
      -- the records at this one when it asked for the last later position before the first time.
      SELECT *, (
        SELECT CASE WHEN bool_or(p.time > s.since) THEN max(p.time) FILTER (p.time < s.since) END
        FROM fetch_positions p
        WHERE p.client = s.client AND p.topic = s.topic AND p.partition = s.partition
          AND p.time <= s.stop
          AND p.position > s.position AND list_contains(s.connection_ids, p.connection_id)
        ) AS later
      FROM stuck s
    ) ORDER BY start, topic, partition
"""
_TABLES = {"fetch_positions": _POSITIONS, "repeated_positions": _REPEATED}


@kind("topics", BAD, PARTITION_NAME, "api_fetch", _STUCK, tables=_TABLES)
def consumer_stuck(row: Row) -> str:
    """Return the text of a consumer's position in a partition."""
    return (
        f"{row['client']} asked {plural(row['requests'], 'time')} in {duration(lasted_ms(row))} "
        f"for offset {row['position']:,} of {row['topic']}-{row['partition']}, which ends at "
        f"{row['high']:,}. {_cause(row)}"
    )


def _cause(row: Row) -> str:
    """Return a sentence about the reason that the responses show."""
    if row["error"]:
        return f"The broker answered with {error_name(row['error'])}."
    limit, size = row["max_bytes"] or 0, row["batch_size"] or 0
    if size > limit > 0:
        return (
            f"A batch has {byte_size(size)}, though the client asked for at most "
            f"{byte_size(limit)}. Raise fetch.max.bytes, max.partition.fetch.bytes or "
            "receive.message.max.bytes of the consumer."
        )
    return "The responses had no error: look at the consumer's log."
