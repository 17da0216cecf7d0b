"""The bytes of a run's captures, behind one interface: mapped files, objects of stores read by
ranges, and copies of their extents.

Files are mapped read-only when a process first asks for their bytes; a `Sources` travels between
processes as a list of paths. The maps are made with the system's own `mmap`, because Python's
keeps a file descriptor open per map and a run may have thousands of rotated files.

Who reads a little here and there all over a large capture makes all of it resident, since the
system maps much around each page that is touched. `staged` is for them: it copies the segments
that they will read aside, in the order of the file and window by window, and `addresses` then
leads there instead of into the map.

Of an object in a store (`object_bytes`) only what was asked for is there: who walks through it does
so by `windows`, `gather` fetches what it copies, and who reads here and there gets all of its
payload from elsewhere (`holding`), since a request for each few bytes would be dear.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kdissect.capture import object_bytes, resident
from kdissect.capture.object_bytes import Ranged, Version
from kdissect.capture.packet_reader import END, NEEDED, POS, STEP_CUT, STEP_END
from kdissect.errors import CaptureError, EnvironmentFailed
from kdissect.jit import JIT_ENABLED, kernel

STAGED_BYTES_MAX = 64 << 20  # payload that is copied aside; more lies so close that maps will do
WINDOW_BYTES = 16 << 20  # of a capture that are mapped at a time meanwhile

WALKED_BYTES = 8 << 20  # of a capture that is read to its end: seen to at a time

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
        if index >= 0 and length[row] > 0:  # an empty one may lie anywhere: nothing is read
            if pos[row] < 0 or pos[row] > sizes[index] - length[row]:
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
        return resident.mapped(descriptor, path)
    finally:
        os.close(descriptor)


def _portions(pos: Any, length: Any, is_far: Any) -> Iterator[slice]:
    """Consecutive rows whose blocks an object's budget has room for; all at once for files."""
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
    """The error for a file that had `size` bytes when it was mapped, and has fewer now."""
    try:
        now = os.stat(path).st_size
    except OSError:
        return None  # what is mapped stays
    if now >= size:
        return None
    return EnvironmentFailed(f"{path}: was cut from {size} to {now} bytes while it was read")


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


_EXTENT = np.dtype([("pos", "<i8"), ("length", "<i8"), ("source", "<i4")])
_NONE = np.zeros(0, np.int64)
_NOTHING = _Staged(_NONE, _NONE, _NONE, np.zeros(0, np.uint8))


