"""`tls_failure`: TLS handshakes failed, or one side spoke no TLS.

TLS 1.3 encrypts the alert that names the reason (RFC 8446, 6), so that the wire shows the failure,
but not whether a certificate has ended or its authority is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.facts import Facts, follow
from kdissect.incidents.model import BAD, EVIDENCE_MAX, WARN, Incident
from kdissect.incidents.runs import runs
from kdissect.text import duration, plural

# One failure may be a scanner, or a client that goes away; a program tries again.
LOOP_MIN = 3
PAUSE_MS = 60_000
# SYN, ClientHello, an alert, FIN and the acknowledgements. A client that succeeds also sends
# Finished and a request: 11 segments and more.
SEGMENTS_MAX = 10
# Failed handshakes of one program have the same size, but for the length of random signatures.
SPREAD_MAX = 16  # bytes
LENGTH_S = 5
# A broker reads the first bytes of an alert record (RFC 8446, 5.1: 21, 3, 1 to 4) as such a size.
_ALERT_SIZES = f"{0x15030000} AND {0x150304FF}"

_TEXTS = {
    "plaintext port": "sent a TLS ClientHello, and the broker closed without a ServerHello: its "
    "listener speaks no TLS. Compare security.protocol of the client with the listener.",
    "TLS port": "sent Kafka requests in the clear, and the broker answered with a TLS alert: its "
    "listener speaks TLS. Compare security.protocol of the client with the listener.",
    "handshake": "ended the TLS handshake after the broker's certificate and sent no request. Look "
    "at the end of the certificate, its names, and the client's trust store.",
}


def find(facts: Facts) -> Iterator[Incident]:
    """Yield the failures of each client host at each broker."""
    signs = f"""(
        SELECT client_ip, broker, connection_id, first_time AS time, last_time,
          request_byte_count, response_byte_count,
          is_tls AND handshake_seen AND tls_version IS NOT NULL AS has_hello,
          CASE
            WHEN is_tls AND tls_version IS NULL AND response_byte_count = 0
              AND request_byte_count > 0 AND closed_by = 'broker' THEN 'plaintext port'
            WHEN NOT is_tls AND closed_by = 'broker' AND connection_id IN (
              SELECT connection_id FROM anomalies WHERE kind = 'limit' AND direction = 'response'
                AND TRY_CAST(regexp_extract(detail, 'of ([0-9]+) bytes', 1) AS BIGINT)
                  BETWEEN {_ALERT_SIZES})
              AND connection_id NOT IN (
                SELECT connection_id FROM requests WHERE response_time IS NOT NULL)
              THEN 'TLS port'
            WHEN has_hello AND NOT is_kafka AND close_reason IN ('fin', 'rst')
              AND request_segment_count <= {SEGMENTS_MAX}
              AND last_time - first_time < INTERVAL {LENGTH_S} SECONDS THEN 'handshake'
            WHEN has_hello THEN 'success'
          END AS sign
        FROM sessions WHERE handshake_seen
    )"""
    facts.run(f"CREATE TEMP TABLE tls_signs AS FROM {signs} WHERE sign IS NOT NULL")
    rows = facts.rows(
        f"""
        WITH failed AS (
          SELECT client_ip, broker, sign, run, min(time) AS start, max(last_time) AS stop,
            count(*) AS connections, list(connection_id ORDER BY time)[:{EVIDENCE_MAX}] AS ids,
            greatest(max(request_byte_count) - min(request_byte_count),
              max(response_byte_count) - min(response_byte_count)) AS spread
          FROM ({runs("tls_signs", "client_ip, broker, sign", PAUSE_MS)}) GROUP BY ALL
        )
        SELECT * FROM failed
        WHERE sign IN ('plaintext port', 'TLS port')
          OR sign = 'handshake' AND connections >= {LOOP_MIN} AND spread <= {SPREAD_MAX}
            AND (client_ip, broker) NOT IN (
              SELECT (client_ip, broker) FROM tls_signs WHERE sign = 'success')
        ORDER BY start, client_ip
        """
    )
    for row in rows:
        length_ms = (row["stop"] - row["start"]).total_seconds() * 1000
        yield Incident(
            "tls_failure",
            BAD if row["connections"] >= LOOP_MIN else WARN,
            row["start"],
            row["stop"],
            row["broker"],
            f"{plural(row['connections'], 'connection')} from {row['client_ip']} to "
            f"{row['broker']} failed in {duration(length_ms)}: the client {_TEXTS[row['sign']]}",
            time_lost_ms=length_ms,
            connection_ids=row["ids"],
            next_command=facts.command("show", *follow(row["ids"])),
            brokers=frozenset((row["broker"],)),
        )
