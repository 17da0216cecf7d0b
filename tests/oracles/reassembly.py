"""TCP reassembly byte by byte: each stream is a dictionary from position to byte.

It takes the segments of one pair of endpoints in assembly order, with their captured payload.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kdissect.capture.segments import NO_HEADER
from tests.oracles.segments import ACK, FIN, RST, SYN, Segment, distance

# Which numbers belong to one connection (`docs/how-it-works.md`): a window has at most 2^30 bytes
# (RFC 7323, 2.3); 16 MiB after a close; 1 MiB between a SYN and what overtook it.
FAR, FAR_ONCE_CLOSED, REORDERED = 2**30, 2**24, 2**20


@dataclass
class Side:
    """One stream of a connection while it is read; numbers are unwrapped."""

    last: tuple[int, int] | None = None  # sequence number, unwrapped number
    lowest: int = 0
    syn: int | None = None  # sequence number behind the SYN
    syn_acked: int | None = None  # what the SYN acknowledged, if it did
    origin: int | None = None  # unwrapped number behind the SYN
    data: list[tuple[int, int]] = field(default_factory=list)  # (unwrapped number, row)
    end: int | None = None
    fin: int | None = None
    acknowledged: list[int] = field(default_factory=list)
    segment_count: int = 0
    duplicate_count: int = 0


class Numbers(NamedTuple):
    """What a segment says, unwrapped. is_ignored: its receiver ignores it."""

    place: int
    acknowledged: int | None
    is_used: bool
    is_ignored: bool


@dataclass
class Stream:
    """The result: `owner` tells for each captured byte which segment it came from."""

    owner: dict[int, int]
    conflicts: dict[int, tuple[int, int]]  # segment -> first position, count of differing bytes
    end: int
    segment_count: int
    duplicate_count: int
    retransmitted_count: int
    out_of_order_count: int


def is_copy(one: Segment, two: Segment, window_ns: int) -> bool:
    """Whether two segments are the same packet, captured twice."""
    size = min(len(one.payload), len(two.payload))
    same = ("side", "flags", "seq", "ack", "ip_id", "marks", "option_size", "window", "length")
    return (
        all(getattr(one, name) == getattr(two, name) for name in same)
        and abs(one.time_ns - two.time_ns) <= window_ns
        and one.payload[:size] == two.payload[:size]
    )


def starts_anew(segment: Segment, sides: list[Side], closed: int) -> bool:
    """Whether the segment belongs to another connection than the one open now."""
    own, peer = sides[segment.side], sides[1 - segment.side]
    if segment.flags & SYN:
        if own.syn is not None:
            return segment.first != own.syn
        if segment.flags & ACK and peer.syn is not None:
            return not 0 <= distance(segment.ack, peer.syn) < REORDERED
        if peer.syn is not None:
            if peer.syn_acked is not None:
                return peer.syn_acked != segment.first
            return closed != 0
        if own.last is None or closed:
            return closed != 0
        place = own.last[1] + distance(segment.first, own.last[0])
        return not 0 <= own.lowest - place < REORDERED
    if segment.flags & RST or own.last is None:
        return False
    away = abs(distance(segment.first, own.last[0]))
    return away > FAR or (closed == 3 and segment.length > 0 and away > FAR_ONCE_CLOSED)


def reassemble(
    segments: Sequence[Segment], window_ns: int
) -> tuple[list[int], list[tuple[Stream, Stream]]]:
    """(connection of each segment, both streams of each connection)."""
    connections: list[list[Side]] = []
    belongs: list[int] = []
    firsts: list[int] = []  # segments that are no copies
    numbers: list[Numbers | None] = []  # None: a copy
    closed = 0
    for row, segment in enumerate(segments):
        numbers.append(None)
        if segment.marks & NO_HEADER:
            if not connections:
                connections.append([Side(), Side()])
            belongs.append(len(connections) - 1)
            continue
        copy_of = [one for one in firsts if is_copy(segments[one], segment, window_ns)]
        if copy_of:
            belongs.append(belongs[copy_of[0]])
            if len(segment.payload) > len(segments[copy_of[0]].payload):
                firsts[firsts.index(copy_of[0])] = row
                numbers[row], numbers[copy_of[0]] = numbers[copy_of[0]], None
            continue
        firsts.append(row)
        if not connections or starts_anew(segment, connections[-1], closed):
            connections.append([Side(), Side()])
            closed = 0
        belongs.append(len(connections) - 1)
        numbers[row] = found = _number(segment, connections[-1])
        if segment.flags & FIN and not found.is_ignored:
            closed |= 1 << segment.side
        if segment.flags & RST and not found.is_ignored:
            closed = 3
    for row, segment in enumerate(segments):
        sides = connections[belongs[row]]
        if segment.marks & NO_HEADER:
            sides[segment.side].segment_count += 1
        elif (known := numbers[row]) is None:
            sides[segment.side].duplicate_count += segment.counted
        else:
            _add(segment, row, sides, known)
    return belongs, [(_stream(a, segments), _stream(b, segments)) for a, b in connections]


def _number(segment: Segment, sides: list[Side]) -> Numbers:
    own, peer = sides[segment.side], sides[1 - segment.side]
    is_reset = bool(segment.flags & RST)
    place, is_used, is_ignored = 0, not is_reset, False
    if own.last is not None:
        place = own.last[1] + distance(segment.first, own.last[0])
        # RFC 5961, 3.2: outside of any window
        is_ignored = is_reset and abs(place - own.last[1]) > FAR_ONCE_CLOSED
        is_used = not is_ignored
    if is_used:
        own.lowest = place if own.last is None else min(own.lowest, place)
        own.last = (segment.first, place)
    acknowledged = None
    if segment.flags & ACK and not is_reset:
        if peer.last is None:
            peer.last, peer.lowest = (segment.ack, 0), 0
        away = distance(segment.ack, peer.last[0])
        # RFC 5961, 4.2: of an earlier connection
        is_challenge = peer.syn is not None and own.syn is None and not segment.flags & SYN
        if abs(away) <= (FAR_ONCE_CLOSED if is_challenge else FAR):
            acknowledged = peer.last[1] + away
    if segment.flags & SYN:
        own.syn = segment.first
        own.syn_acked = segment.ack if segment.flags & ACK else None
    return Numbers(place, acknowledged, is_used, is_ignored)


def _add(segment: Segment, row: int, sides: list[Side], numbers: Numbers) -> None:
    own, peer = sides[segment.side], sides[1 - segment.side]
    own.segment_count += segment.counted
    if numbers.is_ignored:
        return
    place = numbers.place
    if numbers.acknowledged is not None:
        peer.acknowledged.append(numbers.acknowledged)
    if segment.flags & SYN and own.origin is None:
        own.origin = place
        own.end = max(own.end, place) if own.data and own.end is not None else place
    if segment.flags & FIN:
        until = place + segment.length
        own.fin = until if own.fin is None else max(own.fin, until)
    if segment.length == 0 or not numbers.is_used:
        return
    if own.end is not None and segment.length == 1 and place == own.end - 1:
        if not segment.flags & FIN:
            return  # a keep-alive probe
    own.data.append((place, row))
    own.end = place + segment.length if own.end is None else max(own.end, place + segment.length)


def _stream(side: Side, segments: Sequence[Segment]) -> Stream:
    origin = side.origin
    if origin is None:
        origin = min((place for place, _ in side.data), default=None)
    if origin is None:
        origin = min(side.acknowledged, default=0)
    owner: dict[int, int] = {}
    value: dict[int, int] = {}
    conflicts = {}
    retransmitted = out_of_order = 0
    highest = 0
    for number, (place, row) in enumerate(side.data):
        pos = place - origin
        payload = segments[row].payload
        places = [(pos + at, byte) for at, byte in enumerate(payload) if pos + at >= 0]
        differing = [at for at, byte in places if at in value and value[at] != byte]
        is_new = len(places) == len(payload) and not any(at in owner for at, _ in places)
        is_back = (number > 0 or pos < 0) and pos < highest
        for at, byte in places:
            owner.setdefault(at, row)
            value.setdefault(at, byte)
        if not is_new or (is_back and not payload):
            retransmitted += segments[row].counted
            if differing:
                conflicts[row] = (differing[0], len(differing))
        elif is_back:
            out_of_order += segments[row].counted
        highest = max(highest, pos + segments[row].length)
    end = max(0, side.end - origin) if side.data and side.end is not None else 0
    if side.fin is not None:
        if side.origin is not None or side.data:
            end = max(end, side.fin - origin)
    elif side.acknowledged and max(side.acknowledged) - origin > end + 1:
        end = max(side.acknowledged) - origin
    return Stream(
        owner, conflicts, end, side.segment_count, side.duplicate_count, retransmitted, out_of_order
    )
