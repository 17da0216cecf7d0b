"""Captures made by hand: records in any codec and magic, and one exchange over many connections.

The record-heavy capture of real clients has no zstd; that needs Produce v7 and Fetch v10 (KIP-110).
Records have 200 to 600 bytes, look like events in JSON and compress about as such do; the same
seed gives the same file. Magic 0 and 1 travel in the versions that old clients speak: Produce v1
and v2, Fetch v1 and v2.
"""

import itertools
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import dpkt
import numpy as np
import numpy.typing as npt

from kdissect.capture.packet_builder import BROKER, CLIENT, LINK_TYPE_RAW, Flow
from kdissect.codec.message import Message, encode_message
from kdissect.codec.record_encoder import encode_batch, encode_messages
from kdissect.protocol.api_keys import ApiKey

SEED = 20_26
RECORDS_PER_CODEC = 8000
BATCH_RECORDS = 400
PARTITIONS = 3
SEGMENT_SIZE = 1448  # of payload: what Ethernet's 1500 bytes leave with TCP timestamps
START_TIME_S = 1_700_000_000
PACKET_GAP_US = 20
BROKER_END = ("192.0.2.2", 9092)  # RFC 5737
CLIENTS_PER_HOST = 50_000  # ports that a client's address has
VOCABULARY = (
    "order payment shipment customer basket created updated cancelled confirmed pending region "
    "europe america asia warehouse item quantity price currency euro dollar session device mobile "
    "browser campaign voucher delivery address street city postcode status retry error success"
)
WORDS = VOCABULARY.split()
Exchange = tuple[Message, Message]  # request, response


@dataclass(frozen=True, slots=True)
class Recipe:
    """One topic of a capture: what its records are packed in."""

    codec: str
    magic: int = 2
    record_count: int = RECORDS_PER_CODEC
    batch_records: int = BATCH_RECORDS


# -- records --------------------------------------------------------------------------------


def event(rng: random.Random) -> tuple[bytes, bytes]:
    """A record's key and value."""
    key = f"customer-{rng.randrange(5000)}".encode()
    parts = [f'{{"id":"{rng.getrandbits(96):024x}","time":{rng.randrange(10**12, 2 * 10**12)}']
    size, wanted = len(parts[0]), rng.randrange(200, 600)
    while size < wanted:
        parts.append(f'"{rng.choice(WORDS)}":"{rng.choice(WORDS)} {rng.randrange(1 << 20)}"')
        size += len(parts[-1]) + 1
    return key, ",".join(parts).encode()[: wanted - 1] + b"}"


def record_set(recipe: Recipe, base_offset: int, time_ms: int, rng: random.Random) -> bytes:
    """Events as a broker stores them: one batch, or a message set of an old magic."""
    records = []
    for index in range(recipe.batch_records):
        key, value = event(rng)
        records.append(
            {"offset": base_offset + index, "timestamp_ms": time_ms, "key": key, "value": value}
        )
    if recipe.magic == 2:
        return encode_batch(records, codec=recipe.codec)
    return encode_messages(records, recipe.magic, codec=recipe.codec)


# -- messages -------------------------------------------------------------------------------


def exchange(
    api: ApiKey, api_version: int, asked: dict[str, Any], told: dict[str, Any]
) -> Exchange:
    """A request of the bench's client with its response."""
    request = Message(api, api_version, "request", {"client_id": "bench"}, asked)
    return request, Message(api, api_version, "response", {}, told)


def produce(magic: int, topic: str, base_offset: int, sets: list[bytes]) -> Exchange:
    """Produce v7, or v2 and v1 for the old magics: a set for each partition, acks=all."""
    data = [{"index": number, "records": records} for number, records in enumerate(sets)]
    done = [{"index": number, "base_offset": base_offset} for number in range(len(sets))]
    return exchange(
        ApiKey.PRODUCE,
        (1, 2, 7)[magic],
        {"acks": -1, "timeout_ms": 30_000, "topic_data": [{"name": topic, "partition_data": data}]},
        {"responses": [{"name": topic, "partition_responses": done}]},
    )


def fetch(magic: int, topic: str, base_offset: int, end: int, sets: list[bytes]) -> Exchange:
    """Fetch v10, or v2 and v1 for the old magics: what was produced, in one response."""
    asked = [
        {"partition": number, "fetch_offset": base_offset, "partition_max_bytes": 1 << 20}
        for number in range(len(sets))
    ]
    told = [
        {"partition_index": number, "high_watermark": end, "records": records}
        for number, records in enumerate(sets)
    ]
    return exchange(
        ApiKey.FETCH,
        (1, 2, 10)[magic],
        {"max_wait_ms": 500, "min_bytes": 1, "topics": [{"topic": topic, "partitions": asked}]},
        {"responses": [{"topic": topic, "partitions": told}]},
    )


