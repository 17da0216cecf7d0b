"""Summarises a table set, as data and as the page that `dissect` prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as TextTable

from kdissect.api import Tables
from kdissect.sql import Database
from kdissect.sql.requests import IS_SURE, is_fault
from kdissect.sql.sessions import UNREAD_TLS, VALID, certificates
from kdissect.tables.schemas import FIXED_TABLES, FORMAT_VERSION, Row
from kdissect.text import byte_size, plural, unread, visible

_WIDTH_MAX = 1000  # of lists outside of a terminal, where no name is cut
_LISTED_MAX = 12
_VIEWS = ("captures", "connections", "exchanges", "record_batches", "anomalies")


def summarise(tables: Tables, out: str | None = None) -> Row:
    """Return the summary as one JSON document; `out` is the folder of a table set just written.

    damaged: captures that could not be read to their end. skipped: files that are no captures.
    """
    with Database({name: tables[name].dataset for name in _VIEWS}) as database:
        return {
            "format_version": FORMAT_VERSION,
            "out": out,
            "totals": dict(tables.manifest["totals"]),
            "timings": tables.manifest["timings"],
            "kafka_connections": database.value("select count(*) from connections where is_kafka"),
            "apis": database.rows(_APIS),
            "clients": database.rows(_CLIENTS),
            "topics": database.rows(_TOPICS),
            "anomalies": _counts(database, _ANOMALIES),
            "expiring_certificates": database.rows(_CERTIFICATES),
            "damaged": database.rows(f"{_FAILED} and format <> 'unknown'"),
            "skipped": database.rows(f"{_FAILED} and format = 'unknown'"),
            "unread_connections": _counts(database, _UNREAD),
        }


def _counts(database: Database, query: str) -> dict[str, int]:
    return {row["name"]: row["count"] for row in database.rows(query)}


# Errors are faults: routine steps of the protocol do not count, as in the report.
_APIS = f"""
    select api_name as api, [min(sure), max(sure)] as versions, count(*) as exchanges,
        count(*) filter ({is_fault("api_name", "error_codes")}) as errors,
        approx_quantile(service_ms, 0.5) filter ("wait" = 'answer') as service_ms_median,
        max(service_ms) filter ("wait" = 'answer') as service_ms_max
    from (select *, if({IS_SURE}, api_version, null) as sure from exchanges)
    group by all order by exchanges desc, api
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
_ANOMALIES = """
    select kind as name, count(*) as count from anomalies group by all order by count desc, name
"""
_FAILED = "select path, error from captures where error is not null"
_UNREAD = f"""
    select protocol as name, count(*) as count from connections
    where not is_kafka and (not is_tls or {UNREAD_TLS}) group by all order by name
"""


def print_summary(document: Row, console: Console) -> None:
    """Print the summary as text; long lists are cut, with a count of the rest."""
    totals = document["totals"]
    console.print(
        f"[bold]{totals['packets']:,}[/] packets in {plural(totals['captures'], 'capture')} "
        f"({byte_size(totals['bytes'])}): {plural(totals['connections'], 'connection')}, "
        f"{document['kafka_connections']:,} of them Kafka, "
        f"[bold]{totals['exchanges']:,}[/] exchanges, "
        f"{plural(totals['record_batches'], 'record batch', 'record batches')}, "
        f"[bold]{totals['records']:,}[/] records, "
        f"{plural(totals['anomalies'], 'anomaly', 'anomalies')}"
    )
    for title, (name, columns) in _LISTS.items():
        rows = document[name]
        _print_list(console, title, rows.items() if name == "anomalies" else rows, columns)
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


def _print_list(console: Console, title: str, listed: Any, columns: Columns) -> None:
    rows = list(listed)
    if not rows:
        return
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_MAX)
    text = TextTable(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for index, name in enumerate(columns):
        if index:
            text.add_column(name, justify="right", no_wrap=True)
        else:
            text.add_column(name, overflow="ellipsis")
    for row in rows[:_LISTED_MAX]:
        # a capture's text without control characters and markup
        text.add_row(*(escape(visible(shown(row))) for shown in columns.values()))
    console.print()
    console.print(text)
    if len(rows) > _LISTED_MAX:
        console.print(f"... and {len(rows) - _LISTED_MAX} more", style="dim")


def _versions(row: Row) -> str:
    low, high = row["versions"]
    return "" if low is None else f"v{low}" if low == high else f"v{low}-{high}"


def _count(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name] or 0:,}"


def _ms(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row[name] is None else f"{row[name]:,.2f}"


Columns = dict[str, Callable[[Any], str]]
# Title -> a list of the document, and the text of each column
_LISTS: dict[str, tuple[str, Columns]] = {
    "APIs": (
        "apis",
        {
            "api": lambda row: row["api"] or "(unknown)",
            "versions": _versions,
            "exchanges": _count("exchanges"),
            "errors": _count("errors"),
            "service ms": _ms("service_ms_median"),
            "max ms": _ms("service_ms_max"),
        },
    ),
    "Clients": (
        "clients",
        {
            "client id": lambda row: row["client_id"] or "(none)",
            "address": lambda row: row["ip"],
            "exchanges": _count("exchanges"),
        },
    ),
    "Record data": (
        "topics",
        {
            "topic": lambda row: row["topic"] or "(unknown)",
            "source": lambda row: row["source"],
            "codec": lambda row: row["codec"] or "",
            "batches": _count("batches"),
            "records": _count("records"),
            "bytes": lambda row: byte_size(row["bytes"]),
        },
    ),
    "Anomalies": ("anomalies", {"kind": lambda item: item[0], "rows": lambda item: f"{item[1]:,}"}),
}
