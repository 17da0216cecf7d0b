"""The first lines of a capture while the rest of the program is still being loaded.

Compiled kernels take most of a second to load; the first exchanges of a pcap file (plain or gzip)
can be read without them. So this reads the first bytes of a file in Python, prints the lines that
`lines` would print first, and stops at anything that is not the plain case: a connection that was
open before and does not go on with a whole request, a segment out of order, captured twice or cut,
a fragment, a tunnel, TLS, bare SASL tokens, an unknown API, a message that does not decode, two
exchanges completed at one moment, a topic id whose name is told later. The usual way then goes over
the file from its start and leaves out what is printed already (`Told.packets`). Nothing here
decides anything: it may only say less.
"""

from __future__ import annotations

import ipaddress
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kdissect.errors import DecodeError
from kdissect.protocol import catalog
from kdissect.protocol.column_plan import Role, role_of
from kdissect.protocol.error_codes import error_name
from kdissect.protocol.model import Api
from kdissect.show import style
from kdissect.show.byte_tree import ByteTree
from kdissect.text import visible

BYTES = 64 << 10  # of a file, well within the first window of the usual way
SECONDS = 0.15  # spent on it at most, so that the rest is not late
LINES = 64
SIZE_MAX = 1 << 20

_PCAP = {
    b"\xa1\xb2\xc3\xd4": (">", 1000), b"\xd4\xc3\xb2\xa1": ("<", 1000),
    b"\xa1\xb2\x3c\x4d": (">", 1), b"\x4d\x3c\xb2\xa1": ("<", 1),
}  # fmt: skip
_GZIP = b"\x1f\x8b"
_IPV4, _IPV6 = 0x0800, 0x86DD
_HARMLESS = frozenset({0x0806})  # ethertypes that carry no TCP: ARP
_SYN, _RST, _ACK = 2, 4, 16
_TCP, _UDP, _ICMP, _ICMPV6 = 6, 17, 1, 58
_TUNNEL_PORTS = frozenset({4789, 8472, 6081})
_API_VERSIONS, _SASL_HANDSHAKE, _PRODUCE = 18, 17, 0
_UNSUPPORTED_VERSION = b"\0\x23"  # error 35
_METADATA_ID = bytes(15) + b"\1"
_METADATA_TOPIC = "__cluster_metadata"


class _Stop(Exception):
    """Here the plain case ends."""


@dataclass(frozen=True, slots=True)
class Told:
    """A line that was printed, and the packets by which the usual way knows its exchange."""

    line: str
    packets: tuple[int, int | None]  # of the request's and the response's first byte


@dataclass(slots=True)
class _Request:
    data: bytes
    correlation_id: int
    api_key: int
    api_version: int
    client_id: str | None
    packet: int
    time_ns: int
    end_time_ns: int


@dataclass(slots=True)
class _Stream:
    """One direction: the sequence number that comes next, and bytes that make no frame yet."""

    number: int
    data: bytearray = field(default_factory=bytearray)
    packet: int = 0  # of the first of these bytes
    time_ns: int = 0


@dataclass(slots=True)
class _Connection:
    client: str
    broker: str
    streams: list[_Stream | None]
    waiting: list[_Request] = field(default_factory=list)
    is_confirmed: bool = False
    was_open: bool = False
    last_response_ns: int = 0  # when the last response ended


