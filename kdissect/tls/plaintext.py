"""Decrypted records of TLS connections, and their positions in the TCP streams."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kdissect.arrays import Rows
from kdissect.capture.scratch import Scratch, Written
from kdissect.tls.handshake import TlsFacts
from kdissect.tls.session import GENERATION_MAX, RecordPoint, Session

# A decrypted record of application data. pos: in the decrypted stream; tcp_pos: that of its first
# byte of ciphertext in the TCP stream; record_start, record_end: there too, header included.
OPENED = np.dtype(
    [
        ("pos", "<i8"),
        ("length", "<i8"),
        ("spool_pos", "<i8"),
        ("tcp_pos", "<i8"),
        ("first_segment", "<i8"),
        ("last_segment", "<i8"),
        ("record_start", "<i8"),
        ("record_end", "<i8"),
        ("number", "<i8"),
        ("generation", "<i8"),
    ]
)
CLOSED_MAX = 256 << 10  # bytes after the last opened record that make a stream unreadable


@dataclass(slots=True)
class OpenedStream:
    """The decrypted records of a stream. table: OPENED[n]; lost: (pos, bytes, segment) runs.

    start, after: TCP position and point of plaintext position 0, and of the one after the last
    record; None if it is not known which keys apply there. closed_byte_count: captured bytes
    after the last opened record.
    """

    table: Rows
    lost: list[tuple[int, int, int]]
    start: tuple[int, RecordPoint] | None = None
    after: tuple[int, RecordPoint] | None = None
    closed_byte_count: int = 0

    @property
    def lost_byte_count(self) -> int:
        return sum(count for _, count, _ in self.lost)

    @property
    def end(self) -> int:
        """The position after the last decrypted byte."""
        return int(self.table["pos"][-1] + self.table["length"][-1]) if len(self.table) else 0

    @property
    def can_resume(self) -> bool:
        """Return whether `point` gives a point for each position, from which the rest can be
        decrypted."""
        if self.start is None or self.after is None or self.closed_byte_count > CLOSED_MAX:
            return False
        return self.start[1].generation >= 0 and self.after[1].generation <= GENERATION_MAX

    def point(self, pos: int) -> tuple[int, RecordPoint]:
        """TCP position and point of the record with a plaintext position.

        For a position between two records it is the end of the first, so that the next run reads
        the lost ones again.
        """
        assert self.start is not None
        assert self.after is not None
        if pos >= self.end:
            return self.after
        index = int(np.searchsorted(self.table["pos"], pos, "right")) - 1
        if index < 0:
            return self.start
        row = self.table[index]
        number, generation = int(row["number"]), int(row["generation"])
        inside, start = pos - int(row["pos"]), int(row["record_start"])
        if inside >= row["length"]:
            return int(row["record_end"]), RecordPoint(number + 1, generation)
        return start, RecordPoint(number, generation, int(row["tcp_pos"]) + inside - start)

    def tcp_pos(self, pos: int) -> int:
        """The TCP position of a plaintext position; `pos` itself if no record begins with it."""
        index = int(np.searchsorted(self.table["pos"], pos))
        is_there = index < len(self.table) and self.table["pos"][index] == pos
        return int(self.table["tcp_pos"][index]) if is_there else pos

    def settled(self, tcp_pos: int) -> int:
        """The position up to which all records end before `tcp_pos`."""
        count = int(np.searchsorted(self.table["record_end"], tcp_pos, "right"))
        return OpenedStream(self.table[:count], []).end


@dataclass(slots=True)
class TlsConnections:
    """Facts about the TLS connections of a batch; keys are rows of the connections.

    hello_side: the side that sent the ClientHello.
    opened: both streams, by side, of connections with keys.
    sessions: facts about the keys of these connections.
    failed: why other connections, or one side, have no keys, if there is a key log.
    past_handshake: connections that sent application data.
    """

    facts: dict[int, TlsFacts] = field(default_factory=dict)
    hello_side: dict[int, int] = field(default_factory=dict)
    opened: dict[int, tuple[OpenedStream, OpenedStream]] = field(default_factory=dict)
    sessions: dict[int, Session] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    past_handshake: list[int] = field(default_factory=list)
    spool: Written = field(default_factory=lambda: Written(np.uint8, Scratch(in_files=True)))
