"""A folder in which captures keep appearing, as micro-batches of whole files, each exactly once.

Files are ordered by their first packet's time. The newest one may still be written, so it waits for
the next. An *offset* is the last file of a batch: ``{"time_ns": ..., "path": ...}``.

Connections cross files: what a batch leaves open goes on in the next one (`stream.resumed`), and an
exchange is a row of the batch whose packets finish it. That state is kept on disk beside the offset
that it belongs to, so that a batch which is read again gives the same rows; where it is gone, the
files before are read again for it, without their rows.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from kdissect.capture.inputs import describe, listed
from kdissect.capture.windows import WindowReader
from kdissect.errors import CaptureError
from kdissect.pipeline.disk_index import private_folder
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import capture_id
from kdissect.resume.carry import Resumed
from kdissect.show.filters import Filters
from kdissect.show.listing import Lister
from kdissect.show.reading import first_time, key_log_texts

Offset = dict[str, Any]
NEVER = 2**63 - 1


@dataclass(slots=True)
class _State:
    """What goes on after a file: open connections, names of topics, and the files so far."""

    resumed: Resumed
    names: dict[str, str] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FolderStream:
    """The captures of `folder`. Methods raise CaptureError for a file that grew after it was read.

    spool: folder for the state between batches (default: the temporary folder).
    """

    folder: str
    options: Options
    spool: str | None
    # of files that were looked at: (size, time of change) then, and the first packet's time
    _seen: dict[str, tuple[tuple[int, int], int]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __reduce__(self) -> tuple[Any, ...]:
        return FolderStream, (self.folder, self.options, self.spool)

    def first(self) -> Offset:
        return {"time_ns": -1, "path": ""}

    def latest(self) -> Offset:
        """The last file that is complete: one before the newest."""
        files = self._files()
        return self.first() if len(files) < 2 else _offset(files[-2])

    def _files(self, done: Collection[str] = ()) -> list[tuple[int, str]]:
        """(time of the first packet, path) of the captures that have packets, in order.

        Without those that are `done`. A trigger may find thousands of files: only those that are
        new or have changed are opened.
        """
        found = []
        for path in listed(self.folder):
            if path in done:
                continue
            time_ns = self._first_time(path)
            if time_ns != NEVER:
                found.append((time_ns, path))
        return sorted(found)

    def _first_time(self, path: str) -> int:
        try:
            there = os.stat(path)
        except OSError:
            return NEVER  # gone since it was listed
        state = (there.st_size, there.st_mtime_ns)
        known = self._seen.get(path)
        if known is None or known[0] != state:
            item = describe(path)
            known = self._seen[path] = (state, first_time(item) if item.is_capture else NEVER)
        return known[1]

    def read(self, start: Offset, end: Offset) -> Iterator[dict[str, pa.Table]]:
        """The tables of what the files behind `start` up to `end` finish."""
        state = self._state(start)
        yield from self._advance(state, start, end)
        self._save(state, end)

    def _advance(self, state: _State, start: Offset, end: Offset) -> Iterator[dict[str, pa.Table]]:
        for path, size in zip(state.paths, state.sizes, strict=True):
            if os.path.exists(path) and os.path.getsize(path) != size:
                raise CaptureError(f"{path}: grew after it was read; a stream reads a file once")
        capture_ids = [capture_id(each) for each in state.paths]
        for file in self._files(set(state.paths)):
            if not _key(start) < file <= _key(end):
                continue
            path = file[1]
            state.paths.append(path)
            state.sizes.append(os.path.getsize(path))
            capture_ids.append(capture_id(path))
            lister = Lister(self.options, capture_ids, Filters(), "records")
            lister.names.update(state.names)
            reader = WindowReader(path, len(state.paths) - 1, state.paths)
            for window in reader.windows():
                state.resumed.key_logs += window.secrets
                finished = state.resumed.add(window, state.paths)
                if finished is not None:
                    for listed in lister.listed(finished):
                        yield listed.tables
            state.names.update(lister.names)

    def _state(self, at: Offset) -> _State:
        path = self._place(at)
        if path.exists():
            kept: _State = pickle.loads(path.read_bytes())  # ours: in a folder of this user alone
        else:
            kept = _State(Resumed(self.options.stream_options))
        kept.resumed.key_logs = key_log_texts(self.options.keylog)
        if not path.exists() and _key(at) != _key(self.first()):
            for _ in self._advance(kept, self.first(), at):
                pass
        return kept

    def _save(self, state: _State, at: Offset) -> None:
        state.resumed.key_logs = []  # read from their files again
        path = self._place(at)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            pickle.dump(state, file)
        os.replace(name, path)

    def forget_before(self, at: Offset) -> None:
        """Remove the state of offsets before a committed one."""
        kept = self._place(at)
        for path in kept.parent.iterdir():
            if path != kept and path.stat().st_mtime <= (
                kept.stat().st_mtime if kept.exists() else 0
            ):
                path.unlink(missing_ok=True)

    def _place(self, at: Offset) -> Path:
        made_of = repr((os.path.abspath(self.folder), self.options))
        folder = private_folder(self.spool) / (
            "stream-" + hashlib.sha256(made_of.encode()).hexdigest()[:24]
        )
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / hashlib.sha256(repr(_key(at)).encode()).hexdigest()[:24]


def _offset(file: tuple[int, str]) -> Offset:
    return {"time_ns": file[0], "path": file[1]}


def _key(offset: Offset) -> tuple[int, str]:
    return int(offset["time_ns"]), str(offset["path"])
