"""Sinks for tables: in memory, or Parquet files staged by one task attempt.

The files of an attempt have unique names; `table_set.commit` publishes those of attempts that
succeeded.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kdissect.pipeline.set_folder import SetFolder
from kdissect.pipeline.step_rows import (
    DATE,
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
FILE_BYTES_MAX = 512 << 20
COMPRESSION = "zstd"
COMPRESSION_LEVEL = 1
# of a column before compression: zstd begins each page without history, and the default is 1 MB
PAGE_BYTES = 4 << 20
# written anew by every run that adds to a set
REWRITTEN = frozenset(
    (
        *("topics", "brokers", "group_events", "transactions", "fetch_sessions"),
        *(OPEN_CONNECTIONS, STORY_ANOMALIES, STATE_OPEN, STATE_KNOWN),
    )
)
# Columns with the time of a row; the first one counts that is not null. Rows without such a column
# arrive in the order of their exchanges.
ORDERED_BY = {
    "connections": ["first_time"],
    "group_events": ["time"],
    "transactions": ["begin_time"],
}
EXCHANGE_TIMES = ["request_time", "response_time"]
NEVER = (1 << 63) - 1


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
    """Writes one table's rows of one attempt, and buffers them into row groups.

    Rows of a file ascend in time: where it goes back between row groups, and where a file is large
    enough, another one begins. open_file: opens a file by its number and day, and says where it
    lies. files: number of rows by path.
    """

    def __init__(
        self, name: str, open_file: Callable[[int, str], tuple[str, pa.NativeFile]]
    ) -> None:
        self._open_file = open_file
        self._day = ""
        self._times = ORDERED_BY.get(TABLE_OF.get(name, name), EXCHANGE_TIMES)
        self._last = -NEVER  # latest time in the file
        self._stream: pa.NativeFile | None = None
        self._writer: pq.ParquetWriter | None = None
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0
        self.files: dict[str, int] = {}

    def add(self, table: pa.Table, day: str) -> None:
        if not table.num_rows:
            return
        if day != self._day:
            self.close()
            self._day = day
        table = plain(table, plain_schema(table.schema))
        self._pending.append(table)
        self._pending_bytes += table.nbytes
        if self._pending_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        table = self._in_order(pa.concat_tables(self._pending))
        self._pending, self._pending_bytes = [], 0
        if self._writer is None or self._stream is None:
            path, self._stream = self._open_file(len(self.files), self._day)
            self.files[path] = 0
            self._writer = pq.ParquetWriter(
                self._stream,
                table.schema,
                compression=COMPRESSION,
                compression_level=COMPRESSION_LEVEL,
                use_dictionary=[f.name for f in table.schema if pa.types.is_string(f.type)],
                column_encoding=_delta_columns(table.schema),
                data_page_size=PAGE_BYTES,
            )
        self._writer.write_table(table)
        self.files[next(reversed(self.files))] += table.num_rows
        if self._stream.tell() + ROW_GROUP_BYTES > FILE_BYTES_MAX:
            self._end_file()

    def _in_order(self, table: pa.Table) -> pa.Table:
        """The rows in order of time; ends the file if they begin before its last one."""
        if self._times[0] not in table.column_names:
            return table
        column = pc.coalesce(*(table[name] for name in self._times)).cast(pa.int64())
        time = column.fill_null(NEVER).to_numpy()
        if np.any(time[1:] < time[:-1]):
            order = np.argsort(time, kind="stable")
            # the threads of `sort_by` may hold columns until the process ends (see `owned`)
            table, time = table.take(pa.array(order)), time[order]
        if time[0] < self._last:
            self._end_file()
        self._last = int(time[-1])
        return table

    def _end_file(self) -> None:
        for opened in (self._writer, self._stream):
            if opened is not None:
                opened.close()
        self._writer = self._stream = None

    def close(self) -> None:
        if self._pending:
            self._flush()
        self._end_file()


def _delta_columns(schema: pa.Schema) -> dict[str, str]:
    """Delta encoding for times, positions and counts, whose differences are small; ids are none."""
    return {
        field.name: "DELTA_BINARY_PACKED"
        for field in schema
        if pa.types.is_timestamp(field.type)
        or (pa.types.is_int64(field.type) and not field.name.endswith("_id"))
    }


class ParquetSink:
    """Writes the files of one attempt: <table>/part-<attempt>-<number>-<run>.parquet, staged as
    `SetFolder.staged` says. Rows for <table>/date=<day> lie in that folder of the table."""

    def __init__(self, out: str, run_id: str, label: str) -> None:
        self.run_id = run_id
        self.attempt = f"{label}-{uuid.uuid4().hex[:12]}"
        self.place = SetFolder(out)
        self.place.check_open(run_id)
        self._writers: dict[str, _Writer] = {}

    def __call__(self, name: str, table: pa.Table) -> None:
        name, _, day = name.partition(DATE)
        if name not in self._writers:
            self._writers[name] = _Writer(name, partial(self._open, name))
        self._writers[name].add(table, day)

    def _open(self, name: str, number: int, day: str) -> tuple[str, pa.NativeFile]:
        kind = "part-open" if name in TABLE_OF else "part"  # an attempt may write both
        folder = TABLE_OF.get(name, name) + (DATE + day if day else "")
        file = f"{folder}/{kind}-{self.attempt}-{number:03}-{self.run_id}.parquet"
        path = self.place.staged(self.run_id, self.attempt, file)
        self.place.check_open(self.run_id)
        stream = self.place.open_output(path)
        if f"/{STATE}/" in path:  # captured bytes, which only the user may read
            os.chmod(self.place.path(path), 0o600)
        return path, stream

    def close(self) -> list[StagedFile]:
        files = []
        for name, writer in self._writers.items():
            writer.close()
            table, is_final = TABLE_OF.get(name, name), name not in REWRITTEN
            files += [StagedFile(table, *file, is_final) for file in writer.files.items()]
        return files
