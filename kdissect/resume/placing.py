"""Where the segments of each stream lie, and how far what they hold is settled.

For `rejoined`, which keeps the segments behind a position and drops those before it. All streams of
a bucket are placed at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kdissect.arrays import take
from kdissect.capture.segments import ACK, FIN, RST, SYN
from kdissect.jit import kernel
from kdissect.tcp.byte_ranges import int64
from kdissect.tcp.columns import DUPLICATE, GAP_COUNT, HAS_DATA, HIGH, ORIGIN, SIDE_WIDTH, UNUSED
from kdissect.tcp.reassembly import Streams

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.void]

NO_NUMBER = -1
FAR = (1 << 63) - 1


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
    position up to which its bytes are settled, and up to which none was captured lately. stays:
    uint8 of each segment, whether it is kept wherever it lies, as the young and the last ones are.
    """

    rows: Ints
    place: Ints
    length: Ints
    start: Ints
    seq: Ints
    settled: Ints
    quiet: Ints
    stays: npt.NDArray[np.uint8]

    def of(self, stream: int) -> Placed:
        some = slice(int(self.start[stream]), int(self.start[stream + 1]))
        return Placed(self.rows[some], self.place[some], self.length[some], int(self.seq[stream]))


def places(streams: Streams, end_ns: int, keep_ns: int, linger_ns: int) -> Places:
    """Place all segments. Times are those of `tails.Keeping`."""
    count = len(streams.sides) // SIDE_WIDTH
    used = int(np.count_nonzero(streams.mark & UNUSED == 0))
    rows, place, length = (np.empty(used, np.int64) for _ in range(3))
    seq, settled, quiet = (np.empty(count, np.int64) for _ in range(3))
    start = np.zeros(count + 1, np.int64)
    stays = np.empty(used, np.uint8)
    found = Places(rows, place, length, start, seq, settled, quiet, stays)
    by_stream(streams.segments, streams.connection, streams.mark, start, rows)
    lay(
        streams.segments, streams.mark, streams.sides, rows, start, place, length, seq, settled,
        quiet, stays, end_ns, keep_ns, linger_ns,
    )  # fmt: skip
    return found


@kernel
def by_stream(segments: Any, connection: Any, mark: Any, start: Any, rows: Any) -> None:
    """Fill start int64[streams + 1], which is 0, and rows: the used segments by stream."""
    for row in range(len(segments)):
        if mark[row] & UNUSED == 0:
            stream = 2 * int64(connection[row]) + int64(segments[row]["side"])
            if stream + 2 < len(start):
                start[stream + 2] += 1
    for stream in range(2, len(start)):
        start[stream] += start[stream - 1]
    for row in range(len(segments)):
        if mark[row] & UNUSED == 0:
            stream = 2 * int64(connection[row]) + int64(segments[row]["side"])
            rows[start[stream + 1]] = row
            start[stream + 1] += 1


@kernel
def lay(
    segments: Any, mark: Any, sides: Any, rows: Any, start: Any, place: Any, length: Any, seq: Any,
    settled: Any, quiet: Any, stays: Any, end_ns: int, keep_ns: int, linger_ns: int,
) -> None:  # fmt: skip
    """Fill what `Places` says of the segments `rows`, and of the streams that begin at `start`."""
    for stream in range(len(start) - 1):
        first, stop = start[stream], start[stream + 1]
        side = stream * SIDE_WIDTH
        has_data = sides[side + HAS_DATA] != 0
        size = sides[side + HIGH] - sides[side + ORIGIN] if has_data else 0
        at, last, high, syn = int64(0), int64(0), -FAR, int64(-1)
        young, late = FAR, FAR  # before they are moved
        for index in range(first, stop):
            s = segments[rows[index]]
            is_syn = s["flags"] & SYN != 0
            number = int64(s["seq"]) + (1 if is_syn else 0)
            if index > first:
                at += ((number - last + 0x80000000) & 0xFFFFFFFF) - 0x80000000
            last = number
            place[index] = at
            length[index] = s["length"]
            age = end_ns - int64(s["time_ns"])
            stays[index] = age <= keep_ns or s["flags"] & (FIN | RST) != 0
            if length[index] > 0:
                if mark[rows[index]] == 0:
                    high = max(high, at + length[index])
                if age <= linger_ns:
                    young = min(young, at)
                if age <= keep_ns:
                    late = min(late, at)
            if is_syn and syn < 0:
                syn = index
        moved = int64(0)
        seq[stream] = NO_NUMBER
        if has_data:
            moved = size - (high if high != -FAR else 0)
            if stop > first:
                s = segments[rows[first]]
                number = int64(s["seq"]) + (1 if s["flags"] & SYN != 0 else 0)
                seq[stream] = (number - moved) & 0xFFFFFFFF
        elif syn >= 0:
            moved = -place[syn]
            seq[stream] = (int64(segments[rows[syn]]["seq"]) + 1) & 0xFFFFFFFF
        if moved != 0:
            for index in range(first, stop):
                place[index] += moved
        young = young if young == FAR else young + moved
        late = late if late == FAR else late + moved
        settled[stream] = min(size, young) if sides[side + GAP_COUNT] != 0 else size
        quiet[stream] = min(size, late)


def behind(streams: Streams, found: Places, stream: Ints, at: Ints) -> tuple[Rows, Ints, Ints]:
    """(segments to keep behind position `at` of each stream, trimmed; rows that they are of; which
    of the streams they are of).

    `pos` and `source` still say where their bytes are.
    """
    room = int(np.diff(found.start)[stream].sum())
    index, of = np.empty(room, np.int64), np.empty(room, np.int64)
    count = choose(
        streams.segments, streams.mark, found.rows, found.place, found.length, found.stays,
        found.start, stream, at, index, of,
    )  # fmt: skip
    index, of = index[:count].copy(), of[:count].copy()
    rows, place, length = found.rows[index], found.place[index], found.length[index]
    kept = take(streams.segments, rows)
    trimmed = np.clip(at[of] - place, 0, length)
    captured = kept["captured"].astype(np.int64)
    kept["seq"] = (
        kept["seq"].astype(np.int64) + ((kept["flags"] & SYN) != 0) + trimmed
    ) & 0xFFFFFFFF
    kept["flags"] &= 0xFF ^ SYN
    kept["pos"] += np.minimum(trimmed, captured)
    kept["captured"] = np.maximum(captured - trimmed, 0)
    kept["length"] -= trimmed.astype(np.int32)
    return kept, rows, of


@kernel
def choose(
    segments: Any, mark: Any, rows: Any, place: Any, length: Any, stays: Any, start: Any,
    stream: Any, at: Any, index: Any, of: Any,
) -> int:  # fmt: skip
    """Fill index (places in `rows`) and of (which of the streams) of the segments to keep; how
    many there are."""
    count = 0
    for number in range(len(stream)):
        first, stop = start[stream[number]], start[stream[number] + 1]
        acked = stop - 1  # the last that acknowledges something
        while acked >= first and not segments[rows[acked]]["flags"] & ACK:
            acked -= 1
        for here in range(first, stop):
            wanted = stays[here] != 0
            if length[here] > 0 and place[here] + length[here] > at[number]:
                wanted |= mark[rows[here]] != DUPLICATE
            wanted |= here == stop - 1 or here == acked  # its number, what it acknowledges
            if wanted and segments[rows[here]]["packet"] > 0:  # not a SYN of ours
                index[count] = here
                of[count] = number
                count += 1
    return count
