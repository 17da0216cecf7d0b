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
import mmap
import os
import threading
import weakref

import numpy as np
import numpy.typing as npt

from kdissect.errors import EnvironmentFailed

WATCHED_SIZE_MIN = 128 << 20  # bytes of a file from which on its pages are released
INTERVAL_S = 0.02
# bytes of shared mappings, as a task writes them, that may stay resident
KEPT_MAX = 64 << 20

_MADV_DONTNEED, _MADV_POPULATE_READ = 4, 22
_PROT_READ, _MAP_PRIVATE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
if hasattr(_libc, "malloc_trim"):
    _libc.malloc_trim.argtypes = (ctypes.c_size_t,)

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
    address = _libc.mmap(None, size, _PROT_READ, _MAP_PRIVATE, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        reason = os.strerror(ctypes.get_errno())
        raise EnvironmentFailed(f"{name}: cannot be mapped into memory: {reason}")
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
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def fault(address: int, size: int) -> str | None:
    """Why bytes of a file mapping cannot be read; None if they can.

    Touching them would end the process with SIGBUS, because the disk fails or the file was cut.
    Linux before 5.14 cannot test this.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if not size or not _libc.madvise(start, address + size - start, _MADV_POPULATE_READ):
        return None
    number = ctypes.get_errno()
    return None if number in (errno.EINVAL, errno.EINTR) else os.strerror(errno.EIO)


def drop(address: int, size: int) -> None:
    """Release the pages of a read-only file mapping that contain these bytes."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(start, address + size - start, _MADV_DONTNEED)


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
    _libc.munmap(address, size)


def _file_bytes() -> int:
    """Resident bytes of this process that are mapped files."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[2]) * mmap.PAGESIZE


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
                _libc.madvise(address, size, _MADV_DONTNEED)
            while _deferred:
                _unmap(*_deferred.pop())
            if not _watched and not _kept:
                _threads.clear()
                return
