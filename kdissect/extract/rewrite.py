"""Conversations told again with other names: new packets, at the times of the old ones.

Names change the length of frames, so packets cannot be patched: each connection gets a handshake
and the frames of its exchanges, in the order and at the times at which they were captured. Losses,
retransmissions and TLS are not told again; frames that cannot be read are left out and counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kdissect.capture.mapped_files import Sources
from kdissect.capture.packet_builder import BROKER, CLIENT, Flow
from kdissect.errors import DecodeError, EncodeError
from kdissect.extract.anonymize import Anonymizer
from kdissect.kafka.assembly import Assembly, CloseReason, PairStatus
from kdissect.pipeline.frame_buffer import FrameBuffer
from kdissect.protocol import catalog
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.tables.redaction import TEXT

_SEGMENT_MAX = 1448  # of an Ethernet's packet, so that the file looks like traffic


class Packet(NamedTuple):
    """A raw IP packet; `comment` says what begins in it."""

    time_ns: int
    data: bytes
    comment: str


class _Part(NamedTuple):
    """A segment's payload, from one side."""

    time_ns: int
    side: int
    data: bytes
    comment: str


@dataclass(slots=True)
class Conversation:
    """A connection and those of its exchanges (rows of the assembly) that are told again."""

    assembly: Assembly
    sources: Sources
    connection: int
    rows: Any
    client: tuple[str, int]
    broker: tuple[str, int]


class Retelling:
    """Tells conversations again; `left_out` counts the frames that could not be read."""

    def __init__(self) -> None:
        self.anonymizer = Anonymizer()
        self.left_out = 0

    def packets(self, conversations: list[Conversation]) -> Iterator[Packet]:
        """The packets of all of them in time order."""
        parts = [self._conversation(each) for each in conversations]
        yield from heapq.merge(*parts, key=lambda packet: packet.time_ns)

    def _conversation(self, told: Conversation) -> Iterator[Packet]:
        row = told.assembly.connections[told.connection]
        names = self.anonymizer.names
        flow = Flow(
            (names.address(told.client[0]), told.client[1]),
            (names.address(told.broker[0]), told.broker[1]),
        )
        begin = int(row["first_time_ns"])
        for data in flow.opened():
            yield Packet(begin, data, "")
        last = begin
        directions = [self._direction(told, side) for side in (REQUEST, RESPONSE)]
        for part in heapq.merge(*directions, key=lambda part: part.time_ns):
            last = max(last, part.time_ns)
            for data in flow.sent(CLIENT if part.side == REQUEST else BROKER, part.data):
                yield Packet(last, data, part.comment)
        reason = int(row["close_reason"])
        if reason in (CloseReason.FIN, CloseReason.RST):
            end = max(last, int(row["last_time_ns"]))
            packets = flow.closed() if reason == CloseReason.FIN else flow.reset(CLIENT)
            for data in packets:
                yield Packet(end, data, "")

    def _direction(self, told: Conversation, side: int) -> Iterator[_Part]:
        """The segments of one direction, in the order of its stream.

        A frame's first segment comes when its first byte did, its last one when its last byte did.
        """
        column = told.assembly.exchanges[SIDES[side]][told.rows]
        there = np.flatnonzero(column["size"] >= 0)
        there = there[np.argsort(column["pos"][there], kind="stable")]
        last = 0
        for at in there.tolist():
            exchange = int(told.rows[at])
            frame = self._frame(told, exchange, side)
            if frame is None:
                continue
            # nothing comes earlier than what was before it in its stream
            last = max(last, int(column["time_ns"][at]))
            end = max(last, int(column["end_time_ns"][at]))
            comment = _comment(told.assembly.exchanges[exchange], side)
            data = len(frame).to_bytes(4, "big") + frame
            size = _SEGMENT_MAX
            if end > last and len(data) <= size:
                size = (len(data) + 1) // 2
            for pos in range(0, len(data), size):
                last = end if pos + size >= len(data) else last
                yield _Part(last, side, data[pos : pos + size], comment)
                comment = ""

    def _frame(self, told: Conversation, exchange: int, side: int) -> bytes | None:
        frames = FrameBuffer.gather(told.assembly, told.sources, np.array([exchange]))
        row = told.assembly.exchanges[exchange]
        data = frames.buf[frames.start[0, side] : frames.end[0, side]].tobytes()
        asked = frames.buf[frames.start[0, REQUEST] : frames.end[0, REQUEST]].tobytes()
        if row["is_sasl_token"]:
            return TEXT.encode()
        if not frames.whole(side)[0] or row["status"] == PairStatus.REQUEST_MISSING:
            self.left_out += 1
            return None
        key, version = int(row["api_key"]), int(row["api_version"])
        try:
            if side == REQUEST:
                return self.anonymizer.frame(data, "request")
            if frames.whole(REQUEST)[0]:
                # an answer to what is left out would be one to nothing
                self.anonymizer.frame(asked, "request")
            return self.anonymizer.frame(data, "response", key, version)
        except (DecodeError, EncodeError, ValueError):
            self.left_out += 1
            return None


def _comment(row: Any, side: int) -> str:
    if row["is_sasl_token"]:
        return f"SASL token, exchange {row['exchange_id']}"
    api = catalog.apis().get(int(row["api_key"]))
    name = api.name if api else f"API {row['api_key']}"
    return f"{name} v{row['api_version']} {SIDES[side]}, exchange {row['exchange_id']}"
