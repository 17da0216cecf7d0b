"""What all sections start from: table `x`, an exchange a row, with what its waiting was for.

A Fetch may wait at the broker by its own wish: up to `max_wait_ms`, until `min_bytes` are there.
Its latency says nothing of a slow broker then. `wait` tells the kinds of waiting apart:

answer  the time that the broker needed
idle    a long poll that ended empty: it waited its `max_wait_ms` and got fewer than `min_bytes`
woken   a long poll that something ended: records that were not there yet when the Fetch was sent
        (made later, or in a Produce that was answered later), or nothing that the answer shows
group   JoinGroup and SyncGroup wait for the other members, not for the broker
behind  sent behind a long poll on the same connection, and answered after it

A Fetch that took longer than its longest wait allows is an `answer`, however little it brought, and
so is one that brought an error.

A broker takes the requests of a connection one at a time: it reads the next when it has answered
the one before. `queued_ms` is the part of the latency in which an earlier request of the same
connection, perhaps a long poll, was still to be answered; `own_ms` is the rest, which is what the
broker's own clock counts.
"""

from __future__ import annotations

from kdissect.report.database import ReportDatabase

# A poll ends when a timer of the broker does: late by its tick and the way back, never much early.
POLL_EARLY, POLL_LATE, POLL_LATE_MS = 0.9, 1.1, 100
POLL_MIN_MS = 1  # below this nobody waited
EXACT_MAX = 20_000_000  # above this many exchanges percentiles are t-digests: bounded memory

# Kafka's fixed topic ids: of the metadata log, and of none.
METADATA_ID, ZERO_ID = "AAAAAAAAAAAAAAAAAAAAAQ", "AAAAAAAAAAAAAAAAAAAAAA"

# What only brokers and controllers send.
BROKER_APIS = (
    *("LeaderAndIsr", "StopReplica", "UpdateMetadata", "ControlledShutdown", "WriteTxnMarkers"),
    *("AlterPartition", "BeginQuorumEpoch", "EndQuorumEpoch", "Vote", "FetchSnapshot"),
    *("BrokerRegistration", "BrokerHeartbeat", "AllocateProducerIds", "Envelope"),
    *("ControllerRegistration", "AssignReplicasToDirs", "UpdateRaftVoter"),
    *("InitializeShareGroupState", "ReadShareGroupState", "WriteShareGroupState"),
    *("DeleteShareGroupState", "ReadShareGroupStateSummary"),
)
POLLING = {"Fetch": "api_fetch", "ShareFetch": "api_share_fetch"}


def prepare(database: ReportDatabase) -> None:
    """Make `polls`, `broker_connections`, `topic_names` and `x`."""
    database.run(
        "CREATE TABLE topic_names AS "
        "SELECT topic_id, any_value(topic ORDER BY first_time) AS topic "
        f"FROM topics WHERE topic IS NOT NULL AND topic_id NOT IN ('{METADATA_ID}', '{ZERO_ID}') "
        f"GROUP BY topic_id UNION ALL SELECT '{METADATA_ID}', '__cluster_metadata'"
    )
    _make_polls(database)
    _make_broker_connections(database)
    database.run(
        """
        CREATE TABLE queues AS
        SELECT exchange_id, least(greatest(epoch_us(before - request_end_time) / 1e3, 0),
          latency_ms)
          AS queued_ms
        FROM (
          SELECT exchange_id, request_end_time, latency_ms, max(response_end_time) OVER (
            PARTITION BY connection_id ORDER BY response_pos
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
          FROM exchanges WHERE response_time IS NOT NULL
        ) WHERE latency_ms > 0 AND before > request_end_time
        """
    )
    database.run(
        f"""
        CREATE TABLE x AS
        WITH timed AS (
          SELECT e.*, coalesce(q.queued_ms, 0) AS queued_ms,
            e.latency_ms - coalesce(q.queued_ms, 0) AS own_ms
          FROM exchanges e LEFT JOIN queues q USING (exchange_id)
        )
        SELECT
          e.exchange_id, e.connection_id, e.api_name AS api, e.api_key, e.api_version,
          e.client_id, e.client_ip, e.client_port,
          {endpoint("e.broker_ip", "e.broker_port")} AS broker,
          coalesce(e.request_time, e.response_time) AS time,
          e.request_time, e.response_time, e.latency_ms, e.queued_ms, e.own_ms, e.request_size,
          e.response_size, e.status, e.error_code, e.error_name, e.error_codes, e.throttle_time_ms,
          e.topics, e.group_id, e.transactional_id, e.decode_status,
          e.request_packet, e.response_packet,
          coalesce(e.request_packet, e.response_packet) AS packet,
          coalesce(e.request_capture_id, e.response_capture_id) AS capture_id,
          coalesce(e.error_code, 0) <> 0 AS failed,
          b.connection_id IS NOT NULL AS is_broker,
          CASE WHEN e.latency_ms IS NULL THEN NULL
               WHEN e.api_name IN ('JoinGroup', 'SyncGroup') THEN 'group'
               WHEN p.exchange_id IS NULL THEN 'answer'
               WHEN e.own_ms > p.max_wait_ms * {POLL_LATE} + {POLL_LATE_MS} THEN 'answer'
               WHEN p.bytes < greatest(p.min_bytes, 1)
                    AND e.own_ms >= p.max_wait_ms * {POLL_EARLY} AND p.max_wait_ms > 0 THEN 'idle'
               WHEN e.own_ms < {POLL_MIN_MS} THEN 'answer'
               WHEN p.newest_ms >= epoch_ms(e.request_time) THEN 'woken'
               WHEN p.appended_time >= e.request_time THEN 'woken'
               WHEN p.bytes = 0 AND coalesce(e.error_code, 0) = 0 THEN 'woken'
               ELSE 'answer' END AS wait
        FROM timed e
        LEFT JOIN polls p USING (exchange_id)
        LEFT JOIN broker_connections b ON b.connection_id = e.connection_id
        """
    )
    database.run(
        f"""
        UPDATE x SET wait = 'behind' FROM (
          SELECT exchange_id, epoch_us(poll_end - request_end_time) / 1e3 AS behind_ms FROM (
            SELECT x.exchange_id, x.wait, e.request_end_time,
              max(CASE WHEN x.wait IN ('idle', 'woken') THEN e.response_end_time END) OVER (
                PARTITION BY e.connection_id ORDER BY e.response_pos
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS poll_end
            FROM x JOIN exchanges e USING (exchange_id)
            WHERE e.response_time IS NOT NULL
              AND e.connection_id IN (SELECT connection_id FROM x WHERE queued_ms >= {POLL_MIN_MS})
          ) WHERE wait = 'answer' AND poll_end > request_end_time
        ) b
        WHERE b.exchange_id = x.exchange_id AND b.behind_ms >= {POLL_MIN_MS}
          AND b.behind_ms >= x.own_ms
        """
    )


