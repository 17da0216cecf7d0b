"""Summarises a table set, as data and as the page that `dissect` prints."""

from __future__ import annotations

from typing import Any

import pyarrow.compute as pc
from rich.console import Console
from rich.markup import escape
from rich.table import Table as TextTable

from kdissect.api import Tables
from kdissect.sql import Database
from kdissect.sql.requests import is_fault
from kdissect.sql.sessions import VALID, certificates
from kdissect.tables.schemas import FIXED_TABLES, FORMAT_VERSION
from kdissect.text import plural, unread, visible

_LISTED_MAX = 12


def summarise(tables: Tables, out: str | None = None) -> dict[str, Any]:
    """Return the summary as one JSON document; `out` is the folder of a table set just written."""
    totals = dict(tables.manifest["totals"])
    names = ("connections", "exchanges", "record_batches", "anomalies")
    with Database({name: tables[name].dataset for name in names}) as database:
        apis, clients, topics, expiring = (
            database.rows(query) for query in (_APIS, _CLIENTS, _TOPICS, _CERTIFICATES)
        )
        anomalies = {row["kind"]: row["count"] for row in database.rows(_ANOMALIES)}
    return {
        "format_version": FORMAT_VERSION,
        "out": out,
        "totals": totals,
        "timings": tables.manifest["timings"],
        "kafka_connections": _kafka_connections(tables),
        "apis": apis,
        "clients": clients,
        "topics": topics,
        "anomalies": anomalies,
        "expiring_certificates": expiring,
        **_unread(tables),
        "unread_connections": _unread_connections(tables),
    }


def _kafka_connections(tables: Tables) -> int:
    kafka = tables.connections.to_arrow(["is_kafka"])["is_kafka"]
    return int(pc.sum(kafka).as_py() or 0)


# Errors are faults: routine steps of the protocol do not count, as in the report.
_APIS = f"""
    select api_name as api, [min(api_version), max(api_version)] as versions,
        count(*) as exchanges,
        count(*) filter ({is_fault("api_name", "error_codes")}) as errors,
        approx_quantile(service_ms, 0.5) filter ("wait" = 'answer') as service_ms_median,
        max(service_ms) filter ("wait" = 'answer') as service_ms_max
    from exchanges group by all order by exchanges desc, api
"""
_CLIENTS = """
    select client_id, client_ip as ip, count(*) as exchanges
    from exchanges group by all order by exchanges desc, client_id, ip
"""
_TOPICS = """
    select topic, source, codec, count(*) as batches, sum(record_count)::bigint as records,
        sum(size)::bigint as bytes
    from record_batches group by all order by bytes desc, topic, source, codec
"""
_CERTIFICATES = f"""
    select side, address, subject, strftime(not_after, '%Y-%m-%dT%H:%M:%SZ') as not_after, state
    from ({certificates()}) where state <> '{VALID}' order by not_after, address, subject
"""
_ANOMALIES = "select kind, count(*) as count from anomalies group by all order by count desc, kind"


def _unread(tables: Tables) -> dict[str, list[dict[str, str]]]:
    """Return captures not read to their end (`damaged`) and files that are no captures
    (`skipped`)."""
    rows = tables.captures.to_arrow(["path", "format", "error"]).to_pylist()
    failed = [row for row in rows if row["error"] is not None]
    by_kind: dict[str, list[dict[str, str]]] = {"damaged": [], "skipped": []}
    for row in failed:
        kind = "skipped" if row["format"] == "unknown" else "damaged"
        by_kind[kind].append({"path": row["path"], "error": row["error"]})
    return by_kind


def _unread_connections(tables: Tables) -> dict[str, int]:
    """Return the numbers of connections not read as Kafka, by protocol."""
    rows = tables.connections.to_arrow(["protocol", "is_kafka"])
    counts = rows.filter(pc.invert(rows["is_kafka"]))["protocol"].value_counts().to_pylist()
    return {row["values"]: row["counts"] for row in counts}


def print_summary(document: dict[str, Any], console: Console) -> None:
    """Print the summary as text; long lists are cut, with a count of the rest."""
    totals = document["totals"]
    console.print(
        f"[bold]{totals['packets']:,}[/] packets in {plural(totals['captures'], 'capture')} "
        f"({_size(totals['bytes'])}): {plural(totals['connections'], 'connection')}, "
        f"{document['kafka_connections']:,} of them Kafka, "
        f"[bold]{totals['exchanges']:,}[/] exchanges, "
        f"{plural(totals['record_batches'], 'record batch', 'record batches')}, "
        f"[bold]{totals['records']:,}[/] records, "
        f"{plural(totals['anomalies'], 'anomaly', 'anomalies')}"
    )
    _print_list(
        console,
        "APIs",
        document["apis"],
        _api_row,
        ("api", "versions", "exchanges", "errors", "service ms", "max ms"),
    )
    _print_list(
        console, "Clients", document["clients"], _client_row, ("client id", "address", "exchanges")
    )
    _print_list(
        console,
        "Record data",
        document["topics"],
        _topic_row,
        ("topic", "source", "codec", "batches", "records", "bytes"),
    )
    anomalies = [{"kind": kind, "count": n} for kind, n in document["anomalies"].items()]
    _print_list(
        console,
        "Anomalies",
        anomalies,
        lambda row: (row["kind"], f"{row['count']:,}"),
        ("kind", "rows"),
    )
    console.print()
    for row in document["skipped"]:
        console.print(f"Skipped {row['path']}: {row['error']}", markup=False)
    expiring = [
        f"{row['address']} {row['subject'] or ''} {row['state']} ({row['not_after']})"
        for row in document["expiring_certificates"]
    ]
    if expiring:
        more = f"; {len(expiring) - 1:,} more in kdissect report" if expiring[1:] else ""
        console.print(f"Certificate of {visible(expiring[0])}{more}", markup=False, soft_wrap=True)
    left = unread(document["unread_connections"])
    if left is not None:
        console.print(left, markup=False, soft_wrap=True)
    if document["out"] is not None:
        tables = ", ".join(name for name in FIXED_TABLES)
        console.print(
            f"Tables in {document['out']}: {tables}, and apis/* for each API", markup=False
        )


def _print_list(console: Console, title: str, rows: list[Any], cells: Any, names: Any) -> None:
    if not rows:
        return
    text = TextTable(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for index, name in enumerate(names):
        text.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows[:_LISTED_MAX]:
        text.add_row(*(_plain(cell) for cell in cells(row)))
    console.print()
    console.print(text)
    if len(rows) > _LISTED_MAX:
        console.print(f"... and {len(rows) - _LISTED_MAX} more", style="dim")


def _plain(cell: str) -> str:
    """Return a capture's text for a terminal, without control characters and markup."""
    return escape(visible(cell))


def _api_row(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["versions"]
    versions = "" if low is None else f"v{low}" if low == high else f"v{low}-{high}"
    return (
        row["api"] or "(unknown)",
        versions,
        f"{row['exchanges']:,}",
        f"{row['errors'] or 0:,}",
        _ms(row["service_ms_median"]),
        _ms(row["service_ms_max"]),
    )


def _client_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["client_id"] or "(none)", row["ip"], f"{row['exchanges']:,}")


def _topic_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["topic"] or "(unknown)",
        row["source"],
        row["codec"] or "",
        f"{row['batches']:,}",
        f"{row['records'] or 0:,}",
        _size(row["bytes"]),
    )


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1000
    raise AssertionError
