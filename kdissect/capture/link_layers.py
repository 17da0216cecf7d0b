"""Finds the TCP header of a packet, through all layers that may carry it.

A packet is a chain of layers. Each turn of the loop in `find_tcp` calls the function of one layer.
It checks that the layer's header was captured, and returns the next layer, or the reason why the
search ends. A turn moves forward, or names the layer at the same place more closely (IP, then
IPv4), so the work is linear in the packet. A row of HEADERS has the place of the search. The
lengths in IP headers set its ends, which removes Ethernet's padding.

Sources:

- RFC 791 and 8200 (IP), 9293 (TCP), 4302 (AH), 2003 (IP in IP), 2784 and 2890 (GRE).
- RFC 7348 (VXLAN), 8926 (GENEVE), 3032, 4385 and 7510 (MPLS).
- IEEE 802.1Q; ERSPAN from draft-foschiano-erspan.
- tcpdump.org's list of link types.
"""

from __future__ import annotations

import numpy as np

from kdissect.arrays import Bytes, Struct
from kdissect.capture.packet_reader import BAD_BLOCK, NO_INTERFACE, Reading
from kdissect.jit import inlined, kernel, load_u8, part, read_u8, read_u16, read_u32

# tcpdump.org's link type numbers
NULL, ETHERNET, LOOP, SLL, RAW, IPV4, IPV6, SLL2 = 0, 1, 108, 113, 101, 228, 229, 276
RAW_BSD, RAW_OPENBSD = 12, 14
LINK_TYPE_NAMES = {
    NULL: "null", ETHERNET: "ethernet", LOOP: "loop", SLL: "linux_sll", SLL2: "linux_sll2",
    RAW: "raw", RAW_BSD: "raw", RAW_OPENBSD: "raw", IPV4: "ipv4", IPV6: "ipv6",
}  # fmt: skip

# Why a packet gives no segment. Larger reasons: 64 + IP protocol, 320 + link type.
TCP_FOUND, ARP, NOT_IP, IP_FRAGMENT, UDP, HEADERS_CUT, IP_MALFORMED, TCP_MALFORMED = range(8)
UNKNOWN_INTERFACE, MALFORMED_BLOCK, TUNNEL_MALFORMED, TUNNEL_UNKNOWN = range(8, 12)
REASON_NAMES = [
    "tcp",
    "arp",
    "not_ip",
    "ip_fragment",
    "udp",
    "headers_cut",
    "ip_malformed",
    "tcp_malformed",
    "unknown_interface",
    "malformed_block",
    "tunnel_malformed",
    "tunnel_unknown",
]
OTHER_PROTOCOL, OTHER_LINK_TYPE = 64, 320
REASON_COUNT = OTHER_LINK_TYPE + 65536
_PROTOCOL_NAMES = {1: "icmp", 2: "igmp", 50: "esp", 58: "icmp6", 59: "no_next_header", 132: "sctp"}

# The place of the search in a packet, and what `find_tcp` found there.
HEADERS = np.dtype(
    [
        ("pos", "i8"),  # of the layer; after the search of the TCP header or a fragment's bytes
        ("end", "i8"),  # of the captured bytes
        ("wire_end", "i8"),  # of the bytes on the wire: larger if a snap length cut the packet
        ("ethertype", "i8"),  # of the layer
        ("protocol", "i8"),  # IP's number of the layer
        ("address_pos", "i8"),  # of the two IP addresses
        ("is_ipv6", "i8"),
        ("network", "i8"),  # 1 + the innermost VXLAN or GENEVE network id, or 0
        ("ip_id", "i8"),
        ("tcp_header", "i8"),  # its bytes; 0 if it is cut or malformed: only its ports are known
        # of an IP fragment:
        ("fragment_offset", "i8"),  # the position of its bytes in the datagram
        ("more_fragments", "i8"),  # 0 in the last fragment
        ("fragment_id", "i8"),
    ]
)

