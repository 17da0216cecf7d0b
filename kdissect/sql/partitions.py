"""SQL of the partitions that Fetch and Produce messages list, a partition of a message a row.

`topic` is its name. If the message has its id instead (KIP-516), `topic_names` has the name; it is
null if no message of the capture has both.
"""

from __future__ import annotations

_READ_COMMITTED = 1


def _partitions(topics: str, name: str = "topic", partitions: str = "partitions") -> str:
    """Return SQL of the rows of `topics` with `topic`, `topic_id` and `p` for each partition.

    topics: SQL with the struct `t`. name, partitions: its fields.
    """
    return f"""
        SELECT v.* EXCLUDE (t), coalesce(v.t.{name}, n.topic) AS topic, v.t.topic_id AS topic_id,
          unnest(v.t.{partitions}) AS p
        FROM ({topics}) v LEFT JOIN topic_names n ON n.topic_id = v.t.topic_id
    """


_ASKED = f"""
    SELECT exchange_id, request.max_bytes AS max_bytes,
      coalesce(request.isolation_level = {_READ_COMMITTED}, false) AS is_committed,
      unnest(request.topics) AS t
    FROM api_fetch WHERE coalesce(request.replica_id, -1) < 0
"""
# The partitions that consumers ask for: `exchange_id`, `topic`, `partition`, `position`,
# `max_bytes` of the response, and `is_committed`: the consumer reads committed records only.
FETCH_POSITIONS = f"""
    SELECT * EXCLUDE (p), p.partition AS partition, p.fetch_offset AS position
    FROM ({_partitions(_ASKED)})
"""


def fetch_answers(condition: str = "true") -> str:
    """Return SQL of the partitions in responses.

    It has `exchange_id`, `topic`, `partition`, `error`, the high watermark `high`, the last stable
    offset `stable`, and `replica`: another broker to read from (KIP-392). condition: of rows of
    `api_fetch`.
    """
    answered = f"""
        SELECT exchange_id, unnest(response.responses) AS t FROM api_fetch
        WHERE response IS NOT NULL AND {condition}
    """
    return f"""
        SELECT * EXCLUDE (p), p.partition_index AS partition, p.error_code AS error,
          p.high_watermark AS high, p.last_stable_offset AS stable,
          p.preferred_read_replica AS replica
        FROM ({_partitions(answered)})
    """


_ANSWERED = """
    SELECT exchange_id, unnest(response.responses) AS t FROM api_produce
    WHERE response IS NOT NULL
"""
# The partitions in responses to Produce: `exchange_id`, `topic`, `topic_id`, `partition`, `error`
# and `base_offset`.
PRODUCE_ANSWERS = f"""
    SELECT * EXCLUDE (p), p.index AS partition, p.error_code AS error, p.base_offset
    FROM ({_partitions(_ANSWERED, "name", "partition_responses")})
"""
