"""Joins IP fragments to the TCP segments that they carry.

Theory of operation
-------------------
The fragments of a datagram may lie in different splits, and in different files of a rotated set;
only the first one has the TCP header. Fragments are rare. So the walk that plans the splits records
each as a small row, and they are joined before the first task starts. The result is rows of SEGMENT
for packets with fragments, which `scan` adds to those of its split. No payload is copied.

*Datagrams.* Fragments belong together by sender, receiver, protocol (IPv4), identification and
network id. They are taken in order of time (which never decreases within a capture) and packet. A
fragment that repeats another one of its datagram was captured twice, and is dropped. A datagram
ends when all its bytes are there, after TIME_LIMIT_NS, or when a fragment comes that overlaps it in
any other way, because identifications are reused. If all fragments come again within COPY_NS of
the end, they are a second copy of the datagram, which reassembly recognises as a duplicate.

*Segments.* The bytes from the first fragment on are read like a packet (`link_layers`), also
through tunnels, because the fragmented packet is often the outer one of a tunnel. The payload then
consists of byte ranges in several fragments. Each becomes a segment of its own with the sequence
number of its first byte. Reassembly joins them like all others. So every byte keeps its packet and
time, and a lost fragment is a gap. All but the first are marked FRAGMENT_PART, because
their segment is counted already. So are all rows of an incomplete datagram, which is no TCP packet
for Wireshark either. A complete datagram counts in the packet that completed it; its other
fragments are ignored packets with the reason `ip_fragment`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kdissect.arrays import Bytes, Ints, Rows, Struct, renumbered
from kdissect.capture import link_layers
from kdissect.capture.mapped_files import Sources
from kdissect.capture.packet_reader import Reading
from kdissect.capture.segments import (
    ENDPOINTS,
    FIN,
    FRAGMENT_PART,
    MAPPED,
    SEGMENT,
    SYN,
    SegmentBatch,
)
from kdissect.jit import inlined, kernel


class Fragment(NamedTuple):
    """A row of FRAGMENT: data[body:body + captured] are the datagram's bytes from `at` on."""

    time_ns: int
    packet: int
    source: int
    body: int
    captured: int
    length: int
    at: int
    more: int
    identification: int
    protocol: int
    is_ipv6: int
    network: int
    addresses: Sequence[int]  # the bytes of sender and receiver; in IPv4, the first 8 ones

    @property
    def end(self) -> int:
        return self.at + self.length


FRAGMENT = np.dtype([*((name, "i8") for name in Fragment._fields[:-1]), ("addresses", "u1", (32,))])

# A fault: `byte_count` bytes of a datagram are missing (-1: unknown number).
LOST = np.dtype([("source", "i8"), ("packet", "i8"), ("byte_count", "i8"), ("time_ns", "i8")])

TIME_LIMIT_NS = 30_000_000_000  # Linux waits this long for the rest of a datagram
COPY_NS = 10_000_000  # a mirror port delivers the second copy within this time
OPEN_MAX = 65536  # incomplete datagrams at a time; then the oldest one is ended
DATAGRAM_MAX = 65535
HEADERS_MAX = 2048  # the TCP header must lie within so many bytes from the start
_UNIT = 8  # bytes: RFC 791, 3.1 and RFC 8200, 4.5 count the offsets of fragments in them

# Protocols that may lead to TCP: TCP itself, tunnels, and extension headers of IPv6.
_CARRIERS = (6, 17, 4, 41, 47, 137, 0, 43, 51, 60)


@kernel
def _find_tcp(buf: Bytes, headers: Struct) -> int:
    """`link_layers.find_tcp` for a packet that begins with its IP header."""
    return link_layers.find_tcp(buf, headers, link_layers.RAW)


@inlined
def note_fragment(reading: Reading, headers: Struct, row: Struct) -> int:
    """Fill a row for the fragment that was read last; returns 0 if it cannot lead to TCP."""
    protocol = headers["protocol"]
    if protocol not in _CARRIERS:
        return 0
    row["time_ns"] = reading.cursor["time_ns"]
    row["packet"] = reading.cursor["number"]
    row["body"] = headers["pos"]
    row["captured"] = max(headers["end"] - headers["pos"], 0)
    row["length"] = headers["wire_end"] - headers["pos"]
    row["at"] = headers["fragment_offset"]
    row["more"] = headers["more_fragments"]
    row["identification"] = headers["fragment_id"]
    row["protocol"] = protocol
    row["is_ipv6"] = headers["is_ipv6"]
    row["network"] = headers["network"]
    for at in range(32 if headers["is_ipv6"] else 8):
        row["addresses"][at] = reading.data[headers["address_pos"] + at]
    return 1


