"""The bytes of a run's captures: mapped files, objects in stores, and copies of ranges of them.

A file is mapped read-only on first use in a process; a `Sources` travels between processes as a
list of paths. The maps are made with the system's `mmap`, because Python's keeps a file descriptor
open per map and a run may have thousands of rotated files.

Read pages belong to the system's page cache, which keeps as many of them as memory allows.

Of an object in a store (`object_bytes`), only fetched ranges are in memory. A walk fetches through
`windows`, and `gather` fetches what it copies. Scattered reads would take a request for every few
bytes, so `holding` supplies their payload from a copy.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kdissect import memory_maps
from kdissect.capture import object_bytes
from kdissect.capture.object_bytes import Ranged, Version
from kdissect.capture.packet_reader import END, NEEDED, POS, STEP_CUT, STEP_END
from kdissect.capture.segments import ranges_read
from kdissect.errors import CaptureError, EnvironmentFailed
from kdissect.jit import JIT_ENABLED, kernel

WALKED_BYTES = 8 << 20  # bytes made readable at a time in a walk over a capture

_OK, _BAD_SOURCE, _BAD_LENGTH, _BAD_POS = 0, 1, 2, 3
_FAULTS = {
    _BAD_SOURCE: "names no file of the run",
    _BAD_LENGTH: "has a negative length",
    _BAD_POS: "does not lie inside its file",
}

if JIT_ENABLED:

    @intrinsic
    def _copy(typingctx: Any, address: Any, out: Any, pos: Any, count: Any) -> Any:
        """out[pos:pos + count] = the bytes at an address."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[1])(context, builder, args[1])
            pointer = ir.IntType(8).as_pointer()
            target = builder.gep(builder.bitcast(array.data, pointer), [args[2]])
            origin = builder.inttoptr(args[0], pointer)
            cgutils.raw_memcpy(builder, target, origin, args[3], 1)
            return context.get_dummy_value()

        return types.void(types.uint64, out, types.int64, types.int64), codegen
else:

    def _copy(address: Any, out: Any, pos: int, count: int) -> None:
        data = ctypes.string_at(int(address), int(count))
        out[pos : pos + count] = np.frombuffer(data, np.uint8)


@kernel
def _check_extents(pos: Any, length: Any, source: Any, sizes: Any) -> Any:
    """(fault, row) of the first extent outside its file, or (_OK, total bytes)."""
    total = 0
    for row in range(len(pos)):
        index = np.int64(source[row])
        if index < -1 or index >= len(sizes):
            return _BAD_SOURCE, row
        if length[row] < 0:
            return _BAD_LENGTH, row
        # an empty extent may lie anywhere, because nothing is read
        if index >= 0 and length[row] > 0:
            if pos[row] < 0 or pos[row] > sizes[index] - length[row]:
                return _BAD_POS, row
        total += length[row]
    return _OK, total


@kernel
def _addresses(
    pos: Any, length: Any, source: Any, bases: Any, starts: Any, place: Any, end: Any, offset: Any,
    staged: int, out: Any,
) -> None:  # fmt: skip
    """The address of each checked extent: in its copy if [place, end) contains it, else in the
    map.

    starts: position of each source in the concatenated bytes of the run, in which `place`
    (ascending) and `end` are counted. offset: position of each copy after address `staged`. Missing
    bytes get 0.
    """
    at = 0  # the copy of the previous extent: the next one mostly follows it
    for row in range(len(pos)):
        if source[row] < 0:
            out[row] = np.uint64(0)
            continue
        out[row] = bases[source[row]] + np.uint64(pos[row])
        here = starts[source[row]] + pos[row]
        if at + 1 < len(place) and place[at + 1] <= here:
            at += 1
        if at >= len(place) or place[at] > here or here >= end[at]:
            low, high = 0, len(place)
            while low < high:
                middle = (low + high) >> 1
                if place[middle] <= here:
                    low = middle + 1
                else:
                    high = middle
            at = max(0, low - 1)
        if at < len(place) and place[at] <= here and here + length[row] <= end[at]:
            out[row] = np.uint64(staged) + np.uint64(offset[at] + here - place[at])


