"""Temporary tables about clients, over those of `sql.requests`: who they are, and what is offered.

- `asked`: an exchange of a known API a row.
- `owners`: a client a row for each of its connections. `is_internal`: a broker or a controller.
- `traits`: whether a client asks which versions brokers offer.
- `offers`, `broker_offers`, `client_offers`: the offered versions of each API, by connection, by
  broker and by client.
- `transaction_groups`: groups with commits in transactions. `protocols`: of JoinGroup requests.
"""

from __future__ import annotations

from kdissect.protocol.api_keys import ApiKey
from kdissect.sql import Database
from kdissect.sql.requests import HANDSHAKE_APIS

_HANDSHAKES = tuple(map(int, HANDSHAKE_APIS))


def make_client_tables(database: Database) -> None:
    """Create the tables."""
    database.run(
        f"""
        create temp view asked as from requests where api_key is not null;
        create temp view links as
        select *, client_software_name software_name, client_software_version software_version
        from sessions;

        -- A client gives its name in ApiVersions. A connection on which it does not ask (it asked
        -- on another), whose name was lost, that failed after its handshakes, or that began before
        -- the capture is of the software that the same caller's other connections agree on.
        create temp table callers as
        select client_ip, client_id,
            list(distinct software_name) filter (where software_name is not null) names,
            list(distinct software_version) filter (where software_version is not null) versions,
            list(distinct principal) filter (where principal is not null) principals
        from (select distinct connection_id, client_id from asked) join links using (connection_id)
        group by all;
        create temp table greetings as
        select connection_id, bool_and(api_key in {_HANDSHAKES}) is_handshake,
            -- until version 3 ApiVersions has no name (KIP-511)
            bool_or(api_key = {ApiKey.API_VERSIONS} and api_version < 3) asks_nameless,
            -- a client asks before anything else, so later gaps hide no question
            bool_or(request_pos = 0) as is_whole
        from asked group by all;

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
            l.is_broker as is_internal
        from links l join (select distinct connection_id, client_id from asked) r
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
        from owners o join asked r on r.connection_id = o.connection_id
            and r.client_id is not distinct from o.client_id
        group by all;
        create temp table transaction_groups as
        select distinct group_id from asked where api_key = {ApiKey.TXN_OFFSET_COMMIT};
        create temp table protocols as
        select exchange_id, request.protocol_type protocol_type from api_join_group;
        create temp table offers as
        select connection_id, k.api_key, min(k.min_version) first, max(k.max_version) last
        from (select connection_id, unnest(response.api_keys) k from api_api_versions
            where response.error_code = 0)
        group by all;
        create temp table broker_offers as
        select broker_ip, broker_port, api_key, min(first) first, list(distinct last) lasts
        from offers join links using (connection_id) group by all;
        create temp table client_offers as
        select client_ip, client_id, software_name, api_key, min(first) first,
            list(distinct last) lasts
        from offers join owners using (connection_id) group by all;
        """
    )
