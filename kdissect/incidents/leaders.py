"""The table `leaders`: the leaders of partitions as Metadata responses named them.

A row is a partition with a leader (its node id) and an epoch, and the first response that had them:
`time`, `exchange_id`, `connection_id`. Until version 7 Metadata has no epoch; it is -1 then.
"""

from __future__ import annotations

from kdissect.incidents.evidence import Evidence

_PARTITION = ("api_metadata", "response", "topics", "partitions")


def make_leaders(evidence: Evidence) -> None:
    """Create the table, once; it has no rows if no response names a leader."""
    if not evidence.has_field(*_PARTITION, "leader_id"):
        evidence.run(
            "CREATE TEMP TABLE IF NOT EXISTS leaders (topic VARCHAR, partition INTEGER, "
            "leader INTEGER, epoch INTEGER, time TIMESTAMPTZ, exchange_id BIGINT, "
            "connection_id BIGINT)"
        )
        return
    has_epoch = evidence.has_field(*_PARTITION, "leader_epoch")
    epoch = "coalesce(p.leader_epoch, -1)" if has_epoch else "-1"
    evidence.run(
        f"""
        CREATE TEMP TABLE IF NOT EXISTS leaders AS
        WITH topics AS (
          SELECT exchange_id, connection_id, response_time AS time, unnest(response.topics) AS t
          FROM api_metadata WHERE response_time IS NOT NULL
        ), partitions AS (
          SELECT exchange_id, connection_id, time, t.name AS topic, unnest(t.partitions) AS p
          FROM topics WHERE t.name IS NOT NULL
        )
        SELECT topic, p.partition_index AS partition, p.leader_id AS leader, {epoch} AS epoch,
          min(time) AS time, arg_min(exchange_id, time) AS exchange_id,
          arg_min(connection_id, time) AS connection_id
        FROM partitions WHERE p.leader_id >= 0 GROUP BY ALL
        """
    )
