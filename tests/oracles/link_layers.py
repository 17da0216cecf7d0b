"""The layers of a packet down to its TCP segment, a function a layer.

A layer's function gets the bytes from the layer's first one on. It returns the next layer's name
and place, or raises `Ignored` with the reason. Numbers: tcpdump.org's link types, IANA's protocols
and ports.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from kdissect.capture.segments import NO_HEADER
from tests.oracles.packets import Packet, read_capture

MAPPED = bytes(10) + bytes(2 * [255])  # before an IPv4 address in IPv6's form (RFC 4291, 2.5.5.2)
SYN = 0x02  # RFC 9293, 3.1
# IANA's names of protocols that carry no segment
PROTOCOLS = {1: "icmp", 2: "igmp", 50: "esp", 58: "icmp6", 59: "no_next_header", 132: "sctp"}
# VXLAN (RFC 7348, and Linux before it), GENEVE (RFC 8926), MPLS (RFC 7510)
TUNNELS = {4789, 8472, 6081, 6635}


class Ignored(Exception):
    """There is no TCP header in this packet; the argument is the reason's name."""


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere in a packet: captured bytes from `pos` on, where it ends on the wire, its past."""

    packet: bytes
    pos: int
    end: int
    wire_end: int
    network: int = 0
    addresses: tuple[bytes, bytes] = (b"", b"")
    ip_id: int = 0
    is_ipv6: bool = False
    protocol: int = 0
    tcp_header: int = 0  # its size; 0 where it is cut or makes no sense

    def need(self, count: int, otherwise: str) -> bytes:
        """The next `count` bytes; the reason why not is a cut, or else what the caller says."""
        if self.end - self.pos < count:
            raise Ignored("headers_cut" if self.wire_end - self.pos >= count else otherwise)
        return self.packet[self.pos : self.pos + count]

    def behind(self, count: int) -> "Place":
        return replace(self, pos=self.pos + count)

    def until(self, wire_end: int) -> "Place":
        return replace(self, wire_end=wire_end, end=min(self.end, wire_end))


Next = tuple[str, Place]


def _ethernet(at: Place) -> Next:
    (ethertype,) = struct.unpack_from(">H", at.need(14, "not_ip"), 12)
    return _by_ethertype(ethertype, at.behind(14))


def _by_ethertype(ethertype: int, at: Place) -> Next:
    names = {
        0x0800: "ipv4", 0x86DD: "ipv6", 0x8100: "vlan", 0x88A8: "vlan", 0x9100: "vlan",
        0x8847: "mpls", 0x8848: "mpls", 0x6558: "ethernet",
    }  # fmt: skip
    if ethertype not in names:
        raise Ignored("arp" if ethertype == 0x0806 else "not_ip")
    return names[ethertype], at


def _vlan(at: Place) -> Next:
    (ethertype,) = struct.unpack_from(">H", at.need(4, "not_ip"), 2)
    return _by_ethertype(ethertype, at.behind(4))


def _mpls(at: Place) -> Next:
    label = at.need(4, "tunnel_malformed")
    at = at.behind(4)
    if not label[2] & 1:
        return "mpls", at
    nibble = at.need(1, "tunnel_malformed")[0] >> 4
    if nibble in (4, 6):
        return "ip", at
    ethertypes = (0x0800, 0x86DD, 0x8100, 0x88A8, 0x0806)
    if at.end - at.pos >= 14:
        if int.from_bytes(at.packet[at.pos + 12 : at.pos + 14], "big") in ethertypes:
            return "ethernet", at
    if nibble == 0:
        return "ethernet", at.behind(4)
    raise Ignored("tunnel_unknown")


def _ip(at: Place) -> Next:
    return "ipv6" if at.need(1, "ip_malformed")[0] >> 4 == 6 else "ipv4", at


def _ipv4(at: Place) -> Next:
    header = at.need(20, "ip_malformed")
    if header[0] >> 4 == 6:
        return "ipv6", at
    size = (header[0] & 15) * 4
    total, ip_id, fragment = struct.unpack_from(">3H", header, 2)
    if header[0] >> 4 != 4 or size < 20 or 0 < total < size:
        raise Ignored("ip_malformed")
    if total:
        at = at.until(at.pos + total)
    at.need(size, "ip_malformed")
    if fragment & 0x3FFF:
        raise Ignored("ip_fragment")
    addresses = MAPPED + header[12:16], MAPPED + header[16:20]
    return "ipv4_next", replace(
        at.behind(size), addresses=addresses, ip_id=ip_id, is_ipv6=False, protocol=header[9]
    )


def _ipv4_next(at: Place) -> Next:
    if at.protocol != 51:
        return "transport", at
    protocol, units = at.need(8, "ip_malformed")[:2]
    at.need((units + 2) * 4, "ip_malformed")
    return "ipv4_next", replace(at.behind((units + 2) * 4), protocol=protocol)


def _ipv6(at: Place) -> Next:
    header = at.need(40, "ip_malformed")
    if header[0] >> 4 != 6:
        raise Ignored("ip_malformed")
    (total,) = struct.unpack_from(">H", header, 4)
    if total:
        at = at.until(at.pos + 40 + total)
    at = replace(at.behind(40), addresses=(header[8:24], header[24:40]), ip_id=0, is_ipv6=True)
    return "ipv6_next", replace(at, protocol=header[6])


def _ipv6_next(at: Place) -> Next:
    if at.protocol not in (0, 43, 44, 51, 60):
        return "transport", at
    protocol, units, fragment = struct.unpack_from(">BBH", at.need(8, "ip_malformed"))
    size = (units + 1) * 8
    if at.protocol == 44:
        if fragment & 0xFFF9:
            raise Ignored("ip_fragment")
        size = 8
    elif at.protocol == 51:
        size = (units + 2) * 4
    at.need(size, "ip_malformed")
    return "ipv6_next", replace(at.behind(size), protocol=protocol)


def _transport(at: Place) -> Next:
    names = {6: "tcp", 17: "udp", 47: "gre", 4: "ipv4", 41: "ipv6", 137: "mpls"}
    if at.protocol not in names:
        raise Ignored(PROTOCOLS.get(at.protocol, f"ip_protocol_{at.protocol}"))
    return names[at.protocol], at


def _udp(at: Place) -> Next:
    ports = struct.unpack_from(">HH", at.need(8, "udp"))
    port = next((one for one in reversed(ports) if one in TUNNELS), None)
    if port is None:
        raise Ignored("udp")
    if port == 6635:
        return "mpls", at.behind(8)
    header = at.need(16, "udp")
    inner = replace(at, network=1 + int.from_bytes(header[12:15], "big"))
    if port != 6081:
        if port == 8472 and not header[8] & 8:
            raise Ignored("udp")
        return "ethernet", inner.behind(16)
    if header[8] >> 6:
        raise Ignored("tunnel_unknown")
    size = 16 + (header[8] & 63) * 4
    at.need(size, "tunnel_malformed")
    (ethertype,) = struct.unpack_from(">H", header, 10)
    return _by_ethertype(ethertype, inner.behind(size))


def _gre(at: Place) -> Next:
    flags, ethertype = struct.unpack(">2H", at.need(4, "tunnel_malformed"))
    if flags & 0x4007:
        raise Ignored("tunnel_unknown")
    size = 4 + 4 * sum(bool(flags & bit) for bit in (0x8000, 0x2000, 0x1000))
    if ethertype == 0x88BE:
        size += 8 if flags & 0x1000 else 0
    elif ethertype == 0x22EB:
        has_platform = at.need(size + 12, "tunnel_malformed")[size + 11] & 1
        size += 20 if has_platform else 12
    at.need(size, "tunnel_malformed")
    if ethertype in (0x88BE, 0x22EB):
        return "ethernet", at.behind(size)
    return _by_ethertype(ethertype, at.behind(size))


LAYERS: dict[str, Callable[[Place], Next]] = {
    "ipv4_next": _ipv4_next,
    "ethernet": _ethernet, "vlan": _vlan, "mpls": _mpls, "ip": _ip, "ipv4": _ipv4,
    "ipv6": _ipv6, "ipv6_next": _ipv6_next, "transport": _transport, "udp": _udp, "gre": _gre,
}  # fmt: skip


def _first_layer(link_type: int, at: Place) -> Next:
    if link_type == 1:  # Ethernet
        return "ethernet", at
    if link_type == 113:  # Linux cooked
        (ethertype,) = struct.unpack_from(">H", at.need(16, "not_ip"), 14)
        return _by_ethertype(ethertype, at.behind(16))
    if link_type == 276:  # Linux cooked, version 2
        (ethertype,) = struct.unpack_from(">H", at.need(20, "not_ip"))
        return _by_ethertype(ethertype, at.behind(20))
    if link_type in (0, 108):  # BSD loopback, and OpenBSD's
        header = at.need(4, "not_ip")
        family = int.from_bytes(header, "big")
        if family > 0xFFFF:
            family = int.from_bytes(header[:2], "little")
        if family not in (2, 10, 24, 28, 30):
            raise Ignored("not_ip")
        return "ipv4" if family == 2 else "ipv6", at.behind(4)
    names = {12: "ip", 14: "ip", 101: "ip", 228: "ip", 229: "ipv6"}
    if link_type not in names:
        raise Ignored(f"unsupported_link_type_{link_type}")
    return names[link_type], at


def find_tcp(packet: bytes, length: int, link_type: int) -> Place:
    """The place of a packet's TCP header. `length`: bytes on the wire. Raises Ignored."""
    at = Place(packet, 0, len(packet), max(length, len(packet)))
    name, at = _first_layer(link_type, at)
    while name != "tcp":
        name, at = LAYERS[name](at)
    at.need(4, "tcp_malformed")
    if at.end - at.pos < 16:  # up to the window
        return at
    size = (at.packet[at.pos + 12] >> 4) * 4
    if size < 20 or size > at.wire_end - at.pos or at.wire_end - at.pos >= 2**31:
        return at
    return replace(at, tcp_header=size)


