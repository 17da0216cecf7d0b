"""Keeps the resident part of a process small: what was read of captures is let go after a moment.

A kernel that reads size prefixes all over a capture leaves every page it touched mapped, and the
kernel (the operating system's) maps sixteen around each. These pages are clean and belong to the
page cache, but they count as the process's memory: with many workers on a large capture that is
the file several times over. So a thread drops the mappings of large files a few times a second;
a page that is read again is found in the page cache. Small files are left alone.
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

WATCHED_SIZE_MIN = 128 << 20  # bytes of a file from which on it is watched
INTERVAL_S = 0.02
KEPT_MAX = (
    64 << 20
)  # bytes of shared mappings, such as a task writes, that stay until there are more

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
    """uint8[size], read-only: an open file's bytes, mapped until the array is gone, and watched.

    The descriptor may be closed. name: of the file, for the error. Raises EnvironmentFailed.
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
    """Drop the pages of the read-only file mapping at `address` from time to time."""
    if size >= WATCHED_SIZE_MIN:
        _begin(_watched, address, size)


def keep_small(address: int, size: int) -> None:
    """The same for a shared mapping, once KEPT_MAX of its kind may be resident: what was written
    stays in the page cache."""
    _begin(_kept, address, size)


def _begin(table: dict[int, int], address: int, size: int) -> None:
    with _lock:
        table[address] = size
        # a fork takes the table along, but not the thread
        if not any(thread.is_alive() for thread in _threads):
            _threads[:] = [threading.Thread(target=_run, daemon=True, name="resident")]
            _threads[0].start()


def release() -> None:
    """Give back to the system what was freed; glibc keeps it for later otherwise."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def fault(address: int, size: int) -> str | None:
    """Why bytes of a file mapping cannot be read, None where they can.

    Touching them would end the process, by SIGBUS: the disk fails, or the file was cut. Systems
    before Linux 5.14 cannot tell.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if not size or not _libc.madvise(start, address + size - start, _MADV_POPULATE_READ):
        return None
    number = ctypes.get_errno()
    return None if number in (errno.EINVAL, errno.EINTR) else os.strerror(errno.EIO)


def drop(address: int, size: int) -> None:
    """Drop the whole pages that bytes of a read-only file mapping lie in, and theirs alone."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(start, address + size - start, _MADV_DONTNEED)


def unmap(address: int, size: int) -> None:
    """Unmap; nothing may read there any more."""
    if threading.current_thread() in _threads:
        # a collection of garbage within `_run`: not between its look at the table and its call
        _deferred.append((address, size))
        return
    with _lock:
        _unmap(address, size)


def _unmap(address: int, size: int) -> None:
    _watched.pop(address, None)
    _kept.pop(address, None)
    _libc.munmap(address, size)


def _file_bytes() -> int:
    """Of the process, resident pages of files."""
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
                # shared, or never written: the pages come back from the file
                _libc.madvise(address, size, _MADV_DONTNEED)
            while _deferred:
                _unmap(*_deferred.pop())
            if not _watched and not _kept:
                _threads.clear()
                return
