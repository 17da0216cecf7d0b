"""The place of a table set: a folder, or a prefix of an object store; its files, and its lock.

Both are read and written through `pyarrow.fs`. They differ in one thing: a store cannot rename.

- In a folder an attempt writes its files below ``_staging``, and the commit moves them to their
  names. One run at a time writes there; its lock is an flock on ``_staging/lock``, which ends with
  the process. On a file system or a platform without flock there is no lock.
- In a store a file has its name at once, with the ids of attempt and run, and only the manifest
  makes it part of the set. A run that begins there ends an earlier one: it removes that run's mark.

The mark ``_staging/<run>/open`` exists while the attempts of a run may write. Only runs give the
names of `is_by_a_run`, so the next run can remove what a killed one left.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import pyarrow as pa

from kdissect.capture import object_store
from kdissect.errors import CaptureError, EnvironmentFailed, OutputError
from kdissect.pipeline.step_rows import STATE
from kdissect.tables.schemas import FIXED_TABLES

STAGING = "_staging"
LOCK = f"{STAGING}/lock"
FOLDERS = frozenset((*FIXED_TABLES, "apis", "internal", STATE, STAGING))
_BY_A_RUN = re.compile(r".*/part-[\w-]+-[0-9a-f]{12}\.parquet")
LAST_FILES_S = 10.0  # longest wait for objects that tasks of a failed run were writing
_PAUSE_S, _QUIET_LISTINGS = 0.5, 3


def is_by_a_run(name: str) -> bool:
    """Return whether a file below a set's folder has a name that only runs give."""
    folder = name.partition("/")[0]
    return folder == STAGING or (folder in FOLDERS and _BY_A_RUN.fullmatch(name) is not None)


