"""One pass over a split's packets: a row per TCP segment, and a count of all other packets.

The kernel steps through the records, finds each packet's TCP header, looks up its endpoint pair in
a hash table and writes a row of SEGMENT. It never reads payload. The hash is a sum of products with
random multipliers per process, so that addresses cannot be crafted to collide.
"""

from __future__ import annotations

import secrets as random_source
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kdissect.capture.ip_fragments import FragmentFault, Joined
from kdissect.capture.link_layers import (
    HEADERS,
    IP_FRAGMENT,
    MALFORMED_BLOCK,
    REASON_COUNT,
    TCP_FOUND,
    UNKNOWN_INTERFACE,
    find_option,
    find_tcp,
    reason_name,
)
from kdissect.capture.mapped_files import Sources
from kdissect.capture.packet_reader import (
    BAD_BLOCK,
    NO_INTERFACE,
    PACKET,
    SECRET,
    STEP_END,
    STEP_PACKET,
    STEP_ROOM_NEEDED,
    step,
)
from kdissect.capture.segments import (
    ENDPOINTS,
    NO_HEADER,
    OPTIONS_SHIFT,
    SEGMENT,
    SYN,
    SegmentBatch,
)
from kdissect.capture.splits import Split
from kdissect.jit import inlined, kernel, read_i64, read_u8, read_u16, read_u32

_PACKETS, _SEGMENTS, _ENDPOINTS = range(3)  # counters of the kernel
_ENDPOINTS_SIZE = ENDPOINTS.itemsize
_MULTIPLIERS = np.array([random_source.randbits(62) | 1 for _ in range(11)], np.int64)
_EMPTY = -1
_MAPPED = 0xFFFF << 32  # precedes an IPv4 address in a word: RFC 4291, 2.5.5.2
_SIGN = -(1 << 63)
_FRAGMENT_REASON = reason_name(IP_FRAGMENT)


@dataclass(frozen=True, slots=True)
class ScanResult:
    """A split's segments, and counts of its packets.

    packet_count = tcp_packet_count + the sum of ignored_reasons. cut_segments: rows of
    batch.segments whose payload a snap length cut.
    """

    source: int
    batch: SegmentBatch
    packet_count: int
    tcp_packet_count: int
    ignored_reasons: dict[str, int]
    fragment_faults: tuple[FragmentFault, ...] = ()

    @property
    def cut_segments(self) -> npt.NDArray[np.int64]:
        """int64[n]: rows of batch.segments with captured < length; each is a packet_cut anomaly."""
        segments = self.batch.segments
        return np.flatnonzero(segments["captured"] < segments["length"])


@inlined
def _endpoints_of(buf: Any, headers: Any) -> Any:
    """(the five words of a row of ENDPOINTS, 0 if the packet's sender is endpoint a else 1)."""
    tcp = headers["tcp_pos"]
    sender = headers["address_pos"]
    sender_port = read_u16(buf, tcp)
    receiver_port = read_u16(buf, tcp + 2)
    if headers["is_ipv6"]:
        sender_high = read_i64(buf, sender)
        sender_low = read_i64(buf, sender + 8)
        receiver_high = read_i64(buf, sender + 16)
        receiver_low = read_i64(buf, sender + 24)
    else:
        sender_high = receiver_high = 0
        sender_low = _MAPPED | read_u32(buf, sender)
        receiver_low = _MAPPED | read_u32(buf, sender + 4)
    # compare as unsigned words
    if sender_high != receiver_high:
        side = int((sender_high ^ _SIGN) > (receiver_high ^ _SIGN))
    elif sender_low != receiver_low:
        side = int((sender_low ^ _SIGN) > (receiver_low ^ _SIGN))
    else:
        side = int(sender_port > receiver_port)
    if side:
        sender_high, receiver_high = receiver_high, sender_high
        sender_low, receiver_low = receiver_low, sender_low
        sender_port, receiver_port = receiver_port, sender_port
    network = int(headers["network"])
    ports = _swapped_16(sender_port) << 16 | _swapped_16(receiver_port)
    ports = (ports ^ 0x80000000) - 0x80000000  # signed, as `read_i64` returns the word
    network = _swapped_16(network & 0xFFFF) << 16 | _swapped_16((network >> 16) & 0xFFFF)
    return (sender_high, sender_low, receiver_high, receiver_low, ports << 32 | network), side


