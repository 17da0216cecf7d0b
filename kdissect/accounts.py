"""Checks of a table set: sums and rows that two tables must agree on.

An account compares numbers that different steps wrote: a connection's byte counts come from its TCP
streams, anomalies and exchanges from framing, records from decoding, the manifest from the writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kdissect.api import Tables
from kdissect.codec.internal_records import METADATA_TOPIC, METADATA_TOPIC_ID
from kdissect.pipeline.selection import Selection
from kdissect.protocol.model import SIDES
from kdissect.sql import Database, view_name
from kdissect.sql.requests import create_missing

_FORMAT_VERSION = 1
_MANIFEST = "rows of a table are as many as the manifest says"
_LISTED_MAX = 20  # faults listed per account
_EPOCH_GROUPS = ("Consumer", "Share", "Streams")
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
        for group in _EPOCH_GROUPS
        for event, epoch in (("join", "= 0"), ("leave", "< 0"))
    ),
)
# (API, event of a whole generation, SQL for the generation)
_GENERATIONS = (
    ("JoinGroup", "rebalance", "response.generation_id"),
    ("SyncGroup", "stable", "request.generation_id"),
)
_APIS = {api for api, *_ in _GROUP_EVENTS} | {"Fetch", "Metadata"}
_FRAMED = "framed bytes are those of the exchanges, without the missing bytes of partial frames"


def accounts(tables: Tables) -> dict[str, str]:
    """Return the accounts of a set: a name, and SQL of the faults.

    A fault is a place, and the two values there that must be equal. `connections` and `captures`
    count all packets. If the set has only the exchanges of some times or hosts, those counts are
    not compared with exchanges and connections. If a later run goes on, connections may have bytes
    whose exchanges and anomalies come then.
    """
    is_whole = all(written.is_empty for written in Selection.written(tables.manifest))
    goes_on = "tables" in (tables.manifest.get("state") or {})
    names = [name for name in tables.names if name.startswith("apis/")]
    found = {
        **_bytes("<" if goes_on else "<>", is_whole),
        **(_ALL_PACKETS if is_whole else {}),
        **_FIXED,
        "decoded exchanges have one row in apis/<ApiName>": _united(map(_decoded, names)),
        "rows of apis/<ApiName> are exchanges of that API": _united(map(_of_api, names)),
    }
    return {name: query for name, query in found.items() if query}


def prepared(tables: Tables) -> Database:
    """Open a database in which each account can run."""
    database = Database({name: tables[name].dataset for name in tables.names})
    create_missing(database, _APIS)
    return database


def _united(queries: Iterable[str]) -> str:
    return " union all ".join(f"({query})" for query in queries)


def _unique(table: str, key: str) -> dict[str, str]:
    return {
        f"{key} is unique in {table}": f"""
            select concat_ws(' ', {key}), count(*), 1 from {table} group by {key}
            having count(*) > 1
        """
    }


def _belongs(table: str, parent: str, key: str) -> dict[str, str]:
    return {
        f"rows of {table} have a row in {parent}": f"""
            select concat_ws(' ', {key}), 1, 0
            from (select distinct {key} from {table} where coalesce({key}) is not null)
            anti join {parent} using ({key})
        """
    }


_ALL_PACKETS = {
    "TCP packets are segments of connections or duplicates": """
        select 'all captures', packets, segments from (
            select sum(tcp_packet_count - duplicate_packet_count)::bigint packets from captures
        ), (
            select sum(request_segment_count + response_segment_count)::bigint segments
            from connections
        ) where packets <> segments
    """
}


def _of_requests(api: str, event: str, count: str) -> str:
    """SQL that compares the events of each request of an API with `group_events`."""
    return f"""
        select 'exchange ' || exchange_id || ', {event}', coalesce(n, 0), {count} as events
        from {view_name(f"apis/{api}")} join exchanges using (exchange_id) left join (
            select exchange_id, count(*) n from group_events where event = '{event}' group by all
        ) using (exchange_id)
        where request is not null and coalesce(n, 0) <> coalesce(events, 0)
    """


def _of_generations(api: str, event: str, generation: str) -> str:
    """SQL of the generations in an API's responses that have no such event."""
    return f"""
        select concat_ws(' ', 'group', group_id, 'generation', generation), 1, 0 from (
            select distinct request.group_id as group_id, {generation} as generation
            from {view_name(f"apis/{api}")}
            where response.error_code = 0 and generation >= 0 and request is not null
        ) anti join (from group_events where event = '{event}') using (group_id, generation)
    """


