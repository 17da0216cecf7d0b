"""From link layer to TCP: every layer by hand, and random chains of layers against the oracle."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.capture import link_layers
from kdissect.capture.ip_fragments import Head, head_of
from kdissect.capture.segments import FRAGMENT_PART, MAPPED, NO_HEADER
from tests.builders.captures import pcap
from tests.builders.packets import ethernet, geneve, ipv4, ipv6, tcp, udp, vxlan
from tests.capture.scanned import ignored_of, read, segments_of, write
from tests.oracles.link_layers import Ignored, Segment, find_tcp, of_options, scan_capture

SEGMENT = tcp(b"payload", options=bytes([1, 1, 1, 0]), seq=2**32 - 1, ack=7, flags=0x19)
IP4, IP6 = ipv4(SEGMENT), ipv6(SEGMENT)
IN_ETHERNET = ethernet(IP4)


def gre(content: bytes, ethertype: int, flags: int = 0, middle: bytes = b"") -> bytes:
    return ipv4(struct.pack(">HH", flags, ethertype) + middle + content, protocol=47)


def extension(following: int, content: bytes, units: int = 0) -> bytes:
    return bytes([following, units]) + bytes(6 + 8 * units) + content


CHAINS = {
    "ethernet": (1, IN_ETHERNET),
    "ethernet padded": (1, IN_ETHERNET + bytes(9)),
    "vlan": (1, ethernet(IP4, tags=[0x8100])),
    "qinq": (1, ethernet(IP4, tags=[0x88A8, 0x8100])),
    "old qinq": (1, ethernet(IP4, tags=[0x9100, 0x9100, 0x8100])),
    "sll": (113, bytes(14) + b"\x08\x00" + IP4),
    "sll vlan": (113, bytes(14) + b"\x81\x00\x00\x07\x08\x00" + IP4),
    "sll2": (276, b"\x08\x00" + bytes(18) + IP4),
    "null little": (0, b"\x02\0\0\0" + IP4),
    "null big": (0, b"\0\0\0\x02" + IP4),
    "null ipv6": (0, b"\x1e\0\0\0" + IP6),
    "loop": (108, b"\0\0\0\x18" + IP6),
    "raw": (101, IP4),
    "raw ipv6": (12, IP6),
    "ipv4": (228, IP4),
    "ipv6": (229, IP6),
    "options": (101, ipv4(SEGMENT, options=bytes(40))),
    "hop by hop": (101, ipv6(extension(6, SEGMENT), following=0)),
    "extensions": (
        101,
        ipv6(extension(43, extension(60, extension(6, SEGMENT, 2)), 1), following=0),
    ),
    "whole fragment": (101, ipv6(extension(6, SEGMENT), following=44)),
    "authentication": (101, ipv6(bytes([6, 4]) + bytes(22) + SEGMENT, following=51)),
    "vxlan": (1, ethernet(ipv4(vxlan(IN_ETHERNET), protocol=17))),
    "vxlan over ipv6": (1, ethernet(ipv6(vxlan(IN_ETHERNET), following=17), 0x86DD)),
    "geneve": (1, ethernet(ipv4(geneve(IN_ETHERNET, options=bytes(8)), protocol=17))),
    "geneve ip": (1, ethernet(ipv4(geneve(IP4, ethertype=0x0800), protocol=17))),
    "gre": (101, gre(IP4, 0x0800)),
    "gre key": (101, gre(IP6, 0x86DD, 0x2000, bytes(4))),
    "gre all": (101, gre(IN_ETHERNET, 0x6558, 0xB000, bytes(12))),
    "erspan 1": (101, gre(IN_ETHERNET, 0x88BE)),
    "erspan 2": (101, gre(IN_ETHERNET, 0x88BE, 0x1000, bytes(12))),
    "erspan 3": (101, gre(IN_ETHERNET, 0x22EB, 0x1000, bytes(16))),
    "erspan 3 platform": (101, gre(IN_ETHERNET, 0x22EB, 0x1000, bytes(15) + b"\1" + bytes(8))),
    "ipip": (101, ipv4(ipv4(IP4, protocol=4), protocol=4)),
    "ip6 in ip": (101, ipv4(IP6, protocol=41)),
    "ip in ip6": (101, ipv6(IP4, following=4)),
    "mpls": (1, ethernet(b"\0\0\0\0\0\0\1\1" + IP4, 0x8847)),
    "mpls labels": (1, ethernet(bytes(8) + b"\0\0\1\1" + IP6, 0x8848)),
    "mpls pseudowire": (1, ethernet(b"\0\0\1\1" + bytes(4) + IN_ETHERNET, 0x8847)),
    "mpls in ip": (101, ipv4(b"\0\0\1\1" + IP4, protocol=137)),
    "ah over ipv4": (101, ipv4(bytes([6, 4]) + bytes(22) + SEGMENT, protocol=51)),
    "mpls in udp": (101, ipv4(udp(b"\0\0\1\1" + IP4, 6635), protocol=17)),
    "mpls ethernet": (1, ethernet(b"\0\0\1\1" + IN_ETHERNET, 0x8847)),
    "ipv6 where ipv4 was said": (228, IP6),
}


@pytest.mark.parametrize("name", CHAINS)
def test_layers_lead_to_the_innermost_tcp_payload(tmp_path: Path, name: str) -> None:
    """Each chain of layers leads to the TCP header and payload of the innermost addresses."""
    link_type, packet = CHAINS[name]
    data = pcap([packet], link_type=link_type)
    _, _, results, _ = read(write(tmp_path, data))
    segments = segments_of(results)
    assert ignored_of(results) == {}
    (segment,) = segments
    assert data[segment.pos : segment.pos + segment.captured] == b"payload"
    assert (segment.seq, segment.ack, segment.flags, segment.window) == (2**32 - 1, 7, 0x19, 512)
    assert (segment.length, segment.packet, segment.side) == (7, 1, 0)
    assert segment.endpoints[4] == (43 if "vxlan" in name or "geneve" in name else 0)
    # The innermost addresses count.
    is_v6 = packet.rfind(bytes.fromhex("fd00")) > packet.rfind(bytes([10, 0, 0, 1]))
    assert segment.ip_id == (of_options(SEGMENT[20:-7]) if is_v6 else 7)
    a, a_port, b, b_port, _ = segment.endpoints
    assert sorted([a_port, b_port]) == [9092, 40000]
    assert (a, a_port) <= (b, b_port)
    assert (a[:12] == MAPPED) == (not is_v6)
    assert segments == scan_capture(data)[0]


@pytest.mark.parametrize(
    ("link_type", "packet", "reason"),
    [
        (1, ethernet(bytes(28), 0x0806), "arp"),
        (1, ethernet(bytes(28), 0x88CC), "not_ip"),
        (1, ethernet(bytes(40), 40), "not_ip"),
        (0, b"\x07\0\0\0" + IP4, "not_ip"),
        (1, bytes(12) + b"\0\x40\xaa\xaa\3\0\0\0\x08\0" + IP4, "not_ip"),
        (101, ipv4(SEGMENT, fragment=0x2000), "ip_fragment"),
        (101, ipv4(SEGMENT, fragment=3), "ip_fragment"),
        (101, ipv6(b"\6\0\0\1" + bytes(4) + SEGMENT, following=44), "ip_fragment"),
        (101, ipv4(udp(b"x", 53), protocol=17), "udp"),
        (101, ipv4(bytes(8), protocol=1), "icmp"),
        (101, ipv6(bytes(8), following=58), "icmp6"),
        (101, ipv4(bytes(8), protocol=132), "sctp"),
        (101, ipv4(bytes(8), protocol=200), "ip_protocol_200"),
        (101, b"\x43" + IP4[1:], "ip_malformed"),
        (101, b"\x53" + IP4[1:], "ip_malformed"),
        (101, ipv4(SEGMENT, total=19), "ip_malformed"),
        (101, b"", "ip_malformed"),
        (101, ipv4(SEGMENT[:3]), "tcp_malformed"),
        (101, ipv4(bytes(3), protocol=47), "tunnel_malformed"),
        (101, gre(IP4, 0x0800, 1), "tunnel_unknown"),
        (105, bytes(60), "unsupported_link_type_105"),
        (65535, b"", "unsupported_link_type_65535"),
    ],
)
def test_ignored_packets_have_a_reason(
    tmp_path: Path, link_type: int, packet: bytes, reason: str
) -> None:
    """Packets without TCP are counted by reason, as the oracle counts them."""
    data = pcap([packet], link_type=link_type)
    _, _, results, _ = read(write(tmp_path, data))
    assert ignored_of(results) == {reason: 1} == scan_capture(data)[1]
    assert results[0].tcp_packet_count == 0


def one(folder: Path, packet: bytes, length: int, link_type: int = 1) -> Segment:
    data = pcap([packet], lengths=[length], link_type=link_type)
    _, _, results, _ = read(write(folder, data))
    assert segments_of(results) == scan_capture(data)[0]
    cut = results[0].cut_segments.tolist()
    (segment,) = segments_of(results)
    assert cut == ([0] if segment.captured < segment.length else [])
    return segment


def test_snap_length_cuts_payload_but_not_its_length(tmp_path: Path) -> None:
    """The TCP payload length comes from the IP header, not from the captured bytes."""
    size = len(IN_ETHERNET)
    segment = one(tmp_path, IN_ETHERNET[:-4], size)
    assert (segment.captured, segment.length) == (3, 7)
    segment = one(tmp_path, IN_ETHERNET[:-7], size)
    assert (segment.captured, segment.length) == (0, 7)
    segment = one(tmp_path, IN_ETHERNET[:-9], size)  # in TCP's options
    assert (segment.captured, segment.length) == (0, 7)
    segment = one(tmp_path, IN_ETHERNET[: 34 + 16], size)  # up to the window
    assert (segment.captured, segment.length, segment.flags, segment.window) == (0, 7, 0x19, 512)
    for cut in (34 + 15, 34 + 4):  # a packet of known endpoints, no more
        segment = one(tmp_path, IN_ETHERNET[:cut], size)
        assert segment[3:7] == (0, 0, 0, 0)
        assert (segment.flags, segment.ip_id, segment.marks) == (0, 7, NO_HEADER)
    data = pcap([IN_ETHERNET[: 34 + 3]], lengths=[size])
    info, _, results, _ = read(write(tmp_path, data))
    assert ignored_of(results) == {"headers_cut": 1}
    assert info.truncated_packet_count == 1


def test_a_tcp_header_that_makes_no_sense_tells_the_endpoints(tmp_path: Path) -> None:
    """A cut or impossible TCP header gives addresses and ports only."""
    for packet in (
        ipv4(SEGMENT[:12] + b"\x40" + SEGMENT[13:]), ipv4(SEGMENT[:12] + b"\xf0" + SEGMENT[13:]),
        ipv4(SEGMENT[:13]), ipv4(SEGMENT[:19]),
    ):  # fmt: skip
        segment = one(tmp_path, packet, len(packet), 101)
        assert (segment.ip_id, segment.marks) == (7, NO_HEADER)
        assert (segment.length, segment.flags) == (0, 0)


@pytest.mark.parametrize("layer", [ipv6, lambda data: ipv4(data, ip_id=0)])
def test_options_stand_in_for_an_identification(
    tmp_path: Path, layer: Callable[[bytes], bytes]
) -> None:
    """IPv6 has none, and IPv4 may leave it 0: timestamps or SACK blocks tell packets apart."""

    def found(value: int, edge: int) -> int:
        options = b"\1\1\x08\x0a" + struct.pack(">II", value, 9)
        options += b"\1\1\5\x0a" + struct.pack(">II", 1000, edge)
        packet = layer(tcp(b"x", options=options))
        return one(tmp_path, packet, len(packet), 101).ip_id

    assert found(7, 2000) == found(7, 2000) != found(8, 2000) != found(7, 3000) != found(7, 2000)


def test_ip_length_zero_means_all_that_was_sent(tmp_path: Path) -> None:
    """Segmentation offload leaves the IP length 0: the packet's length counts."""
    big = tcp(bytes(70_000))
    segment = one(tmp_path, ipv4(big, total=0), len(big) + 20, 101)
    assert (segment.captured, segment.length) == (70_000, 70_000)
    segment = one(tmp_path, ipv6(big, length=0)[:-10], len(big) + 40, 101)
    assert (segment.captured, segment.length) == (69_990, 70_000)


