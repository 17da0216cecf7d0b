"""The table `outages`: attempts to connect to an address that failed, without any that worked.

A row has `first_failed` and `last_failed`, `back` (the next attempt that worked, or null), `era`
(how many had worked before), and the counts `attempts`, `syns` and `refusals`. `start` is when the
broker closed its connections, or an earlier request that it ignored; `stop` is `back`, or the last
attempt.

What clients lost: `requests` had no response; `lost` of them were of APIs that a broker answers at
once. `is_served`: other brokers answered its clients meanwhile. `is_announced`: the broker had
announced its end. `has_moved`: Metadata named other leaders for all partitions that clients used at
the broker, before the first attempt failed.
"""

from __future__ import annotations

from kdissect.incidents.evidence import HELD_APIS, Evidence
from kdissect.incidents.incident import EVIDENCE_MAX
from kdissect.incidents.leaders import make_leaders
from kdissect.sql.requests import endpoint

# A node that announced its shutdown takes so long at most (controlled shutdown and log flushes).
SHUTDOWN_S = 60
# Clients that get answers to these from another broker go on with their work there.
_DATA_APIS = "('Produce', 'Fetch', 'ShareFetch')"
# Requests in which a node announces its end, and the condition.
_ANNOUNCEMENTS = (
    ("api_controlled_shutdown", "true"),
    ("api_broker_heartbeat", "request.want_shut_down"),
)

_ATTEMPTS = f"""
CREATE TEMP TABLE failures AS
WITH attempts AS (
  SELECT *, connection_id IN (
      SELECT connection_id FROM requests WHERE NOT is_broker AND api <> 'ApiVersions')
      AS is_clients,
    count(*) FILTER (NOT is_failed)
      OVER (PARTITION BY broker ORDER BY first_time, connection_id) AS era
  FROM (SELECT *, coalesce(refused, false) OR unanswered_syn_count >= syn_count AS is_failed
    FROM sessions WHERE syn_count > 0)
), failed AS (
  SELECT broker, broker_ip, era, min(first_time) AS first_failed, max(last_time) AS last_failed,
    sum(syn_count)::BIGINT AS syns, count(*) AS attempts, count(*) FILTER (refused) AS refusals,
    list(connection_id ORDER BY first_time)[:{EVIDENCE_MAX}] AS failed_ids
  FROM attempts WHERE is_failed GROUP BY broker, broker_ip, era
), next AS (
  SELECT broker, era - 1 AS era, min(first_time) AS back FROM attempts WHERE NOT is_failed
  GROUP BY broker, era
), seen AS (
  SELECT f.broker, f.era, max(r.response_time) AS last_response FROM failed f
  JOIN requests r ON r.broker = f.broker AND r.response_time < f.first_failed GROUP BY ALL
), closed AS (
  SELECT f.broker, f.era, min(s.last_time) AS closed_at, count(*) AS closed_connections,
    list(s.connection_id ORDER BY s.last_time) AS closed_ids
  FROM failed f LEFT JOIN seen USING (broker, era) JOIN sessions s ON s.broker = f.broker
    AND s.closed_by = 'broker' AND s.last_time <= f.first_failed
    AND s.last_time >= coalesce(seen.last_response, f.first_failed - INTERVAL 1 SECONDS)
    AND NOT coalesce(s.refused, false)
  GROUP BY ALL
), used AS (
  SELECT broker, bool_or(is_clients) AS is_clients, bool_or(is_broker) AS is_brokers
  FROM attempts GROUP BY broker
)
SELECT f.*, n.back, coalesce(n.back, f.last_failed) AS stop, s.last_response, c.closed_at,
  coalesce(c.closed_ids, []) AS closed_ids, coalesce(c.closed_connections, 0) AS closed_connections,
  coalesce(u.is_clients, false) AS is_clients, coalesce(u.is_brokers, false) AS is_brokers
FROM failed f LEFT JOIN next n USING (broker, era) LEFT JOIN seen s USING (broker, era)
LEFT JOIN closed c USING (broker, era) LEFT JOIN used u USING (broker)
"""