class Key(NamedTuple):
    """What the fragments of a datagram share. In IPv6 only the first one has the protocol."""

    is_ipv6: int
    addresses: bytes
    protocol: int
    identification: int
    network: int


def _key_of(fragment: Fragment) -> Key:
    addresses = bytes(fragment.addresses)[: 32 if fragment.is_ipv6 else 8]
    protocol = 0 if fragment.is_ipv6 else fragment.protocol
    return Key(fragment.is_ipv6, addresses, protocol, fragment.identification, fragment.network)


@dataclass(slots=True)
class Datagram:
    """The fragments of a datagram by position. covered: a bit for each unit that is there."""

    since_ns: int
    fragments: dict[int, Fragment] = field(default_factory=dict)
    covered: int = 0
    byte_count: int = 0  # of its fragments
    total: int | None = None  # its bytes
    done_ns: int | None = None  # time when it was complete
    is_copy: bool = False  # so far its fragments repeat those of the datagram before

    @property
    def missing_byte_count(self) -> int:
        """Bytes in no fragment; -1 if the last fragment is missing."""
        return -1 if self.total is None else self.total - self.byte_count


class Head(NamedTuple):
    """Position and fields of a datagram's TCP header.

    data: the datagram's first bytes after a synthetic IP header of `base` bytes. wire_end: end of
    the TCP payload on the wire.
    """

    data: bytes
    base: int
    pos: int
    size: int
    wire_end: int
    addresses: tuple[bytes, bytes]
    network: int
    ip_id: int


def head_of(data: bytes, base: int, wire_end: int) -> Head | None:
    """The TCP header in a packet that begins with its IP header; None if there is none or it is
    cut.

    wire_end: where the packet ended on the wire.
    """
    headers = np.zeros(1, link_layers.HEADERS)[0]
    headers["end"], headers["wire_end"] = len(data), max(wire_end, len(data))
    if _find_tcp(np.frombuffer(data, np.uint8), headers) != link_layers.TCP_FOUND:
        return None
    names = ("pos", "tcp_header", "address_pos", "wire_end", "network", "ip_id")
    pos, size, at, tcp_end, network, ip_id = (int(headers[name]) for name in names)
    if not size:
        return None
    if headers["is_ipv6"]:
        addresses = data[at : at + 16], data[at + 16 : at + 32]
    else:
        addresses = MAPPED + data[at : at + 4], MAPPED + data[at + 4 : at + 8]
    return Head(data, base, pos, size, tcp_end, addresses, network, ip_id)


@dataclass(frozen=True, slots=True)
class Joined:
    """The result of joining fragments, or the part of it that belongs to one split.

    batch: segments, by source and packet. completed: int64[n, 2], (source, packet) that completed a
    segment. lost: LOST[n]. ignored_count: fragments beyond the limit; the first split has it.
    """

    batch: SegmentBatch
    completed: Ints
    lost: Rows
    ignored_count: int

    def by_split(self, source: Ints, last: Ints) -> dict[int, Joined]:
        """The parts of splits by their number; those without a row have none, except the first.

        source, last: of each split, in order, its source and the number of its last packet.
        """
        tables = (self.batch.segments, self.completed, self.lost)
        places = (
            _positions(tables[0]["source"], tables[0]["packet"]),
            _positions(self.completed[:, 0], self.completed[:, 1]),
            _positions(self.lost["source"], self.lost["packet"]),
        )
        numbers = [np.searchsorted(_positions(source, last), of) for of in places]
        orders = [np.argsort(of, kind="stable") for of in numbers]
        used = np.unique(np.concatenate([*numbers, [0]]))
        bounds = [
            np.searchsorted(of[order], [used, used + 1]).T.tolist()
            for of, order in zip(numbers, orders, strict=True)
        ]
        parts = {}
        for number, *rows in zip(used.tolist(), *bounds, strict=True):
            segments, completed, lost = (
                table[order[start:stop]]
                for table, order, (start, stop) in zip(tables, orders, rows, strict=True)
            )
            pairs, index = renumbered(segments["endpoints"], len(self.batch.endpoints))
            segments["endpoints"] = index
            batch = SegmentBatch(self.batch.endpoints[pairs], segments)
            parts[number] = Joined(batch, completed, lost, 0 if number else self.ignored_count)
        return parts


