"""The public Python API: `read`, `open`, `dissect`, and the table handles they give."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as pads

from kdissect import __version__
from kdissect.background import Background
from kdissect.pipeline import local
from kdissect.pipeline.append import extended
from kdissect.pipeline.choose import time_ns
from kdissect.pipeline.commit import absolute, check_out, commit, dataset, read_manifest, staging
from kdissect.pipeline.limits import Limits
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import check_unchanged, manifest_inputs, planned
from kdissect.pipeline.sink import MemorySink, ParquetSink, StagedFile
from kdissect.pipeline.steps import RunPlan
from kdissect.tables.schemas import FIXED_TABLES, fixed_tables

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import SparkSession

    from kdissect.plot import Plots
    from kdissect.sql import Database

PathLike = str | os.PathLike[str]
Time = str | float | datetime  # as `kdissect.pipeline.choose.time_ns` reads it
Filter = Any  # a pyarrow.dataset.Expression, or None
_LISTED_ROWS = 10


class Table:
    """One table: a handle on rows in memory or in Parquet files, read when asked."""

    def __init__(self, name: str, source: pads.Dataset) -> None:
        self.name = name
        self._source = source

    def __reduce__(self) -> tuple[Any, ...]:
        """Files travel as their names, rows in memory as they are."""
        if isinstance(self._source, pads.InMemoryDataset):
            return _in_memory, (self.name, self._source.to_table())
        return Table, (self.name, self._source)

    @property
    def schema(self) -> pa.Schema:
        return self._source.schema

    @property
    def dataset(self) -> pads.Dataset:
        """The rows as a pyarrow dataset, for libraries that take one."""
        return self._source

    @property
    def num_rows(self) -> int:
        return int(self._source.count_rows())

    def to_arrow(self, columns: Sequence[str] | None = None, filter: Filter = None) -> pa.Table:
        """Rows as a pyarrow.Table; `filter` is a pyarrow.dataset expression."""
        return self._source.to_table(
            columns=None if columns is None else list(columns), filter=filter
        )

    def to_pandas(
        self, columns: Sequence[str] | None = None, filter: Filter = None
    ) -> pd.DataFrame:
        """Rows as a pandas frame."""
        return self.to_arrow(columns, filter).to_pandas()

    def to_batches(
        self, columns: Sequence[str] | None = None, filter: Filter = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows as record batches, in bounded memory."""
        chosen = None if columns is None else list(columns)
        yield from self._source.to_batches(columns=chosen, filter=filter)

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"<kdissect table {self.name}: {self.num_rows} rows, {len(self.schema)} columns>"

    def _repr_html_(self) -> str:
        head = self._source.head(_LISTED_ROWS).to_pandas()
        rows: str = head.to_html(index=False, escape=True, max_rows=_LISTED_ROWS)
        return f"<p><b>{self.name}</b>: {self.num_rows} rows</p>{rows}"


def _in_memory(name: str, rows: pa.Table) -> Table:
    return Table(name, pads.dataset(rows))


