"""Joins IP fragments to the TCP segments that they carry.

Theory of operation
-------------------
The fragments of a datagram may lie in different splits, and in different files of a rotated set;
only the first one has the TCP header. Fragments are rare. So the walk that plans the splits records
each as a small row, and they are joined before the first task starts. The result is rows of SEGMENT
for packets with fragments, which `scan` adds to those of its split. No payload is copied.

*Datagrams.* Fragments belong together by sender, receiver, protocol (IPv4), identification and
network id. They are taken in order of time (which never decreases within a capture) and packet. A
datagram ends when all its bytes are there, after TIME_LIMIT_NS, or when another first fragment with
other bytes comes, because identifications are reused. Where fragments overlap, the first bytes win;
a difference is an anomaly. A fragment that comes again within COPY_NS of its datagram's end was
captured twice. It may become a second copy of the datagram, which reassembly recognises as a
duplicate. It is dropped when a fragment with other bytes comes.

*Segments.* The bytes from the first fragment on are read like a packet (`link_layers`), also
through tunnels, because the fragmented packet is often the outer one of a tunnel. The payload then
consists of byte ranges in several fragments. Each becomes a segment of its own with the sequence
number of its first byte. Reassembly joins them like all others. So every byte keeps its packet and
time, and a lost fragment is a gap. All but the first are marked FRAGMENT_PART in `ip_id`, because
their segment is counted already. So are all rows of an incomplete datagram, which is no TCP packet
for Wireshark either. A complete datagram counts in the packet that completed it; its other
fragments are ignored packets with the reason `ip_fragment`.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kdissect.capture import link_layers
from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import (
    ENDPOINTS,
    FIN,
    FRAGMENT_PART,
    MAPPED,
    SEGMENT,
    SYN,
    SegmentBatch,
)
from kdissect.jit import inlined, kernel, read_i64

FRAGMENT = np.dtype(
    [
        *((name, "i8") for name in ("time_ns", "packet", "body", "captured", "length", "at", "more",
                                    "identification", "protocol", "is_ipv6", "network")),
        # sender and receiver as big-endian words; for IPv4, 4 + 4 bytes in the first word
        ("address", "i8", (4,)),
    ]
)  # fmt: skip

TIME_LIMIT_NS = 30_000_000_000  # Linux waits this long for the rest of a datagram
COPY_NS = 10_000_000  # a mirror port delivers the second copy within this time
OPEN_MAX = 65536  # incomplete datagrams at a time; then the oldest one is ended
DATAGRAM_MAX = 65535
WORK_MAX = 1024  # fragments and overlaps of one datagram; beyond them it is ended
HEADERS_MAX = 2048  # the TCP header must lie within so many bytes from the start


# Protocols that may lead to TCP: TCP itself, tunnels, and extension headers of IPv6.
_CARRIERS = (6, 17, 4, 41, 47, 137, 0, 43, 51, 60)


@kernel
def _find_tcp(buf: Any, wire_end: Any, headers: Any) -> Any:
    """`link_layers.find_tcp` for a packet that begins with its IP header."""
    return link_layers.find_tcp(buf, 0, len(buf), max(wire_end, len(buf)), link_layers.RAW, headers)


@inlined
def note_fragment(buf: Any, headers: Any, packet: Any, number: Any, table: Any, row: Any) -> Any:
    """Write a row for the fragment that `find_tcp` found; returns 0 if it cannot lead to TCP."""
    protocol = headers["protocol"]
    body = headers["fragment_pos"]
    captured = max(headers["end"] - body, 0)
    if protocol not in _CARRIERS:
        return 0
    table["time_ns"][row] = packet["time_ns"]
    table["packet"][row] = number
    table["body"][row] = body
    table["captured"][row] = captured
    table["length"][row] = headers["wire_end"] - body
    table["at"][row] = headers["fragment_offset"]
    table["more"][row] = headers["more_fragments"]
    table["identification"][row] = headers["fragment_id"]
    table["protocol"][row] = protocol
    table["is_ipv6"][row] = headers["is_ipv6"]
    table["network"][row] = headers["network"]
    words = 4 if headers["is_ipv6"] else 1
    for word in range(4):
        table["address"][row, word] = 0
        if word < words:
            table["address"][row, word] = read_i64(buf, headers["address_pos"] + 8 * word)
    return 1


class Fragment(NamedTuple):
    """One fragment: data[body:body + captured] of a source are the datagram's bytes from `at`
    on."""

    time_ns: int
    packet: int
    body: int
    captured: int
    length: int
    at: int
    more: int
    source: int

    @property
    def end(self) -> int:
        return self.at + self.length


class Part(NamedTuple):
    """Bytes [at, end) of a datagram, and the fragment that they came in."""

    at: int
    end: int
    fragment: Fragment


class Key(NamedTuple):
    is_ipv6: int
    addresses: bytes
    protocol: int
    identification: int
    network: int


@dataclass(slots=True)
class Datagram:
    """The captured bytes of a datagram; `parts` are disjoint and ascending."""

    key: Key
    protocol: int
    since_ns: int
    parts: list[Part] = field(default_factory=list)
    work: int = 0
    covered: int = 0  # bytes of all parts
    total: int | None = None
    done_ns: int | None = None  # time when it was complete
    # the previous datagram, if all fragments so far repeat its bytes
    copied: Datagram | None = None

    @property
    def is_complete(self) -> bool:
        return self.covered == self.total

    def take(self, at: int, end: int, fragment: Fragment) -> None:
        insort(self.parts, Part(at, end, fragment), key=lambda part: part.at)
        self.covered += end - at


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
    if _find_tcp(np.frombuffer(data, np.uint8), wire_end, headers) != link_layers.TCP_FOUND:
        return None
    names = ("tcp_pos", "tcp_header", "address_pos", "wire_end", "network", "ip_id")
    pos, size, at, tcp_end, network, ip_id = (int(headers[name]) for name in names)
    if not size:
        return None
    if headers["is_ipv6"]:
        addresses = data[at : at + 16], data[at + 16 : at + 32]
    else:
        addresses = MAPPED + data[at : at + 4], MAPPED + data[at + 4 : at + 8]
    return Head(data, base, pos, size, tcp_end, addresses, network, ip_id)


MISSING, CONFLICT = 0, 1  # kinds of FragmentFault


class FragmentFault(NamedTuple):
    """A fault of fragments. MISSING: byte_count bytes of a datagram are missing (-1: unknown
    number). CONFLICT: byte_count bytes differ from those that came first."""

    kind: int
    source: int
    packet: int
    byte_count: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The result of joining all fragments.

    batch: segments, by source and packet. completed: int64[n, 2], (source, packet) that completed a
    segment. faults: int64[n, 5], rows of FragmentFault. ignored_count: fragments beyond the limit.
    """

    batch: SegmentBatch
    completed: npt.NDArray[np.int64]
    faults: npt.NDArray[np.int64]
    ignored_count: int

    def of_split(self, source: int, first: int, count: int) -> Joined:
        """The part that belongs to packets [first, first + count) of a source."""

        def inside(of: Any, packet: Any) -> Any:
            return (of == source) & (packet >= first) & (packet < first + count)

        segments = self.batch.segments
        rows = inside(segments["source"], segments["packet"])
        completed = self.completed[inside(self.completed[:, 0], self.completed[:, 1])]
        faults = self.faults[inside(self.faults[:, 1], self.faults[:, 2])]
        return Joined(SegmentBatch(self.batch.endpoints, segments[rows]), completed, faults, 0)