def test_sides_follow_addresses_then_ports(tmp_path: Path) -> None:
    """The lower address, then the lower port, is side A, in both directions."""
    pairs = [
        ("10.0.0.2", 5, "10.0.0.10", 4), ("10.0.0.1", 5, "10.0.0.1", 4),
        ("10.0.0.1", 4, "10.0.0.1", 4), ("9.255.255.255", 4, "10.0.0.1", 4),
        ("10.0.0.1", 256, "10.0.0.1", 255),
    ]  # fmt: skip
    packets = []
    for a, a_port, b, b_port in pairs:
        packets.append(ipv4(tcp(ports=(a_port, b_port)), addresses=(a, b)))
        packets.append(ipv4(tcp(ports=(b_port, a_port)), addresses=(b, a)))
    data = pcap(packets, link_type=101)
    _, _, results, _ = read(write(tmp_path, data))
    assert len(results[0].batch.endpoints) == len(pairs)
    sides = [segment.side for segment in segments_of(results)]
    assert sides == [0, 1, 1, 0, 0, 0, 0, 1, 1, 0]
    assert segments_of(results) == scan_capture(data)[0]


def test_many_endpoints_grow_the_table(tmp_path: Path) -> None:
    """3,000 connections in one split have one endpoint row each."""
    packets = [
        ipv4(tcp(ports=(n, 9092)), addresses=(f"10.0.{n >> 8}.{n & 255}", "10.1.0.1"))
        for n in range(3000)
    ]
    data = pcap(packets * 2, link_type=101)
    _, _, results, _ = read(write(tmp_path, data))
    assert len(results[0].batch.endpoints) == 3000
    assert segments_of(results) == scan_capture(data)[0]


