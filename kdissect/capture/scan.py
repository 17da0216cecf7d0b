"""One pass over a split's packets: a row per TCP segment, and a count of all other packets.

The kernel steps through the records, finds each packet's TCP header, looks up its endpoint pair in
a hash table and writes a row of SEGMENT. It never reads payload. The hash is a sum of products with
random multipliers per process, so that addresses cannot be crafted to collide.
"""

from __future__ import annotations

import secrets as random_source
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kdissect.arrays import Bytes, Indices, Ints, Rows, Struct
from kdissect.capture.ip_fragments import LOST
from kdissect.capture.link_layers import (
    HEADERS,
    IP_FRAGMENT,
    REASON_COUNT,
    TCP_FOUND,
    find_headers,
    reason_name,
)
from kdissect.capture.mapped_files import Sources
from kdissect.capture.packet_reader import STEP_END, STEP_PACKET, STEP_ROOM_NEEDED, Reading, step
from kdissect.capture.segments import ENDPOINTS, NO_HEADER, SEGMENT, SYN, SegmentBatch
from kdissect.capture.splits import Split
from kdissect.jit import inlined, kernel, read_i64, read_u8, read_u16, read_u32

_SEGMENTS, _ENDPOINTS = range(2)  # counters of the kernel
_WORDS = 6  # of an endpoint pair: 2 of each address, the two ports, the network
_MULTIPLIERS = np.array([random_source.randbits(62) | 1 for _ in range(2 * _WORDS + 1)], np.int64)
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
    lost_fragments: Rows = field(default_factory=lambda: np.zeros(0, LOST))

    @property
    def cut_segments(self) -> Indices:
        """int64[n]: rows of batch.segments with captured < length; each is a packet_cut anomaly."""
        segments = self.batch.segments
        return np.flatnonzero(segments["captured"] < segments["length"])


class PairTable(NamedTuple):
    """A hash table of endpoint pairs. words: _WORDS of each pair. slots: numbers of pairs, or
    _EMPTY."""

    words: Ints
    slots: Indices
    multipliers: Ints


Words = tuple[int, int, int, int, int, int]


@inlined
def _endpoints_of(buf: Bytes, headers: Struct) -> tuple[Words, int]:
    """(the words of the packet's endpoint pair, 0 if the sender is endpoint a else 1)."""
    tcp = headers["pos"]
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
    ports = sender_port << 16 | receiver_port
    network = int(headers["network"])
    return (sender_high, sender_low, receiver_high, receiver_low, ports, network), side


def _pairs(words: Ints) -> Rows:
    """ENDPOINTS[n] of the words of n pairs."""
    columns = words.reshape(-1, _WORDS)
    pairs = np.zeros(len(columns), ENDPOINTS)
    addresses = columns[:, :4].astype(">i8").view(np.uint8)
    pairs["ip_a"], pairs["ip_b"] = addresses[:, :16], addresses[:, 16:]
    pairs["port_a"], pairs["port_b"] = columns[:, 4] >> 16, columns[:, 4] & 0xFFFF
    pairs["network"] = columns[:, 5]
    return pairs


@inlined
def _of_options(buf: Bytes, pos: int, end: int) -> int:
    """16 bits of the TCP options buf[pos:end], whole words (RFC 9293, 3.1); 0 without any."""
    mixed = 0
    for at in range(pos, end - 3, 4):
        mixed = mixed * 31 + read_u32(buf, at)
    return (mixed ^ (mixed >> 16)) & 0xFFFF


@inlined
def _slot(words: Words, pairs: PairTable) -> int:
    """The slot of the pair with these words, or the free slot for it."""
    total = int(pairs.multipliers[2 * _WORDS])
    for i in range(_WORDS):
        total += int(pairs.multipliers[2 * i]) * (words[i] >> 32)
        total += int(pairs.multipliers[2 * i + 1]) * (words[i] & 0xFFFFFFFF)
    slot = (total >> 31) & (len(pairs.slots) - 1)
    while True:
        pair = pairs.slots[slot]
        if pair == _EMPTY:
            return slot
        is_equal = True
        for i in range(_WORDS):
            if words[i] != pairs.words[pair * _WORDS + i]:
                is_equal = False
                break
        if is_equal:
            return slot
        slot = (slot + 1) & (len(pairs.slots) - 1)


@kernel
def _hash_pairs(pairs: PairTable, count: int) -> None:
    """Enter `count` distinct pairs into empty slots."""
    of = pairs.words
    for pair in range(count):
        at = pair * _WORDS
        words = (of[at], of[at + 1], of[at + 2], of[at + 3], of[at + 4], of[at + 5])
        pairs.slots[_slot(words, pairs)] = pair


