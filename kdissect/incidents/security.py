"""Logins and TLS handshakes that failed, and certificates that expire."""

from __future__ import annotations

from kdissect.incidents.evidence import runs
from kdissect.incidents.incident import BAD, EVIDENCE_MAX, INFO, WARN
from kdissect.incidents.kind import kind, lasted_ms
from kdissect.protocol.api_keys import SASL_TOKEN
from kdissect.sql.requests import codes
from kdissect.sql.sessions import EXPIRED, EXPIRES_SOON, NOT_YET, REFUSALS, certificates
from kdissect.tables.schemas import Row
from kdissect.text import duration, plural

# A user who mistypes a password tries again once or twice, and one failed handshake may be that of
# a scanner or of a client that goes away; a program goes on.
LOOP_MIN = 3
# Failures farther apart are separate incidents: clients retry within seconds (back-off 1 s).
PAUSE_MS = 60_000

_REFUSED = f"api IN ('SaslAuthenticate', 'SaslHandshake') AND error_code IN ({codes(REFUSALS)})"
_CUT = f"api = '{SASL_TOKEN}' AND status = 'connection_closed'"
# A row for the failed logins of each client at each broker
_LOGINS = f"""
    WITH logins AS (
      SELECT connection_id, time AS began FROM requests WHERE api = 'SaslHandshake'
    ), refusals AS (
      FROM requests WHERE {_REFUSED}
      -- before KIP-152 a broker closes the connection instead of an answer to a token
      UNION ALL SELECT r.* REPLACE (s.last_time AS response_time)
      FROM requests r JOIN sessions s USING (connection_id)
      WHERE {_CUT} AND s.closed_by = 'broker'
    ), refused AS (
      SELECT r.*, s.principal, s.sasl_mechanism, coalesce(l.began, r.time) AS began
      FROM refusals r JOIN sessions s USING (connection_id)
      ASOF LEFT JOIN logins l ON l.connection_id = r.connection_id AND l.began <= r.time
    )
    SELECT client, broker, min(began) AS start, max(response_time) AS stop,
      count(*) AS requests, count(DISTINCT connection_id) AS connections,
      list(DISTINCT principal ORDER BY principal) FILTER (principal IS NOT NULL) AS principals,
      list(DISTINCT sasl_mechanism ORDER BY sasl_mechanism)
        FILTER (sasl_mechanism IS NOT NULL) AS mechanisms,
      mode(error_name ORDER BY error_name) AS error, sum(duration_ms) AS lost_ms,
      list(exchange_id ORDER BY time)[:{EVIDENCE_MAX}] AS exchange_ids,
      list(connection_id ORDER BY time)[:{EVIDENCE_MAX}] AS connection_ids
    FROM ({runs("refused", "client, broker", PAUSE_MS)})
    GROUP BY client, broker, run ORDER BY start, client
"""
_LOGIN_SIGNS = f"requests WHERE {_REFUSED} OR {_CUT}"
_LOGIN_SEVERITY = f"if(requests >= {LOOP_MIN}, '{BAD}', '{INFO}')"


@kind("errors", _LOGIN_SEVERITY, "client", _LOGIN_SIGNS, _LOGINS)
def login_failures(row: Row) -> str:
    """Return the text of the logins of a client at a broker."""
    seconds = lasted_ms(row) / 1000
    pace = f" in {seconds:,.0f} s" if seconds >= 1 else ""
    user = ", ".join(row["principals"] or []) or "an unknown principal"
    mechanism = ", ".join(row["mechanisms"] or []) or "SASL"
    return (
        f"{row['broker']} refused {plural(row['requests'], 'login')}{pace} "
        f"of {user} by {mechanism}: {row['error'] or 'it closed the connection'}."
    )


_DAY = "%Y-%m-%d %H:%M UTC"

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


def _invalid(side: str, prefix: str) -> str:
    """Return SQL of a sentence about the certificate of a side; NULL if it was valid."""
    days = [f"strftime({prefix}_{end}, '{_DAY}')" for end in ("not_before", "not_after")]
    return (
        f"CASE WHEN first_time NOT BETWEEN {prefix}_not_before AND {prefix}_not_after THEN "
        f"'The {side}''s certificate ' || coalesce({prefix}_subject, '') || ' is valid from ' "
        f"|| {days[0]} || ' until ' || {days[1]} || ' only.' END"
    )


