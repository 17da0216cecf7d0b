"""Temporary tables about clients, over those of `sql.requests`: who they are, and what is offered.

- `asked`: an exchange of a known API a row, with the client that owns it. `client` numbers the
  combinations of address, client id, software, its version and principal; `caller` the same without
  the last two. `is_internal`: a broker or a controller.
- `traits`: whether a caller asks which versions brokers offer.
- `uses`: a version of an API that a client uses a row, with the versions that were offered.
- `transaction_groups`: groups with commits in transactions.
"""

from __future__ import annotations

from kdissect.protocol.api_keys import ApiKey
from kdissect.sql import Database
from kdissect.sql.requests import HANDSHAKE_APIS

_HANDSHAKES = tuple(map(int, HANDSHAKE_APIS))


def make_client_tables(database: Database) -> None:
    """Create the tables."""
    agreed = ", ".join(
        f"list(distinct {name}) filter ({name} is not null) over caller as {name}s"
        for name in ("software_name", "software_version", "principal")
    )
    database.run(
        f"""
        create temp view links as
        select *, client_software_name software_name, client_software_version software_version
        from sessions;

        -- A client gives its name in ApiVersions. A connection on which it does not ask (it asked
        -- on another), whose name was lost, that failed after its handshakes, or that began before
        -- the capture is of the software that the same caller's other connections agree on.
        create temp table greetings as
        select connection_id, bool_and(api_key in {_HANDSHAKES}) is_handshake,
            -- until version 3 ApiVersions has no name (KIP-511)
            bool_or(api_key = {ApiKey.API_VERSIONS} and api_version < 3) asks_nameless,
            -- a client asks before anything else, so later gaps hide no question
            bool_or(request_pos = 0) as is_whole
        from requests where api_key is not null group by all;
        create temp table owners as
        with named as (
            select l.*, r.client_id, g.is_handshake,
                l.handshake_seen and g.is_whole as is_whole,
                is_handshake or not (l.handshake_seen and asks_nameless) as may_be_named,
                {agreed}
            from links l join greetings g using (connection_id) join (
                select distinct connection_id, client_id from requests where api_key is not null
            ) r using (connection_id)
            window caller as (partition by client_ip, client_id)
        ), agreed as (
            select * replace (
                case when software_name is null and len(software_names) = 1 and may_be_named
                    then software_names[1] else software_name end as software_name,
                case when software_name is null and len(software_names) = 1 and may_be_named
                    and len(software_versions) = 1
                    then software_versions[1] else software_version end as software_version,
                case when principal is null and len(principals) = 1
                    and (is_handshake or not handshake_seen)
                    then principals[1] else principal end as principal)
            from named
        )
        select connection_id, client_ip, client_id, software_name, software_version, principal,
            broker_ip, broker_port, is_whole, is_broker as is_internal,
            dense_rank() over (order by client_ip, client_id, software_name) as caller,
            dense_rank() over (
                order by client_ip, client_id, software_name, software_version, principal) as client
        from agreed;
        create temp table asked as
        select o.*, r.exchange_id, r.api_key, r.api_version, r.is_sure, r.group_id, r.request_time
        from requests r join owners o on o.connection_id = r.connection_id
            and o.client_id is not distinct from r.client_id
        where api_key is not null;

        -- Whether it asks what brokers offer is a trait of the client, not of a connection: some
        -- ask the first broker only.
        create temp table traits as
        select caller, bool_and(is_whole) is_whole,
            bool_or(api_key = {ApiKey.API_VERSIONS}) is_negotiating,
            max(api_version) filter (api_key = {ApiKey.API_VERSIONS}) asked_with
        from asked group by caller;
        create temp table transaction_groups as
        select distinct group_id from asked where api_key = {ApiKey.TXN_OFFSET_COMMIT};
        create temp table uses as
        with offers as (
            select connection_id, k.api_key, min(k.min_version) first, max(k.max_version) last
            from (select connection_id, unnest(response.api_keys) k from api_api_versions
                where response.error_code = 0)
            group by all
        ), broker_offers as (
            select broker_ip, broker_port, api_key, min(first) first, list(distinct last) lasts
            from offers join links using (connection_id) group by all
        ), caller_offers as (
            select caller, api_key, min(first) first, list(distinct last) lasts
            from offers join owners using (connection_id) group by all
        )
        -- offers on the same connection, else those of the same broker or to the same caller
        select a.client, a.is_internal, a.api_key, a.api_version, a.is_sure,
            coalesce(f.first, b.first, c.first) offered_first,
            case when f.last is not null then [f.last] else list_sort(list_distinct(
                list_concat(coalesce(b.lasts, []), coalesce(c.lasts, [])))) end offered_lasts,
            count(*) request_count, min(a.request_time) first_time,
            arg_min(a.exchange_id, (a.request_time, a.exchange_id)) first_exchange_id
        from asked a left join offers f using (connection_id, api_key)
        left join broker_offers b using (broker_ip, broker_port, api_key)
        left join caller_offers c using (caller, api_key)
        group by all;
        """
    )
