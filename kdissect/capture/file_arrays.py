"""Arrays that are too large for a task's memory: in unnamed files, mapped.

The index of one connection may be larger than memory. Its arrays then lie in temporary files, which
disappear with the process in any case. Touched pages are released from the process's memory after a
moment (`resident`), and stay in the page cache or on disk. Kernels use them like any array.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from kdissect import memory_maps
from kdissect.capture import resident
from kdissect.errors import EnvironmentFailed

FILE_BYTES_MIN = 1 << 20  # smaller arrays are always in memory
# bytes of larger arrays that a task keeps in memory; further ones go to files
MEMORY_BYTES = 320 << 20

COPIED_BYTES = 16 << 20  # up to this size, growing copies the rows

_ZEROS = bytes(1 << 20)


class Scratch:
    """Allocates the arrays of a task: in memory, or with `in_files` in files if they are large."""

    def __init__(self, *, in_files: bool = False) -> None:
        self.in_files = in_files
        self._left = MEMORY_BYTES

    def zeros(self, count: int, kind: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array of zeros. Raises EnvironmentFailed if the disk has no room for it."""
        return self._made(np.zeros, count, kind)

    def empty(self, count: int, kind: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array with undefined content. Raises EnvironmentFailed if the disk has no room for
        it."""
        return self._made(np.empty, count, kind)

    def _made(
        self, make: Callable[..., npt.NDArray[Any]], count: int, kind: npt.DTypeLike
    ) -> npt.NDArray[Any]:
        size = count * np.dtype(kind).itemsize
        if not self.in_files or size < FILE_BYTES_MIN:
            return make(count, kind)
        if self.take(size):
            array = make(count, kind)
            weakref.finalize(array, self.give_back, size)
            return array
        with _file() as file:
            try:
                _allocate(file, size)
            except OSError as error:
                raise _no_room(error) from None
            return _mapped(file, size).view(kind)

    def take(self, size: int) -> bool:
        """Reserve memory; returns whether so many bytes are still allowed."""
        if not self.in_files:
            return True
        is_room = size <= self._left
        self._left -= size if is_room else 0
        return is_room

    def give_back(self, size: int) -> None:
        """Release reserved memory."""
        self._left += size if self.in_files else 0

    def copied(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A contiguous copy of a one-dimensional array, for example of a column of a table."""
        copy = self.empty(len(array), array.dtype)
        np.copyto(copy, array)
        return copy


MEMORY = Scratch()


class Written:
    """Collects rows of one type into one array: in memory while the scratch allows, else in a
    file."""

    def __init__(self, kind: npt.DTypeLike, scratch: Scratch) -> None:
        self._kind = np.dtype(kind)
        self._scratch = scratch
        self._memory = np.empty(0, np.uint8)
        self._file: IO[bytes] | None = None
        self._size = 0

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Add a contiguous array. Raises EnvironmentFailed if the disk is full."""
        data = rows.view(np.uint8).reshape(-1)
        end = self._size + len(data)
        if self._file is None and end > len(self._memory):
            is_small = len(self._memory) < COPIED_BYTES
            size = max(end, 4 * len(self._memory) if is_small else len(self._memory) * 5 // 4)
            if not self._scratch.take(size - len(self._memory)):
                self._file = _file()
                self._write(self._memory[: self._size])
                self._scratch.give_back(len(self._memory))
                self._memory = np.empty(0, np.uint8)
            elif is_small:  # `resize` would fill the new pages with zeros
                memory = np.empty(size, np.uint8)
                memory[: self._size] = self._memory[: self._size]
                self._memory = memory
            else:  # copying would take twice the memory for a while
                self._memory.resize(size, refcheck=False)
        if self._file is None:
            self._memory[self._size : end] = data
        else:
            self._write(data)
        self._size = end

    def _write(self, data: npt.NDArray[np.uint8]) -> None:
        assert self._file is not None
        rest = data.data
        try:
            while len(rest):
                rest = rest[os.write(self._file.fileno(), rest) :]
        except OSError as error:
            raise _no_room(error) from None

    def array(self) -> npt.NDArray[Any]:
        """All rows, writable. Call it once; the file lives as long as the array."""
        if self._file is None:
            memory, self._memory = self._memory, np.empty(0, np.uint8)
            weakref.finalize(memory, self._scratch.give_back, len(memory))
            return memory[: self._size].view(self._kind)
        with self._file as file:
            return _mapped(file, self._size).view(self._kind)


def _file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(prefix="kdissect-", buffering=0)
    except OSError as error:
        raise _no_room(error) from None


def _allocate(file: IO[bytes], size: int) -> None:
    """Allocate the file's room on disk; without it a write to the map could end in SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    for start in range(0, size, len(_ZEROS)):  # macOS
        file.write(_ZEROS[: size - start])


def _no_room(error: OSError) -> EnvironmentFailed:
    return EnvironmentFailed(f"{tempfile.gettempdir()}: {error.strerror}")


def _mapped(file: IO[bytes], size: int) -> npt.NDArray[np.uint8]:
    length = -(-size // memory_maps.PAGE_SIZE) * memory_maps.PAGE_SIZE
    try:
        address = memory_maps.map_memory(
            length, memory_maps.READ_WRITE, memory_maps.SHARED, file.fileno()
        )
    except OSError as error:
        raise _no_room(error) from None
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, resident.unmap, address, length)
    resident.keep_small(address, length)
    return np.frombuffer(memoryview(memory), np.uint8)
