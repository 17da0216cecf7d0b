"""SQL of the security of sessions: certificates with their validity, logins with their outcomes.

The report, the summary and the incidents share it. It reads the views `connections` and
`exchanges`.
"""

from __future__ import annotations

from kdissect.protocol.api_keys import SASL_TOKEN
from kdissect.protocol.error_codes import ErrorCode
from kdissect.sql.requests import codes, endpoint

# A certificate that expires this soon after its last handshake is to be renewed.
EXPIRES_SOON_DAYS = 30
# States of a certificate at its last connection in the capture.
EXPIRED, NOT_YET, EXPIRES_SOON, VALID = "expired", "not yet valid", "expires soon", "valid"
REFUSALS = (
    ErrorCode.SASL_AUTHENTICATION_FAILED,
    ErrorCode.UNSUPPORTED_SASL_MECHANISM,
    ErrorCode.ILLEGAL_SASL_STATE,
)
# SQL of connections whose TLS was not decrypted. A broker that answered a ClientHello without a
# ServerHello encrypted nothing, and nor did the sides of a handshake that failed.
UNREAD_TLS = (
    "NOT is_kafka AND is_tls AND coalesce(request_tls_alert, response_tls_alert) IS NULL "
    "AND (tls_cipher IS NOT NULL OR response_segment_count = 0 OR response_missing_byte_count > 0)"
)
_LOGIN_APIS = f"('SaslHandshake', 'SaslAuthenticate', '{SASL_TOKEN}')"
_DAY_S = 86_400


def certificates() -> str:
    """Return SQL with a row for each certificate of a broker's address or a client's host.

    `side` is ``broker`` or ``client``. `state` compares its validity with the begin of the last
    connection, which is the time of its handshake.
    """
    broker = _presented("broker", endpoint("broker_ip", "broker_port"), "tls_certificate")
    client = _presented("client", "client_ip", "tls_client")
    return f"""
      SELECT *, (epoch(not_after) - epoch(last_time)) / {_DAY_S} AS days_left,
        CASE WHEN not_after < last_time THEN '{EXPIRED}'
          WHEN not_before > last_time THEN '{NOT_YET}'
          WHEN days_left < {EXPIRES_SOON_DAYS} THEN '{EXPIRES_SOON}'
          ELSE '{VALID}' END AS state
      FROM (
        SELECT side, address, subject, issuer, not_before, not_after,
          count(*) AS connections, list(connection_id ORDER BY first_time) AS connection_ids,
          min(first_time) AS first_time, max(first_time) AS last_time
        FROM ({broker} UNION ALL {client})
        WHERE not_before IS NOT NULL AND not_after IS NOT NULL AND first_time IS NOT NULL
        GROUP BY ALL
      )
    """


def _presented(side: str, address: str, prefix: str) -> str:
    return f"""
      SELECT '{side}' AS side, {address} AS address, {prefix}_subject AS subject,
        {prefix}_issuer AS issuer, {prefix}_not_before AS not_before,
        {prefix}_not_after AS not_after, connection_id, first_time
      FROM connections
    """


def logins() -> str:
    """Return SQL with a row for each principal, SASL mechanism and client host.

    A connection is `accepted` if the broker answered another request on it, because it answers
    none before the login (KIP-43). It is `refused` if a response has an error, or if the broker
    closed it instead of an answer to a token without a header. Otherwise it is `undecided`.
    """
    return f"""
      WITH steps AS (
        SELECT connection_id,
          bool_or(api_name IN {_LOGIN_APIS}) AS has_login,
          bool_or(api_name NOT IN {_LOGIN_APIS} AND api_name <> 'ApiVersions'
            AND status = 'paired') AS is_accepted,
          bool_or(api_name IN {_LOGIN_APIS} AND error_code IN ({codes(REFUSALS)})) AS has_error,
          bool_or(api_name = '{SASL_TOKEN}' AND status = 'connection_closed') AS has_no_answer,
          list(DISTINCT error_name ORDER BY error_name)
            FILTER (api_name IN {_LOGIN_APIS} AND error_code IN ({codes(REFUSALS)})) AS errors
        FROM exchanges GROUP BY connection_id
      ), sessions AS (
        SELECT c.principal, c.sasl_mechanism, c.client_ip, c.first_time, c.last_time, s.errors,
          coalesce(s.is_accepted, false) AS is_accepted,
          coalesce(s.has_error OR (s.has_no_answer AND NOT coalesce(s.is_accepted, false)
            AND c.closed_by = 'broker'), false) AS is_refused
        FROM connections c JOIN steps s USING (connection_id)
        WHERE s.has_login OR c.sasl_mechanism IS NOT NULL
      )
      SELECT principal, sasl_mechanism, client_ip, count(*) AS connections,
        count(*) FILTER (is_accepted) AS accepted, count(*) FILTER (is_refused) AS refused,
        count(*) FILTER (NOT is_accepted AND NOT is_refused) AS undecided,
        list_sort(list_distinct(flatten(list(errors)))) AS errors,
        min(first_time) AS first_time, max(last_time) AS last_time
      FROM sessions GROUP BY ALL
    """
