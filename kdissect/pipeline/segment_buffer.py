"""The segments of a bucket of any size.

A bucket may be one connection with most of the capture. Its segments, streams and exchanges then
lie in files (`capture.scratch`), so the task's memory does not grow with the connection.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kdissect.capture.scratch import MEMORY, Scratch, Written
from kdissect.capture.segments import SEGMENT, SegmentBatch

LARGE_BYTES = 24 << 20  # of segments; a larger bucket lies in files


class Gathered:
    """The segments of a bucket, in the order of the splits."""

    def __init__(self) -> None:
        self._batches: list[SegmentBatch] = []
        self._size = 0
        # of a large bucket
        self._file: Written | None = None
        self._pairs: list[npt.NDArray[np.void]] = []
        self._counts: list[int] = []

    def add(self, data: bytes) -> None:
        """Add a packed SegmentBatch."""
        batch = SegmentBatch.from_bytes(data)
        self._batches.append(batch)
        self._size += batch.segments.nbytes
        if self._size <= LARGE_BYTES:
            return
        self._file = self._file or Written(SEGMENT, Scratch(in_files=True))
        for batch in self._batches:
            self._file.append(batch.segments)
            self._pairs.append(batch.endpoints.copy())  # so that the received row can be freed
            self._counts.append(len(batch.segments))
        self._batches.clear()

    def batch(self) -> tuple[SegmentBatch, Scratch]:
        """(all segments, where arrays derived from them can be stored). Call it once."""
        if self._file is None:
            batch = SegmentBatch.concat(self._batches)
            self._batches.clear()
            return batch, MEMORY
        segments = self._file.array()
        batch = SegmentBatch.numbered(self._pairs, self._counts, segments)
        return batch, Scratch(in_files=True)
