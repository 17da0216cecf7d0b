"""The public Python API: `read`, `open`, `dissect`, and the table sets that they return."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from kdissect.capture.inputs import find_captures
from kdissect.capture.object_store import repeated
from kdissect.errors import CaptureError
from kdissect.pipeline import local
from kdissect.pipeline.filters import Time, any_of, time_ns
from kdissect.pipeline.options import (
    DecodeValues,
    Limits,
    Options,
    PartitionBy,
    PathLike,
    Payload,
    paths_of,
)
from kdissect.pipeline.plan import manifest_inputs, planned
from kdissect.pipeline.set_run import SetRun, new_manifest
from kdissect.pipeline.table_set import (
    absolute,
    capture_paths,
    commit,
    dataset,
    read_manifest,
    reading_arguments,
    staging,
    writing,
)
from kdissect.pipeline.table_writer import MemorySink, ParquetSink
from kdissect.tables.arrow_arrays import owned
from kdissect.tables.schemas import COUNTED_TABLES, FIXED_TABLES, fixed_tables
from kdissect.text import no_such, plural

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import SparkSession

    from kdissect.pipeline.selection import Selection
    from kdissect.plot import Plots
    from kdissect.report import Report
    from kdissect.sql import Database

Filter: TypeAlias = "pads.Expression | None"
_LISTED_ROWS = 10
_VERBS = ("show", "sql")  # of the commands of incidents


class Table:
    """One table of a set: rows in memory or in Parquet files, read on first use."""

    def __init__(self, name: str, source: pads.Dataset | Callable[[], pads.Dataset]) -> None:
        """source: the rows, or a function that opens them on first use."""
        self.name = name
        self._source = source

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a table: file names for rows in files, the rows themselves for rows in memory."""
        if isinstance(self.dataset, pads.InMemoryDataset):
            return _unpickled, (self.name, self.dataset.to_table())
        return Table, (self.name, self.dataset)

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the table, without reading rows."""
        return self.dataset.schema

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in order."""
        return list(self.schema.names)

    @property
    def dataset(self) -> pads.Dataset:
        """The rows as a pyarrow dataset, for libraries that take one."""
        if not isinstance(self._source, pads.Dataset):
            self._source = self._source()
        return self._source

    @property
    def num_rows(self) -> int:
        """The number of rows, counted from the Parquet footers if the rows are in files."""
        return int(repeated(self.dataset.count_rows))

    def to_arrow(self, columns: Sequence[str] | None = None, filter: Filter = None) -> pa.Table:
        """Read rows into memory as a pyarrow.Table.

        columns: names of the columns to read, or one name (default: all). filter: a
        pyarrow.dataset expression. Raises KeyError if there is no such column.
        """
        chosen = self._chosen(columns)
        return repeated(lambda: self.dataset.to_table(columns=chosen, filter=filter))

    def _chosen(self, columns: Sequence[str] | None) -> list[str] | None:
        """The names to read. Raises KeyError for one that is not there."""
        if columns is None:
            return None
        chosen = [columns] if isinstance(columns, str) else list(columns)
        for name in chosen:
            # Arrow takes request.acks as a field of a struct
            if not {name, name.partition(".")[0]} & set(self.columns):
                raise KeyError(f"{self.name}: {no_such('column', name, self.columns)}")
        return chosen

    def to_pandas(
        self, columns: Sequence[str] | None = None, filter: Filter = None
    ) -> pd.DataFrame:
        """Read rows into a pandas DataFrame; arguments as for `to_arrow`. Needs pandas.

        Integers and booleans become pandas' nullable types (`Int64`, `boolean`), so that a null
        turns no id into a float.
        """
        return _frame(self.to_arrow(columns, filter))

    def to_pylist(self) -> list[dict[str, Any]]:
        """Read rows into dicts, by column name."""
        rows: list[dict[str, Any]] = self.to_arrow().to_pylist()
        return rows

    def head(self, count: int = _LISTED_ROWS) -> pd.DataFrame:
        """The first rows as a pandas DataFrame."""
        return _frame(repeated(lambda: self.dataset.head(count)))

    def to_batches(
        self, columns: Sequence[str] | None = None, filter: Filter = None
    ) -> Iterator[pa.RecordBatch]:
        """Read rows as record batches, so that memory stays bounded; arguments as for
        `to_arrow`."""
        return iter(self.dataset.to_batches(columns=self._chosen(columns), filter=filter))

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """The rows for DuckDB, Polars, pandas and others that take Arrow streams."""
        batches = self.dataset.scanner().to_reader()
        return batches.__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"<kdissect table {self.name}: {self.num_rows} rows, {len(self.schema)} columns>"

    def _repr_html_(self) -> str:
        rows: str = self.head().to_html(index=False, escape=True, max_rows=_LISTED_ROWS)
        return f"<p><b>{self.name}</b>: {self.num_rows} rows</p>{rows}"


