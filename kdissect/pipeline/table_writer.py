"""Sinks for tables: in memory, or Parquet files staged by one task attempt.

The files of an attempt have unique names; `table_set.commit` publishes those of attempts that
succeeded.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kdissect.pipeline.set_folder import SetFolder
from kdissect.pipeline.step_rows import (
    OPEN_CONNECTIONS,
    STATE,
    STATE_KNOWN,
    STATE_OPEN,
    STORY_ANOMALIES,
    TABLE_OF,
)
from kdissect.tables.arrow_arrays import owned, plain, plain_schema
from kdissect.tables.schemas import FIXED_TABLES

ROW_GROUP_BYTES = 64 << 20
COMPRESSION = "zstd"
COMPRESSION_LEVEL = 1
# written anew by every run that adds to a set
REWRITTEN = frozenset(
    (
        *("topics", "brokers", "group_events", "transactions", "fetch_sessions"),
        *(OPEN_CONNECTIONS, STORY_ANOMALIES, STATE_OPEN, STATE_KNOWN),
    )
)
# the rows of other tables arrive in the order of their exchanges' times
ORDERED_BY = {"connections": "first_time", "group_events": "time", "transactions": "begin_time"}


class MemorySink:
    """Collects tables by name in Arrow's own memory, with plain types (no dictionaries).

    fixed: schemas of tables that exist even if they are empty (schemas.fixed_tables).
    """

    def __init__(self, fixed: dict[str, pa.Schema] = FIXED_TABLES) -> None:
        self.fixed = fixed
        self.parts: dict[str, list[pa.Table]] = {}

    def __call__(self, name: str, table: pa.Table) -> None:
        name = TABLE_OF.get(name, name)
        rows = plain(owned(table), self.fixed.get(name, table.schema))
        self.parts.setdefault(name, []).append(rows)

    def tables(self) -> dict[str, pa.Table]:
        """Every fixed table, also empty ones, and all others that got rows."""
        tables = {name: schema.empty_table() for name, schema in self.fixed.items()}
        for name, parts in self.parts.items():
            tables[name] = pa.concat_tables(parts)
        return tables


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A finished file of an attempt.

    path: where it lies below the set's folder. is_final: no later capture changes its rows.
    """

    table: str
    path: str
    row_count: int
    is_final: bool = True


class _Writer:
    """Writes one table's file of one attempt, and buffers rows into row groups.

    open_file: opens the file at `path`.
    """

    def __init__(self, name: str, path: str, open_file: Callable[[str], pa.NativeFile]) -> None:
        self.name = name
        self.path = path
        self._open_file = open_file
        self._stream: pa.NativeFile | None = None
        self.row_count = 0
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0
        self._writer: pq.ParquetWriter | None = None

    def add(self, table: pa.Table) -> None:
        if not table.num_rows:
            return
        table = plain(table, plain_schema(table.schema))
        self._pending.append(table)
        self._pending_bytes += table.nbytes
        if self._pending_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        table = pa.concat_tables(self._pending)
        self._pending, self._pending_bytes = [], 0
        order = ORDERED_BY.get(TABLE_OF.get(self.name, self.name))
        if order is not None:
            # the threads of `sort_by` may hold columns until the process ends (see `owned`)
            table = table.take(pc.sort_indices(table, [(order, "ascending")]))
        if self._writer is None:
            self._stream = self._open_file(self.path)
            self._writer = pq.ParquetWriter(
                self._stream,
                table.schema,
                compression=COMPRESSION,
                compression_level=COMPRESSION_LEVEL,
                use_dictionary=[f.name for f in table.schema if pa.types.is_string(f.type)],
                column_encoding=_delta_columns(table.schema),
            )
        self._writer.write_table(table)
        self.row_count += table.num_rows

    def close(self) -> None:
        if self._pending:
            self._flush()
        for opened in (self._writer, self._stream):
            if opened is not None:
                opened.close()


def _delta_columns(schema: pa.Schema) -> dict[str, str]:
    """Delta encoding for times, positions and counts, whose differences are small; ids are none."""
    return {
        field.name: "DELTA_BINARY_PACKED"
        for field in schema
        if pa.types.is_timestamp(field.type)
        or (pa.types.is_int64(field.type) and not field.name.endswith("_id"))
    }


class ParquetSink:
    """Writes the files of one attempt: <table>/part-<attempt>-<run>.parquet, staged as
    `SetFolder.staged` says."""

    def __init__(self, out: str, run_id: str, label: str) -> None:
        self.run_id = run_id
        self.attempt = f"{label}-{uuid.uuid4().hex[:12]}"
        self.place = SetFolder(out)
        self.place.check_open(run_id)
        self._writers: dict[str, _Writer] = {}

    def __call__(self, name: str, table: pa.Table) -> None:
        if name not in self._writers:
            kind = "part-open" if name in TABLE_OF else "part"  # an attempt may write both
            folder = TABLE_OF.get(name, name)
            file = f"{folder}/{kind}-{self.attempt}-{self.run_id}.parquet"
            path = self.place.staged(self.run_id, self.attempt, file)
            self._writers[name] = _Writer(name, path, self._open)
        self._writers[name].add(table)

    def _open(self, path: str) -> pa.NativeFile:
        self.place.check_open(self.run_id)
        stream = self.place.open_output(path)
        if f"/{STATE}/" in path:  # captured bytes, which only the user may read
            os.chmod(self.place.path(path), 0o600)
        return stream

    def close(self) -> list[StagedFile]:
        files = []
        for name, writer in self._writers.items():
            writer.close()
            if writer.row_count:
                table, is_final = TABLE_OF.get(name, name), name not in REWRITTEN
                files.append(StagedFile(table, writer.path, writer.row_count, is_final))
        return files
