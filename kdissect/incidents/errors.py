"""Responses with an error that is no routine step of the protocol.

Clients send requests with a retriable error again, so the time until the next success tells what it
cost. Any other error does not pass, unless a later request succeeded that a broker sent: brokers
repeat their own requests whatever the code.
"""

from __future__ import annotations

from kdissect.incidents.evidence import IDS, PARTIES
from kdissect.incidents.incident import INFO
from kdissect.incidents.kind import kind
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import INTER_BROKER_APIS
from kdissect.protocol.error_codes import RETRIABLE, error_name
from kdissect.sql.requests import codes, is_fault
from kdissect.sql.sessions import REFUSALS
from kdissect.tables.schemas import Row
from kdissect.text import duration, plural

PASSING_MS = 1000  # an error that ends sooner is of an election or a start
CLIENTS_MAX = 3  # that a text names
_BROKERS_APIS = tuple(catalog.apis()[key].name for key in sorted(INTER_BROKER_APIS))

# A row for each API and error that is no routine step. Refused logins are another kind:
# `login_failures`. is_passing: clients succeed after the error, or may. longest_ms, lost_ms: the
# longest time, and the sum of the times, from the first error of a run to the client's next
# response without any; null if an error had none.
_ERRORS = f"""
WITH answers AS (
  FROM requests WHERE response_time IS NOT NULL AND api IN (
    SELECT api FROM requests WHERE failed)
), errors AS (
  SELECT *, unnest(error_codes) AS code FROM answers WHERE failed
), ends AS (
  SELECT e.api, e.code, e.client, epoch_us(g.response_time - min(e.time)) / 1e3 AS ms
  FROM errors e ASOF LEFT JOIN (FROM answers WHERE len(error_codes) = 0) g
    ON e.api = g.api AND e.client = g.client AND e.time < g.time
  GROUP BY e.api, e.code, e.client, g.response_time
), ended AS (
  SELECT api, code, CASE WHEN count(*) = count(ms) THEN max(ms) END AS longest_ms,
    CASE WHEN count(*) = count(ms) THEN sum(ms) END AS lost_ms
  FROM ends GROUP BY ALL
)
SELECT api, code,
  code IN ({codes(RETRIABLE)}) OR api IN {_BROKERS_APIS} AND longest_ms IS NOT NULL AS is_passing,
  longest_ms, lost_ms, count(DISTINCT exchange_id) AS requests,
  min(time) AS start, max(response_time) AS stop, {PARTIES}, {IDS}
FROM errors JOIN ended USING (api, code)
WHERE code NOT IN ({codes(REFUSALS)}) AND {is_fault("api", "[code]")} GROUP BY ALL
"""
_TABLES = {"api_errors": _ERRORS}
_SHOW = "kdissect show {source} --api {api} --where 'list_contains(error_codes, {code})'"
_PASSED = f"""
FROM api_errors WHERE is_passing AND coalesce(longest_ms >= {PASSING_MS}, true)
ORDER BY start, api, code
"""
_REFUSED = """
SELECT * REPLACE (NULL AS lost_ms) FROM api_errors WHERE NOT is_passing ORDER BY start, api, code
"""


@kind("errors", INFO, "api", "requests WHERE failed", _PASSED, tables=_TABLES, command=_SHOW)
def request_errors(row: Row) -> str:
    """Return the text of an API's errors that pass."""
    if row["longest_ms"] is None:
        return _text(row, "Clients may try again.")
    return _text(row, f"A request without it followed within {duration(row['longest_ms'])}.")


@kind("errors", INFO, "api", "requests WHERE failed", _REFUSED, tables=_TABLES, command=_SHOW)
def refused_requests(row: Row) -> str:
    """Return the text of an API's errors with which trying again does not help."""
    return _text(row, "Trying again does not help.")


def _text(row: Row, then: str) -> str:
    """Return the text of an API's error. then: a sentence about what follows."""
    more = len(row["clients"]) - CLIENTS_MAX
    names = ", ".join(row["clients"][:CLIENTS_MAX]) + (f" and {more:,} more" if more > 0 else "")
    return (
        f"{plural(row['requests'], 'response')} with {error_name(row['code'])} to {names}. {then}"
    )