def heartbeat() -> Exchange:
    """Heartbeat v0 and its answer: about the smallest messages that there are."""
    asked = {"group_id": "group", "generation_id": 7, "member_id": "member-1"}
    return exchange(ApiKey.HEARTBEAT, 0, asked, {})


def offset_fetch() -> Exchange:
    """OffsetFetch v2 of one partition: a small request that nothing has to come before."""
    asked = {"group_id": "group", "topics": [{"name": "t", "partition_indexes": [0]}]}
    told = {"topics": [{"name": "t", "partitions": [{"committed_offset": 7}]}]}
    return exchange(ApiKey.OFFSET_FETCH, 2, asked, told)


def large_fetch() -> Exchange:
    """A Fetch of three batches of 400 records, lz4."""
    return list(exchanges(0, Recipe("lz4", record_count=1200)))[1]


def exchanges(number: int, recipe: Recipe) -> Iterator[Exchange]:
    """Yield the exchanges of a producer and a consumer of the recipe's topic."""
    rng = random.Random(SEED + number)
    topic = f"bench-{recipe.codec}"
    size, magic = recipe.batch_records, recipe.magic
    for turn in range(max(1, recipe.record_count // (PARTITIONS * size))):
        offset = turn * size
        time_ms = START_TIME_S * 1000 + turn
        sets = [record_set(recipe, offset, time_ms, rng) for _ in range(PARTITIONS)]
        # a client counts a batch's offsets from 0, the broker sets the base
        sent = [bytes(8) + data[8:] for data in sets] if magic == 2 else sets
        yield produce(magic, topic, offset, sent)
        yield fetch(magic, topic, offset, offset + size, sets)


# -- packets --------------------------------------------------------------------------------


class Capture:
    """Writes conversations to a pcap: in order, nothing lost, a packet each `gap_us`."""

    def __init__(self, out: BinaryIO, gap_us: int = PACKET_GAP_US) -> None:
        self._writer = dpkt.pcap.Writer(out, snaplen=262_144, linktype=LINK_TYPE_RAW)
        self._times = itertools.count(0, gap_us)

    def write(self, packets: Iterable[bytes]) -> None:
        for packet in packets:
            self._writer.writepkt(packet, START_TIME_S + next(self._times) / 1e6)

    def send(self, flow: Flow, frames: tuple[bytes, bytes], correlation_id: int) -> None:
        """Write an exchange of a connection."""
        for side, frame in zip((CLIENT, BROKER), frames, strict=True):
            at = 4 if side == CLIENT else 0  # an API and its version come first in a request
            number = correlation_id.to_bytes(4, "big")
            data = len(frame).to_bytes(4, "big") + frame[:at] + number + frame[at + 4 :]
            self.write(flow.sent(side, data, SEGMENT_SIZE))


def flow_of(number: int) -> Flow:
    """The connection of a client with a port of its own."""
    host, port = divmod(number, CLIENTS_PER_HOST)
    return Flow((f"10.0.0.{1 + host}", 10_000 + port), BROKER_END, 0)


def synthesise(target: str | os.PathLike[str], recipes: Iterable[Recipe]) -> None:
    """Write the capture: for each recipe, a connection that produces and fetches its topic."""
    with Path(target).open("wb") as out:
        capture = Capture(out)
        for number, recipe in enumerate(recipes):
            flow = flow_of(number)
            capture.write(flow.opened())
            for turn, pair in enumerate(exchanges(number, recipe)):
                capture.send(flow, (encode_message(pair[0]), encode_message(pair[1])), turn)
            capture.write(flow.closed())


def connections_of(count: int, connection_count: int, share: float) -> npt.NDArray[np.int64]:
    """int64[count]: the connection of each exchange; `share` of them are the first one's."""
    connection = np.arange(count) % connection_count
    if share:
        connection[np.random.default_rng(SEED).random(count) < share] = 0
    return connection


def crowd(
    target: str | os.PathLike[str],
    pair: Exchange,
    connection: npt.NDArray[np.int64],
    gap_us: int = PACKET_GAP_US,
) -> None:
    """Write an exchange over and over: number i is one of the connection connection[i]."""
    frames = encode_message(pair[0]), encode_message(pair[1])
    flows = [flow_of(number) for number in range(int(connection.max()) + 1)]
    turns = [0] * len(flows)
    with Path(target).open("wb") as out:
        capture = Capture(out, gap_us)
        for number in connection.tolist():
            capture.send(flows[number], frames, turns[number])
            turns[number] += 1
