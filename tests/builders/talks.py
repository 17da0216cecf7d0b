"""TCP connections as packets of a capture."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import SegmentBatch
from kdissect.kafka.assembly import Assembly, PairStatus
from kdissect.kafka.options import StreamOptions
from tests.builders.assembling import assemble
from tests.builders.captures import Packet, pcap_bytes
from tests.builders.frames import request, response
from tests.builders.packets import ethernet, ipv4, tcp
from tests.builders.segments import batch_of_capture

CLIENT, BROKER = 0, 1
ADDRESSES = "10.0.0.1", "10.0.0.2"
FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16


class Talk:
    """The packets of a connection, as both ends send them. Side 0 is the client.

    start: the time of the first packet, in microseconds; the others are `step` apart.
    """

    def __init__(
        self, port: int | tuple[int, int] = 40000, start: int = 1000, step: int = 100,
        opened: bool = True,
    ) -> None:  # fmt: skip
        self.ports = (port, 9092) if isinstance(port, int) else port
        self.time, self.step = start, step
        self.next = [5000, 9_000_000]  # sequence numbers
        self.packets: list[Packet] = []
        if opened:
            self.open()

    def put(self, side: int, flags: int, data: bytes = b"", keep: bool = True) -> None:
        """Send one segment. keep: whether the capture has it."""
        segment = tcp(
            data,
            ports=(self.ports[side], self.ports[1 - side]),
            seq=self.next[side] % 2**32,
            ack=self.next[1 - side] % 2**32 if flags & ACK else 0,
            flags=flags,
        )
        addresses = (ADDRESSES[side], ADDRESSES[1 - side])
        packet = ethernet(ipv4(segment, addresses=addresses, ip_id=len(self.packets) + 1 & 0xFFFF))
        if keep:
            self.packets.append(Packet(self.time * 1000, packet, len(packet)))
        self.time += self.step
        self.next[side] += len(data) + (flags & (SYN | FIN) != 0)

    def send(self, side: int, data: bytes, size: int = 1400, keep: bool = True) -> None:
        """Send bytes in segments of at most `size`."""
        for at in range(0, len(data), size):
            self.put(side, PSH | ACK, data[at : at + size], keep)

    def ask(self, data: bytes, size: int = 1400, keep: bool = True) -> None:
        self.send(0, data, size, keep)

    def answer(self, data: bytes, size: int = 1400, keep: bool = True) -> None:
        self.send(1, data, size, keep)

    def exchange(self, number: int, keep: bool = True) -> None:
        """A request and its response. keep: whether the capture has the response."""
        self.ask(request(number))
        self.answer(response(number), keep=keep)

    def acknowledge(self, side: int) -> None:
        self.put(side, ACK)

    def open(self) -> None:
        self.put(0, SYN)
        self.put(1, SYN | ACK)

    def close(self, flags: int = FIN | ACK) -> None:
        for side in (0, 1):
            self.put(side, flags)


@dataclass(frozen=True)
class Gap:
    """Bytes that were sent and not captured."""

    size: int


class Playbook(Talk):
    """A talk as a transcript: `Playbook().syn() >> request(7) << response(7) >> Gap(100)`.

    `>>` is what the client sends, `<<` what the broker sends: bytes, which are one segment, flags
    or a gap; time passes by a millisecond a step.
    """

    def __init__(self, ports: tuple[int, int] = (50000, 9092), isn: tuple[int, int] = (1000, 7000)):
        super().__init__(ports, 1_700_000_000_000_000, 1000, opened=False)
        self.first = [isn[0] + 1, isn[1] + 1]  # sequence numbers of the streams' first bytes
        self.next = list(self.first)
        self.options = StreamOptions()

    def syn(self) -> "Playbook":
        self.next = [first - 1 for first in self.first]
        self.put(CLIENT, SYN)
        self.put(BROKER, SYN | ACK)
        self.acknowledge(CLIENT)
        return self

    def segment(self, side: int, data: bytes, pos: int, flags: int = ACK | PSH) -> "Playbook":
        """A segment whose first byte is the stream's byte `pos`; what comes next stays."""
        following, self.next[side] = self.next[side], self.first[side] + pos
        self.put(side, flags, data)
        self.next[side] = following
        return self

    def _step(self, side: int, what: bytes | Gap | int) -> "Playbook":
        if isinstance(what, Gap):
            self.next[side] += what.size
        elif isinstance(what, int):
            self.put(side, what)
        else:
            self.put(side, ACK | PSH, what)
        return self

    def __rshift__(self, what: bytes | Gap | int) -> "Playbook":
        return self._step(CLIENT, what)

    def __lshift__(self, what: bytes | Gap | int) -> "Playbook":
        return self._step(BROKER, what)

    def batch(self) -> tuple[SegmentBatch, Sources]:
        """The segments, and the capture in memory."""
        return batch_of_capture(pcap_bytes(self.packets))

    def run(self, *key_logs: bytes) -> Assembly:
        return assemble(*self.batch(), self.options, key_logs)

    def exchanges(self) -> list[tuple[int, str]]:
        """(correlation id, status) of each exchange, in order."""
        return [
            (int(row["correlation_id"]), PairStatus(int(row["status"])).name.lower())
            for row in self.run().exchanges
        ]

    def shuffled(self, seed: int, reach: int) -> "Playbook":
        """The same packets, each delivered up to `reach` places later."""
        order, packets = random.Random(seed), self.packets
        places = sorted(range(len(packets)), key=lambda number: number + order.uniform(0, reach))
        self.packets = [
            replace(packets[place], time_ns=packet.time_ns)
            for place, packet in zip(places, packets, strict=True)
        ]
        return self


def conversation(
    sent: Iterable[tuple[int, bytes]],
    ports: tuple[int, int] = (50000, 9092),
    segment_size: int = 1400,
) -> list[Packet]:
    """A whole connection that carries `sent`: (side, bytes), a packet each millisecond."""
    talk = Talk(ports, 1_700_000_000_000_000, 1000)
    talk.acknowledge(0)
    for side, data in sent:
        talk.send(side, data, segment_size)
    talk.close()
    return talk.packets


def proxied(header: bytes) -> list[Packet]:
    """A connection that begins with a PROXY protocol header, in two segments."""
    talk = Talk()
    talk.ask(header[:9])
    talk.ask(header[9:])
    for number in range(4):
        talk.ask(request(number, body=bytes(2000)))
        talk.answer(response(number))
    talk.close()
    return talk.packets