def _heartbeats(kind: str) -> str:
    return f"""
        select '{kind.lower()}' as group_type, exchange_id, request.group_id as group_id,
            request.member_epoch as sent_epoch, response.member_epoch as epoch,
            coalesce(nullif(response.member_id, ''), request.member_id) as member_id
        from {view_name(f"apis/{kind}GroupHeartbeat")} where response.error_code = 0
    """


# A group's epoch is the highest that a member was given. It is stable if all members have it when
# one leaves, or when the next epoch begins.
_EPOCHS = f"""
    with given as (
        select h.*, e.response_end_time as time
        from ({_united(map(_heartbeats, _EPOCH_GROUPS))}) h join exchanges e using (exchange_id)
        where sent_epoch <> epoch or sent_epoch < 0
    ), epochs as (
        select group_type, group_id, epoch, time from given where sent_epoch >= 0
        qualify epoch > coalesce(max(epoch) over (partition by group_type, group_id order by time
            rows between unbounded preceding and 1 preceding), 0)
    ), held as (
        select * exclude exchange_id, coalesce(lead(time) over (
            partition by group_type, group_id, member_id order by time), 'infinity') as until
        from given
    ), instants as (
        select group_type, group_id, time as instant from epochs
        union select group_type, group_id, time from given where sent_epoch < 0
        union select group_type, group_id, 'infinity'::timestamptz from given
    ), reached as (
        select group_type, group_id, instant, min(epoch) as epoch
        from instants join held using (group_type, group_id)
        where time < instant and until >= instant and sent_epoch >= 0
        group by all having min(epoch) = max(epoch)
    ), stable as (
        select distinct r.group_type, r.group_id, r.epoch
        from reached r asof join epochs e
            on (r.group_type, r.group_id) = (e.group_type, e.group_id) and r.instant > e.time
        where r.epoch = e.epoch
    )
"""


def _without_event(epochs: str, event: str) -> str:
    return f"""
        {_EPOCHS} select concat_ws(' ', 'group', group_id, 'epoch', epoch), 1, 0
        from {epochs} anti join (
            select group_type, group_id, generation as epoch from group_events
            where event = '{event}'
        ) using (group_type, group_id, epoch)
    """


