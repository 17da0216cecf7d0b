"""An independent look at the packets of a capture, with dpkt: the oracle of the accounts."""

import functools
import gzip
import ipaddress
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import dpkt

from tests.oracles.packets import read_capture

NS = 1_000_000_000
FIN, SYN, RST, ACK = dpkt.tcp.TH_FIN, dpkt.tcp.TH_SYN, dpkt.tcp.TH_RST, dpkt.tcp.TH_ACK
COPY_WINDOW_NS = NS // 100
LAYERS = {1: dpkt.ethernet.Ethernet, 113: dpkt.sll.SLL, 276: dpkt.sll2.SLL2}


@dataclass(frozen=True)
class TcpPacket:
    """A TCP packet; `number` is Wireshark's frame.number."""

    number: int
    time_ns: int
    source: tuple[str, int]
    destination: tuple[str, int]
    ip_id: int | bytes  # IPv6 has none: TCP's options, which have its timestamps
    seq: int
    ack: int
    flags: int
    payload: bytes


@functools.lru_cache(maxsize=2)
def tcp_packets(path: Path) -> list[TcpPacket]:
    """All of a capture, which may be gzipped."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    found = []
    for packet in read_capture(data).packets:
        ip = LAYERS[packet.link_type](
            data[packet.data_pos : packet.data_pos + packet.captured]
        ).data
        tcp = getattr(ip, "data", None)
        if isinstance(tcp, dpkt.tcp.TCP):
            found.append(
                TcpPacket(
                    packet.number,
                    packet.time_ns,
                    (str(ipaddress.ip_address(ip.src)), tcp.sport),
                    (str(ipaddress.ip_address(ip.dst)), tcp.dport),
                    getattr(ip, "id", tcp.opts),
                    tcp.seq,
                    tcp.ack,
                    tcp.flags,
                    bytes(tcp.data),
                )
            )
    return found


def copies(path: Path) -> int:
    """The count of second copies: packets with equal contents within 10 ms."""
    last_seen: dict[tuple[object, ...], int] = {}
    count = 0
    for packet in tcp_packets(path):
        told = (
            *(packet.source, packet.destination, packet.ip_id),
            *(packet.seq, packet.ack, packet.flags, packet.payload),
        )
        count += packet.time_ns - last_seen.get(told, -NS) <= COPY_WINDOW_NS
        last_seen[told] = packet.time_ns
    return count


@dataclass
class Stream:
    """One direction of a connection: its payload, put in place by sequence number."""

    first_seq: int | None = None  # of the first payload byte
    data: bytearray = field(default_factory=bytearray)
    times_ns: list[int] = field(default_factory=list)  # of all its packets
    has_syn: bool = False
    end: tuple[int, int] | None = None  # packet number and flags of the first FIN or RST

    def pos_of(self, packet: TcpPacket) -> int:
        """Stream position of its payload; negative for a keep-alive probe of an idle stream."""
        assert self.first_seq is not None
        distance = (packet.seq - self.first_seq) % 2**32
        return distance if distance < 2**31 else distance - 2**32

    def add(self, packet: TcpPacket) -> None:
        self.times_ns.append(packet.time_ns)
        if packet.flags & (FIN | RST) and self.end is None:
            self.end = packet.number, packet.flags
        if packet.flags & SYN:
            self.has_syn = True
            self.first_seq = (packet.seq + 1) % 2**32
        elif packet.payload and self.first_seq is not None:
            pos = self.pos_of(packet)
            if pos > len(self.data):  # its packets are swapped: a later one fills this
                self.data.extend(bytes(pos - len(self.data)))
            if pos >= 0:
                self.data[pos : pos + len(packet.payload)] = packet.payload


Endpoint = tuple[str, int]
Connections = dict[tuple[Endpoint, Endpoint], list[tuple[Stream, Stream]]]


def streams(path: Path) -> Connections:
    """(client, broker) -> requests and responses of each connection between them, in order."""
    found: Connections = defaultdict(list)
    for packet in tcp_packets(path):
        forth, back = (packet.source, packet.destination), (packet.destination, packet.source)
        if packet.flags & SYN and not packet.flags & ACK:
            found[forth].append((Stream(), Stream()))
        if forth in found:
            found[forth][-1][0].add(packet)
        elif back in found:
            found[back][-1][1].add(packet)
    return found
