"""A DuckDB database in memory whose views are the tables of a set; queries reach nothing else.

Two barriers confine a query. DuckDB's own: once the views exist, only their files may be opened,
extensions are not loaded, Python's variables are no tables, and the settings are locked. The second
is ours: DuckDB may also write files that it may open, a COPY may hide in a WITH, and some table
functions write files. So a user's query is one statement, and its syntax tree, as DuckDB reports
it, contains only nodes that read and the table functions listed below.

Results are streamed as record batches. Data beyond the memory limit go to a temporary folder, which
is removed with the database.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import duckdb
import pyarrow as pa
import pyarrow.dataset as pads

from kdissect.capture.object_store import repeated
from kdissect.errors import EnvironmentFailed, QueryError
from kdissect.interrupts import interrupts
from kdissect.protocol.model import snake_case

Done = TypeVar("Done")
Value = str | int | float | None  # of a parameter of a query

MEMORY_LIMIT = "1GiB"
BATCH_ROWS, BLOB_BATCH_ROWS = 8192, 2048  # fewer rows for blobs: values of records may be long
INTERRUPT_S = 10  # how long an interrupted query may take to stop

_NODES = frozenset(("SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"))
_TABLE_FUNCTIONS = frozenset(
    (
        *("range", "generate_series", "repeat", "repeat_row", "unnest", "summary"),
        *("json_each", "json_tree", "pragma_table_info", "pragma_show", "pragma_version"),
        *("duckdb_columns", "duckdb_functions", "duckdb_keywords", "duckdb_settings"),
        *("duckdb_tables", "duckdb_types", "duckdb_views", "pg_timezone_names"),
    )
)
_NOT_CODE = re.compile(r"\s+|--[^\n]*(?:\n|\Z)|/\*.*?\*/", re.DOTALL)
_EXPLAIN = re.compile(r"explain\b(\s*\([^)]*\)|\s+analyze\b|\s+(?:verbose)\b)*", re.IGNORECASE)
_OUT_OF_MEMORY = "Out of Memory Error"
_PREFIXES = {"apis/": "api_", "internal/": "internal_"}
# text of pyarrow's errors of reading
STORE_ERROR = re.compile(r"registered as '[^']*' failed: (?:IOError|OSError)")
_READS = (
    "a query is one statement that reads (SELECT, FROM, WITH, SUMMARIZE, DESCRIBE, SHOW, EXPLAIN)"
)


class Database:
    """The views of some tables; a context manager, for one thread at a time.

    tables: rows by name of the table (``apis/Fetch``). DuckDB reads Parquet files itself, other
    datasets through pyarrow.
    memory_limit: how much DuckDB may hold before it uses temporary files, such as ``512MiB``; None
    is `MEMORY_LIMIT`.
    derived: functions that compute the rows of further tables, once a user's query names one.
    """

    def __init__(
        self,
        tables: Mapping[str, pads.Dataset],
        *,
        memory_limit: str | None = None,
        derived: Mapping[str, Callable[[], pa.Table]] | None = None,
    ) -> None:
        self._views = frozenset(map(view_name, tables))
        self._derived = dict(derived or {})
        self._spill = tempfile.mkdtemp(prefix="kdissect-sql-")
        self._thread = ThreadPoolExecutor(1)
        try:
            limit = memory_limit or MEMORY_LIMIT
            self._connection = _connect(self._spill, limit)
        except duckdb.Error as error:
            self.close()
            raise QueryError(f"memory limit {memory_limit}: {one_line(error)}") from error
        try:
            self._fence(_make_views(self._connection, tables))
        except duckdb.Error as error:
            self.close()
            raise QueryError(one_line(error)) from error
        except BaseException:
            self.close()
            raise

    def _fence(self, files: list[str]) -> None:
        listed = ", ".join(literal(path) for path in files)
        self._connection.execute(f"set allowed_paths = [{listed}]")
        self._connection.execute(f"set allowed_directories = [{literal(self._spill)}]")
        self._connection.execute("set enable_external_access = false")
        self._connection.execute("set lock_configuration = true")

    def stream(self, query: str) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Return the schema and the record batches of a user's query, in bounded memory.

        Names of columns are distinct: ``a, a`` gives ``a, a_1``.
        Raises QueryError if the query is wrong or would do more than read, EnvironmentFailed if
        memory and disk do not suffice; both also while the batches are drawn.
        """
        self._check(query)
        self._derive(query)

        def begun() -> tuple[pa.RecordBatchReader, pa.RecordBatch | None]:
            relation = self._connection.sql(query)
            if relation is None:
                raise QueryError("the query gives no rows")
            has_blobs = any("BLOB" in str(kind) for kind in relation.types)
            reader = relation.to_arrow_reader(BLOB_BATCH_ROWS if has_blobs else BATCH_ROWS)
            return reader, next(reader, None)

        # a query can be repeated only until it has returned rows
        reader, batch = self._in_thread(lambda: repeated(begun))
        names = _distinct(reader.schema.names)
        schema = pa.schema(
            [f.with_name(name) for f, name in zip(reader.schema, names, strict=True)]
        )
        batches = self._batches(reader, batch)
        return schema, (pa.RecordBatch.from_arrays(one.columns, schema=schema) for one in batches)

    def _derive(self, query: str) -> None:
        """Compute the tables that the query names and that do not exist yet."""
        for name in list(self._derived):
            if re.search(rf"\b{name}\b", query, re.IGNORECASE):
                self._connection.register(name, self._derived.pop(name)())

    def _batches(
        self, reader: pa.RecordBatchReader, batch: pa.RecordBatch | None
    ) -> Iterator[pa.RecordBatch]:
        while batch is not None:
            yield batch
            batch = self._in_thread(lambda: next(reader, None))

    def _in_thread(self, work: Callable[[], Done]) -> Done:
        """Run a query's work, which may take minutes, in a thread, so that SIGINT can end it.

        DuckDB notices signals when it returns rows, but not during the work for the first of them.
        """
        with _errors():
            future = self._thread.submit(work)
            try:
                return future.result()
            except KeyboardInterrupt:
                self._connection.interrupt()
                wait([future], INTERRUPT_S)
                raise

    def query(self, query: str) -> pa.Table:
        """Return all rows of a user's query; raises as `stream` does."""
        schema, batches = self.stream(query)
        return pa.Table.from_batches(list(batches), schema)

    # Queries of kdissect. Values replace the parameters `?` of a query.

    def has(self, name: str) -> bool:
        """Return whether the set has the table of a view, such as ``api_fetch``."""
        return name in self._views

    def run(self, query: str, values: Sequence[Value] = ()) -> None:
        """Run statements, which may create temporary tables and macros."""
        with _errors():
            repeated(lambda: self._connection.execute(query, list(values)))

    def create(self, table: str, rows: pa.Table) -> None:
        """Create a temporary table of these rows."""
        self._connection.register("created_rows", rows)
        self.run(f"create temp table {table} as from created_rows")
        self._connection.unregister("created_rows")

    def table(self, query: str, values: Sequence[Value] = ()) -> pa.Table:
        """Return all rows of a query."""
        with _errors():
            return repeated(
                lambda: self._connection.sql(query, params=list(values)).to_arrow_table()
            )

    def rows(self, query: str, values: Sequence[Value] = ()) -> list[dict[str, Any]]:
        """Return all rows of a query, as plain values."""
        rows: list[dict[str, Any]] = self.table(query, values).to_pylist()
        return rows

    def row(self, query: str, values: Sequence[Value] = ()) -> dict[str, Any]:
        """Return the only row of a query."""
        (found,) = self.rows(query, values)
        return found

    def value(self, query: str, values: Sequence[Value] = ()) -> Any:
        """Return the only value of the only row of a query."""
        (value,) = self.row(query, values).values()
        return value

    def _check(self, query: str) -> None:
        try:
            statements = duckdb.extract_statements(query)
        except duckdb.Error as error:
            raise QueryError(one_line(error)) from error
        if not statements:
            raise QueryError("the query is empty")
        if len(statements) > 1:
            raise QueryError(f"{len(statements)} statements; give one")
        kind = statements[0].type
        if kind == duckdb.StatementType.EXPLAIN:
            inner = _EXPLAIN.sub("", _uncommented(query), count=1)
            if _EXPLAIN.match(inner):
                raise QueryError(f"{_READS}; this explains an EXPLAIN")
            self._check(inner)
            return
        if kind == duckdb.StatementType.MULTI:
            raise QueryError("name the columns that a PIVOT makes: PIVOT t ON c IN ('a', 'b') ...")
        if kind != duckdb.StatementType.SELECT:
            raise QueryError(f"{_READS}; this is {kind.name}")
        tree = json.loads(self.value("select json_serialize_sql($1) as tree", [query]))
        if tree["error"]:
            raise QueryError(f"{_READS}; {tree['error_message']}")
        _check_tree(tree["statements"])

    def close(self) -> None:
        connection = getattr(self, "_connection", None)
        if connection is not None:
            connection.close()
        self._thread.shutdown(wait=False)
        shutil.rmtree(self._spill, ignore_errors=True)

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _distinct(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        distinct, number = name, 0
        while distinct in found:
            number += 1
            distinct = f"{name}_{number}"
        found.append(distinct)
    return found


def _check_tree(tree: object) -> None:
    """Raise QueryError if the syntax tree does more than read."""
    waiting: list[Any] = [tree]  # JSON
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
            continue
        if not isinstance(item, dict):
            continue
        waiting += item.values()
        kind = item.get("type")
        if not isinstance(kind, str):
            continue
        if kind.endswith("_NODE") and kind not in _NODES:
            raise QueryError(f"{_READS}; {kind.partition('_')[0]} is none")
        if kind == "TABLE_FUNCTION":
            function = item.get("function") or {}
            name = str(function.get("function_name", "")).lower()
            if name not in _TABLE_FUNCTIONS:
                raise QueryError(f"table function {name!r} is not available; query the views")


def _uncommented(query: str) -> str:
    """Return the query from its first word on, without spaces and comments before it."""
    pos = 0
    while skipped := _NOT_CODE.match(query, pos):
        pos = skipped.end()
    return query[pos:]


@contextmanager
def _errors() -> Iterator[None]:
    """Turn DuckDB's errors, an OSError while rows are drawn, into kdissect's, one line each."""
    try:
        with interrupts():
            yield
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        text = one_line(error)
        if text.startswith(_OUT_OF_MEMORY):
            raise EnvironmentFailed(f"{text}; a higher memory limit gives a query more") from error
        if text.startswith("IO Error") or STORE_ERROR.search(text) or getattr(error, "errno", None):
            raise EnvironmentFailed(text) from error
        raise QueryError(text) from error


def one_line(error: Exception) -> str:
    """Return an error of DuckDB in one line, without the picture of its position."""
    text = re.split(r"\n\n(?:LINE |\s*Possible solutions)|\nPossible solutions", str(error))[0]
    place = re.search(r"LINE (\d+): (.*)\n(\s*)\^", str(error))
    words = " ".join(text.split())
    if place is not None and int(place[1]) > 1:
        words = f"{words} (line {place[1]})"
    return words


def view_name(table: str) -> str:
    """Return the view of a table: ``exchanges``, ``api_fetch`` for ``apis/Fetch``,
    ``internal_...``."""
    for prefix, short in _PREFIXES.items():
        if table.startswith(prefix):
            return short + snake_case(table.removeprefix(prefix))
    return table


@interrupts()
def _connect(spill: str, memory_limit: str) -> duckdb.DuckDBPyConnection:
    """Open a database that loads no extensions; data beyond `memory_limit` go to `spill`."""
    connection = duckdb.connect(
        ":memory:",
        config={
            "temp_directory": spill,
            "memory_limit": memory_limit,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
        },
    )
    connection.execute("set TimeZone = 'UTC'")
    # The progress bar would appear on stdout among the rows, after two seconds. In a notebook
    # without ipywidgets it is off, and DuckDB refuses to set it at all.
    if connection.execute("select current_setting('enable_progress_bar')").fetchall()[0][0]:
        connection.execute("set enable_progress_bar = false")
    return connection


@interrupts()
def _make_views(
    connection: duckdb.DuckDBPyConnection, tables: Mapping[str, pads.Dataset]
) -> list[str]:
    """Create the views; return the files that they read.

    DuckDB reads Parquet files of this machine itself, other datasets through pyarrow.
    """
    files: list[str] = []
    for name, dataset in tables.items():
        view = view_name(name)
        paths = _parquet_files(dataset)
        if paths:
            patterns = [_glob_escaped(path) for path in paths]
            files += {*paths, *patterns}  # DuckDB checks both
            listed = ", ".join(map(literal, patterns))
            # a folder's name like date=2026-11-27 is no column
            rows = f"read_parquet([{listed}], hive_partitioning = false)"
            connection.execute(f'create view "{view}" as select * from {rows}')
        else:
            connection.register(view, dataset)
    return files


def _parquet_files(dataset: pads.Dataset) -> list[str]:
    files = getattr(dataset, "files", None)
    if dataset._scan_options:
        return []  # a filter: the files have more rows
    if files is None or getattr(dataset.format, "default_extname", "") != "parquet":
        return []
    if dataset.filesystem.type_name != "local":
        return []  # in an object store, which pyarrow reads
    return [os.path.abspath(path) for path in files]


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _glob_escaped(path: str) -> str:
    """Return a pattern that matches only this path."""
    return re.sub(r"([*?\[])", r"[\1]", path)
