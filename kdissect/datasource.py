"""Captures as a Spark Python data source, ``format("kdissect")``.

    kdissect.register(spark)
    spark.read.format("kdissect").option("table", "exchanges").load("captures/")

A data source cannot shuffle. So captures are scanned and assembled once, where Spark plans the
query (`pipeline.disk_index`), and tasks decode slots of equal bytes. For captures of many gigabytes
use `kdissect.dissect`, which runs every step on all workers. On a cluster all workers must be able
to read the captures and the folder of the option `spool`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from kdissect.codec.message_columns import body_type
from kdissect.errors import CaptureError
from kdissect.pipeline.disk_index import STORIES, Index, make_index
from kdissect.pipeline.filters import time_ns
from kdissect.pipeline.limits import Limits
from kdissect.pipeline.options import Options
from kdissect.pipeline.spark_session import use_this_python
from kdissect.protocol import catalog
from kdissect.tables.arrow_arrays import plain
from kdissect.tables.embedded import add_decoded
from kdissect.tables.schemas import api_schema, fixed_tables

NAME = "kdissect"
_KNOWN = ("table", "path", "paths", "port", "keylog", "payload", "revealsecrets", "decodevalues",
          "host", "from", "to", "spool", "splits")  # fmt: skip
_TRUE = ("true", "1", "yes")


class KdissectDataSource(DataSource):
    """The format "kdissect".

    Options, besides the path: `table` (default `exchanges`) and those of the command line: port,
    keylog, payload, revealSecrets, decodeValues, host, from, to, spool. `splits` is the number of
    tasks to aim for (default: cores of this machine). Lists are comma-separated.
    """

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return from_arrow_schema(schema_of(self._table(), self._options(), self._index))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._options()
        return _TableReader(self._table(), schema_of(self._table(), options, self._index), self)

    def _option(self, name: str) -> str | None:
        value: str | None = self.options.get(name)
        return value

    def _list(self, name: str) -> tuple[str, ...]:
        return tuple(part.strip() for part in (self._option(name) or "").split(",") if part.strip())

    def _table(self) -> str:
        return self._option("table") or "exchanges"

    def _options(self) -> Options:
        unknown = sorted(set(map(str.lower, self.options)) - set(_KNOWN))
        if unknown:
            raise ValueError(f"kdissect has no option {unknown[0]!r}; it has {', '.join(_KNOWN)}")
        first, last = self._option("from"), self._option("to")
        return Options(
            ports=tuple(int(port) for port in self._list("port")),
            keylog=self._list("keylog"),
            payload=self._option("payload") or "full",
            reveal_secrets=(self._option("revealSecrets") or "").lower() in _TRUE,
            decode_values=self._option("decodeValues"),
            hosts=self._list("host"),
            time_from_ns=None if first is None else time_ns(first),
            time_to_ns=None if last is None else time_ns(last),
            limits=Limits(),
        )

    def _index(self) -> Index:
        path, paths = self._option("path"), self._option("paths")
        named: Sequence[str] = json.loads(paths) if paths else [path] if path else []
        if not named:
            raise CaptureError("load() needs the path of a capture, a folder or a glob")
        local = [_local(name) for name in named]
        splits = int(self._option("splits") or os.cpu_count() or 1)
        return make_index(local, self._options(), self._option("spool"), splits)


def _local(path: str) -> str:
    return path.removeprefix("file://") if path.startswith("file:///") else path


def schema_of(table: str, options: Options, index: Callable[[], Index] | None = None) -> pa.Schema:
    """Return a table's schema; raises ValueError if the table does not exist.

    Schemas of ``internal/`` tables are read from the index, whose captures must contain such
    records.
    """
    fixed = fixed_tables(options.decode_values)
    if table in fixed:
        return fixed[table]
    group, _, name = table.partition("/")
    if group == "apis" and name == "SaslToken":
        return _api_schema(catalog.api("SaslAuthenticate").key, options, is_token=True)
    if group == "apis":
        return _api_schema(catalog.api(name).key, options)
    if group == "internal" and index is not None:
        captured = index()
        for slot in captured.slots():
            for rows in captured.table(table, slot):
                return _plain_schema(rows.schema)
        raise ValueError(f"no record of these captures makes a table {table}")
    raise ValueError(f"no table {table!r}; there are {', '.join(fixed)}, apis/NAME, internal/NAME")


def _api_schema(api_key: int, options: Options, is_token: bool = False) -> pa.Schema:
    token = pa.struct([("auth_bytes", pa.binary())])
    sides = [token if is_token else body_type(api_key, side) for side in ("request", "response")]
    empty = [pa.array([], side) for side in sides]
    nesting = options.limits.nesting
    request, response, _ = add_decoded(api_key, empty[0], empty[1], options.reveal_secrets, nesting)
    return _plain_schema(api_schema(request.type, response.type))


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema with the value types of dictionaries."""
    return pa.schema(
        [
            field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
            for field in schema
        ]
    )


class _Slot(InputPartition):
    """The part of one task: a slot's rows of the table, or the rows of the stories (slot -1)."""

    def __init__(self, folder: str, slot: int) -> None:
        super().__init__(slot)
        self.folder, self.slot = folder, slot


class _TableReader(DataSourceReader):
    def __init__(self, table: str, schema: pa.Schema, source: KdissectDataSource) -> None:
        self._table, self._schema, self._source = table, schema, source

    def partitions(self) -> Sequence[InputPartition]:
        index = self._source._index()
        partitions = (
            [] if self._table in STORIES else [_Slot(index.folder, n) for n in index.slots()]
        )
        if index.has_stories(self._table):
            partitions.append(_Slot(index.folder, -1))
        return partitions

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Slot)
        index = Index(partition.folder)
        if partition.slot < 0:
            tables = index.stories(self._table)
        else:
            tables = index.table(self._table, partition.slot)
        for table in tables:
            yield from plain(table, self._schema).to_batches(max_chunksize=65_536)


def register(spark: SparkSession) -> None:
    """Register the format "kdissect" with a Spark session."""
    use_this_python(spark)
    spark.dataSource.register(KdissectDataSource)
