"""The inventory of a table set: its clients, with their software, API versions, topics and groups.

A client is a client id at an address. A row has only values that its requests and connections
show, and nothing is inferred from other clients.
"""

from __future__ import annotations

import pyarrow as pa

from kdissect.sql.database import Database
from kdissect.tables.schemas import INVENTORY, SINCE_COLUMNS, table_of

NEW, GONE, CHANGED, SAME = "new", "gone", "changed", "same"
CLIENT_CHANGES = (NEW, GONE, CHANGED, SAME)

# Requests that a member of a group sends. OffsetFetch is not among them: monitors send it, too.
_MEMBER_APIS = (
    *("JoinGroup", "SyncGroup", "Heartbeat", "LeaveGroup", "OffsetCommit", "TxnOffsetCommit"),
    *("ConsumerGroupHeartbeat", "ShareGroupHeartbeat", "StreamsGroupHeartbeat"),
    *("ShareFetch", "ShareAcknowledge"),
)
_COMPARED = (
    *("software", "principals", "api_versions", "topics_written", "topics_read", "groups"),
)


def inventory(database: Database, since_us: int | None = None) -> pa.Table:
    """Return a row for each client, in order of address and client id.

    database: with the tables of `make_requests`. since_us: a time in microseconds since 1970. With
    it, `change` compares the requests from that time on with those before, and `changes` lists the
    differences.
    """
    database.run(_calls(since_us))
    database.run(f"CREATE TEMP TABLE clients AS {_clients('true')}")
    columns, query = INVENTORY, "SELECT * EXCLUDE (caller) FROM clients ORDER BY caller"
    if since_us is not None:
        database.run(f"CREATE TEMP TABLE earlier AS {_clients('NOT is_late')}")
        database.run(f"CREATE TEMP TABLE later AS {_clients('is_late')}")
        columns, query = pa.schema([*INVENTORY, *SINCE_COLUMNS], INVENTORY.metadata), _COMPARISON
    found = database.table(query)
    return table_of(columns, dict(zip(found.column_names, found.columns, strict=True)))


def _calls(since_us: int | None) -> str:
    """Return SQL that makes `calls`: like requests of a client on a connection are one row.

    A million exchanges are a few thousand rows, so all further queries are cheap.
    """
    since = "NULL" if since_us is None else f"{since_us:d}"
    times = f"epoch_us(time) >= {since} AS is_late, min(time) AS first_time, max(time) AS last_time"
    return f"""
      CREATE TEMP TABLE calls AS
      SELECT *, dense_rank() OVER (ORDER BY client_ip, client_id) AS caller
      FROM (
        SELECT client_ip, client_id, connection_id, is_broker, api, api_version, is_sure, topics,
          group_id, count(*) AS request_count, {times}
        FROM requests WHERE api_key IS NOT NULL GROUP BY ALL
        -- a fetch session that began before the capture names no topic in its requests (KIP-227)
        UNION ALL
        SELECT client_ip, client_id, connection_id, is_broker, 'Fetch', NULL, false, [b.topic],
          NULL, 0, {times}
        FROM record_batches b JOIN requests USING (exchange_id)
        WHERE b.source <> 'produce' GROUP BY ALL
      )
    """


def _clients(condition: str) -> str:
    """Return SQL with a row for each client of the calls that fulfil a condition."""
    members = ", ".join(f"'{name}'" for name in _MEMBER_APIS)
    return f"""
      WITH called AS (FROM calls WHERE {condition}),
      callers AS (
        SELECT caller, any_value(client_ip) AS client_ip, any_value(client_id) AS client_id,
          CASE WHEN bool_or(is_broker) THEN 'broker' ELSE 'client' END AS role,
          min(first_time) AS first_time, max(last_time) AS last_time,
          count(DISTINCT connection_id) AS connection_count,
          sum(request_count)::BIGINT AS request_count,
          list(DISTINCT group_id ORDER BY group_id)
            FILTER (api IN ({members}) AND group_id <> '') AS groups
        FROM called GROUP BY caller
      ), links AS (
        SELECT k.caller, c.first_time, c.last_time, c.principal,
          concat_ws(' ', c.client_software_name, c.client_software_version) AS software,
          max(c.last_time) OVER (PARTITION BY k.caller ORDER BY c.first_time, c.last_time
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS covered_until
        FROM (SELECT DISTINCT caller, connection_id FROM called) k
        JOIN connections c USING (connection_id)
      ), sessions AS (
        SELECT caller, list(DISTINCT software ORDER BY software) FILTER (software <> '')
            AS software,
          list(DISTINCT principal ORDER BY principal) FILTER (principal IS NOT NULL)
            AS principals,
          -- time in which at least one connection was open
          sum(greatest(0, epoch_us(last_time) - epoch_us(greatest(first_time, covered_until))))
            / 1000 AS observed_ms
        FROM links GROUP BY caller
      ), versions AS (
        SELECT caller, list(api || ' v' || api_version ORDER BY api, api_version) AS api_versions
        FROM (SELECT DISTINCT caller, api, api_version FROM called
          WHERE is_sure AND api IS NOT NULL AND api_version IS NOT NULL)
        GROUP BY caller
      ), moved AS (
        SELECT caller, api = 'Produce' AS is_written, unnest(topics) AS topic FROM called
        WHERE api IN ('Produce', 'Fetch', 'ShareFetch')
      ), topics AS (
        SELECT caller,
          list(DISTINCT topic ORDER BY topic) FILTER (is_written) AS topics_written,
          list(DISTINCT topic ORDER BY topic) FILTER (NOT is_written) AS topics_read
        FROM moved WHERE topic IS NOT NULL GROUP BY caller
      )
      SELECT caller, {", ".join(INVENTORY.names)}
      FROM callers LEFT JOIN sessions USING (caller) LEFT JOIN versions USING (caller)
      LEFT JOIN topics USING (caller)
    """


def _differences(column: str) -> str:
    """Return SQL of the values of a list column that appeared and that were not seen again."""
    new, old = (f"coalesce({table}.{column}, [])" for table in ("later", "earlier"))
    # many APIs are used at the start only: a version is gone if another one of its API is there
    is_gone = f"NOT list_contains({new}, value)" + (
        f" AND len(list_filter({new}, lambda other: {_api('other')} = {_api('value')})) > 0"
        if column == "api_versions"
        else ""
    )
    return (
        f"list_transform(list_filter({new}, lambda value: NOT list_contains({old}, value)), "
        f"lambda value: '{column} +' || value), "
        f"list_transform(list_filter({old}, lambda value: {is_gone}), "
        f"lambda value: '{column} -' || value)"
    )


def _api(version: str) -> str:
    return f"split_part({version}, ' ', 1)"


_COMPARISON = f"""
  WITH compared AS (
    SELECT c.*, earlier.caller IS NULL AS is_new, later.caller IS NULL AS is_gone,
      flatten([{", ".join(map(_differences, _COMPARED))}]) AS differences
    FROM clients c LEFT JOIN earlier USING (caller) LEFT JOIN later USING (caller)
  )
  SELECT * EXCLUDE (caller, is_new, is_gone, differences),
    CASE WHEN is_new THEN '{NEW}' WHEN is_gone THEN '{GONE}'
      WHEN len(differences) > 0 THEN '{CHANGED}' ELSE '{SAME}' END AS change,
    CASE WHEN len(differences) > 0 AND NOT is_new AND NOT is_gone THEN differences END AS changes
  FROM compared ORDER BY caller
"""
