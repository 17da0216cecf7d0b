"""Traffic over time: exchanges, bytes, errors and latency in slices of equal width."""

from __future__ import annotations

from kdissect import text as f
from kdissect.charts import (
    LATENCY_LINES,
    Chart,
    Columns,
    lines_over_time,
    slice_width_us,
    stack_over_time,
)
from kdissect.report.document import Document, Options, Section
from kdissect.sql import Database
from kdissect.sql.requests import quantiles

SHOWN_APIS, SHOWN_ERRORS = 7, 6
_OTHER = "other"
_SECOND_US = 1_000_000


def prepare(database: Database) -> None:
    """Make `slices`, all that the exchanges span, and macros of slices.

    `slice_of(time)` is the number of a time's slice, `slice_begin(slice)` its begin in milliseconds
    since 1970, and `slice_us()` the width of all.
    """
    span = database.row(
        "SELECT epoch_us(min(time)) AS first, epoch_us(max(time)) AS last FROM requests"
    )
    width, numbers = _SECOND_US, range(0)
    if span["first"] is not None:
        width = slice_width_us(span["last"] - span["first"])
        numbers = range(span["first"] // width, span["last"] // width + 1)
    database.run(
        f"""
        CREATE TEMP MACRO slice_us() AS {width};
        CREATE TEMP MACRO slice_of(time) AS epoch_us(time) // {width};
        CREATE TEMP MACRO slice_begin(slice) AS slice * {width} / 1000.0;
        CREATE TEMP TABLE slices AS
        SELECT unnest(range({numbers.start}, {numbers.stop})) AS slice
        """
    )


def collect(database: Database, _: Options) -> Document:
    """Columns of four charts; `t` is milliseconds since 1970, where a slice begins."""
    width_us = database.value("SELECT slice_us()")
    database.run(
        f"CREATE TEMP TABLE shown_apis AS SELECT api FROM requests GROUP BY api "
        f"ORDER BY count(*) DESC, api LIMIT {SHOWN_APIS}"
    )
    exchanges = database.table(
        f"""
        WITH counted AS (
          SELECT slice_of(time) AS slice, coalesce(s.api, '{_OTHER}') AS api, count(*) AS count
          FROM requests x LEFT JOIN shown_apis s ON x.api = s.api GROUP BY ALL
        ), every AS (SELECT slice, api FROM slices, (SELECT DISTINCT api FROM counted))
        SELECT slice_begin(slice) AS t, api, coalesce(count, 0) * 1e6 / {width_us} AS rate
        FROM every LEFT JOIN counted USING (slice, api) ORDER BY api, t
        """
    )
    sizes = database.table(
        f"""
        WITH summed AS (
          SELECT slice_of(time) AS slice, sum(request_size) AS requests,
            sum(response_size) AS responses
          FROM requests GROUP BY ALL
        )
        SELECT slice_begin(slice) AS t, coalesce(requests, 0) * 1e6 / {width_us} AS requests,
               coalesce(responses, 0) * 1e6 / {width_us} AS responses
        FROM slices LEFT JOIN summed USING (slice) ORDER BY t
        """
    )
    latency = database.table(
        f"""
        WITH cut AS (
          SELECT slice_of(time) AS slice, count(*) AS count, {quantiles(database, "service_ms")}
          FROM requests WHERE wait = 'answer' GROUP BY ALL
        )
        SELECT slice_begin(slice) AS t, count, p50, p95, p99, max
        FROM slices LEFT JOIN cut USING (slice) ORDER BY t
        """
    )
    errors = database.table(
        f"""
        WITH top AS (
          SELECT error_name FROM requests WHERE failed GROUP BY 1 ORDER BY count(*) DESC, 1
          LIMIT {SHOWN_ERRORS}
        )
        SELECT slice_begin(slice_of(time)) AS t, coalesce(top.error_name, '{_OTHER}') AS error,
               count(*) AS count
        FROM requests LEFT JOIN top USING (error_name) WHERE failed GROUP BY ALL ORDER BY t, error
        """
    )
    return {
        "slice_ms": width_us / 1000,
        "exchanges": exchanges.to_pydict(),
        "bytes": sizes.to_pydict(),
        "latency": latency.to_pydict(),
        "errors": errors.to_pydict(),
    }


def section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["traffic"]
    blocks = d["exchanges"]["t"] and [
        "Times are UTC. Drag a chart sideways to move, scroll with Shift to zoom, double-click to "
        "reset; hover for values.",
        _exchanges(d["exchanges"], d["slice_ms"]),
        (_bytes(d["bytes"], d["slice_ms"]), _latency(d["latency"], d["slice_ms"])),
    ]
    nothing = "No Kafka requests or responses in this capture."
    return Section("traffic", "Traffic over time", blocks, nothing, name="Traffic")


def _exchanges(d: Columns, slice_ms: float) -> Chart:
    """Exchanges per second, stacked by API."""
    totals = dict.fromkeys(d["t"], 0.0)
    for t, rate in zip(d["t"], d["rate"], strict=True):
        totals[t] += rate
    chart = stack_over_time(
        "traffic",
        "Exchanges per second, by API",
        "",
        {"t": d["t"], "series": [api or "unknown" for api in d["api"]], "value": d["rate"]},
        slice_ms=slice_ms,
        value_title="exchanges per second",
        series_title="API",
        step_min=0,
    )
    chart.text = (
        f"Highest {f.rate(max(totals.values()))}; slices of {f.width(slice_ms)}. "
        f"Most frequent: {', '.join(chart.series[:3])}."
    )
    return chart


def errors_over_time(document: Document) -> Chart | None:
    """Answers with an error, stacked by their first code."""
    d, slice_ms = document["traffic"]["errors"], document["traffic"]["slice_ms"]
    if not d["t"]:
        return None
    return stack_over_time(
        "errors-time",
        "Answers with an error over time",
        f"{f.plural(sum(d['count']), 'answer')} in slices of {f.width(slice_ms)}.",
        {"t": d["t"], "series": d["error"], "value": d["count"]},
        slice_ms=slice_ms,
        value_title="answers",
        series_title="error",
        step_min=1,
    )


def _bytes(d: Columns, slice_ms: float) -> Chart:
    """Bytes per second in both directions."""
    series = ("requests", "responses")
    requests, responses = (max(d[name]) for name in series)
    return lines_over_time(
        "bytes",
        "Bytes per second",
        f"Highest: requests {f.byte_size(requests)}/s, responses {f.byte_size(responses)}/s.",
        d,
        series,
        slice_ms=slice_ms,
        value_title="bytes per second",
        scale="linear",
        format="~s",
        labels={name: f"{name}, bytes per second" for name in series},
    )


def _latency(d: Columns, slice_ms: float) -> Chart | None:
    """Percentiles of each slice."""
    p95 = [value for value in d["p95"] if value is not None]
    if not p95:
        return None
    return lines_over_time(
        "latency-time",
        "Service time of answers",
        f"p95 of a slice between {f.duration(min(p95))} and {f.duration(max(p95))}.",
        d,
        LATENCY_LINES,
        slice_ms=slice_ms,
        value_title="service time, ms",
        scale="log",
        format=",~r",
        labels={"count": "answers"},
    )
