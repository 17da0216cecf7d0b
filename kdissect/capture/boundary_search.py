"""Guesses where a record of a capture begins, from bytes in its middle.

A guess need not be right, because the caller verifies that reading the earlier bytes leads to the
same position (`object_splits`). But it should be right mostly. So a record counts if it is
plausible and its length leads to a chain of plausible records.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture.packet_reader import RESOLUTION, SECOND_NS
from kdissect.capture.packet_reader import SNAP_LENGTH as SNAP_LENGTH_COLUMN
from kdissect.capture.pcap import RECORD_HEADER_SIZE
from kdissect.capture.pcapng import BLOCK_SIZE_MIN

GUESSED_BYTES = 1 << 20  # bytes examined; one of the first records in them is usually found
CHAIN = 16  # consecutive records that make a guess
CANDIDATES_MAX = 4096  # positions tried, because bytes can be crafted to look like records
SNAP_LENGTH_MAX = 262_144  # tcpdump's default, which cuts nothing
_YEAR_S = 366 * 24 * 3600  # longest plausible duration of a capture


def guess_record(
    data: npt.NDArray[np.uint8],
    little: bool,
    is_pcapng: bool,
    interfaces: npt.NDArray[np.int64],
    time_ns: int | None,
) -> int:
    """Position in `data` of the first record that seems to begin there; -1 if there is none.

    little, interfaces: from the cursor and the table of the capture's header. time_ns: of the
    capture's first packet; None if unknown.
    """
    size = len(data)
    if size < RECORD_HEADER_SIZE:
        return -1
    if is_pcapng:
        return _first_chain(*_blocks(data, little), size)
    return _first_chain(*_records(data, little, interfaces, time_ns), size)


def _words(data: npt.NDArray[np.uint8], little: bool) -> npt.NDArray[np.int64]:
    """int64[n - 3]: the unsigned 32-bit integer at each position."""
    parts = [data[i : len(data) - 3 + i].astype(np.int64) for i in range(4)]
    shifts = (0, 8, 16, 24) if little else (24, 16, 8, 0)
    total = parts[0] << shifts[0]
    for part, shift in zip(parts[1:], shifts[1:], strict=True):
        total |= part << shift
    return total


def _records(data: Any, little: bool, interfaces: Any, time_ns: int | None) -> tuple[Any, Any]:
    """(bool: a pcap record is plausible, int64: its size) at each position."""
    words = _words(data, little)
    count = len(words) - 12
    seconds, fraction = words[:count], words[4 : count + 4]
    captured, length = words[8 : count + 8], words[12:]
    most = max(SNAP_LENGTH_MAX, min(int(interfaces[SNAP_LENGTH_COLUMN]), 1 << 24))
    good = (captured <= most) & (length >= captured) & (length < 1 << 24) & (length > 0)
    good &= fraction < (SECOND_NS if interfaces[RESOLUTION] == 9 else 1_000_000)
    if time_ns is not None:
        good &= np.abs(seconds - time_ns // SECOND_NS) < _YEAR_S
    return good, captured + RECORD_HEADER_SIZE


def _blocks(data: Any, little: bool) -> tuple[Any, Any]:
    """(bool: a pcapng block is plausible, int64: its size) at each position."""
    words = _words(data, little)
    count = len(words) - 8
    total = words[4 : count + 4]
    size = (total + 3) & ~3
    good = (total >= BLOCK_SIZE_MIN) & (total < 1 << 24)
    trailer = np.arange(count) + size - 4
    inside = good & (trailer < len(words))
    good[inside] = words[trailer[inside]] == total[inside]
    return good, size


def _first_chain(good: Any, size: Any, end: int) -> int:
    """First position from which CHAIN records follow each other, or which leads to the end."""
    for start in np.flatnonzero(good)[:CANDIDATES_MAX].tolist():
        pos = start
        for _ in range(CHAIN):
            if not good[pos]:
                break
            pos += int(size[pos])
            if pos >= len(good):
                # the last record may be cut off, but a single record is weak evidence
                if pos > start + int(size[start]) or pos == end:
                    return int(start)
                break
        else:
            return int(start)
    return -1
