"""The bytes of a run's captures, behind one interface: mapped files, and copies of their extents.

Files are mapped read-only when a process first asks for their bytes; a `Sources` travels between
processes as a list of paths. The maps are made with the system's own `mmap`, because Python's
keeps a file descriptor open per map and a run may have thousands of rotated files.

Who reads a little here and there all over a large capture makes all of it resident, since the
system maps much around each page that is touched. `staged` is for them: it copies the segments
that they will read aside, in the order of the file and window by window, and `addresses` then
leads there instead of into the map.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..accelerate import JIT_ENABLED, kernel
from ..errors import CaptureError, EnvironmentFailed
from . import resident

STAGED_BYTES_MAX = 64 << 20  # payload that is copied aside; more lies so close that maps will do
WINDOW_BYTES = 16 << 20  # of a capture that are mapped at a time meanwhile

_PROT_READ, _MAP_PRIVATE = 1, 2
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
    """(fault, row) of the first extent that does not lie inside its file, else (_OK, bytes)."""
    total = 0
    for row in range(len(pos)):
        index = np.int64(source[row])
        if index < -1 or index >= len(sizes):
            return _BAD_SOURCE, row
        if length[row] < 0:
            return _BAD_LENGTH, row
        if index >= 0 and (pos[row] < 0 or pos[row] > sizes[index] - length[row]):
            return _BAD_POS, row
        total += length[row]
    return _OK, total


@kernel
def _addresses(
    pos: Any, length: Any, source: Any, bases: Any, starts: Any, place: Any, end: Any, offset: Any,
    staged: int, out: Any,
) -> None:  # fmt: skip
    """The address of each checked extent: of its copy where [place, end) hold it, else in the map.

    starts: where each source begins in the run's bytes, which `place` (ascending) and `end` count.
    offset: of each copy behind the address `staged`. 0 for what is in no file.
    """
    at = 0  # the copy where the last one was found: neighbours mostly follow one another
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
    """Copy extents, in the order of `rows`, to `out` from `at` on; where they end there."""
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
    """The file's bytes, mapped read-only until the array is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CaptureError(f"{path}: {error.strerror}") from None
    try:
        size = os.fstat(descriptor).st_size
        if size == 0:
            return np.zeros(0, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
            ctypes.c_long,
        )  # fmt: skip
        address = libc.mmap(None, size, _PROT_READ, _MAP_PRIVATE, descriptor, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            reason = os.strerror(ctypes.get_errno())
            raise EnvironmentFailed(f"{path}: cannot be mapped into memory: {reason}")
    finally:
        os.close(descriptor)
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, resident.unmap, address, size)
    resident.watch(address, size)
    data: npt.NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)
    data.flags.writeable = False
    return data


def _columns(extents: npt.NDArray[np.void]) -> tuple[Any, Any, Any]:
    pos, length, source = (np.ascontiguousarray(extents[n]) for n in ("pos", "length", "source"))
    return pos, length, source


@dataclass(frozen=True, slots=True)
class _Staged:
    """Copies of segments: [place, end) of the run's bytes, ascending, at `offset` in `data`."""

    place: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    data: npt.NDArray[np.uint8]


_NONE = np.zeros(0, np.int64)
_NOTHING = _Staged(_NONE, _NONE, _NONE, np.zeros(0, np.uint8))


