"""Finds record batches in bytes that start anywhere (FetchSnapshot, KIP-630).

A snapshot is fetched in pieces that ignore batch boundaries, so a piece may begin inside a batch. A
position is accepted as a boundary if a complete batch of magic 2 with a correct CRC-32C lies there.
"""

from __future__ import annotations

import crc32c
import numpy as np
from numpy.typing import NDArray

_HEADER_SIZE = 61
_MAGIC_POS, _CRC_POS, _CRC_START = 16, 17, 21
_WINDOW = 1 << 16
# largest number of bytes checked per input byte, because hostile bytes can resemble many batches
_WORK_FACTOR = 8


def first_batch(data: NDArray[np.uint8]) -> int:
    """Position of the first complete batch in data (uint8[n]); n if there is none.

    Also n if the search would take more than linear time.
    """
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
    """(start, end) of each plausible complete batch that begins in [low, high)."""
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