@kernel
def _copy_extents(address: Any, length: Any, rows: Any, out: Any, at: int) -> Any:
    """Copy extents, in the order of `rows`, to `out` from `at` on; returns the end of the copy."""
    for number in range(len(rows)):
        row = rows[number]
        count = length[row]
        if address[row] == 0:
            out[at : at + count] = 0
        elif count > 0:
            _copy(address[row], out, at, count)
        at += count
    return at


def _map(path: str) -> npt.NDArray[np.uint8]:
    """uint8[size], read-only: the file's bytes, mapped until the array is deleted.

    Raises CaptureError if the file cannot be opened, EnvironmentFailed if it cannot be mapped.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CaptureError(f"{path}: {error.strerror}") from None
    try:
        size = os.fstat(descriptor).st_size
        if size == 0:
            return np.zeros(0, np.uint8)
        address = memory_maps.map_memory(
            size, memory_maps.READ_ONLY, memory_maps.PRIVATE, descriptor
        )
    except OSError as error:
        reason = error.strerror
        raise EnvironmentFailed(f"{path}: cannot be mapped into memory: {reason}") from None
    finally:
        os.close(descriptor)
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, memory_maps.unmap_memory, address, size)
    data: npt.NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)
    data.flags.writeable = False
    return data


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


def _portions(pos: Any, length: Any, is_far: Any) -> Iterator[slice]:
    """Yield slices of rows whose blocks fit an object's budget; one slice if all are files."""
    if not is_far.any():
        yield slice(0, len(pos))
        return
    size = object_bytes.BLOCK_BYTES
    first, last = pos // size, (pos + length - 1) // size
    before = np.concatenate(([-1], last[:-1]))
    blocks = np.where(is_far, last - first + (first != before), 0)
    number = (np.cumsum(blocks) - blocks) * size // object_bytes.BUDGET_BYTES
    bounds = np.flatnonzero(np.diff(number)) + 1
    for low, high in itertools.pairwise([0, *bounds.tolist(), len(pos)]):
        yield slice(low, high)


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


def _columns(extents: npt.NDArray[np.void]) -> tuple[Any, Any, Any]:
    pos, length, source = (np.ascontiguousarray(extents[n]) for n in ("pos", "length", "source"))
    return pos, length, source


@dataclass(frozen=True, slots=True)
class _Held:
    """Payload that `holding` was given: bytes [place, end) of the run, ascending, at `offset` in
    `data`."""

    place: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    data: npt.NDArray[np.uint8]


_EXTENT = np.dtype([("pos", "<i8"), ("length", "<i8"), ("source", "<i4")])
_NONE = np.zeros(0, np.int64)
_NONE_HELD = _Held(_NONE, _NONE, _NONE, np.zeros(0, np.uint8))


