"""Leaders of partitions, and their changes.

The table `leaders` has the leaders of partitions as Metadata responses named them. A row is a
partition with a leader (its node id) and an epoch, and the first response that had them: `time`,
`exchange_id`, `connection_id`. Until version 7 Metadata has no epoch; it is -1 then.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import Evidence, lasted_ms, runs
from kdissect.incidents.incident import EVIDENCE_MAX, INFO, WARN, Incident, kind
from kdissect.protocol.error_codes import ErrorCode
from kdissect.sql.requests import endpoint, fetch_answers
from kdissect.text import duration, plural


def make_leaders(evidence: Evidence) -> None:
    """Create the table."""
    evidence.run(
        """
        CREATE TEMP TABLE leaders AS
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
    )


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


_CODES = ", ".join(f"{code:d}" for code in _SIGNS)
_REFUSED = f"requests WHERE list_has_any(error_codes, [{_CODES}])"
_CHANGED = f"""(
  SELECT topic FROM leaders GROUP BY topic, partition HAVING count(DISTINCT leader) > 1
  UNION ALL SELECT NULL FROM {_REFUSED})"""


@kind("errors", _CHANGED)
def leader_change(evidence: Evidence) -> Iterator[Incident]:
    """Yield the changes of leaders, those of one moment together.

    Clients find out by an error of the old leader, and then by Metadata: the first sign is the
    start.
    """
    answers = fetch_answers(f"exchange_id IN (SELECT exchange_id FROM {_REFUSED})")
    changes = "(SELECT *, coalesce(failed, known) AS time FROM noticed)"
    rows = evidence.rows(
        f"""
        WITH nodes AS (
          SELECT DISTINCT node_id, {endpoint("ip", "port")} AS broker FROM brokers
          WHERE ip IS NOT NULL
        ), refusals AS (
          -- partitions in responses of brokers that are not their leader any more
          SELECT topic, partition, response_time AS time, exchange_id, connection_id
          FROM (
            SELECT topic, partition, exchange_id, error FROM sent
            UNION ALL SELECT topic, partition, exchange_id, error FROM ({answers})
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
          SELECT exchange_id, response_time AS time, unnest(topics) AS topic
          FROM exchanges
          WHERE api_name IN ('Produce', 'Fetch', 'ListOffsets', 'OffsetForLeaderEpoch')
            AND list_has_any(error_codes, [{_CODES}])
        ), noticed AS (
          SELECT c.topic, c.partition, c.leader, c.old_leader, c.time AS known, c.exchange_id,
            min(e.time) AS failed, count(e.exchange_id) AS requests,
            coalesce(list(e.exchange_id ORDER BY e.time, e.exchange_id)
              FILTER (e.exchange_id IS NOT NULL), [])[:{EVIDENCE_MAX}] AS error_ids,
            [c.connection_id] AS connection_ids
          FROM changes c LEFT JOIN errors e ON e.topic = c.topic
            AND e.time BETWEEN greatest(c.old_time, c.time - INTERVAL {NOTICE_S} SECONDS)
              AND c.time
          WHERE c.old_leader IS NOT NULL AND c.old_leader != c.leader AND c.time > c.old_time
          GROUP BY ALL
        )
        SELECT old_leader, run, min(time) AS start, max(known) AS stop,
          list_sort(list(DISTINCT leader)) AS leaders, sum(requests)::BIGINT AS requests,
          list(topic || '-' || partition ORDER BY topic, partition) AS partitions,
          flatten(list(error_ids ORDER BY time, topic, partition))
            || list(exchange_id ORDER BY time, topic, partition) AS exchange_ids,
          flatten(list(connection_ids ORDER BY time, topic, partition)) AS connection_ids,
          (SELECT coalesce(list(broker), []) FROM nodes WHERE node_id = old_leader) AS brokers
        FROM ({runs(changes, "old_leader", TOGETHER_MS)}) GROUP BY ALL ORDER BY start, old_leader
        """
    )
    for row in rows:
        length_ms = lasted_ms(row)
        names = row["partitions"][:PARTITIONS_MAX]
        more = len(row["partitions"]) - len(names)
        errors = (
            f" Until clients knew it, {plural(row['requests'], 'request')} failed in "
            f"{duration(length_ms)}."
            if row["requests"]
            else " No captured request failed."
        )
        yield evidence.incident(
            row,
            WARN if length_ms >= LONG_MS and row["requests"] else INFO,
            ", ".join(names) + (f" and {more} more" if more else ""),
            f"{plural(len(row['partitions']), 'partition')} moved from node {row['old_leader']} "
            f"to {', '.join(map(str, row['leaders']))}.{errors}",
            time_lost_ms=length_ms if row["requests"] else None,
            exchange_ids=list(dict.fromkeys(row["exchange_ids"])),
            connection_ids=list(dict.fromkeys(row["connection_ids"])),
        )
