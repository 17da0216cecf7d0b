"""The tables of the page, as `tables.toml` declares them, and the rows that each shows."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from importlib.resources import files
from typing import Any

from kdissect import text as f
from kdissect.report.table_view import Column
from kdissect.tables.schemas import FIXED_TABLES, meaning_of

Document = dict[str, Any]
_DIRECTIONS = {"write": "writes", "read": "reads", "replicate": "replicates"}


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of the page.

    rows: takes the document; returns a list of rows, or `rows` with their `total`. csv: the name
    of the table whose CSV file has all rows.
    """

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: Callable[[Document], Any]
    csv: str
    note: str


def with_reason(rebalance: dict[str, Any]) -> dict[str, Any]:
    """Return a rebalance with its reason in a column of its own, apart from its members."""
    members, _, why = (rebalance["detail"] or "").rpartition("why: ")
    return {**rebalance, "detail": members.rstrip("; "), "why": why}


# -- rows that are not in the document as they are shown ------------------------------------


def _captures(d: Document) -> list[dict[str, Any]]:
    return [
        {
            **row,
            "file": row["path"].replace("\\", "/").rpartition("/")[2],
            "ignored": ", ".join(
                f"{name} {f.count(number)}" for name, number in row["ignored_reasons"].items()
            ),
        }
        for row in d["overview"]["captures"]
    ]


def _protocols(d: Document) -> list[dict[str, Any]]:
    protocols: list[dict[str, Any]] = d["overview"]["protocols"]
    return protocols if len(protocols) > 1 else []


def _time_spent(d: Document) -> list[dict[str, Any]]:
    rows = (row for row in d["latency"]["apis"]["rows"] if row["service_ms"])
    return sorted(rows, key=lambda row: (-row["service_ms"], row["api"] or ""))


def _broker_times(d: Document) -> list[dict[str, Any]]:
    log = d["broker_log"]
    return [{"api": "all", **log["difference_ms"]}, *log["by_api"]] if log else []


def _topic_clients(d: Document) -> dict[str, Any]:
    clients = d["topics"]["clients"]
    rows = [{**row, "direction": _DIRECTIONS[row["direction"]]} for row in clients["rows"]]
    return {**clients, "rows": rows}


def _rebalances(d: Document) -> dict[str, Any]:
    rebalances = d["groups"]["rebalances"]
    return {**rebalances, "rows": [with_reason(row) for row in rebalances["rows"]]}


def _lag(d: Document) -> Any:
    return d["lag"]["partitions"] if d["lag"] else []


_MADE = {
    "captures": _captures,
    "protocols": _protocols,
    "time_spent": _time_spent,
    "broker_times": _broker_times,
    "topic_clients": _topic_clients,
    "rebalances": _rebalances,
    "lag": _lag,
}


# -- the declaration ------------------------------------------------------------------------


def _sentence(meaning: str) -> str:
    """The meaning of a page's column, or of the stored column that it names, as a sentence."""
    if re.fullmatch(r"\w+\.\w+", meaning):
        table, name = meaning.split(".")
        meaning = meaning_of(FIXED_TABLES[table].field(name)).replace("`", "")
    return f"{meaning[0].upper()}{meaning[1:]}."


def _columns(declared: dict[str, Any]) -> tuple[Column, ...]:
    columns = []
    for word in declared["columns"].split():
        key = word.rstrip("*")
        label, kind, meaning = declared.get(key) or _SHARED[key]
        columns.append(Column(key, label, kind, _sentence(meaning), bar=word.endswith("*")))
    return tuple(columns)


def _rows(name: str, path: str | None) -> Callable[[Document], Any]:
    return _MADE[name] if path is None else lambda d: reduce(dict.__getitem__, path.split("."), d)


def chart_word(name: str) -> str:
    """The meaning of a column in the data of a chart."""
    return _sentence(_CHARTS.get(name) or _SHARED[name][2])


_DECLARED = tomllib.loads(files(__package__).joinpath("tables.toml").read_text("utf-8"))
_SHARED, _CHARTS = _DECLARED.pop("shared"), _DECLARED.pop("charts")
STORY = _columns(_DECLARED.pop("story"))
TABLES = {
    name: PageTable(
        f"t-{name.replace('_', '-')}",
        declared["caption"],
        _columns(declared),
        _rows(name, declared.get("rows")),
        declared.get("csv", ""),
        declared.get("note", ""),
    )
    for name, declared in _DECLARED.items()
}
