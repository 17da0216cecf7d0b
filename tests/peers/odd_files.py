"""Files that no sane tool writes, and layers that few captures have: made with scapy and by hand.

`cases()` gives (name, bytes of a file). Each packet of a case is there for one reason.
"""

import random
import struct
from collections.abc import Iterator
from typing import Any

from scapy.contrib.geneve import GENEVE
from scapy.contrib.mpls import MPLS
from scapy.layers.inet import GRE, ICMP, IP, TCP, UDP, fragment
from scapy.layers.inet6 import (
    ICMPv6DestUnreach,
    ICMPv6PacketTooBig,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
    fragment6,
)
from scapy.layers.ipsec import ESP
from scapy.layers.l2 import ARP, Dot1AD, Dot1Q, Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Raw

from tests.builders.captures import Blocks, pcap

MAC = {"src": "02:00:00:00:00:01", "dst": "02:00:00:00:00:02"}
PAYLOAD = b"\0\0\0\x10" + bytes(range(40))


def segment(payload: bytes = PAYLOAD, **fields: Any) -> Any:
    numbers = {"sport": 40000, "dport": 9092, "seq": 1000, "ack": 2000, "flags": "PA", **fields}
    return TCP(**numbers) / Raw(payload) if payload else TCP(**numbers)


def four(content: Any, **fields: Any) -> Any:
    return IP(src="10.0.0.1", dst="10.0.0.2", **fields) / content


def six(content: Any, **fields: Any) -> Any:
    return IPv6(src="fd00::1", dst="fd00::2", **fields) / content


def frame(content: Any) -> Any:
    return Ether(**MAC) / content


def cut(packet: bytes, size: int) -> bytes:
    return bytes(packet)[:size]


def put(packet: Any, at: int, new: bytes) -> bytes:
    data = bytearray(bytes(packet))
    data[at : at + len(new)] = new
    return bytes(data)


def wrong_headers() -> list[bytes]:
    """IPv4, IPv6 and TCP headers that lie about themselves, over Ethernet."""
    v4, v6 = frame(four(segment())), frame(six(segment()))
    return [
        bytes(v4), bytes(v6),
        put(v4, 14, b"\x44"), put(v4, 14, b"\x4f"), put(v4, 14, b"\x55"), put(v4, 14, b"\x65"),
        put(v4, 16, b"\0\0"), put(v4, 16, b"\0\x13"), put(v4, 16, b"\0\x14"),
        put(v4, 16, b"\0\x20"),
        put(v4, 16, b"\0\x28"), put(v4, 16, b"\xff\xff"), put(v4, 16, b"\0\x29"),
        put(v4, 46, b"\0"), put(v4, 46, b"\x40"), put(v4, 46, b"\xf0"), put(v4, 46, b"\x50"),
        put(v4, 46, b"\x80"), put(v4, 47, b"\0"), put(v4, 47, b"\xff"), put(v4, 47, b"\x03"),
        put(v6, 18, b"\0\0"), put(v6, 18, b"\0\x05"), put(v6, 18, b"\xff\xff"),
        put(v6, 14, b"\x40"), put(v6, 14, b"\x10"), put(v6, 20, b"\x3b"),
        put(v4, 20, b"\x40\0"), put(v4, 20, b"\x80\0"), put(v4, 20, b"\xc0\0"),
        put(v4, 24, b"\xde\xad"), put(v4, 50, b"\xde\xad"), put(v4, 22, b"\0"),
        put(v4, 34, b"\0\0"), put(v4, 36, b"\0\0"),
        bytes(frame(four(segment(), ttl=1, tos=255))),
        bytes(frame(four(segment(b"", flags="S", options=[("MSS", 1460), ("SAckOK", b"")])))),
        bytes(frame(four(segment(options=[("Timestamp", (1, 2))])))),
        bytes(frame(four(segment(), options=[b"\x07\x07\x04\0\0\0\0"]))),
        bytes(v4) + bytes(20),
    ]  # fmt: skip


def lengths() -> Iterator[bytes]:
    """A TCP packet of each IP version cut at every length, as a file with a snap length has it."""
    for packet in (frame(four(segment())), frame(six(segment()))):
        data = bytes(packet)
        yield from (data[:size] for size in range(len(data) + 1))


