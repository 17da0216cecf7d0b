"""A stream for the tests of kernels: bytes cut into pieces anywhere, some of the pieces missing."""

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from kdissect.kafka.walk import Stream
from kdissect.tcp.byte_ranges import PIECE
from kdissect.tcp.columns import SIDE
from tests.builders.segments import in_memory

cuts = st.lists(st.integers(0, 400), max_size=9)
lost = st.lists(st.sampled_from((False, False, False, True)), min_size=1, max_size=9)


class MadePieces:
    """`data` cut at `cuts`, without the pieces that `lost` (again and again) names.

    there: the bytes by position, None where one is missing, up to the last captured one.
    """

    def __init__(self, data: bytes, cuts: list[int], lost: list[bool]) -> None:
        edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
        self.memory = in_memory(data)
        self.there: list[int | None] = []
        self.spans: list[tuple[int, int]] = []
        for number, (begin, end) in enumerate(pairwise(edges)):
            if not lost[number % len(lost)]:
                self.there += [None] * (begin - len(self.there)) + list(data[begin:end])
                self.spans.append((begin, end))
        begin = np.array([begin for begin, _ in self.spans], np.int64)
        end = np.array([end for _, end in self.spans], np.int64)
        address = np.uint64(self.memory.data(0).ctypes.data) + begin.astype(np.uint64)
        self.pieces = np.zeros(len(begin), PIECE)
        self.pieces["pos"] = self.pieces["file_pos"] = begin
        self.pieces["end"] = end
        self.pieces["address"] = address
        self.pieces["segment"] = np.arange(len(begin))
        self.sides = np.zeros(2, SIDE)
        self.sides["piece_stop"][0] = len(begin)
        self.sides["end"][0] = len(data)
        times, source = np.zeros(len(begin), np.int64), np.zeros(len(begin), np.int32)
        self.stream = Stream(self.pieces, times, source, 0, len(begin), len(self.there))
