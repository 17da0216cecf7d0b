"""Maps files into memory, by the calls of the C library.

Python's `mmap` keeps a file descriptor for each map. Windows has none of these calls: there
`map_file` raises OSError.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE_SIZE = mmap.PAGESIZE

_POPULATE_READ = 22  # of madvise, from Linux 5.14 on
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
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if hasattr(library, "malloc_trim"):  # glibc only
        library.malloc_trim.argtypes = (ctypes.c_size_t,)
    return library


_libc = _library()


def map_file(descriptor: int, size: int) -> npt.NDArray[np.uint8]:
    """uint8[size], read-only: the first bytes of an open file, mapped until the array is deleted.

    Raises OSError.
    """
    if _libc is None:
        raise OSError(errno.ENOSYS, "memory maps need Linux or macOS; use WSL on Windows")
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor, 0)
    if address is None or address == _FAILED:
        raise _error()
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size)
    data: npt.NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)
    data.flags.writeable = False
    return data


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