def _frame(rows: pa.Table) -> pd.DataFrame:
    """Rows as pandas' nullable integers and booleans, other types as pyarrow gives them.

    Inside lists and structs they are Python's, with None for null: no integer becomes a float.
    """
    import pandas as pd

    kinds = {pa.bool_(): pd.BooleanDtype()}
    for bits in (8, 16, 32, 64):
        kinds[getattr(pa, f"int{bits}")()] = getattr(pd, f"Int{bits}Dtype")()
        kinds[getattr(pa, f"uint{bits}")()] = getattr(pd, f"UInt{bits}Dtype")()
    return rows.to_pandas(types_mapper=kinds.get, integer_object_nulls=True)


def _passing(exchanges: Table, selection: Selection) -> tuple[pa.Array, pa.Array]:
    """(ids of the selected exchanges, ids of their connections), both int64."""
    exchange_ids, connection_ids = [], []
    for batch in exchanges.to_batches(selection.columns):
        rows = pa.Table.from_batches([batch])
        chosen = selection.of_table(rows)
        kept = rows if chosen is None else rows.take(pa.array(chosen))
        exchange_ids.append(kept["exchange_id"].combine_chunks())
        connection_ids.append(kept["connection_id"].combine_chunks().unique())
    none = pa.array([], pa.int64())
    return pa.concat_arrays([none, *exchange_ids]), pa.concat_arrays(
        [none, *connection_ids]
    ).unique()


def _in_memory(name: str, rows: pa.Table) -> Table:
    return Table(name, pads.dataset(rows))


def _unpickled(name: str, rows: pa.Table) -> Table:
    return _in_memory(name, owned(rows))  # pickle leaves buffers over Python's bytes


