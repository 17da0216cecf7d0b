"""Captures made for a test: one connection that carries given messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdissect import Message, encode_message
from kdissect.codec import message_codec
from kdissect.codec.record_encoder import encode_batch
from kdissect.protocol import catalog
from tests.builders.captures import pcap
from tests.builders.packets import ethernet, ipv4, tcp

SYN, ACK, PSH = 2, 16, 8
SEGMENT_BYTES = 40_000
CLIENT, BROKER = "10.0.0.1", "10.0.0.2"
PRODUCE, FETCH, FETCH_SNAPSHOT = 0, 1, 59

# a commit of group fish for partition 7 of topic t
COMMIT_KEY = b"\0\x01\0\x04fish\0\x01t\0\0\0\x07"
COMMIT = b"\0\0" + bytes(8) + b"\0\x09swordfish" + bytes(8)

Exchange = tuple[bytes, bytes]  # frames of a request and of its response


def write_capture(
    path: Path,
    exchanges: Iterable[Exchange],
    ports: Sequence[int] = (),
    lost: Collection[tuple[int, int]] = (),
    pauses_ms: Mapping[tuple[int, int], int] | None = None,
) -> Path:
    """A pcap with connections from their handshakes on, exchanges one after another.

    ports: the client's port of each exchange; without them one connection carries all. lost:
    (number of an exchange, its side) of messages that are not in the capture. Packets are 1 ms
    apart; pauses_ms: how much more before a message.
    """
    start_ms, pause_ms = 1_700_000_000_000, 0
    times: list[tuple[int, int]] = []
    seq: dict[tuple[str, int], int] = {}
    packets: list[bytes] = []

    def send(source: str, port: int, payload: bytes, flags: int, is_lost: bool = False) -> None:
        target = BROKER if source == CLIENT else CLIENT
        ends = (port, 9092) if source == CLIENT else (9092, port)
        ack = seq[target, port] if flags & ACK else 0
        segment = tcp(payload, ports=ends, seq=seq[source, port] % 2**32, ack=ack, flags=flags)
        packet = ethernet(ipv4(segment, addresses=(source, target), ip_id=len(packets) % 65536))
        if not is_lost:
            packets.append(packet)
            now = start_ms + len(times) + pause_ms
            times.append((now // 1000, now % 1000 * 1000))
        seq[source, port] += len(payload) + (flags & SYN != 0)

    for number, frames in enumerate(exchanges):
        port = ports[number] if ports else 50000
        if (CLIENT, port) not in seq:
            seq[CLIENT, port], seq[BROKER, port] = 1000, 7000
            send(CLIENT, port, b"", SYN)
            send(BROKER, port, b"", SYN | ACK)
            send(CLIENT, port, b"", ACK)
        for side, frame in enumerate(frames):
            pause_ms += (pauses_ms or {}).get((number, side), 0)
            data = len(frame).to_bytes(4, "big") + frame
            source = BROKER if side else CLIENT
            for at in range(0, len(data), SEGMENT_BYTES):
                part = data[at : at + SEGMENT_BYTES]
                send(source, port, part, PSH | ACK, (number, side) in lost)
    path.write_bytes(pcap(packets, times=times))
    return path


def exchange(
    number: int, api_key: int, version: int, request: dict[str, Any], response: dict[str, Any]
) -> Exchange:
    header = {"correlation_id": number, "client_id": "made"}
    return (
        encode_message(Message(api_key, version, "request", header, request)),
        encode_message(Message(api_key, version, "response", {"correlation_id": number}, response)),
    )


def fetch(number: int, topic: Any, records: Sequence[bytes], version: int = 12) -> Exchange:
    """A Fetch of a topic (a name, or from v13 on an id); one record set per partition."""
    key = "topic" if version < 13 else "topic_id"
    asked = [{"partition": at} for at in range(len(records))]
    given = [{"partition_index": at, "records": data} for at, data in enumerate(records)]
    return exchange(
        number,
        FETCH,
        version,
        {"topics": [{key: topic, "partitions": asked}]},
        {"responses": [{key: topic, "partitions": given}]},
    )


def snapshot_piece(
    number: int, position: int, size: int, data: bytes, follower: int = -1, end_offset: int = 100
) -> Exchange:
    """A FetchSnapshot of the metadata log: bytes of the snapshot from a position on."""
    place = {"snapshot_id": {"end_offset": end_offset, "epoch": 1}, "position": position}
    topic = "__cluster_metadata"
    return exchange(
        number,
        FETCH_SNAPSHOT,
        0,
        {
            "replica_id": follower,
            "topics": [{"name": topic, "partitions": [{"partition": 0, **place}]}],
        },
        {
            "topics": [
                {
                    "name": topic,
                    "partitions": [{"index": 0, "size": size, "unaligned_records": data, **place}],
                }
            ]
        },
    )


def batch(pairs: Sequence[tuple[bytes | None, bytes | None]], first: int = 0, **how: Any) -> bytes:
    """A record batch of these keys and values."""
    records = [
        {"offset": first + at, "timestamp_ms": 1_600_000_000_000 + at, "key": key, "value": value}
        for at, (key, value) in enumerate(pairs)
    ]
    return encode_batch(records, **how)


def metadata_record(record: str, version: int = 0, /, **fields: Any) -> bytes:
    """The value of a record of the metadata log."""
    number, definition = next(
        (number, one) for number, one in catalog.metadata_records().items() if one.name == record
    )
    return bytes([1, number, version]) + message_codec.encode(definition, version, fields)


def numbered_batch(first: int, count: int = 2, skipped: Sequence[int] = (), **more: Any) -> bytes:
    """Records with offsets from `first`, without those that are skipped."""
    return encode_batch(
        [
            {"offset": at, "timestamp_ms": 5, "key": b"k", "value": b"%d" % at, "headers": []}
            for at in range(first, first + count)
            if at not in skipped
        ],
        **more,
    )