class Sources:
    """The files of a run, by the index that `SEGMENT.source` and `EXTENT.source` hold."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self.paths = [os.fspath(path) for path in paths]
        self._maps: dict[int, npt.NDArray[np.uint8]] = {}
        self._bases: npt.NDArray[np.uint64] | None = None
        self._sizes: npt.NDArray[np.int64] | None = None
        self._buffer = np.zeros(0, np.uint8)
        self._staged = _NOTHING

    def __reduce__(self) -> tuple[Any, ...]:
        return Sources, (self.paths,)

    def __len__(self) -> int:
        return len(self.paths)

    def data(self, source: int) -> npt.NDArray[np.uint8]:
        """uint8[size], read-only: the whole file. Raises CaptureError when it cannot be opened."""
        if source not in self._maps:
            self._maps[source] = _map(self.paths[source])
        return self._maps[source]

    @property
    def bases(self) -> npt.NDArray[np.uint64]:
        """uint64[n]: the address of each file's first byte (0 for an empty file)."""
        if self._bases is None:
            maps = [self.data(source) for source in range(len(self.paths))]
            self._bases = np.array([data.ctypes.data if len(data) else 0 for data in maps], "u8")
            self._sizes = np.array([len(data) for data in maps], "i8")
        return self._bases

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """int64[n]: bytes of each file, as it was when this process mapped it."""
        if self._sizes is None:
            _ = self.bases
        assert self._sizes is not None
        return self._sizes

    def carrying(self, carried: npt.NDArray[np.uint8]) -> Sources:
        """These sources and, as the one behind them, bytes that are in no file."""
        _ = self.bases  # mapped once for both
        other = Sources([*self.paths, "carried bytes"])
        other._maps = {**self._maps, len(self.paths): carried}
        other._staged = self._staged
        return other

    def staged(self, segments: npt.NDArray[np.void]) -> Sources:
        """These sources with the bytes of SEGMENT[n] at hand, so that reading maps nothing.

        Small captures stay as they are, and so do more bytes than STAGED_BYTES_MAX. Raises
        ValueError for a segment that is not inside its file.
        """
        rows = np.flatnonzero(segments["captured"] > 0)
        length = segments["captured"][rows].astype(np.int64)
        total = int(length.sum())
        is_small = int(self.sizes.sum()) < resident.WATCHED_SIZE_MIN
        if is_small or not 0 < total <= STAGED_BYTES_MAX:
            return self
        source = segments["source"][rows].astype(np.int64)
        starts = self._starts()
        pos = segments["pos"][rows]
        if (pos < 0).any() or (pos > self.sizes[source] - length).any():
            raise ValueError("segments: one does not lie inside its file")
        place = starts[source] + pos
        if (np.diff(place) < 0).any():
            order = np.argsort(place, kind="stable")
            place, length, source = place[order], length[order], source[order]
        address = self.bases[source] + (place - starts[source]).astype(np.uint64)
        data = np.empty(total, np.uint8)
        window = (source << 32) + (place - starts[source]) // WINDOW_BYTES
        first = np.concatenate(([0], np.flatnonzero(np.diff(window)) + 1, [len(window)]))
        at = 0
        for low, high in itertools.pairwise(first.tolist()):
            at = _copy_extents(address, length, np.arange(low, high), data, at)
            end = int(address[high - 1]) + int(length[high - 1])
            resident.drop(int(address[low]), end - int(address[low]))
        other = Sources(self.paths)
        other._maps, other._bases, other._sizes = self._maps, self._bases, self._sizes
        other._staged = _Staged(place, place + length, np.cumsum(length) - length, data)
        return other

    def addresses(
        self,
        source: npt.NDArray[np.int32],
        pos: npt.NDArray[np.int64],
        length: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.uint64]:
        """uint64[n]: where the bytes of extents can be read (0 where source is -1).

        The extents must lie inside their sources; these sources must outlive the addresses.
        """
        found = np.empty(len(pos), np.uint64)
        staged = self._staged
        _addresses(
            np.ascontiguousarray(pos), np.ascontiguousarray(length, np.int64),
            np.ascontiguousarray(source), self.bases, self._starts(), staged.place, staged.end,
            staged.offset, staged.data.ctypes.data, found,
        )  # fmt: skip
        return found

    def _starts(self) -> npt.NDArray[np.int64]:
        """int64[n]: where each file begins in the run's bytes."""
        starts: npt.NDArray[np.int64] = np.cumsum(self.sizes) - self.sizes
        return starts

    def gather(self, extents: npt.NDArray[np.void]) -> npt.NDArray[np.uint8]:
        """The bytes of EXTENT[n] one behind the other; zeros where source is -1.

        The array is a view of a buffer that the next call uses again: copy what must stay.
        Raises ValueError for an extent that is not inside its file.
        """
        total = self._total(extents, np.zeros(0, np.int64))
        if total > len(self._buffer):
            self._buffer = np.empty(max(total, 2 * len(self._buffer)), np.uint8)
        self._fill(extents, np.arange(len(extents)), self._buffer)
        return self._buffer[:total]

    def gather_frames(
        self,
        extents: npt.NDArray[np.void],
        start: npt.NDArray[np.int64],
        count: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8],
    ) -> npt.NDArray[np.int64]:
        """Copy many frames into `out`; frame i is extents[start[i]:start[i] + count[i]].

        Returns int64[n + 1]: where each frame starts in `out`, and where the last one ends.
        Raises ValueError for extents outside their files or the array, and when `out` is too small.
        """
        start, count = np.asarray(start, np.int64), np.asarray(count, np.int64)
        is_bad = (start < 0) | (count < 0) | (start > len(extents) - count)
        if len(start) != len(count) or is_bad.any():
            raise ValueError("start and count: a frame's extents are not all in the array")
        ends = np.cumsum(count)
        rows = np.arange(ends[-1] if len(ends) else 0) + np.repeat(start - (ends - count), count)
        if self._total(extents, rows) > len(out):
            raise ValueError(f"out: {len(out)} bytes are too few for the frames")
        self._fill(extents, rows, out)
        bytes_before = np.concatenate(([0], np.cumsum(extents["length"][rows])))
        places: npt.NDArray[np.int64] = bytes_before[np.concatenate(([0], ends))]
        return places

    def _total(self, extents: npt.NDArray[np.void], rows: npt.NDArray[np.int64]) -> int:
        """Bytes of the extents (of those in `rows`, if any are given), after checking them."""
        fault, number = _check_extents(*_columns(extents), self.sizes)
        if fault != _OK:
            raise ValueError(f"extents: row {number} {_FAULTS[fault]}: {extents[number]}")
        return int(extents["length"][rows].sum()) if len(rows) else int(number)

    def _fill(
        self,
        extents: npt.NDArray[np.void],
        rows: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8],
    ) -> None:
        pos, length, source = _columns(extents)
        _copy_extents(self.addresses(source, pos, length), length, rows, out, 0)
