"""`broker_unreachable` and `advertised_address_unreachable`: no connection could be made.

Both start from outages: attempts to connect to an address that failed, without a successful one in
between. An address that Metadata advertised and that never worked is the cluster's mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from kdissect.incidents.evidence import HELD_APIS, Evidence, Row, lasted_ms
from kdissect.incidents.model import BAD, EVIDENCE_MAX, INFO, SEVERITIES, WARN, Incident
from kdissect.sql.requests import endpoint
from kdissect.text import duration, plural

# A client that starts early or races with a restart fails once or twice, then succeeds.
ATTEMPTS_MIN = 3
LENGTH_MIN_MS = 1000
# Before it stops, a node gives its partitions away (KIP-46); its clients see that as this error.
GIVING_AWAY_S = 10
# A node that announced its shutdown takes so long at most (controlled shutdown and log flushes).
SHUTDOWN_S = 60
# Clients that get answers to these from another broker go on with their work there.
_DATA_APIS = ("Produce", "Fetch", "ShareFetch")
# Listeners of one node close within so long of each other.
ONE_NODE = timedelta(milliseconds=250)
# A client connects to the brokers that Metadata named within so long of its own start.
METADATA_BEFORE = timedelta(seconds=5)
# Java's clients repeat Metadata each retry.backoff.ms; some requests may be of a client's start.
METADATA_MIN = 3
# What a client sends to a bootstrap address before it connects to the advertised ones.
_BOOTSTRAP_APIS = (
    *("ApiVersions", "Metadata", "SaslHandshake", "SaslAuthenticate", "DescribeCluster"),
    "FindCoordinator",
)

_PREPARE = f"""
CREATE TEMP TABLE attempts AS
SELECT connection_id, broker, broker_ip, client_address, client_ip, first_time AS time, last_time,
  is_failed, refused, syn_count, is_broker, connection_id IN (
    SELECT connection_id FROM requests WHERE NOT is_broker AND api <> 'ApiVersions') AS is_clients,
  count(*) FILTER (NOT is_failed)
    OVER (PARTITION BY broker ORDER BY first_time, connection_id) AS era
FROM (SELECT *, coalesce(refused, false) OR unanswered_syn_count >= syn_count AS is_failed
  FROM sessions WHERE syn_count > 0);

