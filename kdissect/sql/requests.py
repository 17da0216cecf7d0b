"""The base tables of every question about requests: `requests`, `sessions` and `topic_names`.

- `requests`: an exchange a row. `client` is its name and address. `failed`: it has an error that is
  no routine step. `is_unanswered`: the broker did not respond. `may_be_lost`: the response may lie
  in bytes that the capture lacks (`unanswered`). `is_sure`: its version is known. A request that
  was not captured has the client id of its connection, if that has one only.
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
from kdissect.protocol.api_keys import INTER_BROKER_APIS, ApiKey
from kdissect.protocol.error_codes import ROUTINE, ErrorCode
from kdissect.sql.database import Database, view_name
from kdissect.sql.unanswered import unanswered
from kdissect.tables.schemas import RECORDS, api_schema
from kdissect.tables.topics import names_sql

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
          e.api_version IS NOT NULL AND (e.version_confidence = 1
            OR e.version_source IN ('request_header', 'fallback_v0')) AS is_sure,
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
        "CASE WHEN e.status = 'request_missing' AND len(c.client_ids) = 1 THEN c.client_ids[1] "
        "ELSE e.client_id END"
    )


def schema_of_api(api: str) -> pa.Schema:
    key = catalog.api(api).key
    return api_schema(body_type(key, "request"), body_type(key, "response"))


def _server_connections(prefix: str) -> str:
    """SQL that makes a table of the connections that brokers and controllers opened.

    Their requests show it. So do the other connections of such a caller, if they have handshakes
    only, or if a number names the caller, as it does nodes.
    """
    handshakes = ", ".join(f"{key:d}" for key in HANDSHAKE_APIS)
    inter_broker = ", ".join(f"{key:d}" for key in sorted(INTER_BROKER_APIS))
    requests = " ".join(
        f"UNION ALL SELECT exchange_id FROM {prefix}api_{api} WHERE {condition}"
        for api, condition in _SERVER_REQUESTS
    )
    return f"""
        CREATE TEMP TABLE {prefix}server_connections AS
        WITH calls AS (
          SELECT c.connection_id, c.client_ip, {_client_id()} AS client_id,
            list_filter(list(DISTINCT e.api_key), lambda key: key NOT IN ({handshakes})) AS keys
          FROM {prefix}exchanges e JOIN {prefix}connections c USING (connection_id)
          WHERE e.api_key IS NOT NULL AND coalesce(c.client_software_name, '{JAVA}') = '{JAVA}'
          GROUP BY ALL
        ), marked AS (
          SELECT connection_id FROM calls
          WHERE list_has_any(keys, [{inter_broker}]) OR keys = [{ApiKey.WRITE_TXN_MARKERS:d}]
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
