"""`tls_failure`: TLS handshakes failed, or one side spoke no TLS.

The evidence is an alert, or the absence of TLS. A client may encrypt its alert in TLS 1.3 (RFC
8446, 6): then it does not show whether a certificate has expired or its authority is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.facts import Facts
from kdissect.incidents.model import BAD, EVIDENCE_MAX, WARN, Incident
from kdissect.incidents.runs import runs
from kdissect.text import duration, plural

# One failure may be a scanner, or a client that goes away; a program tries again.
LOOP_MIN = 3
PAUSE_MS = 60_000
# A broker reads the first bytes of an alert record (RFC 8446, 5.1: 21, 3, 1 to 4) as such a size.
_ALERT_SIZES = f"{0x15030000} AND {0x150304FF}"

_TEXTS = {
    "plaintext port": "sent a TLS ClientHello, and the broker closed without a ServerHello: its "
    "listener speaks no TLS. Compare security.protocol of the client with the listener.",
    "TLS port": "sent Kafka requests in the clear, and the broker answered with a TLS alert: its "
    "listener speaks TLS. Compare security.protocol of the client with the listener.",
    "client": "ended the TLS handshake with an alert: {alerts}. Check the expiry date and the "
    "names of the broker's certificate, and the client's trust store.",
    "broker": "got a TLS alert in the handshake: {alerts}. Compare TLS versions, cipher suites and "
    "client certificates of both sides.",
}


def find(facts: Facts) -> Iterator[Incident]:
    """Yield the failures of each client host at each broker."""
    signs = f"""(
        SELECT client_ip, broker, connection_id, first_time AS time, last_time,
          coalesce(request_tls_alert, response_tls_alert) AS alert,
          CASE
            WHEN request_tls_alert IS NOT NULL THEN 'client'
            WHEN response_tls_alert IS NOT NULL THEN 'broker'
            WHEN is_tls AND tls_version IS NULL AND response_byte_count = 0
              AND response_missing_byte_count = 0 AND request_byte_count > 0
              AND closed_by = 'broker' THEN 'plaintext port'
            WHEN NOT is_tls AND closed_by = 'broker' AND connection_id IN (
              SELECT connection_id FROM anomalies WHERE kind = 'limit' AND direction = 'response'
                AND TRY_CAST(regexp_extract(detail, 'of ([0-9]+) bytes', 1) AS BIGINT)
                  BETWEEN {_ALERT_SIZES})
              AND connection_id NOT IN (
                SELECT connection_id FROM requests WHERE response_time IS NOT NULL)
              THEN 'TLS port'
          END AS sign
        FROM sessions WHERE handshake_seen
    )"""
    failed = f"(FROM {signs} WHERE sign IS NOT NULL)"
    rows = facts.rows(
        f"""
        SELECT client_ip, broker, sign, run, min(time) AS start, max(last_time) AS stop,
          count(*) AS connections, list(DISTINCT alert ORDER BY alert) AS alerts,
          list(connection_id ORDER BY time)[:{EVIDENCE_MAX}] AS ids
        FROM ({runs(failed, "client_ip, broker, sign", PAUSE_MS)})
        GROUP BY client_ip, broker, sign, run ORDER BY start, client_ip
        """
    )
    for row in rows:
        text = _TEXTS[row["sign"]].format(alerts=", ".join(filter(None, row["alerts"])))
        length_ms = (row["stop"] - row["start"]).total_seconds() * 1000
        yield Incident(
            "tls_failure",
            BAD if row["connections"] >= LOOP_MIN else WARN,
            row["start"],
            row["stop"],
            row["broker"],
            f"{plural(row['connections'], 'connection')} from {row['client_ip']} to "
            f"{row['broker']} failed in {duration(length_ms)}: the client {text}",
            time_lost_ms=length_ms,
            connection_ids=row["ids"],
            next_command=facts.follow(row["ids"]),
            brokers=frozenset((row["broker"],)),
        )
