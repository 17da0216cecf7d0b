"""A table set in an object store: no file is renamed, and the manifest is written last.

A store shows an object only when it is complete, but cannot rename it. So an attempt writes files
under their final names, which contain the attempt and the run. Readers follow the manifest, which
lists the files of successful attempts. At its end a run removes its files that no manifest lists.
Only runs give such file names, so the next run can remove what a killed one left.
The object ``_staging/<run>`` exists while a run may write: an attempt that starts later stops.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from kdissect.capture import object_store
from kdissect.errors import CaptureError, EnvironmentFailed, OutputError
from kdissect.tables.schemas import FIXED_TABLES

STAGING = "_staging"
LOCK = "lock"  # in STAGING (`write_lock`)
FOLDERS = frozenset((*FIXED_TABLES, "apis", "internal", "_state", STAGING))
_BY_A_RUN = re.compile(r"(.*/part-[\w-]+|_state/\w+-\d+)-[0-9a-f]{12}(\.parquet)?")
LAST_FILES_S = 10.0  # longest wait for files that tasks of a failed run were writing
_PAUSE_S, _QUIET_LISTINGS = 0.5, 3
_FAILURES = (pa.ArrowException, OSError)


class StoreFolder:
    """The folder at a URL. Methods raise EnvironmentFailed if the store fails."""

    def __init__(self, out: str) -> None:
        self.out = out
        try:
            self.store, self.root, _ = object_store.place(out)
        except CaptureError as error:
            raise OutputError(str(error)) from None

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def names(self, under: str = "", *, recursive: bool = True) -> dict[str, bool]:
        """Names below the folder -> whether it is a file."""
        infos = self._infos(under, recursive=recursive)
        return {name: bool(info.is_file) for name, info in infos.items()}

    def modified(self, under: str) -> dict[str, float]:
        """Time of change of each file below `under`, in seconds of the store's clock."""
        infos = self._infos(under, recursive=True)
        return {name: info.mtime_ns / 1e9 for name, info in infos.items() if info.is_file}

    def _infos(self, under: str, *, recursive: bool) -> dict[str, Any]:
        import pyarrow.fs as pafs

        base = self.path(under) if under else self.root
        selector = pafs.FileSelector(base, allow_not_found=True, recursive=recursive)
        try:
            infos = self.store.get_file_info(selector)
        except _FAILURES as error:
            raise self._failed(error) from None
        return {info.path[len(self.root) + 1 :]: info for info in infos}

    def has(self, names: Iterable[str]) -> list[bool]:
        """Return whether each name is a file."""
        try:
            infos = self.store.get_file_info([self.path(name) for name in names])
        except _FAILURES as error:
            raise self._failed(error) from None
        return [bool(info.is_file) for info in infos]

    def is_file(self) -> bool:
        try:
            return bool(self.store.get_file_info(self.root).is_file)
        except _FAILURES as error:
            raise self._failed(error) from None

    def read(self, name: str) -> bytes | None:
        """All bytes of a small file; None if it does not exist."""
        try:
            file = self.store.open_input_file(self.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except _FAILURES as error:
            raise self._failed(error) from None
        with object_store.ObjectFile(f"{self.out}/{name}", file) as opened:
            return opened.read_at(opened.size(), 0)

    def open_output(self, name: str) -> Any:
        """A stream to write a file; the file exists after the stream is closed."""
        path = self.path(name)
        if self.store.type_name not in ("s3", "gcs"):  # these have no folders
            self.store.create_dir(path.rpartition("/")[0], recursive=True)
        return self.store.open_output_stream(path, compression=None)

    def write(self, name: str, data: bytes) -> None:
        try:
            with self.open_output(name) as stream:
                stream.write(data)
        except _FAILURES as error:
            raise self._failed(error) from None

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and folders that become empty."""
        folders: dict[str, None] = {}
        for name in names:
            try:
                self.store.delete_file(self.path(name))
            except FileNotFoundError:
                pass
            except _FAILURES as error:
                raise self._failed(error) from None
            while "/" in name:
                name = name.rpartition("/")[0]
                folders[name] = None
        for folder in sorted(folders, key=len, reverse=True):
            self._remove_empty(folder)

    def _remove_empty(self, folder: str) -> None:
        """Remove the object of no bytes that marks a folder in some stores, if the folder is
        empty."""
        if any(self.names(folder).values()):
            return
        try:
            self.store.delete_dir(self.path(folder))
        except FileNotFoundError:
            return
        except _FAILURES as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> EnvironmentFailed:
        return EnvironmentFailed(f"{self.out}: {object_store.clause(error)}")


def check(out: str, manifest: str, overwrite: bool) -> None:
    """Raise OutputError unless a new table set may be written to the URL `out`."""
    place = StoreFolder(out)
    try:
        if place.is_file():
            raise OutputError(f"{out}: is a file; --out names a folder")
        if place.read(manifest) is not None:
            if not overwrite:
                raise OutputError(
                    f"{out}: holds a table set already; add --overwrite to replace it"
                )
        elif not _is_free(place):
            raise OutputError(f"{out}: is a folder with other files; name a new or an empty one")
        probe = f"{STAGING}/probe"
        place.write(probe, b"")
        place.remove([probe])
    except EnvironmentFailed as error:
        raise OutputError(f"{out}: cannot be written ({str(error).partition(': ')[2]})") from None


def _is_free(place: StoreFolder) -> bool:
    """Return whether the folder has only leftovers of interrupted runs of kdissect."""
    return all(
        not is_file
        and name in FOLDERS
        and all(is_by_a_run(inner) for inner, is_file in place.names(name).items() if is_file)
        for name, is_file in place.names(recursive=False).items()
    )


def is_by_a_run(name: str) -> bool:
    """Return whether a file below a set's folder has a name that only runs give."""
    folder = name.partition("/")[0]
    return folder == STAGING or (folder in FOLDERS and _BY_A_RUN.fullmatch(name) is not None)


def begin(out: str, run_id: str) -> None:
    """Allow attempts of this run to write."""
    try:
        StoreFolder(out).write(f"{STAGING}/{run_id}", b"")
    except EnvironmentFailed as error:
        raise OutputError(str(error)) from None


def is_open(place: StoreFolder, run_id: str) -> bool:
    """Return whether attempts of this run may still write."""
    return place.has([f"{STAGING}/{run_id}"])[0]


def end(out: str, run_id: str, listed: set[str], *, is_failed: bool = False) -> None:
    """Remove the files of the run that the manifest does not list.

    is_failed: tasks may still be running. They start no new file, but a file that they were writing
    may appear a moment later, so the listing is repeated.
    """
    place = StoreFolder(out)
    place.remove([f"{STAGING}/{run_id}"])
    until = time.monotonic() + LAST_FILES_S
    quiet = 0
    while True:
        left = [
            name
            for name, is_file in place.names().items()
            if is_file and name.endswith(f"-{run_id}.parquet") and name not in listed
        ]
        place.remove(left)
        quiet = 0 if left else quiet + 1
        if not is_failed or quiet == _QUIET_LISTINGS or time.monotonic() > until:
            return
        time.sleep(_PAUSE_S)


def remove_unlisted(place: StoreFolder, listed: set[str]) -> None:
    """Remove files of earlier runs that the manifest does not list. Locks stay."""
    lock = f"{STAGING}/{LOCK}-"
    place.remove(
        name
        for folder in place.names(recursive=False)
        if folder in FOLDERS
        for name, is_file in place.names(folder).items()
        if is_file and is_by_a_run(name) and name not in listed and not name.startswith(lock)
    )