class Sources:
    """The files of a run, by the index that `SEGMENT.source` and `EXTENT.source` hold."""

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        versions: Sequence[Version | None] = (),
    ) -> None:
        """versions: of the paths that are URLs of objects; None, or nothing at all, for files."""
        self.paths = [os.fspath(path) for path in paths]
        self.versions = list(versions) or [None] * len(self.paths)
        self._maps: dict[int, npt.NDArray[np.uint8]] = {}
        self._ranged: dict[int, Ranged] = {}
        self._bases: npt.NDArray[np.uint64] | None = None
        self._sizes: npt.NDArray[np.int64] | None = None
        self._buffer = np.zeros(0, np.uint8)
        self._staged = _NOTHING

    def __reduce__(self) -> tuple[Any, ...]:
        return Sources, (self.paths, self.versions)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def is_far(self) -> bool:
        """Whether any of them is an object in a store."""
        return any(version is not None for version in self.versions)

    def data(self, source: int) -> npt.NDArray[np.uint8]:
        """uint8[size], read-only: the whole file; of an object what was fetched, the rest zeros.

        Raises CaptureError when it cannot be opened.
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
        """uint8[end - start], read-only: a view that is good until the next call."""
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
        """Step to the first record at or behind `stop` with what it reads at hand; the outcome.

        step: moves the cursor until its END, and returns the outcome of the last step. END is the
        file's where a record is cut. Raises EnvironmentFailed where the disk or the store fails.
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
        """See to it that data[start:end] can be read, and let go of what is behind in large files.

        Raises EnvironmentFailed where the disk or the store fails.
        """
        far = self._ranged.get(source)
        if far is not None:
            far.head_and_tail(start, end)
            return
        data = self._maps[source]
        base = data.ctypes.data
        if len(data) >= resident.WATCHED_SIZE_MIN and start > WALKED_BYTES:
            resident.drop(base + start - WALKED_BYTES, WALKED_BYTES)
        first = min(start + object_bytes.WHOLE_RECORD_MAX, end)
        for low, high in ((start, first), (max(first, end - mmap.PAGESIZE), end)):
            reason = resident.fault(base + low, high - low)
            if reason is not None:
                path, place = self.paths[source], f"bytes {low} to {high}"
                raise was_cut(path, len(data)) or EnvironmentFailed(
                    f"{path}: {place} cannot be read: {reason}"
                )

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
        other = Sources([*self.paths, "carried bytes"], [*self.versions, None])
        other._maps = {**self._maps, len(self.paths): carried}
        other._ranged = self._ranged
        other._staged = self._staged
        return other

    def standing_in(self, count: int, data: npt.NDArray[np.uint8]) -> Sources:
        """These sources, the first `count` of which are all `data`: what was kept of captures."""
        other = Sources(self.paths, self.versions)
        other._maps = {**self._maps, **dict.fromkeys(range(count), data)}
        other._ranged = self._ranged
        return other

    def payload(self, segments: npt.NDArray[np.void], size: int) -> Iterator[bytes]:
        """The captured bytes of SEGMENT[n] one behind the other, about `size` at a time."""
        rows = np.flatnonzero(segments["captured"] > 0)
        extents = np.zeros(len(rows), _EXTENT)
        extents["pos"], extents["source"] = segments["pos"][rows], segments["source"][rows]
        extents["length"] = segments["captured"][rows]
        number = np.cumsum(extents["length"]) // size
        for part in np.split(extents, np.flatnonzero(np.diff(number)) + 1):
            if len(part):
                yield self.gather(part).tobytes()

    def holding(
        self, segments: Sequence[npt.NDArray[np.void]], payload: npt.NDArray[np.uint8]
    ) -> Sources:
        """These sources with the bytes of SEGMENT arrays at hand; they lie in `payload`, in order.

        Raises ValueError where they are not as many.
        """
        place, length = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        starts = self._starts()
        for some in segments:
            rows = np.flatnonzero(some["captured"] > 0)
            place.append(starts[some["source"][rows]] + some["pos"][rows])
            length.append(some["captured"][rows].astype(np.int64))
        places, lengths = np.concatenate(place), np.concatenate(length)
        if int(lengths.sum()) != len(payload):
            raise ValueError(f"payload: {len(payload)} bytes are not those of the segments")
        offset = np.cumsum(lengths) - lengths
        if (np.diff(places) < 0).any():
            order = np.argsort(places, kind="stable")
            places, lengths, offset = places[order], lengths[order], offset[order]
        return self._with(_Staged(places, places + lengths, offset, payload))

    def beside(self) -> Sources:
        """The same files for another thread: what `gather` gives is a buffer of each.

        Objects in stores are read from one thread only, unless all is at hand.
        """
        _ = self.bases
        return self._with(self._staged)

    def _with(self, staged: _Staged) -> Sources:
        other = Sources(self.paths, self.versions)
        other._maps, other._ranged = self._maps, self._ranged
        other._bases, other._sizes = self._bases, self._sizes
        other._staged = staged
        return other

    def staged(self, segments: npt.NDArray[np.void]) -> Sources:
        """These sources with the bytes of SEGMENT[n] at hand, so that reading maps nothing.

        Small captures stay as they are, and so do more bytes than STAGED_BYTES_MAX. Raises
        ValueError for a segment that is not inside its file.
        """
        if self._staged is not _NOTHING:
            return self
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
        return self._with(_Staged(place, place + length, np.cumsum(length) - length, data))

    def addresses(
        self,
        source: npt.NDArray[np.int32],
        pos: npt.NDArray[np.int64],
        length: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.uint64]:
        """uint64[n]: where the bytes of extents can be read (0 where source is -1).

        These sources must outlive the addresses. Of objects they hold until more is fetched.
        Raises ValueError for an extent that is not inside its source.
        """
        fault, row = _check_extents(pos, length, source, self.sizes)
        if fault != _OK:
            place = (int(source[row]), int(pos[row]), int(length[row]))
            raise ValueError(f"extents: row {row} {_FAULTS[fault]}: {place}")
        found = self._found(source, pos, length)
        far = self._to_fetch(source, length, found)
        self._fetch(source[far], pos[far], length[far])
        return found

    def _found(self, source: Any, pos: Any, length: Any) -> npt.NDArray[np.uint64]:
        """As `addresses`, whether the bytes are there or not."""
        found = np.empty(len(pos), np.uint64)
        staged = self._staged
        _addresses(
            np.ascontiguousarray(pos), np.ascontiguousarray(length, np.int64),
            np.ascontiguousarray(source), self.bases, self._starts(), staged.place, staged.end,
            staged.offset, staged.data.ctypes.data, found,
        )  # fmt: skip
        return found

    def _to_fetch(self, source: Any, length: Any, found: Any) -> npt.NDArray[np.int64]:
        """Rows of the extents that lie in objects and are not staged."""
        if not self.is_far:
            return _NONE
        is_far = np.array([version is not None for version in self.versions] + [False])
        here = self._staged.data.ctypes.data
        is_staged = (found >= here) & (found < here + len(self._staged.data))
        return np.flatnonzero(is_far[source] & (length > 0) & ~is_staged)

    def _fetch(self, source: Any, pos: Any, length: Any) -> None:
        for number in np.unique(source).tolist():
            some = source == number
            self._ranged[number].fetch(pos[some], pos[some] + length[some])

    def _starts(self) -> npt.NDArray[np.int64]:
        """int64[n]: where each file begins in the run's bytes."""
        starts: npt.NDArray[np.int64] = np.cumsum(self.sizes) - self.sizes
        return starts

    def gather(self, extents: npt.NDArray[np.void]) -> npt.NDArray[np.uint8]:
        """The bytes of EXTENT[n] one behind the other; zeros where source is -1.

        The array is a view of a buffer that the next call uses again: copy what must stay.
        Raises ValueError for an extent that is not inside its file.
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
        found = self._found(source, pos, length)
        far = np.zeros(len(extents), bool)
        far[self._to_fetch(source, length, found)] = True
        at = 0
        rows = np.arange(len(extents))
        for some in _portions(pos, length, far):
            here = rows[some]
            wanted = here[far[here]]
            self._fetch(source[wanted], pos[wanted], length[wanted])
            at = _copy_extents(found, length, here, out, at)