_TLS = "sessions WHERE is_tls OR coalesce(request_tls_alert, response_tls_alert) IS NOT NULL"
_HANDSHAKES = f"""(
    SELECT client_ip, broker, connection_id, first_time AS time, last_time,
      coalesce(request_tls_alert, response_tls_alert) AS alert,
      CASE WHEN request_tls_alert IS NOT NULL THEN {_invalid("broker", "tls_certificate")}
        ELSE {_invalid("client", "tls_client")} END AS reason,
      CASE
        WHEN request_tls_alert IS NOT NULL THEN 'client'
        WHEN response_tls_alert IS NOT NULL THEN CASE WHEN is_tls THEN 'broker'
          ELSE 'TLS port' END
        WHEN is_tls AND tls_version IS NULL AND response_byte_count = 0
          AND response_missing_byte_count = 0 AND request_byte_count > 0
          AND closed_by = 'broker' THEN 'plaintext port'
      END AS sign
    FROM sessions WHERE handshake_seen
)"""
_FAILED = f"(FROM {_HANDSHAKES} WHERE sign IS NOT NULL)"
# A row for the failures of each client host at each broker. The evidence is an alert, or the
# absence of TLS. A client may encrypt its alert in TLS 1.3 (RFC 8446, 6): then it does not show
# whether a certificate has expired or its authority is unknown. A certificate outside its validity
# (RFC 5280, 4.1.2.5) explains the alert, if the capture shows it.
_FAILURES = f"""
    SELECT client_ip, broker, sign, run, min(time) AS start, max(last_time) AS stop,
      ms_between(start, stop) AS lost_ms,
      count(*) AS connections, list(DISTINCT alert ORDER BY alert) AS alerts,
      any_value(reason ORDER BY time) AS reason,
      list(connection_id ORDER BY time)[:{EVIDENCE_MAX}] AS connection_ids
    FROM ({runs(_FAILED, "client_ip, broker, sign", PAUSE_MS)})
    GROUP BY client_ip, broker, sign, run ORDER BY start, client_ip
"""
_TLS_SEVERITY = f"if(connections >= {LOOP_MIN}, '{BAD}', '{WARN}')"


@kind("security", _TLS_SEVERITY, "broker", _TLS, _FAILURES)
def tls_failure(row: Row) -> str:
    """Return the text of the failures of a client host at a broker."""
    text = _TEXTS[row["sign"]].format(alerts=", ".join(filter(None, row["alerts"])))
    text += f" {row['reason']}" if row["reason"] else ""
    return (
        f"{plural(row['connections'], 'connection')} from {row['client_ip']} to "
        f"{row['broker']} failed in {duration(lasted_ms(row))}: the client {text}"
    )


# A row for each certificate that expires soon, or that worked outside of its validity
_CERTIFICATES = f"""
    SELECT * REPLACE (connection_ids[:{EVIDENCE_MAX}] AS connection_ids),
      first_time AS start, last_time AS stop
    FROM ({certificates()})
    WHERE state = '{EXPIRES_SOON}' OR (state IN ('{EXPIRED}', '{NOT_YET}')
      -- a failed handshake names its certificate
      AND NOT list_has_any(connection_ids, (
        SELECT coalesce(list(connection_id), []) FROM sessions
        WHERE request_tls_alert IS NOT NULL OR response_tls_alert IS NOT NULL)))
    ORDER BY first_time, address, subject
"""
_VALIDITY = f"if(state = '{EXPIRES_SOON}', '{INFO}', '{WARN}')"


@kind("security", _VALIDITY, "address", _TLS, _CERTIFICATES, name="tls_failure")
def certificate(row: Row) -> str:
    """Return the text of a certificate."""
    state = "and a peer that verifies it refuses it."
    if row["state"] == EXPIRES_SOON:
        state = f"{plural(int(row['days_left']), 'day')} left at the last connection: renew it."
    return (
        f"{plural(row['connections'], 'connection')} with the {row['side']}'s certificate "
        f"{row['subject'] or ''}. It is valid from {row['not_before']:{_DAY}} until "
        f"{row['not_after']:{_DAY}}, {state}"
    )