def join(
    tables: Sequence[npt.NDArray[np.void]], sources: Sources, ignored_count: int
) -> Joined | None:
    """The segments in the fragments of all sources; None if there were none, ignored ones included.

    tables[source]: FRAGMENT[n], in order of packets. ignored_count: fragments beyond
    the limit of their split.
    """
    if not ignored_count and not any(len(table) for table in tables):
        return None
    joiner = _Joiner(sources)
    for key, protocol, fragment in _in_order(tables):
        joiner.add(key, protocol, fragment)
    return joiner.finish(ignored_count)


def _in_order(
    tables: Sequence[npt.NDArray[np.void]],
) -> Iterator[tuple[Key, int, Fragment]]:
    times = [np.maximum.accumulate(table["time_ns"]) for table in tables]
    source = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    rows = np.concatenate(list(tables))
    order = np.lexsort((rows["packet"], source, np.concatenate(times)))
    for start in range(0, len(order), 4096):  # converted to Python's numbers, some at a time
        portion = order[start : start + 4096]
        words = rows["address"][portion].astype(">i8")
        for row, of, address in zip(
            rows[portion].tolist(), source[portion].tolist(), words, strict=True
        ):
            *place, identification, protocol, is_ipv6, network, _ = row
            size = 32 if is_ipv6 else 8
            # in IPv6 only the first fragment has the protocol
            of_all = 0 if is_ipv6 else protocol
            key = Key(is_ipv6, address.tobytes()[:size], of_all, identification, network)
            yield key, protocol, Fragment._make([*place, of])