def _positions(source: Ints, packet: Ints) -> Ints:
    """int64[n]: positions of packets in the order of all captures."""
    return (source.astype(np.int64) << 40) + packet


def join(tables: Sequence[Rows], sources: Sources, ignored_count: int) -> Joined:
    """The segments in the fragments of all sources, one or more.

    tables[source]: FRAGMENT[n], in order of packets. ignored_count: fragments beyond the limit.
    """
    joiner = _Joiner(sources)
    for fragment in _in_order(tables):
        joiner.add(fragment)
    return joiner.finish(ignored_count)


def _in_order(tables: Sequence[Rows]) -> Iterator[Fragment]:
    times = np.concatenate([np.maximum.accumulate(table["time_ns"]) for table in tables])
    rows = np.concatenate(list(tables))
    rows["source"] = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    order = np.lexsort((rows["packet"], rows["source"], times))
    for start in range(0, len(order), 4096):  # converted to Python's numbers, some at a time
        yield from map(Fragment._make, rows[order[start : start + 4096]].tolist())


class _Joiner:
    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.open: dict[Key, Datagram] = {}
        self.segments: list[Rows] = []
        self.endpoints: dict[bytes, int] = {}
        self.completed, self.lost = array("q"), array("q")

    def add(self, fragment: Fragment) -> None:
        if fragment.length <= 0 or fragment.end > DATAGRAM_MAX:
            return
        key = _key_of(fragment)
        datagram = self.open.get(key)
        is_copy = datagram is not None and self._is_copy(datagram, fragment)
        if is_copy and datagram is not None and datagram.done_ns is None:
            return
        units = -(-fragment.length // _UNIT)
        bits = ((1 << units) - 1) << fragment.at // _UNIT
        if datagram is not None and not _fits(datagram, fragment, bits):
            self._end(key, self.open.pop(key))
            datagram = None
        if datagram is None:
            datagram = self.open[key] = Datagram(fragment.time_ns, is_copy=is_copy)
            if len(self.open) > OPEN_MAX:
                oldest = next(iter(self.open))
                self._end(oldest, self.open.pop(oldest))
        datagram.fragments[fragment.at] = fragment
        datagram.covered |= bits
        datagram.byte_count += fragment.length
        # RFC 791, 3.2: the fragment without the flag More Fragments ends the datagram
        if not fragment.more:
            datagram.total = fragment.end
        if datagram.missing_byte_count == 0:
            self._end(key, datagram)
            datagram.done_ns = fragment.time_ns

    def _is_copy(self, datagram: Datagram, fragment: Fragment) -> bool:
        """Return whether a fragment repeats one of a datagram."""
        known = datagram.fragments.get(fragment.at)
        if known is None or (known.length, known.more) != (fragment.length, fragment.more):
            return False
        end_ns = datagram.since_ns + TIME_LIMIT_NS
        if datagram.done_ns is not None:
            end_ns = datagram.done_ns + COPY_NS
        if fragment.time_ns > end_ns:
            return False
        count = min(known.captured, fragment.captured)
        one, two = self._bytes_of(known)[:count], self._bytes_of(fragment)[:count]
        return one == two

    def _bytes_of(self, fragment: Fragment) -> bytes:
        """The bytes of a fragment, as far as they were captured."""
        end = fragment.body + min(fragment.captured, fragment.length)
        return self.sources.data(fragment.source)[fragment.body : end].tobytes()

    def _end(self, key: Key, datagram: Datagram) -> None:
        """Write the segment of a datagram, complete or not, once."""
        is_left_over = datagram.is_copy and datagram.missing_byte_count != 0
        if datagram.done_ns is not None or is_left_over:
            return
        fragments = [datagram.fragments[at] for at in sorted(datagram.fragments)]
        head = self._head(key, fragments, datagram.total)
        if head is not None:
            self._write(head, key, fragments, datagram.missing_byte_count == 0)
        is_tcp = head is not None or (fragments[0].at and fragments[0].protocol == 6)
        if datagram.missing_byte_count and is_tcp:
            first = min(fragments, key=lambda one: (one.time_ns, one.packet))
            missing = datagram.missing_byte_count
            self.lost.extend((first.source, first.packet, missing, first.time_ns))

    def _head(self, key: Key, fragments: list[Fragment], total: int | None) -> Head | None:
        data = b""
        for fragment in fragments:
            if fragment.at != len(data) or len(data) >= HEADERS_MAX:
                break
            data += self._bytes_of(fragment)
            if len(data) < fragment.end:
                break
        # a synthetic IP header, so that the datagram can be read like a packet
        if key.is_ipv6:
            start = struct.pack(">IHBB", 6 << 28, 0, fragments[0].protocol, 64) + key.addresses
        else:
            start = struct.pack(">BBHHHBBH", 0x45, 0, 0, key.identification, 0, 64, key.protocol, 0)
            start += key.addresses
        end = len(start) + (total or fragments[-1].end)
        head = head_of(start + data, len(start), end)
        # an IP header inside the datagram may claim more bytes than the datagram has
        is_outside = head is not None and head.pos + head.size > end
        return None if is_outside else head

    def _write(self, head: Head, key: Key, fragments: list[Fragment], is_complete: bool) -> None:
        """Write SEGMENT rows for the bytes after the TCP header."""
        sender_port, receiver_port, seq, ack, flags, window = struct.unpack_from(
            ">HHIIxBH", head.data, head.pos
        )
        begin, end = head.pos + head.size - head.base, head.wire_end - head.base
        sender, receiver = (head.addresses[0], sender_port), (head.addresses[1], receiver_port)
        side = int(sender > receiver)
        a, b = (receiver, sender) if side else (sender, receiver)
        pair = struct.pack("<16s16sHHI", a[0], b[0], a[1], b[1], head.network or key.network)
        is_whole = is_complete and all(one.captured == one.length for one in fragments)
        inside = [one for one in fragments if one.end > begin and one.at < end]
        if not inside or inside[0].at > begin:  # the fragment that ends with the header
            inside.insert(0, next(one for one in fragments if one.end >= begin))
        rows = np.zeros(len(inside), SEGMENT)
        rows["ack"], rows["window"], rows["side"] = ack, window, side
        rows["endpoints"] = self.endpoints.setdefault(pair, len(self.endpoints))
        rows["ip_id"] = (head.ip_id or key.identification) & 0xFFFF
        rows["marks"][int(is_whole) :] = FRAGMENT_PART
        for number, (fragment, row) in enumerate(zip(inside, rows, strict=True)):
            start, stop = max(fragment.at, begin), min(fragment.end, end)
            skipped = start - fragment.at
            row["time_ns"], row["packet"] = fragment.time_ns, fragment.packet
            row["source"], row["pos"] = fragment.source, fragment.body + skipped
            row["length"] = stop - start
            row["captured"] = min(max(fragment.captured - skipped, 0), row["length"])
            # RFC 9293, 3.4: SYN stands before the first byte and FIN after the last one
            row["seq"] = (seq + start - begin + (1 if number and flags & SYN else 0)) & 0xFFFFFFFF
            row["flags"] = flags & ~(SYN | FIN) if number else flags & ~FIN
            if stop == end:
                row["flags"] |= flags & FIN
        self.segments.append(rows)
        if is_whole:
            latest = max(fragments, key=lambda one: (one.time_ns, one.source, one.packet))
            self.completed.extend((latest.source, latest.packet))

    def finish(self, ignored_count: int) -> Joined:
        for key, datagram in self.open.items():
            self._end(key, datagram)
        rows = np.concatenate([np.zeros(0, SEGMENT), *self.segments])
        rows = rows[np.lexsort((rows["packet"], rows["source"]))]
        pairs = np.frombuffer(b"".join(self.endpoints), ENDPOINTS)
        completed = np.array(self.completed, np.int64).reshape(-1, 2)
        lost = np.frombuffer(self.lost, LOST)
        return Joined(SegmentBatch(pairs, rows), completed, lost, ignored_count)


def _fits(datagram: Datagram, fragment: Fragment, bits: int) -> bool:
    """Return whether a fragment has further bytes of a datagram; bits: its units."""
    is_soon = fragment.time_ns - datagram.since_ns <= TIME_LIMIT_NS
    total = DATAGRAM_MAX if datagram.total is None else datagram.total
    is_last = not fragment.more
    is_new = not datagram.covered & bits
    if is_last and datagram.covered >> fragment.at // _UNIT:
        return False
    return datagram.done_ns is None and is_soon and is_new and fragment.end <= total
