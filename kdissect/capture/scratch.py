"""Scratch space of a task: arrays in memory, or in unnamed temporary files.

The index of one connection, its decrypted bytes, or the payload of a bucket may be larger than
memory. Such arrays lie in temporary files, which disappear with the process in any case. They are
mapped, so kernels use them like any array, and the system keeps as much of them in memory as fits.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import IO

import numpy as np
import numpy.typing as npt

from kdissect.arrays import Array, Bytes
from kdissect.errors import EnvironmentFailed

FILE_BYTES_MIN = 1 << 20  # smaller arrays are always in memory
_ZEROS = bytes(1 << 20)


class Scratch:
    """Allocates the arrays of a task: in memory, or with `in_files` in files if they are large.

    All methods raise EnvironmentFailed if the disk has no room.
    """

    def __init__(self, *, in_files: bool = False) -> None:
        self.in_files = in_files

    def zeros(self, count: int, kind: npt.DTypeLike) -> Array:
        """An array of zeros."""
        return self._file_array(count, kind, np.zeros)

    def empty(self, count: int, kind: npt.DTypeLike) -> Array:
        """An array with undefined content."""
        return self._file_array(count, kind, np.empty)

    def copied(self, array: Array) -> Array:
        """A contiguous copy of a one-dimensional array, for example of a column of a table."""
        copy = self.empty(len(array), array.dtype)
        np.copyto(copy, array)
        return copy

    def _file_array(
        self, count: int, kind: npt.DTypeLike, in_memory: Callable[[int, npt.DTypeLike], Array]
    ) -> Array:
        size = count * np.dtype(kind).itemsize
        if not self.in_files or size < FILE_BYTES_MIN:
            array: Array = in_memory(count, kind)
            return array
        with _file() as file:
            try:
                _allocate(file, size)
                return _mapped(file, size).view(kind)
            except OSError as error:
                raise _no_room(error) from None


MEMORY = Scratch()


class Written:
    """Collects rows of one type into one array, in the memory or the files of a scratch."""

    def __init__(self, kind: npt.DTypeLike, scratch: Scratch) -> None:
        self._kind = np.dtype(kind)
        self._in_files = scratch.in_files
        self._parts: list[Bytes] = []
        self._file: IO[bytes] | None = None
        self._size = 0

    def append(self, rows: Array) -> int:
        """Add a contiguous array; returns the position of its first byte.

        Raises EnvironmentFailed if the disk is full.
        """
        pos = self._size
        data = rows.view(np.uint8).reshape(-1)
        self._size += len(data)
        if not self._in_files:
            self._parts.append(data.copy())
        elif len(data):
            self._file = self._file or _file()
            try:
                self._file.write(data.data)
            except OSError as error:
                raise _no_room(error) from None
        return pos

    def array(self) -> Array:
        """All rows, writable. Call it once; a file lives as long as the array."""
        if self._file is None:
            parts, self._parts = self._parts, []
            return np.concatenate([np.zeros(0, np.uint8), *parts]).view(self._kind)
        with self._file as file:
            try:
                file.flush()
                return _mapped(file, self._size).view(self._kind)
            except OSError as error:
                raise _no_room(error) from None


def _file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(prefix="kdissect-", buffering=len(_ZEROS))
    except OSError as error:
        raise _no_room(error) from None


def _allocate(file: IO[bytes], size: int) -> None:
    """Allocate the file's room on disk; without it a write to the map could end in SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    for start in range(0, size, len(_ZEROS)):  # macOS
        file.write(_ZEROS[: size - start])


def _mapped(file: IO[bytes], size: int) -> Bytes:
    return np.asarray(np.memmap(file, np.uint8, "r+", shape=(size,)))


def _no_room(error: OSError) -> EnvironmentFailed:
    return EnvironmentFailed(f"{tempfile.gettempdir()}: {error.strerror}")
