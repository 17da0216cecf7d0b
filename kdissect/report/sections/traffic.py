"""Traffic over time: exchanges, bytes, errors and latency in slices of equal width."""

from __future__ import annotations

from typing import Any

from kdissect.report.database import ReportDatabase, columns_of
from kdissect.report.exchange_facts import quantiles

SLICES_MAX = 240
SHOWN_APIS, SHOWN_ERRORS = 7, 6
_OTHER = "other"
_SECOND = 1_000_000
_WIDTHS_US = (
    *(n * 10**power for power in range(3, 6) for n in (1, 2, 5)),
    *(n * _SECOND for n in (1, 2, 5, 10, 15, 30)),
    *(n * 60 * _SECOND for n in (1, 2, 5, 10, 15, 30)),
    *(n * 3600 * _SECOND for n in (1, 2, 3, 6, 12, 24, 48, 168)),
)


def slice_width_us(span_us: int) -> int:
    """A round width that cuts the span into at most SLICES_MAX slices."""
    for width in _WIDTHS_US:
        if span_us <= width * SLICES_MAX:
            return width
    return -(-span_us // SLICES_MAX)


def prepare(database: ReportDatabase) -> int:
    """Make `slices` (slice, every one that the exchanges span) and give their width in us."""
    span = database.row(
        "SELECT epoch_us(min(time))::DOUBLE AS first, epoch_us(max(time))::DOUBLE AS last FROM x"
    )
    if span["first"] is None:
        database.run("CREATE TABLE slices (slice BIGINT)")
        return _SECOND
    width = slice_width_us(int(span["last"] - span["first"]))
    first, last = int(span["first"]) // width, int(span["last"]) // width
    database.run(f"CREATE TABLE slices AS SELECT unnest(range({first}, {last + 1})) AS slice")
    return width


def slice_of(column: str, width_us: int) -> str:
    """SQL of the number of the slice that a time lies in."""
    return f"epoch_us({column}) // {width_us}"


def collect(database: ReportDatabase, width_us: int) -> dict[str, Any]:
    """Columns of four charts; `t` is milliseconds since 1970, where a slice begins."""
    place = slice_of("time", width_us)
    database.run(
        f"CREATE TABLE shown_apis AS SELECT api FROM x GROUP BY api "
        f"ORDER BY count(*) DESC, api LIMIT {SHOWN_APIS}"
    )
    begin = f"slice * {width_us} / 1000.0"
    exchanges = database.rows(
        f"""
        WITH counted AS (
          SELECT {place} AS slice, coalesce(s.api, '{_OTHER}') AS api, count(*) AS count
          FROM x LEFT JOIN shown_apis s ON x.api = s.api GROUP BY ALL
        ), every AS (SELECT slice, api FROM slices, (SELECT DISTINCT api FROM counted))
        SELECT {begin} AS t, api, coalesce(count, 0) * 1e6 / {width_us} AS rate
        FROM every LEFT JOIN counted USING (slice, api) ORDER BY api, t
        """
    )
    sizes = database.rows(
        f"""
        WITH summed AS (
          SELECT {place} AS slice, sum(request_size) AS requests, sum(response_size) AS responses
          FROM x GROUP BY ALL
        )
        SELECT {begin} AS t, coalesce(requests, 0) * 1e6 / {width_us} AS requests,
               coalesce(responses, 0) * 1e6 / {width_us} AS responses
        FROM slices LEFT JOIN summed USING (slice) ORDER BY t
        """
    )
    latency = database.rows(
        f"""
        WITH cut AS (
          SELECT {place} AS slice, count(*) AS count, {quantiles(database, "service_ms")}
          FROM x WHERE wait = 'answer' GROUP BY ALL
        )
        SELECT {begin} AS t, count, p50, p95, p99, max
        FROM slices LEFT JOIN cut USING (slice) ORDER BY t
        """
    )
    errors = database.rows(
        f"""
        WITH top AS (
          SELECT error_name FROM x WHERE failed GROUP BY 1 ORDER BY count(*) DESC, 1
          LIMIT {SHOWN_ERRORS}
        )
        SELECT {place} * {width_us} / 1000.0 AS t, coalesce(top.error_name, '{_OTHER}') AS error,
               count(*) AS count
        FROM x LEFT JOIN top USING (error_name) WHERE failed GROUP BY ALL ORDER BY t, error
        """
    )
    return {
        "slice_ms": width_us / 1000,
        "exchanges": columns_of(exchanges, ["t", "api", "rate"]),
        "bytes": columns_of(sizes, ["t", "requests", "responses"]),
        "latency": columns_of(latency, ["t", "count", "p50", "p95", "p99", "max"]),
        "errors": columns_of(errors, ["t", "error", "count"]),
    }
