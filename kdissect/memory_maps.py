"""Maps files and address space into memory, by the calls of the C library.

Python's `mmap` keeps a file descriptor for each map, and cannot reserve address space. Windows has
none of these calls: there `map_memory` raises OSError, and released pages stay.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from typing import Any

READ_ONLY, READ_WRITE = 1, 3  # protection
PRIVATE = 2
# numbers of the system; Python's module lacks MAP_NORESERVE in some releases
ANONYMOUS = getattr(mmap, "MAP_ANONYMOUS", 0)
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
PAGE_SIZE = mmap.PAGESIZE

_DONT_NEED, _POPULATE_READ = 4, 22
_FAILED = ctypes.c_void_p(-1).value


def _library() -> Any:
    """Return the C library of this process; None where it has no `mmap`."""
    try:
        library: Any = ctypes.CDLL(None, use_errno=True)
        library.mmap.restype = ctypes.c_void_p
    except (TypeError, AttributeError, OSError):
        return None
    library.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if hasattr(library, "malloc_trim"):  # glibc only
        library.malloc_trim.argtypes = (ctypes.c_size_t,)
    return library


_libc = _library()


def map_memory(size: int, protection: int, flags: int, descriptor: int = -1) -> int:
    """Map `size` bytes of an open file, or address space without one; returns the address.

    Raises OSError.
    """
    if _libc is None:
        raise OSError(errno.ENOSYS, "memory maps need Linux or macOS; use WSL on Windows")
    address = _libc.mmap(None, size, protection, flags, descriptor, 0)
    if address is None or address == _FAILED:
        raise _error()
    return int(address)


def unmap_memory(address: int, size: int) -> None:
    _libc.munmap(address, size)


def protect(address: int, size: int, protection: int) -> None:
    """Set the protection of mapped pages; raises OSError."""
    if _libc.mprotect(address, size, protection):
        raise _error()


def release_pages(address: int, size: int) -> None:
    """Release mapped pages from memory; those of a file are read again when they are needed."""
    if _libc is not None:
        _libc.madvise(address, size, _DONT_NEED)


def read_pages(address: int, size: int) -> None:
    """Read mapped pages into memory; raises OSError. Before Linux 5.14 this is EINVAL."""
    if _libc is None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    if _libc.madvise(address, size, _POPULATE_READ):
        raise _error()


def trim_heap() -> None:
    """Return freed memory to the system, which glibc would keep."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
