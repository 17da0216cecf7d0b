"""Facts of two table sets as temporary tables of one DuckDB database: ``x`` and others.

``x`` has the exchanges of both sets: `side`, `connection` (a number over both sides), `block` (of
time, BLOCKS per side), and the compared columns. ``numbered`` has the connections with `client`,
a number that clients of the same ID share. Distributions are compared by the counts of their
distinct values, which DuckDB sorts on disk if they exceed memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from kdissect.sql import Database, view_name
from kdissect.sql.requests import make_requests
from kdissect.tables.schemas import Row

if TYPE_CHECKING:
    from kdissect.api import Tables

COMPARED = ("a", "b")
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
BLOCKS = 20  # of equal time, per side
TAILS = {"tenth": 0.9, "tail": 0.95}  # shares of both samples together at which tails begin

# Of a change that a broker did not accept, or of an item added to a list or taken from it
# (APPEND and SUBTRACT, KIP-339), no value is known.
_ALTERED = """
    select resource_type, resource_name, c.name config, VALUE as value, time from (
        select r.resource_type, r.resource_name, unnest(r.configs) c, time
        from (select unnest(request.resources) r, response.responses answers, request_time time
            from {view} where not coalesce(request.validate_only, false))
        where len(list_filter(answers, lambda a: a.error_code = 0
            and a.resource_type = r.resource_type and a.resource_name = r.resource_name)) > 0)
"""
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
            from (select unnest(request.topics) t, response.topics answers, request_time time
                from {view} where not coalesce(request.validate_only, false))
            where len(list_filter(answers, lambda a: a.error_code = 0 and a.name = t.name)) > 0)
        """,
    ),
    "AlterConfigs": ("api_alter_configs", _ALTERED.replace("VALUE", "c.value")),
    "IncrementalAlterConfigs": (
        "api_incremental_alter_configs",
        _ALTERED.replace("VALUE", "case when c.config_operation = 1 then null else c.value end")
        + "where c.config_operation <= 1",  # set, delete
    ),
}


def open_both(a: Tables, b: Tables, memory_limit: str | None = None) -> Database:
    """One database with the views of both sets, ``a_exchanges`` and ``b_exchanges``."""
    sources = {
        f"{side}_{view_name(name)}": tables[name].dataset
        for side, tables in zip(COMPARED, (a, b), strict=True)
        for name in tables.names
    }
    return Database(sources, memory_limit=memory_limit)


def of_both(query: str) -> str:
    """SQL of both sides' rows of a query with `{side}`."""
    return " union all ".join(query.format(side=side) for side in COMPARED)


_NUMBERED = """
    select '{side}' side, connection_id, min(client_id) client_id from {side}_requests group by all
"""
_EXCHANGES = """
    select '{side}' side, exchange_id, connection_id, epoch_us(time) time_us, client_ip,
        client_id, api_key, api as api_name,
        case when is_broker and api = 'Fetch' then 'Fetch (replica)' else api end as api,
        api_version, status, may_be_lost, error_codes, request_size, response_size, upload_ms,
        download_ms, wait,
        case when status = 'paired' and wait <> 'undecided' then service_ms end as service_ms
    from {side}_requests
"""
_PRODUCED = """
    select side, topic, size, connection, block
    from {side}_record_batches join x using (exchange_id)
    where source = 'produce' and not is_partial and side = '{side}'
"""
# percentiles of each connection's round-trip times, by the side that waits for the acknowledgement
_ROUND_TRIPS = " union all ".join(
    f"select '{side}' side, connection_id, client_ids[1] client_id, '{end}' end_point, "
    f"'{name}' percentile, {direction}_rtt_ms_{name} rtt_ms from {side}_connections"
    for side in COMPARED
    for end, direction in (("client", "request"), ("broker", "response"))
    for name in ("p50", "p99")
)
_CONFIGS = " union all ".join(
    f"select '{side}' side, '{api}' api, * from ({query.format(view=f'{side}_{view}')})"
    for side in COMPARED
    for api, (view, query) in _CONFIG_SOURCES.items()
)
_TABLES = f"""
    create temp table numbered as
    select *, row_number() over (order by side, connection_id) - 1 as connection,
        dense_rank() over (order by client_id is null, coalesce(client_id, side || connection_id))
            - 1 as client
    from ({of_both(_NUMBERED)});

    create temp table x as
    select *, least(floor({BLOCKS} * (time_us - first_us) / (last_us - first_us + 1))::int,
        {BLOCKS - 1}) + if(side = 'b', {BLOCKS}, 0) as block
    from (select *, min(time_us) over (partition by side) first_us,
        max(time_us) over (partition by side) last_us from ({of_both(_EXCHANGES)}))
    join (select side, connection_id, connection from numbered) using (side, connection_id);

    create temp table batches as {of_both(_PRODUCED)};

    create temp table round_trips as
    select r.side, n.connection, f.block, r.client_id, r.end_point, r.percentile, r.rtt_ms
    from ({_ROUND_TRIPS}) r join numbered n using (side, connection_id)
    join (select connection, min(block) as block from x group by connection) f using (connection);

    -- the values that were last read or written
    create temp table configs as
    select side, resource_type::int resource_type, resource_name, config,
        arg_max_null(value, time) as value, list_sort(list(distinct api)) apis
    from ({_CONFIGS}) group by all
"""


