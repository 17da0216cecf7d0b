"""Keeps the resident memory of a process small: pages of captures are released after a moment.

A kernel that reads size prefixes all over a capture leaves every touched page mapped, and Linux
maps sixteen around each. These pages are clean and belong to the page cache, but count as memory of
the process. With many workers on a large capture, that is the file several times over. So a thread
releases the pages of large mappings many times a second; a page that is read again comes from the
page cache. Small files are left alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import weakref

import numpy as np
import numpy.typing as npt

from kdissect import memory_maps
from kdissect.errors import EnvironmentFailed

WATCHED_SIZE_MIN = 128 << 20  # bytes of a file from which on its pages are released
INTERVAL_S = 0.02
# bytes of shared mappings, as a task writes them, that may stay resident
KEPT_MAX = 64 << 20

_lock = threading.RLock()
_watched: dict[int, int] = {}
_kept: dict[int, int] = {}
_deferred: list[tuple[int, int]] = []
_threads: list[threading.Thread] = []  # the one that runs, or none


def mapped(descriptor: int, name: str) -> npt.NDArray[np.uint8]:
    """uint8[size], read-only: the bytes of an open file, mapped until the array is deleted.

    The descriptor may be closed afterwards. name: of the file, for the error. Raises
    EnvironmentFailed.
    """
    size = os.fstat(descriptor).st_size
    if size == 0:
        return np.zeros(0, np.uint8)
    try:
        address = memory_maps.map_memory(
            size, memory_maps.READ_ONLY, memory_maps.PRIVATE, descriptor
        )
    except OSError as error:
        reason = error.strerror
        raise EnvironmentFailed(f"{name}: cannot be mapped into memory: {reason}") from None
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, unmap, address, size)
    watch(address, size)
    data: npt.NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)
    data.flags.writeable = False
    return data


def watch(address: int, size: int) -> None:
    """Release the pages of the read-only file mapping at `address` regularly, if it is large."""
    if size >= WATCHED_SIZE_MIN:
        _begin(_watched, address, size)


def keep_small(address: int, size: int) -> None:
    """Release the pages of a shared mapping when more than KEPT_MAX of this kind are resident.

    Written bytes stay in the page cache.
    """
    _begin(_kept, address, size)


def _begin(table: dict[int, int], address: int, size: int) -> None:
    with _lock:
        table[address] = size
        # a fork copies the table, but not the thread
        if not any(thread.is_alive() for thread in _threads):
            _threads[:] = [threading.Thread(target=_run, daemon=True, name="resident")]
            _threads[0].start()


def release() -> None:
    """Return freed memory to the system; glibc would keep it."""
    memory_maps.trim_heap()


def fault(address: int, size: int) -> str | None:
    """Return why bytes of a file mapping cannot be read; None if they can.

    Touching them would end the process with SIGBUS, because the disk fails or the file was cut.
    Linux before 5.14 cannot test this.
    """
    start = address // memory_maps.PAGE_SIZE * memory_maps.PAGE_SIZE
    if not size:
        return None
    try:
        memory_maps.read_pages(start, address + size - start)
    except OSError as error:
        is_untested = error.errno in (errno.EINVAL, errno.EINTR)
        return None if is_untested else os.strerror(errno.EIO)
    return None


def drop(address: int, size: int) -> None:
    """Release the pages of a read-only file mapping that contain these bytes."""
    start = address // memory_maps.PAGE_SIZE * memory_maps.PAGE_SIZE
    memory_maps.release_pages(start, address + size - start)


def unmap(address: int, size: int) -> None:
    """Unmap the memory; it must not be read any more."""
    if threading.current_thread() in _threads:
        # a garbage collection inside `_run`, which holds the table: unmap later
        _deferred.append((address, size))
        return
    with _lock:
        _unmap(address, size)


def _unmap(address: int, size: int) -> None:
    _watched.pop(address, None)
    _kept.pop(address, None)
    memory_maps.unmap_memory(address, size)


def _file_bytes() -> int:
    """Resident bytes of this process that are mapped files; 0 on systems that do not say it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[2]) * memory_maps.PAGE_SIZE
    except FileNotFoundError:
        return 0


def _run() -> None:
    pause = threading.Event()
    most = _file_bytes() + KEPT_MAX
    while True:
        pause.wait(INTERVAL_S)
        with _lock:
            dropped = list(_watched.items())
            if _kept and _file_bytes() > most:
                dropped += _kept.items()
            for address, size in dropped:
                # shared, or never written: the pages are read from the file again
                memory_maps.release_pages(address, size)
            while _deferred:
                _unmap(*_deferred.pop())
            if not _watched and not _kept:
                _threads.clear()
                return
