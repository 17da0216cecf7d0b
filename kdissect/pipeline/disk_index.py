"""An index on disk of the output of `scan` and `assemble`, by slot, for decoding on demand.

It serves readers that cannot shuffle: tasks of the Spark data source only read. One process builds
it once. It holds no payload except decrypted TLS bytes. It lies in a private folder whose name is a
hash of what it was made from (paths, sizes, times of change, options), and is removed a day after
its last use.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from kdissect.capture.inputs import find_captures
from kdissect.pipeline import local
from kdissect.pipeline.analyse import analyse
from kdissect.pipeline.assemble import assemble
from kdissect.pipeline.decode import decode
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import make_plan
from kdissect.pipeline.run_plan import RunPlan
from kdissect.pipeline.scan import scan
from kdissect.pipeline.step_rows import Row, RowKind

STORIES = ("group_events", "transactions", "fetch_sessions")  # built from messages of many slots
_ANOMALIES = "anomalies"  # has rows from slots and from stories
KEPT_S = 86_400
_PLAN = "plan"
_HEAD = struct.Struct("<qiqq")  # key, kind, order, size
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Index:
    """A finished index: a folder with the plan and one file of rows per slot."""

    folder: str

    @property
    def plan(self) -> RunPlan:
        data = Path(self.folder, _PLAN).read_bytes()
        plan: RunPlan = pickle.loads(data)  # from a private folder, written by `make_index`
        return plan

    def slots(self) -> list[int]:
        names = [name for name in os.listdir(self.folder) if name.startswith("slot-")]
        return sorted(int(name.partition("-")[2]) for name in names)

    def has_stories(self, name: str) -> bool:
        """Return whether part of a table is built from messages of many slots."""
        return name in STORIES or name == _ANOMALIES

    def table(self, name: str, slot: int) -> Iterator[pa.Table]:
        """The part of a table that comes from the messages of one slot."""
        plan = self.plan
        tables: list[pa.Table] = []

        def sink(table: str, rows: pa.Table) -> None:
            if table == name:
                tables.append(rows)

        for _ in decode(plan, plan.sources(), self._rows(slot), sink):
            yield from _emptied(tables)
        yield from _emptied(tables)

    def stories(self, name: str) -> Iterator[pa.Table]:
        """The part of a table that is built from the messages of all slots."""
        plan = self.plan
        sources = plan.sources()
        events: dict[int, list[Row]] = {}
        for slot in self.slots():
            for row in decode(plan, sources, self._rows(slot), lambda *_: None):
                if row.kind != RowKind.RESULT:
                    events.setdefault(row.key, []).append(row)
        tables: list[pa.Table] = []

        def sink(table: str, rows: pa.Table) -> None:
            if table == name:
                tables.append(rows)

        for key in sorted(events):
            analyse([row.data for row in local.in_order(events.pop(key))], sink)
            yield from _emptied(tables)

    def _rows(self, slot: int) -> list[Row]:
        path = Path(self.folder, f"slot-{slot}")
        with path.open("rb") as file:
            return local.in_order(list(_read(file)))


def _emptied(tables: list[pa.Table]) -> Iterator[pa.Table]:
    yield from tables
    tables.clear()


def make_index(
    paths: Sequence[str], options: Options, spool_dir: str | None, parallelism: int
) -> Index:
    """Return the index of the captures; build it if there is none.

    Raises CaptureError if a named file is missing or no capture, or no file can be used.
    """
    inputs = find_captures(list(paths))
    home = private_folder(spool_dir)
    _remove_old(home)
    digest = hashlib.sha256(repr((_FORMAT, parallelism, sorted(paths), options)).encode())
    for item in inputs:
        digest.update(f"{item.path} {item.size}\n".encode())
    for path in (*(item.path for item in inputs), *options.keylog):
        if os.path.exists(path):  # an object in a store is identified by its size alone
            state = os.stat(path)
            digest.update(f"{path} {state.st_size} {state.st_mtime_ns}\n".encode())
    folder = home / digest.hexdigest()[:32]
    if Path(folder, _PLAN).exists():
        os.utime(folder)
        return Index(str(folder))
    made = Path(tempfile.mkdtemp(prefix="making-", dir=home))
    try:
        plan = make_plan(inputs, options, parallelism, str(made))
        _fill(plan, made)
        # unpacked copies of captures lie in the folder and move with it
        moved = tuple(
            str(folder / Path(path).relative_to(made)) if path.startswith(f"{made}/") else path
            for path in plan.paths
        )
        Path(made, _PLAN).write_bytes(pickle.dumps(replace(plan, paths=moved)))
        try:
            os.rename(made, folder)
        except OSError:
            if not Path(folder, _PLAN).exists():
                raise
            shutil.rmtree(made)  # another process finished first
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return Index(str(folder))


def _fill(plan: RunPlan, folder: Path) -> None:
    """Scan and assemble. Rows lie on disk between the steps; one bucket is in memory at a time."""
    sources = plan.sources()
    with _KeyedFiles(folder, "bucket") as buckets:
        buckets.touch(0)
        for number in range(len(plan.splits)):
            for row in scan(plan, sources, number):
                buckets.add(row)
    with _KeyedFiles(folder, "slot") as slots:
        slots.touch(0)
        for path in sorted(folder.glob("bucket-*"), key=lambda path: int(path.name[7:])):
            with path.open("rb") as file:
                rows = local.in_order(list(_read(file)))
            path.unlink()
            for row in assemble(plan, plan.sources(), rows):
                slots.add(row)


class _KeyedFiles:
    """One file of rows per key; at most 128 are open at a time."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._open: dict[int, BinaryIO] = {}

    def __enter__(self) -> _KeyedFiles:
        return self

    def __exit__(self, *_: Any) -> None:
        for file in self._open.values():
            file.close()

    def touch(self, key: int) -> BinaryIO:
        file = self._open.get(key)
        if file is None:
            if len(self._open) >= 128:
                self._open.pop(next(iter(self._open))).close()
            path = Path(self._folder, f"{self._name}-{key}")
            file = self._open[key] = path.open("ab")
        return file

    def add(self, row: Row) -> None:
        file = self.touch(row.key)
        file.write(_HEAD.pack(row.key, row.kind, row.order, len(row.data)))
        file.write(row.data)


def _read(file: BinaryIO) -> Iterator[Row]:
    while head := file.read(_HEAD.size):
        key, kind, order, size = _HEAD.unpack(head)
        yield Row(key, kind, order, file.read(size))


def private_folder(spool_dir: str | None, name: str = "index") -> Path:
    """A folder that only this user can write, so that its files can be unpickled safely.

    Raises PermissionError if another user owns it or may write there.
    """
    home = Path(spool_dir or tempfile.gettempdir(), f"kdissect-{name}-{os.getuid()}")
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = home.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise PermissionError(f"{home} belongs to somebody else, or others may write there")
    return home


def _remove_old(home: Path) -> None:
    oldest = time.time() - KEPT_S
    for folder in home.iterdir():
        try:
            if folder.stat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            continue
