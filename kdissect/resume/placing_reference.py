"""What the kernels of `placing` do, in whole columns: their definition and test oracle."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kdissect.arrays import gather_ranges
from kdissect.capture.segments import ACK, FIN, RST, SYN
from kdissect.resume.placing import FAR, NO_NUMBER, Ints, Places
from kdissect.tcp.columns import DUPLICATE, GAP_COUNT, HAS_DATA, HIGH, ORIGIN, SIDE_WIDTH, UNUSED
from kdissect.tcp.reassembly import Streams


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
        """By stream the least value of the chosen segments, FAR where there is none."""
        found = np.full(len(sides), FAR)
        if len(first):
            found[count > 0] = np.minimum.reduceat(np.where(chosen, values, FAR), first)
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
    moved[has_data] = (size - np.where(high == -FAR, 0, high))[has_data]
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
    stays = (age <= keep_ns) | ((segments["flags"][rows] & (FIN | RST)) != 0)
    return Places(rows, place, length, start, seq, settled, quiet, stays.astype(np.uint8))


def _by_stream(streams: Streams, count: int) -> tuple[Ints, Ints]:
    """(used segments by stream, int64[count + 1] where those of each begin)."""
    stream = 2 * streams.connection.astype(np.int64) + streams.segments["side"]
    used = np.flatnonzero(streams.mark & UNUSED == 0)
    rows: Ints = used[np.argsort(stream[used], kind="stable")]
    start = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(stream[used], minlength=count), out=start[1:])
    return rows, start


def rows_behind(streams: Streams, found: Places, stream: Ints, at: Ints) -> tuple[Ints, Ints]:
    """(places in `found` of the segments to keep, which of the streams they are of)."""
    index, begin = gather_ranges(found.start[stream], np.diff(found.start)[stream])
    of = np.repeat(np.arange(len(stream)), np.diff(np.append(begin, len(index))))
    rows, place, length = found.rows[index], found.place[index], found.length[index]
    segments = streams.segments
    flags = segments["flags"][rows]
    wanted = (length > 0) & (place + length > at[of]) & (streams.mark[rows] != DUPLICATE)
    wanted |= found.stays[index] != 0
    wanted[_last_of_each(of, np.arange(len(of)))] = True  # the last number
    wanted[_last_of_each(of, np.flatnonzero((flags & ACK) != 0))] = True  # what was acknowledged
    wanted &= segments["packet"][rows] > 0  # not a SYN of ours
    return index[wanted], of[wanted]


def _last_of_each(of: Ints, index: Ints) -> Ints:
    """Of `index`, ascending, the last one of each run of equal `of`."""
    group = of[index]
    return index[np.append(group[1:] != group[:-1], True)[: len(index)]]
