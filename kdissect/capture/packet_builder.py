"""Builds raw IP packets with the segments of a TCP connection.

For captures that are written: a replay's own traffic, and anonymized conversations. TCP checksums
are 0, as with network cards that compute them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address

LINK_TYPE_RAW = 101
_SEGMENT_MAX = 60_000  # bytes of payload; a packet's length has 16 bits
CLIENT, BROKER = 0, 1

_TCP = 6
_SYN, _FIN, _RST, _PUSH, _ACK = 2, 1, 4, 8, 16
_WINDOW = 0xFFFF

Address = str | IPv4Address | IPv6Address


class Flow:
    """One connection between a client and a broker, each given as (address, port).

    opened_ns: when it was opened. Its first sequence numbers follow from that, so that another
    connection of the same addresses and ports is not taken for a copy of it.
    """

    def __init__(
        self, client: tuple[Address, int], broker: tuple[Address, int], opened_ns: int
    ) -> None:
        addresses = [ip_address(address) for address, _ in (client, broker)]
        self._is_ipv4 = addresses[0].version == 4
        self._ends = (addresses[0].packed, client[1]), (addresses[1].packed, broker[1])
        # RFC 9293, 3.4.1: a clock with steps of 4 us
        first = opened_ns // 4000 & 0xFFFFFFFF
        self._next_seq = [first, first]

    def _packet(self, side: int, flags: int, payload: bytes = b"") -> bytes:
        """An IP packet from one side; advances that side's sequence number."""
        (source, source_port), (to, to_port) = self._ends[side], self._ends[1 - side]
        acknowledged = 0 if flags == _SYN else self._next_seq[1 - side]
        numbers = self._next_seq[side], acknowledged
        tcp = struct.pack(">HHIIBBH4x", source_port, to_port, *numbers, 0x50, flags, _WINDOW)
        # RFC 9293, 3.4: SYN and FIN take a sequence number each
        consumed = len(payload) + bool(flags & (_SYN | _FIN))
        self._next_seq[side] = (self._next_seq[side] + consumed) & 0xFFFFFFFF
        size = len(tcp) + len(payload)
        if self._is_ipv4:
            head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + size, 0, 0x4000, 64, _TCP, 0)
            # RFC 791, 3.1: one's complement of the one's complement sum of the header's words
            total = sum(struct.unpack(">6H", head)) + sum(struct.unpack(">4H", source + to))
            while total >> 16:
                total = (total & 0xFFFF) + (total >> 16)
            head = head[:10] + struct.pack(">H", total ^ 0xFFFF)
        else:
            head = struct.pack(">IHBB", 0x60000000, size, _TCP, 64)
        return head + source + to + tcp + payload

    def opened(self) -> Iterator[bytes]:
        """The three packets of a TCP handshake."""
        yield self._packet(CLIENT, _SYN)
        yield self._packet(BROKER, _SYN | _ACK)
        yield self._packet(CLIENT, _ACK)

    def sent(self, side: int, data: bytes, segment_max: int = _SEGMENT_MAX) -> Iterator[bytes]:
        """`data` from one side, in segments of at most `segment_max` bytes."""
        for pos in range(0, len(data), segment_max):
            yield self._packet(side, _ACK | _PUSH, data[pos : pos + segment_max])

    def closed(self) -> Iterator[bytes]:
        """The three packets of an orderly close by the client."""
        yield self._packet(CLIENT, _FIN | _ACK)
        yield self._packet(BROKER, _FIN | _ACK)
        yield self._packet(CLIENT, _ACK)

    def reset(self, side: int) -> Iterator[bytes]:
        """The RST packet of an abrupt close."""
        yield self._packet(side, _RST | _ACK)
