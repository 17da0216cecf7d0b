"""Captures as a Spark Python data source, ``format("kdissect")``.

    kdissect.register(spark)
    spark.read.format("kdissect").option("table", "exchanges").load("captures/")

A data source cannot shuffle. So the process that plans the query dissects the captures, once, into
a table set in a private folder, and tasks read its Parquet files. The folder's name is a hash of
paths, sizes, times of change, tags of objects, and options. It is removed a day after its last use.
For captures of many gigabytes use `kdissect.dissect`, which runs every step on all workers. On a
cluster all workers must be able to read the folder of the option `spool`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from kdissect import __version__
from kdissect.api import Tables, open_tables
from kdissect.capture.inputs import find_captures
from kdissect.codec.message_columns import body_type
from kdissect.errors import CaptureError
from kdissect.pipeline.options import Options
from kdissect.pipeline.set_run import dissect_here
from kdissect.pipeline.spark_session import use_this_python
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import SASL_TOKEN
from kdissect.tables.arrow_arrays import plain, plain_schema
from kdissect.tables.embedded import add_decoded
from kdissect.tables.schemas import api_schema, fixed_tables

NAME = "kdissect"
_KNOWN = (
    *("table", "path", "paths", "port", "keylog", "payload", "revealsecrets", "decodevalues"),
    *("host", "from", "until", "spool"),
)
_TRUE = ("true", "1", "yes")
KEPT_S = 86_400


class KdissectDataSource(DataSource):
    """The format "kdissect".

    Options, besides the path: `table` (default `exchanges`) and those of the command line:
    port, keylog, payload, revealSecrets, decodeValues, host, from, until, spool. Lists are
    comma-separated.
    """

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return from_arrow_schema(self._schema())

    def reader(self, schema: StructType) -> DataSourceReader:
        return _TableReader(self._table(), self._schema(), self._set)

    def _schema(self) -> pa.Schema:
        return schema_of(self._table(), self._options(), self._set)

    def _list(self, name: str) -> tuple[str, ...]:
        return tuple(
            part.strip() for part in (self.options.get(name) or "").split(",") if part.strip()
        )

    def _table(self) -> str:
        return self.options.get("table") or "exchanges"

    def _options(self) -> Options:
        unknown = sorted(set(map(str.lower, self.options)) - set(_KNOWN))
        if unknown:
            raise ValueError(f"kdissect has no option {unknown[0]!r}; it has {', '.join(_KNOWN)}")
        return Options.of(
            ports=tuple(int(port) for port in self._list("port")),
            keylog=self._list("keylog"),
            payload=self.options.get("payload") or "full",
            reveal_secrets=(self.options.get("revealSecrets") or "").lower() in _TRUE,
            decode_values=self.options.get("decodeValues"),
            hosts=self._list("host"),
            from_=self.options.get("from"),
            until=self.options.get("until"),
        )

    def _set(self) -> Tables:
        path, paths = self.options.get("path"), self.options.get("paths")
        named: Sequence[str] = json.loads(paths) if paths else [path] if path else []
        if not named:
            raise CaptureError("load() needs the path of a capture, a folder or a glob")
        return table_set(
            [_local(name) for name in named], self._options(), self.options.get("spool")
        )


def table_set(paths: Sequence[str], options: Options, spool: str | None) -> Tables:
    """The tables of the captures; dissect them if there is no set of them yet.

    Raises CaptureError if a named file is missing or no capture, or no file can be used.
    """
    inputs = find_captures(list(paths))
    home = _private_folder(spool)
    _remove_old(home)
    digest = hashlib.sha256(repr((__version__, sorted(paths), options)).encode())
    for item in inputs:
        digest.update(f"{item.path} {item.size} {item.tag}\n".encode())
    for path in (*(item.path for item in inputs), *options.keylog):
        if os.path.exists(path):
            state = os.stat(path)
            digest.update(f"{path} {state.st_size} {state.st_mtime_ns}\n".encode())
    folder = home / digest.hexdigest()[:32]
    if not folder.exists():
        made = Path(tempfile.mkdtemp(prefix="making-", dir=home))
        try:
            dissect_here(paths, options, str(made), spool)
            os.rename(made, folder)
        except OSError:
            if not folder.exists():  # otherwise another process finished first
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    os.utime(folder)
    return open_tables(str(folder))


def _private_folder(spool: str | None) -> Path:
    """A folder that only this user can read, since tables hold captured payload.

    Raises PermissionError if another user owns it or may read there.
    """
    home = Path(spool or tempfile.gettempdir(), f"kdissect-tables-{os.getuid()}")
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = home.lstat()  # a link may lead to a folder whose contents are not ours
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise PermissionError(f"{home} belongs to somebody else, or others may read there")
    return home


def _remove_old(home: Path) -> None:
    oldest = time.time() - KEPT_S
    for folder in home.iterdir():
        try:
            if folder.stat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            continue


def _local(path: str) -> str:
    return path.removeprefix("file://") if path.startswith("file:///") else path


def schema_of(
    table: str, options: Options, tables: Callable[[], Tables] | None = None
) -> pa.Schema:
    """Return a table's schema; raises ValueError if the table does not exist.

    tables: gives the set that has the schemas of ``internal/`` tables.
    """
    fixed = fixed_tables(options.decode_values)
    if table in fixed:
        return fixed[table]
    group, _, name = table.partition("/")
    if group == "apis" and name == SASL_TOKEN:
        return _api_schema(catalog.api("SaslAuthenticate").key, options, is_token=True)
    if group == "apis":
        return _api_schema(catalog.api(name).key, options)
    if group == "internal" and tables is not None:
        found = tables()
        if table not in found:
            raise ValueError(f"no record of these captures makes a table {table}")
        return plain_schema(found[table].schema)
    raise ValueError(f"no table {table!r}; there are {', '.join(fixed)}, apis/NAME, internal/NAME")


def _api_schema(api_key: int, options: Options, is_token: bool = False) -> pa.Schema:
    token = pa.struct([("auth_bytes", pa.binary())])
    sides = [token if is_token else body_type(api_key, side) for side in ("request", "response")]
    empty = [pa.array([], side) for side in sides]
    nesting = options.limits.nesting
    request, response, _ = add_decoded(api_key, empty[0], empty[1], options.reveal_secrets, nesting)
    return plain_schema(api_schema(request.type, response.type))


class _TableReader(DataSourceReader):
    """Tasks read the row groups of the table's Parquet files."""

    def __init__(self, table: str, schema: pa.Schema, tables: Callable[[], Tables]) -> None:
        self._table, self._schema, self._tables = table, schema, tables

    def partitions(self) -> Sequence[InputPartition]:
        tables = self._tables()
        if self._table not in tables:
            return []
        files = tables[self._table].dataset.get_fragments()
        return [InputPartition(part) for file in files for part in file.split_by_row_group()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for batch in partition.value.to_batches(batch_size=65_536):
            yield from plain(pa.Table.from_batches([batch]), self._schema).to_batches()


def register(spark: SparkSession) -> None:
    """Register the format "kdissect" with a Spark session."""
    use_this_python(spark)
    spark.dataSource.register(KdissectDataSource)
