"""Micro-batches of a folder stream without Spark: its stages, with states in memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import Row

from kdissect import folder_stream
from kdissect.datasource import schema_of
from kdissect.folder_stream import _Connections, _Messages, _rows_stage, _scan_stage
from kdissect.pipeline.options import Options
from kdissect.pipeline.selection import duration_ms


class State:
    """The handle of one key, its value state and its timers."""

    def __init__(self) -> None:
        self.value: Any = None
        self.timers: set[int] = set()

    def getValueState(self, *_: str) -> "State":
        return self

    def get(self) -> Any:
        return self.value

    def update(self, value: Any) -> None:
        self.value = value

    def registerTimer(self, expiry_ms: int) -> None:
        self.timers.add(expiry_ms)


class Watermark:
    def __init__(self, milliseconds: int) -> None:
        self.milliseconds = milliseconds

    def getCurrentWatermarkInMs(self) -> int:
        return self.milliseconds


class Query:
    """A query over a folder; `batch` is a micro-batch with so many tasks.

    late_packets: sum of the metric so far.
    """

    def __init__(
        self, folder: Path, table: str = "exchanges", late: str = "10m", **options: Any
    ) -> None:
        self.folder, self.table, self.late_ms = str(folder), table, int(duration_ms(late))
        self.options = Options(**options)
        self.connections: dict[int, State] = {}
        self.messages: dict[int, State] = {}
        self.read: set[str] = set()
        self.watermark_ms = self.newest_ms = self.late_packets = 0

    def batch(self, tasks: int = 3) -> pa.Table:
        """The rows from new files, and from timers when the watermark has moved."""
        listed = folder_stream._visible(folder_stream.listed(self.folder))
        files = [f"file:{path}" for path in listed if path not in self.read]
        self.read |= {uri.removeprefix("file:") for uri in files}
        rows = []
        for number in range(tasks):
            uris = pa.array(files[number::tasks], pa.string())
            scan = _scan_stage(self.folder, self.options)
            for batch in scan(iter([pa.RecordBatch.from_pydict({"path": uris})])):
                for row in batch.to_pylist():
                    self.newest_ms = max(self.newest_ms, int(row.pop("time").timestamp() * 1000))
                    rows.append(Row(**row))
        found = [self._run(rows)]
        moved_ms = self.newest_ms - self.late_ms
        while moved_ms > self.watermark_ms:
            self.watermark_ms = moved_ms
            found.append(self._run([]))
        return pa.concat_tables(found, promote_options="permissive")

    def _run(self, rows: list[Row]) -> pa.Table:
        first = _Connections(self.table, self.options, self.late_ms)
        parts = list(self._step(first, self.connections, rows))
        parts = list(self._step(_Messages(self.table, self.options), self.messages, parts))
        self.late_packets += sum(part.late_packets for part in parts)
        data = pa.array([part.data for part in parts], pa.binary())
        schema = schema_of(self.table, self.options)
        batches = _rows_stage(schema)(iter([pa.RecordBatch.from_pydict({"data": data})]))
        return pa.Table.from_batches(batches, schema)

    def _step(self, processor: Any, states: dict[int, State], rows: list[Row]) -> Iterator[Row]:
        now = Watermark(self.watermark_ms)
        for bucket in sorted({row.bucket for row in rows} | states.keys()):
            state = states.setdefault(bucket, State())
            processor.init(state)
            own = [row for row in rows if row.bucket == bucket]
            if own:
                yield from processor.handleInputRows((bucket,), iter(own), now)
            due = {timer for timer in state.timers if timer <= self.watermark_ms}
            state.timers -= due
            for _ in due:
                yield from processor.handleExpiredTimer((bucket,), now, None)
