"""Where record batches begin in bytes that start anywhere (FetchSnapshot, KIP-630).

A snapshot is fetched in pieces cut without regard to batches, so that a piece may begin inside one.
A place counts as a boundary when a batch of magic 2 lies there whole and its CRC-32C is right.
"""

from __future__ import annotations

import crc32c
import numpy as np
from numpy.typing import NDArray

_HEADER_SIZE = 61
_MAGIC_POS, _CRC_POS, _CRC_START = 16, 17, 21
_WINDOW = 1 << 16
_WORK_FACTOR = 8  # bytes checked per byte given, at most: hostile bytes look like many batches


def first_batch(data: NDArray[np.uint8]) -> int:
    """Place of the first whole batch in data (uint8[n]); n where there is none, or where finding
    it would take more than linear time."""
    size = len(data)
    work = _WORK_FACTOR * size
    for low in range(0, max(size - _HEADER_SIZE + 1, 0), _WINDOW):
        for pos, end in _plausible(data, low, min(low + _WINDOW, size - _HEADER_SIZE + 1)):
            work -= end - pos
            if work < 0:
                return size
            stored = int.from_bytes(data[pos + _CRC_POS : pos + _CRC_START].tobytes(), "big")
            if crc32c.crc32c(data[pos + _CRC_START : end]) == stored:
                return pos
    return size


def _plausible(data: NDArray[np.uint8], low: int, high: int) -> list[tuple[int, int]]:
    """(start, end) of what looks like a whole batch beginning in [low, high)."""
    magic = data[low + _MAGIC_POS : high + _MAGIC_POS]
    places = low + np.flatnonzero(magic == 2)

    def int32(skip: int) -> NDArray[np.int64]:
        value = np.zeros(len(places), np.int64)
        for k in range(4):
            value = (value << 8) | data[places + skip + k]
        return value

    ends = places + 12 + int32(8)
    kept = (
        (ends >= places + _HEADER_SIZE)
        & (ends <= len(data))
        & (data[places] < 0x80)  # base offset
        & (data[places + 21] == 0)  # attributes
        & (data[places + 22] & 7 <= 4)
        & (data[places + 23] < 0x80)  # last offset delta
        & (data[places + 57] < 0x80)  # record count
    )
    return list(zip(places[kept].tolist(), ends[kept].tolist(), strict=True))