def tunnels() -> list[Any]:
    v4, v6 = four(segment()), six(segment())
    inner = frame(four(segment()))
    erspan2 = b"\x10\x64\0\x01\0\0\0\0"
    erspan3 = b"\x20\x64\0\x01" + bytes(8)
    return [
        frame(four(UDP(sport=5, dport=4789) / VXLAN(vni=7, flags=8) / inner)),
        frame(six(UDP(sport=5, dport=4789) / VXLAN(vni=7, flags=8) / inner)),
        frame(four(UDP(sport=5, dport=4789) / VXLAN(vni=7, flags=0) / inner)),
        frame(four(UDP(sport=5, dport=8472) / VXLAN(vni=7, flags=8) / inner)),
        frame(four(UDP(sport=4789, dport=5) / VXLAN(vni=7, flags=8) / inner)),
        frame(four(UDP(sport=5, dport=6081) / GENEVE(vni=7) / inner)),
        frame(four(UDP(sport=5, dport=6081) / GENEVE(vni=7, proto=0x0800) / v4)),
        frame(four(UDP(sport=5, dport=6081) / GENEVE(vni=7, proto=0x86DD) / v6)),
        frame(four(GRE() / v4)), frame(four(GRE(proto=0x86DD) / v6)),
        frame(four(GRE(proto=0x6558) / inner)),
        frame(four(GRE(key_present=1, key=5) / v4)), frame(six(GRE() / v4)),
        frame(four(GRE(chksum_present=1) / v4)), frame(four(GRE(seqnum_present=1) / v4)),
        frame(four(GRE(routing_present=1) / v4)),
        frame(four(GRE(version=1, proto=0x880B, key_present=1) / v4)),
        frame(four(GRE(proto=0x88BE) / inner)),
        frame(four(GRE(proto=0x88BE, seqnum_present=1) / Raw(erspan2) / inner)),
        frame(four(GRE(proto=0x22EB, seqnum_present=1) / Raw(erspan3) / inner)),
        frame(four(GRE(proto=0x8847) / MPLS(label=5, s=1) / v4)),
        frame(four(v4, proto=4)), frame(four(v6, proto=41)),
        frame(six(v4, nh=4)), frame(six(v6, nh=41)),
        frame(four(four(four(v4)))), frame(four(GRE() / four(GRE() / v4))),
        frame(four(UDP(sport=5, dport=4789) / VXLAN(vni=7, flags=8) / frame(
            four(UDP(sport=5, dport=4789) / VXLAN(vni=9, flags=8) / inner)))),
        frame(Dot1Q(vlan=5) / v4), frame(Dot1AD(vlan=5) / Dot1Q(vlan=6) / v4),
        frame(Dot1Q(vlan=5) / Dot1Q(vlan=6) / Dot1Q(vlan=7) / v6),
        frame(MPLS(label=5, s=1) / v4), frame(MPLS(label=5, s=1) / v6),
        frame(MPLS(label=5, s=0) / MPLS(label=6, s=0) / MPLS(label=7, s=1) / v4),
        frame(MPLS(label=5, s=1) / Raw(bytes(4)) / inner), frame(MPLS(label=5, s=1) / inner),
        frame(four(UDP(sport=5, dport=6635) / MPLS(label=5, s=1) / v4)),
        frame(four(Raw(b"\0\0\x01\0") / v4, proto=137)),
    ]  # fmt: skip


def extensions() -> list[Any]:
    tcp = segment()
    return [
        frame(six(IPv6ExtHdrHopByHop() / tcp)), frame(six(IPv6ExtHdrDestOpt() / tcp)),
        frame(six(IPv6ExtHdrRouting(addresses=["fd00::9"]) / tcp)),
        frame(six(IPv6ExtHdrHopByHop() / IPv6ExtHdrDestOpt() / IPv6ExtHdrRouting() / tcp)),
        frame(six(IPv6ExtHdrFragment(offset=0, m=0, id=5) / tcp)),
        frame(six(Raw(b"\x06\x04" + bytes(22)) / tcp, nh=51)),
        frame(four(Raw(b"\x06\x04" + bytes(22)) / tcp, proto=51)),
        frame(six(Raw(b"\x06\x01" + bytes(14)) / tcp, nh=135)),
        frame(six(Raw(b"\x06\x01" + bytes(14)) / tcp, nh=139)),
        frame(six(Raw(b"\x06\x01" + bytes(14)) / tcp, nh=140)),
        frame(six(Raw(b"\x06\xff" + bytes(14)) / tcp, nh=0)),
        frame(six(tcp, nh=59)), frame(six(ESP(spi=1, seq=1, data=bytes(tcp)))),
        frame(four(ESP(spi=1, seq=1, data=bytes(tcp)))),
    ]  # fmt: skip


