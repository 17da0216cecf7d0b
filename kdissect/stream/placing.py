"""Where the segments of each stream lie, and how far what they hold is settled.

For `rejoined`, which keeps the segments behind a position and drops those before it. All streams of
a bucket are placed at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kdissect.capture.index import ACK, FIN, RST, SYN
from kdissect.rows import gather_ranges, take
from kdissect.stream.columns import (
    DUPLICATE,
    GAP_COUNT,
    HAS_DATA,
    HIGH,
    ORIGIN,
    SIDE_WIDTH,
    UNUSED,
)
from kdissect.stream.reassembly import Streams

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.void]

NO_NUMBER = -1
_FAR = np.iinfo(np.int64).max


class Placed(NamedTuple):
    """The segments of one side of a connection in assembly order, UNUSED ones left out.

    rows: of `Streams.segments`. place: stream position of the first payload byte; of no meaning
    where the stream has no data. length: of payload. seq: sequence number of position 0, NO_NUMBER
    where nothing tells it.
    """

    rows: Ints
    place: Ints
    length: Ints
    seq: int


@dataclass(frozen=True, slots=True)
class Places:
    """`Placed` of all streams, one behind the other (2 * connection + side).

    start: int64[streams + 1], where the segments of each begin. settled, quiet: of each stream the
    position up to which its bytes are settled, and up to which none was captured lately.
    """

    rows: Ints
    place: Ints
    length: Ints
    start: Ints
    seq: Ints
    settled: Ints
    quiet: Ints

    def of(self, stream: int) -> Placed:
        some = slice(int(self.start[stream]), int(self.start[stream + 1]))
        return Placed(self.rows[some], self.place[some], self.length[some], int(self.seq[stream]))


def places(streams: Streams, end_ns: int, keep_ns: int, linger_ns: int) -> Places:
    """Place all segments. Times are those of `tails.Keeping`."""
    segments, sides = streams.segments, streams.sides.reshape(-1, SIDE_WIDTH)
    rows, start = _by_stream(streams, len(sides))
    count = np.diff(start)
    first = start[:-1][count > 0]  # of the streams that have segments
    stream = np.repeat(np.arange(len(sides)), count)
    is_syn = (segments["flags"][rows] & SYN) != 0
    number = segments["seq"][rows].astype(np.int64) + is_syn
    length = segments["length"][rows].astype(np.int64)
    mark = streams.mark[rows]
    time_ns = segments["time_ns"][rows]

    def least(values: Ints, chosen: npt.NDArray[np.bool_]) -> Ints:
        """By stream the least value of the chosen segments, _FAR where there is none."""
        found = np.full(len(sides), _FAR)
        if len(first):
            found[count > 0] = np.minimum.reduceat(np.where(chosen, values, _FAR), first)
        return found

    steps = np.zeros(len(rows), np.int64)
    steps[1:] = ((np.diff(number) + 0x80000000) & 0xFFFFFFFF) - 0x80000000
    steps[first] = 0
    place = np.cumsum(steps)
    place -= np.repeat(place[first], count[count > 0])
    has_data = sides[:, HAS_DATA] != 0
    high = -least(-(place + length), (length > 0) & (mark == 0))
    size = np.where(has_data, sides[:, HIGH] - sides[:, ORIGIN], 0)
    syn = least(np.arange(len(rows)), is_syn)  # the first SYN of each stream
    has_syn = syn < len(rows)
    moved = np.zeros(len(sides), np.int64)
    moved[has_data] = (size - np.where(high == -_FAR, 0, high))[has_data]
    only = has_syn & ~has_data
    moved[only] = -place[syn[only]]
    place += moved[stream]
    seq = np.full(len(sides), NO_NUMBER)
    told = has_data & (count > 0)
    at = start[:-1][told]
    seq[told] = (number[at] - place[at]) & 0xFFFFFFFF
    seq[only] = number[syn[only]] & 0xFFFFFFFF
    age = end_ns - time_ns
    young = least(place, (length > 0) & (age <= linger_ns))
    settled = np.where(sides[:, GAP_COUNT] != 0, np.minimum(size, young), size)
    quiet = np.minimum(size, least(place, (length > 0) & (age <= keep_ns)))
    return Places(rows, place, length, start, seq, settled, quiet)


def _by_stream(streams: Streams, count: int) -> tuple[Ints, Ints]:
    """(used segments by stream, int64[count + 1] where those of each begin)."""
    stream = 2 * streams.connection.astype(np.int64) + streams.segments["side"]
    used = np.flatnonzero(streams.mark & UNUSED == 0)
    rows: Ints = used[np.argsort(stream[used], kind="stable")]
    start = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(stream[used], minlength=count), out=start[1:])
    return rows, start


def behind(
    streams: Streams, found: Places, stream: Ints, at: Ints, young_ns: int
) -> tuple[Rows, Ints, Ints]:
    """(segments to keep behind position `at` of each stream, trimmed; rows that they are of; which
    of the streams they are of).

    `pos` and `source` still say where their bytes are. young_ns: segments from then on are kept
    wherever they lie.
    """
    index, begin = gather_ranges(found.start[stream], np.diff(found.start)[stream])
    of = np.repeat(np.arange(len(stream)), np.diff(np.append(begin, len(index))))
    rows, place, length = found.rows[index], found.place[index], found.length[index]
    segments = streams.segments
    flags = segments["flags"][rows]
    wanted = (length > 0) & (place + length > at[of]) & (streams.mark[rows] != DUPLICATE)
    wanted |= (segments["time_ns"][rows] >= young_ns) | ((flags & (FIN | RST)) != 0)
    wanted[_last_of_each(of, np.arange(len(of)))] = True  # the last number
    wanted[_last_of_each(of, np.flatnonzero((flags & ACK) != 0))] = True  # what was acknowledged
    wanted &= segments["packet"][rows] > 0  # not a SYN of ours
    chosen = np.flatnonzero(wanted)
    kept = take(segments, rows[chosen])
    trimmed = np.clip(at[of[chosen]] - place[chosen], 0, length[chosen])
    captured = kept["captured"].astype(np.int64)
    kept["seq"] = (
        kept["seq"].astype(np.int64) + ((kept["flags"] & SYN) != 0) + trimmed
    ) & 0xFFFFFFFF
    kept["flags"] &= 0xFF ^ SYN
    kept["pos"] += np.minimum(trimmed, captured)
    kept["captured"] = np.maximum(captured - trimmed, 0)
    kept["length"] -= trimmed.astype(np.int32)
    return kept, rows[chosen], of[chosen]


def _last_of_each(of: Ints, index: Ints) -> Ints:
    """Of `index`, ascending, the last one of each run of equal `of`."""
    group = of[index]
    return index[np.append(group[1:] != group[:-1], True)[: len(index)]]
