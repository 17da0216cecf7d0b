"""A segment of one pair of endpoints, as the oracles of reassembly and of its facts read it."""

from dataclasses import dataclass

from kdissect.capture.segments import FRAGMENT_PART

FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10  # RFC 9293, 3.1


def distance(number: int, other: int) -> int:
    """How far `number` lies after `other`, as signed 32 bits (RFC 1982)."""
    return (number - other + 2**31) % 2**32 - 2**31


@dataclass(frozen=True)
class Segment:
    """payload: what was captured of it. options: of a SYN; None: they were not captured."""

    time_ns: int
    side: int
    flags: int
    seq: int
    ack: int
    ip_id: int
    window: int
    length: int
    payload: bytes = b""
    options: bytes | None = None
    marks: int = 0

    @property
    def is_syn(self) -> bool:
        return bool(self.flags & SYN)

    @property
    def option_size(self) -> int:
        return len(self.options) if self.is_syn and self.options is not None else -1

    @property
    def is_answer(self) -> bool:
        """Whether it shows that its sender got the peer's SYN, or refuses it."""
        return not self.is_syn or bool(self.flags & ACK)

    @property
    def acknowledges(self) -> bool:
        return bool(self.flags & ACK) and not self.flags & RST

    @property
    def first(self) -> int:
        """Sequence number of the first payload byte."""
        return (self.seq + self.is_syn) % 2**32

    @property
    def counted(self) -> int:
        """0 for a part of a segment that is counted already."""
        return 0 if self.marks & FRAGMENT_PART else 1
