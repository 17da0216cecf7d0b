"""Conversations of Kafka clients whose frames are known, and captures of them.

What the tests of `kafka` compare with is what was said, not what another reader finds.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from kdissect.codec.message import Message, encode_message
from kdissect.kafka.assembly import Anomaly, Assembly, Protocol
from kdissect.protocol.api_keys import ApiKey
from tests.builders.frames import framed, produce, request, response
from tests.builders.talks import BROKER, CLIENT, Playbook

TOKEN_ID = -1


class Frame(NamedTuple):
    """A frame of one side; pos: stream position of its size prefix, with the value size."""

    side: int
    pos: int
    size: int
    correlation_id: int
    api_key: int
    api_version: int


@dataclass
class Conversation:
    """What both sides sent, frame by frame, in the order of sending."""

    frames: list[Frame] = field(default_factory=list)
    streams: list[bytes] = field(default_factory=lambda: [b"", b""])

    def say(self, side: int, data: bytes, correlation_id: int, api: tuple[int, int]) -> None:
        at = len(self.streams[side])
        self.frames.append(Frame(side, at, len(data) - 4, correlation_id, *api))
        self.streams[side] += data

    def segments(self, sizes: list[int]) -> list[tuple[int, int, int]]:
        """(side, begin, end) of segments of these sizes in turns, each within one run."""
        found = []
        for side, run in groupby(self.frames, lambda frame: frame.side):
            frames = list(run)
            at, end = frames[0].pos, frames[-1].pos + 4 + frames[-1].size
            while at < end:
                until = min(end, at + sizes[len(found) % len(sizes)])
                found.append((side, at, until))
                at = until
        return found

    def captured(self, segments: list[tuple[int, int, int]], has_syn: bool) -> Playbook:
        """A capture of these segments of the streams, in their order."""
        book = Playbook(isn=(2**32 - 60, 7000))
        if has_syn:
            book.syn()
        for side, begin, end in segments:
            book.segment(side, self.streams[side][begin:end], begin)
            book.next[side] = max(book.next[side], book.first[side] + end)
        return book

    def whole(self, segments: list[tuple[int, int, int]]) -> set[Frame]:
        """The frames of which every byte is in one of these segments."""
        there = [bytearray(len(stream)) for stream in self.streams]
        for side, begin, end in segments:
            there[side][begin:end] = b"\1" * (end - begin)
        return {
            frame
            for frame in self.frames
            if all(there[frame.side][frame.pos : frame.pos + 4 + frame.size])
        }


def frames_of(assembly: Assembly) -> list[Frame]:
    """The frames of all exchanges; a response has the API of its request."""
    found = []
    for row in assembly.exchanges:
        for side, name in ((CLIENT, "request"), (BROKER, "response")):
            if row[name]["size"] >= 0:
                found.append(
                    Frame(
                        side, int(row[name]["pos"]), int(row[name]["size"]),
                        int(row["correlation_id"]), int(row["api_key"]), int(row["api_version"]),
                    )
                )  # fmt: skip
    return found


def check_accounts(assembly: Assembly) -> None:
    """Each captured byte is framed or not; anomalies name the unframed and the missing ones."""
    counts = assembly.connections["direction"]
    is_kafka = assembly.connections["protocol"] == Protocol.KAFKA
    framed, unframed = counts["framed_byte_count"], counts["unframed_byte_count"]
    assert (counts["byte_count"] == framed + unframed).all()
    assert (unframed >= 0).all()
    anomalies = assembly.anomalies
    for kind, column in (
        (Anomaly.UNFRAMED_BYTES, unframed),
        (Anomaly.GAP, counts["missing_byte_count"]),
    ):
        told = np.zeros(column.shape, np.int64)
        rows = anomalies[anomalies["kind"] == kind]
        np.add.at(told, (rows["connection"], rows["direction"]), rows["byte_count"])
        assert (told[is_kafka] == column[is_kafka]).all(), kind
        assert (told[~is_kafka] == 0).all(), kind


def _batch(leader_epoch: int) -> bytes:
    """A record batch; its length and leader epoch read like a size and a correlation id."""
    now = 1_700_000_000_000
    head = struct.pack(">ihiqqqhii", 0x1E3779B9, 0, 0, now, now, -1, -1, -1, 1)
    return struct.pack(">qiib", 0, 5 + len(head) + 8, leader_epoch, 2) + head + b"\x0e\0\0\0\1\2ab"


BODIES = (b"\0\0\0\0", b"\0\0", bytes(40), b"\0\1\2x" * 30)
ASKED = (*BODIES, bytes(30) + _batch(-1))  # producers do not know the epoch
FETCHED = (*BODIES, b"\0\0" + _batch(3), bytes(30) + _batch(3) + b"ab")
NAMED = ("orders", "consumer-orders-1")
NAMES = (*NAMED, *NAMED, "", None)
APIS = ((3, 1), (3, 9), (1, 4), (1, 12), (2, 1), (9, 1), (12, 0), (18, 0))


@st.composite
def conversations(
    draw: st.DrawFn, least: int = 3, names: Sequence[str | None] = NAMES
) -> Conversation:
    """Conversations of a client, with or without a login; every request has its response."""
    talk = Conversation()
    number = draw(st.sampled_from((0, 250, 1 << 20, -(2**31))))
    name = draw(st.sampled_from(names))
    login = draw(st.sampled_from(("", "", "versions", "bare tokens", "tokens")))

    def both(ask: bytes, answer: bytes, correlation_id: int, api: tuple[int, int]) -> None:
        talk.say(CLIENT, ask, correlation_id, api)
        talk.say(BROKER, answer, correlation_id, api)

    if login == "versions":
        told = b"\0\0" + struct.pack(">i9h", 3, 0, 0, 9, 1, 0, 12, 3, 0, 12)
        both(request(number, 18, 0, name, b""), response(number, told), number, (18, 0))
    elif login:
        api = (17, 0 if login == "bare tokens" else 1)
        told = b"\0\0\0\0\0\1\0\5PLAIN"
        ask = request(number, *api, name, b"\0\5PLAIN")
        both(ask, response(number, told), number, api)
        if login == "bare tokens":
            both(framed(b"\0user\0secret"), framed(b""), TOKEN_ID, (-1, -1))
    waiting: list[tuple[int, tuple[int, int]]] = []
    at_once = draw(st.integers(1, 4))
    for _ in range(draw(st.integers(least, 12))):
        number += 1
        if draw(st.integers(0, 3)):
            api = draw(st.sampled_from(APIS))
            ask = request(number, *api, name, draw(st.sampled_from(ASKED)))
            waiting.append((number, api))
        else:
            acks, version = draw(st.sampled_from((-1, 0, 1))), draw(st.sampled_from((0, 3, 7)))
            api = (0, version)
            ask = produce(number, acks, version, name)
            if acks:
                waiting.append((number, api))
        talk.say(CLIENT, ask, number, api)
        while len(waiting) >= at_once:
            _answer(draw, talk, *waiting.pop(0))
    for one in waiting:
        _answer(draw, talk, *one)
    return talk


def _answer(draw: st.DrawFn, talk: Conversation, number: int, api: tuple[int, int]) -> None:
    """A response that decodes as one of its API; that of a Fetch has any bytes as records."""
    body: dict[str, Any] = {}
    if api[0] == ApiKey.FETCH:
        fetched = draw(st.lists(st.sampled_from(FETCHED), max_size=2))
        body = {"responses": [{"topic": "t", "partitions": [{"records": one} for one in fetched]}]}
    answer = Message(*api, "response", {"correlation_id": number}, body)
    talk.say(BROKER, framed(encode_message(answer)), number, api)
