"""Calls of the C library about memory, where it has them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

PAGE_SIZE = mmap.PAGESIZE

_POPULATE_READ = 22  # of madvise, from Linux 5.14 on


def _library() -> ctypes.CDLL | None:
    """Return the C library of this process; None on Windows."""
    try:
        return ctypes.CDLL(None, use_errno=True)
    except TypeError:
        return None


_libc = _library()


def read_pages(address: int, size: int) -> None:
    """Read mapped pages into memory; raises OSError. Before Linux 5.14 this is EINVAL."""
    if _libc is None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_READ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def trim_heap() -> None:
    """Return freed memory to the system, which glibc would keep."""
    if _libc is not None and hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(ctypes.c_size_t(0))
