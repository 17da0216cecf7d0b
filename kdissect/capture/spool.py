"""Bytes of a run that are in none of its captures as they are: decrypted ones, kept on disk.

A spool is an unnamed temporary file, so that the bytes need no memory, are gone with the process
however it ends, and are never found under a name.
"""

from __future__ import annotations

import mmap
import tempfile
from typing import IO

import numpy as np
import numpy.typing as npt

from kdissect.errors import EnvironmentFailed


class Spool:
    """Written first, front to back; then mapped as one array."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._size = 0

    def write(self, data: bytes) -> int:
        """Append; the position of the first byte. Raises EnvironmentFailed without room."""
        pos = self._size
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="kdissect-")  # noqa: SIM115
            self._file.write(data)
        except OSError as error:
            raise EnvironmentFailed(f"{tempfile.gettempdir()}: {error.strerror}") from None
        self._size += len(data)
        return pos

    def data(self) -> npt.NDArray[np.uint8]:
        """uint8[n], read-only: all that was written. The file lives as long as the array."""
        if self._file is None or not self._size:
            return np.zeros(0, np.uint8)
        try:
            self._file.flush()
            mapped = mmap.mmap(self._file.fileno(), self._size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise EnvironmentFailed(f"{tempfile.gettempdir()}: {error.strerror}") from None
        self._file.close()
        self._file = None
        return np.frombuffer(mapped, np.uint8)