def errors() -> list[Any]:
    """ICMP errors that quote TCP: tshark shows these as TCP."""
    v4, v6 = four(segment()), six(segment())
    return [
        frame(four(ICMP(type=3, code=1) / v4)), frame(four(ICMP(type=11) / cut(bytes(v4), 28))),
        frame(four(ICMP(type=5) / v4)), frame(four(ICMP(type=8) / Raw(bytes(v4)))),
        frame(six(ICMPv6DestUnreach() / v6)), frame(six(ICMPv6PacketTooBig() / v6)),
    ]  # fmt: skip


def others() -> list[Any]:
    return [
        frame(ARP()), frame(four(UDP(sport=5, dport=53) / Raw(b"x" * 40))),
        frame(four(UDP(sport=9092, dport=9092) / Raw(bytes(segment())))),
        frame(four(ICMP())), frame(four(Raw(bytes(30)), proto=132)),
        frame(four(Raw(bytes(30)), proto=255)), frame(four(Raw(b""), proto=6)),
        Ether(**MAC, type=0x88CC) / Raw(bytes(40)), Ether(**MAC, type=0x0800) / Raw(b""),
        Ether(**MAC, type=0x0100) / Raw(bytes(40)), Ether(**MAC, type=0x05DC) / Raw(b"\xaa" * 40),
        Ether(**MAC, type=0x8863) / Raw(b"\x11\x09\0\0\0\0"),
        Ether(**MAC, type=0x894F) / Raw(bytes(8) + bytes(four(segment()))),
        Ether(**MAC, type=0x8909) / Raw(b"\1\1\0\5\x08\0" + bytes(four(segment()))),
        Ether(**MAC, type=0x88E5) / Raw(bytes(60)),
        Ether(**MAC, type=0x9200) / Raw(b"\0\5\x08\0" + bytes(four(segment()))),
        b"", b"\0", bytes(13), bytes(14), bytes(60), b"\xff" * 60,
    ]  # fmt: skip


def fragments() -> list[Any]:
    big = segment(payload=bytes(range(256)) * 12)
    v4 = [frame(one) for one in fragment(four(big, id=7), 552)]
    v6 = [frame(one) for one in fragment6(six(IPv6ExtHdrFragment(id=9) / big), 600)]
    inner = bytes(frame(four(big)))
    tunnel = four(UDP(sport=5, dport=4789) / VXLAN(vni=7, flags=8) / Raw(inner), id=11)
    lost = [frame(one) for one in fragment(four(big, id=8), 552)]
    headless = [frame(one) for one in fragment(four(big, id=12), 552)]
    tiny = [frame(one) for one in fragment(four(segment(), id=13), 8)]
    udp = [frame(one) for one in fragment(four(UDP(sport=5, dport=53) / Raw(bytes(3000)), id=14))]
    return [
        *v4, *v6, *[frame(one) for one in fragment(tunnel, 552)], *reversed(v4), *lost[:-1],
        *headless[1:], *tiny, *udp, v4[0], v4[0], *v4[1:], *lost[:2], *v6[:1], *v6[2:],
    ]  # fmt: skip


