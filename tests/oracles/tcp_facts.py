"""Facts of one TCP connection, by searching the whole list of its packets for each of them."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from tests.oracles.segments import ACK, FIN, RST, SYN, Segment, distance


class Numbers:
    """Unwrapped sequence numbers of a side: (begin, end) of each of its segments."""

    def __init__(self, segments: Sequence[Segment], side: int) -> None:
        self.of: dict[int, tuple[int, int]] = {}
        self.highest_before: dict[int, int | None] = {}
        highest: int | None = None
        for row, segment in enumerate(segments):
            if segment.side != side or segment.flags & RST:
                continue
            begin = segment.first
            if highest is not None:
                begin = highest + distance(begin, highest % 2**32)
            self.of[row] = begin, begin + segment.length
            self.highest_before[row] = highest
            if segment.is_syn or (segment.length and not self.is_probe(row, segment)):
                highest = max(begin + segment.length, begin if highest is None else highest)

    def is_probe(self, row: int, segment: Segment) -> bool:
        is_plain = segment.length == 1 and not segment.flags & (SYN | FIN | RST)
        highest = self.highest_before[row] if is_plain else None
        return highest is not None and self.of[row][0] == highest - 1

    def has_data(self, row: int, segment: Segment) -> bool:
        return row in self.of and segment.length > 0 and not self.is_probe(row, segment)


def options(data: bytes) -> tuple[int | None, int | None, bool]:
    """(MSS, window scale, whether SACK is permitted)."""
    found: dict[int, bytes] = {}
    while data and data[0] != 0:
        if data[0] == 1:
            data = data[1:]
            continue
        if len(data) < 2 or not 2 <= data[1] <= len(data):
            break
        if data[1] == {2: 4, 3: 3, 4: 2}.get(data[0]):
            found[data[0]] = data[2 : data[1]]
        data = data[data[1] :]
    mss, scale = (int.from_bytes(found[kind], "big") if kind in found else None for kind in (2, 3))
    return mss, scale, 4 in found


def round_trips(segments: Sequence[Segment], side: int) -> list[int]:
    """Times to the acknowledgement of one segment after the other, without retransmitted ones."""
    numbers = Numbers(segments, side)
    found = []
    free = 0  # the first row that may be timed
    for row, segment in enumerate(segments):
        if row < free or segment.side != side or segment.is_syn:
            continue
        highest = numbers.highest_before.get(row)
        if not numbers.has_data(row, segment):
            continue
        begin, end = numbers.of[row]
        if highest is not None and begin < highest:
            continue
        free = len(segments)
        for later in range(row + 1, len(segments)):
            other = segments[later]
            if other.side == side:
                again = numbers.has_data(later, other) or (later in numbers.of and other.is_syn)
                if again and numbers.of[later][0] < end:
                    free = later + 1
                    break
            elif other.acknowledges and distance(other.ack, end % 2**32) >= 0:
                found.append(other.time_ns - segment.time_ns)
                free = later + 1
                break
    return found


def quantile(values: list[int], share: float) -> float | None:
    """By nearest rank, in ms."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] / 1e6


def windows(segments: Sequence[Segment], side: int) -> list[Segment]:
    """The segments of a side whose receive window is not an old one, without SYNs."""
    current = []
    acked: int | None = None
    for segment in segments:
        if segment.side == side and segment.acknowledges:
            if acked is None or distance(segment.ack, acked) >= 0:
                acked = segment.ack
                current.append(segment)
    return [segment for segment in current if not segment.is_syn]


def zero_windows(segments: Sequence[Segment], side: int) -> tuple[int, float]:
    """(count, ms) of the times with a closed receive window."""
    fins = [one.time_ns for one in segments if one.side == side and one.flags & FIN]
    first_fin = next(
        (row for row, one in enumerate(segments) if one.side == side and one.flags & FIN),
        len(segments),
    )
    end = fins[0] if fins else segments[-1].time_ns
    known = windows(segments[:first_fin], side)
    by_window = itertools.groupby(known, lambda segment: segment.window == 0)
    runs = [(is_zero, list(run)) for is_zero, run in by_window]
    count, total = 0, 0
    for number, (is_zero, run) in enumerate(runs):
        if is_zero:
            until = runs[number + 1][1][0].time_ns if number + 1 < len(runs) else end
            total += until - run[0].time_ns
            count += 1
    return count, total / 1e6


