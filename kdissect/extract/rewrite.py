"""Writes conversations anew with other names: new packets at the times of the captured ones.

Other names change the length of frames, so packets cannot be patched. Each connection gets a
handshake and the frames of its exchanges, in the order and at the times of their capture. Losses,
retransmissions and TLS are not reproduced. Frames that cannot be read are left out and counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kdissect.arrays import Indices, Struct
from kdissect.capture.mapped_files import Sources
from kdissect.capture.packet_builder import BROKER, CLIENT, Flow
from kdissect.codec.redaction import TEXT
from kdissect.errors import DecodeError, EncodeError
from kdissect.extract.anonymize import Anonymizer
from kdissect.kafka.assembly import Assembly, PairStatus
from kdissect.protocol import catalog
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES
from kdissect.tables.message_chunk import FrameBuffer
from kdissect.tcp.columns import CloseReason

_SEGMENT_MAX = 1448  # bytes of payload in an Ethernet packet with TCP timestamps


class Packet(NamedTuple):
    """A raw IP packet; `comment` names the frame that begins in it."""

    time_ns: int
    data: bytes
    comment: str


class _Part(NamedTuple):
    """The payload of one segment, with the side that sent it."""

    time_ns: int
    side: int
    data: bytes
    comment: str


@dataclass(slots=True)
class Conversation:
    """A connection and its exchanges to write: `rows` of the assembly, int64[n]."""

    assembly: Assembly
    sources: Sources
    connection: int
    rows: Indices
    client: tuple[str, int]
    broker: tuple[str, int]


class Rewriter:
    """Writes conversations anew; `left_out` counts the frames that could not be read."""

    def __init__(self) -> None:
        self.anonymizer = Anonymizer()
        self.left_out = 0

    def packets(self, conversations: list[Conversation]) -> Iterator[Packet]:
        """Yield the packets of all conversations in time order."""
        parts = [self._conversation(conversation) for conversation in conversations]
        yield from heapq.merge(*parts, key=lambda packet: packet.time_ns)

    def _conversation(self, conversation: Conversation) -> Iterator[Packet]:
        row = conversation.assembly.connections[conversation.connection]
        names = self.anonymizer.names
        begin = int(row["first_time_ns"])
        flow = Flow(
            (names.address(conversation.client[0]), conversation.client[1]),
            (names.address(conversation.broker[0]), conversation.broker[1]),
            begin,
        )
        for data in flow.opened():
            yield Packet(begin, data, "")
        last = begin
        directions = [self._direction(conversation, side) for side in (REQUEST, RESPONSE)]
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

    def _direction(self, conversation: Conversation, side: int) -> Iterator[_Part]:
        """Yield the segments of one direction, in stream order.

        A frame's first segment has the time of its first captured byte, its last segment that of
        the last.
        """
        column = conversation.assembly.exchanges[SIDES[side]][conversation.rows]
        captured = np.flatnonzero(column["size"] >= 0)
        captured = captured[np.argsort(column["pos"][captured], kind="stable")]
        last = 0
        for at in captured.tolist():
            exchange = int(conversation.rows[at])
            frame = self._frame(conversation, exchange, side)
            if frame is None:
                continue
            # a stream is in order: no frame is earlier than the one before it
            last = max(last, int(column["time_ns"][at]))
            end = max(last, int(column["end_time_ns"][at]))
            comment = _comment(conversation.assembly.exchanges[exchange], side)
            data = len(frame).to_bytes(4, "big") + frame
            size = _SEGMENT_MAX
            if end > last and len(data) <= size:
                size = (len(data) + 1) // 2
            for pos in range(0, len(data), size):
                last = end if pos + size >= len(data) else last
                yield _Part(last, side, data[pos : pos + size], comment)
                comment = ""

    def _frame(self, conversation: Conversation, exchange: int, side: int) -> bytes | None:
        frames = FrameBuffer.gather(
            conversation.assembly, conversation.sources, np.array([exchange])
        )
        row = conversation.assembly.exchanges[exchange]
        data = frames.buf[frames.start[0, side] : frames.end[0, side]].tobytes()
        request = frames.buf[frames.start[0, REQUEST] : frames.end[0, REQUEST]].tobytes()
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
                # if the request is left out, its response is left out too
                self.anonymizer.frame(request, "request")
            return self.anonymizer.frame(data, "response", key, version)
        except (DecodeError, EncodeError, ValueError):
            self.left_out += 1
            return None


def _comment(row: Struct, side: int) -> str:
    if row["is_sasl_token"]:
        return f"SASL token, exchange {row['exchange_id']}"
    api = catalog.apis().get(int(row["api_key"]))
    name = api.name if api else f"API {row['api_key']}"
    return f"{name} v{row['api_version']} {SIDES[side]}, exchange {row['exchange_id']}"
