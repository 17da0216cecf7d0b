"""`slow_api`: the responses of an API take long for all clients."""

from __future__ import annotations

from collections.abc import Iterator

from kdissect.incidents.evidence import IDS, Evidence
from kdissect.incidents.incident import INFO, Incident, Kind
from kdissect.text import duration, plural

KIND = Kind("slow_api", "API", "the responses of an API take long", "latency")
ANSWERS_MIN = 20
SLOW_MS = 100.0  # p95


def find(evidence: Evidence) -> Iterator[Incident]:
    """Yield the slow APIs."""
    rows = evidence.rows(
        f"""
        WITH answers AS (
          FROM requests WHERE wait = 'answer' AND service_ms IS NOT NULL AND NOT is_broker
        ), slow AS (
          SELECT api, count(*) AS answers, {evidence.quantile("service_ms", 0.5)} AS p50,
            {evidence.quantile("service_ms", 0.95)} AS p95
          FROM answers GROUP BY api HAVING count(*) >= {ANSWERS_MIN} AND p95 >= {SLOW_MS}
        )
        SELECT s.*, min(time) AS start, max(response_time) AS stop, count(*) AS requests,
          sum(service_ms - {SLOW_MS}) AS lost_ms, {IDS}
        FROM slow s JOIN answers USING (api) WHERE service_ms > {SLOW_MS}
        GROUP BY ALL ORDER BY start, api
        """
    )
    for row in rows:
        yield evidence.incident(
            row,
            KIND,
            INFO,
            row["api"],
            f"p95 of service_ms is {duration(row['p95'])} over "
            f"{plural(row['answers'], 'response')}, p50 {duration(row['p50'])}. Counted as lost: "
            f"the time above {duration(SLOW_MS)}.",
            next_command=evidence.command(
                "show", "--api", row["api"], "--slow", f"{SLOW_MS:.0f}ms"
            ),
        )
