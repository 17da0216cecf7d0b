"""Responses with an error that is no routine step of the protocol.

Clients send requests with a retriable error again, so the time until the next success tells what it
cost. Any other error does not pass, unless a later request succeeded that a broker sent: brokers
repeat their own requests whatever the code.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import IDS, PARTIES, Evidence, Row
from kdissect.incidents.incident import INFO, Incident, kind
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import INTER_BROKER_APIS
from kdissect.protocol.error_codes import RETRIABLE, error_name, routine_reason
from kdissect.sql.sessions import REFUSALS
from kdissect.text import duration, plural

PASSING_MS = 1000  # an error that ends sooner is of an election or a start
CLIENTS_MAX = 3  # that a text names
_BROKERS_APIS = frozenset(catalog.apis()[key].name for key in INTER_BROKER_APIS)

# A row for each API and error. longest_ms, lost_ms: the longest time, and the sum of the times,
# from the first error of a run to the client's next response without any; null if an error had
# none.
_ERRORS = f"""
CREATE TEMP TABLE api_errors AS
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
SELECT api, code, longest_ms, lost_ms, count(DISTINCT exchange_id) AS requests,
  min(time) AS start, max(response_time) AS stop, {PARTIES}, {IDS}
FROM errors JOIN ended USING (api, code) GROUP BY ALL
"""


@kind("errors", "requests WHERE failed")
def request_errors(evidence: Evidence) -> Iterator[Incident]:
    """Create `api_errors`, and yield the errors of each API that pass."""
    evidence.run(_ERRORS)
    for row in _api_errors(evidence):
        longest_ms = row["longest_ms"]
        if _is_passing(row) and (longest_ms is None or longest_ms >= PASSING_MS):
            passed = f"A request without it followed within {duration(longest_ms)}."
            then = "Clients may try again." if longest_ms is None else passed
            yield _incident(evidence, row, then)


@kind("errors", "requests WHERE failed")
def refused_requests(evidence: Evidence) -> Iterator[Incident]:
    """Yield the errors of each API with which trying again does not help."""
    for row in _api_errors(evidence):
        if not _is_passing(row):
            yield _incident(evidence, {**row, "lost_ms": None}, "Trying again does not help.")


def _is_passing(row: Row) -> bool:
    """Return whether clients succeed after an error, or may."""
    return row["code"] in RETRIABLE or (
        row["api"] in _BROKERS_APIS and row["longest_ms"] is not None
    )


def _api_errors(evidence: Evidence) -> list[Row]:
    """Return a row of `api_errors` for each API and error that is no routine step.

    Refused logins are another kind: `login_failures`.
    """
    return [
        row
        for row in evidence.rows("FROM api_errors ORDER BY start, api, code")
        if row["code"] not in REFUSALS and not routine_reason(row["api"], error_name(row["code"]))
    ]


def _incident(evidence: Evidence, row: Row, then: str) -> Incident:
    """Return the incident of an API's error. then: a sentence about what follows."""
    more = len(row["clients"]) - CLIENTS_MAX
    names = ", ".join(row["clients"][:CLIENTS_MAX]) + (f" and {more:,} more" if more > 0 else "")
    return evidence.incident(
        row,
        INFO,
        row["api"],
        f"{plural(row['requests'], 'response')} with {error_name(row['code'])} to {names}. {then}",
        next_command=evidence.command(
            *("show", "--api", row["api"], "--where"), f"list_contains(error_codes, {row['code']})"
        ),
    )
