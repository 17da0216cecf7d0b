"""Tables that every task of a run reads and that grow with its input: its files, names of topics.

A small table goes with the function of the tasks, and a larger one becomes a file beside the run,
which tasks map. Each host copies an object of a store once (`capture.copies`). So Spark needs to
broadcast no function of a task, as it does with those of more than a megabyte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from kdissect.capture.inputs import InputFile, describe
from kdissect.capture.mapped_files import Sources
from kdissect.pipeline.options import MB
from kdissect.pipeline.set_folder import STAGING, SetFolder

TABLE_BYTES = MB // 8  # of a compressed table; a function takes at most five


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
