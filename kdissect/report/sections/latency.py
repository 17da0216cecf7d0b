"""Latency per API, client and broker: percentiles, histograms, the slowest exchanges, throttling.

Percentiles are those of `service_ms` of answers; long polls and waits for other members are counted
beside them. `latency_p95` includes the wait behind earlier requests of the connection.
"""

from __future__ import annotations

from typing import Any

from kdissect.report.database import ReportDatabase, columns_of, listed
from kdissect.report.exchange_facts import quantile, quantiles

BINS_PER_DECADE = 10
_SLOWEST = 25
ANSWERS_MIN = 20  # fewer say little of a percentile
_QUEUED_MS = 1  # from here on a request counts as one that waited behind another
SPANS = ("upload_ms", "queued_ms", "service_ms", "download_ms")  # where the time of answers went
BY = {
    "apis": ("api",),
    "clients": ("client_id", "client_ip"),
    "brokers": ("broker",),
}
# clients: the slowest first, but those of whom little is known last
_ORDERS = {
    "apis": "exchanges DESC",
    "clients": f"answers < {ANSWERS_MIN}, p95 DESC NULLS LAST",
    "brokers": "exchanges DESC",
}


def collect(database: ReportDatabase) -> dict[str, Any]:
    """Tables `latency_apis`, `latency_clients`, `latency_brokers`, and the figures of the page."""
    document: dict[str, Any] = {}
    for name, keys in BY.items():
        _make_table(database, name, keys)
        document[name] = listed(database, f"latency_{name}", f"{_ORDERS[name]}, {', '.join(keys)}")
    bins = database.rows(
        f"""
        SELECT api, wait, floor(log10(greatest(service_ms,
          0.001)) * {BINS_PER_DECADE})::INTEGER AS bin,
               count(*) AS count
        FROM x WHERE wait IS NOT NULL AND service_ms IS NOT NULL GROUP BY ALL ORDER BY ALL
        """
    )
    document["histogram"] = {
        "bins_per_decade": BINS_PER_DECADE,
        **columns_of(bins, ["api", "wait", "bin", "count"]),
    }
    document["all"] = database.row(
        f"SELECT count(*) AS count, {quantiles(database, 'service_ms')} "
        "FROM x WHERE wait = 'answer'"
    )
    document["handshake_rtt"] = database.row(
        f"SELECT count(handshake_rtt_ms) AS count, {quantiles(database, 'handshake_rtt_ms')} "
        "FROM connections WHERE is_kafka"
    )
    document["slowest"] = database.rows(
        f"""
        SELECT exchange_id, api, api_version, client_id, client_ip, broker, service_ms, queued_ms,
               upload_ms, download_ms, latency_ms, request_time, request_packet, response_packet,
               capture_id,
               nullif(error_name, 'NONE') AS error_name, topics, group_id
        FROM x WHERE wait = 'answer'
        ORDER BY service_ms DESC NULLS LAST, exchange_id LIMIT {_SLOWEST}
        """
    )
    return document


def _make_table(database: ReportDatabase, name: str, keys: tuple[str, ...]) -> None:
    database.run(
        f"""
        CREATE TABLE latency_{name} AS
        SELECT {", ".join(keys)}, bool_or(is_broker) AS is_broker, count(*) AS exchanges,
          count(*) FILTER (wait = 'answer') AS answers,
          {quantiles(database, "service_ms", "wait = 'answer'")},
          {quantile(database, "latency_ms", 0.95, "wait = 'answer'")} AS latency_p95,
          count(*) FILTER (wait = 'answer' AND queued_ms >= {_QUEUED_MS}) AS queued,
          max(queued_ms) FILTER (wait = 'answer') AS queued_max,
          count(*) FILTER (wait = 'long_poll') AS long_polls,
          {quantile(database, "service_ms", 0.5, "wait = 'long_poll'")} AS poll_p50,
          count(*) FILTER (wait = 'group') AS group_waits,
          {quantile(database, "service_ms", 0.5, "wait = 'group'")} AS group_p50,
          count(*) FILTER (is_unanswered) AS unanswered,
          count(*) FILTER (failed) AS errors,
          {", ".join(f"round(sum({span}) FILTER (wait = 'answer'), 6) AS {span}" for span in SPANS)}
        FROM x GROUP BY {", ".join(keys)}
        """
    )


def collect_throttling(database: ReportDatabase) -> dict[str, Any]:
    """Make the table `throttling`, a client, API and broker a row, and return its totals and rows.

    It counts responses with `throttle_time_ms` above 0 and sums these times (KIP-219).
    """
    database.run(
        """
        CREATE TABLE throttling AS
        SELECT client_id, client_ip, api, broker, count(*) AS responses,
          sum(throttle_time_ms)::BIGINT AS throttle_ms, max(throttle_time_ms) AS throttle_ms_max,
          min(response_time) AS first_time, max(response_time) AS last_time,
          arg_max(response_packet, throttle_time_ms) AS packet,
          arg_max(capture_id, throttle_time_ms) AS capture_id
        FROM x WHERE throttle_time_ms > 0 GROUP BY ALL
        """
    )
    total = database.row(
        "SELECT coalesce(sum(responses), 0)::BIGINT AS responses, "
        "coalesce(sum(throttle_ms), 0)::BIGINT AS throttle_ms, "
        "max(throttle_ms_max) AS throttle_ms_max FROM throttling"
    )
    rows = listed(database, "throttling", "throttle_ms DESC, client_id, api")
    return {**total, "clients": rows}