def side_facts(segments: Sequence[Segment], side: int) -> dict[str, Any]:
    """The columns of one side, without `window_max`."""
    numbers = Numbers(segments, side)
    lists = [one.options for one in segments if one.side == side and one.is_syn]
    known = [one for one in lists if one is not None]
    mss, scale, sack = options(known[-1]) if known else (None, None, None)
    times = [
        segment.time_ns
        for row, segment in enumerate(segments)
        if segment.side == side
        and segment.length
        and not (row in numbers.of and numbers.is_probe(row, segment))
    ]
    count, total = zero_windows(segments, side)
    rtts = round_trips(segments, side)
    return {
        "ended": any(
            segment.flags & RST or (segment.side == side and segment.flags & FIN)
            for segment in segments
        ),
        "syn_seen": bool(known),
        "mss": mss,
        "window_scale": scale,
        "sack_permitted": sack,
        "zero_window_count": count,
        "zero_window_ms": total,
        "rtt_ms_p50": quantile(rtts, 0.5),
        "rtt_ms_p99": quantile(rtts, 0.99),
        "last_time": max(times, default=None),
    }


def window_max(segments: Sequence[Segment], side: int) -> int | None:
    """The largest receive window in bytes, if the scale is known or not needed."""
    scales: list[Any] = []
    for one in (side, 1 - side):
        own = side_facts(segments, one)
        scales.append(own["window_scale"] if own["syn_seen"] else "unknown")
    own_syns = [one.window for one in segments if one.side == side and one.is_syn]
    later = [one.window for one in windows(segments, side)]
    if not later:
        return max(own_syns, default=None)
    if None in scales:
        return max(later + own_syns)
    if "unknown" in scales:
        return None
    return max([window << min(scales[0], 14) for window in later] + own_syns)


def connection_facts(segments: Sequence[Segment], client: int) -> dict[str, Any]:
    """The columns of a connection that no side has."""
    syns = [
        row
        for row, one in enumerate(segments)
        if one.side == client and one.is_syn and not one.flags & ACK
    ]

    closers = [one.side for one in segments if one.flags & (FIN | RST)]
    numbers = [Numbers(segments, side) for side in (0, 1)]
    active = [
        one.time_ns
        for row, one in enumerate(segments)
        if one.flags & (SYN | FIN | RST) or numbers[one.side].has_data(row, one)
    ]
    times = [segments[0].time_ns, *active, segments[-1].time_ns]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    longest = gaps.index(max(gaps))
    return {
        "closed_by": None if not closers else ("client", "broker")[closers[0] != client],
        "syn_count": len(syns),
        "unanswered_syn_count": sum(not _is_answered(segments[row + 1 :], client) for row in syns),
        "refused": any(_refuses(segments, row, client) for row in range(len(segments))),
        "idle_ms_max": gaps[longest] / 1e6,
        "idle_start_time": times[longest] if gaps[longest] else None,
    }


def _is_answered(later: Sequence[Segment], client: int) -> bool:
    """Whether one of the segments after a SYN shows that the broker got it."""
    return any(
        one.is_answer if one.side != client else not one.is_syn and one.acknowledges
        for one in later
    )


def _refuses(segments: Sequence[Segment], row: int, client: int) -> bool:
    """Whether this segment is the RST that refuses the client's SYN for good."""
    rst = segments[row]
    if rst.side == client or not rst.flags & RST or not rst.flags & ACK:
        return False
    earlier = segments[:row]
    has_sent = any(
        one.side != client and (one.is_syn or one.length) and not one.flags & RST for one in earlier
    )
    is_taken = any(one.is_syn and one.flags & ACK for one in segments[row:])
    ends = [
        (one.seq + 1 + one.length) % 2**32
        for number, one in enumerate(earlier)
        if one.side == client
        and one.is_syn
        and not one.flags & ACK
        and not _is_answered(earlier[number + 1 :], client)
    ]
    return (
        not has_sent and not is_taken and any(0 <= distance(end, rst.ack) < 2**16 for end in ends)
    )
