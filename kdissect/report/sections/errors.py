"""Errors with their places: the code, the message, the field, and the entities around it.

The tables `apis/*` hold every field. The fields of the answers that have an error become rows, with
their paths; a code takes what it is about from the structs around it.
"""

from __future__ import annotations

import pyarrow as pa

from kdissect.protocol.error_codes import RETRIABLE, error_name, routine_reason
from kdissect.report.document import Document, Listing, Options, Section, listed
from kdissect.report.sections.traffic import errors_over_time
from kdissect.sql import Database, view_name

# Fields of the structs around an error code, and what they name. Of `name` and `index` the list
# that has the struct tells it.
_SUBJECTS = {
    "topic": "topic",
    "topic_name": "topic",
    "topic_id": "topic id",
    "group_id": "group",
    "resource_name": "resource",
    "transactional_id": "transactional id",
    "member_id": "member",
    "partition_index": "partition",
    "partition_id": "partition",
    "partition": "partition",
    "broker_id": "broker",
    "log_dir": "folder",
    "producer_id": "producer id",
    "user": "user",
}
_WORDS = f"""
    CASE WHEN key = 'index' AND contains(list_name, 'partition') THEN 'partition'
      WHEN key = 'name' AND (contains(list_name, 'topic') OR list_name = 'responses') THEN 'topic'
      WHEN key = 'name' AND list_name <> '' THEN 'name'
      ELSE map({list(_SUBJECTS)}, {list(_SUBJECTS.values())})[key] END
"""
# The fields with a value in the responses of an API that have an error. Envelope's inner answer and
# the like (`*_decoded`) have places of their own. A struct of a list has the path `topics[0]`.
_FIELDS = """
    INSERT INTO response_fields
    SELECT exchange_id, id, key, path, atom ->> '$' AS value,
      regexp_extract(path, '(\\w+)\\[\\d+\\]$', 1) AS list_name
    FROM (
      SELECT a.exchange_id, to_json(a.response) AS response FROM {view} a
      SEMI JOIN failed_exchanges USING (exchange_id)
    ), json_tree(response)
    WHERE value IS NOT NULL AND key IS NOT NULL AND NOT contains(path, '_decoded')
"""
# The codes with what the structs around them name, the innermost first: the structs of
# `$.responses[0].partitions[1]` are that, `$.responses[0]` and `$`.
_FOUND = f"""
    CREATE TEMP TABLE found_errors AS
    WITH codes AS (
      SELECT exchange_id, id, path, substr(path || '.' || key, 3) AS place, value::SMALLINT AS code,
        string_split(path, '.') AS steps
      FROM response_fields WHERE ends_with(key, 'error_code') AND value <> '0'
    ), around AS (
      SELECT exchange_id, id, depth, array_to_string(steps[:depth], '.') AS path
      FROM (SELECT *, unnest(range(1, len(steps) + 1)) AS depth FROM codes)
    ), named AS (
      SELECT exchange_id, path, id AS field_id, value, {_WORDS} AS word FROM response_fields
    ), subjects AS (
      SELECT exchange_id, id, word, max_by(value, (depth, field_id)) AS value
      FROM around JOIN named USING (exchange_id, path)
      WHERE word IS NOT NULL AND NOT (word = 'topic' AND value = '') GROUP BY ALL
    ), about AS (
      SELECT exchange_id, id, any_value(value) FILTER (word = 'topic') AS topic,
        any_value(value) FILTER (word = 'topic id') AS topic_id,
        any_value(value) FILTER (word = 'partition')::INTEGER AS partition,
        string_agg(word || ' ' || value, ', ' ORDER BY word)
          FILTER (word NOT IN ('topic', 'topic id', 'partition')) AS subject
      FROM subjects GROUP BY ALL
    ), messages AS (
      SELECT exchange_id, path, max_by(value, key = 'error_message') AS message
      FROM response_fields WHERE key IN ('error_message', 'message') GROUP BY ALL
    )
    SELECT exchange_id, regexp_replace(place, '\\[\\d+\\]', '[]', 'g') AS place, place AS path,
      code, topic, topic_id, partition, subject, message
    FROM codes LEFT JOIN about USING (exchange_id, id) LEFT JOIN messages USING (exchange_id, path)
"""