class Sources:
    """The files of a run, by the index that `SEGMENT.source` and `EXTENT.source` contain."""

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        versions: Sequence[Version | None] = (),
    ) -> None:
        """versions: one per path, None for a file; empty if all paths are files."""
        self.paths = [os.fspath(path) for path in paths]
        self.versions = list(versions) or [None] * len(self.paths)
        self._maps: dict[int, npt.NDArray[np.uint8]] = {}
        self._ranged: dict[int, Ranged] = {}
        self._bases: npt.NDArray[np.uint64] | None = None
        self._sizes: npt.NDArray[np.int64] | None = None
        self._buffer = np.zeros(0, np.uint8)
        self._held = _NONE_HELD

    def __reduce__(self) -> tuple[Any, ...]:
        return Sources, (self.paths, self.versions)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def is_far(self) -> bool:
        """Return whether any source is an object in a store."""
        return any(version is not None for version in self.versions)

    def data(self, source: int) -> npt.NDArray[np.uint8]:
        """uint8[size], read-only: the whole file; of an object the fetched ranges, zeros
        elsewhere.

        Raises CaptureError if it cannot be opened.
        """
        if source not in self._maps:
            version = self.versions[source]
            if version is None:
                self._maps[source] = _map(self.paths[source])
            else:
                self._ranged[source] = Ranged(self.paths[source], version)
                self._maps[source] = self._ranged[source].data
        return self._maps[source]

    def part(self, source: int, start: int, end: int) -> npt.NDArray[np.uint8]:
        """uint8[end - start], read-only: a view that is valid until the next call."""
        data = self.data(source)
        if source in self._ranged:
            self._ranged[source].fetch(start, end)
        return data[start:end]

    def windows(
        self,
        source: int,
        cursor: npt.NDArray[np.int64],
        stop: int,
        step: Callable[[], int],
    ) -> int:
        """Step to the first record at or after `stop`, making the bytes readable; returns the
        outcome.

        step: moves the cursor up to its END and returns the outcome of the last step. If a record
        is cut, END becomes the file's. Raises EnvironmentFailed if the disk or the store fails.
        """
        size = len(self.data(source))
        stop = min(stop, size)
        end = min(stop, int(cursor[POS]) + WALKED_BYTES)
        while True:
            self._have(source, int(cursor[POS]), end)
            cursor[END] = end
            outcome = step()
            pos = int(cursor[POS])
            if outcome == STEP_CUT:
                needed = pos + int(cursor[NEEDED])
                if needed > size:
                    cursor[END] = size
                    return outcome
                end = max(needed, min(stop, pos + WALKED_BYTES))
            elif outcome == STEP_END and pos < stop:
                end = min(stop, pos + WALKED_BYTES)
            else:
                return outcome

    def _have(self, source: int, start: int, end: int) -> None:
        """Make data[start:end] readable.

        Raises EnvironmentFailed if the disk or the store fails.
        """
        far = self._ranged.get(source)
        if far is not None:
            far.head_and_tail(start, end)
            return
        data = self._maps[source]
        base = data.ctypes.data
        first = min(start + object_bytes.WHOLE_RECORD_MAX, end)
        for low, high in ((start, first), (max(first, end - mmap.PAGESIZE), end)):
            reason = fault(base + low, high - low)
            if reason is not None:
                path, place = self.paths[source], f"bytes {low} to {high}"
                raise was_cut(path, len(data)) or EnvironmentFailed(
                    f"{path}: {place} cannot be read: {reason}"
                )

    @property
    def bases(self) -> npt.NDArray[np.uint64]:
        """uint64[n]: address of each file's first byte; 0 for an empty file."""
        if self._bases is None:
            maps = [self.data(source) for source in range(len(self.paths))]
            self._bases = np.array([data.ctypes.data if len(data) else 0 for data in maps], "u8")
            self._sizes = np.array([len(data) for data in maps], "i8")
        return self._bases

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """int64[n]: bytes of each file when this process mapped it."""
        if self._sizes is None:
            _ = self.bases
        assert self._sizes is not None
        return self._sizes

    def carrying(self, carried: npt.NDArray[np.uint8]) -> Sources:
        """These sources and one more, after them, for bytes that are in no file."""
        other = self.beside()
        other._maps[len(self.paths)] = carried
        other.paths.append("carried bytes")
        other.versions.append(None)
        return other

    def standing_in(self, count: int, data: npt.NDArray[np.uint8]) -> Sources:
        """These sources, with `data` in place of each of the first `count`."""
        other = self._copy()
        other._maps |= dict.fromkeys(range(count), data)
        return other

    def payload(self, segments: npt.NDArray[np.void], size: int) -> Iterator[bytes]:
        """Yield the bytes of SEGMENT[n] that assembly reads, concatenated, about `size` at a
        time."""
        rows, pos, length = ranges_read(segments)
        extents = np.zeros(len(rows), _EXTENT)
        extents["pos"], extents["source"] = pos, segments["source"][rows]
        extents["length"] = length
        number = np.cumsum(extents["length"]) // size
        for part in np.split(extents, np.flatnonzero(np.diff(number)) + 1):
            if len(part):
                yield self.gather(part).tobytes()

    def holding(
        self, segments: Sequence[npt.NDArray[np.void]], payload: npt.NDArray[np.uint8]
    ) -> Sources:
        """These sources, with the bytes of SEGMENT arrays taken from `payload`, which has them in
        order.

        Raises ValueError if `payload` has another length.
        """
        place, length = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        starts = self._starts()
        for some in segments:
            rows, pos, size = ranges_read(some)
            place.append(starts[some["source"][rows]] + pos)
            length.append(size)
        places, lengths = np.concatenate(place), np.concatenate(length)
        if int(lengths.sum()) != len(payload):
            raise ValueError(f"payload: {len(payload)} bytes are not those of the segments")
        offset = np.cumsum(lengths) - lengths
        if (np.diff(places) < 0).any():
            order = np.argsort(places, kind="stable")
            places, lengths, offset = places[order], lengths[order], offset[order]
        other = self._copy()
        other._held = _Held(places, places + lengths, offset, payload)
        return other

    def beside(self) -> Sources:
        """A handle for another thread on the same files: `gather` uses a buffer per handle.

        Objects in stores must be read by one thread only, unless all ranges are copied.
        """
        _ = self.bases  # maps the files once, for both
        return self._copy()

    def _copy(self) -> Sources:
        """A handle on the same files with a buffer of its own."""
        other = Sources(self.paths, self.versions)
        other._maps, other._ranged, other._held = dict(self._maps), self._ranged, self._held
        return other

    def addresses(
        self,
        source: npt.NDArray[np.int32],
        pos: npt.NDArray[np.int64],
        length: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.uint64]:
        """uint64[n]: addresses of the bytes of extents; 0 if source is -1.

        These sources must outlive the addresses. Addresses in objects are valid until the next
        fetch. Raises ValueError if an extent lies outside its source.
        """
        fault, row = _check_extents(pos, length, source, self.sizes)
        if fault != _OK:
            place = (int(source[row]), int(pos[row]), int(length[row]))
            raise ValueError(f"extents: row {row} {_FAULTS[fault]}: {place}")
        located = self._found(source, pos, length)
        far = self._to_fetch(source, length, located)
        self._fetch(source[far], pos[far], length[far])
        return located

    def _found(self, source: Any, pos: Any, length: Any) -> npt.NDArray[np.uint64]:
        """`addresses` without fetching."""
        located = np.empty(len(pos), np.uint64)
        held = self._held
        _addresses(
            np.ascontiguousarray(pos), np.ascontiguousarray(length, np.int64),
            np.ascontiguousarray(source), self.bases, self._starts(), held.place, held.end,
            held.offset, held.data.ctypes.data, located,
        )  # fmt: skip
        return located

    def _to_fetch(self, source: Any, length: Any, addresses: Any) -> npt.NDArray[np.int64]:
        """Rows of extents that lie in objects and have no copy."""
        if not self.is_far:
            return _NONE
        is_far = np.array([version is not None for version in self.versions] + [False])
        here = self._held.data.ctypes.data
        is_held = (addresses >= here) & (addresses < here + len(self._held.data))
        return np.flatnonzero(is_far[source] & (length > 0) & ~is_held)

    def _fetch(self, source: Any, pos: Any, length: Any) -> None:
        for number in np.unique(source).tolist():
            of_file = source == number
            self._ranged[number].fetch(pos[of_file], pos[of_file] + length[of_file])

    def _starts(self) -> npt.NDArray[np.int64]:
        """int64[n]: position of each file in the concatenated bytes of the run."""
        starts: npt.NDArray[np.int64] = np.cumsum(self.sizes) - self.sizes
        return starts

    def gather(self, extents: npt.NDArray[np.void]) -> npt.NDArray[np.uint8]:
        """The bytes of EXTENT[n], concatenated; zeros if source is -1.

        The array is a view of a buffer that the next call overwrites: copy bytes to keep them.
        Raises ValueError if an extent lies outside its file.
        """
        fault, number = _check_extents(*_columns(extents), self.sizes)
        if fault != _OK:
            raise ValueError(f"extents: row {number} {_FAULTS[fault]}: {extents[number]}")
        total = int(number)
        if total > len(self._buffer):
            self._buffer = np.empty(max(total, 2 * len(self._buffer)), np.uint8)
        self._fill(extents, self._buffer)
        return self._buffer[:total]

    def _fill(self, extents: npt.NDArray[np.void], out: npt.NDArray[np.uint8]) -> None:
        pos, length, source = _columns(extents)
        location = self._found(source, pos, length)
        far = np.zeros(len(extents), bool)
        far[self._to_fetch(source, length, location)] = True
        at = 0
        rows = np.arange(len(extents))
        for portion in _portions(pos, length, far):
            here = rows[portion]
            wanted = here[far[here]]
            self._fetch(source[wanted], pos[wanted], length[wanted])
            at = _copy_extents(location, length, here, out, at)