def test_deep_nesting_is_linear(tmp_path: Path) -> None:
    """Sixty thousand tags, labels and a thousand IP headers end at TCP."""
    tags = ethernet(IP4, tags=[0x8100] * 60_000)
    labels = ethernet(bytes(200_000) + b"\0\0\1\1" + IP4, 0x8847)
    inner = IP4
    for _ in range(1000):
        inner = ipv4(inner, protocol=4)
    data = pcap([tags, labels, ethernet(inner)])
    _, _, results, _ = read(write(tmp_path, data))
    assert results[0].tcp_packet_count == 3


@given(st.data())
def test_damaged_layers_read_like_the_oracle(tmp_path: Path, data: st.DataObject) -> None:
    """Changed and cut packets give the segments and reasons of the oracle."""
    link_type, packet = data.draw(st.sampled_from(list(CHAINS.values())))
    made = bytearray(packet)
    for _ in range(data.draw(st.integers(0, 3))):
        made[data.draw(st.integers(0, len(made) - 1))] = data.draw(st.integers(0, 255))
    made = made[: data.draw(st.integers(0, len(made)) | st.just(len(made)))]
    length = data.draw(st.sampled_from([0, len(made), len(packet), 2**31, 2**32 - 1]))
    capture = pcap([bytes(made)], lengths=[length], link_type=link_type)
    _, _, results, _ = read(write(tmp_path, capture))
    # The oracle joins no fragments: it ignores the packet, and so does the scan, which takes
    # the header and the bytes of a first fragment all the same.
    found = [row for row in segments_of(results) if not row.marks & FRAGMENT_PART]
    assert (found, ignored_of(results)) == scan_capture(capture)


def by_oracle(packet: bytes, wire_end: int) -> Head | None:
    try:
        at = find_tcp(packet, wire_end, link_layers.RAW)
    except Ignored:
        return None
    if not at.tcp_header:
        return None
    return Head(packet, 0, at.pos, at.tcp_header, at.wire_end, at.addresses, at.network, at.ip_id)


@given(st.data())
def test_heads_of_joined_fragments_read_like_the_oracle(data: st.DataObject) -> None:
    """The header of a joined datagram is read as the oracle reads it."""
    chains = [packet for link_type, packet in CHAINS.values() if link_type in (101, 12)]
    packet = data.draw(st.sampled_from(chains))
    assert head_of(packet, 0, len(packet)) == by_oracle(packet, len(packet)) is not None
    made = bytearray(packet)
    for _ in range(data.draw(st.integers(0, 3))):
        made[data.draw(st.integers(0, len(made) - 1))] = data.draw(st.integers(0, 255))
    made = made[: data.draw(st.integers(0, len(made)) | st.just(len(made)))]
    wire_end = data.draw(st.sampled_from([0, len(made), len(packet), 65555]))
    assert head_of(bytes(made), 0, wire_end) == by_oracle(bytes(made), wire_end)
