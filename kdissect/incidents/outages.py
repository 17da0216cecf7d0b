"""Brokers and addresses that clients could not connect to.

A row of the table `outages` is a run of failed attempts to connect to one address, with no
successful one between them. It has `first_failed` and `last_failed`, `back` (the next attempt that
worked, or null), `era` (how many had worked before, those made before the capture too), and the
counts `attempts`, `syns` and `refusals`. `start` is when the broker closed its connections, or an
earlier request that it ignored; `stop` is `back`, or the last attempt.

What clients lost: `requests` had no response; `lost` of them were of APIs that a broker answers at
once. `is_served`: other brokers answered its clients meanwhile. `is_announced`: the broker had
announced its end. `has_moved`: Metadata named other leaders for all partitions that clients used at
the broker, before the first attempt failed.
"""

from __future__ import annotations

from kdissect.incidents.evidence import CONNECTION_IDS, HELD_APIS, runs
from kdissect.incidents.incident import BAD, EVIDENCE_MAX, INFO, SEVERITIES, WARN
from kdissect.incidents.kind import kind, lasted_ms
from kdissect.sql.requests import endpoint
from kdissect.tables.schemas import Row
from kdissect.text import duration, plural

# A node that announced its shutdown takes so long at most (controlled shutdown and log flushes).
SHUTDOWN_S = 60
# Clients that get answers to these from another broker go on with their work there.
_DATA_APIS = "('Produce', 'Fetch', 'ShareFetch')"

_IS_FAILED = "coalesce(refused, false) OR unanswered_syn_count >= syn_count"
_FAILED = f"sessions WHERE syn_count > 0 AND ({_IS_FAILED})"
_FAILURES = f"""
WITH answered AS (
  SELECT connection_id, min(response_time) AS answered FROM requests GROUP BY connection_id
), attempts AS (
  SELECT *, connection_id IN (
      SELECT connection_id FROM requests WHERE NOT is_broker AND api <> 'ApiVersions')
      AS is_clients,
    count(*) FILTER (NOT is_failed)
      OVER (PARTITION BY broker ORDER BY known_at, connection_id) AS era
  FROM (
    SELECT *, syn_count > 0 AND ({_IS_FAILED}) AS is_failed,
      -- a connection without its SYN worked before the capture, and works when it is answered
      CASE WHEN syn_count > 0 THEN first_time ELSE coalesce(answered, '-infinity') END AS known_at
    FROM sessions LEFT JOIN answered USING (connection_id) WHERE syn_count > 0 OR is_kafka OR is_tls
  )
), failed AS (
  SELECT broker, broker_ip, era, min(first_time) AS first_failed, max(last_time) AS last_failed,
    sum(syn_count)::BIGINT AS syns, count(*) AS attempts, count(*) FILTER (refused) AS refusals,
    list(connection_id ORDER BY first_time)[:{EVIDENCE_MAX}] AS failed_ids
  FROM attempts WHERE is_failed GROUP BY broker, broker_ip, era
), next AS (
  SELECT broker, era - 1 AS era, min(known_at) AS back FROM attempts WHERE NOT is_failed
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
  -- is_clients: null if TLS hides the requests
  SELECT broker, bool_or(is_broker) AS is_brokers, bool_or(is_clients)
    OR nullif(bool_or(is_tls AND NOT is_kafka AND response_byte_count > 0), true) AS is_clients
  FROM attempts GROUP BY broker
)
SELECT f.*, n.back, coalesce(n.back, f.last_failed) AS stop, s.last_response, c.closed_at,
  coalesce(c.closed_ids, []) AS closed_ids, coalesce(c.closed_connections, 0) AS closed_connections,
  u.is_clients, u.is_brokers
FROM failed f LEFT JOIN next n USING (broker, era) LEFT JOIN seen s USING (broker, era)
LEFT JOIN closed c USING (broker, era) JOIN used u USING (broker)
"""

_OUTAGES = f"""
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
), advertised AS (
  SELECT DISTINCT {endpoint("address", "port")} AS address
  FROM (SELECT unnest([ip, host]) AS address, port FROM brokers) WHERE address IS NOT NULL
), announcements AS (
  SELECT {endpoint("coalesce(b.ip, b.host)", "b.port")} AS broker, time
  FROM (
    SELECT request.broker_id AS node_id, request_time AS time FROM api_controlled_shutdown
    UNION ALL SELECT request.broker_id, request_time FROM api_broker_heartbeat
    WHERE request.want_shut_down
  ) JOIN brokers b USING (node_id)
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
  -- null if it may be the address of a host name
  o.broker IN (FROM advertised) OR nullif(EXISTS (FROM brokers b
    WHERE b.ip IS NULL AND ends_with(o.broker, ':' || b.port)), true) AS is_advertised, c.clients
FROM failures o LEFT JOIN hits h USING (broker, era) LEFT JOIN served s USING (broker, era)
LEFT JOIN moved m USING (broker, era)
LEFT JOIN (SELECT broker, list(DISTINCT client) AS clients FROM sessions GROUP BY broker) c
  USING (broker)
"""