def prepare(database: Database) -> None:
    """Make `errors`, a row for every error code of every response."""
    database.run(
        """
        CREATE TEMP TABLE failed_exchanges AS SELECT exchange_id FROM requests WHERE has_error;
        CREATE TEMP TABLE response_fields (exchange_id BIGINT, id UBIGINT, key VARCHAR,
          path VARCHAR, value VARCHAR, list_name VARCHAR)
        """
    )
    failed = database.rows("SELECT DISTINCT api FROM requests WHERE has_error AND api IS NOT NULL")
    for view in sorted(view_name(f"apis/{row['api']}") for row in failed):
        if database.has(view):
            database.run(_FIELDS.format(view=view))
    database.run(_FOUND)
    _make_names(database)
    # an exchange whose body has no row in apis/* still has its codes: the place is not known then
    database.run(
        """
        CREATE TEMP TABLE errors AS
        WITH rest AS (
          SELECT exchange_id, unnest(error_codes) AS code FROM requests ANTI JOIN found_errors
          USING (exchange_id) WHERE has_error
        ), every AS (
          SELECT f.exchange_id, f.place, f.path, f.code,
            coalesce(f.topic, n.topic, f.topic_id) AS topic, f.partition, f.subject, f.message
          FROM found_errors f LEFT JOIN topic_names n USING (topic_id)
          UNION ALL
          SELECT exchange_id, NULL, NULL, code, NULL, NULL, NULL, NULL FROM rest
        )
        SELECT x.time, x.api, x.api_version, e.code, c.name AS error, c.is_retriable, e.place,
          e.path, e.topic, e.partition, e.subject, e.message, x.group_id, x.client, x.client_id,
          x.client_ip, x.broker, x.request_packet, x.response_packet, x.capture_id, x.exchange_id
        FROM every e JOIN requests x USING (exchange_id) LEFT JOIN error_names c ON c.code = e.code
        """
    )


def _make_names(database: Database) -> None:
    codes = [
        row["code"]
        for row in database.rows(
            "SELECT code FROM found_errors "
            "UNION SELECT unnest(error_codes) FROM requests WHERE has_error"
        )
    ]
    columns_ = {
        "code": pa.array(codes, pa.int16()),
        "name": pa.array([error_name(code) for code in codes], pa.string()),
        "is_retriable": pa.array([code in RETRIABLE for code in codes], pa.bool_()),
    }
    database.create("error_names", pa.table(columns_))


def collect(database: Database, _: Options) -> Document:
    """Table `error_places`: errors by code and place, with an example's packet."""
    database.run(
        """
        CREATE TEMP TABLE error_places AS
        SELECT api, error, code, bool_or(is_retriable) AS is_retriable, place, topic,
          coalesce(subject, 'group ' || group_id) AS subject, count(*) AS count,
          count(DISTINCT client) AS client_count, list_sort(list(DISTINCT client))[:5] AS clients,
            count(DISTINCT exchange_id) AS exchanges,
          list_sort(list(DISTINCT partition) FILTER (partition IS NOT NULL))[:20] AS partitions,
          count(DISTINCT partition) AS partition_count,
          min(time) AS first_time, max(time) AS last_time,
          arg_min(path, (time, path)) AS path, arg_min(message, (time, path)) AS message,
          arg_min(coalesce(response_packet, request_packet), time) AS packet,
          arg_min(capture_id, time) AS capture_id, arg_min(exchange_id, time) AS exchange_id
        FROM errors GROUP BY ALL
        """
    )
    places = listed(
        database, "FROM error_places ORDER BY count DESC, api, error, place, topic, subject"
    )
    codes = database.rows(
        """
        SELECT api, error, code, bool_or(is_retriable) AS is_retriable, count(*) AS count,
          count(DISTINCT exchange_id) AS exchanges,
          count(DISTINCT client) AS clients,
          list_sort(list(DISTINCT topic) FILTER (topic IS NOT NULL))[:5] AS topics,
          arg_min(coalesce(response_packet, request_packet), time) AS packet,
          arg_min(capture_id, time) AS capture_id
        FROM errors GROUP BY api, error, code ORDER BY count DESC, api, error
        """
    )
    for row in (*places["rows"], *codes):
        row["routine"] = routine_reason(row["api"], row["error"])
    unanswered = listed(
        database,
        """
        SELECT api, status, client_id, client_ip, broker, count(*) AS count,
          min(time) AS first_time, arg_min(packet, time) AS packet,
          arg_min(capture_id, time) AS capture_id
        FROM requests WHERE is_unanswered GROUP BY ALL
        ORDER BY count DESC, api, status, client_id, client_ip, broker
        """,
    )
    return {
        "exchanges": database.value("SELECT count(*) FROM requests WHERE failed"),
        "routine": database.value("SELECT count(*) FROM requests WHERE has_error AND NOT failed"),
        "codes": codes,
        "places": places,
        "unanswered": unanswered,
    }


def section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["errors"]
    codes = [
        "Every error code of every response, with the field that has it, also inside topics and "
        "partitions.",
        errors_over_time(document),
        Listing("error_codes", d["codes"]),
        Listing("error_places", d["places"]),
    ]
    unanswered = Listing("unanswered", d["unanswered"])
    first = codes if d["codes"] else ["No answer has an error code."]
    return Section("errors", "Errors", [*first, unanswered], badge=d["exchanges"])