class Tables(Mapping[str, Table]):
    """A table set: a mapping of tables by name.

    Read a table as an attribute, or by `api(name)`, `internal(name)` or `[name]`.

    A set can be pickled for other processes. Rows in memory travel with it; rows in files do not,
    so the other process must be able to open the same files.
    """

    captures: Table
    connections: Table
    exchanges: Table
    record_batches: Table
    records: Table
    group_events: Table
    transactions: Table
    fetch_sessions: Table
    topics: Table
    brokers: Table
    anomalies: Table

    def __init__(
        self,
        tables: dict[str, Table],
        manifest: dict[str, Any],
        notes: Sequence[str] = (),
        arguments: Mapping[str, Sequence[str]] | None = None,
        origin: tuple[Tables, Selection] | None = None,
    ) -> None:
        """notes: messages of the run that made the tables, for the user. arguments: of a command
        that reads these tables, by verb. origin: of a selection."""
        self._tables = tables
        self.manifest = manifest
        self.notes = list(notes)
        self.arguments = arguments or dict.fromkeys(_VERBS, ("CAPTURE",))
        self._origin = origin

    @property
    def names(self) -> list[str]:
        """Names of all tables: first the fixed ones, then those under apis/ and internal/,
        sorted."""
        rest = sorted(name for name in self._tables if name not in FIXED_TABLES)
        return [*FIXED_TABLES, *rest]

    def __getitem__(self, name: str) -> Table:
        try:
            return self._tables[name]
        except KeyError:
            if callable(getattr(Tables, name, None)):
                raise KeyError(f"no table {name!r}; {name}() is a method") from None
            raise KeyError(no_such("table", name, self.names)) from None

    def _ipython_key_completions_(self) -> list[str]:
        return self.names

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *FIXED_TABLES]

    if not TYPE_CHECKING:  # a checker knows the tables above, and no others

        def __getattr__(self, name: str) -> Table:
            if name in FIXED_TABLES:
                return self._tables[name]
            if name.startswith("_"):  # of Python and notebooks
                raise AttributeError(name)
            known = [each for each in dir(self) if not each.startswith("_")]
            raise AttributeError(no_such("table or method", name, [*known, *self.names]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._tables

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def api(self, name: str) -> Table:
        """The decoded requests and responses of one API, by Kafka's name of it ("Fetch").

        Raises KeyError if the captures hold no such message.
        """
        return self[f"apis/{name}"]

    def internal(self, name: str) -> Table:
        """The decoded records of an internal topic, by the name of their definition
        ("OffsetCommit").

        Raises KeyError if the captures hold no such record.
        """
        return self[f"internal/{name}"]

    def sql(self, query: str, *, memory_limit: str | None = None) -> Table:
        """Run one SQL query with DuckDB over the tables; returns the rows.

        Every table is a view: `exchanges`, `api_fetch` for ``apis/Fetch``,
        `internal_offset_commit`; so are `incidents` and `inventory`. A query is one statement that
        only reads.

        Args:
            query: the statement.
            memory_limit: DuckDB's, for example "2GB".

        Raises:
            ValueError: any other statement, or wrong SQL (`QueryError`).
        """
        with self.database(memory_limit=memory_limit) as database:
            return _in_memory("sql", database.query(query))

    def database(self, *, memory_limit: str | None = None) -> Database:
        """Open a DuckDB database with every table as a view, for several queries or streamed
        results."""
        from kdissect.sql import Database

        sources = {name: table.dataset for name, table in self._tables.items()}
        derived = {
            "incidents": lambda: self.incidents().to_arrow(),
            "inventory": lambda: self.inventory().to_arrow(),
        }
        return Database(sources, memory_limit=memory_limit, derived=derived)

    def incidents(self) -> Table:
        """Find the incidents in the tables; returns one row for each, the worst first.

        Those of a selection are found in the whole set: other exchanges may disprove an incident.
        docs/reference.md lists the columns; the fields of the schema carry their meanings.
        """
        from kdissect.incidents import find_incidents
        from kdissect.pipeline.selection import Selection

        whole, selection = self._origin or (self, None)
        exchange_ids = None
        if selection is not None:
            of_any_time = replace(selection, time_from_ns=None, time_to_ns=None)
            exchange_ids, _ = _passing(whole.exchanges, of_any_time)
        with whole._requests() as database:
            written = Selection.written(whole.manifest)
            rows = find_incidents(database, self.arguments, written, selection, exchange_ids)
        return _in_memory("incidents", rows)

    def inventory(self, since: Time | None = None) -> Table:
        """List the clients in the tables; returns one row for each client id at an address.

        docs/reference.md lists the columns; the fields of the schema carry their meanings.

        Args:
            since: a time. With it, the columns `change` and `changes` compare the requests from
                then on with those before.
        """
        from kdissect.sql.inventory import inventory

        since_us = None if since is None else time_ns(since) // 1000
        with self._requests() as database:
            return _in_memory("inventory", inventory(database, since_us))

    @contextmanager
    def _requests(self) -> Iterator[Database]:
        """Open a database with the base tables of `sql.requests`."""
        from kdissect.sql.requests import make_requests

        with self.database() as database:
            make_requests(database)
            yield database

    def report(
        self,
        out: PathLike | None = None,
        *,
        name: str | None = None,
        csv: bool = True,
        target: str = "4.0",
        since: Time | None = None,
    ) -> Report:
        """Write the report: one HTML page, with CSV files beside it.

        Args:
            out: the HTML file (default ``reports/NAME.html``). The CSV files are NAME-*.csv in the
                same folder. An existing file is replaced once the new one is complete.
            name: the page's (default: of the captures).
            csv: whether to write the CSV files.
            target: the release of Kafka that the clients have to work with.
            since: a time; the page shows which clients are new, gone or changed from then on.

        Raises:
            OutputError: `out` cannot be written.
            ValueError: the release is unknown.
        """
        from kdissect.report import Options, build

        since_us = None if since is None else time_ns(since) // 1000
        options = Options(target, since_us)
        return build(self, out, options, name=name, csv=csv)

    def diff(self, after: Tables, *, memory_limit: str | None = None) -> dict[str, Any]:
        """Compare this set with a later one; returns the document of ``diff --json``.

        Args:
            after: the later set.
            memory_limit: DuckDB's, for example "2GB".
        """
        from kdissect.diff.compare import compare

        return compare(self, after, memory_limit=memory_limit)

    def readiness(self, target: str = "4.0") -> dict[str, Any]:
        """Tell which clients would break on a release; returns the document of ``readiness
        --json``.

        Args:
            target: the release of Kafka.

        Raises:
            ValueError: the release is unknown.
        """
        from kdissect.readiness import assess

        with self._requests() as database:
            return assess(database, target)

    @property
    def plot(self) -> Plots:
        """Altair charts for notebooks: timeline, latency, topics_by_client, group, sequence."""
        from kdissect.plot import Plots

        return Plots(self)

    def write(self, out: PathLike, *, overwrite: bool = False) -> Tables:
        """Write the set to the folder or URL `out`, as `dissect` would; returns it opened from
        there.

        A saved state is not copied. Raises OutputError if `out` exists (without `overwrite`) or
        cannot be written.
        """
        target = os.fspath(out)
        manifest = {**self.manifest, "state": {"missing": "the set is a copy"}}
        with writing(target, overwrite), staging(target) as run_id:
            sink = ParquetSink(target, run_id, "w00000")
            for name in self.names:
                sink(name, self._tables[name].to_arrow())
            document = commit(target, run_id, sink.close(), manifest)
        return _opened(target, document, is_new=True)

    def __repr__(self) -> str:
        counts = ", ".join(f"{name} {self[name].num_rows}" for name in self.names)
        return f"<kdissect tables: {counts}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{name}</td><td style='text-align:right'>{self[name].num_rows}</td>"
            f"<td>{len(self[name].schema)}</td></tr>"
            for name in self.names
        )
        head = "<tr><th>table</th><th>rows</th><th>columns</th></tr>"
        return f"<table>{head}{rows}</table>"


def selected(tables: Tables, selection: Selection) -> Tables:
    """Return a set of the selected exchanges only, with the rows that belong to them.

    `connections` keeps those with a selected exchange. `anomalies` keeps those of such a
    connection and those without a connection. `captures`, `topics` and `brokers` keep all rows.
    The manifest's totals are the counts after the selection. The ids are read now, other rows
    on first use.
    """
    exchange_ids, connection_ids = _passing(tables.exchanges, selection)
    is_exchange = pc.field("exchange_id").isin(exchange_ids)
    of_connection = pc.field("connection_id").isin(connection_ids)
    kept = {}
    for name, table in tables.items():
        if name == "connections":
            rows = table.dataset.filter(of_connection)
        elif name == "anomalies":
            has_none = pc.field("exchange_id").is_null()
            is_around = pc.field("connection_id").is_null() | of_connection
            rows = table.dataset.filter(is_exchange | (has_none & is_around))
        elif name == "transactions":
            read = table.to_arrow()
            lists = read["exchange_ids"].combine_chunks()
            is_one = pc.is_in(lists.flatten(), value_set=exchange_ids)
            rows = pads.dataset(read.filter(any_of(lists, is_one)))
        elif "exchange_id" in table.schema.names:
            rows = table.dataset.filter(is_exchange)
        else:
            rows = table.dataset
        kept[name] = Table(name, rows)
    totals = {
        name: kept[name].num_rows if name in kept and name != "captures" else count
        for name, count in tables.manifest["totals"].items()
    }
    manifest = {**tables.manifest, "totals": totals, "selection": str(selection)}
    return Tables(kept, manifest, tables.notes, tables.arguments, (tables, selection))


def read(
    paths: PathLike | Sequence[PathLike],
    *,
    ports: int | Sequence[int] = (),
    reveal_secrets: bool = False,
    payload: Payload = "full",
    decode_values: DecodeValues | None = None,
    keylog: PathLike | Sequence[PathLike] = (),
    hosts: str | Sequence[str] = (),
    from_: Time | None = None,
    until: Time | None = None,
    limits: Limits | Mapping[str, int] | None = None,
    split_bytes: int | None = None,
    spool: str | None = None,
) -> Tables:
    """Dissect captures (files, folders, globs) in this process and keep the tables in memory.

    Args:
        paths: captures: files, folders, globs, URLs of object stores.
        ports: TCP ports on which to expect Kafka; detection still looks at the bytes.
        reveal_secrets: show passwords, tokens and sensitive configuration values.
        payload: what to show of records' keys and values: "full", "keys", "hash" or "none".
        decode_values: "json", "string" or "schema-registry-id" adds columns to `records`.
        keylog: files with TLS session secrets, in the format of SSLKEYLOGFILE.
        hosts: IP addresses; keep only connections from or to one of them.
        from_: keep only exchanges that begin at this time or later. A time is a datetime, a date
            (its start in UTC), text in RFC 3339, or seconds since 1970.
        until: keep only exchanges that begin before this time.
        limits: largest values accepted from a capture, by name (docs/limits.md).
        split_bytes: bytes of captures per task.
        spool: folder for unpacked copies.

    Raises:
        ValueError: an option is wrong.
        CaptureError: a named file is missing or is no capture.
    """
    options = Options.of(
        ports=ports, reveal_secrets=reveal_secrets, split_bytes=split_bytes, payload=payload,
        decode_values=decode_values, keylog=keylog, hosts=hosts, from_=from_, until=until,
        limits=limits,
    )  # fmt: skip
    began = time.perf_counter()
    sink = MemorySink(fixed_tables(decode_values))
    with planned(find_captures(paths_of(paths)), options, spool) as plan:
        summary = local.run(plan, sink)
        timings = {"session_start_s": 0.0, **summary.timings}
        timings["total_s"] = time.perf_counter() - began
        tables = sink.tables()
        manifest = new_manifest(plan, manifest_inputs(plan, summary.hashes), timings)
        manifest["totals"] |= {name: tables[name].num_rows for name in COUNTED_TABLES}
    made = {name: _in_memory(name, table) for name, table in tables.items()}
    arguments = reading_arguments(paths_of(paths), manifest)
    return Tables(made, manifest, arguments=dict.fromkeys(_VERBS, arguments))


def open_tables(path: PathLike | Sequence[PathLike]) -> Tables:
    """Open a table set in a folder or at a URL of an object store; rows are read on first use.

    path: one set, or several that then appear as one, for example one of each day.
    Raises CaptureError if there is no table set of this format, no path, or a capture in two sets.
    """
    sets = [_opened(root, read_manifest(root)) for root in paths_of(path)]
    if not sets:
        raise CaptureError("no table set: no path was given")
    return sets[0] if len(sets) == 1 else joined_sets(sets)


def _opened(root: str, manifest: dict[str, Any], *, is_new: bool = False) -> Tables:
    """The set at `root`. Files that this process has just written are opened on first use only."""
    tables = {}
    for name, entry in manifest["tables"].items():
        rows = partial(dataset, absolute(root), entry["files"])
        tables[name] = Table(name, rows if is_new else rows())
    shown = reading_arguments(capture_paths(manifest).values(), manifest)
    return Tables(tables, manifest, arguments={"show": shown, "sql": [root]})


def joined_sets(sets: Sequence[Tables]) -> Tables:
    """Return the rows of several table sets as one set.

    The ids of connections are read now, other rows on first use. Raises CaptureError if a capture
    is in two of the sets, or other files with the same packets: a connection's id is made from its
    first packet.
    """
    paths: dict[str, str] = {}
    seen = np.zeros(0, np.int64)
    for tables in sets:
        captures = capture_paths(tables.manifest)
        for digest in captures.keys() & paths.keys():
            raise CaptureError(
                f"{captures[digest]}: is in two of the sources, also as {paths[digest]}; "
                "name each capture once"
            )
        paths |= captures
        ids = tables.connections.to_arrow(["connection_id"])["connection_id"].to_numpy()
        if both := len(np.intersect1d(seen, ids)):
            raise CaptureError(
                f"{', '.join(captures.values())}: packets of it are in another source, too "
                f"({plural(both, 'connection')}); name each capture once"
            )
        seen = np.concatenate([seen, ids])
    names = dict.fromkeys(name for tables in sets for name in tables.names)
    first = sets[0].manifest
    totals = {
        name: sum(tables.manifest["totals"].get(name, 0) for tables in sets)
        for name in first["totals"]
    }
    manifest = {
        **first,
        "options_of_sets": [tables.manifest["options"] for tables in sets],
        "inputs": [item for tables in sets for item in tables.manifest["inputs"]],
        "totals": totals,
    }
    united = {
        name: Table(name, partial(_united, [each[name] for each in sets if name in each]))
        for name in names
    }
    notes = [note for tables in sets for note in tables.notes]
    arguments = {verb: [word for one in sets for word in one.arguments[verb]] for verb in _VERBS}
    return Tables(united, manifest, notes, arguments)


def _united(tables: Sequence[Table]) -> pads.Dataset:
    """The rows of tables of one name. Raises CaptureError if their columns differ in type."""
    if len(tables) == 1:
        return tables[0].dataset
    try:
        return pads.dataset([table.dataset for table in tables])
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise CaptureError(
            f"{tables[0].name}: different releases of kdissect wrote the sets ({error})"
        ) from error


def dissect(
    spark: SparkSession,
    paths: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    overwrite: bool = False,
    append: bool = False,
    keep_state: bool = False,
    read_again: bool = False,
    ports: int | Sequence[int] = (),
    reveal_secrets: bool = False,
    payload: Payload = "full",
    decode_values: DecodeValues | None = None,
    keylog: PathLike | Sequence[PathLike] = (),
    hosts: str | Sequence[str] = (),
    from_: Time | None = None,
    until: Time | None = None,
    limits: Limits | Mapping[str, int] | None = None,
    partition_by: PartitionBy | None = None,
    split_bytes: int | None = None,
    spool: str | None = None,
) -> Tables:
    """Dissect captures on the caller's Spark session and write a table set to `out`.

    The session is used and never stopped. Other options are those of `read`. The `notes` of the
    result say why captures were read again, what came late and what is open. After an error `out`
    is as it was before.

    Args:
        out: folder or URL of the table set.
        overwrite: replace a table set at `out`.
        append: add the captures to the set at `out`. The run that completes an exchange and those
            before it on its connection writes its row. If the set was written without state, its
            captures are read again, so they must still be in place.
        keep_state: save the state that a later append needs, beside the tables.
        partition_by: "day" divides the tables of exchanges and their records into folders
            ``date=YYYY-MM-DD``, by the UTC day on which an exchange began.
        read_again: append by reading the captures of the set again: the rows are those of one run.

    Raises:
        CaptureError: an input cannot be used.
        OutputError: `out` exists (without `overwrite` or `append`) or cannot be written.
    """
    from kdissect.pipeline import spark_session

    session_start_s = spark_session.start_seconds(spark)
    began = time.perf_counter() - session_start_s
    target = os.fspath(out)
    if overwrite and append:
        raise ValueError("overwrite and append exclude each other")
    if read_again and not append:
        raise ValueError("read_again is for append")
    options = Options.of(
        ports=ports, reveal_secrets=reveal_secrets, split_bytes=split_bytes, payload=payload,
        decode_values=decode_values, keylog=keylog, hosts=hosts, from_=from_, until=until,
        limits=limits, partition_by=partition_by,
    )  # fmt: skip
    spark_session.use_this_python(spark)
    named = paths_of(paths)
    keeps = keep_state or (append and not read_again)
    run = SetRun(spark, target, keeps, spool, began, session_start_s)
    notes: list[str] = []
    with writing(target, overwrite or append):
        if not append:
            notes = run.over(named, options)
        else:
            notes = run.appending(named, options, read_again)
    tables = _opened(target, run.manifest, is_new=True) if run.manifest else open_tables(target)
    tables.notes = notes
    return tables