def link_layers() -> Iterator[tuple[str, int, list[bytes]]]:
    """(name, link type, packets) of all link types that tcpdump writes for somebody's network."""
    v4, v6 = bytes(four(segment())), bytes(six(segment()))
    dot11 = b"\x08\x01" + bytes(22) + b"\xaa\xaa\x03\0\0\0\x08\0" + v4
    families = [bytes([family, 0, 0, 0]) + v6 for family in (0x18, 0x1E, 0x1C, 0x0A)]
    first = [b"\2\0\0\0" + v4, b"\0\0\0\2" + v4]
    yield "null", 0, [*first, *families, b"\7\0\0\0" + v4, b"\2\0"]
    yield "loop", 108, [b"\0\0\0\2" + v4, b"\0\0\0\x18" + v6, b"\0\0\0\x1e" + v6]
    ends = [b"\x08\0" + v4, b"\x86\xdd" + v6, b"\x81\0\0\5\x08\0" + v4, b"\0\4" + v4]
    yield "sll", 113, [*(bytes(14) + end for end in ends), bytes(9)]
    yield "sll2", 276, [b"\x08\0" + bytes(18) + v4, b"\x86\xdd" + bytes(18) + v6, bytes(20) + v4]
    for name, number in (("raw", 101), ("raw_12", 12), ("raw_14", 14)):
        yield name, number, [v4, v6, b"\x45", b"", b"\x50" + v4[1:]]
    yield "ipv4", 228, [v4, v6]
    yield "ipv6", 229, [v6, v4]
    ppp = [b"\xff\x03\0\x21" + v4, b"\x21" + v4, b"\0\x57" + v6]
    yield "ppp", 9, [*ppp, b"\xff\x03\xc0\x21" + bytes(9)]
    yield "ppp_hdlc", 50, [b"\xff\x03\0\x21" + v4, b"\xff\x03\0\x57" + v6]
    yield "ppp_direction", 204, [b"\0\xff\x03\0\x21" + v4, b"\1\0\x21" + v4]
    yield "chdlc", 104, [b"\x0f\0\x08\0" + v4, b"\x8f\0\x86\xdd" + v6]
    yield "frame_relay", 107, [b"\x18\x41\x03\xcc" + v4, b"\x18\x41\x03\x8e" + v6]
    yield "wlan", 105, [dot11, b"\x80\0" + bytes(40)]
    yield "radiotap", 127, [b"\0\0\x08\0\0\0\0\0" + dot11]
    yield "prism", 119, [bytes(144) + dot11]
    yield "usb", 189, [bytes(64)]
    yield "usb_mmapped", 220, [bytes(80)]
    yield "bluetooth", 201, [bytes(20)]
    yield "token_ring", 6, [b"\x10\x40" + bytes(12) + b"\xaa\xaa\x03\0\0\0\x08\0" + v4]
    yield "fddi", 10, [b"\x50" + bytes(12) + b"\xaa\xaa\x03\0\0\0\x08\0" + v4]
    yield "atm", 11, [b"\xaa\xaa\x03\0\0\0\x08\0" + v4]
    yield "slip", 8, [bytes(16) + v4]
    yield "pflog", 117, [b"\x3d\x02\0\0" + bytes(57) + v4]
    yield "can", 227, [bytes(16)]
    yield "nflog", 239, [b"\2\0\0\0" + struct.pack("<HH", len(v4) + 4, 9) + v4]
    yield "ipnet", 226, [bytes(24) + v4]
    yield "netlink", 253, [bytes(32)]
    yield "ieee_802_15_4", 195, [bytes(30)]
    yield "juniper", 178, [b"MGC\x80" + bytes(4) + bytes(frame(four(segment())))]
    yield "user0", 147, [v4]
    yield "upper_pdu", 252, [bytes(40)]
    yield "dsa", 284, [bytes(12) + b"\0\0\0\0" + b"\x08\0" + v4]
    yield "mpls", 219, [b"\0\0\x51\xff" + v4]
    yield "ethernet_mpacket", 274, [b"\x55" * 7 + b"\xd5" + bytes(frame(four(segment())))]
    yield "infiniband", 247, [bytes(60)]
    yield "docsis", 143, [bytes(6) + bytes(frame(four(segment())))]
    yield "no_such_link", 65000, [v4]


