"""Facts of two table sets, as temporary tables of one DuckDB database: ``x`` and what hangs on it.

``x`` has the exchanges of both, `side` telling which is which. `own_ms` is the latency less the
time in which the broker was still answering an earlier request of the same connection, which
clients that pipeline would otherwise charge to the request behind. `wait` tells apart

answer  the time that the broker needed
poll    a Fetch or ShareFetch that waited by its client's own wish: it brought less than it wanted,
        or records that were not there yet when it was sent
group   JoinGroup and SyncGroup wait for other members

Distributions are compared through the counts of their distinct values, which DuckDB sorts on disk
where they do not fit into memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdissect.api import Tables
from kdissect.sql import Database, view_name

SIDES = ("a", "b")
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
TAIL = 0.95  # the share of both samples together that the tail begins above
POLLING = {"Fetch": "api_fetch", "ShareFetch": "api_share_fetch"}

_CONFIG_SOURCES = {
    "DescribeConfigs": (
        "api_describe_configs",
        """
        select resource_type, resource_name, c.name config, c.value, time from (
            select r.resource_type, r.resource_name, unnest(r.configs) c, time
            from (select unnest(response.results) r, response_time time from {view})
            where r.error_code = 0)
        """,
    ),
    "CreateTopics": (
        "api_create_topics",
        """
        select 2 resource_type, t.name resource_name, u.config, u.value, time from (
            select t, time, unnest(list_concat(
                list_transform(coalesce(t.configs, []),
                    lambda c: {{config: c.name, value: c.value}}),
                [{{config: '(partitions)', value: t.num_partitions::varchar}},
                 {{config: '(replication factor)', value: t.replication_factor::varchar}}]
            )) u
            from (select unnest(request.topics) t, request_time time from {view}
                where not coalesce(request.validate_only, false)))
        """,
    ),
    "AlterConfigs": (
        "api_alter_configs",
        """
        select resource_type, resource_name, c.name config, c.value, time from (
            select r.resource_type, r.resource_name, unnest(r.configs) c, time
            from (select unnest(request.resources) r, request_time time from {view}
                where not coalesce(request.validate_only, false)))
        """,
    ),
    "IncrementalAlterConfigs": (
        "api_incremental_alter_configs",
        """
        select resource_type, resource_name, c.name config,
            case when c.config_operation = 1 then null else c.value end value, time from (
            select r.resource_type, r.resource_name, unnest(r.configs) c, time
            from (select unnest(request.resources) r, request_time time from {view}
                where not coalesce(request.validate_only, false)))
        """,
    ),
}


def open_both(a: Tables, b: Tables, memory_limit: str | None = None) -> Database:
    """One database with the views of both, ``a_exchanges`` and ``b_exchanges``."""
    sources = {
        f"{side}_{view_name(name)}": tables[name].dataset
        for side, tables in zip(SIDES, (a, b), strict=True)
        for name in tables.names
    }
    return Database(sources, memory_limit=memory_limit)


def prepare(database: Database, a: Tables, b: Tables) -> None:
    """Make `x`, `batches` (what was produced) and `configs` (what was read or written last)."""
    names = {
        side: {view_name(name) for name in tables.names}
        for side, tables in zip(SIDES, (a, b), strict=True)
    }
    for side in SIDES:
        database.run(f"create temp table {side}_polls as {_polls(side, names[side])}")
    exchanges = " union all ".join(_exchanges(side, names[side]) for side in SIDES)
    database.run(f"create temp table x as {exchanges}")
    batches = " union all ".join(
        f"select '{side}' side, topic, size from {side}_record_batches "
        "where source = 'produce' and not is_partial"
        for side in SIDES
    )
    database.run(f"create temp table batches as {batches}")
    configs = [
        f"select '{side}' side, '{api}' api, * from ({query.format(view=f'{side}_{view}')})"
        for side in SIDES
        for api, (view, query) in _CONFIG_SOURCES.items()
        if view in names[side]
    ]
    nothing = (
        "select '' side, '' api, 0::tinyint resource_type, '' resource_name, '' config, "
        "'' as value, null::timestamptz as time where false"
    )
    database.run(
        f"""
        create temp table configs as
        select side, resource_type::int resource_type, resource_name, config,
            arg_max(coalesce(value, ''), time) as value, arg_max(value is null, time) is_null,
            list_sort(list(distinct api)) apis
        from ({" union all ".join(configs or [nothing])}) group by all
        """
    )


def _polls(side: str, names: set[str]) -> str:
    """Exchanges that waited by their client's own wish."""
    asked = [
        f"select exchange_id, request.min_bytes min_bytes from {side}_{view} "
        "where request.max_wait_ms > 0"
        for view in POLLING.values()
        if view in names
    ]
    if not asked:
        return "select 0::bigint exchange_id where false"
    return f"""
        with asked as ({" union all ".join(asked)}),
        got as (
            select exchange_id, sum(size) bytes, max(max_timestamp_ms) newest_ms
            from {side}_record_batches where source <> 'produce' group by exchange_id
        )
        select exchange_id from asked
        join {side}_exchanges e using (exchange_id) left join got using (exchange_id)
        where coalesce(e.error_code, 0) = 0 and (
            coalesce(bytes, 0) < greatest(min_bytes, 1) or newest_ms >= epoch_ms(request_time))
    """