class Tables:
    """A table set: every table by attribute, `api(name)` or `internal(name)`.

    It can be pickled, for other processes: of files their names travel, which must be there too,
    of tables in memory all rows.
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

    def __init__(self, tables: dict[str, Table], manifest: dict[str, Any]) -> None:
        self._tables = tables
        self.manifest = manifest

    @property
    def names(self) -> list[str]:
        """Names of all tables: the fixed ones, then apis/ and internal/ as met."""
        rest = sorted(name for name in self._tables if name not in FIXED_TABLES)
        return [*FIXED_TABLES, *rest]

    def __getitem__(self, name: str) -> Table:
        try:
            return self._tables[name]
        except KeyError:
            raise KeyError(f"no table {name!r}; there are {', '.join(self.names)}") from None

    def __getattr__(self, name: str) -> Table:
        if name in FIXED_TABLES:
            return self._tables[name]
        raise AttributeError(name)

    def __contains__(self, name: str) -> bool:
        return name in self._tables

    def api(self, name: str) -> Table:
        """Decoded messages of one API, by Kafka's name of it ("Fetch")."""
        return self[f"apis/{name}"]

    def internal(self, name: str) -> Table:
        """Decoded records of internal topics, by the definition's name ("OffsetCommit")."""
        return self[f"internal/{name}"]

    def sql(self, query: str, *, memory_limit: str | None = None) -> pa.Table:
        """Rows of a query that DuckDB answers; every table is a view.

        Views are `exchanges`, `api_fetch` for ``apis/Fetch``, `internal_offset_commit`. A query is
        one statement that reads; anything else, and wrong SQL, raises ValueError (`QueryError`).
        """
        with self.database(memory_limit=memory_limit) as database:
            return database.query(query)

    def database(self, *, memory_limit: str | None = None) -> Database:
        """The tables as views of a DuckDB database: for several queries, or streamed results."""
        from kdissect.sql import Database

        sources = {name: table.dataset for name, table in self._tables.items()}
        return Database(sources, memory_limit=memory_limit)

    @property
    def plot(self) -> Plots:
        """Plots for notebooks (Altair): timeline, latency, topics_by_client, group, sequence."""
        from kdissect.plot import Plots

        return Plots(self)

    def write(self, out: PathLike, *, overwrite: bool = False) -> Tables:
        """Write the table set that `dissect` would write; returns it, opened."""
        target = os.fspath(out)
        check_out(target, overwrite)
        with staging(target) as run_id:
            sink = ParquetSink(target, run_id, "w00000")
            for name in self.names:
                sink(name, self._tables[name].to_arrow())
            check_out(target, overwrite)  # another run may have been quicker
            commit(target, run_id, sink.close(), self.manifest)
        return open_tables(target)

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


def _paths(paths: PathLike | Sequence[PathLike]) -> list[str]:
    if isinstance(paths, str | os.PathLike):
        return [os.fspath(paths)]
    return [os.fspath(path) for path in paths]


def _ports(given: int | Sequence[int]) -> tuple[int, ...]:
    """One port, or several. Raises ValueError for what is no number."""
    several = (given,) if isinstance(given, int | str) else given
    try:
        return tuple(operator.index(port) for port in several)
    except TypeError:
        raise ValueError(f"ports: {given!r} is no number of a TCP port, nor several") from None


def read(
    paths: PathLike | Sequence[PathLike],
    *,
    ports: int | Sequence[int] = (),
    reveal_secrets: bool = False,
    payload: str = "full",
    decode_values: str | None = None,
    keylog: PathLike | Sequence[PathLike] = (),
    hosts: str | Sequence[str] = (),
    time_from: Time | None = None,
    time_to: Time | None = None,
    limits: Limits | Mapping[str, int] | None = None,
    split_bytes: int | None = None,
    spool: str | None = None,
) -> Tables:
    """Dissect captures (files, folders, globs) in this process; the tables stay in memory.

    payload: "full", "keys", "hash" or "none", how much of the records' keys and values is shown.
    decode_values: "json", "string" or "schema-registry-id" adds columns to `records`.
    keylog: files with the secrets of TLS connections, in the format of SSLKEYLOGFILE.
    hosts: addresses; only connections of theirs. time_from, time_to: only exchanges that begin in
    this range (datetime, RFC 3339 or seconds since 1970; the end is outside).
    limits: how far an input may go before it is a fault, by name (docs/limits.md).
    Raises ValueError for an option's value, CaptureError when a named file is missing or is no
    capture.
    """
    options = Options(
        ports=_ports(ports),
        reveal_secrets=reveal_secrets,
        split_bytes=split_bytes,
        payload=payload,
        decode_values=decode_values,
        keylog=tuple(_paths(keylog)),
        hosts=(hosts,) if isinstance(hosts, str) else tuple(hosts),
        time_from_ns=None if time_from is None else time_ns(time_from),
        time_to_ns=None if time_to is None else time_ns(time_to),
        limits=Limits.of(limits),
    )
    began = time.perf_counter()
    sink = MemorySink(fixed_tables(decode_values))
    with planned(_paths(paths), options, 1, spool) as plan:
        inputs = Background(lambda: manifest_inputs(plan))
        result = local.run(plan, sink)
        timings = {"session_start_s": 0.0, **result["timings"]}
        timings["total_s"] = time.perf_counter() - began
        tables = sink.tables()
        rows = {name: table.num_rows for name, table in tables.items()}
        manifest = _manifest(plan, inputs.result(), timings, rows)
    return Tables({name: _in_memory(name, table) for name, table in tables.items()}, manifest)