class Segment(NamedTuple):
    """A row of SEGMENT in full, its endpoints written out: (ip, port) of a, of b, network."""

    time_ns: int
    pos: int
    packet: int
    seq: int
    ack: int
    captured: int
    length: int
    endpoints: tuple[bytes, int, bytes, int, int]
    ip_id: int
    marks: int
    option_words: int
    flags: int
    side: int
    window: int


def of_options(options: bytes) -> int:
    """16 bits of the options' 32-bit words, which stand in for an identification that is 0."""
    mixed = 0
    for (word,) in struct.iter_unpack(">I", options[: len(options) // 4 * 4]):
        mixed = mixed * 31 + word
    return (mixed ^ mixed >> 16) & 0xFFFF


def to_segment(packet: Packet, data: bytes) -> Segment:
    """The segment of a capture's packet. Raises Ignored."""
    if packet.link_type is None:
        raise Ignored(packet.fault)
    content = data[packet.data_pos : packet.data_pos + packet.captured]
    at = find_tcp(content, packet.length, packet.link_type)
    sender_port, receiver_port = struct.unpack_from(">2H", content, at.pos)
    sender = at.addresses[0], sender_port
    receiver = at.addresses[1], receiver_port
    side = int(sender > receiver)
    a, b = (receiver, sender) if side else (sender, receiver)
    if not at.tcp_header:
        return Segment(
            packet.time_ns, packet.data_pos + at.pos, packet.number, 0, 0, 0, 0,
            (*a, *b, at.network), at.ip_id, NO_HEADER, 0, 0, side, 0,
        )  # fmt: skip
    seq, ack, flags = struct.unpack_from(">IIxB", content, at.pos + 4)
    (window,) = struct.unpack_from(">H", content, at.pos + 14)
    payload = at.pos + at.tcp_header
    has_options = flags & SYN and payload <= at.end
    ip_id = at.ip_id or of_options(content[at.pos + 20 : min(payload, at.end)])
    return Segment(
        packet.time_ns, packet.data_pos + payload, packet.number, seq, ack,
        max(at.end - payload, 0), at.wire_end - payload, (*a, *b, at.network),
        ip_id, 0, at.tcp_header // 4 - 4 if has_options else 0, flags, side, window,
    )  # fmt: skip


def scan_capture(data: bytes) -> tuple[list[Segment], dict[str, int]]:
    """All segments of a capture, and how many other packets there are by reason."""
    segments: list[Segment] = []
    ignored: dict[str, int] = {}
    for packet in read_capture(data).packets:
        try:
            segments.append(to_segment(packet, data))
        except Ignored as reason:
            name = str(reason)
            ignored[name] = ignored.get(name, 0) + 1
    return segments, ignored