CREATE TEMP TABLE outages AS
WITH failed AS (
  SELECT broker, broker_ip, era, min(time) AS first_failed, max(last_time) AS last_failed,
    sum(syn_count)::BIGINT AS syns, count(*) AS attempts,
    count(*) FILTER (refused) AS refusals,
    list(connection_id ORDER BY time)[:{EVIDENCE_MAX}] AS failed_ids
  FROM attempts WHERE is_failed GROUP BY broker, broker_ip, era
), next AS (
  SELECT broker, era - 1 AS era, min(time) AS back FROM attempts WHERE NOT is_failed
  GROUP BY broker, era
), seen AS (
  SELECT broker, era, max(last_response) AS last_response FROM (
    SELECT f.broker, f.era, max(r.response_time) AS last_response FROM failed f
    JOIN requests r ON r.broker = f.broker AND r.response_time < f.first_failed GROUP BY ALL)
  GROUP BY ALL
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
SELECT f.*, n.back, s.last_response, c.closed_at, coalesce(c.closed_ids, []) AS closed_ids,
  coalesce(c.closed_connections, 0) AS closed_connections,
  coalesce(u.is_clients, false) AS is_clients, coalesce(u.is_brokers, false) AS is_brokers
FROM failed f LEFT JOIN next n USING (broker, era) LEFT JOIN seen s USING (broker, era)
LEFT JOIN closed c USING (broker, era) LEFT JOIN used u USING (broker)
"""


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the outages of brokers, and the advertised addresses that never worked."""
    evidence.run(_PREPARE)
    evidence.run(f"CREATE TEMP TABLE shutdowns AS {_shutdowns(evidence)}")
    advertised = {
        row["address"]
        for row in evidence.rows(
            """SELECT DISTINCT CASE WHEN contains(a, ':') THEN '[' || a || ']:' ELSE a || ':' END
              || port AS address FROM (SELECT unnest([ip, host]) AS a, port FROM brokers)
            WHERE a IS NOT NULL"""
        )
    }
    nodes: list[list[Row]] = []
    rows = evidence.rows(f"SELECT * FROM ({_outages_with_requests()}) ORDER BY start, broker")
    for row in rows:
        if not row["era"] and row["back"] is None and row["broker"] in advertised:
            yield from _advertised(evidence, row)
            continue
        # a controller's listener, which no client uses
        is_internal = row["is_brokers"] and row["broker"] not in advertised
        if severity := _severity(row, is_internal or not row["is_clients"]):
            outage = {**row, "severity": severity}
            near = nodes[-1][0] if nodes else None
            if near and row["start"] - near["start"] <= ONE_NODE and _ip(near) == _ip(row):
                nodes[-1].append(outage)
            else:
                nodes.append([outage])
    for listeners in nodes:
        yield _outage(evidence, listeners)
    yield from _unseen(evidence)


def _shutdowns(evidence: Evidence) -> str:
    """Return SQL of the addresses of brokers that announced their end, and when."""
    announced = [
        f"SELECT request.broker_id AS node_id, request_time AS time FROM {view} WHERE {condition}"
        for view, condition in (
            ("api_controlled_shutdown", "true"),
            ("api_broker_heartbeat", "request.want_shut_down"),
        )
        if evidence.has_field(view, "request", "broker_id")
    ]
    if not announced:
        return "SELECT NULL::VARCHAR AS broker, NULL::TIMESTAMPTZ AS time WHERE false"
    return f"""
        SELECT {endpoint("coalesce(b.ip, b.host)", "b.port")} AS broker, time
        FROM ({" UNION ALL ".join(announced)}) JOIN brokers b USING (node_id)
    """


def _outages_with_requests() -> str:
    """Return SQL of the outages with their begin, and the requests that they left unanswered.

    An outage begins when the broker closes its connections. The system of a process that died
    does so some time later: an earlier request that had no response is the begin, unless a broker
    holds such requests back. Without a close, any request without a response or the first failed
    attempt is.
    """
    return f"""
      WITH hits AS (
        SELECT o.broker, o.era, count(*) FILTER (r.is_unanswered) AS requests,
          min(r.request_time) FILTER (r.is_unanswered AND r.request_time > o.last_response)
            AS first_unanswered,
          min(r.request_time) FILTER (r.is_unanswered AND r.request_time > o.last_response
            AND r.api NOT IN {HELD_APIS}) AS first_ignored,
          count(*) FILTER (r.is_unanswered AND r.api NOT IN {HELD_APIS}) AS lost,
          list(r.exchange_id ORDER BY r.request_time, r.exchange_id)
            FILTER (r.is_unanswered)[:{EVIDENCE_MAX}] AS exchange_ids,
          coalesce(bool_or(list_contains(r.error_codes, 6)
            AND r.response_time >= o.first_failed - INTERVAL {GIVING_AWAY_S} SECONDS), false)
            AS gave_away
        FROM outages o JOIN requests r ON r.broker = o.broker
          AND r.request_time <= coalesce(o.back, o.last_failed)
          AND (r.request_time >= o.last_response OR list_contains(o.closed_ids, r.connection_id)
            OR r.response_time >= o.first_failed - INTERVAL {GIVING_AWAY_S} SECONDS)
        GROUP BY o.broker, o.era
      ), users AS (
        SELECT broker, client, min(response_time) AS since FROM requests
        WHERE api IN {_DATA_APIS} AND NOT is_broker AND response_time IS NOT NULL GROUP BY ALL
      ), served AS (
        SELECT DISTINCT o.broker, o.era FROM outages o
        JOIN requests r ON r.broker <> o.broker AND r.request_time > o.first_failed
          AND r.response_time <= coalesce(o.back, o.last_failed)
        JOIN users u ON u.broker = o.broker AND u.client = r.client AND u.since < o.first_failed
        WHERE r.api IN {_DATA_APIS} AND NOT r.failed
      )
      SELECT o.*, coalesce(
          CASE WHEN o.closed_at IS NOT NULL THEN least(o.closed_at, h.first_ignored) END,
          h.first_unanswered, o.first_failed) AS start,
        coalesce(o.back, o.last_failed) AS stop, coalesce(h.requests, 0) AS requests,
        coalesce(h.lost, 0) AS lost, h.exchange_ids, coalesce(h.gave_away, false) AS gave_away,
        EXISTS (
          FROM shutdowns s WHERE s.broker = o.broker AND s.time
            BETWEEN o.first_failed - INTERVAL {SHUTDOWN_S} SECONDS AND o.first_failed)
          AS is_announced,
        s.broker IS NOT NULL AS is_served
      FROM outages o LEFT JOIN hits h USING (broker, era) LEFT JOIN served s USING (broker, era)
    """


def _severity(row: Row, is_internal: bool) -> str | None:
    """Return the severity of an outage; None if it is too short to matter.

    It follows from what the clients lost: nothing, if the node had given its partitions away,
    other brokers served them meanwhile, and no request was lost that a broker answers at once.
    """
    is_single = row["attempts"] < ATTEMPTS_MIN and row["syns"] < ATTEMPTS_MIN
    if not row["requests"] and (is_single or lasted_ms(row) < LENGTH_MIN_MS):
        return None
    if not row["era"]:
        return WARN if row["back"] is None else INFO
    has_moved = row["is_served"] and (row["is_announced"] or row["gave_away"]) and not row["lost"]
    return INFO if has_moved or is_internal else BAD


def _ip(row: Row) -> str:
    address: str = row["broker"]
    return address.rpartition(":")[0]


def _outage(evidence: Evidence, listeners: list[Row]) -> Incident:
    """Return the incident of a node: its subject is the listener of its clients."""
    start = min(row["start"] for row in listeners)
    listeners = [{**row, "start": start} for row in listeners]
    listeners.sort(key=lambda row: (SEVERITIES.index(row["severity"]), -row["requests"]))
    first, *others = listeners
    requests = sum(row["requests"] for row in listeners)
    ids = [number for row in listeners for number in (*row["closed_ids"], *row["failed_ids"])]
    sentences = [f"{first['broker']} {_beginning(first)}."]
    if first["closed_connections"]:
        closed = plural(first["closed_connections"], "connection")
        sentences.append(f"It closed {closed} at the beginning.")
    if first["is_announced"]:
        sentences.append("It had announced its shutdown.")
    if first["is_served"]:
        sentences.append("Other brokers served its clients meanwhile.")
    if requests:
        sentences.append(f"{plural(requests, 'request')} had no response.")
    sentences.append(f"It {_ending(first)}.")
    sentences += [f"{row['broker']} of the same machine {_ending(row)}." for row in others]
    return Incident(
        "broker_unreachable",
        first["severity"],
        start,
        first["stop"],
        first["broker"],
        " ".join(sentences),
        requests,
        lasted_ms(first),
        [number for row in listeners for number in row["exchange_ids"] or ()],
        ids,
        evidence.follow(ids),
        frozenset(row["broker"] for row in listeners),
    )


def _beginning(row: Row) -> str:
    kind = "refused" if row["refusals"] == row["attempts"] else "unanswered"
    attempts = plural(row["attempts"], f"{kind} connection attempt")
    was_up, comes_back = row["era"] > 0, row["back"] is not None
    return f"was not up yet: {attempts}" if comes_back and not was_up else f"had {attempts}"


def _ending(row: Row) -> str:
    return (
        "did not come back" if row["back"] is None else f"was back after {duration(lasted_ms(row))}"
    )


def _advertised(evidence: Evidence, row: Row) -> Iterator[Incident]:
    if row["syns"] < ATTEMPTS_MIN and row["attempts"] < ATTEMPTS_MIN:
        return
    kind = "refused" if row["refusals"] else "not answered"
    yield _wrong_address(
        evidence,
        {
            "start": _connected_at(evidence, row["first_failed"]),
            "stop": row["last_failed"],
            "connection_ids": row["failed_ids"],
        },
        row["broker"],
        f"Metadata names {row['broker']} as the address of a broker. "
        f"{plural(row['attempts'], 'connection attempt')} to it failed ({kind}), and none worked. "
        "Check advertised.listeners of that broker.",
    )


def _connected_at(evidence: Evidence, first_failed: datetime) -> datetime:
    """Return when the client that last read Metadata before the first attempt had connected."""
    (row,) = evidence.rows(
        f"""
        SELECT max_by(s.first_time, r.response_time) AS connected
        FROM requests r JOIN sessions s USING (connection_id)
        WHERE r.api = 'Metadata' AND r.response_time <= TIMESTAMPTZ '{first_failed.isoformat()}'
        """
    )
    connected: datetime | None = row["connected"]
    # a connection that is older had another reason
    if connected is None or first_failed - connected > METADATA_BEFORE:
        return first_failed
    return connected


def _unseen(evidence: Evidence) -> Iterator[Incident]:
    """Yield advertised addresses that clients never used, though no attempt to connect was seen.

    The evidence: a client asks for Metadata of its topics again and again and never goes on, and
    no client does anything else at an advertised address. A client that cannot resolve a host name
    sends no SYN, and the bootstrap address may have the same port.
    """
    if not evidence.has_field("api_metadata", "request", "topics"):
        return
    rows = evidence.rows(
        f"""
        WITH used AS (
          SELECT DISTINCT broker FROM requests WHERE NOT is_broker AND api NOT IN {_BOOTSTRAP_APIS}
        ), wrong AS (
          SELECT array_to_string(list_sort(list(DISTINCT host || ':' || port)), ', ') AS hosts
          FROM brokers WHERE host IS NOT NULL
          HAVING count(*) > 0
            AND count(*) FILTER ({endpoint("coalesce(ip, host)", "port")} IN (FROM used)) = 0
            AND count(*) FILTER ({endpoint("host", "port")} IN (
              SELECT broker FROM sessions WHERE NOT is_broker)) = 0
        ), stuck AS (
          SELECT r.client, min(s.first_time) AS start, max(r.time) AS stop,
            count(*) FILTER (len(m.request.topics) > 0 AND NOT r.failed) AS refreshes,
            list(DISTINCT r.broker) AS brokers,
            list(DISTINCT connection_id ORDER BY connection_id)[:{EVIDENCE_MAX}] AS connection_ids
          FROM requests r JOIN sessions s USING (connection_id)
          LEFT JOIN api_metadata m USING (exchange_id)
          WHERE NOT r.is_broker GROUP BY r.client
          HAVING refreshes >= {METADATA_MIN}
            AND stop - start >= INTERVAL {LENGTH_MIN_MS} MILLISECONDS
            AND count(*) FILTER (r.api NOT IN {_BOOTSTRAP_APIS}) = 0
        )
        SELECT * FROM stuck, wrong ORDER BY start
        """
    )
    for row in rows:
        yield _wrong_address(
            evidence,
            row,
            row["hosts"],
            f"Metadata names {row['hosts']} as addresses of brokers. {row['client']} sent "
            f"{plural(row['refreshes'], 'Metadata request')} for its topics and never went on, and "
            "no client used such an address. Check advertised.listeners, and whether the client "
            "resolves the host.",
            row["client"],
        )


def _wrong_address(
    evidence: Evidence, row: Row, address: str, text: str, client: str = ""
) -> Incident:
    """Return the incident of an advertised address. row: as for `Evidence.incident`."""
    return evidence.incident(
        row,
        "advertised_address_unreachable",
        BAD,
        address,
        text,
        time_lost_ms=lasted_ms(row),
        next_command=evidence.command("sql", "from brokers"),
        brokers=frozenset((address, *row.get("brokers", ()))),
        client=client,
    )