# A client that starts early or races with a restart fails once or twice, then succeeds.
ATTEMPTS_MIN = 3
LENGTH_MIN_MS = 1000
NODE_MS = 250  # listeners of one node close within so long of each other
# `severity` follows from what the clients lost: nothing, if other brokers led the node's
# partitions, served its clients meanwhile, and no request was lost that a broker answers at once.
# An outage without a severity is too short to matter.
_JUDGED = f"""(
  SELECT *, start AS time, ms_between(start, stop) AS length_ms,
    (is_announced OR has_moved) AND is_served AND lost = 0 AS lost_nothing,
    CASE
      WHEN lost = 0 AND (length_ms < {LENGTH_MIN_MS}
        OR attempts < {ATTEMPTS_MIN} AND syns < {ATTEMPTS_MIN}) THEN NULL
      WHEN era = 0 THEN if(back IS NULL, '{WARN}', '{INFO}')
      WHEN lost_nothing OR NOT is_clients THEN '{INFO}'
      -- a controller's listener, which no client uses
      WHEN is_brokers AND NOT is_advertised THEN '{INFO}'
      ELSE if(is_clients, '{BAD}', '{WARN}') END AS severity
  FROM outages
  WHERE severity IS NOT NULL AND (era > 0 OR back IS NOT NULL OR is_advertised IS NOT TRUE)
)"""
# A row for each node: its listeners in order of importance
_NODES = f"""
    WITH nodes AS (
      SELECT min(start) AS start, list(outage ORDER BY
        list_position({list(SEVERITIES)}, severity), requests DESC, start, broker
      ) AS listeners
      FROM ({runs(_JUDGED, "broker_ip", NODE_MS)}) outage GROUP BY broker_ip, run
    )
    SELECT start, listeners[1].stop AS stop, listeners, listeners[1].broker AS broker,
      listeners[1].severity AS severity, ms_between(start, stop) AS lost_ms,
      list_sum([one.requests for one in listeners])::BIGINT AS requests,
      flatten([one.exchange_ids for one in listeners]) AS exchange_ids,
      flatten([one.closed_ids || one.failed_ids for one in listeners]) AS connection_ids,
      [one.broker for one in listeners] AS brokers,
      flatten([one.clients for one in listeners]) AS clients
    FROM nodes ORDER BY start, broker
"""
_TABLES = {"failures": _FAILURES, "outages": _OUTAGES}


@kind("network", "severity", "broker", _FAILED, _NODES, tables=_TABLES)
def broker_unreachable(row: Row) -> str:
    """Return the text of the outage of a node: its subject is the listener of its clients."""
    first, *others = ({**one, "start": row["start"]} for one in row["listeners"])
    sentences = [f"{first['broker']} {_beginning(first)}."]
    if first["closed_connections"]:
        closed = plural(first["closed_connections"], "connection")
        sentences.append(f"It closed {closed} at the beginning.")
    if first["is_announced"]:
        sentences.append("It had announced its shutdown.")
    elif first["lost_nothing"]:
        sentences.append("Metadata named other leaders for its partitions before.")
    if first["is_served"]:
        sentences.append("Other brokers served its clients meanwhile.")
    if row["requests"]:
        sentences.append(f"{plural(row['requests'], 'request')} had no response.")
    sentences.append(f"It {_ending(first)}.")
    sentences += [f"{one['broker']} of the same machine {_ending(one)}." for one in others]
    return " ".join(sentences)


def _beginning(row: Row) -> str:
    earlier = "" if row["era"] else " (no Kafka connection to it was captured before)"
    return f"had {_attempts(row)}{earlier}"


def _attempts(row: Row) -> str:
    """Return how many attempts failed, and how: 23 refused and 1 unanswered connection attempts"""
    counts = {"refused": row["refusals"], "unanswered": row["attempts"] - row["refusals"]}
    kinds = " and ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
    return f"{kinds} connection attempt{'s' if row['attempts'] > 1 else ''}"


def _ending(row: Row) -> str:
    if row["back"] is None:
        return "was not reached again" if row["era"] else "was not reached"
    return f"was {'back' if row['era'] else 'reached'} after {duration(lasted_ms(row))}"


