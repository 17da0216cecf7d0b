"""`slow_client`: an API's responses take much longer for a client than for the API's other clients.

The usual time is the median over the clients' p95, so that a busy client does not decide it. Slow
responses of one moment are one event, and of many clients one is slow by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from kdissect.incidents.evidence import IDS, Evidence
from kdissect.incidents.incident import INFO, Incident, Kind
from kdissect.text import duration, plural

KIND = Kind("slow_client", "client", "a client waits longer than others at one API", "latency")
CLIENTS_MIN, ANSWERS_MIN = 3, 20  # clients of an API, and answers of each of them
SLOW_FACTOR, SLOW_MS = 3, 20.0  # beside the usual p95
_MOMENT_MS, _CHANCE = 100, 0.01


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the slow clients of each API."""
    rows = evidence.rows(
        f"""
        WITH answers AS (
          FROM requests WHERE wait = 'answer' AND service_ms IS NOT NULL AND NOT is_broker
        ), clients AS (
          SELECT api, client, count(*) AS answers, {evidence.quantile("service_ms", 0.95)} AS p95
          FROM answers GROUP BY ALL HAVING count(*) >= {ANSWERS_MIN}
        ), usual AS (
          SELECT api, median(p95) AS usual_p95 FROM clients GROUP BY api
          HAVING count(*) >= {CLIENTS_MIN}
        ), slow AS (
          SELECT c.*, usual_p95 FROM clients c JOIN usual USING (api)
          WHERE p95 >= {SLOW_FACTOR} * usual_p95 AND p95 - usual_p95 >= {SLOW_MS}
        )
        SELECT s.*, min(time) AS start, max(response_time) AS stop, count(*) AS requests,
          sum(service_ms - usual_p95) AS lost_ms,
          count(DISTINCT epoch_ms(time) // {_MOMENT_MS}) AS moments,
          (SELECT count(*) FROM clients) AS compared, {IDS}
        FROM slow s JOIN answers a USING (api, client) WHERE service_ms > usual_p95
        GROUP BY ALL ORDER BY start, api, client
        """
    )
    for row in rows:
        if not _is_beyond_chance(row["moments"], row["answers"], row["compared"]):
            continue
        yield evidence.incident(
            row,
            KIND,
            INFO,
            row["client"],
            f"p95 of service_ms is {duration(row['p95'])} over "
            f"{plural(row['answers'], row['api'] + ' response')}; for other clients it is "
            f"{duration(row['usual_p95'])}. Counted as lost: the time above that.",
            next_command=evidence.command(
                *("show", "--api", row["api"], "--client", row["client"].partition(" @ ")[0]),
                *("--slow", f"{row['usual_p95']:.0f}ms"),
            ),
        )


def _is_beyond_chance(slow: int, answers: int, compared: int) -> bool:
    """Return whether more answers are above the usual p95 than chance gives one of the compared.

    Hoeffding's (1963) bound of the binomial tail, for `compared` clients together.
    """
    share, usual = slow / answers, 0.05
    if share <= usual:
        return False
    distance = share * math.log(share / usual)
    if share < 1:
        distance += (1 - share) * math.log((1 - share) / (1 - usual))
    return answers * distance >= math.log(compared / _CHANCE)