def prepare(database: Database) -> None:
    """Create `numbered`, `x`, `batches` (the produced ones), `round_trips` and `configs`."""
    for side in COMPARED:
        make_requests(database, f"{side}_")
    database.run(_TABLES)


class Distributions(NamedTuple):
    """Two samples of a value, by group.

    rows: per group n_a, n_b, and columns to show. sums: a row per group (`number`, from 0),
    connection and block of time, with `count`, and for each score its sum `<score>_total` and the
    sum of its squares `<score>_squares`. Scores are `midrank` (0 to 1), those of TAILS and `failed`
    (0 or 1).
    """

    rows: list[Row]
    sums: pa.Table


def distributions(
    database: Database, what: str, groups: str, condition: str = "true", table: str = "x"
) -> Distributions:
    """Values of both sides, scored by midrank and tail; groups that only one side has are left
    out."""
    percentiles = ", ".join(
        f"min(v) filter (where upto_{side} >= {share} * n_{side}) {name}_{side}"
        for name, share in PERCENTILES.items()
        for side in COMPARED
    )
    edges = ", ".join(
        f"min(v) filter (where upto_a + upto_b >= {share} * (n_a + n_b)) "
        f"over (partition by {groups}) as {name}_edge"
        for name, share in TAILS.items()
    )
    counts = ", ".join(
        f"coalesce(sum({side}) filter (where v > {name}_edge), 0)::bigint {name}_{side}"
        for name in TAILS
        for side in COMPARED
    )
    totals = ", ".join(
        f"count(*) filter (r.v > r.{name}_edge)::double {name}_total, {name}_total {name}_squares"
        for name in TAILS
    )
    database.run(
        f"""
        create or replace temp table ranked as
        with counted as (
            select {groups}, {what} v, count(*) filter (side = 'a') a,
                count(*) filter (side = 'b') b
            from {table} where {condition} and {what} is not null group by all
        ), ranked as (
            select *, sum(a) over upto upto_a, sum(b) over upto upto_b,
                sum(a) over whole n_a, sum(b) over whole n_b
            from counted
            window upto as (partition by {groups} order by v), whole as (partition by {groups})
        )
        select *, dense_rank() over (order by {groups}) - 1 as number,
            (upto_a + upto_b - (a + b) / 2) / (n_a + n_b) as midrank,
            {edges}
        from ranked where n_a > 0 and n_b > 0
        """
    )
    rows = database.rows(
        f"""
        select {groups}, number, any_value(n_a)::bigint n_a, any_value(n_b)::bigint n_b,
            2 * (sum(b * midrank) / any_value(n_b) - sum(a * midrank) / any_value(n_a)) as delta,
            {counts}, {percentiles}
        from ranked group by {groups}, number order by number
        """
    )
    same_group = " and ".join(
        f"x.{each.strip()} is not distinct from r.{each.strip()}" for each in groups.split(",")
    )
    sums = database.table(
        f"""
        select r.number, x.connection, x.block, count(*)::double as count,
            sum(midrank)::double midrank_total, sum(midrank * midrank)::double midrank_squares,
            {totals}
        from {table} x join ranked r on x.{what} = r.v and {same_group}
        where {condition} group by r.number, x.connection, x.block order by all
        """
    )
    return Distributions(rows, sums)


def failures(database: Database) -> Distributions:
    """Requests by API, scored by whether they failed with an error (null: had no response).

    Requests whose response may be lost are left out.
    """
    database.run(
        """
        create or replace temp table tried as
        select api_name, side, connection, block, count(*) n
        from x where status <> 'no_response_expected' and not coalesce(may_be_lost, false)
        group by all;
        create or replace temp table failed as
        select api_name, error_code, side, connection, block, count(*) n from (
            select api_name, side, connection, block, unnest(error_codes) error_code from x
            union all select api_name, side, connection, block, null from x
            where not may_be_lost
        ) group by all;
        create or replace temp table failures as
        select *, row_number() over (order by api_name, error_code) - 1 as number from (
            select api_name, error_code, coalesce(sum(n) filter (side = 'a'), 0)::bigint count_a,
                coalesce(sum(n) filter (side = 'b'), 0)::bigint count_b
            from failed group by all
        ) join (
            select api_name, sum(n) filter (side = 'a')::bigint n_a,
                sum(n) filter (side = 'b')::bigint n_b
            from tried group by all
        ) using (api_name)
        where n_a > 0 and n_b > 0
        """
    )
    sums = database.table(
        """
        select number, t.connection, t.block, t.n::double as count,
            coalesce(f.n, 0)::double failed_total,
            failed_total as failed_squares
        from failures join tried t using (api_name) left join failed f
            on f.api_name = t.api_name and f.connection = t.connection and f.block = t.block
            and f.error_code is not distinct from failures.error_code
        order by all
        """
    )
    return Distributions(database.rows("from failures order by number"), sums)
