"""The lock of a table set: one run writes at a time, and a killed run leaves no lock.

In a folder the lock is an flock on ``_staging/lock``, which ends with the process. On a file system
or a platform without flock there is no lock.

In an object store the lock is an object ``_staging/lock-<id>``, which its owner rewrites every
RENEW_S seconds. `pyarrow.fs` has no conditional writes, so each run writes an object of its own and
lists all of them. It holds the lock if there is no other. Otherwise it removes its own object and
watches the others. One that is rewritten belongs to a live run. One that is DEAD_S seconds old
belongs to a killed run, and is removed. If two runs list at the same time, both step back and try
again after random pauses. All times are the store's. Listings must show new objects at once, as
those of S3, GCS and ABFS do.

A run that is suspended for longer than DEAD_S loses the lock; at its commit it finds its files gone
(`table_set`). Between that check and the write of the manifest there is no protection.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kdissect.capture.object_store import is_remote
from kdissect.errors import EnvironmentFailed, OutputError
from kdissect.pipeline.object_table_set import LOCK, STAGING, StoreFolder

RENEW_S, DEAD_S = 5.0, 30.0
LOOK_S = 1.0  # seconds between checks of other locks, plus as much again at random
_RUN = re.compile("[0-9a-f]{12}")
_RACES_MAX = 1000  # attempts against owners that remove the folder while it is made


@contextmanager
def write_lock(out: str) -> Iterator[bool]:
    """Hold the lock of the set at the folder or URL `out`. Yields False if no lock is possible.

    Raises OutputError if another run holds the lock.
    """
    lock = _StoreLock(out) if is_remote(out) else _FolderLock(out)
    try:
        yield lock.acquire()
    finally:
        try:
            lock.release()
        except KeyboardInterrupt:
            lock.release()
            raise


def _owner() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _busy(out: str, owner: str) -> OutputError:
    return OutputError(f"{out}: another run is writing there ({owner or 'it has just begun'})")


class _FolderLock:
    """An flock on a file in the folder `_staging`, which exists while the lock does."""

    def __init__(self, out: str) -> None:
        self.out = out
        self.staging = Path(out) / STAGING
        self.path = self.staging / LOCK
        self.is_new = not Path(out).exists()
        self.is_held = True
        self._descriptor = -1

    def acquire(self) -> bool:
        for _ in range(_RACES_MAX):
            try:
                self.staging.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
                self._descriptor = os.open(self.path, flags, 0o666)
            except (FileNotFoundError, FileExistsError):
                continue  # the previous owner has just removed the folder
            except OSError as error:
                raise OutputError(f"{self.out}: cannot be written ({error.strerror})") from error
            if self._lock():
                return self.is_held
            self._close()
        raise OutputError(f"{self.staging}: cannot be made")

    def _lock(self) -> bool:
        """False if the previous owner removed the file in the meantime."""
        try:
            _flock(self._descriptor)
        except BlockingIOError:
            owner = os.read(self._descriptor, 1000).decode(errors="replace")
            self._close()
            raise _busy(self.out, owner) from None
        except OSError:
            self.is_held = False
            return True
        if not self._is_at_path():
            return False
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, _owner().encode())
        return True

    def _is_at_path(self) -> bool:
        """Return whether the open file is still the one at the lock's path."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Remove the contents of `_staging`, the lock file last, while the lock is held.

        An interrupt may come before the file is there, or before it is locked. After an interrupt
        of this method, a second call completes it.
        """
        with suppress(OSError):  # another run holds the lock, or the folder is gone
            # an interrupted call may have removed the file, and another run locked a new one
            if self._descriptor >= 0 and self._is_at_path():
                if self.is_held:
                    _flock(self._descriptor)
                    remove_staged(self.staging)
                self.path.unlink()
        for folder in (self.staging, Path(self.out)) if self.is_new else (self.staging,):
            with suppress(OSError):
                folder.rmdir()
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _flock(descriptor: int) -> None:
    """Lock the file; raises BlockingIOError if another process has it, OSError without flock."""
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOSYS, "no flock on this platform") from None
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_staged(staging: Path) -> None:
    """Remove staged files of all runs from the folder `_staging`; each run has a folder with its
    id."""
    for path in staging.iterdir():
        if _RUN.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


class _StoreLock:
    """An object that a thread rewrites until the lock is released."""

    def __init__(self, out: str) -> None:
        self.out = out
        self.place = StoreFolder(out)
        self.name = f"{STAGING}/{LOCK}-{uuid.uuid4().hex[:12]}"
        self._over = threading.Event()
        self._renewal = threading.Thread(target=self._renew, daemon=True)

    def acquire(self) -> bool:
        while True:
            self.place.write(self.name, _owner().encode())
            locks = self._locks()
            now = locks.pop(self.name, None)
            if now is not None and not locks:
                break
            self.place.remove([self.name])
            self._watch(locks, now)
        self._renewal.start()
        return True

    def _locks(self) -> dict[str, float]:
        """Time of change of each lock of the set, in seconds of the store's clock."""
        modified = self.place.modified(STAGING)
        return {name: at for name, at in modified.items() if name.startswith(f"{STAGING}/{LOCK}-")}

    def _watch(self, locks: dict[str, float], now: float | None) -> None:
        """Return when none of `locks` exists any more. Raises OutputError if one of them is
        renewed.

        now: time by the store's clock, if known.
        """
        began = time.monotonic()
        while True:
            time.sleep(LOOK_S * (1 + random.random()))
            present = self._locks()
            since = time.monotonic() - began
            for name, at in locks.items():
                if present.get(name, at) != at:
                    owner = self.place.read(name) or b""
                    raise _busy(self.out, owner.decode(errors="replace"))
                age = since if now is None else now + since - at
                if name in present and age > DEAD_S:
                    self.place.remove([name])
                    del present[name]
            if not locks.keys() & present.keys():
                return

    def _renew(self) -> None:
        while not self._over.wait(RENEW_S):
            with suppress(EnvironmentFailed):  # the next renewal may succeed
                if not self.place.has([self.name])[0]:
                    return  # another run took this lock for one of a killed run
                self.place.write(self.name, _owner().encode())

    def release(self) -> None:
        self._over.set()
        if self._renewal.is_alive():
            self._renewal.join()
        with suppress(EnvironmentFailed):  # it expires after DEAD_S
            self.place.remove([self.name])