_P_ARP, _P_IPV4, _P_IPV6, _P_BRIDGED = 0x0806, 0x0800, 0x86DD, 0x6558
_P_MPLS, _P_MPLS_MULTICAST = 0x8847, 0x8848
_P_VLAN, _P_SERVICE_VLAN, _P_OLD_SERVICE_VLAN = 0x8100, 0x88A8, 0x9100
_P_ERSPAN_2, _P_ERSPAN_3 = 0x88BE, 0x22EB
_TCP, _UDP, _IPIP, _IP6IP, _GRE, _MPLS = 6, 17, 4, 41, 47, 137
_HOP_BY_HOP, _ROUTING, _FRAGMENT, _AUTHENTICATION, _DESTINATION = 0, 43, 44, 51, 60
_VXLAN_PORT, _VXLAN_PORT_OLD, _GENEVE_PORT, _MPLS_PORT = 4789, 8472, 6081, 6635
TUNNEL_PORTS = (_VXLAN_PORT, _VXLAN_PORT_OLD, _GENEVE_PORT, _MPLS_PORT)
TCP_NEEDED = 16  # bytes of a TCP header up to its window

# What can follow a header: a reason (below REASON_COUNT), or one of these layers. ETHERTYPE: the
# layer of the ethertype. PROTOCOL: the layer of IP's protocol number. IP: of either version.
_LAYERS = range(REASON_COUNT, REASON_COUNT + 6)
_L_ETHERNET, _L_ETHERTYPE, _L_IP, _L_IPV4, _L_IPV6, _L_PROTOCOL = _LAYERS


def reason_name(reason: int) -> str:
    """The name of a reason in captures.ignored_reasons."""
    if reason >= OTHER_LINK_TYPE:
        return f"unsupported_link_type_{reason - OTHER_LINK_TYPE}"
    if reason >= OTHER_PROTOCOL:
        protocol = reason - OTHER_PROTOCOL
        return _PROTOCOL_NAMES.get(protocol, f"ip_protocol_{protocol}")
    return REASON_NAMES[reason]


@part
def _lacks(at: Struct, need: int) -> bool:
    """Return whether fewer than `need` bytes of the layer were captured."""
    return at["end"] - at["pos"] < need


@part
def _short(at: Struct, need: int, malformed: int) -> int:
    """The reason for an incomplete header: cut off by the capture, or malformed on the wire."""
    return HEADERS_CUT if at["wire_end"] - at["pos"] >= need else malformed


@part
def _after(at: Struct, size: int, following: int) -> int:
    """Move behind a header; returns what follows."""
    at["pos"] += size
    return following


@part
def _is_ethertype(number: int) -> bool:
    """Return whether an ethertype is plausible in a pseudowire's Ethernet frame: IP, a VLAN tag,
    ARP."""
    return number in (_P_IPV4, _P_IPV6, _P_VLAN, _P_SERVICE_VLAN, _P_ARP)


@part
def _link_header(buf: Bytes, at: Struct, link_type: int) -> int:
    """Read the header of the capture's link type; returns what follows."""
    pos = at["pos"]
    if link_type == ETHERNET:
        return _L_ETHERNET
    if link_type == SLL:
        # tcpdump.org, LINKTYPE_LINUX_SLL: 16 bytes; the last two are the ethertype.
        if _lacks(at, 16):
            return _short(at, 16, NOT_IP)
        at["ethertype"] = read_u16(buf, pos + 14)
        return _after(at, 16, _L_ETHERTYPE)
    if link_type == SLL2:
        # tcpdump.org, LINKTYPE_LINUX_SLL2: 20 bytes; the first two are the ethertype.
        if _lacks(at, 20):
            return _short(at, 20, NOT_IP)
        at["ethertype"] = read_u16(buf, pos)
        return _after(at, 20, _L_ETHERTYPE)
    if link_type in (NULL, LOOP):
        if _lacks(at, 4):
            return _short(at, 4, NOT_IP)
        # An address family: big-endian in LOOP, in the capturing machine's byte order in NULL; all
        # values are small.
        family = read_u32(buf, pos)
        if family > 0xFFFF:
            family = read_u8(buf, pos) | (read_u8(buf, pos + 1) << 8)
        if family == 2:  # AF_INET on all systems
            return _after(at, 4, _L_IPV4)
        if family in (10, 24, 28, 30):  # AF_INET6 of Linux, NetBSD, FreeBSD, macOS
            return _after(at, 4, _L_IPV6)
        return NOT_IP
    if link_type in (RAW, RAW_BSD, RAW_OPENBSD, IPV4):
        return _L_IP
    if link_type == IPV6:
        return _L_IPV6
    return OTHER_LINK_TYPE + link_type


@part
def _ethernet(buf: Bytes, at: Struct) -> int:
    """Read an Ethernet header (IEEE 802.3): two addresses of 6 bytes, then the ethertype or a
    length."""
    if _lacks(at, 14):
        return _short(at, 14, NOT_IP)
    at["ethertype"] = read_u16(buf, at["pos"] + 12)
    return _after(at, 14, _L_ETHERTYPE)


