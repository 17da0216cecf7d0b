"""Latency per API, client and broker: percentiles, histograms, the slowest exchanges.

Percentiles are those of `service_ms` of answers; long polls and waits for other members are counted
beside them. `latency_p95` includes the wait behind earlier requests of the connection.
"""

from __future__ import annotations

from kdissect import text as f
from kdissect.charts import WAIT_NAMES, Chart, load, percentile_ranges
from kdissect.report.document import LISTS, Block, Document, Listing, Options, Section, listed
from kdissect.sql import Database
from kdissect.sql.requests import quantile, quantiles
from kdissect.tables.schemas import Row

BINS_PER_DECADE = 10
_SLOWEST = 25
_CLIENTS_SHOWN = 15  # in the chart
_QUEUED_MS = 1  # from here on a request counts as one that waited behind another
SPANS = ("upload_ms", "queued_ms", "service_ms", "download_ms")  # where the time of answers went
BY = {"apis": "api", "clients": "client_id, client_ip", "brokers": "broker"}


def collect(database: Database, _: Options) -> Document:
    """Tables `latency_apis`, `latency_clients`, `latency_brokers`, and the figures of the page."""
    document: Row = {}
    for name, keys in BY.items():
        _make_table(database, name, keys)
        document[name] = listed(database, LISTS[f"latency_{name}"])
    bins = database.table(
        f"""
        SELECT api, wait, floor(log10(greatest(service_ms,
          0.001)) * {BINS_PER_DECADE})::INTEGER AS bin,
               count(*) AS count
        FROM requests WHERE wait IS NOT NULL AND service_ms IS NOT NULL GROUP BY ALL ORDER BY ALL
        """
    )
    document["histogram"] = {"bins_per_decade": BINS_PER_DECADE, **bins.to_pydict()}
    document["all"] = database.row(
        f"SELECT count(*) AS count, {quantiles(database, 'service_ms')} "
        "FROM requests WHERE wait = 'answer'"
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
        FROM requests WHERE wait = 'answer'
        ORDER BY service_ms DESC NULLS LAST, exchange_id LIMIT {_SLOWEST}
        """
    )
    return document


def _make_table(database: Database, name: str, keys: str) -> None:
    database.run(
        f"""
        CREATE TEMP TABLE latency_{name} AS
        SELECT {keys}, bool_or(is_broker) AS is_broker, count(*) AS exchanges,
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
        FROM requests GROUP BY {keys}
        """
    )


def section(document: Document) -> Section:
    """Return the section of the page."""
    d = document["latency"]
    spent = [row for row in d["apis"]["rows"] if row["service_ms"]]
    spent.sort(key=lambda row: (-row["service_ms"], row["api"] or ""))
    blocks: list[Block] = [
        "Service time (`service_ms`) is the time that the broker took, measured where the capture "
        "was taken. It starts with the last byte of the request, or with the end of the previous "
        "response on the connection, and ends with the first byte of the response. Percentiles "
        "leave out long polls (Fetches that the broker held for more data) and requests that "
        'waited for other members of their group. "With queue" adds the wait for earlier requests '
        "of the connection, since a broker answers them one at a time.",
        (_histogram(d["histogram"]), _clients(d["clients"]["rows"])),
        Listing("latency_apis", d["apis"]),
        Listing("time_spent", spent),
        Listing("latency_clients", d["clients"]),
        Listing("latency_brokers", d["brokers"]),
        Listing("slowest", d["slowest"]),
    ]
    return Section("latency", "Latency", blocks)


def _histogram(d: Row) -> Chart | None:
    """Counts by service time and wait, for all APIs or one."""
    if not d["bin"]:
        return None
    polls = sum(n for n, w in zip(d["count"], d["wait"], strict=True) if w == "long_poll")
    kinds = list(WAIT_NAMES.values())
    return Chart(
        "latency-histogram",
        "Service time, long polls apart",
        f"{f.plural(sum(d['count']), 'answered exchange')}, {f.count(polls)} of them long polls.",
        {
            "api": [api or "unknown" for api in d["api"]],
            "series": [WAIT_NAMES[wait] for wait in d["wait"]],
            "from": [_edge(bin_) for bin_ in d["bin"]],
            "to": [_edge(bin_ + 1) for bin_ in d["bin"]],
            "count": d["count"],
        },
        load(
            "histogram",
            series=kinds,
            x_title="service time, ms",
            x_scale={"type": "log", "nice": False},
            x_label="datum.label",
            count_title="exchanges",
        ),
        series=kinds,
        choose="api",
    )


def _edge(bin_: int) -> float:
    """Where a bin begins, in ms, with four digits."""
    return float(f"{10 ** (bin_ / BINS_PER_DECADE):.4g}")


def _clients(rows: list[Row]) -> Chart | None:
    """p50 to p99 of the clients with the highest p95."""
    shown = [row for row in rows if not row["is_broker"] and row["p50"] is not None]
    shown = shown[:_CLIENTS_SHOWN]
    if len(shown) < 2:
        return None
    ids = {row["client_id"] for row in shown}
    names = [
        (row["client_id"] or "(none)") if len(ids) == len(shown) else f.client(row) for row in shown
    ]
    return percentile_ranges(
        "latency-clients",
        "Clients with the highest p95",
        f"{f.visible(names[0], 300)}: p95 {f.duration(shown[0]['p95'])}.",
        [{**row, "name": name} for row, name in zip(shown, names, strict=True)],
    )
