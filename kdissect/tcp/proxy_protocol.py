"""Headers of the PROXY protocol (haproxy.org), versions 1 and 2, in front of a client's stream.

A load balancer sends the header before the first byte of its client. `remove_headers` moves
position 0 of such a stream behind its header, so that the steps after reassembly see the client's
own bytes. A header that is cut, or not complete yet, stays in its stream.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kdissect.arrays import Bools
from kdissect.capture.segments import MAPPED
from kdissect.tcp.byte_ranges import Pieces, first_bytes, read_bytes
from kdissect.tcp.reassembly import Streams

_SIGNATURE_1 = b"PROXY "
_LINE_MAX = 107  # bytes of a line of version 1, with its end
_SIGNATURE_2 = b"\r\n\r\n\x00\r\nQUIT\n"
_FIRST_BYTES = [_SIGNATURE_1[0], _SIGNATURE_2[0]]
_FIXED_SIZE = 16  # bytes of version 2 before the addresses
_READ_MAX = 107  # bytes that are looked at; the addresses of version 2 end before
_IPV4_SIZE, _IPV6_SIZE = 12, 36  # bytes of two addresses and two ports
_LOCAL, _PROXY = 0, 1  # commands of version 2
_IPV4, _IPV6, _UNIX = 1, 2, 3  # address families of version 2
_STREAM, _DATAGRAM = 1, 2


class HeaderFault(IntEnum):
    """Why a header is malformed; `reason` of its ANOMALY row."""

    NO_LINE_END = 0
    ADDRESSES = 1
    VERSION = 2


@dataclass(frozen=True, slots=True)
class ProxyHeader:
    """size: its bytes, 0 if they are unknown. client: address (IPv6 or mapped IPv4) and port."""

    size: int
    client: tuple[bytes, int] | None = None
    fault: HeaderFault | None = None


def parse_header(data: bytes, available: int) -> ProxyHeader | None:
    """The PROXY header at the beginning of a stream; None if there is none or it is incomplete.

    data: the first bytes, up to _READ_MAX. available: bytes of the stream up to its first gap.
    """
    if data.startswith(_SIGNATURE_1):
        return _parse_1(data)
    if data.startswith(_SIGNATURE_2) and len(data) >= _FIXED_SIZE:
        return _parse_2(data, available)
    return None


def _parse_1(data: bytes) -> ProxyHeader | None:
    end = data.find(b"\r\n", 0, _LINE_MAX)
    if end < 0:
        return ProxyHeader(0, fault=HeaderFault.NO_LINE_END) if len(data) >= _LINE_MAX else None
    size = end + 2
    family, *fields = data[len(_SIGNATURE_1) : end].split(b" ")
    if family == b"UNKNOWN":
        return ProxyHeader(size)
    families = {b"TCP4": socket.AF_INET, b"TCP6": socket.AF_INET6}
    try:
        source, _ = (
            socket.inet_pton(families[family], text.decode("ascii")) for text in fields[:2]
        )
        port, _ = (_port(text) for text in fields[2:])
    except (KeyError, OSError, ValueError):
        return ProxyHeader(size, fault=HeaderFault.ADDRESSES)
    return ProxyHeader(size, (source if len(source) == 16 else MAPPED + source, port))


def _port(text: bytes) -> int:
    """A decimal port. Raises ValueError for anything else."""
    if not (text.isdigit() and len(text) <= 5 and int(text) <= 0xFFFF):
        raise ValueError(text)
    return int(text)


def _parse_2(data: bytes, available: int) -> ProxyHeader | None:
    version, command = data[12] >> 4, data[12] & 15
    family, transport = data[13] >> 4, data[13] & 15
    length = int.from_bytes(data[14:16], "big")
    size = _FIXED_SIZE + length
    if version != 2:
        return ProxyHeader(0, fault=HeaderFault.VERSION)
    if available < size:
        return None
    if command == _LOCAL:
        return ProxyHeader(size)
    needed = {_IPV4: _IPV4_SIZE, _IPV6: _IPV6_SIZE}.get(family, 0)
    if command != _PROXY or family > _UNIX or transport > _DATAGRAM or length < needed:
        return ProxyHeader(size, fault=HeaderFault.ADDRESSES)
    if not needed or transport != _STREAM:
        return ProxyHeader(size)
    ip_size = (needed - 4) // 2
    source = data[_FIXED_SIZE : _FIXED_SIZE + ip_size]
    port_at = _FIXED_SIZE + 2 * ip_size
    port = int.from_bytes(data[port_at : port_at + 2], "big")
    return ProxyHeader(size, (source if ip_size == 16 else MAPPED + source, port))


def remove_headers(streams: Streams, is_resumed: Bools) -> dict[int, tuple[HeaderFault, int]]:
    """Move position 0 of proxied streams after their headers, and add the clients to the facts.

    is_resumed: connections whose streams begin later. Returns (fault, segment) of malformed headers
    by connection.
    """
    sides, connections = streams.sides, streams.connections
    likely = np.isin(first_bytes(streams.pieces, sides), _FIRST_BYTES)
    faults: dict[int, tuple[HeaderFault, int]] = {}
    for stream in np.flatnonzero(likely).tolist():
        connection, side = stream >> 1, stream & 1
        is_broker = connections["client_side"][connection] == 1 - side
        if is_resumed[connection] or is_broker:
            continue
        header = _header_of(streams.pieces, sides[stream])
        if header is None:
            continue
        if header.fault is not None:
            segment = streams.pieces["segment"][sides["piece_start"][stream]]
            faults[connection] = header.fault, int(segment)
        if not header.size:
            continue
        connections["client_side"][connection] = side
        facts = streams.facts.connections[connection]
        facts["proxy_byte_count"] = header.size
        if header.client is not None:
            address, facts["proxied_port"] = header.client
            facts["proxied_ip"] = np.frombuffer(address, np.uint8)
            facts["is_proxied"] = 1
        _move(streams, stream, header.size)
    return faults


def _header_of(pieces: Pieces, side: np.void) -> ProxyHeader | None:
    """The header at the beginning of a stream that has bytes there."""
    start, available = int(side["piece_start"]), 0
    for piece in range(start, int(side["piece_stop"])):
        if pieces["pos"][piece] != available or available > _FIXED_SIZE + 0xFFFF:
            break
        available = int(pieces["end"][piece])
    return parse_header(read_bytes(pieces, start, 0, min(available, _READ_MAX)), available)


def _move(streams: Streams, stream: int, size: int) -> None:
    """Make position 0 of a stream its byte number `size`."""
    side = streams.sides[stream]
    pieces = streams.pieces[side["piece_start"] : side["piece_stop"]]
    pieces["pos"] -= size
    pieces["end"] -= size
    inside = int((pieces["end"] <= 0).sum())  # pieces of the header only
    side["piece_start"] += inside
    if inside < len(pieces) and pieces["pos"][inside] < 0:
        cut = -int(pieces["pos"][inside])
        pieces["pos"][inside] = 0
        pieces["address"][inside] += np.uint64(cut)
        pieces["file_pos"][inside] += cut
    side["header_size"] = size
    side["origin"] += size
    side["end"] -= size
    side["byte_count"] -= size
    conflicts = streams.conflicts
    own = conflicts["stream"] == stream
    conflicts["pos"][own] = np.maximum(conflicts["pos"][own] - size, 0)