def first_lines(path: str, colour: bool) -> Iterator[Told]:
    """The lines that a capture begins with, as far as they can be told without kernels."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return
        with open(path, "rb") as file:
            data = file.read(BYTES)
        is_all = len(data) < BYTES
        if data[:2] == _GZIP:
            unpacking = zlib.decompressobj(wbits=31)
            data = unpacking.decompress(data, BYTES)
            is_all = is_all and unpacking.eof and not unpacking.unused_data
    except (OSError, zlib.error):
        return  # the usual way says what is wrong
    reader = _Reader(colour)
    until = time.perf_counter() + SECONDS
    count = 0
    try:
        for number, time_ns, packet, link_type in _packets(data):
            for told in reader.packet(number, time_ns, packet, link_type):
                yield told
                count += 1
            if count >= LINES or time.perf_counter() > until:
                return
        if is_all:
            yield from reader.settled(None)
    except (_Stop, DecodeError, struct.error):
        return


def _packets(data: bytes) -> Iterator[tuple[int, int, bytes, int]]:
    """(number, time in ns, bytes, link type) of the whole packets of a pcap file."""
    if data[:4] not in _PCAP or len(data) < 24:
        return
    order, scale = _PCAP[data[:4]]
    link_type = struct.unpack_from(order + "I", data, 20)[0] & 0xFFFF
    record = struct.Struct(order + "4I")
    pos, number = 24, 0
    while pos + 16 <= len(data):
        seconds, fraction, captured, length = record.unpack_from(data, pos)
        pos += 16
        if captured > len(data) - pos:
            return
        if captured != length:
            raise _Stop
        number += 1
        yield number, seconds * 10**9 + fraction * scale, data[pos : pos + captured], link_type
        pos += captured


def _ip(packet: bytes, link_type: int) -> tuple[int, int]:
    """(ethertype, where the IP header begins)."""
    if link_type == 1:
        return int(struct.unpack_from(">H", packet, 12)[0]), 14
    if link_type == 113:
        return int(struct.unpack_from(">H", packet, 14)[0]), 16
    if link_type == 276:
        return int(struct.unpack_from(">H", packet, 0)[0]), 20
    if link_type in (101, 228, 229) and packet:
        return (_IPV4 if packet[0] >> 4 == 4 else _IPV6), 0
    raise _Stop


class _Reader:
    """Connections, and exchanges that are complete but maybe not the only ones of their moment."""

    def __init__(self, colour: bool) -> None:
        self._colour = colour
        self._connections: dict[tuple[bytes, bytes], _Connection] = {}
        self._names: dict[bytes, str] = {_METADATA_ID: _METADATA_TOPIC}
        self._ready: list[tuple[int, Told]] = []
        self._last_ns = -1

    def packet(self, number: int, time_ns: int, packet: bytes, link_type: int) -> Iterator[Told]:
        if time_ns < self._last_ns:
            raise _Stop
        self._last_ns = time_ns
        yield from self.settled(time_ns)
        ethertype, at = _ip(packet, link_type)
        if ethertype in _HARMLESS:
            return
        if ethertype == _IPV4:
            header = 4 * (packet[at] & 15)
            total, _, part = struct.unpack_from(">HHH", packet, at + 2)
            protocol = packet[at + 9]
            if packet[at] >> 4 != 4 or header != 20 or part & 0x3FFF or total < header:
                raise _Stop
            ends = packet[at + 12 : at + 16], packet[at + 16 : at + 20]
        elif ethertype == _IPV6:
            header, protocol = 40, packet[at + 6]
            total = 40 + struct.unpack_from(">H", packet, at + 4)[0]
            ends = packet[at + 8 : at + 24], packet[at + 24 : at + 40]
            if packet[at] >> 4 != 6 or ends[0][:12] == bytes(10) + b"\xff\xff":
                raise _Stop
        else:
            raise _Stop
        if total > len(packet) - at:
            raise _Stop
        body = at + header
        if protocol in (_ICMP, _ICMPV6):
            return
        if protocol == _UDP:
            if struct.unpack_from(">H", packet, body + 2)[0] in _TUNNEL_PORTS:
                raise _Stop
            return
        if protocol != _TCP:
            raise _Stop
        sender, receiver = ends[0] + packet[body : body + 2], ends[1] + packet[body + 2 : body + 4]
        sequence, size, flags = struct.unpack_from(">I4xBB", packet, body + 4)
        payload = packet[body + 4 * (size >> 4) : at + total]
        self._segment(number, time_ns, sender, receiver, sequence, flags, payload)

    def _segment(
        self, number: int, time_ns: int, sender: bytes, receiver: bytes, sequence: int, flags: int,
        payload: bytes,
    ) -> None:  # fmt: skip
        connection = self._connections.get((sender, receiver))
        side = 0
        if connection is None:
            connection = self._connections.get((receiver, sender))
            side = 0 if connection is None else 1
        if flags & _SYN:
            if payload:
                raise _Stop
            after = (sequence + 1) & 0xFFFFFFFF
            if not flags & _ACK and connection is None:
                ends = _end(sender), _end(receiver)
                self._connections[sender, receiver] = _Connection(*ends, [_Stream(after), None])
            elif flags & _ACK and connection and side == 1 and connection.streams[1] is None:
                connection.streams[1] = _Stream(after)
            else:
                raise _Stop
            return
        if not payload:
            return
        if connection is None:
            connection = self._open_before(sender, receiver, sequence, payload)
        stream = connection.streams[side]
        if stream is None and connection.was_open and _begins(payload, connection.waiting):
            stream = connection.streams[side] = _Stream(sequence)
        if stream is None or sequence != stream.number or flags & _RST:
            raise _Stop
        stream.number = (sequence + len(payload)) & 0xFFFFFFFF
        if not stream.data:
            stream.packet, stream.time_ns = number, time_ns
        stream.data += payload
        for told in self._frames(connection, stream, side, number, time_ns):
            self._ready.append((time_ns, told))

    def _open_before(
        self, sender: bytes, receiver: bytes, sequence: int, payload: bytes
    ) -> _Connection:
        """A connection without its SYN whose first payload is one request, by a named client."""
        size = int.from_bytes(payload[:4], "big")
        if size < 10 or len(payload) != 4 + size or not _header(payload[4:], size)[3]:
            raise _Stop
        if (receiver, sender) in self._connections:
            raise _Stop
        ends = _end(sender), _end(receiver)
        made = _Connection(*ends, [_Stream(sequence), None], was_open=True)
        self._connections[sender, receiver] = made
        return made

    def settled(self, time_ns: int | None) -> Iterator[Told]:
        """What was completed before this time, or at all."""
        ready = self._ready
        if not ready or ready[0][0] == time_ns:
            return
        if len(ready) > 1:
            raise _Stop  # which of them comes first depends on their ids
        self._ready = []
        yield ready[0][1]

    def _frames(
        self, connection: _Connection, stream: _Stream, side: int, number: int, time_ns: int
    ) -> Iterator[Told]:
        data = stream.data
        while len(data) >= 4:
            size = int.from_bytes(data[:4], "big")
            if not 4 <= size <= SIZE_MAX:
                raise _Stop
            if len(data) < 4 + size:
                if side == 0 and len(data) >= 14 and not connection.is_confirmed:
                    _header(bytes(data[4:]), size)
                return
            frame = bytes(data[4 : 4 + size])
            del data[: 4 + size]
            if side == 0:
                found = _header(frame, size)
                request = _Request(frame, *found, stream.packet, stream.time_ns, time_ns)
                connection.waiting.append(request)
                if request.api_key == _PRODUCE:
                    yield from self._unanswered(connection, request)
            else:
                yield self._answered(connection, stream, frame, time_ns)
            # the next frame begins in this packet
            stream.packet, stream.time_ns = number, time_ns

    def _unanswered(self, connection: _Connection, request: _Request) -> Iterator[Told]:
        """The line of a Produce request with acks=0."""
        facts = _Facts(self._names)
        facts.read(request.api_key, request.api_version, 0, request.data)
        if facts.acks != 0:
            return
        if not connection.is_confirmed:
            raise _Stop
        connection.waiting.pop()
        yield Told(self._line(connection, request, None, None, facts), (request.packet, None))

    def _answered(
        self, connection: _Connection, stream: _Stream, frame: bytes, time_ns: int
    ) -> Told:
        if not connection.waiting:
            raise _Stop
        request = connection.waiting.pop(0)
        if int.from_bytes(frame[:4], "big") != request.correlation_id:
            raise _Stop
        api_version = request.api_version
        if request.api_key == _API_VERSIONS and frame[4:6] == _UNSUPPORTED_VERSION:
            api_version = 0
        facts = _Facts(self._names)
        facts.read(request.api_key, request.api_version, 0, request.data)
        facts.read(request.api_key, api_version, 1, frame)
        connection.is_confirmed = True
        line = self._line(connection, request, frame, stream.time_ns, facts)
        connection.last_response_ns = time_ns
        return Told(line, (request.packet, stream.packet))

    def _line(
        self, connection: _Connection, request: _Request, response: bytes | None,
        response_time_ns: int | None, facts: _Facts,
    ) -> str:  # fmt: skip
        """The line that `lines.LineMaker` makes of the exchange."""
        painted = self._painted
        moment, rest = divmod(request.time_ns // 1000, 1_000_000)
        when = datetime.fromtimestamp(moment, UTC)
        name = f"{catalog.api(request.api_key).name} v{request.api_version}"
        client = "-" if request.client_id is None else visible(request.client_id) or '""'
        sizes = ["-", "-"]
        for number, data in enumerate((request.data, response)):
            if data is not None:
                sizes[number] = str(len(data))
        latency = "-   "
        if response_time_ns is not None:
            micros = round((response_time_ns - request.end_time_ns) / 1000)
            latency = f"{micros // 1000}.{micros % 1000:03d} ms"
        shown = f"{sizes[0]:>{style.SIZE_WIDTH}}{style.ARROW}{sizes[1]:>{style.SIZE_WIDTH}} B"
        parts = [
            painted(f"{when:%Y-%m-%d %H:%M:%S}.{rest:06d}", style.DIM),
            "  ",
            f"{connection.client:{style.ADDRESS_WIDTH}}",
            painted(style.ARROW, style.DIM),
            f"{connection.broker:{style.ADDRESS_WIDTH}}",
            "  ",
            f"{client:{style.CLIENT_WIDTH}}",
            "  ",
            painted(f"{name:{style.API_WIDTH}}", style.CYAN),
            " ",
            painted(shown, style.DIM),
            " ",
            painted(f"{latency:>{style.LATENCY_WIDTH}}", style.YELLOW),
        ]
        topics = list(facts.topics)
        if topics:
            named = ", ".join(topics[: style.TOPICS_SHOWN])
            parts.append("  " + painted(visible(named), style.GREEN))
            if len(topics) > style.TOPICS_SHOWN:
                parts.append(f", +{len(topics) - style.TOPICS_SHOWN}")
        for text, word in ((facts.group, "  group "), (facts.transaction, "  txn ")):
            if text is not None:
                parts.append(word + painted(visible(text), style.MAGENTA))
        if facts.errors:
            others = len(set(facts.errors)) - 1
            more = f" +{others}" if others else ""
            parts.append("  " + painted(f"! {error_name(facts.errors[0])}{more}", style.RED))
        if facts.throttle_ms is not None and facts.throttle_ms > 0:
            parts.append(painted(f"  throttled {facts.throttle_ms} ms", style.YELLOW))
        if response_time_ns is not None:
            until = min(connection.last_response_ns, response_time_ns)
            queued = (until - request.end_time_ns) / 1e6
            if queued >= style.QUEUED_MS:
                parts.append(painted(f"  queued {queued:.3f} ms", style.YELLOW))
        if response is None:
            parts.append("  " + painted(f"({style.NO_ANSWER_WANTED})", style.YELLOW))
        return "".join(parts)

    def _painted(self, part: str, colour: str) -> str:
        return f"{colour}{part}{style.RESET}" if self._colour else part


def _end(end: bytes) -> str:
    address = ipaddress.ip_address(end[:-2])
    port = int.from_bytes(end[-2:], "big")
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _begins(payload: bytes, waiting: list[_Request]) -> bool:
    """Whether the answer to the oldest request stands at the payload's start."""
    return bool(waiting) and payload[4:8] == waiting[0].correlation_id.to_bytes(4, "big")


