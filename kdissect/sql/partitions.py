"""SQL of the partitions that Fetch and Produce messages list, a partition of a message a row.

`topic` is its name. If the message has its id instead (KIP-516), `topic_names` has the name; it is
null if no message of the capture has both. A field that no captured version has is null.
"""

from __future__ import annotations

from kdissect.sql.database import Database

_READ_COMMITTED = 1


def fetch_positions(database: Database) -> str | None:
    """Return SQL of the partitions that consumers ask for; None without any.

    It has `exchange_id`, `topic`, `partition`, `position`, `max_bytes` of the response, and
    `is_committed`: the consumer reads committed records only.
    """
    if not database.has_field("api_fetch", "request", "topics", "partitions", "fetch_offset"):
        return None
    has_isolation = database.has_field("api_fetch", "request", "isolation_level")
    level = "request.isolation_level" if has_isolation else "0"
    asked = f"""
        SELECT exchange_id, request.max_bytes AS max_bytes,
          coalesce({level} = {_READ_COMMITTED}, false) AS is_committed,
          unnest(request.topics) AS t
        FROM api_fetch WHERE coalesce(request.replica_id, -1) < 0
    """
    return f"""
        SELECT * EXCLUDE (p), p.partition AS partition, p.fetch_offset AS position
        FROM ({_partitions(database, asked, "api_fetch", "request", "topics")})
    """


def fetch_answers(database: Database, condition: str = "true") -> str | None:
    """Return SQL of the partitions in responses; None without any.

    It has `exchange_id`, `topic`, `partition`, `error`, the high watermark `high`, the last stable
    offset `stable`, and `replica`: another broker to read from (KIP-392). condition: of rows of
    `api_fetch`.
    """
    path = ("api_fetch", "response", "responses")
    if not database.has_field(*path, "partitions", "high_watermark"):
        return None
    stable, replica = (
        f"p.{name}" if database.has_field(*path, "partitions", name) else "NULL::BIGINT"
        for name in ("last_stable_offset", "preferred_read_replica")
    )
    answered = f"""
        SELECT exchange_id, unnest(response.responses) AS t FROM api_fetch
        WHERE response IS NOT NULL AND {condition}
    """
    return f"""
        SELECT * EXCLUDE (p), p.partition_index AS partition, p.error_code AS error,
          p.high_watermark AS high, {stable} AS stable, {replica} AS replica
        FROM ({_partitions(database, answered, *path)})
    """


def produce_answers(database: Database) -> str | None:
    """Return SQL of the partitions in responses; None without any.

    It has `exchange_id`, `topic`, `topic_id`, `partition`, `error` and `base_offset`.
    """
    path = ("api_produce", "response", "responses")
    if not database.has_field(*path, "partition_responses", "base_offset"):
        return None
    answered = """
        SELECT exchange_id, unnest(response.responses) AS t FROM api_produce
        WHERE response IS NOT NULL
    """
    return f"""
        SELECT * EXCLUDE (p), p.index AS partition, p.error_code AS error, p.base_offset
        FROM ({_partitions(database, answered, *path)})
    """


def _partitions(database: Database, topics: str, *path: str) -> str:
    """Return SQL of the rows of `topics` with `topic`, `topic_id` and `p` for each partition.

    topics: SQL with the struct `t`. path: of the list of topics.
    """
    name = "name" if path[0] == "api_produce" else "topic"
    partitions = "partition_responses" if path[0] == "api_produce" else "partitions"
    said = f"v.t.{name}" if database.has_field(*path, name) else "NULL"
    topic_id = "v.t.topic_id" if database.has_field(*path, "topic_id") else "NULL::VARCHAR"
    return f"""
        SELECT v.* EXCLUDE (t), coalesce({said}, n.topic) AS topic, {topic_id} AS topic_id,
          unnest(v.t.{partitions}) AS p
        FROM ({topics}) v LEFT JOIN topic_names n ON n.topic_id = {topic_id}
    """
