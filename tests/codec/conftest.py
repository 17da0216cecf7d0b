"""Memory in which a read outside of the given bytes ends the process."""

import ctypes
import mmap
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

PAGE = mmap.PAGESIZE
ROOM = 4 * PAGE
PROT_NONE, PROT_READ_WRITE = 0, 3


@pytest.fixture
def guarded() -> Iterator[NDArray[np.uint8]]:
    """Bytes between two pages that no one may touch."""
    pages = mmap.mmap(-1, ROOM + 2 * PAGE)
    array = np.frombuffer(pages, np.uint8)
    address = array.ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    guards = [ctypes.c_void_p(address), ctypes.c_void_p(address + PAGE + ROOM)]
    for guard in guards:
        assert libc.mprotect(guard, PAGE, PROT_NONE) == 0
    yield array[PAGE : PAGE + ROOM]
    for guard in guards:
        assert libc.mprotect(guard, PAGE, PROT_READ_WRITE) == 0
