"""The base tables of every question about requests: `requests`, `sessions` and `topic_names`.

- `requests`: an exchange a row. `client` is its name and address. `failed`: it has an error that is
  no routine step. `is_unanswered`: the broker did not respond. `may_be_lost`: the response may lie
  in bytes that the capture lacks (`unanswered`). `is_sure`: its version is known. A request that
  was not captured has the client id of its connection, if that has one only, and so has a token.
- `sessions`: a connection a row, with `client`, `client_address` and `broker`.
- `topic_names`: a topic id a row, with `topic`.

`is_broker`: a broker or a controller opened the connection. The macro `ms_between(earlier, later)`
returns the milliseconds between two times.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from kdissect.codec.message_columns import body_type
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import INTER_BROKER_APIS, SASL_TOKEN, ApiKey
from kdissect.protocol.error_codes import ROUTINE, ErrorCode
from kdissect.sql.database import Database, view_name
from kdissect.tables.schemas import RECORDS, api_schema
from kdissect.tables.topics import names_sql

# of an exchange: its version was told, not guessed
IS_SURE = (
    "api_version IS NOT NULL AND (version_confidence = 1"
    " OR version_source IN ('request_header', 'fallback_v0'))"
)
EXACT_MAX = 20_000_000  # above this many exchanges quantiles are t-digests: bounded memory
JAVA = "apache-kafka-java"  # the software name of Kafka's own clients, brokers included (KIP-511)
# Every connection may begin with these. Java sends ApiVersions 0 and, in some releases, its newest.
HANDSHAKE_APIS = frozenset({ApiKey.SASL_HANDSHAKE, ApiKey.API_VERSIONS, ApiKey.SASL_AUTHENTICATE})
# Client ids of Kafka's servers, for requests that show it in no other way.
_SERVER_IDS = (
    r"^(broker-\d+-(fetcher-\d+|txn-marker-sender)|raft-client-\d+|AddPartitionsManager-client-\d+"
    r"|AddPartitionsToTxnSenderThread-\d+|Persister-client-\d+"
    r"|NetworkPartitionMetadataClient-client-\d+)$"
)
# (API, condition) of requests that only servers send
_VERIFIES = "len(list_filter(request.transactions, lambda t: t.verify_only)) > 0"
_SERVER_REQUESTS = (
    ("fetch", "request.replica_id >= 0 OR request.replica_state.replica_id >= 0"),
    ("list_offsets", "request.replica_id >= 0"),
    ("offset_for_leader_epoch", "request.replica_id >= 0"),
    ("add_partitions_to_txn", _VERIFIES),
)
# APIs that queries name: their views are there also if a set has no message of them
_QUERIED = (
    *("Produce", "Fetch", "ListOffsets", "OffsetForLeaderEpoch", "Metadata", "ApiVersions"),
    *("OffsetCommit", "TxnOffsetCommit", "AddPartitionsToTxn", "JoinGroup"),
    *("ConsumerGroupHeartbeat", "ControlledShutdown", "BrokerHeartbeat", "DeleteTopics"),
    *("CreateTopics", "DescribeConfigs", "AlterConfigs", "IncrementalAlterConfigs"),
)


def make_requests(database: Database, prefix: str = "") -> None:
    """Create the tables. prefix: of the views that they read, and of their own names."""
    create_missing(database, _QUERIED, prefix)
    database.run(
        # DuckDB subtracts times with time zones in a calendar, which takes ten times as long
        "CREATE OR REPLACE TEMP MACRO ms_between(earlier, later) AS "
        "(epoch_us(later) - epoch_us(earlier)) / 1e3"
    )
    database.run(f"CREATE TEMP TABLE {prefix}topic_names AS {names_sql(prefix)}")
    database.run(_server_connections(prefix))
    database.run(
        f"""
        CREATE TEMP TABLE {prefix}sessions AS
        SELECT *, {client_name("client_ids[1]", "client_ip")} AS client,
          {endpoint("client_ip", "client_port")} AS client_address,
          {endpoint("broker_ip", "broker_port")} AS broker,
          connection_id IN (FROM {prefix}server_connections) AS is_broker
        FROM {prefix}connections
        """
    )
    database.run(
        f"""
        CREATE TEMP TABLE {prefix}requests AS
        SELECT e.exchange_id, e.connection_id, e.api_name AS api, e.api_key, e.api_version,
          {IS_SURE} AS is_sure,
          {_client_id()} AS client_id, e.client_ip, e.client_port,
          {client_name(_client_id(), "e.client_ip")} AS client, c.broker,
          coalesce(e.request_time, e.response_time) AS time, e.request_time, e.request_end_time,
          e.response_time, e.response_end_time, e.wait, e.latency_ms, e.queued_ms, e.service_ms,
          e.upload_ms, e.download_ms, e.duration_ms, e.status, e.error_code, e.error_name,
          e.error_codes, coalesce(e.error_code, 0) <> 0 AS has_error,
          {is_fault("e.api_name", "e.error_codes")} AS failed, e.throttle_time_ms,
          e.request_size, e.response_size, e.topics, e.group_id, e.transactional_id,
          e.decode_status, e.request_pos, e.request_packet, e.response_packet,
          coalesce(e.request_packet, e.response_packet) AS packet,
          coalesce(e.request_capture_id, e.response_capture_id) AS capture_id,
          u.may_be_lost, NOT coalesce(u.may_be_lost, true) AS is_unanswered,
          coalesce(c.is_broker, false) AS is_broker
        FROM {prefix}exchanges e LEFT JOIN {prefix}sessions c USING (connection_id)
        LEFT JOIN ({unanswered(prefix)}) u USING (exchange_id)
        """
    )


def create_missing(database: Database, apis: Iterable[str], prefix: str = "") -> None:
    """Create an empty table for `records` and each of the APIs that the set lacks."""
    queried = {"records": RECORDS} | {f"apis/{api}": schema_of_api(api) for api in apis}
    for name, schema in queried.items():
        if not database.has(prefix + view_name(name)):
            database.create(prefix + view_name(name), schema.empty_table())


def _client_id() -> str:
    """SQL of who sent an exchange `e` of a connection `c`."""
    return (
        f"CASE WHEN (e.status = 'request_missing' OR e.api_name = '{SASL_TOKEN}') "
        "AND len(c.client_ids) = 1 THEN c.client_ids[1] ELSE e.client_id END"
    )


def schema_of_api(api: str) -> pa.Schema:
    key = catalog.api(api).key
    return api_schema(body_type(key, "request"), body_type(key, "response"))


def _server_connections(prefix: str) -> str:
    """SQL that makes a table of the connections that brokers and controllers opened.

    Their requests show it. So do the other connections of such a caller, if they have handshakes
    only, or if a number names the caller, as it does nodes.
    """
    requests = " ".join(
        f"UNION ALL SELECT exchange_id FROM {prefix}api_{api} WHERE {condition}"
        for api, condition in _SERVER_REQUESTS
    )
    return f"""
        CREATE TEMP TABLE {prefix}server_connections AS
        WITH calls AS (
          SELECT c.connection_id, c.client_ip, {_client_id()} AS client_id,
            list_filter(list(DISTINCT e.api_key),
              lambda key: key NOT IN ({codes(HANDSHAKE_APIS)})) AS keys
          FROM {prefix}exchanges e JOIN {prefix}connections c USING (connection_id)
          WHERE e.api_key IS NOT NULL AND coalesce(c.client_software_name, '{JAVA}') = '{JAVA}'
          GROUP BY ALL
        ), marked AS (
          SELECT connection_id FROM calls
          WHERE list_has_any(keys, [{codes(INTER_BROKER_APIS)}])
            OR keys = [{ApiKey.WRITE_TXN_MARKERS:d}]
            OR regexp_matches(client_id, '{_SERVER_IDS}')
          UNION ALL SELECT connection_id FROM {prefix}exchanges SEMI JOIN (
            SELECT exchange_id FROM {prefix}record_batches
            WHERE source IN ('replica_fetch', 'raft_fetch', 'snapshot') {requests}
          ) USING (exchange_id)
        ), callers AS (
          SELECT client_ip, client_id FROM calls WHERE client_id IS NOT NULL GROUP BY ALL
          HAVING bool_or(connection_id IN (FROM marked)) AND (
            bool_and(connection_id IN (FROM marked) OR len(keys) = 0)
            OR regexp_full_match(client_id, '\\d+'))
        )
        SELECT DISTINCT connection_id FROM calls
        WHERE connection_id IN (FROM marked) OR (client_ip, client_id) IN (FROM callers)
    """


def is_fault(api: str, codes: str) -> str:
    """SQL: a list column has a code that is no routine step of the API in another column."""
    steps = " OR ".join(
        f"code = {ErrorCode[error]:d}" + (f" AND {api} = '{name}'" if name else "")
        for name, error in ROUTINE
    )
    return f"coalesce(len(list_filter({codes}, lambda code: NOT ({steps}))), 0) > 0"


def codes(numbers: Iterable[int]) -> str:
    """SQL of the items of a list of error codes, or of API keys."""
    return ", ".join(f"{number:d}" for number in sorted(numbers))


def client_name(client_id: str, ip: str) -> str:
    """SQL of a client as `text.client` writes it."""
    return f"coalesce(nullif({client_id}, ''), '(none)') || ' @ ' || {ip}"


def endpoint(ip: str, port: str) -> str:
    """SQL of ``10.0.0.1:9092`` or ``[::1]:9092`` of two columns."""
    return f"CASE WHEN contains({ip}, ':') THEN '[' || {ip} || ']:' ELSE {ip} || ':' END || {port}"


def quantile(database: Database, column: str, share: float, condition: str = "true") -> str:
    """SQL of a quantile, exact unless that takes much memory."""
    is_exact = database.value("SELECT count(*) <= ? FROM exchanges", [EXACT_MAX])
    name = "quantile_cont" if is_exact else "approx_quantile"
    return f"{name}({column}, {share}) FILTER ({condition})"


def quantiles(database: Database, column: str, condition: str = "true") -> str:
    """SQL of p50, p90, p95, p99 and max of a column."""
    found = [
        f"{quantile(database, column, share, condition)} AS p{share * 100:.0f}"
        for share in (0.5, 0.9, 0.95, 0.99)
    ]
    return ", ".join([*found, f"max({column}) FILTER ({condition}) AS max"])


# -- requests without a captured response -----------------------------------------------------

# runs of response bytes that hold no known frame
BREAKS = "('gap', 'unframed_bytes', 'limit', 'not_decrypted')"

# A client that has closed its side may still get an answer so long after its request. Clients let
# a Fetch wait 0.5 s by default.
_LATE_S = 10


def unanswered(prefix: str = "") -> str:
    """Return SQL for `exchange_id` and `may_be_lost` (bool) of each request without its response.

    A broker answers the requests of a connection in order. So the response of a request lies
    between those of the answered requests before and after it. If bytes are missing or unframed
    there, the response may be among them.

    If no later response was captured, the response may have come after the last packet, unless the
    broker's side was seen to end. A client's FIN ends only its own direction (RFC 9293, 3.6): the
    broker may still answer, unless the capture goes on long enough. A FIN of the broker gives the
    length of the response stream, so that a lost response leaves a gap. If it came second it may be
    lost as well, and before an RST a lost response leaves no gap. So if any packet is missing,
    another close than the broker's FIN proves nothing. And a stream without SYN has no known
    beginning: responses lost before the first captured one leave no gap.

    A missing packet concerns the stretch of time in which capturing went on without a break:
    rotated files are one stretch, recordings of two days are two. Within it, it does not concern a
    host pair that another capture took at that time.

    prefix: of the views `exchanges`, `connections`, `captures` and `anomalies`.
    """
    return f"""
        with due as (
            select exchange_id, connection_id, request_end_time from {prefix}exchanges
            where status in ('response_missing', 'connection_closed')
        ), placed as (
            select exchange_id, connection_id,
                coalesce(max(response_pos + 4 + response_size) over (
                    partition by connection_id order by request_pos
                    rows between unbounded preceding and 1 preceding), 0) as low,
                min(response_pos) over (
                    partition by connection_id order by request_pos
                    rows between 1 following and unbounded following) as high
            from {prefix}exchanges
            where request_pos is not null and connection_id in (select connection_id from due)
        ), breaks as (
            select connection_id, pos, pos + byte_count as stop from {prefix}anomalies
            where direction = 'response' and kind in {BREAKS} and byte_count > 0
        ), in_breaks as (
            select distinct exchange_id from placed join breaks using (connection_id)
            where breaks.stop > low and breaks.pos < coalesce(high, breaks.stop)
        ), {_exposed(prefix)}
        select exchange_id,
            exchange_id in (from in_breaks)
                or (low = 0 and not handshake_seen)
                or (high is null and not (close_reason = 'fin' and closed_by = 'broker')
                    and (connection_id in (from exposed) or not response_ended
                        and (close_reason <> 'fin'
                            or coalesce(captured_until
                                < request_end_time + interval {_LATE_S} seconds, true)))
                ) as may_be_lost
        from due join placed using (exchange_id, connection_id)
            join {prefix}connections using (connection_id)
            left join watched using (connection_id)
    """


def _exposed(prefix: str) -> str:
    """Return SQL of `exposed`: the connections of `due` whose packets may be missing unseen.

    A capture with a gap lies in the connection's stretch of time. It has messages of the same
    client and broker, or no capture that has them was taken at the same time.

    Also SQL of `watched`: until when the captures of the connections' last packets go on.
    """
    return f"""
        spans as (
            select first_time, last_time from {prefix}captures where first_time is not null
            union all select first_time, last_time from {prefix}connections
        ), stretches as (
            select first_time as stretch from spans
            qualify first_time > coalesce(max(last_time) over (
                order by first_time, last_time
                rows between unbounded preceding and 1 preceding), '-infinity')
        ), lossy as (
            select stretch, capture_id, c.first_time, c.last_time
            from {prefix}captures c asof join stretches on c.first_time >= stretch
            where capture_id in (select capture_id from {prefix}anomalies where kind = 'gap')
        ), carriers as (
            select distinct client_ip, broker_ip, capture_id, c.first_time, c.last_time
            from (
                select client_ip, broker_ip,
                    unnest([request_capture_id, response_capture_id]) as capture_id
                from {prefix}exchanges
            ) join {prefix}captures c using (capture_id)
        ), watched as (
            select connection_id, max(carriers.last_time) as captured_until
            from {prefix}connections k join carriers using (client_ip, broker_ip)
            where connection_id in (select connection_id from due)
                and k.last_time between carriers.first_time and carriers.last_time
            group by all
        ), exposed as (
            select connection_id
            from {prefix}connections k asof join stretches on k.first_time >= stretch
                join lossy g using (stretch) join carriers using (client_ip, broker_ip)
            where connection_id in (select connection_id from due)
            group by connection_id, g.capture_id
            having bool_or(carriers.capture_id = g.capture_id) or not bool_or(
                carriers.first_time < g.last_time and carriers.last_time > g.first_time)
        )
    """


# -- partitions of Fetch and Produce ----------------------------------------------------------
#
# A partition of a message is a row. `topic` is its name. If the message has its id instead
# (KIP-516), `topic_names` has the name; it is null if no message of the capture has both.

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