@inlined
def _swapped_16(value: Any) -> Any:
    """Swap bytes: numbers in ENDPOINTS are little-endian."""
    return (value & 255) << 8 | value >> 8


@inlined
def _of_timestamps(buf: Any, pos: Any, end: Any) -> Any:
    """16 bits of TCP's timestamps (RFC 7323) from the options buf[pos:end]; 0 if there are none."""
    # RFC 7323, 3.2: kind 8, length 10, TSval, TSecr
    at = find_option(np.uint64(buf.ctypes.data) + np.uint64(pos), end - pos, 8, 10)
    if at < 0:
        return np.int64(0)
    mixed = read_u32(buf, pos + at + 2) * 31 + read_u32(buf, pos + at + 6)
    return (mixed ^ (mixed >> 16)) & 0xFFFF


@inlined
def _slot(words: Any, endpoints: Any, table: Any, multipliers: Any) -> Any:
    """The slot of `table` whose row has these words, or the free slot for them."""
    total = int(multipliers[10])
    for i in range(5):
        total += int(multipliers[2 * i]) * (words[i] >> 32)
        total += int(multipliers[2 * i + 1]) * (words[i] & 0xFFFFFFFF)
    slot = (total >> 31) & (len(table) - 1)
    while True:
        other = table[slot]
        if other == _EMPTY:
            return slot
        entry = other * _ENDPOINTS_SIZE
        is_equal = True
        for i in range(5):
            if words[i] != read_i64(endpoints, entry + 8 * i):
                is_equal = False
                break
        if is_equal:
            return slot
        slot = (slot + 1) & (len(table) - 1)


@kernel
def _hash_endpoints(endpoints: Any, count: Any, table: Any, multipliers: Any) -> None:
    """Enter `count` distinct rows into an empty table."""
    for row in range(count):
        at = row * _ENDPOINTS_SIZE
        words = (
            read_i64(endpoints, at), read_i64(endpoints, at + 8), read_i64(endpoints, at + 16),
            read_i64(endpoints, at + 24), read_i64(endpoints, at + 32),
        )  # fmt: skip
        table[_slot(words, endpoints, table, multipliers)] = row


@kernel
def _scan_packets(
    buf: Any,
    cursor: Any,
    interfaces: Any,
    counts: Any,
    reasons: Any,
    segments: Any,
    endpoints: Any,
    table: Any,
    multipliers: Any,
    packet: Any,
    headers: Any,
    no_secrets: Any,
    first_packet: Any,
    source: Any,
) -> Any:
    """Scan from the cursor on; returns the outcome of the last step. Call again after
    ROOM_NEEDED."""
    while True:
        row = counts[_ENDPOINTS]
        if (row + 1) * 2 > len(table) or (row + 1) * _ENDPOINTS_SIZE > len(endpoints):
            return STEP_ROOM_NEEDED
        segment = counts[_SEGMENTS]
        if segment == len(segments):
            # the plan counted the packets, so this was the last one
            return STEP_END
        outcome = step(buf, cursor, interfaces, no_secrets, packet)
        if outcome != STEP_PACKET:
            return outcome
        number = first_packet + counts[_PACKETS] + cursor["other_count"]
        counts[_PACKETS] += 1
        captured = packet["captured"]
        interface = packet["interface"]
        if interface == NO_INTERFACE:
            reason = UNKNOWN_INTERFACE
        elif interface == BAD_BLOCK:
            reason = MALFORMED_BLOCK
        else:
            start = packet["data_pos"]
            link_type = interfaces["link_type"][interface]
            wire_end = start + max(captured, packet["length"])
            reason = find_tcp(buf, start, start + captured, wire_end, link_type, headers)
        reasons[reason] += 1
        if reason != TCP_FOUND:
            continue
        words, side = _endpoints_of(buf, headers)
        slot = _slot(words, endpoints, table, multipliers)
        if table[slot] == _EMPTY:
            table[slot] = row
            counts[_ENDPOINTS] = row + 1
            for i in range(5):
                for byte in range(8):
                    at = row * _ENDPOINTS_SIZE + 8 * i + byte
                    endpoints[at] = (words[i] >> (56 - 8 * byte)) & 255
        tcp = headers["tcp_pos"]
        payload = tcp + headers["tcp_header"]
        segments["time_ns"][segment] = packet["time_ns"]
        # without a TCP header only the endpoints are known
        if headers["tcp_header"] == 0:
            segments["pos"][segment] = tcp
            segments["packet"][segment] = number
            segments["source"][segment] = source
            segments["endpoints"][segment] = table[slot]
            segments["ip_id"][segment] = headers["ip_id"] | NO_HEADER
            segments["side"][segment] = side
            counts[_SEGMENTS] = segment + 1
            continue
        segments["pos"][segment] = payload
        segments["packet"][segment] = number
        segments["seq"][segment] = read_u32(buf, tcp + 4)
        segments["ack"][segment] = read_u32(buf, tcp + 8)
        segments["captured"][segment] = max(headers["end"] - payload, 0)
        segments["length"][segment] = headers["wire_end"] - payload
        segments["source"][segment] = source
        segments["endpoints"][segment] = table[slot]
        identification = headers["ip_id"]
        # IPv6 has no identification in its header; TCP's timestamps distinguish copies instead
        if headers["is_ipv6"]:
            identification = _of_timestamps(buf, tcp + 20, min(payload, headers["end"]))
        segments["ip_id"][segment] = identification
        flags = read_u8(buf, tcp + 13)
        segments["flags"][segment] = flags
        if flags & SYN and payload <= headers["end"]:
            segments["ip_id"][segment] |= ((headers["tcp_header"] >> 2) - 4) << OPTIONS_SHIFT
        segments["side"][segment] = side
        segments["window"][segment] = read_u16(buf, tcp + 14)
        counts[_SEGMENTS] = segment + 1


