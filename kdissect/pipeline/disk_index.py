"""An index of captures on disk: what `scan` and `assemble` come to, by slot, to be decoded later.

For readers that cannot shuffle (the Spark data source, whose tasks only read): the index is made
once, in one process, and holds no payload but what TLS hid. It lies in a private folder, is found
again by what it was made of (paths, sizes, times of change, options), and is removed a day after
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

STORIES = ("group_events", "transactions", "fetch_sessions")  # told by messages of many slots
_ANOMALIES = "anomalies"  # told by slots and by stories
KEPT_S = 86_400
_PLAN = "plan"
_HEAD = struct.Struct("<qiqq")  # key, kind, order, size
_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Index:
    """A finished index: its folder, which holds the plan and a file of rows per slot."""

    folder: str

    @property
    def plan(self) -> RunPlan:
        data = Path(self.folder, _PLAN).read_bytes()
        plan: RunPlan = pickle.loads(data)  # written by `make_index` in a private folder
        return plan

    def slots(self) -> list[int]:
        names = [name for name in os.listdir(self.folder) if name.startswith("slot-")]
        return sorted(int(name.partition("-")[2]) for name in names)

    def has_stories(self, name: str) -> bool:
        """Whether a part of a table is told only by messages of many slots."""
        return name in STORIES or name == _ANOMALIES

    def table(self, name: str, slot: int) -> Iterator[pa.Table]:
        """The part of a table that the messages of one slot make."""
        plan = self.plan
        found: list[pa.Table] = []

        def sink(table: str, rows: pa.Table) -> None:
            if table == name:
                found.append(rows)

        for _ in decode(plan, plan.sources(), self._rows(slot), sink):
            yield from _emptied(found)
        yield from _emptied(found)

    def stories(self, name: str) -> Iterator[pa.Table]:
        """The part of a table that only many messages together tell."""
        plan = self.plan
        sources = plan.sources()
        events: dict[int, list[Row]] = {}
        for slot in self.slots():
            for row in decode(plan, sources, self._rows(slot), lambda *_: None):
                if row.kind != RowKind.RESULT:
                    events.setdefault(row.key, []).append(row)
        found: list[pa.Table] = []

        def sink(table: str, rows: pa.Table) -> None:
            if table == name:
                found.append(rows)

        for key in sorted(events):
            analyse([row.data for row in local.in_order(events.pop(key))], sink)
            yield from _emptied(found)

    def _rows(self, slot: int) -> list[Row]:
        path = Path(self.folder, f"slot-{slot}")
        with path.open("rb") as file:
            return local.in_order(list(_read(file)))


def _emptied(found: list[pa.Table]) -> Iterator[pa.Table]:
    yield from found
    found.clear()


def make_index(
    paths: Sequence[str], options: Options, spool_dir: str | None, parallelism: int
) -> Index:
    """The index of captures, made now or found again.

    Raises CaptureError when a named file is missing or no capture, or nothing can be used.
    """
    inputs = find_captures(list(paths))
    home = private_folder(spool_dir)
    _remove_old(home)
    digest = hashlib.sha256(repr((_FORMAT, parallelism, sorted(paths), options)).encode())
    for item in inputs:
        digest.update(f"{item.path} {item.size}\n".encode())
    for path in (*(item.path for item in inputs), *options.keylog):
        if os.path.exists(path):  # what is in an object store is told by its size alone
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
        # copies of compressed captures move along with the folder
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
            shutil.rmtree(made)  # somebody else was quicker
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return Index(str(folder))


def _fill(plan: RunPlan, folder: Path) -> None:
    """Scan and assemble; rows lie on disk between the steps, a bucket in memory at a time."""
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
    """A file of rows per key; few are open at a time."""

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
    """A folder of this user alone: what lies there is trusted when it is read again."""
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
