"""The bytes of a run's captures: mapped files, by source number.

A file is mapped read-only when its bytes are first needed in a process. Arrow makes the maps,
because Python's `mmap` keeps a file descriptor open per map and a run may have thousands of rotated
files. Read pages belong to the system's page cache, which keeps as many of them as
memory allows. A capture that cannot be mapped, such as an object in a store, has a copy on this
host (`copies`).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from kdissect.arrays import Addresses, Bytes, Ints, Positions, Rows
from kdissect.capture.copies import local_path
from kdissect.capture.inputs import InputFile
from kdissect.capture.packet_reader import STEP_CUT, STEP_END
from kdissect.errors import CaptureError, EnvironmentFailed
from kdissect.jit import copy_bytes, kernel

_POPULATE_READ = 22  # advice of madvise: read mapped pages into memory, from Linux 5.14 on
_libc: ctypes.CDLL | None = None
with suppress(TypeError):  # Windows has no library without a name
    _libc = ctypes.CDLL(None, use_errno=True)

WALKED_BYTES = 8 << 20  # bytes tested at a time in a walk over a capture

CARRIED_FROM = 1 << 62  # positions from here on are those of `Sources.carried`


@kernel
def _locate(
    pos: Positions,
    length: Ints,
    source: Ints,
    bases: Addresses,
    sizes: Ints,
    carried: Addresses,
    out: Addresses,
) -> tuple[int, int]:
    """Fill `out` with the address of each extent, 0 for missing bytes.

    carried: uint64[2], address and size of the carried bytes.
    Returns (total bytes, -1), or (0, row) of the first extent outside its source.
    """
    total = 0
    for row in range(len(pos)):
        index = np.int64(source[row])
        out[row] = np.uint64(0)
        is_carried = pos[row] >= CARRIED_FROM
        if index < -1 or length[row] < 0 or (index >= len(sizes) and not is_carried):
            return 0, row
        if index >= 0:
            base, size, at = carried[0], np.int64(carried[1]), pos[row] - CARRIED_FROM
            if not is_carried:
                base, size, at = bases[index], sizes[index], pos[row]
            # an empty extent may lie anywhere, because nothing is read
            if length[row] > 0 and (at < 0 or at > size - length[row]):
                return 0, row
            out[row] = base + np.uint64(at)
        total += length[row]
    return total, -1


@kernel
def _copy_extents(address: Addresses, length: Ints, out: Bytes, target: int) -> None:
    """Copy the bytes at each address to `out`, which lies at the address `target`; zeros for
    address 0."""
    at = 0
    for row in range(len(address)):
        count = length[row]
        if address[row] == 0:
            out[at : at + count] = 0
        elif count > 0:
            copy_bytes(target + at, np.int64(address[row]), count)
        at += count


def _map(path: str) -> Bytes:
    """uint8[size], read-only: the file's bytes, mapped until the array is deleted.

    Raises CaptureError if the file cannot be opened, EnvironmentFailed if it cannot be mapped.
    """
    try:
        with pa.memory_map(os.fsencode(path)) as file:
            return np.frombuffer(file.read_buffer(), np.uint8)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno == errno.ENOMEM:
            raise EnvironmentFailed(f"{path}: cannot be mapped into memory: {reason}") from None
        raise CaptureError(f"{path}: {reason}") from None


def fault(address: int, size: int) -> str | None:
    """Return why bytes of a file mapping cannot be read; None if they can.

    Touching them would end the process with SIGBUS, because the disk fails or the file was cut.
    Linux before 5.14 and other systems cannot test this.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    extent = ctypes.c_void_p(start), ctypes.c_size_t(address + size - start)
    if not size or _libc is None or not _libc.madvise(*extent, _POPULATE_READ):
        return None
    is_untested = ctypes.get_errno() in (errno.EINVAL, errno.EINTR)
    return None if is_untested else os.strerror(errno.EIO)


def was_cut(path: str, size: int) -> EnvironmentFailed | None:
    """The error for a file that had `size` bytes when it was mapped and has fewer now; else
    None."""
    try:
        now = os.stat(path).st_size
    except OSError:
        return None  # mapped bytes stay readable
    if now >= size:
        return None
    return EnvironmentFailed(f"{path}: was cut from {size} to {now} bytes while it was read")