def _make_polls(database: ReportDatabase) -> None:
    parts = [
        f"SELECT exchange_id, request.max_wait_ms AS max_wait_ms, request.min_bytes AS min_bytes "
        f"FROM {view} WHERE request.max_wait_ms IS NOT NULL"
        for api, view in POLLING.items()
        if database.has(f"apis/{api}")
    ]
    if not parts:
        parts = ["SELECT 0::BIGINT AS exchange_id, 0 AS max_wait_ms, 0 AS min_bytes WHERE false"]
    database.run(
        f"""
        CREATE TABLE polls AS
        WITH asked AS ({" UNION ALL ".join(parts)}),
        appended AS ({_appended(database)}),
        got AS (
          SELECT b.exchange_id, sum(b.size) AS bytes, max(b.max_timestamp_ms) AS newest_ms,
                 max(a.time) AS appended_time
          FROM record_batches b LEFT JOIN appended a USING (topic, partition, base_offset)
          WHERE b.source <> 'produce' GROUP BY b.exchange_id
        )
        SELECT a.exchange_id, a.max_wait_ms, a.min_bytes, coalesce(g.bytes, 0) AS bytes,
               g.newest_ms, g.appended_time
        FROM asked a LEFT JOIN got g USING (exchange_id)
        """
    )


def _appended(database: ReportDatabase) -> str:
    """SQL of topic, partition, base_offset and the time at which a Produce had been answered."""
    if not database.has("apis/Produce"):
        return (
            "SELECT NULL::VARCHAR AS topic, NULL::INTEGER AS partition, "
            "NULL::BIGINT AS base_offset, NULL::TIMESTAMPTZ AS time WHERE false"
        )
    return """
        WITH by_topic AS (
          SELECT response_time AS time, unnest(response.responses) AS t FROM api_produce
          WHERE response_time IS NOT NULL
        ), by_partition AS (
          SELECT time, t.name AS name, t.topic_id AS topic_id,
                 unnest(t.partition_responses) AS p FROM by_topic
        )
        SELECT coalesce(b.name, n.topic) AS topic, b.p.index AS partition,
               b.p.base_offset AS base_offset, max(b.time) AS time
        FROM by_partition b LEFT JOIN topic_names n USING (topic_id)
        WHERE b.p.base_offset >= 0 GROUP BY ALL
    """


def _make_broker_connections(database: ReportDatabase) -> None:
    names = ", ".join(f"'{name}'" for name in BROKER_APIS)
    query = (
        f"SELECT DISTINCT connection_id FROM exchanges WHERE api_name IN ({names}) "
        # since version 4 brokers send it for their clients (KIP-890)
        "OR (api_name = 'AddPartitionsToTxn' AND api_version >= 4)"
    )
    if database.has("apis/Fetch"):
        query += (
            " UNION SELECT DISTINCT connection_id FROM api_fetch "
            "WHERE greatest(coalesce(request.replica_id, -1), "
            "coalesce(request.replica_state.replica_id, -1)) >= 0"
        )
    database.run(f"CREATE TABLE broker_connections AS {query}")


def endpoint(ip: str, port: str) -> str:
    """SQL of ``10.0.0.1:9092`` or ``[::1]:9092`` of two columns."""
    return f"CASE WHEN contains({ip}, ':') THEN '[' || {ip} || ']:' ELSE {ip} || ':' END || {port}"


def quantile(database: ReportDatabase, column: str, share: float, condition: str = "true") -> str:
    """SQL of a quantile, exact unless that takes much memory."""
    exact = database.value("SELECT count(*) <= ? FROM exchanges", [EXACT_MAX])
    name = "quantile_cont" if exact else "approx_quantile"
    return f"{name}({column}, {share}) FILTER ({condition})"


def quantiles(database: ReportDatabase, column: str, condition: str = "true") -> str:
    """SQL of p50, p90, p95, p99 and max of a column."""
    shares = (0.5, 0.9, 0.95, 0.99)
    found = [
        f"{quantile(database, column, share, condition)} AS p{share * 100:.0f}" for share in shares
    ]
    return ", ".join([*found, f"max({column}) FILTER ({condition}) AS max"])