@part
def _mpls(buf: Bytes, at: Struct) -> int:
    """Read a stack of MPLS labels (RFC 3032); returns what follows."""
    # An entry is label (20 bits), traffic class (3), bottom of stack (1), TTL (8).
    is_bottom = 0
    while is_bottom == 0:
        if _lacks(at, 4):
            return _short(at, 4, TUNNEL_MALFORMED)
        is_bottom = read_u8(buf, at["pos"] + 2) & 1
        at["pos"] += 4
    if _lacks(at, 1):
        return _short(at, 1, TUNNEL_MALFORMED)
    # Labels do not name their payload. The first nibble distinguishes IP from the rest (RFC 4928).
    nibble = read_u8(buf, at["pos"]) >> 4
    if nibble in (4, 6):
        return _L_IP
    # Ethernet over MPLS (RFC 4448); its control word is optional.
    if not _lacks(at, 14) and _is_ethertype(read_u16(buf, at["pos"] + 12)):
        return _L_ETHERNET
    if nibble == 0:  # a pseudowire's control word (RFC 4385), then Ethernet
        return _after(at, 4, _L_ETHERNET)
    return TUNNEL_UNKNOWN


@part
def _ethertype(buf: Bytes, at: Struct) -> int:
    """Read what an ethertype announces; returns what follows."""
    ethertype = at["ethertype"]
    if ethertype == _P_IPV4:
        return _L_IPV4
    if ethertype == _P_IPV6:
        return _L_IPV6
    # IEEE 802.1Q: a tag of two bytes, then the next ethertype. Tags may be stacked (802.1ad).
    if ethertype in (_P_VLAN, _P_SERVICE_VLAN, _P_OLD_SERVICE_VLAN):
        if _lacks(at, 4):
            return _short(at, 4, NOT_IP)
        at["ethertype"] = read_u16(buf, at["pos"] + 2)
        return _after(at, 4, _L_ETHERTYPE)
    if ethertype in (_P_MPLS, _P_MPLS_MULTICAST):
        return _mpls(buf, at)
    if ethertype == _P_BRIDGED:  # Ethernet within GENEVE, NVGRE (RFC 7637) or GRE
        return _L_ETHERNET
    if ethertype == _P_ARP:
        return ARP
    return NOT_IP


@part
def _ipv4(buf: Bytes, at: Struct) -> int:
    """Read an IPv4 header (RFC 791, 3.1); returns what follows."""
    pos = at["pos"]
    if _lacks(at, 20):
        return _short(at, 20, IP_MALFORMED)
    ip_version = read_u8(buf, pos) >> 4
    if ip_version == 6:
        return _L_IPV6
    size = (read_u8(buf, pos) & 15) * 4  # IHL counts 4-byte words, with the options
    total = read_u16(buf, pos + 2)
    if ip_version != 4 or size < 20 or 0 < total < size:
        return IP_MALFORMED
    if total > 0:  # 0 if the network card segments the packet later (TSO)
        at["wire_end"] = pos + total
        at["end"] = min(at["end"], pos + total)
    if _lacks(at, size):
        return _short(at, size, IP_MALFORMED)
    at["address_pos"] = pos + 12
    at["is_ipv6"] = 0
    at["ip_id"] = read_u16(buf, pos + 4)
    at["protocol"] = read_u8(buf, pos + 9)
    # RFC 791, 3.1: three flags (0x2000: more fragments), then the offset in units of 8 bytes.
    fragment = read_u16(buf, pos + 6)
    if fragment & 0x3FFF:
        at["fragment_offset"] = (fragment & 0x1FFF) * 8
        at["more_fragments"] = fragment & 0x2000
        at["fragment_id"] = at["ip_id"]
        return _after(at, size, IP_FRAGMENT)
    return _after(at, size, _L_PROTOCOL)


@part
def _ipv6(buf: Bytes, at: Struct) -> int:
    """Read an IPv6 header (RFC 8200, 3); returns what follows."""
    pos = at["pos"]
    if _lacks(at, 40):
        return _short(at, 40, IP_MALFORMED)
    if read_u8(buf, pos) >> 4 != 6:
        return IP_MALFORMED
    length = read_u16(buf, pos + 4)
    if length > 0:  # 0 for a jumbogram (RFC 2675), or if the network card segments the packet later
        at["wire_end"] = pos + 40 + length
        at["end"] = min(at["end"], pos + 40 + length)
    at["address_pos"] = pos + 8
    at["is_ipv6"] = 1
    at["ip_id"] = 0
    at["protocol"] = read_u8(buf, pos + 6)
    return _after(at, 40, _L_PROTOCOL)


