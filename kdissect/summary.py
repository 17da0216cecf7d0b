"""Summarises a table set, as data and as the page that `dissect` prints."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.acero import (
    AggregateNodeOptions,
    Declaration,
    ProjectNodeOptions,
    RecordBatchReaderSourceNodeOptions,
)
from rich.console import Console
from rich.markup import escape
from rich.table import Table as TextTable

from kdissect.api import Table, Tables, require_columns
from kdissect.capture.object_store import repeated
from kdissect.tables.schemas import FIXED_TABLES, FORMAT_VERSION
from kdissect.text import unread, visible

_LISTED_MAX = 12


def summarise(tables: Tables, out: str | None = None) -> dict[str, Any]:
    """Return the summary as one JSON document; `out` is the folder of a table set just written.

    Raises CaptureError for tables of an older kdissect.
    """
    require_columns(tables)
    totals = dict(tables.manifest["totals"])
    return {
        "format_version": FORMAT_VERSION,
        "out": out,
        "totals": totals,
        "timings": tables.manifest["timings"],
        "kafka_connections": _kafka_connections(tables),
        "apis": _apis(tables),
        "clients": _clients(tables),
        "topics": _topics(tables),
        "anomalies": _counts(tables.anomalies, "kind"),
        **_unread(tables),
        "unread_connections": _unread_connections(tables),
    }


def _grouped(
    table: Table,
    keys: list[str],
    aggregates: list[tuple[Any, str]],
    columns: dict[str, Any],
    also: tuple[str, ...] = (),
) -> pa.Table:
    """Return rows by key, aggregated while they are read: memory does not grow with the table.

    columns: expressions by name. also: other columns of the table that the expressions need.
    """
    options = [
        ([], "hash_count_all", None, "count_all")
        if name == []
        else (name, f"hash_{how}", None, f"{name}_{how}")
        for name, how in aggregates
    ]
    names, expressions = list(columns), list(columns.values())
    read = [name for name in table.schema.names if name in {*names, *also}]

    def grouped() -> pa.Table:
        scanner = table.dataset.scanner(columns=read, batch_readahead=2, fragment_readahead=1)
        reader = RecordBatchReaderSourceNodeOptions(scanner.to_reader())
        plan = [
            Declaration("record_batch_reader_source", reader),
            Declaration("project", ProjectNodeOptions(expressions, names)),
            Declaration("aggregate", AggregateNodeOptions(options, keys)),
        ]
        return Declaration.from_sequence(plan).to_table(use_threads=False)

    return repeated(grouped)


def _as_they_are(*names: str) -> dict[str, Any]:
    return {name: pc.field(name) for name in names}


def _counts(table: Table, name: str) -> dict[str, int]:
    grouped = _grouped(table, [name], [([], "count_all")], _as_they_are(name)).sort_by(
        [("count_all", "descending"), (name, "ascending")]
    )
    return dict(zip(grouped[name].to_pylist(), grouped["count_all"].to_pylist(), strict=True))


def _kafka_connections(tables: Tables) -> int:
    kafka = tables.connections.to_arrow(["is_kafka"])["is_kafka"]
    return int(pc.sum(kafka).as_py() or 0)


def _apis(tables: Tables) -> list[dict[str, Any]]:
    failed = pc.coalesce(pc.field("error_code") != 0, pc.scalar(False))
    columns = _as_they_are("api_name", "api_version")
    is_answer = pc.field("wait") == "answer"
    columns["service_ms"] = pc.if_else(is_answer, pc.field("service_ms"), pa.scalar(None))
    columns["failed"] = failed.cast(pa.int64())
    grouped = _grouped(
        tables.exchanges,
        ["api_name"],
        [
            ("api_version", "min"),
            ("api_version", "max"),
            ([], "count_all"),
            ("failed", "sum"),
            ("service_ms", "approximate_median"),
            ("service_ms", "max"),
        ],
        columns,
        ("error_code", "service_ms", "wait"),
    ).sort_by([("count_all", "descending"), ("api_name", "ascending")])
    return [
        {
            "api": row["api_name"],
            "versions": [row["api_version_min"], row["api_version_max"]],
            "exchanges": row["count_all"],
            "errors": row["failed_sum"],
            "service_ms_median": row["service_ms_approximate_median"],
            "service_ms_max": row["service_ms_max"],
        }
        for row in grouped.to_pylist()
    ]


def _clients(tables: Tables) -> list[dict[str, Any]]:
    keys = ["client_id", "client_ip"]
    grouped = _grouped(tables.exchanges, keys, [([], "count_all")], _as_they_are(*keys)).sort_by(
        [("count_all", "descending"), ("client_id", "ascending")]
    )
    return [
        {"client_id": row["client_id"], "ip": row["client_ip"], "exchanges": row["count_all"]}
        for row in grouped.to_pylist()
    ]


def _topics(tables: Tables) -> list[dict[str, Any]]:
    keys = ["topic", "source", "codec"]
    grouped = _grouped(
        tables.record_batches,
        keys,
        [([], "count_all"), ("record_count", "sum"), ("size", "sum")],
        _as_they_are(*keys, "record_count", "size"),
    ).sort_by([("size_sum", "descending"), ("topic", "ascending"), ("source", "ascending")])
    return [
        {
            "topic": row["topic"],
            "source": row["source"],
            "codec": row["codec"],
            "batches": row["count_all"],
            "records": row["record_count_sum"],
            "bytes": row["size_sum"],
        }
        for row in grouped.to_pylist()
    ]


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
        f"[bold]{totals['packets']:,}[/] packets in {_many(totals['captures'], 'capture')} "
        f"({_size(totals['bytes'])}): {_many(totals['connections'], 'connection')}, "
        f"{document['kafka_connections']:,} of them Kafka, "
        f"[bold]{totals['exchanges']:,}[/] exchanges, "
        f"{_many(totals['record_batches'], 'record batch', 'record batches')}, "
        f"[bold]{totals['records']:,}[/] records, "
        f"{_many(totals['anomalies'], 'anomaly', 'anomalies')}"
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


def _many(count: int, one: str, more: str = "") -> str:
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1000
    raise AssertionError
