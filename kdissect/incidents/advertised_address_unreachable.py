"""`advertised_address_unreachable`: an address that Metadata advertised was never reached.

Clients reach the bootstrap address and nothing else. It is the cluster's mistake, or a name that
clients cannot resolve.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from kdissect.incidents.evidence import CONNECTION_IDS, Evidence, Row, lasted_ms
from kdissect.incidents.incident import BAD, Incident, Kind
from kdissect.incidents.outages import make_outages
from kdissect.sql.requests import endpoint
from kdissect.text import plural

KIND = Kind(
    "advertised_address_unreachable",
    "address",
    "an address that Metadata advertised was never reached",
    "network",
)
ATTEMPTS_MIN = 3
LENGTH_MIN_MS = 1000
# A client connects to the brokers that Metadata named within so long of its own start.
METADATA_BEFORE = timedelta(seconds=5)
# Java's clients repeat Metadata each retry.backoff.ms; some requests may be of a client's start.
METADATA_MIN = 3
# What a client sends to a bootstrap address before it connects to the advertised ones.
_BOOTSTRAP_APIS = (
    *("ApiVersions", "Metadata", "SaslHandshake", "SaslAuthenticate", "DescribeCluster"),
    "FindCoordinator",
)


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the addresses with failed attempts only, then those that clients never tried."""
    make_outages(evidence)
    rows = evidence.rows(
        f"""
        FROM outages WHERE era = 0 AND back IS NULL AND is_advertised
          AND greatest(syns, attempts) >= {ATTEMPTS_MIN} ORDER BY start, broker
        """
    )
    for row in rows:
        kind = "refused" if row["refusals"] else "not answered"
        address = row["broker"]
        yield _wrong_address(
            evidence,
            {
                "start": _connected_at(evidence, row["first_failed"]),
                "stop": row["last_failed"],
                "connection_ids": row["failed_ids"],
            },
            address,
            f"Metadata names {address} as the address of a broker. "
            f"{plural(row['attempts'], 'connection attempt')} to it failed ({kind}), and none "
            "worked. Check advertised.listeners of that broker.",
        )
    yield from _unseen(evidence)


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
            {CONNECTION_IDS}
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
        KIND,
        BAD,
        address,
        text,
        time_lost_ms=lasted_ms(row),
        next_command=evidence.command("sql", "from brokers"),
        brokers=frozenset((address, *row.get("brokers", ()))),
        client=client,
    )
