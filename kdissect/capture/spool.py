"""Bytes on disk that a step needs and that no local capture contains.

These are decrypted bytes, and a bucket's payload from captures in an object store. A spool is an
unnamed temporary file: its bytes need no memory, and it disappears with the process in any case.
"""

from __future__ import annotations

import tempfile
from typing import IO

import numpy as np
import numpy.typing as npt

from kdissect.capture import resident
from kdissect.errors import EnvironmentFailed

HELD_BYTES_MAX = 64 << 20  # bytes of payload in memory; more goes to disk


class Spool:
    """A temporary file that is written sequentially, then mapped as one array."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._size = 0

    def write(self, data: bytes) -> int:
        """Append; returns the position of the first byte. Raises EnvironmentFailed if the disk
        is full."""
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
        """uint8[n], read-only: all bytes. The file lives as long as the array."""
        if self._file is None or not self._size:
            return np.zeros(0, np.uint8)
        try:
            self._file.flush()
            data = resident.mapped(self._file.fileno(), tempfile.gettempdir())
        except OSError as error:
            raise EnvironmentFailed(f"{tempfile.gettempdir()}: {error.strerror}") from None
        self._file.close()
        self._file = None
        return data


class SpooledBytes:
    """Collects bytes in memory while they are few, else in a spool."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._spool: Spool | None = None

    def write(self, data: bytes) -> None:
        """Append. Raises EnvironmentFailed if the disk is full."""
        self._size += len(data)
        if self._spool is not None:
            self._spool.write(data)
            return
        self._pieces.append(data)
        if self._size > HELD_BYTES_MAX:
            self._spool = Spool()
            for piece in self._pieces:
                self._spool.write(piece)
            self._pieces = []

    def data(self) -> npt.NDArray[np.uint8]:
        """uint8[n], read-only: all bytes. Call it once."""
        if self._spool is not None:
            return self._spool.data()
        joined = b"".join(self._pieces)
        self._pieces = []
        return np.frombuffer(joined, np.uint8)
