"""From the first byte of a packet to its TCP header, through whatever carries it.

A packet is a chain of layers. Each turn of the loop in `find_tcp` looks at one layer, checks that
its header was captured, and names the layer behind it; every turn moves forward, so the work is
linear in the packet. Three limits travel along: `pos`, the layer's first byte; `end`, where the
captured bytes end; `wire_end`, where the packet ended on the wire (further out when a snap length
cut it). IP's own lengths pull both ends in, which removes Ethernet's padding.

Sources: RFC 791, 8200 (IP), 793 (TCP), 4302 (AH), 7348 (VXLAN), 8926 (GENEVE), 2784 and 2890
(GRE), 2003 (IP in IP), 3032, 4385 and 7510 (MPLS), 2516 (PPPoE); IEEE 802.1Q, 802.1ah and 802.2;
3GPP TS 29.281 (GTP-U); tcpdump.org's list of link types; ERSPAN from draft-foschiano-erspan.
"""

from __future__ import annotations

from typing import Any

from kdissect.jit import inlined, read_u8, read_u16, read_u32

# tcpdump.org's numbers.
NULL, ETHERNET, LOOP, SLL, RAW, IPV4, IPV6, SLL2 = 0, 1, 108, 113, 101, 228, 229, 276
RAW_BSD, RAW_OPENBSD = 12, 14
LINK_TYPE_NAMES = {
    NULL: "null", ETHERNET: "ethernet", LOOP: "loop", SLL: "linux_sll", SLL2: "linux_sll2",
    RAW: "raw", RAW_BSD: "raw", RAW_OPENBSD: "raw", IPV4: "ipv4", IPV6: "ipv6",
}  # fmt: skip

# Why a packet gives no segment. Above: 64 + IP protocol, 320 + link type.
REASON_NAMES = (
    "tcp", "arp", "not_ip", "ip_fragment", "udp", "headers_cut", "ip_malformed", "tcp_malformed",
    "unknown_interface", "malformed_block", "tunnel_malformed", "tunnel_unknown",
)  # fmt: skip
(
    TCP_FOUND, ARP, NOT_IP, IP_FRAGMENT, UDP, HEADERS_CUT, IP_MALFORMED, TCP_MALFORMED,
    UNKNOWN_INTERFACE, MALFORMED_BLOCK, TUNNEL_MALFORMED, TUNNEL_UNKNOWN,
) = range(12)  # fmt: skip
OTHER_PROTOCOL, OTHER_LINK_TYPE = 64, 320
REASON_COUNT = OTHER_LINK_TYPE + 65536
_PROTOCOL_NAMES = {1: "icmp", 2: "igmp", 50: "esp", 58: "icmp6", 59: "no_next_header", 132: "sctp"}

# What `find_tcp` finds. TCP_HEADER: bytes of the TCP header, 0 where it is cut or makes no sense,
# so that only its ports are known. Of an IP fragment what it carries: END and WIRE_END as of a
# segment, BODY the position of its bytes, AT where these belong in the datagram, MORE 0 in the last
# fragment.
(
    ADDRESS_POS, IS_IPV6, TCP_POS, END, WIRE_END, NETWORK, IP_ID,
    BODY, AT, MORE, FRAGMENT_ID, PROTOCOL, TCP_HEADER,
) = range(13)  # fmt: skip
FOUND_SIZE = 13

_P_ARP, _P_IPV4, _P_IPV6, _P_BRIDGED = 0x0806, 0x0800, 0x86DD, 0x6558
_P_MPLS, _P_MPLS_MULTICAST, _P_PPPOE, _P_BACKBONE = 0x8847, 0x8848, 0x8864, 0x88E7
_P_FABRIC_PATH = 0x8903  # of Cisco: a tree and hops, then Ethernet
_LLC_BELOW = 0x600  # smaller ethertypes are lengths: LLC (IEEE 802.2) follows
_P_ERSPAN_2, _P_ERSPAN_3 = 0x88BE, 0x22EB
_TCP, _UDP, _IPIP, _IP6IP, _GRE, _MPLS = 6, 17, 4, 41, 47, 137
_HOP_BY_HOP, _ROUTING, _FRAGMENT, _AUTHENTICATION, _DESTINATION = 0, 43, 44, 51, 60
_VXLAN_PORT, _VXLAN_PORT_OLD, _GENEVE_PORT, _MPLS_PORT, _GTP_PORT = 4789, 8472, 6081, 6635, 2152
TUNNEL_PORTS = (_VXLAN_PORT, _VXLAN_PORT_OLD, _GENEVE_PORT, _MPLS_PORT, _GTP_PORT)
TCP_NEEDED = 14  # bytes of a TCP header up to its flags