@part
def _extension(buf: Bytes, at: Struct) -> int:
    """Read an IPv6 extension header (RFC 8200, 4) or AH; returns what follows."""
    pos, protocol = at["pos"], at["protocol"]
    if _lacks(at, 8):
        return _short(at, 8, IP_MALFORMED)
    length = read_u8(buf, pos + 1)
    if protocol == _FRAGMENT:
        size = 8
    elif protocol == _AUTHENTICATION:
        size = (length + 2) * 4  # RFC 4302, 2.2: length in 4-byte words, minus 2
    else:
        size = (length + 1) * 8  # RFC 8200, 4.3: length in 8-byte units, without the first
    if _lacks(at, size):
        return _short(at, size, IP_MALFORMED)
    at["protocol"] = read_u8(buf, pos)
    if protocol == _FRAGMENT:
        # RFC 8200, 4.5: offset (13 bits, units of 8 bytes), 2 reserved bits, more fragments; then
        # the id. If offset and flag are 0 it is an atomic fragment (RFC 6946), a complete packet.
        fragment = read_u16(buf, pos + 2)
        if fragment & 0xFFF9:
            at["fragment_offset"] = fragment & 0xFFF8
            at["more_fragments"] = fragment & 1
            at["fragment_id"] = read_u32(buf, pos + 4)
            return _after(at, size, IP_FRAGMENT)
    return _after(at, size, _L_PROTOCOL)


@part
def _tcp(buf: Bytes, at: Struct) -> int:
    """Record the size of the TCP header (RFC 9293, 3.1); returns a reason."""
    if _lacks(at, 4):
        return _short(at, 4, TCP_MALFORMED)
    size = 0
    if not _lacks(at, TCP_NEEDED):
        size = (read_u8(buf, at["pos"] + 12) >> 4) * 4  # data offset, in 4-byte words
    # RFC 9293, 3.1: at least 5 words; the header lies inside the packet
    room = at["wire_end"] - at["pos"]
    at["tcp_header"] = size if 20 <= size <= room <= 0x7FFFFFFF else 0
    return TCP_FOUND


@part
def _udp(buf: Bytes, at: Struct) -> int:
    """Read a UDP header and the tunnel that its ports announce; returns what follows."""
    pos = at["pos"]
    if _lacks(at, 8):
        return _short(at, 8, UDP)
    # A tunnel is recognised by the destination port, else by the source port.
    port = read_u16(buf, pos + 2)
    if port not in TUNNEL_PORTS:
        port = read_u16(buf, pos)
        if port not in TUNNEL_PORTS:
            return UDP
    if port == _MPLS_PORT:  # RFC 7510
        at["ethertype"] = _P_MPLS
        return _after(at, 8, _L_ETHERTYPE)
    if _lacks(at, 16):
        return _short(at, 16, UDP)
    flags = read_u8(buf, pos + 8)
    if port == _GENEVE_PORT:
        # RFC 8926, 3.4: version (2 bits) and length of options (6 bits, in 4-byte words), flags,
        # ethertype of the payload, network id (24 bits), a reserved byte.
        if flags >> 6 != 0:  # another version
            return TUNNEL_UNKNOWN
        following = _L_ETHERTYPE
        at["ethertype"] = read_u16(buf, pos + 10)
        size = 16 + (flags & 63) * 4
        if _lacks(at, size):
            return _short(at, size, TUNNEL_MALFORMED)
    else:
        # RFC 7348, 5: flags (8: the network id is valid), 3 reserved bytes, the id (24 bits), a
        # reserved byte; then Ethernet. Linux used port 8472 before 4789 was assigned.
        if flags & 8 == 0 and port == _VXLAN_PORT_OLD:
            return UDP  # no network id: another protocol uses this port
        following = _L_ETHERNET
        size = 16
    at["network"] = 1 + (read_u32(buf, pos + 12) >> 8)
    return _after(at, size, following)


