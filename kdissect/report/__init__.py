"""`kdissect report`: a table set as one HTML page, CSV files and a JSON document.

Theory of operation: DuckDB reads the Parquet files and makes one table per question. Most start
from the table `x`, an exchange a row (see `exchange_facts`). Sections query these tables for the
rows that they show, and add plain values to one document. `findings` ranks the problems in the
document, and `page` draws the document. Memory is bounded by DuckDB's limit and by the rows that
the page shows, not by the size of the table set.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdissect import __version__
from kdissect.atomic_file import atomic_write
from kdissect.background import Background
from kdissect.errors import CaptureError, OutputError
from kdissect.incidents import json_rows
from kdissect.report import charts, exchange_facts, findings, page
from kdissect.report.database import ReportDatabase
from kdissect.report.sections import (
    broker_log,
    clients,
    errors,
    groups,
    lag,
    latency,
    network,
    overview,
    readiness,
    security,
    topics,
    traffic,
    transactions,
)
from kdissect.step_log import logged_step

if TYPE_CHECKING:
    from kdissect.api import Tables
    from kdissect.pipeline.options import Time

_log = logging.getLogger(__name__)

_FORMAT_VERSION = 1  # of the JSON document

# CSV file -> its query. Tables that a capture does not have are left out.
CSV_TABLES = {
    "captures": (
        "SELECT * EXCLUDE (ignored_reasons, capture_id) FROM captures ORDER BY first_time, path"
    ),
    "connections": "FROM connection_health ORDER BY first_time, connection_id",
    "latency_apis": "FROM latency_apis ORDER BY api",
    "latency_clients": "FROM latency_clients ORDER BY client_id, client_ip",
    "latency_brokers": "FROM latency_brokers ORDER BY broker",
    "errors": "FROM errors ORDER BY time, exchange_id, path",
    "clients": "FROM clients_all ORDER BY client_id, client_ip",
    "certificates": "FROM certificates ORDER BY not_after, side, address, subject",
    "logins": "FROM logins ORDER BY principal, sasl_mechanism, client_ip",
    "topics": "FROM topics_all ORDER BY topic",
    "topic_clients": (
        "SELECT * EXCLUDE (client) FROM topic_clients ORDER BY topic, direction, client_id"
    ),
    "topic_batches": "FROM topic_batches ORDER BY topic, direction, codec",
    "groups": "FROM groups_all ORDER BY group_id",
    "group_events": "FROM group_events ORDER BY time, group_id",
    "rebalances": "FROM rebalances ORDER BY begin_time, group_id",
    "lag": "FROM lag ORDER BY group_id, topic, partition",
    "transactions": "FROM transactions_all ORDER BY begin_time, transactional_id",
    "transaction_producers": "FROM transaction_producers ORDER BY transactional_id",
    "throttling": "FROM throttling ORDER BY throttle_ms DESC, client_id",
    "anomalies": "SELECT * EXCLUDE (number) FROM anomalies_all ORDER BY capture_id, packet, pos",
    "broker_times": "FROM broker_times ORDER BY request_time, exchange_id",
}


Progress = Callable[[str, float], None]
_NAMES_MAX = 3  # of sources in the name of a report
_PREPARED = 8  # sections' worth of work before the first: joins over all exchanges


def _quiet(step: str, share: float) -> None:
    """Show no progress."""


@dataclass(slots=True)
class Report:
    """A written report: its document (plain values), and the paths of its HTML and CSV files.

    csv: name of the table -> path.
    """

    document: dict[str, Any]
    html: Path
    csv: dict[str, Path] = field(default_factory=dict)


def build(
    tables: Tables,
    out: str | os.PathLike[str] | None = None,
    *,
    name: str | None = None,
    csv: bool = True,
    broker_logs: tuple[str, ...] = (),
    target: str = readiness.DEFAULT_TARGET,
    since: Time | None = None,
    progress: Progress = _quiet,
) -> Report:
    """Write the report of a table set, see `Tables.report`.

    progress: called with the name of each step, and the share of the work done so far (0 to 1).
    """
    check_options(out, broker_logs, target)
    if name is None:
        name = name_of(_inputs(tables))
    html = Path(out) if out is not None else Path("reports") / f"{name}.html"
    library = Background(charts.library)
    with ReportDatabase(tables) as database:
        try:
            html.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{html.parent}: {error.strerror}") from error
        document = collect(database, broker_logs, target, since, progress)
        document = {"source": name, **document}
        report = Report(document, html)
        names = {table: f"{html.stem}-{table}.csv" for table in _csv_tables(database)}
        text = page.render(document, name, names if csv else {}, library.result())
        if csv:
            for table, file in names.items():
                path = html.parent / file
                with atomic_write(path) as part:
                    database.copy_csv(CSV_TABLES[table], part)
                report.csv[table] = path
        with atomic_write(html) as part:
            Path(part).write_text(text, encoding="utf-8")
    document["files"] = {"html": str(html), "csv": {k: str(v) for k, v in report.csv.items()}}
    return report


def check_options(
    out: str | os.PathLike[str] | None, broker_logs: tuple[str, ...], target: str
) -> None:
    """Raise the errors of `build` for these inputs, before any reading."""
    readiness.check_target(target)
    for log in broker_logs:
        if not Path(log).is_file():
            raise CaptureError(f"{log}: no such file")
    if out is not None and Path(out).is_dir():
        raise OutputError(f"{out}: is a folder; --out names the HTML file")


def name_of(sources: Sequence[str | os.PathLike[str]]) -> str:
    """The names of all sources, such as ``before+after``; of many the first and the count.

    The name of a source is that of a table set's folder, or of a capture without its ending.
    """
    names = list(dict.fromkeys(map(_source_name, sources)))
    if len(names) > _NAMES_MAX:
        return f"{names[0]}+{len(names) - 1}-more"
    return "+".join(names)


def _source_name(path: str | os.PathLike[str]) -> str:
    found = Path(os.path.abspath(os.fspath(path)))
    return (found.name if found.is_dir() else found.name.split(".")[0]) or "tables"


def _inputs(tables: Tables) -> list[str]:
    inputs = tables.manifest.get("inputs") or [{"path": "capture"}]
    return [str(one["path"]) for one in inputs]


def _csv_tables(database: ReportDatabase) -> list[str]:
    made = {row["name"] for row in database.rows("SELECT table_name AS name FROM duckdb_tables()")}
    return [name for name in CSV_TABLES if (name not in ("lag", "broker_times") or name in made)]


def collect(
    database: ReportDatabase,
    broker_logs: tuple[str, ...] = (),
    target: str = readiness.DEFAULT_TARGET,
    since: Time | None = None,
    progress: Progress = _quiet,
) -> dict[str, Any]:
    """The document: everything the page shows, as plain values."""
    # databases of their own, beside this one
    assessed = Background(lambda: readiness.collect(database.tables, target))
    incidents = Background(lambda: database.tables.incidents().to_arrow())
    inventory = Background(lambda: database.tables.inventory(since).to_arrow())
    progress("reading", 0)
    with logged_step(_log, "joins over all exchanges"):
        exchange_facts.prepare(database)
        width_us = traffic.prepare(database)
        errors.prepare(database)
    sections: dict[str, Callable[[], Any]] = {
        "overview": lambda: overview.collect(database),
        "traffic": lambda: traffic.collect(database, width_us),
        "latency": lambda: latency.collect(database),
        "throttling": lambda: latency.collect_throttling(database),
        "errors": lambda: errors.collect(database),
        "clients": lambda: clients.collect(database, inventory.result()),
        "security": lambda: security.collect(database),
        "topics": lambda: topics.collect(database),
        "groups": lambda: groups.collect(database),
        "transactions": lambda: transactions.collect(database),
        "lag": lambda: lag.collect(database, width_us),
        "network": lambda: network.collect(database),
        "broker_log": lambda: broker_log.collect(database, broker_logs),
        "readiness": assessed.result,
    }
    document: dict[str, Any] = {"format_version": _FORMAT_VERSION, "program_version": __version__}
    for number, (name, section) in enumerate(sections.items(), _PREPARED):
        progress(name, number / (_PREPARED + len(sections)))
        with logged_step(_log, name):
            document[name] = section()
    document["incidents"] = json_rows(incidents.result())
    document["findings"] = findings.find(database, document)
    return document
