"""Conversations as transcripts: `Playbook().syn() >> request(7) << response(7) >> gap(100)`.

`>>` is what the client sends, `<<` what the broker sends. Each step is one segment (or a list of
them); time passes by a millisecond a step.
"""

import random
from dataclasses import dataclass

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import ACK, FIN, PSH, RST, SYN, SegmentBatch
from kdissect.kafka.assembly import Assembly, PairStatus
from kdissect.kafka.options import StreamOptions
from tests.builders.assembling import assemble
from tests.builders.segments import batch_of
from tests.oracles.segments import Segment

CLIENT, BROKER = 0, 1


@dataclass(frozen=True)
class Gap:
    """Bytes that were sent and not captured."""

    size: int


def gap(size: int) -> Gap:
    return Gap(size)


FIN_, RST_ = FIN | ACK, RST  # segments without payload


class Playbook:
    """One connection between 10.0.0.1:50000 and 10.0.0.2:9092, written down segment by segment."""

    def __init__(self, ports: tuple[int, int] = (50000, 9092), isn: tuple[int, int] = (1000, 7000)):
        self.ports = ports
        self.isn = isn
        self.sent = [0, 0]  # payload bytes sent so far
        self.rows: list[tuple[int, int, int, bytes, int, int]] = []
        self.options = StreamOptions()
        self.time = 1_700_000_000_000_000_000
        self.memory: Sources | None = None

    def segment(self, side: int, data: bytes, pos: int, flags: int = ACK | PSH) -> "Playbook":
        """A segment whose first byte is the stream's byte `pos`."""
        seq = (self.isn[side] + 1 + pos) % 2**32
        ack = (self.isn[1 - side] + 1 + self.sent[1 - side]) % 2**32
        self.rows.append((self.time, side, flags, data, seq, ack))
        self.time += 1_000_000
        return self

    def syn(self) -> "Playbook":
        self.rows.append((self.time, CLIENT, SYN, b"", self.isn[CLIENT], 0))
        ack = (self.isn[CLIENT] + 1) % 2**32
        self.rows.append((self.time + 1000, BROKER, SYN | ACK, b"", self.isn[BROKER], ack))
        self.time += 1_000_000
        return self.segment(CLIENT, b"", 0, ACK)

    def _send(self, side: int, what: bytes | Gap | int) -> "Playbook":
        if isinstance(what, Gap):
            self.sent[side] += what.size
            return self
        if isinstance(what, int):
            return self.segment(side, b"", self.sent[side], what)
        self.segment(side, what, self.sent[side])
        self.sent[side] += len(what)
        return self

    def __rshift__(self, what: bytes | Gap | int) -> "Playbook":
        return self._send(CLIENT, what)

    def __lshift__(self, what: bytes | Gap | int) -> "Playbook":
        return self._send(BROKER, what)

    def batch(self) -> tuple[SegmentBatch, Sources]:
        """The segments, and a capture in memory that holds their payload."""
        batch, memory = batch_of(
            [
                Segment(time, side, flags, seq, ack, number, 0, len(payload), payload)
                for number, (time, side, flags, payload, seq, ack) in enumerate(self.rows, 1)
            ]
        )
        batch.endpoints["ip_a"][0, 10:] = [255, 255, 10, 0, 0, 1]
        batch.endpoints["ip_b"][0, 10:] = [255, 255, 10, 0, 0, 2]
        batch.endpoints["port_a"], batch.endpoints["port_b"] = self.ports
        return batch, memory

    def run(self) -> Assembly:
        batch, self.memory = self.batch()
        return assemble(batch, self.memory, self.options)

    def exchanges(self) -> list[tuple[int, str]]:
        """(correlation id, status) of each exchange, in order."""
        return [
            (int(row["correlation_id"]), PairStatus(int(row["status"])).name.lower())
            for row in self.run().exchanges
        ]

    def shuffled(self, seed: int, reach: int) -> "Playbook":
        """The same packets, each delivered up to `reach` places later."""
        order = random.Random(seed)
        keyed = sorted(
            (number + order.uniform(0, reach), row) for number, row in enumerate(self.rows)
        )
        times = [row[0] for row in self.rows]
        self.rows = [(time, *row[1:]) for time, (_, row) in zip(times, keyed, strict=True)]
        return self
