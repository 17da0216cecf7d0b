"""Conversations as transcripts: `Playbook().syn() >> request(7) << response(7) >> gap(100)`.

`>>` is what the client sends, `<<` what the broker sends. Each step is one segment (or a list of
them); time passes by a millisecond a step.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

import numpy as np

from kdissect.capture.segments import ACK, ENDPOINTS, FIN, PSH, RST, SEGMENT, SYN, SegmentBatch
from kdissect.kafka.assemble import assemble
from kdissect.kafka.assembly import Assembly, PairStatus
from kdissect.kafka.options import StreamOptions
from tests.kafka.plain_reader import Memory

CLIENT, BROKER = 0, 1


@dataclass(frozen=True)
class Gap:
    """Bytes that were sent and not captured."""

    size: int


@dataclass(frozen=True)
class Flags:
    flags: int


def gap(size: int) -> Gap:
    return Gap(size)


FIN_ = Flags(FIN | ACK)
RST_ = Flags(RST)


def framed(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def request(
    correlation_id: int, api_key: int = 3, api_version: int = 1, client_id: str | None = "orders",
    body: bytes = b"\0\0\0\0",
) -> bytes:  # fmt: skip
    name = b"\xff\xff"
    if client_id is not None:
        name = struct.pack(">h", len(client_id)) + client_id.encode()
    return framed(struct.pack(">hhi", api_key, api_version, correlation_id) + name + body)


def produce(
    correlation_id: int, acks: int, api_version: int = 7, client_id: str | None = "orders"
) -> bytes:
    """A Produce request with room for a batch; v9 and later are flexible."""
    if api_version >= 9:
        body = b"\0\0" + struct.pack(">hi", acks, 1000) + b"\x01\0"
    elif api_version >= 3:
        body = b"\xff\xff" + struct.pack(">hii", acks, 1000, 0)
    else:
        body = struct.pack(">hii", acks, 1000, 0)
    return request(correlation_id, 0, api_version, client_id, body)


def response(correlation_id: int, body: bytes = bytes(12)) -> bytes:
    return framed(struct.pack(">i", correlation_id) + body)


def token(data: bytes = b"\0user\0secret") -> bytes:
    return framed(data)


class Playbook:
    """One connection between 10.0.0.1:50000 and 10.0.0.2:9092, written down segment by segment."""

    def __init__(self, ports: tuple[int, int] = (50000, 9092), isn: tuple[int, int] = (1000, 7000)):
        self.ports = ports
        self.isn = isn
        self.sent = [0, 0]  # payload bytes sent so far
        self.rows: list[tuple[int, int, int, bytes, int, int]] = []
        self.options = StreamOptions()
        self.time = 1_700_000_000_000_000_000
        self.memory: Memory | None = None

    def segment(self, side: int, data: bytes, pos: int, flags: int = ACK | PSH) -> Playbook:
        """A segment whose first byte is the stream's byte `pos`."""
        seq = (self.isn[side] + 1 + pos) % 2**32
        ack = (self.isn[1 - side] + 1 + self.sent[1 - side]) % 2**32
        self.rows.append((self.time, side, flags, data, seq, ack))
        self.time += 1_000_000
        return self

    def syn(self) -> Playbook:
        self.rows.append((self.time, CLIENT, SYN, b"", self.isn[CLIENT], 0))
        ack = (self.isn[CLIENT] + 1) % 2**32
        self.rows.append((self.time + 1000, BROKER, SYN | ACK, b"", self.isn[BROKER], ack))
        self.time += 1_000_000
        return self.segment(CLIENT, b"", 0, ACK)

    def _send(self, side: int, what: bytes | Gap | Flags) -> Playbook:
        if isinstance(what, Gap):
            self.sent[side] += what.size
            return self
        if isinstance(what, Flags):
            return self.segment(side, b"", self.sent[side], what.flags)
        self.segment(side, what, self.sent[side])
        self.sent[side] += len(what)
        return self

    def __rshift__(self, what: bytes | Gap | Flags) -> Playbook:
        return self._send(CLIENT, what)

    def __lshift__(self, what: bytes | Gap | Flags) -> Playbook:
        return self._send(BROKER, what)

    def batch(self) -> tuple[SegmentBatch, Memory]:
        """The segments, and a capture in memory that holds their payload."""
        endpoints = np.zeros(1, ENDPOINTS)
        endpoints["ip_a"][0, 10:] = [255, 255, 10, 0, 0, 1]
        endpoints["ip_b"][0, 10:] = [255, 255, 10, 0, 0, 2]
        endpoints["port_a"], endpoints["port_b"] = self.ports
        segments = np.zeros(len(self.rows), SEGMENT)
        data = b"\0" * 16
        for number, (time, side, flags, payload, seq, ack) in enumerate(self.rows):
            row = segments[number]
            row["time_ns"], row["side"], row["flags"] = time, side, flags
            row["pos"], row["captured"], row["length"] = len(data), len(payload), len(payload)
            row["seq"], row["ack"], row["packet"], row["ip_id"] = seq, ack, number + 1, number + 1
            data += payload
        return SegmentBatch(endpoints, segments), Memory(data)

    def run(self) -> Assembly:
        batch, self.memory = self.batch()
        return assemble(batch, self.memory, self.options)

    def exchanges(self) -> list[tuple[int, str]]:
        """(correlation id, status) of each exchange, in order."""
        return [
            (int(row["correlation_id"]), PairStatus(int(row["status"])).name.lower())
            for row in self.run().exchanges
        ]

    def shuffled(self, seed: int, reach: int) -> Playbook:
        """The same packets, each delivered up to `reach` places later."""
        order = random.Random(seed)
        keyed = sorted(
            (number + order.uniform(0, reach), row) for number, row in enumerate(self.rows)
        )
        times = [row[0] for row in self.rows]
        self.rows = [(time, *row[1:]) for time, (_, row) in zip(times, keyed, strict=True)]
        return self
