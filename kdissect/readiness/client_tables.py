"""Temporary tables about clients: their connections and requests, and the versions of brokers.

- `links`: a Kafka connection a row. `requests`: a request a row; `is_sure`: its version is known.
- `owners`: a client a row for each of its connections. `is_internal`: a broker or a controller.
- `traits`: whether a client asks which versions brokers offer.
- `offers`, `broker_offers`, `client_offers`: the offered versions of each API, by connection, by
  broker and by client.
- `transaction_groups`: groups with commits in transactions. `protocols`: of JoinGroup requests.
"""

from __future__ import annotations

from kdissect.protocol.api_keys import INTER_BROKER_APIS, ApiKey
from kdissect.readiness.software import HANDSHAKE_APIS, JAVA
from kdissect.sql import Database, view_name

# Client ids of Kafka's servers, for requests that show it in no other way.
_INTERNAL_CLIENT_IDS = (
    r"^(broker-\d+-(fetcher-\d+|txn-marker-sender)|raft-client-\d+|AddPartitionsManager-client-\d+"
    r"|AddPartitionsToTxnSenderThread-\d+|Persister-client-\d+"
    r"|NetworkPartitionMetadataClient-client-\d+)$"
)
_HANDSHAKES = tuple(map(int, HANDSHAKE_APIS))
# (API, field) of requests in which followers give their node id
_REPLICA_FIELDS = (
    ("Fetch", "request.replica_id"),
    ("Fetch", "request.replica_state.replica_id"),
    ("ListOffsets", "request.replica_id"),
    ("OffsetForLeaderEpoch", "request.replica_id"),
)


def make_client_tables(database: Database, names: set[str]) -> None:
    """Create the tables. names: of the tables of the set."""
    _make_requests(database)
    _make_internal(database, names)
    _make_owners(database)
    _make_groups(database, names)
    _make_offers(database, names)


def _make_requests(database: Database) -> None:
    """Create `links` and `requests`."""
    database.run(
        """
        create temp table links as
        select connection_id, client_ip, broker_ip, broker_port, principal, handshake_seen,
            client_software_name software_name, client_software_version software_version,
            case when len(client_ids) = 1 then client_ids[1] end as only_client_id
        from connections where is_kafka;

        create temp table requests as
        select exchange_id, connection_id, api_key, api_version, request_time, request_pos,
            group_id,
            api_version is not null and (version_confidence = 1
                or version_source in ('request_header', 'fallback_v0')) as is_sure,
            case when status = 'request_missing' then only_client_id else client_id end as client_id
        from exchanges join links using (connection_id)
        where api_key is not null;
        """
    )


def _make_internal(database: Database, names: set[str]) -> None:
    """Create `inside`: the connections that a broker or a controller opened."""
    internal_keys = ", ".join(map(str, sorted(INTER_BROKER_APIS)))
    database.run(
        f"""
        -- connections that show in their requests that a broker or a controller opened them
        create temp table marked as
        select distinct connection_id from (
            select connection_id from requests where api_key in ({internal_keys})
            union all select connection_id from requests
                where regexp_matches(client_id, '{_INTERNAL_CLIENT_IDS}')
            union all select connection_id from requests where api_key not in {_HANDSHAKES}
                group by all having bool_and(api_key = {ApiKey.WRITE_TXN_MARKERS})
            union all select e.connection_id from record_batches b
                join exchanges e using (exchange_id)
                where b.source in ('replica_fetch', 'raft_fetch', 'snapshot')
            {" ".join(f"union all {each}" for each in _server_requests(names))}
        ) join links using (connection_id)
        where software_name is null or software_name = '{JAVA}';

        -- and those on which such a caller, that does nothing else, sends only handshakes; a
        -- caller named by a number, as nodes are, is one with all its connections
        create temp table calls as
        select r.connection_id, l.client_ip, r.client_id,
            bool_and(r.api_key in {_HANDSHAKES}) is_handshake,
            r.connection_id in (from marked) is_marked
        from requests r join links l using (connection_id)
        where r.client_id is not null and (l.software_name is null or l.software_name = '{JAVA}')
        group by all;
        create temp table inside as
        from marked union
        select connection_id from calls where (client_ip, client_id) in (
            select (client_ip, client_id) from calls group by client_ip, client_id
            having bool_or(is_marked)
                and (bool_and(is_marked or is_handshake) or regexp_full_match(client_id, '\\d+'))
        );
        """
    )