_OUTAGES = f"""
CREATE TEMP TABLE outages AS
WITH hits AS (
  SELECT o.broker, o.era, count(*) AS requests,
    min(r.request_time) FILTER (r.request_time > o.last_response) AS first_unanswered,
    min(r.request_time) FILTER (r.request_time > o.last_response AND r.api NOT IN {HELD_APIS})
      AS first_ignored,
    count(*) FILTER (r.api NOT IN {HELD_APIS}) AS lost,
    list(r.exchange_id ORDER BY r.request_time, r.exchange_id)[:{EVIDENCE_MAX}] AS exchange_ids
  FROM failures o JOIN requests r ON r.broker = o.broker AND r.is_unanswered
    AND r.request_time <= o.stop
    AND (r.request_time >= o.last_response OR list_contains(o.closed_ids, r.connection_id))
  GROUP BY o.broker, o.era
), users AS (
  SELECT broker, client, min(response_time) AS since, flatten(list(topics)) AS topics FROM requests
  WHERE api IN {_DATA_APIS} AND NOT is_broker AND response_time IS NOT NULL GROUP BY ALL
), served AS (
  SELECT DISTINCT o.broker, o.era FROM failures o
  JOIN requests r ON r.broker <> o.broker AND r.request_time > o.first_failed
    AND r.response_time <= o.stop
  JOIN users u ON u.broker = o.broker AND u.client = r.client AND u.since < o.first_failed
  WHERE r.api IN {_DATA_APIS} AND NOT r.failed
), nodes AS (
  SELECT DISTINCT node_id, {endpoint("ip", "port")} AS broker FROM brokers WHERE ip IS NOT NULL
), led AS (
  SELECT o.broker, o.era, n.node_id, arg_max(l.leader, row(l.epoch, l.time)) AS leader
  FROM failures o JOIN nodes n USING (broker) JOIN leaders l ON l.time <= o.first_failed
  WHERE EXISTS (FROM users u WHERE u.broker = o.broker AND u.since < o.first_failed
    AND list_contains(u.topics, l.topic))
  GROUP BY o.broker, o.era, n.node_id, l.topic, l.partition
  HAVING bool_or(l.leader = n.node_id)
), moved AS (
  SELECT broker, era FROM led GROUP BY ALL HAVING bool_and(leader <> node_id)
)
SELECT o.*, coalesce(
    CASE WHEN o.closed_at IS NOT NULL THEN least(o.closed_at, h.first_ignored) END,
    h.first_unanswered, o.first_failed) AS start,
  coalesce(h.requests, 0) AS requests, coalesce(h.lost, 0) AS lost, h.exchange_ids,
  EXISTS (FROM announcements a WHERE a.broker = o.broker AND a.time
    BETWEEN o.first_failed - INTERVAL {SHUTDOWN_S} SECONDS AND o.first_failed) AS is_announced,
  s.broker IS NOT NULL AS is_served, m.broker IS NOT NULL AS has_moved,
  o.broker IN (FROM advertised) AS is_advertised
FROM failures o LEFT JOIN hits h USING (broker, era) LEFT JOIN served s USING (broker, era)
LEFT JOIN moved m USING (broker, era)
"""


def make_outages(evidence: Evidence) -> None:
    """Create the table, once."""
    if evidence.rows("FROM duckdb_tables() WHERE table_name = 'outages'"):
        return
    make_leaders(evidence)
    evidence.run(_ATTEMPTS)
    evidence.run(
        f"""
        CREATE TEMP TABLE advertised AS
        SELECT DISTINCT {endpoint("address", "port")} AS address
        FROM (SELECT unnest([ip, host]) AS address, port FROM brokers) WHERE address IS NOT NULL
        """
    )
    announced = [
        f"SELECT request.broker_id AS node_id, request_time AS time FROM {view} WHERE {condition}"
        for view, condition in _ANNOUNCEMENTS
        if evidence.has_field(view, "request", "broker_id")
    ] or ["SELECT NULL AS node_id, NULL::TIMESTAMPTZ AS time WHERE false"]
    evidence.run(
        f"""
        CREATE TEMP TABLE announcements AS
        SELECT {endpoint("coalesce(b.ip, b.host)", "b.port")} AS broker, time
        FROM ({" UNION ALL ".join(announced)}) JOIN brokers b USING (node_id)
        """
    )
    evidence.run(_OUTAGES)
