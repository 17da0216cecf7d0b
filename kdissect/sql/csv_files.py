"""CSV files of reports: RFC 3339 times, lists with spaces, text that no spreadsheet runs."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import pyarrow as pa

from kdissect.atomic_file import atomic_write
from kdissect.interrupts import interrupts
from kdissect.sql.views import connect, literal

_MEMORY_LIMIT = "256MB"


def write_csv_file(rows: pa.Table, path: str | os.PathLike[str]) -> None:
    """Write rows as a CSV file; an existing file is replaced at the end."""
    spill = tempfile.mkdtemp(prefix="kdissect-csv-")
    try:
        connection = connect(":memory:", spill, _MEMORY_LIMIT)
        connection.register("listed_rows", rows)
        with atomic_write(os.fspath(path)) as part:
            copy_csv(connection, "FROM listed_rows", part)
        connection.close()
    finally:
        shutil.rmtree(spill, ignore_errors=True)


@interrupts()
def copy_csv(connection: Any, query: str, path: str) -> int:
    """Write the rows of a query as CSV; return their number.

    Text that a spreadsheet would run as a formula gets an apostrophe in front.
    """
    connection.execute(f"CREATE OR REPLACE TEMP VIEW csv_rows AS {query}")
    columns = []
    for name, kind, *_ in connection.execute("DESCRIBE csv_rows").fetchall():
        columns.append(f'{_csv_value(name, kind)} AS "{name}"')
    copied = connection.execute(
        f"COPY (SELECT {', '.join(columns)} FROM csv_rows) TO {literal(path)} (HEADER, FORMAT csv)"
    ).fetchone()
    return int(copied[0]) if copied else 0


def _csv_value(name: str, kind: str) -> str:
    column = f'"{name}"'
    if kind == "TIMESTAMP WITH TIME ZONE":
        return f"strftime({column} AT TIME ZONE 'UTC', '%Y-%m-%dT%H:%M:%S.%fZ')"
    if kind.endswith("[]"):
        column = f"array_to_string({column}, ' ')"
    elif kind != "VARCHAR":
        return column
    return (
        f"CASE WHEN regexp_matches({column}, '^[-=+@\\t\\r]') THEN '''' || {column} "
        f"ELSE {column} END"
    )
