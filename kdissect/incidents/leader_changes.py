"""Leaders of partitions, and their changes.

The table `leaders` has the leaders of partitions as Metadata responses named them. A row is a
partition with a leader (its node id) and an epoch, and the first response that had them: `time`,
`exchange_id`, `connection_id`. Until version 7 Metadata has no epoch; it is -1 then.
"""

from __future__ import annotations

from kdissect.incidents.evidence import runs
from kdissect.incidents.incident import INFO, WARN
from kdissect.incidents.kind import kind, lasted_ms
from kdissect.protocol.error_codes import ErrorCode
from kdissect.sql.requests import codes, endpoint, fetch_answers
from kdissect.tables.schemas import Row
from kdissect.text import duration, plural

LEADERS = """
    WITH topics AS (
      SELECT exchange_id, connection_id, response_time AS time, unnest(response.topics) AS t
      FROM api_metadata WHERE response_time IS NOT NULL
    ), partitions AS (
      SELECT exchange_id, connection_id, time, t.name AS topic, unnest(t.partitions) AS p
      FROM topics WHERE t.name IS NOT NULL
    )
    SELECT topic, p.partition_index AS partition, p.leader_id AS leader,
      coalesce(p.leader_epoch, -1) AS epoch, min(time) AS time,
      arg_min(exchange_id, time) AS exchange_id,
      arg_min(connection_id, time) AS connection_id
    FROM partitions WHERE p.leader_id >= 0 GROUP BY ALL
"""

# Partitions whose leaders change within this time changed for one reason.
TOGETHER_MS = 2000
# Errors this long before the first Metadata response with the new leader belong to the change:
# clients refresh Metadata after an error within retry.backoff.max.ms (1 s).
NOTICE_S = 10
# An election takes less; clients with default settings do not notice it.
LONG_MS = 5000
PARTITIONS_MAX = 5  # that the subject names
_SIGNS = (
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.FENCED_LEADER_EPOCH,
    ErrorCode.UNKNOWN_LEADER_EPOCH,
    ErrorCode.LEADER_NOT_AVAILABLE,
)
_CODES = codes(_SIGNS)
_REFUSED = f"requests WHERE list_has_any(error_codes, [{_CODES}])"
_CHANGED = f"""(
  SELECT topic FROM leaders GROUP BY topic, partition HAVING count(DISTINCT leader) > 1
  UNION ALL SELECT NULL FROM {_REFUSED})"""
_ANSWERS = fetch_answers(f"exchange_id IN (SELECT exchange_id FROM {_REFUSED})")
_NOTICED = "(SELECT *, coalesce(failed, known) AS time FROM noticed)"
# A row for the changes of leaders of one moment. Clients find out by an error of the old leader,
# and then by Metadata: the first sign is the start.
_CHANGES = f"""
    WITH nodes AS (
      SELECT DISTINCT node_id, {endpoint("ip", "port")} AS broker FROM brokers
      WHERE ip IS NOT NULL
    ), refusals AS (
      -- partitions in responses of brokers that are not their leader any more
      SELECT topic, partition, response_time AS time, exchange_id, connection_id
      FROM (
        SELECT topic, partition, exchange_id, error FROM sent
        UNION ALL SELECT topic, partition, exchange_id, error FROM ({_ANSWERS})
      ) JOIN requests USING (exchange_id) WHERE error IN ({_CODES})
    ), seen AS (
      FROM leaders
      -- a broker that refuses was the leader before, if the capture begins after Metadata
      UNION ALL SELECT r.topic, r.partition, b.node_id, -2, r.time, r.exchange_id,
        r.connection_id
      FROM refusals r JOIN sessions s USING (connection_id) JOIN nodes b USING (broker)
      QUALIFY row_number() OVER (
        PARTITION BY r.topic, r.partition ORDER BY r.time, r.exchange_id) = 1
    ), changes AS (
      SELECT *, lag(leader) OVER w AS old_leader, lag(time) OVER w AS old_time FROM seen
      WINDOW w AS (PARTITION BY topic, partition ORDER BY epoch, time)
    ), errors AS (
      SELECT exchange_id, time, topic, partition FROM refusals
      -- of other responses the topics are known
      UNION ALL SELECT exchange_id, response_time, unnest(topics), NULL FROM exchanges
      WHERE api_name IN ('Produce', 'Fetch', 'ListOffsets', 'OffsetForLeaderEpoch')
        AND list_has_any(error_codes, [{_CODES}])
        AND exchange_id NOT IN (SELECT exchange_id FROM refusals)
    ), noticed AS (
      SELECT c.topic, c.partition, c.leader, c.old_leader, c.time AS known, c.exchange_id,
        min(e.time) AS failed, coalesce(list(e.exchange_id ORDER BY e.time, e.exchange_id)
          FILTER (e.exchange_id IS NOT NULL), []) AS error_ids,
        [c.connection_id] AS connection_ids
      FROM changes c LEFT JOIN errors e ON e.topic = c.topic
        AND coalesce(e.partition, c.partition) = c.partition
        AND e.time BETWEEN greatest(c.old_time, c.time - INTERVAL {NOTICE_S} SECONDS)
          AND c.time
      WHERE c.old_leader IS NOT NULL AND c.old_leader != c.leader AND c.time > c.old_time
      GROUP BY ALL
    )
    SELECT old_leader, run, min(time) AS start, max(known) AS stop,
      list_sort(list(DISTINCT leader)) AS leaders,
      len(list_distinct(flatten(list(error_ids)))) AS requests,
      CASE WHEN requests > 0 THEN ms_between(start, stop) END AS lost_ms,
      [p.topic || '-' || p.partition for p in
        list_sort(list(DISTINCT {{topic: topic, partition: partition}}))] AS partitions,
      flatten(list(error_ids ORDER BY time, topic, partition))
        || list(exchange_id ORDER BY time, topic, partition) AS exchange_ids,
      flatten(list(connection_ids ORDER BY time, topic, partition)) AS connection_ids,
      (SELECT coalesce(list(broker), []) FROM nodes WHERE node_id = old_leader) AS brokers
    FROM ({runs(_NOTICED, "old_leader", TOGETHER_MS)}) GROUP BY ALL ORDER BY start, old_leader
"""


_SEVERITY = f"if(lost_ms >= {LONG_MS}, '{WARN}', '{INFO}')"
_SUBJECT = f"""
  array_to_string(partitions[:{PARTITIONS_MAX}], ', ') || if(len(partitions) > {PARTITIONS_MAX},
    ' and ' || len(partitions) - {PARTITIONS_MAX} || ' more', '')
"""


@kind("errors", _SEVERITY, _SUBJECT, _CHANGED, _CHANGES)
def leader_change(row: Row) -> str:
    """Return the text of the changes of one moment."""
    errors = "No captured request failed."
    if row["requests"]:
        failed = plural(row["requests"], "request")
        errors = f"Until clients knew it, {failed} failed in {duration(lasted_ms(row))}."
    return (
        f"{plural(len(row['partitions']), 'partition')} moved from node {row['old_leader']} "
        f"to {', '.join(map(str, row['leaders']))}. {errors}"
    )
