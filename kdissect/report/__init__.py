"""`kdissect report`: a table set as one HTML page, CSV files and a JSON document.

Theory of operation: DuckDB reads the Parquet files and makes one table per question. Most start
from the table `requests`, an exchange a row (`sql.requests`). A section has two functions.
`collect` queries the tables for its rows and figures, as plain values of one document. `section`
makes the paragraphs, charts and tables of the page from the document. Memory is bounded by DuckDB's
limit and by the rows that the page shows, not by the size of the table set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kdissect import __version__
from kdissect import text as f
from kdissect.atomic_file import atomic_write
from kdissect.errors import OutputError
from kdissect.incidents import json_rows
from kdissect.pipeline.selection import Selection
from kdissect.protocol.releases import find_release
from kdissect.report import page
from kdissect.report.document import LISTS, Document, Options, Section
from kdissect.report.sections import (
    clients,
    errors,
    groups,
    lag,
    latency,
    network,
    overview,
    topics,
    traffic,
    transactions,
)
from kdissect.sql import Database
from kdissect.sql.formats import write_csv_file
from kdissect.sql.requests import make_requests
from kdissect.step_log import logged_step
from kdissect.tables.schemas import Row
from kdissect.tables.value_text import json_value

if TYPE_CHECKING:
    from kdissect.api import Tables

_FORMAT_VERSION = 1  # of the JSON document
MEMORY_LIMIT = "512MB"
Collect = Callable[[Database, Options], Document | None]
# Sections in the order of the page. Each makes the key of the document with its name.
_SECTIONS: dict[str, tuple[Collect, Callable[[Document], Section]]] = {
    "overview": (overview.collect, overview.section),
    "traffic": (traffic.collect, traffic.section),
    "latency": (latency.collect, latency.section),
    "errors": (errors.collect, errors.section),
    "clients": (clients.collect, clients.section),
    "security": (clients.collect_security, clients.security_section),
    "readiness": (clients.collect_readiness, clients.readiness_section),
    "topics": (topics.collect, topics.section),
    "groups": (groups.collect, groups.section),
    "lag": (lag.collect, lag.section),
    "transactions": (transactions.collect, transactions.section),
    "throttling": (network.collect_throttling, network.throttling_section),
    "network": (network.collect, network.section),
    "anomalies": (network.collect_anomalies, network.anomalies_section),
}
Progress = Callable[[str, float], None]
_NAMES_MAX = 3  # of sources in the name of a report
_PREPARED = 8  # sections' worth of work before the first: joins over all exchanges, incidents


def _quiet(step: str, share: float) -> None:
    """Show no progress."""


@dataclass(slots=True)
class Report:
    """A written report: its document (plain values), and the paths of its HTML and CSV files.

    csv: name of the table -> path.
    """

    document: Document = field(repr=False)
    html: Path
    csv: dict[str, Path] = field(default_factory=dict)


def build(
    tables: Tables,
    out: str | os.PathLike[str] | None,
    options: Options,
    *,
    name: str | None = None,
    csv: bool = True,
    progress: Progress = _quiet,
) -> Report:
    """Write the report of a table set, see `Tables.report`.

    progress: called with the name of each step, and the share of the work done so far (0 to 1).
    """
    check_options(out, options)
    with logged_step("incidents"):
        incidents = tables.incidents().to_arrow()
    totals, selection = tables.manifest["totals"], _selection(tables.manifest)
    options = replace(options, totals=totals, selection=selection, incidents=incidents)
    if name is None:
        name = name_of(_inputs(tables))
    html = Path(out) if out is not None else Path("reports") / f"{name}.html"
    with tables.database(memory_limit=MEMORY_LIMIT) as database:
        try:
            html.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{html.parent}: {error.strerror}") from error
        document = {"source": name, **collect(database, options, progress)}
        report = Report(document, html)
        sections = [section(document) for _, section in _SECTIONS.values()]
        names = {table: f"{html.stem}-{table}.csv" for table in _csv_tables(database)}
        text = page.render(document, sections, names if csv else {})
        if csv:
            for table, file in names.items():
                report.csv[table] = html.parent / file
                write_csv_file(database.table(LISTS[table]), report.csv[table])
        with atomic_write(html) as part:
            Path(part).write_text(text, encoding="utf-8", errors="replace")
    document["files"] = {"html": str(html), "csv": {k: str(v) for k, v in report.csv.items()}}
    return report


def _selection(manifest: Mapping[str, Any]) -> str:
    """The conditions on the exchanges of a set, chosen now or when it was written."""
    written = Selection.written(manifest)
    parts = [str(one) for one in written if not one.is_empty]
    return "; ".join(filter(None, [*dict.fromkeys(parts), manifest.get("selection", "")]))


def check_options(out: str | os.PathLike[str] | None, options: Options) -> None:
    """Raise the errors of `build` for these inputs, before any reading."""
    find_release(options.target)
    if out is not None and Path(out).is_dir():
        raise OutputError(f"{out}: is a folder; name an HTML file")


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


def _csv_tables(database: Database) -> list[str]:
    made = {row["name"] for row in database.rows("SELECT table_name AS name FROM duckdb_tables()")}
    return [name for name in LISTS if (name != "lag" or name in made)]


def collect(database: Database, options: Options, progress: Progress = _quiet) -> Document:
    """Return the document: everything the page shows, as plain values."""
    progress("reading", 0)
    with logged_step("joins over all exchanges"):
        make_requests(database)
        traffic.prepare(database)
        errors.prepare(database)
    document: Document = {"format_version": _FORMAT_VERSION, "program_version": __version__}
    for number, (name, (collect_part, _)) in enumerate(_SECTIONS.items(), _PREPARED):
        progress(name, number / (_PREPARED + len(_SECTIONS)))
        with logged_step(name):
            document[name] = json_value(collect_part(database, options))
    document["selection"] = options.selection
    document["incidents"] = _incidents(database, options.incidents)
    document["clear"] = overview.clear(document)
    return document


def _incidents(database: Database, incidents: pa.Table) -> list[Row]:
    """Return the incidents as JSON has them, each with its `cost` in words and its first packet."""
    rows = json_rows(incidents)
    ids = {row["evidence"]["exchange_ids"][0] for row in rows if row["evidence"]["exchange_ids"]}
    packets = {
        str(row["exchange_id"]): row["packet"]
        for row in database.rows(
            "SELECT exchange_id, packet FROM requests "
            f"WHERE exchange_id IN ({', '.join(sorted(ids)) or 'NULL'})"
        )
    }
    for row in rows:
        cost = [f"{f.duration(row['time_lost_ms'])} lost"] if row["time_lost_ms"] else []
        cost += [f.plural(row["request_count"], "request")] if row["request_count"] else []
        row["cost"] = ", ".join(cost)
        row["packet"] = packets.get(next(iter(row["evidence"]["exchange_ids"]), ""))
    return rows
