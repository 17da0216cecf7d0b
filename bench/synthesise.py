"""Record-heavy captures made by hand, in any codec and magic: produced and fetched over plain TCP.

The record-heavy capture of real clients has no zstd; that needs Produce v7 and Fetch v10 (KIP-110).
Records have 200 to 600 bytes, look like events in JSON and compress about as such do; the same
seed gives the same file. Magic 0 and 1 travel in the versions that old clients speak: Produce v1
and v2, Fetch v1 and v2.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kdissect.codec.compression import CODEC_NAMES
from kdissect.codec.record_codec import encode_batch, encode_messages

SEED = 20_26
RECORDS_PER_CODEC = 8000
BATCH_RECORDS = 400
PARTITIONS = 3
SEGMENT_SIZE = 1448  # of payload: what Ethernet's 1500 bytes leave with TCP timestamps
START_TIME_NS = 1_700_000_000 * 10**9
PACKET_GAP_NS = 20_000
BROKER_PORT = 9092
ETHERNET = bytes.fromhex("020000000002 020000000001 0800")
CLIENT_ID = b"bench"
VOCABULARY = (
    "order payment shipment customer basket created updated cancelled confirmed pending region "
    "europe america asia warehouse item quantity price currency euro dollar session device mobile "
    "browser campaign voucher delivery address street city postcode status retry error success"
)
WORDS = VOCABULARY.split()


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


def record_set(
    codec: str, magic: int, count: int, base_offset: int, time_ms: int, rng: random.Random
) -> bytes:
    """`count` events as a broker stores them: one batch, or a message set of an old magic."""
    records = []
    for index in range(count):
        key, value = event(rng)
        records.append(
            {"offset": base_offset + index, "timestamp_ms": time_ms, "key": key, "value": value}
        )
    if magic == 2:
        return encode_batch(records, codec=codec)
    return encode_messages(records, magic, codec=codec)


# -- messages -------------------------------------------------------------------------------


Exchange = tuple[bytes, bytes]  # request, response


def _text(value: bytes) -> bytes:
    return struct.pack(">h", len(value)) + value


def _data(value: bytes) -> bytes:
    return struct.pack(">i", len(value)) + value


def _request(api_key: int, api_version: int, correlation_id: int, body: bytes) -> bytes:
    return _data(
        struct.pack(">hhi", api_key, api_version, correlation_id) + _text(CLIENT_ID) + body
    )


def _response(correlation_id: int, body: bytes) -> bytes:
    return _data(struct.pack(">i", correlation_id) + body)


def produce(
    magic: int, topic: bytes, correlation_id: int, base_offset: int, sets: list[bytes]
) -> Exchange:
    """Produce v7, or v2 and v1 for the old magics: a set for each partition, acks=all."""
    api_version = (1, 2, 7)[magic]
    asked = struct.pack(">h", -1) if magic == 2 else b""  # no transactional id
    asked += struct.pack(">hii", -1, 30_000, 1) + _text(topic) + struct.pack(">i", len(sets))
    told = struct.pack(">i", 1) + _text(topic) + struct.pack(">i", len(sets))
    for partition, data in enumerate(sets):
        asked += struct.pack(">i", partition) + _data(data)
        told += struct.pack(">ihq", partition, 0, base_offset)
        told += struct.pack(">qq", -1, 0)[: 8 * magic]  # log append time, log start
    told += struct.pack(">i", 0)
    return _request(0, api_version, correlation_id, asked), _response(correlation_id, told)


def fetch(
    magic: int, topic: bytes, correlation_id: int, base_offset: int, end: int, sets: list[bytes]
) -> Exchange:
    """Fetch v10, or v2 and v1 for the old magics: what was produced, in one response."""
    api_version = (1, 2, 10)[magic]
    is_new = magic == 2
    asked = struct.pack(">iii", -1, 500, 1)
    asked += struct.pack(">ibii", 50 << 20, 0, 0, -1) if is_new else b""
    asked += struct.pack(">i", 1) + _text(topic) + struct.pack(">i", len(sets))
    told = struct.pack(">i", 0) + (struct.pack(">hi", 0, 0) if is_new else b"")
    told += struct.pack(">i", 1) + _text(topic) + struct.pack(">i", len(sets))
    for partition, data in enumerate(sets):
        asked += struct.pack(">i", partition) + (struct.pack(">i", -1) if is_new else b"")
        asked += struct.pack(">q", base_offset) + (struct.pack(">q", 0) if is_new else b"")
        asked += struct.pack(">i", 1 << 20)
        told += struct.pack(">ihq", partition, 0, end)
        told += (struct.pack(">qqi", end, 0, -1) if is_new else b"") + _data(data)
    asked += struct.pack(">i", 0) if is_new else b""  # nothing forgotten
    return _request(1, api_version, correlation_id, asked), _response(correlation_id, told)


def exchanges(number: int, recipe: Recipe) -> Iterator[Exchange]:
    """Yield the exchanges of a producer and a consumer of the recipe's topic."""
    rng = random.Random(SEED + number)
    topic = f"bench-{recipe.codec}".encode()
    size, magic = recipe.batch_records, recipe.magic
    for turn in range(max(1, recipe.record_count // (PARTITIONS * size))):
        offset = turn * size
        time_ms = START_TIME_NS // 10**6 + turn
        sets = [
            record_set(recipe.codec, magic, size, offset, time_ms, rng) for _ in range(PARTITIONS)
        ]
        # a client counts a batch's offsets from 0, the broker sets the base
        sent = [bytes(8) + data[8:] for data in sets] if magic == 2 else sets
        yield produce(magic, topic, 2 * turn, offset, sent)
        yield fetch(magic, topic, 2 * turn + 1, offset, offset + size, sets)


# -- packets --------------------------------------------------------------------------------


class Connection:
    """Writes one TCP connection's packets: in order, nothing lost."""

    def __init__(self, out: BinaryIO, client_port: int, clock: Iterator[int]) -> None:
        self._out = out
        self._clock = clock
        hosts = (b"\xc0\x00\x02\x01", b"\xc0\x00\x02\x02")  # RFC 5737
        self._hosts = (hosts, hosts[::-1])
        self._ports = ((client_port, BROKER_PORT), (BROKER_PORT, client_port))
        self._sequence = [client_port * 1000, client_port * 2000]
        for side, flags in ((0, 0x02), (1, 0x12), (0, 0x10)):
            self._packet(side, flags, b"")

    def send(self, side: int, data: bytes) -> None:
        """A message from side 0, the client, or side 1; acknowledged at its end."""
        for pos in range(0, len(data), SEGMENT_SIZE):
            self._packet(side, 0x18, data[pos : pos + SEGMENT_SIZE])
        self._packet(1 - side, 0x10, b"")

    def close(self) -> None:
        for side, flags in ((0, 0x11), (1, 0x11), (0, 0x10)):
            self._packet(side, flags, b"")

    def _packet(self, side: int, flags: int, payload: bytes) -> None:
        own, other = self._sequence[side], self._sequence[1 - side]
        source, target = self._hosts[side]
        ports = self._ports[side]
        tcp = struct.pack(
            ">HHIIBBHHH", *ports, own, other if flags & 0x10 else 0, 0x50, flags, 65535, 0, 0
        )
        pseudo = source + target + struct.pack(">HH", 6, len(tcp) + len(payload))
        tcp = tcp[:16] + _checksum(pseudo + tcp + payload) + tcp[18:]
        size = 20 + len(tcp) + len(payload)
        ip = struct.pack(">HHHHBB", 0x4500, size, 0, 0x4000, 64, 6)
        ip += _checksum(ip + bytes(2) + source + target) + source + target
        frame = ETHERNET + ip + tcp + payload
        seconds, nanoseconds = divmod(next(self._clock), 10**9)
        head = struct.pack("<IIII", seconds, nanoseconds // 1000, len(frame), len(frame))
        self._out.write(head + frame)
        self._sequence[side] = (own + len(payload) + (flags & 1) + (flags >> 1 & 1)) % (1 << 32)


def _checksum(data: bytes) -> bytes:
    words = np.frombuffer(data + bytes(len(data) % 2), ">u2")
    total = int(words.sum(dtype=np.int64))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack(">H", total ^ 0xFFFF)


def synthesise(target: str | os.PathLike[str], recipes: Iterable[Recipe]) -> None:
    """Write the capture: for each recipe, a connection that produces and fetches its topic."""
    clock = itertools.count(START_TIME_NS, PACKET_GAP_NS)
    with Path(target).open("wb") as out:
        out.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 262_144, 1))
        for number, recipe in enumerate(recipes):
            connection = Connection(out, 40_000 + number, clock)
            for request, response in exchanges(number, recipe):
                connection.send(0, request)
                connection.send(1, response)
            connection.close()


def main() -> None:
    """Command: synthesise.py TARGET [--codec NAME]... [--magic N] [--records N] [--batch N]."""
    parser = argparse.ArgumentParser(description="A record-heavy capture, all five codecs or some.")
    parser.add_argument("target")
    parser.add_argument("--codec", action="append", choices=CODEC_NAMES, default=[])
    parser.add_argument("--magic", type=int, choices=(0, 1, 2), default=2)
    parser.add_argument("--records", type=int, default=RECORDS_PER_CODEC, help="per codec")
    parser.add_argument("--batch", type=int, default=BATCH_RECORDS, help="records in a batch")
    given = parser.parse_args()
    codecs = given.codec or CODEC_NAMES
    synthesise(
        given.target, [Recipe(name, given.magic, given.records, given.batch) for name in codecs]
    )


if __name__ == "__main__":
    main()