def pcapng_files() -> Iterator[tuple[str, bytes]]:
    packet, other = bytes(frame(four(segment()))), bytes(frame(six(segment())))
    for name, little in (("little", True), ("big", False)):
        made = Blocks(little)
        names = made.block(4, struct.pack(made.mark + "HH", 1, 8) + b"\x0a\0\0\1hos\0" + bytes(4))
        statistics = made.block(5, struct.pack(made.mark + "III", 0, 0, 5))
        unknown = made.block(0x7FFFFFF1, b"what" * 9)
        blocks = [made.section(), names, made.interface(), made.enhanced(packet), statistics,
                  unknown, made.simple(packet), made.enhanced(other, kind=2),
                  made.interface(101), made.enhanced(packet[14:], interface=1),
                  made.secrets(b"CLIENT_RANDOM 00 11\n")]  # fmt: skip
        yield f"blocks_{name}", b"".join(blocks)
        yield f"empty_{name}", made.section()
        yield f"interface_only_{name}", made.section() + made.interface()
        snapped = made.interface(snap_length=60) + made.simple(packet[:60], len(packet))
        yield f"simple_cut_{name}", made.section() + snapped
        units = [made.interface(resolution=unit) for unit in (0, 3, 6, 9, 0x80, 0x8A, 0x94)]
        timed = [made.enhanced(packet, 10**9 + n, n) for n in range(7)]
        yield f"resolutions_{name}", b"".join([made.section(), *units, *timed])
        yield f"cut_{name}", b"".join(blocks)[:-30]
    one, two = Blocks(True), Blocks(False)
    yield "sections", (
        one.section() + one.interface() + one.enhanced(packet)
        + two.section() + two.interface(101) + two.enhanced(packet[14:]) + two.simple(packet[14:])
        + one.section() + one.interface(105) + one.enhanced(bytes(60))
    )  # fmt: skip
    parts = [one.section(), one.interface()]
    event = struct.pack("<HQQIHI", 1, 1000, 5, 50, 3, 2) + bytes(20)
    for kind, body in (
        (9, b"__REALTIME_TIMESTAMP=1000000\nMESSAGE=hello\n"), (0x0BAD, bytes(4) + b"data"),
        (0x40000BAD, bytes(4)), (0x204, event), (0x216, event), (0x221, event), (7, bytes(8)),
        (0x101, bytes(16)), (0x202, bytes(16)), (0x208, bytes(32)), (0x12345, bytes(16)),
    ):  # fmt: skip
        parts += [one.block(kind, body), one.enhanced(packet)]
    yield "numbered", b"".join(parts)
    yield "interface_7", one.section() + one.interface() + one.enhanced(packet, interface=7)
    yield "no_interface", one.section() + one.simple(packet)


def pcap_files() -> Iterator[tuple[str, bytes]]:
    packet = bytes(frame(four(segment())))
    for little in (True, False):
        for nano in (True, False):
            order, unit = "little" if little else "big", "nano" if nano else "micro"
            yield f"{order}_{unit}", pcap([packet] * 3, little=little, nano=nano)
    yield "no_packets", pcap([])
    whole = pcap([packet] * 3)
    yield "cut_header", whole[: -len(packet) - 7]
    yield "cut_packet", whole[:-7]
    yield "trailing", whole + b"\0"
    yield "snapped", pcap([packet[:size] for size in (14, 34, 40, 47, 48, 54, 60)],
                          lengths=[len(packet)] * 7)  # fmt: skip
    yield "longer_than_said", pcap([packet], lengths=[40])
    yield "zero_length", pcap([b"", packet, b""], lengths=[0, len(packet), 90])
    header = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 3, 0, 0, 65535, 1)
    yield "version_2_3", header + whole[24:]
    header = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 3600, 9, 0, 1)
    yield "time_zone", header + whole[24:]
    header = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 0x24000001)
    yield "fcs", header + whole[24:]
    times = [(5, 1), (4, 999_999), (2**32 - 1, 999_999), (0, 0), (1, 4_000_000_000)]
    yield "times", pcap([packet] * 5, times=times)


def noise() -> list[bytes]:
    """Real packets with random bytes changed."""
    choose = random.Random(7)
    real = [bytes(one) for one in (*tunnels(), *extensions(), *others()) if len(bytes(one)) > 40]
    made = []
    for _ in range(600):
        data = bytearray(choose.choice(real))
        for _ in range(choose.randint(1, 4)):
            data[choose.randrange(12, min(len(data), 90))] = choose.randrange(256)
        made.append(
            bytes(data[: choose.choice((len(data), len(data), choose.randrange(len(data))))])
        )
    return made


def cases() -> Iterator[tuple[str, bytes]]:
    """(name, bytes of a capture file)."""
    for name, packets in (
        ("wrong_headers", wrong_headers()), ("tunnels", tunnels()), ("extensions", extensions()),
        ("errors", errors()), ("others", others()), ("fragments", fragments()),
        ("noise", noise()),
    ):  # fmt: skip
        yield name, pcap([bytes(packet) for packet in packets])
    short = list(lengths())
    yield "lengths", pcap(short)
    yield "lengths_snapped", pcap(short, lengths=[98] * 99 + [118] * (len(short) - 99))
    for name, link_type, packets in link_layers():
        yield f"link_{name}", pcap(packets, link_type=link_type)
    yield from pcapng_files()
    yield from pcap_files()
