"""Errors with their places: the code, the message, the field, and the entities around it.

The tables `apis/*` hold every field; the paths of their error codes are read from the schema of the
responses, and for each one a query unnests the lists on the way to it. Only exchanges that have an
error are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from kdissect.protocol.error_codes import RETRIABLE, error_name, routine_reason
from kdissect.report.document import Document, Listing, Options, Section, listed
from kdissect.report.sections.traffic import errors_over_time
from kdissect.sql import Database, view_name

# What a struct around an error code says of it: its field, and the word to say it with.
_SUBJECTS = {
    "topic": "topic",
    "topic_name": "topic",
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
_MESSAGES = ("error_message", "message")


@dataclass(frozen=True, slots=True)
class _Struct:
    """A struct of a response, and the lists to unnest on the way to it."""

    sql: str
    path: str = ""  # responses[].partitions[].
    lists: tuple[str, ...] = ()  # SQL of each list, `e0`, `e1`, ... being the elements around it
    subjects: tuple[tuple[str, str], ...] = ()  # (word, SQL) of the fields around
    topic_ids: tuple[str, ...] = ()
    message: str | None = None


def error_places(response: pa.DataType) -> list[tuple[_Struct, str]]:
    """Every error code in a response: the struct around it, and its field."""
    return list(_walk(response, _Struct("r"), ""))


def _walk(kind: pa.DataType, at: _Struct, list_name: str) -> Iterator[tuple[_Struct, str]]:
    names = [kind.field(i).name for i in range(kind.num_fields)]
    subjects, topic_ids = list(at.subjects), list(at.topic_ids)
    for name in names:
        if pa.types.is_nested(kind.field(name).type):
            continue
        word = _SUBJECTS.get(name)
        if name in ("name", "index") and list_name:
            word = _word_of(list_name, name)
        if word:
            subjects.append((word, f'{at.sql}."{name}"'))
        elif name == "topic_id":
            topic_ids.append(f"{at.sql}.topic_id")
    message = next((f"{at.sql}.{name}" for name in _MESSAGES if name in names), None)
    at = replace(at, subjects=tuple(subjects), topic_ids=tuple(topic_ids), message=message)
    for name in names:
        value = kind.field(name).type
        sql, path = f'{at.sql}."{name}"', f"{at.path}{name}"
        if name.endswith("error_code") and pa.types.is_integer(value):
            yield at, name
        elif name.endswith("_decoded"):
            continue  # Envelope's inner answer and the like have places of their own
        elif pa.types.is_struct(value):
            yield from _walk(value, replace(at, sql=sql, path=f"{path}."), "")
        elif pa.types.is_list(value) and pa.types.is_struct(value.value_type):
            element, lists = f"e{len(at.lists)}", (*at.lists, sql)
            inner = replace(at, sql=element, path=f"{path}[].", lists=lists)
            yield from _walk(value.value_type, inner, name)


def _word_of(list_name: str, name: str) -> str | None:
    """The kind of thing that a bare `name` or `index` in a list names."""
    if name == "index":
        return "partition" if "partition" in list_name else None
    if "topic" in list_name or list_name == "responses":
        return "topic"
    return "name"


def _query(view: str, at: _Struct, name: str) -> str:
    """SQL of the error codes in a field of a struct, one row each."""
    place, code = f"{at.path}{name}", f'{at.sql}."{name}"'
    inner = (
        f"SELECT a.exchange_id, a.response AS r FROM {view} a "
        "SEMI JOIN failed_exchanges USING (exchange_id)"
    )
    for depth, sql in enumerate(at.lists):
        inner = (
            f"SELECT *, unnest({sql}) AS e{depth}, "
            f"unnest(range(len({sql}))) AS i{depth} FROM ({inner})"
        )
    pieces = place.split("[]")
    path = f"'{pieces[0]}'"
    for depth, piece in enumerate(pieces[1:]):
        path += f" || '[' || i{depth} || ']{piece}'"
    by_word: dict[str, list[str]] = {}
    for word, sql in at.subjects:
        by_word.setdefault(word, []).append(f"{sql}::VARCHAR")
    topic_id = f"coalesce({', '.join(at.topic_ids)})" if at.topic_ids else "NULL::VARCHAR"
    topics = [f"nullif({sql}, '')" for sql in by_word.pop("topic", [])]
    topic = f"coalesce({', '.join(reversed(topics))}, NULL::VARCHAR)" if topics else "NULL::VARCHAR"
    partitions = by_word.pop("partition", [])
    partition = f"{partitions[-1]}::INTEGER" if partitions else "NULL::INTEGER"
    about = [f"'{word} ' || {values[-1]}" for word, values in sorted(by_word.items())]
    subject = f"nullif(concat_ws(', ', {', '.join(about)}), '')" if about else "NULL::VARCHAR"
    return (
        f"SELECT exchange_id, '{place}' AS place, {path} AS path, {code} AS code, "
        f"{topic} AS topic, {topic_id} AS topic_id, {partition} AS partition, "
        f"{subject} AS subject, {at.message or 'NULL::VARCHAR'} AS message "
        f"FROM ({inner}) WHERE {code} <> 0"
    )


def prepare(database: Database) -> None:
    """Make `errors`, a row for every error code of every response."""
    database.run(
        "CREATE TEMP TABLE failed_exchanges AS SELECT exchange_id FROM requests WHERE has_error"
    )
    database.run(
        "CREATE TEMP TABLE found_errors (exchange_id BIGINT, place VARCHAR, path VARCHAR, "
        "code SMALLINT, topic VARCHAR, topic_id VARCHAR, partition INTEGER, subject VARCHAR, "
        "message VARCHAR)"
    )
    failed = database.rows("SELECT DISTINCT api FROM requests WHERE has_error")
    for api in sorted(row["api"] for row in failed if row["api"]):
        view = view_name(f"apis/{api}")
        if not database.has(view):
            continue
        response = database.schema(view).field("response").type
        if not pa.types.is_struct(response):
            continue
        for at, name in error_places(response):
            database.run(f"INSERT INTO found_errors {_query(view, at, name)}")
    _make_names(database)
    # an exchange whose body has no row in apis/* still has its codes: the place is not known then
    database.run(
        """
        CREATE TEMP TABLE errors AS
        WITH rest AS (
          SELECT exchange_id, unnest(error_codes) AS code FROM requests ANTI JOIN found_errors
          USING (exchange_id) WHERE has_error
        ), every AS (
          SELECT f.exchange_id, f.place, f.path, f.code, coalesce(f.topic, n.topic,
            f.topic_id) AS topic,
                 f.partition, f.subject, f.message
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
          arg_min(path, time) AS path, arg_min(message, time) AS message,
          arg_min(coalesce(response_packet, request_packet), time) AS packet,
          arg_min(capture_id, time) AS capture_id, arg_min(exchange_id, time) AS exchange_id
        FROM errors GROUP BY ALL
        """
    )
    places = listed(database, "error_places", "count DESC, api, error, place, topic, subject")
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
    unanswered = database.rows(
        """
        SELECT api, status, client_id, client_ip, broker, count(*) AS count,
          min(time) AS first_time, arg_min(packet, time) AS packet,
          arg_min(capture_id, time) AS capture_id
        FROM requests WHERE is_unanswered GROUP BY ALL
        ORDER BY count DESC, api, client_id LIMIT 200
        """
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