@part
def _gre(buf: Bytes, at: Struct) -> int:
    """Read a GRE header (RFC 2784, 2), and ERSPAN's after it; returns what follows."""
    if _lacks(at, 4):
        return _short(at, 4, TUNNEL_MALFORMED)
    flags = read_u16(buf, at["pos"])
    at["ethertype"] = read_u16(buf, at["pos"] + 2)
    # Source routes (RFC 1701, obsolete) or another version (1 is PPTP, RFC 2637).
    if flags & 0x4007:
        return TUNNEL_UNKNOWN
    # Checksum (RFC 2784), key and sequence number (RFC 2890): 4 bytes each if their bits are set.
    size = 4 + 4 * ((flags >> 15) + ((flags >> 13) & 1) + ((flags >> 12) & 1))
    following = _L_ETHERTYPE
    if at["ethertype"] == _P_ERSPAN_2:
        size += 8 if flags & 0x1000 else 0  # type I has no sequence number and no header
        following = _L_ETHERNET
    elif at["ethertype"] == _P_ERSPAN_3:
        if _lacks(at, size + 12):
            return _short(at, size + 12, TUNNEL_MALFORMED)
        # The last bit says whether 8 platform-specific bytes follow the header.
        size += 20 if read_u8(buf, at["pos"] + size + 11) & 1 else 12
        following = _L_ETHERNET
    if _lacks(at, size):
        return _short(at, size, TUNNEL_MALFORMED)
    return _after(at, size, following)


@inlined
def find_tcp(buf: Bytes, at: Struct, link_type: int) -> int:
    """TCP_FOUND with `at` filled, or the reason why there is no TCP header.

    at: a row of HEADERS with the positions of the packet; wire_end >= end. At least 4 bytes of the
    TCP header were captured, and TCP_NEEDED bytes if `tcp_header` is not 0.
    """
    at["network"] = 0
    following = _link_header(buf, at, link_type)
    while following >= REASON_COUNT:
        protocol = at["protocol"]
        if following == _L_ETHERNET:
            following = _ethernet(buf, at)
        elif following == _L_ETHERTYPE:
            following = _ethertype(buf, at)
        elif following == _L_IP:
            if _lacks(at, 1):
                return _short(at, 1, IP_MALFORMED)
            following = _L_IPV6 if read_u8(buf, at["pos"]) >> 4 == 6 else _L_IPV4
        elif following == _L_IPV4:
            following = _ipv4(buf, at)
        elif following == _L_IPV6:
            following = _ipv6(buf, at)
        elif protocol == _TCP:
            return _tcp(buf, at)
        elif protocol == _UDP:
            following = _udp(buf, at)
        elif protocol == _GRE:
            following = _gre(buf, at)
        elif protocol == _IPIP:  # RFC 2003
            following = _L_IPV4
        elif protocol == _IP6IP:  # RFC 2473, 4213
            following = _L_IPV6
        elif protocol == _MPLS:  # RFC 4023
            following = _mpls(buf, at)
        elif protocol == _AUTHENTICATION or (
            at["is_ipv6"] == 1 and protocol in (_HOP_BY_HOP, _ROUTING, _FRAGMENT, _DESTINATION)
        ):
            following = _extension(buf, at)
        else:
            return OTHER_PROTOCOL + protocol
    return following


@inlined
def find_headers(reading: Reading, at: Struct) -> int:
    """`find_tcp` for the packet that was read last."""
    cursor = reading.cursor
    interface = cursor["interface"]
    if interface == NO_INTERFACE:
        return UNKNOWN_INTERFACE
    if interface == BAD_BLOCK:
        return MALFORMED_BLOCK
    at["pos"] = cursor["data_pos"]
    at["end"] = cursor["data_pos"] + cursor["captured"]
    at["wire_end"] = cursor["data_pos"] + max(cursor["captured"], cursor["length"])
    return find_tcp(reading.data, at, reading.interfaces["link_type"][interface])


@kernel
def find_option(address: np.uint64, size: int, wanted: int, length: int) -> int:
    """Position of the last TCP option of this kind and length; -1 if there is none.

    The options are `size` bytes at the address. A list ends at an impossible length.
    """
    found = -1
    pos = 0
    while pos < size:
        # RFC 9293, 3.1: option kind 0 ends the list, 1 is padding of one byte; others have a length
        kind = load_u8(address + np.uint64(pos))
        if kind == 1:
            pos += 1
            continue
        if kind == 0 or size - pos < 2:
            break
        bytes_of = load_u8(address + np.uint64(pos + 1))
        if bytes_of < 2 or bytes_of > size - pos:
            break
        if kind == wanted and bytes_of == length:
            found = pos
        pos += bytes_of
    return found
