"""The table set as DuckDB views: scans and hash tables compute a report's queries.

Nothing is read into Python but the rows that a section shows. DuckDB works in a folder of its own,
within a memory limit, and spills there.
"""

from __future__ import annotations

import datetime as dt
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from kdissect.capture.object_store import repeated
from kdissect.errors import EnvironmentFailed
from kdissect.interrupts import interrupts
from kdissect.sql.csv_files import copy_csv
from kdissect.sql.database import STORE_ERROR
from kdissect.sql.views import connect, make_views, view_name
from kdissect.text import rfc3339

if TYPE_CHECKING:
    from kdissect.api import Tables

REPORT_MEMORY_LIMIT = "512MB"
JSON_INT_MAX = 1 << 53  # beyond it a reader of JSON loses digits: such ids travel as text
LISTED_MAX = 1000  # rows of a list in the JSON document; its `total` says how many there are

Row = dict[str, Any]


class ReportDatabase:
    """Views of a table set, by SQL names: `exchanges`, `api_fetch`, `internal_offset_commit`."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.folder = tempfile.mkdtemp(prefix="kdissect-report-")
        place = os.path.join(self.folder, "work.duckdb")
        self._connection = connect(place, self.folder, REPORT_MEMORY_LIMIT)
        self._connection.execute("set preserve_insertion_order = false")
        make_views(
            self._connection, {name: self.tables[name].dataset for name in self.tables.names}
        )

    def __enter__(self) -> ReportDatabase:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def has(self, name: str) -> bool:
        """True where the table set has this table ("apis/Fetch") or view ("api_fetch")."""
        return name in self.tables or name in map(view_name, self.tables.names)

    def schema(self, name: str) -> pa.Schema:
        return self.tables[name].schema

    @interrupts()
    def run(self, query: str, values: Sequence[Any] = ()) -> None:
        """A statement without rows."""
        self._execute(query, values)

    @interrupts()
    def rows(self, query: str, values: Sequence[Any] = ()) -> list[Row]:
        """All rows as dicts of values that JSON has: times in RFC 3339, large ints as text."""
        result = self._execute(query, values)
        names = [column[0] for column in result.description]
        return [
            {name: plain(value) for name, value in zip(names, row, strict=True)}
            for row in result.fetchall()
        ]

    def row(self, query: str, values: Sequence[Any] = ()) -> Row:
        """The only row."""
        (found,) = self.rows(query, values)
        return found

    def value(self, query: str, values: Sequence[Any] = ()) -> Any:
        """The only value of the only row."""
        (value,) = self.row(query, values).values()
        return value

    @interrupts()
    def columns(self, query: str, values: Sequence[Any] = ()) -> dict[str, Any]:
        """All rows as numpy arrays, one a column."""
        found: dict[str, Any] = self._execute(query, values).fetchnumpy()
        return found

    @interrupts()
    def insert(self, table: str, rows: pa.Table) -> None:
        """Add rows to a table of the same columns."""
        self._connection.register("inserted_rows", rows)
        self._connection.execute(f"INSERT INTO {table} FROM inserted_rows")
        self._connection.unregister("inserted_rows")

    def create(self, table: str, rows: pa.Table) -> None:
        """Make a table of these rows."""
        self._connection.register("created_rows", rows)
        self._execute(f"CREATE TABLE {table} AS FROM created_rows", ())
        self._connection.unregister("created_rows")

    def copy_csv(self, query: str, path: str) -> int:
        """Write rows as CSV; returns their number."""
        return int(self._repeated(lambda: copy_csv(self._connection, query, path)))

    def _execute(self, query: str, values: Sequence[Any]) -> Any:
        return self._repeated(lambda: self._connection.execute(query, list(values)))

    def _repeated(self, work: Callable[[], Any]) -> Any:
        try:
            return repeated(work)
        except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
            raise EnvironmentFailed(f"{self.folder}: {str(error).splitlines()[0]}") from error
        except duckdb.InvalidInputException as error:
            if STORE_ERROR.search(str(error)):
                raise EnvironmentFailed(str(error).splitlines()[0]) from error
            raise


def plain(value: Any) -> Any:
    """A value of DuckDB as JSON has it."""
    if isinstance(value, dt.datetime):
        return rfc3339(value.astimezone(dt.UTC))
    if isinstance(value, int) and abs(value) > JSON_INT_MAX:
        return str(value)
    if isinstance(value, float) and not -1e300 < value < 1e300:
        return None
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value


def listed(
    database: ReportDatabase, table: str, order: str, limit: int = LISTED_MAX
) -> dict[str, Any]:
    """{"total": n, "rows": the first `limit`} of a table, in an order."""
    return {
        "total": database.value(f"SELECT count(*) FROM {table}"),
        "rows": database.rows(f"FROM {table} ORDER BY {order} LIMIT {limit}"),
    }


def columns_of(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Any]]:
    """Rows as a dict of columns: the input of a chart, without the names in every row."""
    return {name: [row[name] for row in rows] for name in names}