def _exchanges(side: str, names: set[str]) -> str:
    replicas = (
        f"select exchange_id from {side}_api_fetch where request.replica_id >= 0 "
        "or request.replica_state.replica_id >= 0"
        if "api_fetch" in names
        else "select 0::bigint where false"
    )
    return f"""
        select '{side}' side, e.connection_id, e.client_ip, e.client_id, e.api_key,
            case when e.exchange_id in ({replicas}) then e.api_name || ' (replica)'
                else e.api_name end as api,
            e.api_name, e.api_version, e.status, e.error_codes, e.request_size, e.response_size,
            case when p.exchange_id is not null then 'poll'
                when e.api_name in ('JoinGroup', 'SyncGroup') then 'group'
                else 'answer' end as wait,
            case when e.status = 'paired' then round(e.latency_ms - case
                when before > request_end_time
                then least(epoch_us(before - request_end_time) / 1e3, greatest(latency_ms, 0))
                else 0 end, 3) end as own_ms
        from (
            select *, max(response_end_time) over (
                partition by connection_id order by response_pos
                rows between unbounded preceding and 1 preceding) as before
            from {side}_exchanges
        ) e left join {side}_polls p using (exchange_id)
    """


def distributions(
    database: Database, what: str, groups: str, condition: str = "true", table: str = "x"
) -> list[dict[str, Any]]:
    """Two samples each of a value by group, as counts: what the tests of `statistics` take.

    Per group: n_a, n_b, `larger_b`, `ties`, percentiles and the shares in the tail of both.
    """
    percentiles = ", ".join(
        f"min(v) filter (where upto_{side} >= {share} * n_{side}) {name}_{side}"
        for name, share in PERCENTILES.items()
        for side in SIDES
    )
    return database.rows(
        f"""
        with counted as (
            select {groups}, {what} v, count(*) filter (side = 'a') a,
                count(*) filter (side = 'b') b
            from {table} where {condition} and {what} is not null group by all
        ), ranked as (
            select *, sum(a) over upto upto_a, sum(b) over upto upto_b,
                sum(a) over whole n_a, sum(b) over whole n_b
            from counted
            window upto as (partition by {groups} order by v), whole as (partition by {groups})
        ), edged as (
            select *, min(v) filter (where upto_a + upto_b >= {TAIL} * (n_a + n_b))
                over (partition by {groups}) edge
            from ranked
        )
        select {groups}, any_value(n_a)::bigint n_a, any_value(n_b)::bigint n_b,
            sum(b * (upto_a - a / 2)) larger_b,
            sum((a + b)::double ** 3 - (a + b)) ties,
            any_value(edge) tail_edge,
            coalesce(sum(a) filter (where v > edge), 0)::bigint tail_a,
            coalesce(sum(b) filter (where v > edge), 0)::bigint tail_b,
            {percentiles}
        from edged group by {groups} order by {groups}
        """
    )


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Decimals of SQL's sums as floats."""
    return {
        name: float(value) if type(value).__name__ == "Decimal" else value
        for name, value in row.items()
    }