_LISTED = f"""
    with fetches as (
        select exchange_id, broker_ip, broker_port, e.request_time, unnest(request.topics) t,
            request.session_epoch as epoch, case when epoch = 0 then response.session_id
                else request.session_id end as session_id
        from api_fetch join exchanges e using (exchange_id)
        where epoch >= 0 and coalesce(response.error_code, 0) = 0 and session_id <> 0
    ), listed as (
        select f.* exclude t, unnest(t.partitions).partition as partition,
            coalesce(nullif(t.topic, ''), topics.topic,
                if(t.topic_id = '{METADATA_TOPIC_ID}', '{METADATA_TOPIC}', t.topic_id)) as topic
        from fetches f left join topics on t.topic_id = topics.topic_id
    )
"""
_FIXED = {
    "packets of a capture are TCP packets and ignored ones": """
        select 'capture ' || path, packet_count, tcp_packet_count + ignored_packet_count
        from captures where error is null
            and packet_count <> tcp_packet_count + ignored_packet_count
    """,
    "ignored packets each have a reason": """
        select 'capture ' || path, ignored_packet_count,
            list_sum(map_values(ignored_reasons))::bigint as reasons
        from captures where ignored_packet_count <> coalesce(reasons, 0)
    """,
    **_unique("captures", "capture_id"),
    **_unique("connections", "connection_id"),
    **_unique("exchanges", "exchange_id"),
    **_unique("record_batches", "exchange_id, batch_index"),
    **_unique("records", "exchange_id, batch_index, record_index"),
    **_belongs("exchanges", "connections", "connection_id"),
    **_belongs("record_batches", "exchanges", "exchange_id"),
    **_belongs("group_events", "exchanges", "exchange_id"),
    **_belongs("fetch_sessions", "exchanges", "exchange_id"),
    **_belongs("anomalies", "exchanges", "exchange_id"),
    **_belongs("records", "record_batches", "exchange_id, batch_index"),
    "exchanges have the addresses of their connection": """
        select 'exchange ' || e.exchange_id, e.client_port, c.client_port
        from exchanges e join connections c using (connection_id)
        where (e.client_ip, e.client_port, e.broker_ip, e.broker_port)
            is distinct from (c.client_ip, c.client_port, c.broker_ip, c.broker_port)
    """,
    "latency_ms is the time between its packets, and queued_ms + service_ms": """
        select 'exchange ' || exchange_id, (latency_ms * 1000)::bigint as latency_us,
            epoch_us(response_time) - epoch_us(request_end_time) as us
        from exchanges where abs(latency_us - us) > 2
            or abs(latency_ms - queued_ms - service_ms) > 0.002
    """,
    "offsets of fetched records are within those of their batch": """
        select concat_ws(' ', 'exchange', exchange_id, 'batch', batch_index), "offset",
            case when "offset" < base_offset then base_offset else last_offset end
        from records r join record_batches b using (exchange_id, batch_index)
        where r.source <> 'produce' and crc_ok
            and "offset" not between base_offset and last_offset
    """,
    "records of a batch are as many as its record_count": """
        select concat_ws(' ', 'exchange', exchange_id, 'batch', batch_index), record_count, n
        from record_batches join (
            select exchange_id, batch_index, count(*) n from records group by all
        ) using (exchange_id, batch_index)
        where n <> record_count
            and exchange_id not in (select exchange_id from anomalies where exchange_id is not null)
    """,
    # brokers verify by AddPartitionsToTxn v4 (KIP-890)
    "requests that a transaction consists of are in transactions": """
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
    # no message has the topic id of `__cluster_metadata`
    "topic ids of record batches are in topics": f"""
        select distinct concat_ws(' ', 'topic', topic, topic_id), 1, 0 from record_batches
        anti join topics using (topic, topic_id)
        where topic is not null and topic_id <> '{METADATA_TOPIC_ID}'
    """,
    "topics in Metadata are in topics": """
        select 'topic ' || t.name, 1, 0 from (
            select distinct unnest(response.topics) as t from api_metadata
        ) where t.error_code = 0 and t.name <> '' and t.name not in (select topic from topics)
    """,
    "brokers in Metadata are in brokers": """
        select concat_ws(' ', 'broker', b.node_id, b.host, b.port), 1, 0 from (
            select distinct unnest(response.brokers) as b from api_metadata
        ) anti join brokers on (node_id, brokers.host, brokers.port) = (b.node_id, b.host, b.port)
    """,
    "partitions of a Fetch are in fetch_sessions at its epoch": f"""
        {_LISTED} select concat_ws(' ', 'exchange', exchange_id, topic, partition), 1, 0
        from listed l anti join fetch_sessions s
            on (l.broker_ip, l.broker_port, l.session_id, l.topic, l.partition)
                = (s.broker_ip, s.broker_port, s.session_id, s.topic, s.partition)
            and epoch between first_epoch and last_epoch
            and request_time between first_time and last_time
    """,
    "rows of fetch_sessions are partitions of their Fetch": f"""
        {_LISTED} select concat_ws(' ', 'exchange', exchange_id, topic, partition), 1, 0
        from fetch_sessions anti join listed using (exchange_id, session_id, topic, partition)
    """,
    "joins, syncs, leaves and refusals of groups are in group_events": _united(
        _of_requests(*each) for each in _GROUP_EVENTS
    ),
    "generations of groups have a rebalance and become stable in group_events": _united(
        _of_generations(*each) for each in _GENERATIONS
    ),
    "member epochs that groups reach have a rebalance in group_events": _without_event(
        "epochs", "rebalance"
    ),
    "member epochs that all members reach are stable in group_events": _without_event(
        "stable", "stable"
    ),
}


def _bytes(differs: str, is_whole: bool) -> dict[str, str]:
    """The accounts of bytes; bytes of TLS are ciphertext.

    differs: how a connection's bytes must not compare to those of its exchanges or anomalies.
    """
    queries = {
        "captured bytes are framed and unframed ones": """
            select {place}, {side}_byte_count, {framed} + {side}_unframed_byte_count
            from connections
            where {side}_byte_count <> {framed} + {side}_unframed_byte_count
        """,
        "missing bytes are those of the gaps in anomalies": _counted("missing", "gap"),
        "unframed bytes are those in anomalies": _counted("unframed", "unframed_bytes"),
        "frames of a connection do not overlap": """
            select 'exchange ' || exchange_id || ', {side}', high, low from (
                select exchange_id, {side}_pos + 4 + {side}_size as low,
                    lead({side}_pos) over (
                        partition by connection_id order by {side}_pos) as high
                from exchanges where {side}_pos is not null
            ) where high < low
        """,
    }
    if is_whole:
        queries[_FRAMED] = """
            select {place}, {framed}, {headers} + coalesce(size, 0) - coalesce(missing, 0) as frames
            from connections left join (
                select connection_id, sum({side}_size + 4)::bigint size
                from exchanges where {side}_size is not null group by all
            ) using (connection_id) left join (
                select connection_id, sum(byte_count)::bigint missing from anomalies
                where kind = 'partial_frame' and direction = '{side}' group by all
            ) using (connection_id)
            where is_kafka and not is_tls and {framed} {differs} frames
        """
    words = [
        {
            "side": side,
            "place": f"'connection ' || connection_id || ', {side}'",
            "framed": f"{side}_framed_byte_count",
            "headers": "proxy_byte_count" if side == "request" else "0",
            "differs": differs,
        }
        for side in SIDES
    ]
    return {
        name: _united(query.format_map(each) for each in words) for name, query in queries.items()
    }


def _counted(column: str, kind: str) -> str:
    """SQL that compares a count of bytes with the anomalies of a kind."""
    return f"""
        select {{place}}, {{side}}_{column}_byte_count, coalesce(n, 0) from connections left join (
            select connection_id, sum(byte_count)::bigint n from anomalies
            where kind = '{kind}' and direction = '{{side}}' group by all
        ) using (connection_id)
        where is_kafka and {{side}}_{column}_byte_count {{differs}} coalesce(n, 0)
    """


def _decoded(name: str) -> str:
    return f"""
        select 'exchange ' || exchange_id, coalesce(n, 0), 1 from exchanges left join (
            select exchange_id, count(*) n from {view_name(name)} group by all
        ) using (exchange_id)
        where 'apis/' || api_name = '{name}' and n is distinct from 1
            and 'ok' in (request_decode_status, response_decode_status)
    """


def _of_api(name: str) -> str:
    return f"""
        select '{name}, exchange ' || exchange_id, 1, 0 from {view_name(name)}
        anti join (select exchange_id from exchanges where 'apis/' || api_name = '{name}')
        using (exchange_id)
    """


def check(tables: Tables) -> dict[str, Any]:
    """Return all accounts as one JSON document: their names, and at most 20 faults of each."""
    faults = list(_manifest(tables))
    named = accounts(tables)
    with prepared(tables) as database:
        for name, query in named.items():
            rows = database.rows(
                f'from ({query}) faults (place, "left", "right") order by all limit {_LISTED_MAX}'
            )
            faults += [{"account": name, **row} for row in rows]
    return {"format_version": _FORMAT_VERSION, "accounts": [_MANIFEST, *named], "faults": faults}


def _manifest(tables: Tables) -> Iterator[dict[str, Any]]:
    for name, entry in tables.manifest.get("tables", {}).items():
        rows = tables[name].num_rows
        if rows != entry["rows"]:
            yield {"account": _MANIFEST, "place": name, "left": rows, "right": entry["rows"]}