@dataclass(slots=True)
class Sources:
    """The bytes of a run's captures, by the number that `SEGMENT.source` and `EXTENT.source` have.

    files: a path, or a description of the capture, for each number. folder: for copies of captures
    that cannot be mapped (`copies`). arrays: the bytes of each source that was needed so far, and
    of sources that are in no file. carried: bytes of any source that no file has as they are, such
    as decrypted ones; their positions begin at CARRIED_FROM.
    """

    files: Sequence[str | InputFile]
    folder: str = ""
    arrays: dict[int, Bytes] = field(default_factory=dict)
    carried: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))
    _bases: Addresses = field(init=False, repr=False)
    _sizes: Ints = field(init=False, repr=False)
    _buffer: Bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._bases, self._sizes = np.zeros(len(self), np.uint64), np.full(len(self), -1, np.int64)
        self._buffer = np.zeros(0, np.uint8)

    def __len__(self) -> int:
        return len(self.files)

    def name(self, source: int) -> str:
        """The path of a source, as the user knows it."""
        file = self.files[source]
        return file if isinstance(file, str) else file.path

    def data(self, source: int) -> Bytes:
        """uint8[size], read-only: the bytes of a source, mapped until all handles are deleted.

        Raises CaptureError if it cannot be opened, EnvironmentFailed if it cannot be mapped.
        """
        if self._sizes[source] < 0:
            if source not in self.arrays:
                file = self.files[source]
                path = file if isinstance(file, str) else local_path(file, self.folder)
                self.arrays[source] = _map(path)
            data = self.arrays[source]
            self._bases[source] = data.ctypes.data if len(data) else 0
            self._sizes[source] = len(data)
        return self.arrays[source]

    def windows(self, source: int, cursor: np.void, stop: int, step: Callable[[], int]) -> int:
        """Step to the first record at or after `stop`, testing that the bytes are readable; returns
        the outcome.

        step: moves the cursor up to its end and returns the outcome of the last step. If a record
        is cut, its end becomes the file's. Raises EnvironmentFailed if the disk fails.
        """
        size = len(self.data(source))
        stop = min(stop, size)
        end = min(stop, int(cursor["pos"]) + WALKED_BYTES)
        while True:
            self._test(source, int(cursor["pos"]), end)
            cursor["end"] = end
            outcome = step()
            pos = int(cursor["pos"])
            if outcome == STEP_CUT:
                needed = pos + int(cursor["needed"])
                if needed > size:
                    cursor["end"] = size
                    return outcome
                end = max(needed, min(stop, pos + WALKED_BYTES))
            elif outcome == STEP_END and pos < stop:
                end = min(stop, pos + WALKED_BYTES)
            else:
                return outcome

    def _test(self, source: int, start: int, end: int) -> None:
        """Raise EnvironmentFailed if data[start:end] cannot be read."""
        data = self.data(source)
        reason = fault(data.ctypes.data + start, end - start)
        if reason is not None:
            path = self.name(source)
            raise was_cut(path, len(data)) or EnvironmentFailed(
                f"{path}: bytes {start} to {end} cannot be read: {reason}"
            )

    def carrying(self, carried: Bytes) -> Sources:
        """These sources with other carried bytes."""
        return replace(self, carried=carried)

    def addresses(self, source: Ints, pos: Positions, length: Ints) -> Addresses:
        """uint64[n]: addresses of the bytes of extents; 0 if source is -1.

        These sources must outlive the addresses. Raises ValueError if an extent lies outside its
        source.
        """
        return self._located(source, pos, length)[0]

    def _located(self, source: Ints, pos: Positions, length: Ints) -> tuple[Addresses, int]:
        """(addresses of extents, total of their bytes)."""
        is_used = np.zeros(len(self) + 1, np.bool_)  # the last one is that of source -1
        in_files = source[(pos < CARRIED_FROM) & (length > 0)]
        is_used[in_files.clip(-1, len(self) - 1)] = True
        for number in np.flatnonzero(is_used[:-1] & (self._sizes < 0)).tolist():
            self.data(number)
        located = np.empty(len(pos), np.uint64)
        carried = np.array([self.carried.ctypes.data, len(self.carried)], np.uint64)
        total, row = _locate(
            np.ascontiguousarray(pos),
            np.ascontiguousarray(length, np.int64),
            np.ascontiguousarray(source, np.int64),
            self._bases,
            self._sizes,
            carried,
            located,
        )
        if row >= 0:
            place = (int(source[row]), int(pos[row]), int(length[row]))
            raise ValueError(f"extents: row {row} does not lie inside a file of the run: {place}")
        return located, int(total)

    def gather(self, extents: Rows) -> Bytes:
        """The bytes of EXTENT[n], concatenated; zeros if source is -1.

        The array is a view of a buffer that the next call overwrites: copy bytes to keep them.
        Raises ValueError if an extent lies outside its source.
        """
        located, total = self._located(extents["source"], extents["pos"], extents["length"])
        if total > len(self._buffer):
            self._buffer = np.empty(max(total, 2 * len(self._buffer)), np.uint8)
        length = np.ascontiguousarray(extents["length"])
        _copy_extents(located, length, self._buffer, self._buffer.ctypes.data)
        return self._buffer[:total]