# Layers of the loop.
_L_ETHERNET, _L_ETHERTYPE, _L_IP, _L_IPV4, _L_IPV6, _L_PROTOCOL = range(6)


def reason_name(reason: int) -> str:
    """The name of a reason in captures.ignored_reasons."""
    if reason >= OTHER_LINK_TYPE:
        return f"unsupported_link_type_{reason - OTHER_LINK_TYPE}"
    if reason >= OTHER_PROTOCOL:
        protocol = reason - OTHER_PROTOCOL
        return _PROTOCOL_NAMES.get(protocol, f"ip_protocol_{protocol}")
    return REASON_NAMES[reason]


@inlined
def _short(pos: Any, wire_end: Any, need: Any, malformed: Any) -> Any:
    """The reason for a header that is not there: cut off by the capture, or never sent whole."""
    return HEADERS_CUT if wire_end - pos >= need else malformed


@inlined
def _is_ethertype(number: Any) -> Any:
    """Whether a pseudowire's Ethernet frame may go on with this: IP, a VLAN tag, ARP."""
    return number in (_P_IPV4, _P_IPV6, 0x8100, 0x88A8, _P_ARP)


@inlined
def find_tcp(buf: Any, pos: Any, end: Any, wire_end: Any, link_type: Any, found: Any) -> Any:
    """TCP_FOUND with `found` filled, or the reason why there is no TCP header.

    buf[pos:end] is the captured packet, wire_end >= end where it ended on the wire.
    found[ADDRESS_POS] points at the two IP addresses, found[TCP_POS] at the TCP header, of which 4
    bytes are there at least, and TCP_NEEDED where found[TCP_HEADER] tells its size; found[NETWORK]
    is 1 + the innermost VXLAN or GENEVE network id. For IP_FRAGMENT `found` says what
    `ip_fragments` needs to know.
    """
    found[NETWORK] = 0
    ethertype = 0
    protocol = 0
    if link_type == ETHERNET:
        layer = _L_ETHERNET
    elif link_type == SLL:
        if end - pos < 16:
            return _short(pos, wire_end, 16, NOT_IP)
        ethertype = read_u16(buf, pos + 14)
        pos += 16
        layer = _L_ETHERTYPE
    elif link_type == SLL2:
        if end - pos < 20:
            return _short(pos, wire_end, 20, NOT_IP)
        ethertype = read_u16(buf, pos)
        pos += 20
        layer = _L_ETHERTYPE
    elif link_type in (NULL, LOOP):
        if end - pos < 4:
            return _short(pos, wire_end, 4, NOT_IP)
        # An address family: big-endian in LOOP, of the writer's machine in NULL; all are small.
        family = read_u32(buf, pos)
        if family > 0xFFFF:
            family = read_u8(buf, pos) | (read_u8(buf, pos + 1) << 8)
        pos += 4
        if family == 2:
            layer = _L_IPV4
        elif family in (10, 24, 28, 30):  # AF_INET6 of Linux, NetBSD, FreeBSD, macOS
            layer = _L_IPV6
        else:
            return NOT_IP
    elif link_type in (RAW, RAW_BSD, RAW_OPENBSD, IPV4):
        layer = _L_IP
    elif link_type == IPV6:
        layer = _L_IPV6
    else:
        return OTHER_LINK_TYPE + link_type
    while True:
        if layer == _L_ETHERNET:
            if end - pos < 14:
                return _short(pos, wire_end, 14, NOT_IP)
            ethertype = read_u16(buf, pos + 12)
            pos += 14
            layer = _L_ETHERTYPE
        elif layer == _L_ETHERTYPE:
            if ethertype == _P_IPV4:
                layer = _L_IPV4
            elif ethertype == _P_IPV6:
                layer = _L_IPV6
            elif ethertype in (0x8100, 0x88A8, 0x9100):  # VLAN tags, one behind the other
                if end - pos < 4:
                    return _short(pos, wire_end, 4, NOT_IP)
                ethertype = read_u16(buf, pos + 2)
                pos += 4
            elif ethertype in (_P_MPLS, _P_MPLS_MULTICAST):
                is_last = 0
                while is_last == 0:
                    if end - pos < 4:
                        return _short(pos, wire_end, 4, TUNNEL_MALFORMED)
                    is_last = read_u8(buf, pos + 2) & 1
                    pos += 4
                if end - pos < 1:
                    return _short(pos, wire_end, 1, TUNNEL_MALFORMED)
                nibble = read_u8(buf, pos) >> 4
                if nibble in (4, 6):
                    layer = _L_IP
                elif end - pos >= 14 and _is_ethertype(read_u16(buf, pos + 12)):
                    layer = _L_ETHERNET
                elif nibble == 0:  # a pseudowire's control word (RFC 4385), then Ethernet
                    pos += 4
                    layer = _L_ETHERNET
                else:
                    return TUNNEL_UNKNOWN
            elif ethertype == _P_PPPOE:
                if end - pos < 8:
                    return _short(pos, wire_end, 8, TUNNEL_MALFORMED)
                inner = read_u16(buf, pos + 6)
                pos += 8
                if inner == 0x21:
                    layer = _L_IPV4
                elif inner == 0x57:
                    layer = _L_IPV6
                else:
                    return NOT_IP
            elif ethertype == _P_BRIDGED:
                layer = _L_ETHERNET
            elif ethertype == _P_BACKBONE:
                pos += 4
                layer = _L_ETHERNET
            elif ethertype == _P_FABRIC_PATH:
                pos += 2
                layer = _L_ETHERNET
            elif ethertype < _LLC_BELOW:
                if end - pos < 8:
                    return _short(pos, wire_end, 8, NOT_IP)
                if read_u16(buf, pos) == 0xAAAA and read_u32(buf, pos + 2) == 0x03000000:
                    ethertype = read_u16(buf, pos + 6)
                    pos += 8
                    if ethertype < _LLC_BELOW:
                        return NOT_IP
                elif read_u16(buf, pos) == 0x0606 and read_u8(buf, pos + 2) == 3:
                    pos += 3
                    layer = _L_IPV4
                else:
                    return NOT_IP
            else:
                return ARP if ethertype == _P_ARP else NOT_IP
        elif layer == _L_IP:
            if end - pos < 1:
                return _short(pos, wire_end, 1, IP_MALFORMED)
            layer = _L_IPV6 if read_u8(buf, pos) >> 4 == 6 else _L_IPV4
        elif layer == _L_IPV4:
            if end - pos < 20:
                return _short(pos, wire_end, 20, IP_MALFORMED)
            if read_u8(buf, pos) >> 4 == 6:
                layer = _L_IPV6
                continue
            header = (read_u8(buf, pos) & 15) * 4
            total = read_u16(buf, pos + 2)
            if read_u8(buf, pos) >> 4 != 4 or header < 20 or 0 < total < header:
                return IP_MALFORMED
            if total > 0:  # 0: segmentation was left to the network card
                wire_end = pos + total
                end = min(end, wire_end)
            if end - pos < header:
                return _short(pos, wire_end, header, IP_MALFORMED)
            found[ADDRESS_POS] = pos + 12
            found[IS_IPV6] = 0
            found[IP_ID] = read_u16(buf, pos + 4)
            protocol = read_u8(buf, pos + 9)
            fragment = read_u16(buf, pos + 6)
            pos += header
            if fragment & 0x3FFF:
                found[BODY] = pos
                found[END] = end
                found[WIRE_END] = wire_end
                found[AT] = (fragment & 0x1FFF) * 8
                found[MORE] = fragment & 0x2000
                found[FRAGMENT_ID] = found[IP_ID]
                found[PROTOCOL] = protocol
                return IP_FRAGMENT
            layer = _L_PROTOCOL
        elif layer == _L_IPV6:
            if end - pos < 40:
                return _short(pos, wire_end, 40, IP_MALFORMED)
            if read_u8(buf, pos) >> 4 != 6:
                return IP_MALFORMED
            total = read_u16(buf, pos + 4)
            if total > 0:  # 0: a jumbogram, or segmentation was left to the network card
                wire_end = pos + 40 + total
                end = min(end, wire_end)
            found[ADDRESS_POS] = pos + 8
            found[IS_IPV6] = 1
            found[IP_ID] = 0
            protocol = read_u8(buf, pos + 6)
            pos += 40
            layer = _L_PROTOCOL
        elif protocol == _TCP:
            if end - pos < 4:
                return _short(pos, wire_end, 4, TCP_MALFORMED)
            header = 0
            if end - pos >= TCP_NEEDED:
                header = (read_u8(buf, pos + 12) >> 4) * 4
            if header < 20 or header > wire_end - pos or wire_end - pos > 0x7FFFFFFF:
                header = 0
            found[TCP_HEADER] = header
            found[TCP_POS] = pos
            found[END] = end
            found[WIRE_END] = wire_end
            return TCP_FOUND
        elif protocol == _UDP:
            if end - pos < 8:
                return _short(pos, wire_end, 8, UDP)
            port = read_u16(buf, pos + 2)
            if port not in TUNNEL_PORTS:
                port = read_u16(buf, pos)
                if port not in TUNNEL_PORTS:
                    return UDP
            if port == _MPLS_PORT:
                ethertype = _P_MPLS
                pos += 8
                layer = _L_ETHERTYPE
                continue
            if end - pos < 16:
                return _short(pos, wire_end, 16, UDP)
            first = read_u8(buf, pos + 8)
            if port == _GTP_PORT:
                if first >> 4 != 3 or read_u8(buf, pos + 9) != 255:
                    return UDP  # another version, or signalling
                extension = 0
                header = 16
                if first & 7:
                    if end - pos < 20:
                        return _short(pos, wire_end, 20, TUNNEL_MALFORMED)
                    extension = read_u8(buf, pos + 19) if first & 4 else 0
                    header = 20
                while extension != 0:
                    if end - pos <= header:
                        return _short(pos, wire_end, header + 1, TUNNEL_MALFORMED)
                    size = read_u8(buf, pos + header) * 4
                    if size == 0:
                        return TUNNEL_MALFORMED
                    header += size
                    if end - pos < header:
                        return _short(pos, wire_end, header, TUNNEL_MALFORMED)
                    extension = read_u8(buf, pos + header - 1)
                pos += header
                layer = _L_IP
                continue
            if port == _GENEVE_PORT:
                if first >> 6 != 0:  # another version
                    return TUNNEL_UNKNOWN
                ethertype = read_u16(buf, pos + 10)
                header = 16 + (first & 63) * 4
                if end - pos < header:
                    return _short(pos, wire_end, header, TUNNEL_MALFORMED)
                layer = _L_ETHERTYPE
            else:
                if first & 8 == 0 and port == _VXLAN_PORT_OLD:
                    return UDP  # no network id: something else on this port
                header = 16
                layer = _L_ETHERNET
            found[NETWORK] = 1 + (read_u32(buf, pos + 12) >> 8)
            pos += header
        elif protocol == _GRE:
            if end - pos < 4:
                return _short(pos, wire_end, 4, TUNNEL_MALFORMED)
            flags = read_u16(buf, pos)
            ethertype = read_u16(buf, pos + 2)
            if flags & 0x4007:  # source routes (obsolete), other versions (PPTP)
                return TUNNEL_UNKNOWN
            header = 4 + 4 * ((flags >> 15) + ((flags >> 13) & 1) + ((flags >> 12) & 1))
            layer = _L_ETHERTYPE
            if ethertype == _P_ERSPAN_2:
                header += 8 if flags & 0x1000 else 0  # type I has no sequence and no header
                layer = _L_ETHERNET
            elif ethertype == _P_ERSPAN_3:
                if end - pos < header + 12:
                    return _short(pos, wire_end, header + 12, TUNNEL_MALFORMED)
                header += 20 if read_u8(buf, pos + header + 11) & 1 else 12
                layer = _L_ETHERNET
            if end - pos < header:
                return _short(pos, wire_end, header, TUNNEL_MALFORMED)
            pos += header
        elif protocol == _IPIP:
            layer = _L_IPV4
        elif protocol == _IP6IP:
            layer = _L_IPV6
        elif protocol == _MPLS:
            ethertype = _P_MPLS
            layer = _L_ETHERTYPE
        elif protocol == _AUTHENTICATION or (
            found[IS_IPV6] == 1 and protocol in (_HOP_BY_HOP, _ROUTING, _FRAGMENT, _DESTINATION)
        ):
            if end - pos < 8:
                return _short(pos, wire_end, 8, IP_MALFORMED)
            following = read_u8(buf, pos)
            units = read_u8(buf, pos + 1)
            if protocol == _FRAGMENT:
                fragment = read_u16(buf, pos + 2)
                if fragment & 0xFFF9:
                    found[BODY] = pos + 8
                    found[END] = end
                    found[WIRE_END] = wire_end
                    found[AT] = fragment & 0xFFF8
                    found[MORE] = fragment & 1
                    found[FRAGMENT_ID] = read_u32(buf, pos + 4)
                    found[PROTOCOL] = following
                    return IP_FRAGMENT
                header = 8
            elif protocol == _AUTHENTICATION:
                header = (units + 2) * 4
            else:
                header = (units + 1) * 8
            if end - pos < header:
                return _short(pos, wire_end, header, IP_MALFORMED)
            protocol = following
            pos += header
        else:
            return OTHER_PROTOCOL + protocol