def _server_requests(names: set[str]) -> list[str]:
    """Return queries of connections with requests whose fields only servers set."""
    queries = [
        f"select connection_id from {view_name(f'apis/{api}')} where {field} >= 0"
        for api, field in _REPLICA_FIELDS
        if f"apis/{api}" in names
    ]
    if "apis/AddPartitionsToTxn" in names:
        queries.append(
            "select connection_id from api_add_partitions_to_txn "
            "where len(list_filter(request.transactions, lambda t: t.verify_only)) > 0"
        )
    return queries


def _make_owners(database: Database) -> None:
    """Create `owners` and `traits`."""
    database.run(
        f"""
        -- A client gives its name in ApiVersions. A connection on which it does not ask (it asked
        -- on another), whose name was lost, that failed after its handshakes, or that began before
        -- the capture is of the software that the same caller's other connections agree on.
        create temp table callers as
        select client_ip, client_id,
            list(distinct software_name) filter (where software_name is not null) names,
            list(distinct software_version) filter (where software_version is not null) versions,
            list(distinct principal) filter (where principal is not null) principals
        from requests join links using (connection_id) group by all;
        create temp table greetings as
        select connection_id, bool_and(api_key in {_HANDSHAKES}) is_handshake,
            -- until version 3 ApiVersions has no name (KIP-511)
            bool_or(api_key = {ApiKey.API_VERSIONS} and api_version < 3) asks_nameless,
            -- a client asks before anything else, so later gaps hide no question
            bool_or(request_pos = 0) as is_whole
        from requests group by all;

        create temp table owners as
        select distinct l.connection_id, l.client_ip, r.client_id, l.broker_ip, l.broker_port,
            l.handshake_seen and g.is_whole as is_whole,
            case when l.software_name is null and len(names) = 1
                    and (is_handshake or not (l.handshake_seen and asks_nameless))
                then names[1] else l.software_name end as software_name,
            case when l.software_name is null and len(names) = 1 and len(versions) = 1
                    and (is_handshake or not (l.handshake_seen and asks_nameless))
                then versions[1] else l.software_version end as software_version,
            case when l.principal is null and len(principals) = 1
                    and (is_handshake or not l.handshake_seen)
                then principals[1] else l.principal end as principal,
            l.connection_id in (from inside) as is_internal
        from links l join (select distinct connection_id, client_id from requests) r
            using (connection_id)
        join greetings g using (connection_id)
        left join callers c on c.client_ip = l.client_ip
            and c.client_id is not distinct from r.client_id;

        -- Whether it asks what brokers offer is a trait of the client, not of a connection: some
        -- ask the first broker only.
        create temp table traits as
        select o.client_ip, o.client_id, o.software_name, bool_and(o.is_whole) is_whole,
            bool_or(r.api_key = {ApiKey.API_VERSIONS}) is_negotiating,
            max(r.api_version) filter (r.api_key = {ApiKey.API_VERSIONS}) asked_with
        from owners o join requests r on r.connection_id = o.connection_id
            and r.client_id is not distinct from o.client_id
        group by all;
        """
    )


def _make_groups(database: Database, names: set[str]) -> None:
    """Create `transaction_groups` and `protocols`."""
    protocols = (
        "select exchange_id, request.protocol_type protocol_type from api_join_group"
        if "apis/JoinGroup" in names
        else "select null::bigint exchange_id, null::varchar protocol_type where false"
    )
    database.run(
        f"""
        create temp table transaction_groups as
        select distinct group_id from requests where api_key = {ApiKey.TXN_OFFSET_COMMIT};
        create temp table protocols as {protocols};
        """
    )


def _make_offers(database: Database, names: set[str]) -> None:
    """Create `offers`, `broker_offers` and `client_offers`."""
    if "apis/ApiVersions" in names:
        offers = """
            select connection_id, k.api_key, min(k.min_version) first, max(k.max_version) last
            from (select connection_id, unnest(response.api_keys) k from api_api_versions
                where response.error_code = 0)
            group by all"""
    else:
        offers = """
            select null::bigint connection_id, null::smallint api_key, null::smallint first,
                null::smallint last where false"""
    database.run(
        f"""
        create temp table offers as {offers};
        create temp table broker_offers as
        select broker_ip, broker_port, api_key, min(first) first, list(distinct last) lasts
        from offers join links using (connection_id) group by all;
        create temp table client_offers as
        select client_ip, client_id, software_name, api_key, min(first) first,
            list(distinct last) lasts
        from offers join owners using (connection_id) group by all;
        """
    )
