"""Where a record of a capture seems to begin, in bytes from its middle.

A guess need not be right, since who uses it looks afterwards whether the bytes before lead to the
same place (`object_splits`), but it should mostly be. So a record counts when it is plausible, and
when the records that its length leads to are, one behind the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture.packet_reader import RESOLUTION, SECOND_NS
from kdissect.capture.packet_reader import SNAP_LENGTH as SNAP_LENGTH_COLUMN
from kdissect.capture.pcap import RECORD_HEADER_SIZE
from kdissect.capture.pcapng import BLOCK_SIZE_MIN

GUESSED_BYTES = 1 << 20  # that are looked at; a record is found in the first few of them
CHAIN = 16  # records in a row that make a guess
CANDIDATES_MAX = 4096  # places that are tried; bytes may be made to look like records
SNAP_LENGTH_MAX = 262_144  # what tcpdump writes where it cuts nothing
_YEAR_S = 366 * 24 * 3600  # a capture takes less


def guess_record(
    data: npt.NDArray[np.uint8],
    little: bool,
    is_pcapng: bool,
    interfaces: npt.NDArray[np.int64],
    time_ns: int | None,
) -> int:
    """Position in `data` of the first record that begins there; -1 where none is found.

    little, interfaces: as the cursor and the table of the capture's head have them. time_ns: of the
    capture's first packet, None where the head has none.
    """
    size = len(data)
    if size < RECORD_HEADER_SIZE:
        return -1
    if is_pcapng:
        return _first_chain(*_blocks(data, little), size)
    return _first_chain(*_records(data, little, interfaces, time_ns), size)


def _words(data: npt.NDArray[np.uint8], little: bool) -> npt.NDArray[np.int64]:
    """int64[n - 3]: the 32-bit integer at each position."""
    parts = [data[i : len(data) - 3 + i].astype(np.int64) for i in range(4)]
    shifts = (0, 8, 16, 24) if little else (24, 16, 8, 0)
    total = parts[0] << shifts[0]
    for part, shift in zip(parts[1:], shifts[1:], strict=True):
        total |= part << shift
    return total


def _records(data: Any, little: bool, interfaces: Any, time_ns: int | None) -> tuple[Any, Any]:
    """(is there a plausible record of pcap, bytes of it) at each position."""
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
    """(is there a plausible block of pcapng, bytes of it) at each position."""
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
    """The first place from which CHAIN records follow one another, or lead to the end."""
    for start in np.flatnonzero(good)[:CANDIDATES_MAX].tolist():
        pos = start
        for _ in range(CHAIN):
            if not good[pos]:
                break
            pos += int(size[pos])
            if pos >= len(good):
                # the last record may be cut, but one alone says little
                if pos > start + int(size[start]) or pos == end:
                    return int(start)
                break
        else:
            return int(start)
    return -1
