"""Copies of captures that cannot be mapped: objects in stores, compressed files, streams.

Kernels read captures at any position. So a capture that is no plain file on this host is *spooled*:
its plain bytes are written to a folder of the run. Standard input and pipes are written once, by
the process that plans the run. Other captures are copied by the first task of each host that needs
them; the other tasks of that host wait for the copy and use it. Copies lie in the folder of the run
if the host has that folder (it is the driver's host, or `--spool` is shared). Otherwise they lie in
a folder that Spark gives its executors, and removes with them.

Reading objects in place, by ranges, took twice the time and three times the bytes on one host.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from kdissect.capture import object_store
from kdissect.capture.inputs import STDIN, UNSEEN, InputFile, Unpacked, describe, look_at_file
from kdissect.errors import CaptureError, EnvironmentFailed

_PIECE = 1 << 20  # bytes unpacked at a time
REQUEST_BYTES = 8 << 20  # of an object, per request
_REQUESTS_AT_A_TIME = 4
_KEPT_S = 3600.0  # copies of other runs stay so long in the folder of an executor
_DAMAGE = ".damage"  # name of the file beside a copy with the reason why it is incomplete


def spooled(file: InputFile, folder: str) -> InputFile:
    """The input with all that its first bytes tell, and readable at any position.

    A stream gets a `data_path` in `folder`. Any other input that is no plain file is copied for
    this host (`local_path`). If it is damaged, the copy has the readable part; `error` says why.
    Raises CaptureError if a stream is no capture, EnvironmentFailed if the store or disk fails.
    """
    if file.format == "stream":
        return _written(file, folder)
    if file.format == UNSEEN:
        file = describe(file.path)
    if not file.is_capture or file.data_path:
        return file
    path = local_path(file, folder)
    damage = Path(path + _DAMAGE)
    return replace(file, error=damage.read_text()) if damage.exists() else file


def local_path(file: InputFile, folder: str) -> str:
    """The path of a file on this host with the capture's plain bytes; it is written if missing.

    Raises CaptureError if the capture is gone, EnvironmentFailed if the store or the disk fails or
    the capture has changed since it was described.
    """
    if file.data_path:
        return file.data_path
    identity = f"{file.path}\n{file.size}\n{file.tag}".encode("utf-8", "surrogateescape")
    path = os.path.join(_home(folder), hashlib.blake2b(identity, digest_size=16).hexdigest())
    if os.path.exists(path):
        return path
    try:
        with _locked(path + ".lock"):
            if not os.path.exists(path):
                _copy(file, path)
    except OSError as error:
        raise EnvironmentFailed(f"{file.path}: spooling to {path}: {error}") from error
    return path


def _home(folder: str) -> str:
    """The folder for copies on this host; see the module."""
    if os.path.isdir(folder):
        return folder
    local = os.environ.get("SPARK_LOCAL_DIRS", tempfile.gettempdir()).partition(",")[0]
    home = Path(local, os.path.basename(folder))
    if not home.is_dir():
        name, _, _ = home.name.rpartition("-")
        for other in Path(local).glob(f"{name}-*"):
            if time.time() - other.stat().st_mtime > _KEPT_S:
                shutil.rmtree(other, ignore_errors=True)
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(home)


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the lock of one copy, where the platform has flock."""
    with open(path, "wb") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass  # two processes may both write the copy, each to a file of its own
        yield


def _copy(file: InputFile, path: str) -> None:
    """Write the plain bytes of a capture to a temporary file, which then gets its name."""
    _check_version(file)
    descriptor, part = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as out:
            if file.compression == "none":
                damage = None
                _download(file, out)
            else:
                unpacked = Unpacked(file.path, file.compression)
                shutil.copyfileobj(unpacked, out, _PIECE)
                damage = unpacked.error
        _check_version(file)
        if damage is not None:
            Path(path + _DAMAGE).write_text(damage)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def _check_version(file: InputFile) -> None:
    """Raise EnvironmentFailed if an object was replaced since it was described."""
    if not object_store.is_remote(file.path):
        return
    with object_store.opened(file.path) as far:
        size, tag = far.version()
    if (size, tag) != (file.size, file.tag):
        sizes = "" if size == file.size else f" from {file.size} to {size} bytes"
        raise EnvironmentFailed(f"{file.path}: changed{sizes} while it was read; run it again")


def _download(file: InputFile, out: BinaryIO) -> None:
    """Write all bytes of an object, several ranges at a time."""
    with object_store.opened(file.path) as far, ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as pool:

        def fetch(pos: int) -> None:
            data = far.read_at(min(REQUEST_BYTES, file.size - pos), pos)
            os.pwrite(out.fileno(), data, pos)

        for _ in pool.map(fetch, range(0, file.size, REQUEST_BYTES)):
            pass


def _written(file: InputFile, folder: str) -> InputFile:
    """A stream, as the file in `folder` that its bytes were written to."""
    try:
        descriptor, path = tempfile.mkstemp(dir=folder)
        with os.fdopen(descriptor, "wb") as out:
            if file.path == STDIN:
                shutil.copyfileobj(sys.stdin.buffer, out, _PIECE)
            else:
                with open(file.path, "rb") as stream:
                    shutil.copyfileobj(stream, out, _PIECE)
        seen = look_at_file(path)
    except OSError as error:
        raise EnvironmentFailed(f"{file.path}: spooling to {folder}: {error}") from error
    if not seen.is_capture:
        raise CaptureError(f"{file.path}: {seen.error}")
    if seen.compression == "none":
        return replace(seen, path=file.path)
    seen = spooled(seen, folder)
    plain = local_path(seen, folder)
    os.unlink(path)
    return replace(seen, path=file.path, data_path=plain, size=os.path.getsize(plain))
