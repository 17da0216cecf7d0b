"""An object of a store as an array, of which only fetched ranges are in memory.

Kernels take the array of a whole capture and positions or addresses in it. For an object the array
is reserved, empty address space of its size. `fetch` reads ranges into it, in blocks and several at
a time, and releases the least recently used blocks. So a process holds at most BUDGET_BYTES of an
object, or the ranges of one call. Bytes that were not fetched read as zeros.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kdissect import memory_maps
from kdissect.capture import object_store
from kdissect.errors import CaptureError, EnvironmentFailed

BLOCK_BYTES = 256 << 10  # a smaller request takes a store as long
REQUEST_BYTES_MAX = 8 << 20  # per request; several are made at a time
BUDGET_BYTES = 64 << 20
WHOLE_RECORD_MAX = 16 << 20  # largest record that `head_and_tail` fetches completely
_REQUESTS_AT_A_TIME = 4

NOT_FETCHED = memory_maps.READ_ONLY  # protection of bytes that are not there: they read as zeros


class Version(NamedTuple):
    """The state of an object when the run began: size in bytes, and the store's tag of its
    content."""

    size: int
    tag: str


def version_of(file: object_store.ObjectFile) -> Version:
    """The version of an open object."""
    facts = file.metadata()
    tag = facts.get("ETag") or facts.get("Last-Modified") or b""
    return Version(file.size(), (tag if isinstance(tag, str) else tag.decode()).strip('"'))


class Ranged:
    """The bytes of one object. `fetch` raises EnvironmentFailed if they cannot be read."""

    def __init__(self, url: str, version: Version) -> None:
        self.url = url
        self.version = version
        self.data: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._present: dict[int, None] = {}  # blocks in memory, least recently used first
        self._file: Any = None
        self._lock = threading.RLock()
        if not version.size:
            return
        self._size = -(-version.size // memory_maps.PAGE_SIZE) * memory_maps.PAGE_SIZE
        flags = memory_maps.PRIVATE | memory_maps.ANONYMOUS | memory_maps.NO_RESERVE
        try:
            self._address = memory_maps.map_memory(self._size, NOT_FETCHED, flags)
        except OSError as error:
            reason = error.strerror
            raise EnvironmentFailed(
                f"{url}: no address space for {version.size} bytes: {reason}"
            ) from None
        memory = (ctypes.c_uint8 * version.size).from_address(self._address)
        weakref.finalize(memory, memory_maps.unmap_memory, self._address, self._size)
        self.data = np.frombuffer(memoryview(memory), np.uint8)
        self.data.flags.writeable = False

    @property
    def resident_bytes(self) -> int:
        return len(self._present) * BLOCK_BYTES

    def fetch(self, start: npt.ArrayLike, end: npt.ArrayLike) -> None:
        """Make data[start:end] readable, for each range (int64[n]) inside the object."""
        begin, stop = np.atleast_1d(start), np.atleast_1d(end)
        is_range = stop > begin
        first, last = begin[is_range] // BLOCK_BYTES, (stop[is_range] - 1) // BLOCK_BYTES
        count = last - first + 1
        blocks = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(count.sum())
        with self._lock:
            self._have(np.unique(blocks).tolist())

    def head_and_tail(self, start: int, end: int) -> None:
        """Fetch a record; of one that is larger than any packet, only its beginning and end."""
        if end - start <= WHOLE_RECORD_MAX:
            self.fetch(start, end)
        else:
            self.fetch([start, end - BLOCK_BYTES], [start + WHOLE_RECORD_MAX, end])

    def _have(self, blocks: list[int]) -> None:
        missing = []
        for block in blocks:
            if block in self._present:
                del self._present[block]  # moved to the end of the queue
                self._present[block] = None
            else:
                missing.append(block)
        if not missing:
            return
        room = max(BUDGET_BYTES // BLOCK_BYTES, len(blocks)) - len(missing)
        while len(self._present) > room:
            self._drop(next(iter(self._present)))
        spans = list(_spans(missing))
        if self._file is None:
            self._open()
        if len(spans) == 1:
            self._read(*spans[0])
        else:
            with ThreadPoolExecutor(min(_REQUESTS_AT_A_TIME, len(spans))) as pool:
                for _ in pool.map(lambda span: self._read(*span), spans):
                    pass
        self._present.update(dict.fromkeys(missing))

    def _drop(self, block: int) -> None:
        del self._present[block]
        pos = block * BLOCK_BYTES
        size = min(BLOCK_BYTES, self._size - pos)
        memory_maps.release_pages(self._address + pos, size)
        memory_maps.protect(self._address + pos, size, NOT_FETCHED)

    def _open(self) -> None:
        try:
            self._file = object_store.opened(self.url)
        except CaptureError as error:  # it existed when the run began
            raise EnvironmentFailed(str(error)) from None
        version = version_of(self._file)
        if version != self.version:
            raise changed(self.url, self.version, version)

    def _read(self, first: int, count: int) -> None:
        """Read `count` blocks from `first` on into their places."""
        pos = first * BLOCK_BYTES
        size = min(count * BLOCK_BYTES, self.version.size - pos)
        data = self._file.read_at(size, pos)
        if len(data) != size:
            raise changed(self.url, self.version, Version(pos + len(data), self.version.tag))
        address = self._address + pos
        room = min(count * BLOCK_BYTES, self._size - pos)
        try:
            memory_maps.protect(address, room, memory_maps.READ_WRITE)
        except OSError as error:
            raise EnvironmentFailed(f"{self.url}: {error.strerror}") from None
        ctypes.memmove(address, data, size)


def changed(url: str, before: Version, now: Version) -> EnvironmentFailed:
    """The error for an object that was replaced during the run."""
    sizes = "" if before.size == now.size else f" from {before.size} to {now.size} bytes"
    return EnvironmentFailed(f"{url}: changed{sizes} while it was read; run it again")


def _spans(blocks: list[int]) -> Iterable[tuple[int, int]]:
    """Yield (first, count) of runs of ascending blocks, none larger than REQUEST_BYTES_MAX."""
    most = REQUEST_BYTES_MAX // BLOCK_BYTES
    first, count = blocks[0], 0
    for block in blocks:
        if block != first + count or count == most:
            yield first, count
            first, count = block, 0
        count += 1
    yield first, count
