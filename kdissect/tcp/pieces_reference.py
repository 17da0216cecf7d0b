"""A stream as plain Python: the definition of what `pieces.py` reads.

A list of bytes, None where one is missing, and the places where pieces begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class PlainStream:
    """data: bytes by position, None missing; starts: where pieces begin; times: of each byte."""

    data: Sequence[int | None]
    starts: set[int]
    times: Sequence[int]
    has_origin: bool
    is_resumed: bool = False  # these and the next: see the bits of `has_origin` in `framing.py`
    is_in_tokens: bool = False
    has_asked: bool = False
    last_id: int | None = None
    was_young: bool = False
    end: int = field(init=False)

    def __post_init__(self) -> None:
        there = [at for at, byte in enumerate(self.data) if byte is not None]
        self.end = there[-1] + 1 if there else 0

    def byte(self, pos: int) -> int | None:
        return self.data[pos] if 0 <= pos < self.end else None

    def number(self, pos: int, count: int) -> int | None:
        value = 0
        for at in range(pos, pos + count):
            byte = self.byte(at)
            if byte is None:
                return None
            value = value << 8 | byte
        return value

    def bytes_at(self, pos: int, count: int) -> bytes | None:
        there = [self.byte(at) for at in range(pos, pos + count)]
        return None if None in there else bytes(byte for byte in there if byte is not None)

    def is_piece(self, pos: int, end: int) -> bool:
        """Whether the bytes [pos, end) are one piece, all of it."""
        inside = self.data[pos:end]
        return (
            pos in self.starts
            and len(inside) == end - pos
            and None not in inside
            and not any(at in self.starts for at in range(pos + 1, end))
            and (self.byte(end) is None or end in self.starts)
        )

    def next_byte(self, pos: int) -> int | None:
        """The first position at or behind `pos` that was captured."""
        return next((at for at in range(pos, self.end) if self.data[at] is not None), None)