class SetFolder:
    """The folder or URL `out`. Methods raise EnvironmentFailed if the disk or the store fails."""

    def __init__(self, out: str) -> None:
        import pyarrow.fs as pafs

        self.out, self.is_remote = out, object_store.is_remote(out)
        if os.fsencode(out).decode("utf-8", "replace") != out:
            raise OutputError(f"{out}: the name is no UTF-8; rename it")
        if not self.is_remote:
            self.store, self.root = pafs.LocalFileSystem(), os.path.abspath(out)
            return
        try:
            self.store, self.root, _ = object_store.place(out)
        except CaptureError as error:
            raise OutputError(str(error)) from None

    # -- files ------------------------------------------------------------------------------

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def names(self, under: str = "", *, recursive: bool = True) -> dict[str, bool]:
        """Names below the folder -> whether it is a file."""
        import pyarrow.fs as pafs

        base = self.path(under) if under else self.root
        with self._errors():
            infos = self.store.get_file_info(
                pafs.FileSelector(base, allow_not_found=True, recursive=recursive)
            )
        return {info.path[len(self.root) + 1 :]: bool(info.is_file) for info in infos}

    def has(self, names: Iterable[str]) -> list[bool]:
        """Return whether each name is a file."""
        with self._errors():
            infos = self.store.get_file_info([self.path(name) for name in names])
        return [bool(info.is_file) for info in infos]

    def is_file(self) -> bool:
        with self._errors():
            info = self.store.get_file_info(self.root)
        return bool(info.is_file)

    def written_time(self, name: str) -> float:
        """When a file was written, in s since 1970; 0 if the store does not tell."""
        with self._errors():
            info = self.store.get_file_info(self.path(name))
        return (info.mtime_ns or 0) / 1e9

    def read(self, name: str) -> bytes | None:
        """All bytes of a small file; None if it does not exist."""
        data = None
        with self._errors(FileNotFoundError, NotADirectoryError):
            file = self.store.open_input_file(self.path(name))
            with object_store.ObjectFile(f"{self.out}/{name}", file) as opened:
                data = opened.read_at(opened.size(), 0)
        return data

    def open_output(self, name: str) -> pa.NativeFile:
        """A stream to write a file; the file is complete after the stream is closed."""
        self._make_folder_of(name)
        return self.store.open_output_stream(self.path(name), compression=None)

    def write(self, name: str, data: bytes) -> None:
        with self._errors(), self.open_output(name) as stream:
            stream.write(data)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and folders that become empty."""
        folders: set[str] = set()
        for name in names:
            with self._errors(FileNotFoundError):
                self.store.delete_file(self.path(name))
            folders.update(str(folder) for folder in PurePosixPath(name).parents[:-1])
        for folder in sorted(folders, key=len, reverse=True):
            if not any(self.names(folder).values()):
                # some stores mark an empty folder by an object of no bytes
                with self._errors(FileNotFoundError):
                    self.store.delete_dir(self.path(folder))

    def _make_folder_of(self, name: str) -> None:
        if self.store.type_name not in ("s3", "gcs"):  # these have no folders
            self.store.create_dir(self.path(name).rpartition("/")[0], recursive=True)

    @contextmanager
    def _errors(self, *ignored: type[OSError]) -> Iterator[None]:
        try:
            yield
        except ignored:
            pass
        except (pa.ArrowException, OSError) as error:
            raise EnvironmentFailed(f"{self.out}: {object_store.clause(error)}") from None

    # -- runs -------------------------------------------------------------------------------

    def begin(self, run_id: str) -> None:
        """Let attempts of this run write. Raises OutputError if nothing can be written there."""
        try:
            self.write(_mark(run_id), b"")
        except EnvironmentFailed as error:
            reason = str(error).partition(": ")[2]
            raise OutputError(f"{self.out}: cannot be written ({reason})") from None

    def is_open(self, run_id: str) -> bool:
        """Return whether attempts of this run may still write."""
        return self.has([_mark(run_id)])[0]

    def check_open(self, run_id: str) -> None:
        """Raise EnvironmentFailed if the run has ended: a task of it may still be running."""
        if not self.is_open(run_id):
            raise EnvironmentFailed(f"{self.out}: the run that this task belongs to is over")

    def staged(self, run_id: str, attempt: str, name: str) -> str:
        """Where an attempt writes the file that will have this name in the set."""
        return name if self.is_remote else f"{STAGING}/{run_id}/{attempt}/{name}"

    def publish(self, staged: str) -> str:
        """Give a staged file its name in the set, which is returned."""
        if self.is_remote:
            return staged
        _, _, _, name = staged.split("/", 3)
        with self._errors():
            self._make_folder_of(name)
            self.store.move(self.path(staged), self.path(name))
        return name

    def end(self, run_id: str, listed: set[str], *, is_failed: bool) -> None:
        """Remove the files of a run that the manifest does not list.

        is_failed: tasks may still be running. They start no new file, but an object that they were
        writing may appear a moment later, so the listing is repeated.
        """
        self.remove([_mark(run_id)])
        until, quiet = time.monotonic() + LAST_FILES_S, 0
        while True:
            left = [
                name
                for name, is_file in self.names().items()
                if is_file and run_id in name and is_by_a_run(name) and name not in listed
            ]
            self.remove(left)
            quiet = 0 if left else quiet + 1
            is_over = quiet == _QUIET_LISTINGS or time.monotonic() > until
            if is_over or not (is_failed and self.is_remote):
                return
            time.sleep(_PAUSE_S)

    def remove_unlisted(self, listed: set[str], *, is_alone: bool) -> None:
        """Remove the files of all runs that the manifest does not list; those below ``_staging``
        only if no other run can be writing (`is_alone`)."""
        folders = FOLDERS if is_alone else FOLDERS - {STAGING}
        self.remove(
            name
            for folder in self.names(recursive=False)
            if folder in folders
            for name, is_file in self.names(folder).items()
            if is_file and is_by_a_run(name) and name not in listed and name != LOCK
        )

    def is_free(self) -> bool:
        """Return whether there is nothing, or only what killed runs left."""
        return all(
            not is_file
            and name in FOLDERS
            and all(is_by_a_run(inner) for inner, is_file in self.names(name).items() if is_file)
            for name, is_file in self.names(recursive=False).items()
        )


def _mark(run_id: str) -> str:
    return f"{STAGING}/{run_id}/open"


# -- the lock of a folder -------------------------------------------------------------------


@contextmanager
def write_lock(out: str) -> Iterator[bool]:
    """Hold the lock of a set in a folder. Yields False if there are no locks.

    Raises OutputError if another run holds the lock, or nothing can be written there.
    """
    root = Path(out)
    path, is_new = root / LOCK, not root.exists()
    descriptor = -1
    try:
        descriptor = _opened(path)
        is_held = _locked(descriptor)
        # the last owner may have removed the file before it was locked
        if is_held is None or not _is_at(path, descriptor):
            owner = os.read(descriptor, 1000).decode(errors="replace")
            who = owner or "it has just begun"
            raise OutputError(f"{out}: another run is writing there ({who})")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield is_held
    finally:
        # an interrupt may come before the file is locked
        if descriptor >= 0 and _locked(descriptor) is not None and _is_at(path, descriptor):
            path.unlink()
        for folder in (path.parent, root) if is_new else (path.parent,):
            with suppress(OSError):  # not empty, or not there
                folder.rmdir()
        if descriptor >= 0:
            os.close(descriptor)


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    out = path.parent.parent
    try:
        with suppress(FileExistsError):
            out.mkdir(parents=True, exist_ok=True)
        # the last owner of the lock may just have removed the folders
        with suppress(FileNotFoundError, FileExistsError):
            path.parent.mkdir(exist_ok=True)
            return os.open(path, flags, 0o666)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({error.strerror})") from error
    raise OutputError(f"{out}: another run is writing there")


def _locked(descriptor: int) -> bool | None:
    """Lock an open file: whether this is possible there; None if another process has locked it."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return None
    except (ImportError, OSError):
        return False


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