@kernel
def _scan_packets(
    reading: Reading,
    headers: Struct,
    counts: Ints,
    reasons: Ints,
    segments: Rows,
    pairs: PairTable,
    source: int,
) -> int:
    """Scan from the cursor on; returns the outcome of the last step. Call again after
    ROOM_NEEDED."""
    buf, cursor, _, _ = reading
    while True:
        pair = counts[_ENDPOINTS]
        if (pair + 1) * 2 > len(pairs.slots):
            return STEP_ROOM_NEEDED
        segment = counts[_SEGMENTS]
        if segment == len(segments):
            # the plan counted the packets, so this was the last one
            return STEP_END
        outcome = step(reading)
        if outcome != STEP_PACKET:
            return outcome
        reason = find_headers(reading, headers)
        reasons[reason] += 1
        if reason != TCP_FOUND:
            continue
        words, side = _endpoints_of(buf, headers)
        slot = _slot(words, pairs)
        if pairs.slots[slot] == _EMPTY:
            pairs.slots[slot] = pair
            counts[_ENDPOINTS] = pair + 1
            for i in range(_WORDS):
                pairs.words[pair * _WORDS + i] = words[i]
        counts[_SEGMENTS] = segment + 1
        row = segments[segment]
        row["time_ns"] = cursor["time_ns"]
        row["packet"] = cursor["number"]
        row["source"] = source
        row["endpoints"] = pairs.slots[slot]
        row["side"] = side
        tcp = headers["pos"]
        # without a TCP header only the endpoints are known
        if headers["tcp_header"] == 0:
            row["pos"] = tcp
            row["ip_id"] = headers["ip_id"]
            row["marks"] = NO_HEADER
            continue
        payload = tcp + headers["tcp_header"]
        row["pos"] = payload
        row["seq"] = read_u32(buf, tcp + 4)
        row["ack"] = read_u32(buf, tcp + 8)
        row["captured"] = max(headers["end"] - payload, 0)
        row["length"] = headers["wire_end"] - payload
        row["ip_id"] = headers["ip_id"]
        # IPv6 has no identification in its header, and IPv4 needs none in packets that are never
        # fragmented (RFC 6864). TCP's options distinguish copies instead: timestamps, SACK blocks.
        if headers["ip_id"] == 0:
            row["ip_id"] = _of_options(buf, tcp + 20, min(payload, headers["end"]))
        flags = read_u8(buf, tcp + 13)
        if flags & SYN and payload <= headers["end"]:
            row["option_words"] = (headers["tcp_header"] >> 2) - 4
        row["flags"] = flags
        row["window"] = read_u16(buf, tcp + 14)


def scan(split: Split, sources: Sources) -> ScanResult:
    """The segments of one split, with those of IP fragments in its packets.

    Raises CaptureError if its file cannot be opened.
    """
    reading = split.reading(sources.data(split.source))
    counts = np.zeros(2, np.int64)
    reasons = np.zeros(REASON_COUNT, np.int64)
    segments = np.zeros(split.packet_count + 1, SEGMENT)
    headers = np.zeros(1, HEADERS)[0]
    pairs = PairTable(np.zeros(64 * _WORDS, np.int64), np.full(128, _EMPTY), _MULTIPLIERS)

    def advance() -> int:
        nonlocal pairs
        while True:
            outcome = _scan_packets(
                reading, headers, counts, reasons, segments, pairs, split.source
            )
            if outcome != STEP_ROOM_NEEDED:
                return outcome
            words = np.concatenate((pairs.words, np.zeros_like(pairs.words)))
            slots = np.full(2 * len(pairs.slots), _EMPTY)
            pairs = PairTable(words, slots, _MULTIPLIERS)
            _hash_pairs(pairs, counts[_ENDPOINTS])

    outcome = sources.windows(split.source, reading.cursor, split.end, advance)
    segment_count, pair_count = counts.tolist()
    packet_count = int(reasons.sum())
    assert outcome == STEP_END, (outcome, split)
    assert packet_count == split.packet_count, (packet_count, split)
    batch = SegmentBatch(_pairs(pairs.words[: pair_count * _WORDS]), segments[:segment_count])
    ignored = {
        reason_name(int(reason)): int(reasons[reason])
        for reason in np.flatnonzero(reasons)
        if reason != TCP_FOUND
    }
    lost = np.zeros(0, LOST)
    here = split.fragments
    if here is not None:
        batch = _merged(batch, here.batch)
        segment_count += len(here.completed)
        ignored[_FRAGMENT_REASON] = ignored.get(_FRAGMENT_REASON, 0) - len(here.completed)
        ignored = {reason: count for reason, count in ignored.items() if count}
        lost = here.lost
    return ScanResult(split.source, batch, packet_count, segment_count, ignored, lost)


def _merged(batch: SegmentBatch, more: SegmentBatch) -> SegmentBatch:
    """The segments of both batches, ordered by packet."""
    if not len(more.segments):
        return batch
    joined = SegmentBatch.concat([batch, more])
    order = np.argsort(joined.segments["packet"], kind="stable")
    return SegmentBatch(joined.endpoints, joined.segments[order])
