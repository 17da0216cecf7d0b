"""Checks of a table set: sums and rows that two tables must agree on.

An account compares numbers that different steps wrote: a connection's byte counts come from its TCP
streams, anomalies and exchanges from framing, records from decoding, the manifest from the writer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kdissect.api import Tables
from kdissect.sql import Database, view_name
from kdissect.tables.topics import METADATA_TOPIC_ID

_FORMAT_VERSION = 1
_MANIFEST = "rows of a table are as many as the manifest says"
_LISTED_MAX = 20  # faults listed per account
_DIRECTIONS = ("request", "response")
# (API, event of `group_events`, SQL for the number of such events of one request)
_GROUP_EVENTS = (
    ("JoinGroup", "join", "1"),
    ("SyncGroup", "sync", "1"),
    ("LeaveGroup", "leave", "coalesce(len(request.members), 1)"),
    ("Heartbeat", "heartbeat_error", "(error_code <> 0)::int"),
    ("OffsetCommit", "commit_error", "(error_code <> 0)::int"),
    ("TxnOffsetCommit", "commit_error", "(error_code <> 0)::int"),
    *(
        (f"{group}GroupHeartbeat", event, f"(request.member_epoch {epoch})::int")
        for group in ("Consumer", "Share", "Streams")
        for event, epoch in (("join", "= 0"), ("leave", "< 0"))
    ),
)
# (API, event of a whole generation, SQL for the generation)
_GENERATIONS = (
    ("JoinGroup", "rebalance", "response.generation_id"),
    ("SyncGroup", "stable", "request.generation_id"),
)
_EPOCH_GROUPS = {"Consumer": "consumer", "Share": "share", "Streams": "streams"}


@dataclass(frozen=True, slots=True)
class Account:
    """An equality that must hold, and SQL for its faults: a place, and the unequal values there."""

    name: str
    sql: str


def accounts(tables: Tables) -> Iterator[Account]:
    """Yield all accounts of the tables that exist.

    `connections` and `captures` count all packets. If the set has only the exchanges of some times
    or hosts, those counts are not compared with exchanges and connections. If a later run goes on,
    connections may have bytes whose exchanges and anomalies come then.
    """
    options = tables.manifest.get("options", {})
    selections = (options.get(name) for name in ("hosts", "time_from_ns", "time_to_ns"))
    is_whole = all(selection in (None, []) for selection in selections)
    goes_on = "tables" in (tables.manifest.get("state") or {})
    differs = "<" if goes_on else "<>"
    for direction in _DIRECTIONS:
        yield from _bytes(direction, is_whole, differs)
    yield Account(
        "packets of a capture are TCP packets and ignored ones",
        """
        select 'capture ' || path, packet_count, tcp_packet_count + ignored_packet_count
        from captures where error is null
            and packet_count <> tcp_packet_count + ignored_packet_count
        """,
    )
    yield Account(
        "ignored packets each have a reason",
        """
        select 'capture ' || path, ignored_packet_count,
            list_sum(map_values(ignored_reasons))::bigint as reasons
        from captures where ignored_packet_count <> coalesce(reasons, 0)
        """,
    )
    if is_whole:
        yield Account(
            "TCP packets are segments of connections or duplicates",
            """
            select 'all captures', packets, segments from (
                select sum(tcp_packet_count - duplicate_packet_count)::bigint packets from captures
            ), (
                select sum(request_segment_count + response_segment_count)::bigint segments
                from connections
            ) where packets <> segments
            """,
        )
    for table, key in (
        ("captures", "capture_id"),
        ("connections", "connection_id"),
        ("exchanges", "exchange_id"),
        ("record_batches", "exchange_id, batch_index"),
        ("records", "exchange_id, batch_index, record_index"),
    ):
        yield Account(
            f"{key} is unique in {table}",
            f"""
            select concat_ws(' ', {key}), count(*), 1 from {table} group by {key}
            having count(*) > 1
            """,
        )
    yield _belongs("exchanges", "connections", "connection_id")
    for table in ("record_batches", "group_events", "fetch_sessions", "anomalies"):
        yield _belongs(table, "exchanges", "exchange_id")
    yield _belongs("records", "record_batches", "exchange_id, batch_index")
    yield Account(
        "exchanges have the addresses of their connection",
        """
        select 'exchange ' || e.exchange_id, e.client_port, c.client_port
        from exchanges e join connections c using (connection_id)
        where (e.client_ip, e.client_port, e.broker_ip, e.broker_port)
            is distinct from (c.client_ip, c.client_port, c.broker_ip, c.broker_port)
        """,
    )
    yield Account(
        "latency_ms is the time between its packets, and queued_ms + service_ms",
        """
        select 'exchange ' || exchange_id, (latency_ms * 1000)::bigint as latency_us,
            epoch_us(response_time) - epoch_us(request_end_time) as us
        from exchanges where abs(latency_us - us) > 2
            or abs(latency_ms - queued_ms - service_ms) > 0.002
        """,
    )
    yield Account(
        "offsets of fetched records are within those of their batch",
        """
        select concat_ws(' ', 'exchange', exchange_id, 'batch', batch_index), "offset",
            case when "offset" < base_offset then base_offset else last_offset end
        from records r join record_batches b using (exchange_id, batch_index)
        where r.source <> 'produce' and crc_ok
            and "offset" not between base_offset and last_offset
        """,
    )
    yield Account(
        "records of a batch are as many as its record_count",
        """
        select concat_ws(' ', 'exchange', exchange_id, 'batch', batch_index), record_count, n
        from record_batches join (
            select exchange_id, batch_index, count(*) n from records group by all
        ) using (exchange_id, batch_index)
        where n <> record_count
            and exchange_id not in (select exchange_id from anomalies where exchange_id is not null)
        """,
    )
    yield from _groups(tables)
    for name, group_type in _EPOCH_GROUPS.items():
        if f"apis/{name}GroupHeartbeat" in tables.names:
            yield from _epochs(view_name(f"apis/{name}GroupHeartbeat"), group_type)
    if "apis/Fetch" in tables.names:
        yield from _fetch_sessions()
    yield _transactions()
    yield from _metadata(tables)
    for name in tables.names:
        if name.startswith("apis/"):
            api = name.removeprefix("apis/")
            yield Account(
                "decoded exchanges have one row in apis/<ApiName>",
                f"""
                select 'exchange ' || exchange_id, coalesce(n, 0), 1 from exchanges left join (
                    select exchange_id, count(*) n from {view_name(name)} group by all
                ) using (exchange_id)
                where api_name = '{api}' and n is distinct from 1
                    and 'ok' in (request_decode_status, response_decode_status)
                """,
            )
            yield Account(
                "rows of apis/<ApiName> are exchanges of that API",
                f"""
                select '{name}, exchange ' || exchange_id, 1, 0 from {view_name(name)}
                anti join (select exchange_id from exchanges where api_name = '{api}')
                using (exchange_id)
                """,
            )


def _bytes(direction: str, is_whole: bool, differs: str) -> Iterator[Account]:
    """Yield the accounts for one direction's bytes; bytes of TLS are ciphertext.

    differs: how a connection's bytes must not compare to those of its exchanges or anomalies.
    """
    place = f"'connection ' || connection_id || ', {direction}'"
    captured, framed, unframed, missing = (
        f"{direction}_{name}"
        for name in ("byte_count", "framed_byte_count", "unframed_byte_count", "missing_byte_count")
    )
    yield Account(
        "captured bytes are framed and unframed ones",
        f"""
        select {place}, {captured}, {framed} + {unframed} from connections
        where {captured} <> {framed} + {unframed}
        """,
    )
    for kind, column, name in (
        ("gap", missing, "missing bytes are those of the gaps in anomalies"),
        ("unframed_bytes", unframed, "unframed bytes are those in anomalies"),
    ):
        yield Account(
            name,
            f"""
            select {place}, {column}, coalesce(n, 0) from connections left join (
                select connection_id, sum(byte_count)::bigint n from anomalies
                where kind = '{kind}' and direction = '{direction}' group by all
            ) using (connection_id)
            where is_kafka and {column} {differs} coalesce(n, 0)
            """,
        )
    yield Account(
        "frames of a connection do not overlap",
        f"""
        select 'exchange ' || exchange_id || ', {direction}', high, low from (
            select exchange_id, {direction}_pos + 4 + {direction}_size as low,
                lead({direction}_pos) over (
                    partition by connection_id order by {direction}_pos) as high
            from exchanges where {direction}_pos is not null
        ) where high < low
        """,
    )
    if not is_whole:
        return
    headers = "proxy_byte_count" if direction == "request" else "0"
    yield Account(
        "framed bytes are those of the exchanges, without the missing bytes of partial frames",
        f"""
        select {place}, {framed}, {headers} + coalesce(size, 0) - coalesce(missing, 0)
        from connections left join (
            select connection_id, sum({direction}_size + 4)::bigint size
            from exchanges where {direction}_size is not null group by all
        ) using (connection_id) left join (
            select connection_id, sum(byte_count)::bigint missing from anomalies
            where kind = 'partial_frame' and direction = '{direction}' group by all
        ) using (connection_id)
        where is_kafka and not is_tls
            and {framed} {differs} {headers} + coalesce(size, 0) - coalesce(missing, 0)
        """,
    )


def _groups(tables: Tables) -> Iterator[Account]:
    """Yield the accounts of the events of groups."""
    for api, event, count in _GROUP_EVENTS:
        if f"apis/{api}" in tables.names:
            yield Account(
                "joins, syncs, leaves and refusals of groups are in group_events",
                f"""
                select 'exchange ' || exchange_id || ', {event}', coalesce(n, 0), {count} as events
                from {view_name(f"apis/{api}")} join exchanges using (exchange_id) left join (
                    select exchange_id, count(*) n from group_events where event = '{event}'
                    group by all
                ) using (exchange_id)
                where request is not null and coalesce(n, 0) <> coalesce(events, 0)
                """,
            )
    for api, event, generation in _GENERATIONS:
        if f"apis/{api}" in tables.names:
            yield Account(
                "generations of groups have a rebalance and become stable in group_events",
                f"""
                select concat_ws(' ', 'group', group_id, 'generation', generation), 1, 0 from (
                    select distinct request.group_id as group_id, {generation} as generation
                    from {view_name(f"apis/{api}")}
                    where response.error_code = 0 and generation >= 0 and request is not null
                ) anti join (from group_events where event = '{event}')
                using (group_id, generation)
                """,
            )


def _epochs(heartbeats: str, group_type: str) -> Iterator[Account]:
    """Yield the accounts of member epochs: a group's epoch is the highest that a member was given.

    It is stable if all members have it when one leaves, or when the next epoch begins.
    """
    epochs = f"""
        with given as (
            select request.group_id as group_id, request.member_epoch as sent_epoch,
                coalesce(nullif(response.member_id, ''), request.member_id) as member_id,
                response.member_epoch as epoch, e.response_end_time as time
            from {heartbeats} join exchanges e using (exchange_id)
            where response.error_code = 0
                and (sent_epoch <> response.member_epoch or sent_epoch < 0)
        ), epochs as (
            select group_id, epoch, time from given where sent_epoch >= 0
            qualify epoch > coalesce(max(epoch) over (partition by group_id order by time
                rows between unbounded preceding and 1 preceding), 0)
        )
    """
    rows = f"select * from group_events where group_type = '{group_type}'"
    place = "select concat_ws(' ', 'group', group_id, 'epoch', epoch), 1, 0"
    yield Account(
        "member epochs that groups reach have a rebalance in group_events",
        f"""
        {epochs} {place} from epochs
        anti join ({rows} and event = 'rebalance') r
            on (r.group_id, r.generation) = (epochs.group_id, epochs.epoch)
        """,
    )
    yield Account(
        "member epochs that all members reach are stable in group_events",
        f"""
        {epochs}, held as (
            select group_id, member_id, sent_epoch, epoch, time, coalesce(lead(time) over (
                partition by group_id, member_id order by time), 'infinity') as until
            from given
        ), instants as (
            select group_id, time as instant from epochs
            union select group_id, time from given where sent_epoch < 0
            union select group_id, 'infinity'::timestamptz from given
        ), reached as (
            select group_id, instant, min(epoch) as epoch from instants join held using (group_id)
            where time < instant and until >= instant and sent_epoch >= 0
            group by all having min(epoch) = max(epoch)
        ), stable as (
            select distinct r.group_id, r.epoch
            from reached r asof join epochs e
                on r.group_id = e.group_id and r.instant > e.time
            where r.epoch = e.epoch
        )
        {place} from stable
        anti join ({rows} and event = 'stable') r
            on (r.group_id, r.generation) = (stable.group_id, stable.epoch)
        """,
    )


def _fetch_sessions() -> Iterator[Account]:
    """Yield the accounts of partitions that a Fetch lists; without a session its id is 0."""
    listed = f"""
        with fetches as (
            select exchange_id, broker_ip, broker_port, e.request_time, unnest(request.topics) t,
                request.session_epoch as epoch, case when epoch = 0 then response.session_id
                    else request.session_id end as session_id
            from {view_name("apis/Fetch")} join exchanges e using (exchange_id)
            where epoch >= 0 and coalesce(response.error_code, 0) = 0 and session_id <> 0
        ), listed as (
            select f.* exclude t, unnest(t.partitions).partition as partition,
                coalesce(nullif(t.topic, ''), topics.topic, t.topic_id) as topic
            from fetches f left join topics on t.topic_id = topics.topic_id
        )
    """
    yield Account(
        "partitions of a Fetch are in fetch_sessions at its epoch",
        f"""
        {listed} select concat_ws(' ', 'exchange', exchange_id, topic, partition), 1, 0
        from listed l anti join fetch_sessions s
            on (l.broker_ip, l.broker_port, l.session_id, l.topic, l.partition)
                = (s.broker_ip, s.broker_port, s.session_id, s.topic, s.partition)
            and epoch between first_epoch and last_epoch
            and request_time between first_time and last_time
        """,
    )
    yield Account(
        "rows of fetch_sessions are partitions of their Fetch",
        f"""
        {listed} select concat_ws(' ', 'exchange', exchange_id, topic, partition), 1, 0
        from fetch_sessions anti join listed using (exchange_id, session_id, topic, partition)
        """,
    )


def _transactions() -> Account:
    """The account of transactional requests; brokers verify by AddPartitionsToTxn v4 (KIP-890)."""
    return Account(
        "requests that a transaction consists of are in transactions",
        """
        select 'exchange ' || exchange_id, 1, 0 from exchanges
        anti join (select unnest(exchange_ids) as exchange_id from transactions)
        using (exchange_id)
        where transactional_id is not null and error_code = 0 and request_decode_status = 'ok'
            and (api_name in ('AddOffsetsToTxn', 'TxnOffsetCommit', 'EndTxn')
                or api_name = 'AddPartitionsToTxn' and api_version < 4 and len(topics) > 0
                or exchange_id in (
                    select exchange_id from record_batches
                    where source = 'produce' and is_transactional and crc_ok))
        """,
    )


def _metadata(tables: Tables) -> Iterator[Account]:
    """Yield the accounts of names; no message has the topic id of `__cluster_metadata`."""
    yield Account(
        "topic ids of record batches are in topics",
        f"""
        select distinct concat_ws(' ', 'topic', topic, topic_id), 1, 0 from record_batches
        anti join topics using (topic, topic_id)
        where topic is not null and topic_id <> '{METADATA_TOPIC_ID}'
        """,
    )
    if "apis/Metadata" not in tables.names:
        return
    metadata = view_name("apis/Metadata")
    yield Account(
        "topics in Metadata are in topics",
        f"""
        select 'topic ' || t.name, 1, 0 from (
            select distinct unnest(response.topics) as t from {metadata}
        ) where t.error_code = 0 and t.name <> '' and t.name not in (select topic from topics)
        """,
    )
    yield Account(
        "brokers in Metadata are in brokers",
        f"""
        select concat_ws(' ', 'broker', b.node_id, b.host, b.port), 1, 0 from (
            select distinct unnest(response.brokers) as b from {metadata}
        ) anti join brokers on (node_id, brokers.host, brokers.port) = (b.node_id, b.host, b.port)
        """,
    )


def _belongs(table: str, parent: str, key: str) -> Account:
    return Account(
        f"rows of {table} have a row in {parent}",
        f"""
        select concat_ws(' ', {key}), 1, 0
        from (select distinct {key} from {table} where coalesce({key}) is not null)
        anti join {parent} using ({key})
        """,
    )


def check(tables: Tables) -> dict[str, Any]:
    """Return all accounts as one JSON document: their names, and at most 20 faults of each."""
    faults = list(_manifest(tables))
    names = {_MANIFEST: None}  # in order, once each
    datasets = {name: tables[name].dataset for name in tables.names}
    with Database(datasets) as database:
        for account in accounts(tables):
            names[account.name] = None
            rows = database.rows(
                f'from ({account.sql}) faults (place, "left", "right") '
                f"order by all limit {_LISTED_MAX}"
            )
            faults += [{"account": account.name, **row} for row in rows]
    return {"format_version": _FORMAT_VERSION, "accounts": list(names), "faults": faults}


def _manifest(tables: Tables) -> Iterator[dict[str, Any]]:
    for name, entry in tables.manifest.get("tables", {}).items():
        rows = tables[name].num_rows
        if rows != entry["rows"]:
            yield {"account": _MANIFEST, "place": name, "left": rows, "right": entry["rows"]}