class _Joiner:
    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.open: dict[Key, Datagram] = {}
        self.segments = bytearray()  # packed SEGMENT rows
        self.endpoints: dict[bytes, int] = {}
        self.completed, self.faults = array("q"), array("q")

    def bytes_of(self, part: Part, at: int, end: int) -> bytes:
        """Bytes [at, end) of a part, as far as they were captured."""
        fragment = part.fragment
        begin = fragment.body + at - fragment.at
        stop = min(fragment.body + end - fragment.at, fragment.body + fragment.captured)
        return self.sources.data(fragment.source)[begin:stop].tobytes()

    def add(self, key: Key, protocol: int, fragment: Fragment) -> None:
        if fragment.end > DATAGRAM_MAX:
            return
        datagram = self.open.get(key)
        copied = None
        if datagram is not None and datagram.done_ns is not None:
            if self._is_copy(datagram, fragment):
                copied = datagram
            del self.open[key]
            datagram = None
        elif datagram is not None and datagram.copied is not None:
            if not self._is_copy(datagram.copied, fragment):
                del self.open[key]
                datagram = None
        if datagram is not None and (
            fragment.time_ns - datagram.since_ns > TIME_LIMIT_NS
            or datagram.work >= WORK_MAX
            or self._begins_another(datagram, fragment)
        ):
            self._end(self.open.pop(key))
            datagram = None
        if datagram is None:
            datagram = self.open[key] = Datagram(key, protocol, fragment.time_ns, copied=copied)
            if len(self.open) > OPEN_MAX:
                self._end(self.open.pop(next(iter(self.open))))
        if fragment.at == 0:
            datagram.protocol = protocol
        self._place(datagram, fragment)
        if datagram.is_complete:
            self._end(datagram)
            datagram.done_ns = fragment.time_ns
            datagram.copied = None

    def _is_copy(self, datagram: Datagram, fragment: Fragment) -> bool:
        """Return whether a fragment repeats bytes of a datagram that is complete."""
        assert datagram.done_ns is not None
        assert datagram.total is not None
        is_soon = fragment.time_ns - datagram.done_ns <= COPY_NS
        return (
            is_soon and fragment.end <= datagram.total and not self._differing(datagram, fragment)
        )

    def _begins_another(self, datagram: Datagram, fragment: Fragment) -> bool:
        if fragment.at or not datagram.parts or datagram.parts[0].at:
            return False
        return self._differing(datagram, fragment) > 0

    def _differing(self, datagram: Datagram, fragment: Fragment) -> int:
        """Number of bytes in a fragment that differ from bytes of the datagram so far."""
        incoming = Part(fragment.at, fragment.end, fragment)
        count = 0
        for part in self._overlapping(datagram, incoming):
            at, end = max(part.at, incoming.at), min(part.end, incoming.end)
            one, two = self.bytes_of(part, at, end), self.bytes_of(incoming, at, end)
            if one != two:
                count += sum(a != b for a, b in zip(one, two, strict=False))
        return count

    @staticmethod
    def _overlapping(datagram: Datagram, incoming: Part) -> list[Part]:
        parts = datagram.parts
        first = bisect_left(parts, incoming.at, key=lambda part: part.end)
        overlapping = []
        for part in parts[first:]:
            if part.at >= incoming.end:
                break
            if part.end > incoming.at:
                overlapping.append(part)
        return overlapping

    def _place(self, datagram: Datagram, fragment: Fragment) -> None:
        """Add the fragment's new bytes to the datagram."""
        differing = self._differing(datagram, fragment)
        if differing:
            where = fragment.source, fragment.packet, differing, fragment.time_ns
            self.faults.extend(FragmentFault(CONFLICT, *where))
        end = fragment.end
        # RFC 791, 3.2: the fragment without the flag More Fragments ends the datagram
        if datagram.total is not None:
            end = min(end, datagram.total)
        elif not fragment.more:
            datagram.total = max(end, datagram.parts[-1].end if datagram.parts else 0)
        at = fragment.at
        overlapping = self._overlapping(datagram, Part(at, end, fragment))
        datagram.work += 1 + len(overlapping)
        for part in overlapping:
            if part.at > at:
                datagram.take(at, part.at, fragment)
            at = max(at, part.end)
        if end > at:
            datagram.take(at, end, fragment)

    def _end(self, datagram: Datagram) -> None:
        """Write the segment of a datagram, complete or not, once."""
        parts = datagram.parts
        is_left_over = datagram.copied is not None and not datagram.is_complete
        if not parts or datagram.done_ns is not None or is_left_over:
            return
        head = self._head(datagram)
        if head is not None:
            self._write(datagram, head)
        if not datagram.is_complete and (
            head is not None or (parts[0].at and datagram.protocol == 6)
        ):
            first = min(
                (part.fragment for part in parts), key=lambda one: (one.time_ns, one.packet)
            )
            missing = -1 if datagram.total is None else datagram.total - datagram.covered
            where = first.source, first.packet, missing, first.time_ns
            self.faults.extend(FragmentFault(MISSING, *where))

    def _head(self, datagram: Datagram) -> Head | None:
        data = b""
        for part in datagram.parts:
            if part.at != len(data) or len(data) >= HEADERS_MAX:
                break
            data += self.bytes_of(part, part.at, part.end)
            if len(data) < part.end:
                break
        key = datagram.key
        # a synthetic IP header, so that the datagram can be read like a packet
        if key.is_ipv6:
            start = struct.pack(">IHBB", 6 << 28, 0, datagram.protocol, 64) + key.addresses
        else:
            start = struct.pack(">BBHHHBBH", 0x45, 0, 0, key.identification, 0, 64, key.protocol, 0)
            start += key.addresses
        end = max(datagram.total or 0, datagram.parts[-1].end)
        return head_of(start + data, len(start), len(start) + end)

    def _write(self, datagram: Datagram, at: Head) -> None:
        """Write SEGMENT rows for the bytes after the TCP header."""
        base = at.base
        sender_port, receiver_port, seq, ack, flags, window = struct.unpack_from(
            ">HHIIxBH", at.data, at.pos
        )
        begin, end = at.pos + at.size - base, at.wire_end - base
        network = at.network or datagram.key.network
        sender, receiver = (at.addresses[0], sender_port), (at.addresses[1], receiver_port)
        side = int(sender > receiver)
        a, b = (receiver, sender) if side else (sender, receiver)
        pair = struct.pack("<16s16sHHI", a[0], b[0], a[1], b[1], network)
        endpoints = self.endpoints.setdefault(pair, len(self.endpoints))
        has_all = all(one.fragment.captured == one.fragment.length for one in datagram.parts)
        is_whole = datagram.is_complete and has_all
        identification = (at.ip_id or datagram.key.identification) & 0xFFFF
        header = next(part for part in datagram.parts if part.end > at.pos - base)
        inside = [part for part in datagram.parts if part.end > begin and part.at < end]
        if not inside or inside[0].at > begin:
            inside.insert(0, Part(begin, begin, header.fragment))
        for number, part in enumerate(inside):
            fragment = part.fragment
            first, last = max(part.at, begin), min(part.end, end)
            # RFC 9293, 3.4: SYN stands before the first byte and FIN after the last one
            own = flags & ~(SYN | FIN) if number else flags & ~FIN
            if last == end:
                own |= flags & FIN
            skipped = first - fragment.at
            captured = min(max(fragment.captured - skipped, 0), last - first)
            number_of = seq + first - begin + (1 if number and flags & SYN else 0)
            mark = 0 if is_whole and number == 0 else FRAGMENT_PART
            row = (
                fragment.time_ns, fragment.body + skipped, fragment.packet,
                number_of & 0xFFFFFFFF, ack, captured, last - first, fragment.source,
                endpoints, identification | mark, own, side, window,
            )  # fmt: skip
            self.segments += np.array([row], SEGMENT).tobytes()
        if is_whole:
            latest = max(
                (part.fragment for part in datagram.parts),
                key=lambda one: (one.time_ns, one.source, one.packet),
            )
            self.completed.extend((latest.source, latest.packet))

    def finish(self, ignored_count: int) -> Joined:
        for datagram in self.open.values():
            self._end(datagram)
        rows = np.frombuffer(self.segments, SEGMENT)
        rows = rows[np.lexsort((rows["packet"], rows["source"]))]
        pairs = np.frombuffer(b"".join(self.endpoints), ENDPOINTS)
        completed = np.array(self.completed, np.int64).reshape(-1, 2)
        faults = np.array(self.faults, np.int64).reshape(-1, len(FragmentFault._fields))
        return Joined(SegmentBatch(pairs, rows), completed, faults, ignored_count)
