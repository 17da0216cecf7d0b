"""Builds connections from segments, and the ordered byte ranges of their two streams.

Theory of operation
-------------------
*Order.* Segments are ordered within each pair of endpoints. Within one capture the order is that of
its packets, whatever its clock says. Across captures the order is (time, source, packet), where the
time of a capture never decreases: it is the running maximum over this pair's segments of that
capture. So the order does not depend on other segments in the batch.

*Duplicates.* A packet that was captured twice (equal IP id, seq, ack, flags, window, length, side
and bytes, within 10 ms) counts once. The copy with fewer captured bytes is ignored, or else the
second one. Copies are searched among the last packets of the pair, at least COPIES_MAX / 2 of them.

*Connections.* A pair of endpoints may carry several connections, one after the other. A new one
starts with
- a SYN whose sequence number differs from the one that this side began with. A SYN that arrives
  after its own SYN-ACK (which acknowledges it), or after the connection's first data, belongs to
  that connection;
- a SYN-ACK that does not acknowledge this connection's SYN;
- a sequence number more than 2^30 away from this side's last one, or, after the connection was
  closed, data more than 2^24 away. An RST never starts a connection. More than 2^24 away from its
  side's numbers, it ends none either: its receiver ignores it.

*Positions.* Sequence numbers are unwrapped relative to the last one of the same side, or to the
peer's acknowledgment if there is none. So positions have 64 bits and never wrap. Position 0 is the
first byte after the SYN, or the lowest captured byte if there is no SYN.

*Pieces.* The pieces of a stream are disjoint and ordered. Where segments overlap, the bytes
captured first win. Segments in order are copied. Otherwise the starts and ends of all segments
divide the stream into cells. Each segment, in order of capture, takes those that are still free: n
log n steps for any overlaps. Bytes between pieces are missing. So are bytes after the last piece
that the peer acknowledged or that precede the FIN's sequence number.

*Counters* of a direction: a segment is *retransmitted* if one of its captured bytes was captured
before. It is *out of order* if it starts before the highest byte seen so far and all its bytes are
new. A keep-alive probe (at most one byte, just before the next expected one) is neither, and its
byte is no data. Payload on SYN, FIN and RST segments is data like any other. Parts of a segment
that IP fragmented (`FRAGMENT_PART`), and segments that an earlier window counted
(`COUNTED_BEFORE`), bring bytes and are not counted. Segments without header
(`NO_HEADER`) are counted with the connection that is open, and bring no bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kdissect.arrays import Addresses, Bools, Indices, Ints, Marks, Rows, Struct, TimesNs, copied
from kdissect.capture.mapped_files import Sources
from kdissect.capture.scratch import MEMORY, Scratch
from kdissect.capture.segments import (
    ACK,
    COUNTED_BEFORE,
    FIN,
    NO_HEADER,
    NOT_COUNTED,
    RST,
    SEGMENT,
    SYN,
    SegmentBatch,
)
from kdissect.jit import inlined, int64, kernel, load_u8, making_kernel
from kdissect.tcp.byte_ranges import PIECE, Pieces
from kdissect.tcp.columns import (
    CONFLICT,
    CONNECTION,
    DUPLICATE,
    IGNORED,
    NO_ACK,
    PROBE,
    SIDE,
    UNUSED,
    CloseReason,
)
from kdissect.tcp.measurements import TcpFacts, distance, tcp_facts
from kdissect.tcp.overlaps import Laying, lay_pieces, listed

FAR = 1 << 30  # a larger distance between sequence numbers means two connections
TIME_WAIT_NS = 60_000_000_000  # as long as Linux keeps the endpoints of a closed connection
FAR_ONCE_CLOSED = 1 << 24  # the same for data after the connection was closed
REORDERED = 1 << 20  # a SYN may arrive after this many bytes of its own connection
PROBES_MAX = 32  # slots examined in the table of duplicates
_ROWS_AT_ONCE = 1 << 16  # segments whose addresses are computed together
# most packets of a pair of endpoints in that table; it keeps at least half as many
COPIES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Streams:
    """The result of reassembly. Stream 2 * connection + side is a row of `sides`."""

    segments: Rows  # SEGMENT, in assembly order
    connection: Ints  # row of the connection, per segment
    connections: Rows  # CONNECTION
    sides: Rows  # SIDE
    pieces: Pieces
    conflicts: Rows  # CONFLICT
    mark: Marks  # per segment, as of `Numbered`
    facts: TcpFacts


class Numbered(NamedTuple):
    """Per segment: its connection and its unwrapped sequence numbers.

    number: of the first payload byte.
    acknowledged: of the first byte not yet acknowledged, or NO_ACK.
    mark: DUPLICATE, PROBE, UNUSED, IGNORED or 0.
    """

    connection: Ints
    number: Indices
    acknowledged: Indices
    mark: Marks


# State of a side during the walk over a connection's segments. number: last sequence number, modulo
# 2^32. pos, low: last and lowest number, unwrapped. syn_number: of the byte after its SYN.
# syn_acked: number that its SYN-ACK acknowledged, -1 without one.
_SIDE_WALK = np.dtype(
    [
        ("has_number", "i8"),
        ("number", "i8"),
        ("pos", "i8"),
        ("low", "i8"),
        ("has_syn", "i8"),
        ("syn_number", "i8"),
        ("syn_acked", "i8"),
    ]
)


@making_kernel
def pair_starts(segments: Rows, pair_count: int) -> tuple[Indices, bool, bool, bool]:
    """(start int64[pairs + 1] of each pair's rows, is_grouped, is_up, is_one).

    is_grouped: rows are ordered by pair. is_up: the rows of each pair ascend by source and packet.
    is_one: all rows are of one source.
    """
    start = np.zeros(pair_count + 1, np.int64)
    source = np.full(pair_count, -1, np.int64)  # of the last row of each pair
    packet = np.zeros(pair_count, np.int64)
    last = 0
    is_grouped, is_up, is_one = True, True, True
    for row in range(len(segments)):
        s = segments[row]
        pair = int64(s["endpoints"])
        start[pair + 1] += 1
        is_grouped &= pair >= last
        last = pair
        if s["source"] != source[pair]:
            is_up &= s["source"] > source[pair]
            is_one &= s["source"] == segments[0]["source"]
        else:
            is_up &= s["packet"] >= packet[pair]
        source[pair] = s["source"]
        packet[pair] = s["packet"]
    for pair in range(pair_count):
        start[pair + 1] += start[pair]
    return start, is_grouped, is_up, is_one


@making_kernel
def group(segments: Rows, start: Indices, order: Indices) -> None:
    """Fill order int64[n]: rows by endpoint pair, otherwise in their order."""
    place = start[:-1].copy()
    for row in range(len(segments)):
        pair = int64(segments[row]["endpoints"])
        order[place[pair]] = row
        place[pair] += 1


@kernel
def _running_times(segments: Rows, start: Indices, time: TimesNs, is_mixed: Bools) -> None:
    """Fill time int64[n], the running maximum of each source's clock, and is_mixed bool[pairs]: the
    rows of the pair, which ascend by source and packet, do not ascend by that time."""
    for pair in range(len(start) - 1):
        for row in range(start[pair], start[pair + 1]):
            time[row] = segments[row]["time_ns"]
            if row > start[pair]:
                if segments[row]["source"] == segments[row - 1]["source"]:
                    time[row] = max(time[row], time[row - 1])
                is_mixed[pair] |= time[row] < time[row - 1]


def _moved(segments: Rows, order: Indices, scratch: Scratch) -> Rows:
    """segments[order], a copy. Copied as words, because NumPy copies structures field by field."""
    words = np.ascontiguousarray(segments).view(np.int64).reshape(len(segments), -1)
    moved = scratch.empty(words.size, np.int64)
    np.take(words, order, axis=0, out=moved.reshape(words.shape), mode="clip")
    return moved.view(SEGMENT)


def ordered(batches: list[SegmentBatch], scratch: Scratch = MEMORY) -> tuple[Rows, Indices]:
    """(segments of a batch in assembly order, start of each pair's rows).

    batches: a list of one batch, which is removed early; its segments may change places.
    """
    batch = batches.pop()
    segments, pair_count = batch.segments, len(batch.endpoints)
    del batch
    if not (segments.flags.writeable and segments.flags.aligned and segments.flags.c_contiguous):
        segments = copied(segments)  # so that kernels compile for one kind of array only
    start, is_grouped, is_up, is_one = pair_starts(segments, pair_count)
    if not is_up:
        segments = _moved(segments, np.lexsort((segments["packet"], segments["source"])), scratch)
        is_grouped = False
    if not is_grouped:
        order = scratch.empty(len(segments), np.int64)
        group(segments, start, order)
        segments = _moved(segments, order, scratch)
    if not is_one:
        time = scratch.empty(len(segments), np.int64)
        is_mixed = np.zeros(pair_count, np.bool_)
        _running_times(segments, start, time, is_mixed)
        if is_mixed.any():
            order = scratch.empty(len(segments), np.int64)
            order[:] = np.arange(len(segments))
            for pair in np.flatnonzero(is_mixed):
                rows = slice(start[pair], start[pair + 1])
                order[rows] = start[pair] + np.argsort(time[rows], kind="stable")
            segments = _moved(segments, order, scratch)
    return segments, start


@inlined
def _same_packet(segments: Rows, address: Addresses, one: int, two: int, window_ns: int) -> bool:
    a = segments[one]
    b = segments[two]
    if (
        a["seq"] != b["seq"]
        or a["ack"] != b["ack"]
        or a["ip_id"] != b["ip_id"]
        or a["option_words"] != b["option_words"]
        or (int64(a["marks"]) ^ int64(b["marks"])) & ~COUNTED_BEFORE
        or a["flags"] != b["flags"]
        or a["side"] != b["side"]
        or a["length"] != b["length"]
        or a["window"] != b["window"]
        or abs(int64(a["time_ns"]) - int64(b["time_ns"])) > window_ns
    ):
        return False
    for at in range(min(int64(a["captured"]), int64(b["captured"]))):
        if load_u8(address[one] + np.uint64(at)) != load_u8(address[two] + np.uint64(at)):
            return False
    return True


@inlined
def _earlier_copy(segments: Rows, address: Addresses, row: int, table: Ints, window_ns: int) -> int:
    """The segment that `row` is a second copy of, or -1. `row` is added to the table if it is new,
    or has more bytes than that copy.

    The table uses open addressing and examines at most PROBES_MAX slots. So an input that is built
    to collide makes it miss duplicates, but not slow.
    """
    s = segments[row]
    mask = len(table) - 1
    home = mask & _home_of(segments, row)
    place = int64(-1)
    for step in range(PROBES_MAX):
        at = (home + step) & mask
        other = table[at]
        if other < 0:
            if place < 0:
                place = at
            break
        if _same_packet(segments, address, other, row, window_ns):
            if s["captured"] > segments[other]["captured"]:
                table[at] = row
            return int64(other)
        is_old = int64(s["time_ns"]) - int64(segments[other]["time_ns"]) > window_ns
        if place < 0 and is_old:
            place = at  # too old to have further copies
    table[place if place >= 0 else home] = row
    return int64(-1)


@inlined
def _begin_table(segments: Rows, mark: Marks, first: int, row: int, table: Ints) -> None:
    """Rebuild the table of duplicates from the packets [first, row)."""
    table[:] = -1
    mask = len(table) - 1
    for other in range(first, row):
        if mark[other] == DUPLICATE or segments[other]["marks"] & NO_HEADER:
            continue
        home = mask & _home_of(segments, other)
        for step in range(PROBES_MAX):
            at = (home + step) & mask
            if table[at] < 0:
                table[at] = other
                break


@inlined
def _home_of(segments: Rows, row: int) -> int:
    """A hash of the fields that copies of a packet share."""
    s = segments[row]
    mixed = int64(s["seq"]) * 0x2545F491 ^ int64(s["ack"]) * 0x1F83D9AB
    mixed ^= (int64(s["ip_id"]) + int64(s["flags"]) * 65537) * 0x19B4B79C
    mixed += int64(s["side"])
    mixed ^= mixed >> 31
    mixed ^= mixed >> 15
    return mixed


@inlined
def _starts_anew(walk: Rows, s: Struct, number: int, closed: int, quiet_ns: int) -> bool:
    """Return whether a segment starts a new connection; `number` is the one after the SYN, if it
    has one. quiet_ns: since the packet before."""
    flags, ack, side = int64(s["flags"]), int64(s["ack"]), int64(s["side"])
    other = 1 - side
    # RFC 9293, 3.5: a connection begins with a SYN. An equal sequence number is a retransmission of
    # it.
    if flags & SYN:
        if closed == 3 and quiet_ns > TIME_WAIT_NS:
            return True  # RFC 9293, 3.6.1: the number may be any then
        if walk[side]["has_syn"]:
            return number != walk[side]["syn_number"]
        if flags & ACK and walk[other]["has_syn"]:
            return not 0 <= distance(ack, walk[other]["syn_number"]) < REORDERED
        if walk[other]["has_syn"]:
            if walk[other]["syn_acked"] >= 0:
                return walk[other]["syn_acked"] != number
            return closed != 0  # simultaneous open (RFC 9293, 3.5): both sides send a SYN
        if not walk[side]["has_number"] or closed:
            return closed != 0
        pos = walk[side]["pos"] + distance(number, walk[side]["number"])
        return not 0 <= walk[side]["low"] - pos < REORDERED
    # RFC 9293, 3.4: without a SYN, only a jump of the sequence number shows a new connection.
    if flags & RST or not walk[side]["has_number"]:
        return False
    away = abs(distance(number, walk[side]["number"]))
    return away > FAR or (closed == 3 and s["length"] > 0 and away > FAR_ONCE_CLOSED)


def split_connections(
    segments: Rows, pair_start: Indices, address: Addresses, window_ns: int, numbered: Numbered
) -> int:
    """Assign each segment to a connection and unwrap its numbers, in `numbered`; returns the number
    of connections."""
    longest = int(np.diff(pair_start).max(initial=0))
    copies = np.empty(_table_size(longest), np.int32)
    walk = np.zeros(2, _SIDE_WALK)
    return int(_split_connections(segments, pair_start, address, window_ns, numbered, copies, walk))


@inlined
def _table_size(count: int) -> int:
    """Slots of the table of duplicates for `count` segments: a power of two."""
    size = 16
    while size < 2 * min(count, COPIES_MAX):
        size *= 2
    return size


@kernel
def _split_connections(
    segments: Rows,
    pair_start: Indices,
    address: Addresses,
    window_ns: int,
    numbered: Numbered,
    copies: Ints,
    walk: Rows,
) -> int:
    """The kernel of `split_connections`.

    copies: scratch for a table of duplicates. walk: scratch, _SIDE_WALK[2].
    """
    connection, number, acknowledged, mark = numbered
    count = 0
    for pair in range(len(pair_start) - 1):
        start = pair_start[pair]
        stop = pair_start[pair + 1]
        table = copies[: _table_size(stop - start)]
        table[:] = -1
        known_from = start  # first packet in the table
        is_open = False
        closed = 0  # bit 0, 1: that side sent a FIN; both bits also after an RST
        last_time = 0
        for row in range(start, stop):
            if segments[row]["marks"] & NO_HEADER:
                if not is_open:
                    count += 1
                    is_open = True
                connection[row] = count - 1
                number[row] = 0
                acknowledged[row] = NO_ACK
                mark[row] = UNUSED
                continue
            if row - known_from >= COPIES_MAX:
                known_from = row - COPIES_MAX // 2
                _begin_table(segments, mark, known_from, row, table)
            copy_of = _earlier_copy(segments, address, row, table, window_ns)
            if copy_of >= 0:
                connection[row] = connection[copy_of]
                number[row] = number[copy_of]
                acknowledged[row] = acknowledged[copy_of]
                mark[row] = mark[copy_of]
                # a snap length may have cut either copy
                is_longer = segments[row]["captured"] > segments[copy_of]["captured"]
                lesser = copy_of if is_longer else row
                mark[lesser] = DUPLICATE
                acknowledged[lesser] = NO_ACK
                continue
            s = segments[row]
            flags = int64(s["flags"])
            side = int64(s["side"])
            other = 1 - side
            ack = int64(s["ack"])
            here = int64(s["seq"])
            if flags & SYN:
                # RFC 9293, 3.4: a SYN takes a sequence number; the first byte has the next one.
                here = (here + 1) & 0xFFFFFFFF
            time = int64(s["time_ns"])
            if not is_open or _starts_anew(walk, s, here, closed, time - last_time):
                count += 1
                is_open = True
                closed = 0
                for one in range(2):
                    walk[one]["has_number"] = 0
                    walk[one]["has_syn"] = 0
                    walk[one]["syn_acked"] = -1
            last_time = time
            connection[row] = count - 1
            # RFC 9293, 3.4: sequence numbers wrap at 2^32, so a position continues from the last
            # one.
            pos = int64(0)
            if walk[side]["has_number"]:
                pos = walk[side]["pos"] + distance(here, walk[side]["number"])
            elif flags & RST:
                mark[row] = UNUSED
            # RFC 9293, 3.10.7.4 and RFC 5961, 3.2: a host ignores an RST outside of its window.
            is_far = abs(pos - walk[side]["pos"]) > FAR_ONCE_CLOSED
            if flags & RST and walk[side]["has_number"] and is_far:
                mark[row] = IGNORED
            if mark[row] == 0:
                if not walk[side]["has_number"] or pos < walk[side]["low"]:
                    walk[side]["low"] = pos
                walk[side]["has_number"] = 1
                walk[side]["number"] = here
                walk[side]["pos"] = pos
            number[row] = pos
            acknowledged[row] = NO_ACK
            if flags & ACK and not flags & RST:
                # RFC 9293, 3.4: an ACK is the peer's next sequence number, known before its first
                # segment.
                if not walk[other]["has_number"]:
                    walk[other]["has_number"] = 1
                    walk[other]["number"] = ack
                    walk[other]["pos"] = 0
                    walk[other]["low"] = 0
                away = distance(ack, walk[other]["number"])
                # RFC 5961, 4.2: to a SYN on the endpoints of an earlier connection, its peer may
                # answer with the numbers of that one.
                is_early = walk[other]["has_syn"] and not walk[side]["has_syn"] and not flags & SYN
                if abs(away) <= (FAR_ONCE_CLOSED if is_early else FAR):
                    acknowledged[row] = walk[other]["pos"] + away
            if flags & SYN:
                walk[side]["has_syn"] = 1
                walk[side]["syn_number"] = here
                walk[side]["syn_acked"] = ack if flags & ACK else -1
            if mark[row] == IGNORED:
                continue
            # RFC 9293, 3.6: a FIN closes one direction; an RST (3.5.3) closes both.
            if flags & FIN:
                closed |= 1 << side
            if flags & RST:
                closed = 3
    return count


@kernel
def measure(segments: Rows, numbered: Numbered, connections: Rows, sides: Rows) -> None:
    """Fill the facts of connections and sides in one walk over the segments.

    Also marks keep-alive probes and messy streams.
    """
    connection, number, acknowledged, mark = numbered
    for stream in range(len(sides)):
        sides[stream]["fin"] = NO_ACK
        sides[stream]["ack_low"] = NO_ACK
        sides[stream]["ack_high"] = NO_ACK
    last_pair = -1
    last_connection = -1
    for row in range(len(segments)):
        s = segments[row]
        flags = int64(s["flags"])
        side = int64(s["side"])
        length = int64(s["length"])
        time = int64(s["time_ns"])
        which = int64(connection[row])
        c = connections[which]
        own = sides[2 * which + side]
        counted = 0 if s["marks"] & NOT_COUNTED else 1
        if mark[row] == DUPLICATE:
            own["duplicate_count"] += counted
            continue
        if which != last_connection:
            pair = int64(s["endpoints"])
            # the same endpoints again: the earlier connection ended without FIN or RST
            if pair == last_pair:
                before = connections[last_connection]
                if before["close_reason"] == CloseReason.CAPTURE_END:
                    before["close_reason"] = CloseReason.REUSED
            last_pair = pair
            last_connection = which
            c["pair"] = pair
            c["first_time"] = time
            c["last_time"] = time
            c["syn_time"] = NO_ACK
            c["syn_ack_time"] = NO_ACK
            c["rtt"] = -1
            c["client_side"] = -1
            c["close_reason"] = CloseReason.CAPTURE_END
        c["first_time"] = min(c["first_time"], time)
        c["last_time"] = max(c["last_time"], time)
        own["segment_count"] += counted
        if mark[row] == IGNORED:
            continue
        _close_and_open(c, own, flags, side, time, number[row])
        if acknowledged[row] != NO_ACK:
            peer = sides[2 * which + 1 - side]
            if peer["ack_low"] == NO_ACK or acknowledged[row] < peer["ack_low"]:
                peer["ack_low"] = acknowledged[row]
            peer["ack_high"] = max(peer["ack_high"], acknowledged[row])
        if flags & FIN:
            own["fin"] = max(own["fin"], number[row] + length)
        if length == 0 or mark[row] == UNUSED:
            continue
        place = number[row]
        # RFC 9293, 3.8.4: a keep-alive has the sequence number before the next one, and may have
        # one byte
        has_position = own["has_syn"] or own["has_data"]
        if has_position and length == 1 and place == own["high"] - 1 and not flags & FIN:
            mark[row] = PROBE
            continue
        if has_position and place < own["high"]:
            own["is_messy"] = 1
        if not has_position:
            own["high"] = place + length
        if not own["has_data"]:
            own["low"] = place
        own["has_data"] = 1
        own["low"] = min(own["low"], place)
        own["high"] = max(own["high"], place + length)
        own["data_count"] += 1
    for stream in range(len(sides)):
        own = sides[stream]
        if not own["has_syn"]:
            if own["has_data"]:
                own["origin"] = own["low"]
            elif own["ack_low"] != NO_ACK:
                own["origin"] = own["ack_low"]


@inlined
def _close_and_open(c: Struct, own: Struct, flags: int, side: int, time: int, number: int) -> None:
    """Update handshake, client side and close reason from one segment's flags."""
    if flags & SYN:
        if not own["has_syn"]:
            own["has_syn"] = 1
            own["origin"] = number
            if not own["has_data"]:
                own["high"] = number
            elif own["low"] < number:
                own["is_messy"] = 1
        # RFC 9293, 3.5: the client sends SYN, the server SYN-ACK, the client ACK
        if flags & ACK:
            if c["syn_ack_time"] == NO_ACK:
                c["syn_ack_time"] = time
            if c["client_side"] < 0:
                c["client_side"] = 1 - side
        else:
            if c["syn_time"] == NO_ACK:
                c["syn_time"] = time
            if c["client_side"] < 0:
                c["client_side"] = side
    elif (
        flags & ACK
        and c["rtt"] < 0
        and side == c["client_side"]
        and c["syn_time"] != NO_ACK
        and c["syn_ack_time"] != NO_ACK
    ):
        c["rtt"] = max(0, time - c["syn_time"])
    if c["close_reason"] == CloseReason.CAPTURE_END:
        if flags & RST:
            c["close_reason"] = CloseReason.RST
        elif flags & FIN:
            c["close_reason"] = CloseReason.FIN


def _addresses(segments: Rows, sources: Sources, scratch: Scratch) -> Addresses:
    """uint64[n]: memory address of each segment's payload."""
    address = scratch.empty(len(segments), np.uint64)
    for first in range(0, len(segments), _ROWS_AT_ONCE):
        some = segments[first : first + _ROWS_AT_ONCE]
        address[first : first + _ROWS_AT_ONCE] = sources.addresses(
            some["source"], some["pos"], some["captured"]
        )
    return address


def reassemble(
    batches: list[SegmentBatch],
    sources: Sources,
    window_ns: int,
    scratch: Scratch = MEMORY,
    earlier_facts: TcpFacts | None = None,
) -> Streams:
    """Reassemble a checked batch (`options.check_batch`) into connections and pieces.

    batches: a list of one batch, which is removed: its segments may use as much memory as
    everything else, and are not needed after they were ordered. earlier_facts: as for `tcp_facts`.
    """
    segments, pair_start = ordered(batches, scratch)
    count = len(segments)
    address = _addresses(segments, sources, scratch)
    numbered = Numbered(
        scratch.empty(count, np.int32),
        scratch.empty(count, np.int64),
        scratch.empty(count, np.int64),
        scratch.zeros(count, np.uint8),
    )
    connection_count = split_connections(segments, pair_start, address, window_ns, numbered)
    connections = np.zeros(connection_count, CONNECTION)
    sides = np.zeros(2 * connection_count, SIDE)
    measure(segments, numbered, connections, sides)
    facts = tcp_facts(
        segments, numbered.connection, numbered.mark, connections, sources, earlier_facts
    )
    connection, number, mark = numbered.connection, numbered.number, numbered.mark
    del numbered  # frees the acknowledgements
    rows = scratch.empty(int(sides["data_count"].sum()), np.int64)
    start = listed(segments, connection, mark, sides, rows)
    messy = int(sides["data_count"][sides["is_messy"] != 0].sum())
    pieces = scratch.empty(len(rows) + messy, PIECE)
    conflicts = scratch.empty(messy, CONFLICT)
    used = np.zeros(2, np.int64)
    lay_pieces(Laying(segments, address, number, rows, sides, pieces, conflicts, used), start)
    return Streams(
        segments,
        connection,
        connections,
        sides,
        pieces[: used[0]],
        conflicts[: used[1]],
        mark,
        facts,
    )
