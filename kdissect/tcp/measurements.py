"""Measures TCP connections: handshakes, receive windows, round-trip times, idle time, closing.

Theory of operation
-------------------
One walk over the segments of a connection, in assembly order, updates a record of the connection
and one of each side. The records contain everything that the walk needs to continue. So the walk of
a later window begins with the records of the earlier one, and skips the segments that it counted.
Sequence numbers stay as they are in segments, modulo 2^32.

*Round-trip times.* One segment of a side is timed at a time, until the peer acknowledges its last
byte (RFC 6298, 3). A retransmission of bytes up to its end discards the measurement (Karn's
algorithm), because the acknowledgement may be of either copy. The times of a connection are counted
in buckets whose middle is at most 1/32 away from each of their values.

*Receive windows.* An RST announces none. A segment that acknowledges less than an earlier one of
its side is out of order, so its window is old (RFC 9293, 3.10.7.4). After its FIN a side needs no
window.

*Idle time* passes between segments with payload, SYN, FIN or RST, of either side. Keep-alive probes
and pure acknowledgements do not end it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kdissect.arrays import Addresses, Indices, Ints, Marks, Rows, Struct, take
from kdissect.capture.link_layers import find_option
from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import (
    ACK,
    COUNTED_BEFORE,
    FIN,
    FRAGMENT_PART,
    NO_HEADER,
    RST,
    SYN,
    option_sizes,
)
from kdissect.jit import inlined, int64, kernel, load_u8, load_u16
from kdissect.tcp.columns import DUPLICATE, IGNORED, UNUSED

NO_TIME = -(1 << 62)
UNKNOWN = -1

CONNECTION_FACTS = np.dtype(
    [
        ("closed_by", "i1"),  # side that sent the first FIN or RST, or UNKNOWN
        ("is_refused", "u1"),  # an RST answered a SYN
        ("is_proxied", "u1"),  # a PROXY header named the client (`proxy_protocol`)
        ("proxied_ip", "u1", (16,)),
        ("proxied_port", "<u2"),
        ("proxy_byte_count", "<i8"),
        ("idle_ns", "<i8"),  # the longest idle time
        ("idle_since", "<i8"),  # its begin, or NO_TIME
        ("active_time", "<i8"),  # of the last segment that ended idle time, or NO_TIME
    ]
)

SIDE_FACTS = np.dtype(
    [
        ("syn_count", "<i8"),  # without ACK
        ("unanswered_syn_count", "<i8"),
        ("has_options", "u1"),  # a SYN of this side was captured with all of its options
        ("sack_permitted", "u1"),
        ("window_scale", "<i4"),  # of that SYN, or UNKNOWN; so is `mss`
        ("mss", "<i4"),
        ("window_max", "<i8"),  # of segments without SYN, before scaling; or UNKNOWN
        ("syn_window_max", "<i8"),  # of SYNs, which are never scaled
        ("zero_window_count", "<i8"),
        ("zero_window_ns", "<i8"),  # of windows that opened again
        ("zero_window_since", "<i8"),  # NO_TIME while the window is open
        ("data_time", "<i8"),  # of the last payload, or NO_TIME
        ("rtt_p50_ns", "<i8"),  # or UNKNOWN
        ("rtt_p99_ns", "<i8"),
        # state of the walk: numbers modulo 2^32, or UNKNOWN
        ("next", "<i8"),  # after the highest byte sent
        ("acked", "<i8"),  # highest number that this side acknowledged
        ("timed_end", "<i8"),  # after the segment whose round trip is measured
        ("timed_since", "<i8"),  # or NO_TIME
        ("has_fin", "u1"),
        ("has_ended", "u1"),  # it sent a FIN, or either side an RST
    ]
)

# Round-trip times of a stream (2 * connection + side) in one bucket.
RTT_COUNT = np.dtype([("stream", "<i8"), ("bucket", "<i4"), ("count", "<i4")])

_UNKNOWN_AT_FIRST = (
    *("window_scale", "mss", "window_max", "syn_window_max"),
    *("rtt_p50_ns", "rtt_p99_ns", "next", "acked", "timed_end"),
)
_OPTIONS = np.dtype([("mss", "<i4"), ("window_scale", "<i4"), ("sack_permitted", "u1")])

_STEPS = 16  # buckets for each doubling of the time
_BUCKETS = 960  # up to 2^63 ns


class TcpFacts(NamedTuple):
    """CONNECTION_FACTS[n], SIDE_FACTS[2 * n], and RTT_COUNT[m] ordered by stream.

    rtt is empty if no later window continues the connections.
    """

    connections: Rows
    sides: Rows
    rtt: Rows

    def take(self, rows: Indices) -> TcpFacts:
        """The facts of some connections, without the counts of round-trip times."""
        both = np.stack([2 * rows, 2 * rows + 1], 1).reshape(-1)
        return TcpFacts(self.connections[rows], self.sides[both], self.rtt[:0])

    def of(self, connection: int) -> TcpFacts:
        """The facts of one connection, as its state keeps them."""
        low, high = np.searchsorted(self.rtt["stream"], [2 * connection, 2 * connection + 2])
        rtt = self.rtt[low:high].copy()
        rtt["stream"] -= 2 * connection
        return TcpFacts(
            self.connections[connection : connection + 1].copy(),
            self.sides[2 * connection : 2 * connection + 2].copy(),
            rtt,
        )


def no_facts(count: int) -> TcpFacts:
    """The facts of connections before their first segment."""
    connections, sides = np.zeros(count, CONNECTION_FACTS), np.zeros(2 * count, SIDE_FACTS)
    connections["closed_by"] = UNKNOWN
    for name in ("idle_since", "active_time"):
        connections[name] = NO_TIME
    for name in _UNKNOWN_AT_FIRST:
        sides[name] = UNKNOWN
    for name in ("zero_window_since", "data_time", "timed_since"):
        sides[name] = NO_TIME
    return TcpFacts(connections, sides, np.zeros(0, RTT_COUNT))


def tcp_facts(
    segments: Rows,
    connection: Ints,
    mark: Marks,
    connections: Rows,
    sources: Sources,
    earlier: TcpFacts | None,
) -> TcpFacts:
    """The facts of all connections.

    connection, mark: by segment. connections: CONNECTION of `columns`. earlier: facts of
    earlier windows by endpoint pair, for the first connection of each pair; None if this is the
    only window.
    """
    facts = no_facts(len(connections))
    before = facts.rtt
    if earlier is not None:
        first = np.flatnonzero(np.diff(connections["pair"], prepend=-1))
        pair = connections["pair"][first]
        facts.connections[first] = earlier.connections[pair]
        for side in (0, 1):
            facts.sides[2 * first + side] = earlier.sides[2 * pair + side]
        row_of = np.full(len(earlier.connections), UNKNOWN, np.int64)
        row_of[pair] = first
        before = earlier.rtt.copy()
        row = row_of[before["stream"] >> 1]
        before["stream"] = 2 * row + (before["stream"] & 1)
        before = before[row != UNKNOWN]
        before = before[np.argsort(before["stream"], kind="stable")]
    _add_options(segments, connection, mark, sources, facts)
    room = 0 if earlier is None else len(segments) + len(before)
    facts = facts._replace(rtt=np.zeros(room, RTT_COUNT))
    used = _walk(segments, connection, mark, facts, before, np.zeros(2 * _BUCKETS, np.int64))
    return facts._replace(rtt=facts.rtt[:used])


def _add_options(
    segments: Rows, connection: Ints, mark: Marks, sources: Sources, facts: TcpFacts
) -> None:
    """Set the facts from the options of SYNs, of each side the last ones."""
    rows = np.flatnonzero(segments["flags"] & SYN)
    # a SYN that earlier windows counted has lost its options
    is_new = (segments["marks"][rows] & COUNTED_BEFORE) == 0
    rows = rows[is_new & (mark[rows] != DUPLICATE)]
    syns = take(segments, rows)
    sizes = option_sizes(syns)
    rows, syns, sizes = rows[sizes >= 0], syns[sizes >= 0], sizes[sizes >= 0]
    if not len(rows):
        return
    options = np.zeros(len(rows), _OPTIONS)
    address = sources.addresses(syns["source"], syns["pos"] - sizes, sizes)
    _read_options(address, sizes, options)
    stream = 2 * connection[rows].astype(np.int64) + syns["side"]
    facts.sides["has_options"][stream] = 1
    for name in _OPTIONS.names or ():
        facts.sides[name][stream] = options[name]


@kernel
def _read_options(address: Addresses, sizes: Ints, options: Rows) -> None:
    """Read MSS (RFC 9293, 3.7.1), window scale (RFC 7323, 2.2) and SACK-permitted (RFC 2018, 2).

    Options of another length than theirs are ignored.
    """
    for row in range(len(sizes)):
        mss = find_option(address[row], sizes[row], 2, 4)
        scale = find_option(address[row], sizes[row], 3, 3)
        options[row]["mss"] = UNKNOWN
        options[row]["window_scale"] = UNKNOWN
        if mss >= 0:
            options[row]["mss"] = np.int32(load_u16(address[row] + np.uint64(mss + 2)))
        if scale >= 0:
            options[row]["window_scale"] = np.int32(load_u8(address[row] + np.uint64(scale + 2)))
        options[row]["sack_permitted"] = find_option(address[row], sizes[row], 4, 2) >= 0


@inlined
def distance(number: int, last: int) -> int:
    """Signed distance of a sequence number from the last one, the short way around."""
    return ((number - last + 0x80000000) & 0xFFFFFFFF) - 0x80000000


@inlined
def _bucket_of(ns: int) -> int:
    shift = 0
    while (ns >> shift) >= 2 * _STEPS:
        shift += 1
    return shift * _STEPS + (ns >> shift)


@inlined
def _middle(bucket: int) -> int:
    """The time in the middle of a bucket, in ns."""
    shift = max(bucket // _STEPS - 1, 0)
    return ((bucket - shift * _STEPS) << shift) + ((1 << shift) >> 1)


@kernel
def _walk(
    segments: Rows, connection: Ints, mark: Marks, facts: TcpFacts, before: Rows, counts: Ints
) -> int:
    """The kernel of `tcp_facts`; returns the number of rows in `facts.rtt`.

    before: RTT_COUNT of earlier windows. counts: scratch, the buckets of a connection.
    """
    connections, sides, rtt = facts
    used = int64(0)
    next_before = int64(0)
    last = int64(-1)
    for row in range(len(segments)):
        if mark[row] == DUPLICATE:
            continue
        which = int64(connection[row])
        if which != last:
            if last >= 0:
                used = _count_up(sides, last, counts, rtt, used)
            last = which
            while next_before < len(before) and before[next_before]["stream"] < 2 * which:
                next_before += 1
            while next_before < len(before) and before[next_before]["stream"] < 2 * which + 2:
                at = before[next_before]["bucket"]
                at += _BUCKETS * (before[next_before]["stream"] & 1)
                counts[at] += before[next_before]["count"]
                next_before += 1
        s = segments[row]
        if s["marks"] & COUNTED_BEFORE:
            continue
        c = connections[which]
        if c["active_time"] == NO_TIME:
            c["active_time"] = s["time_ns"]
        if s["marks"] & NO_HEADER or mark[row] == IGNORED:
            continue
        side = int64(s["side"])
        own, peer = sides[2 * which + side], sides[2 * which + 1 - side]
        sample = _follow(s, mark[row] == UNUSED, c, own, peer)
        if sample >= 0:
            counts[_BUCKETS * (1 - side) + _bucket_of(sample)] += 1
    if last >= 0:
        used = _count_up(sides, last, counts, rtt, used)
    return used


@kernel
def _follow(s: Struct, is_outside: bool, c: Struct, own: Struct, peer: Struct) -> int:
    """Update the facts by one segment; returns a round-trip time of the peer's data, or -1.

    is_outside: the sequence number of an RST is not in the stream.
    """
    flags, time, length = int64(s["flags"]), int64(s["time_ns"]), int64(s["length"])
    side = int64(s["side"])
    is_part = s["marks"] & FRAGMENT_PART != 0
    begin = int64(s["seq"])
    if flags & SYN:
        begin = (begin + 1) & 0xFFFFFFFF
    end = (begin + length) & 0xFFFFFFFF
    # RFC 9293, 3.8.4: a keep-alive probe may have the byte before the next one
    is_probe = length == 1 and own["next"] >= 0 and distance(begin, own["next"]) == -1
    is_probe = is_probe and not flags & (SYN | FIN | RST)
    has_data = length > 0 and not is_probe
    if has_data or flags & (SYN | FIN | RST):
        idle = time - c["active_time"]
        if idle > c["idle_ns"]:
            c["idle_ns"] = idle
            c["idle_since"] = c["active_time"]
        c["active_time"] = max(c["active_time"], time)
    if has_data:
        own["data_time"] = max(own["data_time"], time)
    if flags & SYN:
        own["syn_window_max"] = max(own["syn_window_max"], int64(s["window"]))
    if not is_part:
        _open_and_close(flags, side, int64(s["ack"]), c, own, peer)
    sample = int64(-1)
    if flags & ACK and not flags & RST and not is_part:
        ack = int64(s["ack"])
        if peer["timed_since"] != NO_TIME and distance(ack, peer["timed_end"]) >= 0:
            sample = time - peer["timed_since"]
            peer["timed_since"] = NO_TIME
        if own["acked"] < 0 or distance(ack, own["acked"]) >= 0:
            own["acked"] = ack
            if not flags & SYN:
                _announce(int64(s["window"]), flags, time, own)
    if flags & FIN:
        own["has_fin"] = 1
        _open_window(time, own)
    if flags & (FIN | RST):
        own["has_ended"] = 1
    if flags & RST:  # RFC 9293, 3.5.3: it ends both directions
        peer["has_ended"] = 1
    if is_outside or not (has_data or flags & SYN):
        return sample
    if own["next"] >= 0 and distance(begin, own["next"]) < 0:
        if distance(begin, own["timed_end"]) < 0:
            own["timed_since"] = NO_TIME  # a retransmission: the next ACK may be of either copy
    elif own["timed_since"] == NO_TIME and not flags & (SYN | RST) and not is_part:
        own["timed_end"] = end
        own["timed_since"] = time
    if own["next"] < 0 or distance(end, own["next"]) > 0:
        own["next"] = end
    return sample


@inlined
def _open_and_close(flags: int, side: int, ack: int, c: Struct, own: Struct, peer: Struct) -> None:
    """Count SYNs and their answers, and note who closed the connection."""
    if flags & SYN:
        if not flags & ACK:
            own["syn_count"] += 1
            own["unanswered_syn_count"] += 1
        else:
            c["is_refused"] = 0
    elif flags & ACK and not flags & RST:
        own["unanswered_syn_count"] = 0  # an answer was not captured, but this side saw one
    if flags & RST and own["next"] < 0 and peer["unanswered_syn_count"] and flags & ACK:
        # RFC 9293, 3.10.7.1: the RST that refuses a SYN acknowledges it, and its data
        c["is_refused"] = 1 if 0 <= distance(peer["next"], ack) < 0x10000 else 0
    if not flags & SYN or flags & ACK:
        peer["unanswered_syn_count"] = 0
    if flags & (FIN | RST) and c["closed_by"] < 0:
        c["closed_by"] = np.int8(side)


@inlined
def _announce(window: int, flags: int, time: int, own: Struct) -> None:
    """Note the receive window of a segment that is not out of order."""
    own["window_max"] = max(own["window_max"], window)
    if window > 0:
        _open_window(time, own)
    elif own["zero_window_since"] == NO_TIME and not own["has_fin"] and not flags & FIN:
        own["zero_window_count"] += 1
        own["zero_window_since"] = time


@inlined
def _open_window(time: int, own: Struct) -> None:
    """End the time with a window of 0."""
    if own["zero_window_since"] != NO_TIME:
        own["zero_window_ns"] += max(0, time - own["zero_window_since"])
        own["zero_window_since"] = NO_TIME


@kernel
def _count_up(sides: Rows, connection: int, counts: Ints, rtt: Rows, used: int) -> int:
    """Set the quantiles of a connection from its buckets, and empty these; returns the rows used.

    If `rtt` has room, it receives the buckets.
    """
    for side in range(2):
        total = int64(0)
        for bucket in range(side * _BUCKETS, (side + 1) * _BUCKETS):
            total += counts[bucket]
        if total == 0:
            continue
        stream = 2 * connection + side
        below = int64(0)
        for bucket in range(_BUCKETS):
            count = counts[side * _BUCKETS + bucket]
            if count == 0:
                continue
            counts[side * _BUCKETS + bucket] = 0
            # nearest rank: the first bucket that reaches it
            if 2 * below < total:
                sides[stream]["rtt_p50_ns"] = _middle(bucket)
            if 100 * below < 99 * total:
                sides[stream]["rtt_p99_ns"] = _middle(bucket)
            below += count
            if len(rtt):
                rtt[used]["stream"] = stream
                rtt[used]["bucket"] = np.int32(bucket)
                rtt[used]["count"] = np.int32(count)
                used += 1
    return used
