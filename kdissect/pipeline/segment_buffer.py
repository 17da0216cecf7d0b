"""A bucket of any size: gathers its segments, and packs its exchanges part by part.

A bucket may be one connection with most of the capture. Its segments, streams and exchanges then
lie in files (`capture.scratch`) and its exchanges are packed part by part, so the task's memory
does not grow with the connection. THREADS parts of a large bucket are packed at a time: kernels
release the interpreter lock, and other cores are idle while one task has the large connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kdissect.arrays import renumbered, take
from kdissect.capture.mapped_files import Sources
from kdissect.capture.scratch import MEMORY, Scratch, Written
from kdissect.capture.segments import ENDPOINTS, SEGMENT, SegmentBatch
from kdissect.kafka.assembly import Assembly
from kdissect.pipeline import exchange_index
from kdissect.pipeline.learn import Learnt, learn

LARGE_BYTES = 24 << 20  # of segments; a larger bucket lies in files
_ROWS_AT_ONCE = 1 << 16  # segments moved at a time
PART_ROWS = 1 << 15  # exchanges packed at a time
THREADS = 2
T = TypeVar("T")


class Gathered:
    """The segments of a bucket, in the order of the splits.

    If the bucket is large and one pair of endpoints has more than half of the first LARGE_BYTES,
    that pair is put in front of the others, so that its segments need not be sorted.
    """

    def __init__(self) -> None:
        self._batches: list[SegmentBatch] = []
        self._size = 0
        self._giant: bytes | None = None  # the pair in front
        self._scratch = Scratch(in_files=True)
        self._front: _Written | None = None
        self._others: _Written | None = None

    def add(self, data: bytes) -> None:
        """Add a packed SegmentBatch."""
        batch = SegmentBatch.from_bytes(data)
        if self._front is not None:
            self._divide(batch)
            return
        self._batches.append(batch)
        self._size += batch.segments.nbytes
        if self._size > LARGE_BYTES:
            self._begin_files()

    def batch(self) -> tuple[SegmentBatch, Scratch]:
        """(all segments, where arrays derived from them can be stored). Call it once."""
        if self._front is None:
            batch = SegmentBatch.concat(self._batches)
            self._batches.clear()
            return batch, MEMORY
        scratch = self._scratch
        if self._others is None or self._giant is None:
            return self._front.batch(), scratch
        others = self._others.batch()
        order = np.argsort(others.segments["endpoints"], kind="stable")
        giant_count = sum(self._front.counts)
        for first in range(0, len(order), _ROWS_AT_ONCE):
            portion = take(others.segments, order[first : first + _ROWS_AT_ONCE])
            portion["endpoints"] += 1
            self._front.segments.append(portion)
        segments = self._front.segments.array()
        segments["endpoints"][:giant_count] = 0
        giant = np.frombuffer(self._giant, ENDPOINTS)
        return SegmentBatch(np.concatenate([giant, others.endpoints]), segments), scratch

    def _begin_files(self) -> None:
        self._front = _Written(self._scratch)
        pairs = np.concatenate([batch.endpoints for batch in self._batches])
        counts = [
            np.bincount(batch.segments["endpoints"], minlength=len(batch.endpoints))
            for batch in self._batches
        ]
        raw = np.frombuffer(pairs.tobytes(), f"V{ENDPOINTS.itemsize}")
        _, first, number = np.unique(raw, return_index=True, return_inverse=True)
        count = np.bincount(number, np.concatenate(counts))
        most = int(count.argmax())
        if 2 * count[most] > count.sum():
            self._giant = pairs[first[most] : first[most] + 1].tobytes()
        for batch in self._batches:
            self._divide(batch)
        self._batches.clear()

    def _divide(self, batch: SegmentBatch) -> None:
        """Write the large pair's segments to the front, the others to a file of their own."""
        assert self._front is not None
        if self._giant is None:
            self._front.add(batch)
            return
        raw = batch.endpoints.view(f"V{ENDPOINTS.itemsize}")
        is_giant = (raw == np.frombuffer(self._giant, raw.dtype))[batch.segments["endpoints"]]
        if is_giant.all():
            self._front.add(batch)
            return
        if self._others is None:
            self._others = _Written(self._scratch)
        segments = take(batch.segments, np.flatnonzero(is_giant))
        segments["endpoints"] = 0
        self._front.add(SegmentBatch(np.frombuffer(self._giant, ENDPOINTS), segments))
        segments = take(batch.segments, np.flatnonzero(~is_giant))
        used, index = renumbered(segments["endpoints"], len(batch.endpoints))
        segments["endpoints"] = index
        self._others.add(SegmentBatch(batch.endpoints[used], segments))


class _Written:
    """Segments in a file, with the endpoint pairs of each batch."""

    def __init__(self, scratch: Scratch) -> None:
        self.pairs: list[npt.NDArray[np.void]] = []
        self.counts: list[int] = []
        self.segments = Written(SEGMENT, scratch)

    def add(self, batch: SegmentBatch) -> None:
        self.pairs.append(batch.endpoints.copy())  # a copy, so that the received row can be freed
        self.counts.append(len(batch.segments))
        self.segments.append(batch.segments)

    def batch(self) -> SegmentBatch:
        return SegmentBatch.numbered(self.pairs, self.counts, self.segments.array())


@dataclass(slots=True)
class ExchangePart:
    """Some exchanges of a bucket: their facts and their packed rows.

    kept: ids of the exchanges in the range of times. packed: (slot, bytes), in order.
    """

    learnt: Learnt
    kept: npt.NDArray[np.int64]
    packed: list[tuple[int, bytes]]


Pack = Callable[[Assembly, Learnt], ExchangePart]


def parts(
    assembly: Assembly, sources: Sources, chunk_bytes: int, pack: Pack
) -> Iterator[ExchangePart]:
    """Yield all exchanges of a bucket part by part: collect facts, then pack.

    pack: called with the assembly of a part and its facts.
    """

    def make(first: int) -> ExchangePart:
        part = exchange_index.part(assembly, slice(first, first + PART_ROWS))
        here = sources.beside()  # its buffers are this thread's
        return pack(part, learn(part, here, chunk_bytes))

    starts = range(0, len(assembly.exchanges), PART_ROWS)
    return in_turn(make, starts, THREADS if len(starts) > THREADS else 1)


def in_turn(make: Callable[[int], T], starts: range, threads: int) -> Iterator[T]:
    """Yield the results of `make` for each start, in order, computed by so many threads."""
    if threads == 1:
        yield from map(make, starts)
        return
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for first in starts:
            waiting.append(pool.submit(make, first))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