def _header(frame: bytes, size: int) -> tuple[int, int, int, str | None]:
    """(correlation id, api key, api version, client id) of a request that is one for certain."""
    key, version, correlation_id = struct.unpack_from(">hhI", frame)
    api = _api(key)
    if api is None or version not in api.request.versions or size < 10:
        raise _Stop
    if (key, version) in ((_SASL_HANDSHAKE, 0), (7, 0)):
        raise _Stop
    (length,) = struct.unpack_from(">h", frame, 8)
    if length < 0:
        return correlation_id, key, version, None
    client_id = frame[10 : 10 + length]
    if length > size - 10 or any(byte < 32 or byte > 126 for byte in client_id):
        raise _Stop
    return correlation_id, key, version, client_id.decode("ascii")


def _api(key: int) -> Api | None:
    """Parses the definitions of that API only."""
    try:
        return catalog.api(key)
    except ValueError:
        return None


class _Facts:
    """What the messages of an exchange tell, in the order of their bytes."""

    def __init__(self, names: dict[bytes, str]) -> None:
        self._names = names
        self.topics: dict[str, None] = {}
        self.errors: list[int] = []
        self.group: str | None = None
        self.transaction: str | None = None
        self.throttle_ms: int | None = None
        self.acks: int | None = None

    def read(self, api_key: int, api_version: int, side: int, frame: bytes) -> None:
        api = catalog.api(api_key)
        walk = ByteTree(memoryview(frame))
        if side == 0:
            version = api.request_header_version(api_version)
            _, pos = walk.message("header", catalog.REQUEST_HEADER, version, 0)
            definition = api.request
        else:
            version = api.response_header_version(api_version)
            _, pos = walk.message("header", catalog.RESPONSE_HEADER, version, 0)
            definition = api.response
        walk.nodes.clear()
        walk.message("body", definition, api_version, pos)
        if walk.error is not None:
            raise walk.error
        self._learn(api_key, walk)
        for node in walk.nodes:
            if node.definition is None or node.is_default:
                continue
            role = role_of(api_key, node.definition)
            if role is not Role.NONE:
                for value in node.value if node.definition.is_array else (node.value,):
                    self._take(role, side, value)

    def _learn(self, api_key: int, walk: ByteTree) -> None:
        """Names of topics that stand beside their ids."""
        beside: dict[Any, tuple[str | None, bytes | None]] = {}
        for node in walk.nodes:
            if node.definition is None or node.definition.is_array or node.is_default:
                continue
            role = role_of(-1, node.definition)
            name, ident = beside.get(node.path[:-1], (None, None))
            if role is Role.TOPIC_NAME:
                beside[node.path[:-1]] = node.value, ident
            elif role is Role.TOPIC_ID:
                beside[node.path[:-1]] = name, node.value.bytes
        for name, ident in beside.values():
            if name and ident and any(ident) and self._names.setdefault(ident, name) != name:
                raise _Stop

    def _take(self, role: Role, side: int, value: Any) -> None:
        if value is None:
            return
        if role is Role.TOPIC_NAME and value:
            if any(0xD800 <= ord(char) < 0xE000 for char in value):
                raise _Stop
            self.topics[value] = None
        elif role is Role.TOPIC_ID and any(value.bytes):
            if value.bytes not in self._names:
                raise _Stop
            self.topics[self._names[value.bytes]] = None
        elif role is Role.ERROR_CODE and side == 1 and value:
            self.errors.append(value)
        elif role is Role.GROUP_ID and self.group is None:
            self.group = value
        elif role is Role.TRANSACTIONAL_ID and self.transaction is None:
            self.transaction = value
        elif role is Role.THROTTLE_TIME_MS and self.throttle_ms is None:
            self.throttle_ms = value
        elif role is Role.ACKS and self.acks is None:
            self.acks = value
