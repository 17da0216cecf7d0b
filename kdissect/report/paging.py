"""Lists in a report: the first rows in the document, all of them in a CSV file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdissect.report.database import ReportDatabase, Row

LISTED_MAX = 1000  # rows of a list in the JSON document; its `total` says how many there are


def listed(
    database: ReportDatabase, table: str, order: str, limit: int = LISTED_MAX
) -> dict[str, Any]:
    """{"total": n, "rows": the first `limit`} of a table, in an order."""
    return {
        "total": database.value(f"SELECT count(*) FROM {table}"),
        "rows": database.rows(f"FROM {table} ORDER BY {order} LIMIT {limit}"),
    }


def columns_of(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Any]]:
    """Rows as a dict of columns: what a chart gets, without the names in every row."""
    return {name: [row[name] for row in rows] for name in names}