def scan(split: Split, sources: Sources, fragments: Joined | None = None) -> ScanResult:
    """The segments of one split, with those of IP fragments in its packets.

    Raises CaptureError if its file cannot be opened.
    """
    buf = sources.data(split.source)
    cursor, interfaces = split.reading()
    counts = np.zeros(3, np.int64)
    reasons = np.zeros(REASON_COUNT, np.int64)
    segments = np.zeros(split.packet_count + 1, SEGMENT)
    endpoints = np.zeros(64 * _ENDPOINTS_SIZE, np.uint8)
    table = np.full(128, _EMPTY, np.int64)
    packet, headers = np.zeros(1, PACKET)[0], np.zeros(1, HEADERS)[0]
    no_secrets = np.zeros(0, SECRET)

    def advance() -> int:
        nonlocal endpoints, table
        while True:
            outcome: int = _scan_packets(
                buf, cursor, interfaces, counts, reasons, segments, endpoints, table,
                _MULTIPLIERS, packet, headers, no_secrets, split.first_packet, split.source,
            )  # fmt: skip
            if outcome != STEP_ROOM_NEEDED:
                return outcome
            endpoints = np.concatenate((endpoints, np.zeros_like(endpoints)))
            table = np.full(2 * len(table), _EMPTY, np.int64)
            _hash_endpoints(endpoints, counts[_ENDPOINTS], table, _MULTIPLIERS)

    outcome = sources.windows(split.source, cursor, split.end, advance)
    packet_count, segment_count, endpoint_count = (int(count) for count in counts)
    assert outcome == STEP_END, (outcome, split)
    assert packet_count == split.packet_count, (packet_count, split)
    batch = SegmentBatch(
        endpoints[: endpoint_count * _ENDPOINTS_SIZE].view(ENDPOINTS), segments[:segment_count]
    )
    ignored = {
        reason_name(int(reason)): int(reasons[reason])
        for reason in np.flatnonzero(reasons)
        if reason != TCP_FOUND
    }
    faults: tuple[FragmentFault, ...] = ()
    if fragments is not None:
        here = fragments.of_split(split.source, split.first_packet, split.packet_count)
        batch = _merged(batch, here.batch)
        segment_count += len(here.completed)
        ignored[_FRAGMENT_REASON] = ignored.get(_FRAGMENT_REASON, 0) - len(here.completed)
        ignored = {reason: count for reason, count in ignored.items() if count}
        faults = tuple(FragmentFault(*row) for row in here.faults.tolist())
    return ScanResult(split.source, batch, packet_count, segment_count, ignored, faults)


def _merged(batch: SegmentBatch, more: SegmentBatch) -> SegmentBatch:
    """The segments of both batches, ordered by packet."""
    if not len(more.segments):
        return batch
    joined = SegmentBatch.concat([batch, more])
    order = np.argsort(joined.segments["packet"], kind="stable")
    return SegmentBatch(joined.endpoints, joined.segments[order])