def open_tables(path: PathLike) -> Tables:
    """Open a table set, in a folder or at a URL of an object store, lazily.

    Raises CaptureError where there is none.
    """
    root = os.fspath(path)
    manifest = read_manifest(root)
    tables = {
        name: Table(name, dataset(root, entry["files"]))
        for name, entry in manifest["tables"].items()
    }
    return Tables(tables, manifest)


def dissect(
    spark: SparkSession,
    paths: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    overwrite: bool = False,
    append: bool = False,
    ports: int | Sequence[int] = (),
    reveal_secrets: bool = False,
    payload: str = "full",
    decode_values: str | None = None,
    keylog: PathLike | Sequence[PathLike] = (),
    hosts: str | Sequence[str] = (),
    time_from: Time | None = None,
    time_to: Time | None = None,
    limits: Limits | Mapping[str, int] | None = None,
    split_bytes: int | None = None,
    spool: str | None = None,
    session_start_s: float = 0.0,
) -> Tables:
    """Dissect captures on the caller's Spark session into a table set at `out`.

    The session is used, never stopped. Options as in `read`. Raises CaptureError for unusable
    inputs, OutputError when `out` exists (without `overwrite` or `append`) or cannot be written;
    what was there stays intact. append: the captures of the set at `out`, which must still be
    there, and these make the new set; connections that go on are one (pipeline/append.py).
    """
    from kdissect.pipeline import spark as on_spark

    began = time.perf_counter() - session_start_s
    target = os.fspath(out)
    if overwrite and append:
        raise ValueError("overwrite and append exclude each other")
    check_out(target, overwrite or append)
    options = Options(
        ports=_ports(ports),
        reveal_secrets=reveal_secrets,
        split_bytes=split_bytes,
        payload=payload,
        decode_values=decode_values,
        keylog=tuple(_paths(keylog)),
        hosts=(hosts,) if isinstance(hosts, str) else tuple(hosts),
        time_from_ns=None if time_from is None else time_ns(time_from),
        time_to_ns=None if time_to is None else time_ns(time_to),
        limits=Limits.of(limits),
    )
    on_spark.use_this_python(spark)
    cores = on_spark.parallelism(spark)
    named = _paths(paths)
    if append:
        named, options = extended(target, named, options)
    walk_pieces = on_spark.walk_pieces(spark)
    with planned(named, options, cores, spool, walk_pieces) as plan, staging(target) as run_id:
        inputs = Background(lambda: manifest_inputs(plan))
        files: list[StagedFile]
        if plan.splits:
            files, result = on_spark.run(spark, plan, absolute(target), run_id)
        else:
            sink = ParquetSink(target, run_id, "empty")
            result = local.run(plan, sink)
            files = sink.close()
        rows: dict[str, int] = {}
        for file in files:
            rows[file.table] = rows.get(file.table, 0) + file.row_count
        timings = {"session_start_s": session_start_s, **result["timings"]}
        timings["total_s"] = time.perf_counter() - began
        check_unchanged(plan)
        check_out(target, overwrite or append)  # another run may have been quicker
        commit(target, run_id, files, _manifest(plan, inputs.result(), timings, rows))
    return open_tables(target)


def _manifest(
    plan: RunPlan,
    inputs: list[dict[str, Any]],
    timings: dict[str, float],
    rows: dict[str, int],
) -> dict[str, Any]:
    totals = {
        "captures": sum(info.source >= 0 for info in plan.captures),
        "packets": sum(info.packet_count for info in plan.captures),
        "bytes": plan.byte_count,
        **{name: rows.get(name, 0) for name in FIXED_TABLES if name != "captures"},
    }
    return {
        "program_version": __version__,
        "options": plan.options.to_json(),
        "inputs": inputs,
        "totals": totals,
        "timings": {name: round(value, 6) for name, value in timings.items()},
    }
