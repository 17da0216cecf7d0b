"""Tables that every task of a run reads and that grow with its input: its files, names of topics.

A small table goes with the function of the tasks. A larger one becomes a file beside the run. It is
mapped, so that a task reads only the rows that it needs; each host copies an object of a store once
(`capture.copies`). So no function of a task has more than CLOSURE_BYTES.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from kdissect.capture.inputs import InputFile, describe
from kdissect.capture.mapped_files import Sources
from kdissect.pipeline.options import MB
from kdissect.pipeline.set_folder import STAGING, SetFolder

CLOSURE_BYTES = MB  # Spark broadcasts a larger function
TABLE_BYTES = CLOSURE_BYTES // 8  # of a compressed table; a function takes at most five


@dataclass(frozen=True, slots=True)
class TaskTable:
    """A table for tasks: its bytes, or the file that has them. folder: of copies."""

    data: bytes
    file: InputFile | None
    folder: str

    def read(self) -> pa.Table:
        """The table, in a task. Raises EnvironmentFailed if its file cannot be read."""
        data = self.data if self.file is None else Sources([self.file], self.folder).data(0)
        return pa.ipc.open_file(pa.py_buffer(data)).read_all()


Share = Callable[[str, pa.Table], TaskTable]  # called with a name for the table's file


def share_in(place: SetFolder, run_id: str, folder: str) -> Share:
    """A function that prepares tables for the tasks of a run. folder: of copies."""

    def share(name: str, table: pa.Table) -> TaskTable:
        small = _written(table, "zstd")
        if len(small) <= TABLE_BYTES:
            return TaskTable(small, None, folder)
        path = f"{STAGING}/{run_id}/{name}.arrow"
        place.write(path, _written(table, None))
        return TaskTable(b"", describe(f"{place.out.rstrip('/')}/{path}"), folder)

    return share


def _written(table: pa.Table, compression: str | None) -> bytes:
    out = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(out, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(out.getvalue().to_pybytes())


class TextMap(Mapping[str, str]):
    """Texts by text: the two columns of a table of `text_table`; remembers those it was asked."""

    def __init__(self, table: pa.Table) -> None:
        self._keys, self._values = table.columns
        self._asked: dict[str, str | None] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys.to_pylist())

    def __getitem__(self, key: str) -> str:
        if key not in self._asked:
            row = bisect_left(range(len(self)), key, key=lambda row: str(self._keys[row]))
            is_there = row < len(self) and str(self._keys[row]) == key
            self._asked[key] = str(self._values[row]) if is_there else None
        value = self._asked[key]
        if value is None:
            raise KeyError(key)
        return value


def text_table(texts: Mapping[str, str]) -> pa.Table:
    """A row for each text, in order."""
    keys = sorted(texts)
    schema = pa.schema([("key", pa.string()), ("value", pa.string())])
    return pa.table({"key": keys, "value": [texts[key] for key in keys]}, schema)
