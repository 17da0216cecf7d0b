"""Captures whose packets were cut into IP fragments, as routers and tunnels do."""

import ipaddress
import random
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace

from tests.builders.captures import Packet
from tests.builders.packets import ipv4, vxlan

Fragments = list[Packet]


def ipv4_fragments(packet: Packet, size: int) -> Fragments:
    """The packet in pieces of up to `size` bytes of IP payload (a multiple of 8)."""
    header = 14 + (packet.data[14] & 15) * 4
    body = packet.data[header:]
    if len(body) <= size:
        return [packet]
    made = []
    for at in range(0, len(body), size):
        piece = body[at : at + size]
        more = 0x2000 if at + size < len(body) else 0
        start = bytearray(packet.data[:header])
        struct.pack_into(">H", start, 16, header - 14 + len(piece))
        struct.pack_into(">H", start, 20, more | at // 8)
        data = bytes(start) + piece
        made.append(Packet(packet.time_ns, data, len(data)))
    return made


def to_ipv6(packet: Packet) -> Packet:
    """The same TCP segment over IPv6."""
    sender, receiver = (
        ipaddress.IPv6Address("fd00::").packed[:12] + packet.data[at : at + 4] for at in (26, 30)
    )
    body = packet.data[packet.tcp_pos :]
    start = struct.pack(">IHBB", 6 << 28, len(body), 6, 64) + sender + receiver
    data = packet.data[:12] + b"\x86\xdd" + start + body
    return Packet(packet.time_ns, data, len(data))


def ipv6_fragments(packet: Packet, size: int, identification: int) -> Fragments:
    body = packet.data[54:]
    if len(body) <= size:
        return [packet]
    made = []
    for at in range(0, len(body), size):
        piece = body[at : at + size]
        more = int(at + size < len(body))
        start = bytearray(packet.data[:54])
        struct.pack_into(">HB", start, 18, 8 + len(piece), 44)
        extension = struct.pack(">BBHI", 6, 0, at | more, identification)
        data = bytes(start) + extension + piece
        made.append(Packet(packet.time_ns, data, len(data)))
    return made


def in_vxlan(packet: Packet, identification: int) -> Packet:
    """The packet inside of VXLAN, whose outer packet may be fragmented."""
    outer = {"addresses": ("192.0.2.1", "192.0.2.2"), "protocol": 17, "ip_id": identification}
    data = packet.data[:14] + ipv4(vxlan(packet.data), **outer, fragment=0)
    return Packet(packet.time_ns, data, len(data))


def fragmented(
    packets: Iterable[Packet], cut: Callable[[int, Packet], Fragments]
) -> list[Fragments]:
    return [cut(number, packet) for number, packet in enumerate(packets)]


def shuffled(datagrams: Iterable[Fragments], seed: int) -> list[Fragments]:
    choose = random.Random(seed)
    return [choose.sample(fragments, len(fragments)) for fragments in datagrams]


def doubled(datagrams: Iterable[Fragments], seed: int) -> list[Fragments]:
    """Every fragment twice, as an interface and its bridge see it."""
    del seed
    return [
        [copy for one in fragments for copy in (one, replace(one, time_ns=one.time_ns + 1000))]
        if len(fragments) > 1
        else fragments
        for fragments in datagrams
    ]