# A client connects to the brokers that Metadata named within so long of its own start.
METADATA_BEFORE_S = 5
# Java's clients repeat Metadata each retry.backoff.ms; some requests may be of a client's start.
METADATA_MIN = 3
# What a client sends to a bootstrap address before it connects to the advertised ones.
_BOOTSTRAP_APIS = (
    *("ApiVersions", "Metadata", "SaslHandshake", "SaslAuthenticate", "DescribeCluster"),
    "FindCoordinator",
)
# A row for each outage of an advertised address that no client ever reached
_UNREACHED = f"""
    WITH connected AS (
      -- when the client that last read Metadata before the first attempt had connected
      SELECT o.broker, o.era, max_by(s.first_time, r.response_time) AS connected
      FROM outages o JOIN requests r ON r.api = 'Metadata' AND r.response_time <= o.first_failed
      JOIN sessions s USING (connection_id) GROUP BY o.broker, o.era
    )
    SELECT broker, attempts, refusals, failed_ids AS connection_ids, last_failed AS stop,
      -- a connection that is older had another reason
      CASE WHEN first_failed - connected <= INTERVAL {METADATA_BEFORE_S} SECONDS THEN connected
        ELSE first_failed END AS start, ms_between(start, stop) AS lost_ms
    FROM (SELECT * EXCLUDE (start, stop) FROM outages) LEFT JOIN connected USING (broker, era)
    WHERE era = 0 AND back IS NULL AND is_advertised
      AND greatest(syns, attempts) >= {ATTEMPTS_MIN} ORDER BY start, broker
"""
_SHOW = 'kdissect sql {source} "from brokers"'


@kind(
    "network",
    BAD,
    "broker",
    _FAILED,
    _UNREACHED,
    tables=_TABLES,
    command=_SHOW,
    name="advertised_address_unreachable",
)
def unreached_address(row: Row) -> str:
    """Return the text of an address with failed attempts only."""
    return (
        f"Metadata names {row['broker']} as the address of a broker. It had {_attempts(row)}, "
        "and none worked. Check advertised.listeners of that broker, and whether it runs."
    )


# A row for each client that never used advertised addresses, though no attempt to connect was seen.
# The evidence: a client asks for Metadata of its topics again and again and never goes on, and no
# client does anything else at an advertised address. A client that cannot resolve a host name sends
# no SYN, and the bootstrap address may have the same port.
_UNSEEN = f"""
    WITH used AS (
      SELECT DISTINCT s.broker, s.broker_port AS port FROM requests r
      JOIN sessions s USING (connection_id)
      WHERE NOT r.is_broker AND r.api NOT IN {_BOOTSTRAP_APIS}
    ), wrong AS (
      SELECT array_to_string(list_sort(list(DISTINCT host || ':' || port)), ', ') AS hosts
      FROM brokers WHERE host IS NOT NULL
      HAVING count(*) > 0
        -- a host name may be any of the addresses with its port
        AND count(*) FILTER (if(ip IS NULL, port IN (SELECT port FROM used),
          {endpoint("ip", "port")} IN (SELECT broker FROM used))) = 0
        AND count(*) FILTER ({endpoint("host", "port")} IN (
          SELECT broker FROM sessions WHERE NOT is_broker)) = 0
    ), stuck AS (
      SELECT r.client, min(s.first_time) AS start, max(r.time) AS stop,
        count(*) FILTER (len(m.request.topics) > 0 AND NOT r.failed) AS refreshes,
        list(DISTINCT r.broker) AS brokers,
        {CONNECTION_IDS}
      FROM requests r JOIN sessions s USING (connection_id)
      LEFT JOIN api_metadata m USING (exchange_id)
      WHERE NOT r.is_broker GROUP BY r.client
      HAVING refreshes >= {METADATA_MIN}
        AND stop - start >= INTERVAL {LENGTH_MIN_MS} MILLISECONDS
        AND count(*) FILTER (r.api NOT IN {_BOOTSTRAP_APIS}) = 0
    )
    SELECT * REPLACE (list_append(brokers, hosts) AS brokers), ms_between(start, stop) AS lost_ms
    FROM stuck, wrong ORDER BY start
"""


@kind("network", BAD, "hosts", "brokers", _UNSEEN, command=_SHOW)
def advertised_address_unreachable(row: Row) -> str:
    """Return the text of a client that reaches the bootstrap address and nothing else.

    It is the cluster's mistake, or a name that clients cannot resolve.
    """
    return (
        f"Metadata names {row['hosts']} as addresses of brokers. {row['client']} sent "
        f"{plural(row['refreshes'], 'Metadata request')} for its topics and never went on, and "
        "no client used such an address. Check advertised.listeners, and whether the client "
        "resolves the host."
    )
