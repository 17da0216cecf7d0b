"""TCP connections as packets of a capture."""

from collections.abc import Iterable

from tests.builders.captures import Packet
from tests.builders.frames import request, response
from tests.builders.packets import ethernet, ipv4, tcp

CLIENT, BROKER = "10.0.0.1", "10.0.0.2"
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
            self.put(0, SYN)
            self.put(1, SYN | ACK)

    def put(self, side: int, flags: int, data: bytes = b"", keep: bool = True) -> None:
        """Send one segment. keep: whether the capture has it."""
        segment = tcp(
            data,
            ports=(self.ports[side], self.ports[1 - side]),
            seq=self.next[side] % 2**32,
            ack=self.next[1 - side] % 2**32 if flags & ACK else 0,
            flags=flags,
        )
        addresses = (BROKER, CLIENT) if side else (CLIENT, BROKER)
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

    def acknowledge(self, side: int) -> None:
        self.put(side, ACK)

    def close(self, flags: int = FIN | ACK) -> None:
        for side in (0, 1):
            self.put(side, flags)


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
