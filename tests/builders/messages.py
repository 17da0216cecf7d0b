"""Captures made for a test: one connection that carries given messages."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdissect import Message, encode_message
from kdissect.codec import message_codec
from kdissect.codec.record_encoder import encode_batch
from kdissect.protocol import catalog
from tests.builders.captures import pcap_bytes
from tests.builders.frames import framed
from tests.builders.talks import Talk

SEGMENT_BYTES = 40_000
FETCH, FETCH_SNAPSHOT = 1, 59

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
    talks: dict[int, Talk] = {}
    time = 1_700_000_000_000_000
    for number, frames in enumerate(exchanges):
        port = ports[number] if ports else 50000
        if port not in talks:
            talks[port] = Talk(port, time, step=1000)
            talks[port].acknowledge(0)
        else:
            talks[port].time = time
        talk = talks[port]
        for side, frame in enumerate(frames):
            talk.time += (pauses_ms or {}).get((number, side), 0) * 1000
            talk.send(side, framed(frame), SEGMENT_BYTES, keep=(number, side) not in lost)
        time = talk.time
    packets = [packet for talk in talks.values() for packet in talk.packets]
    path.write_bytes(pcap_bytes(sorted(packets, key=lambda packet: packet.time_ns)))
    return path


def a_request(
    api_key: int, api_version: int, number: int = 0, client_id: str | None = "made", **body: Any
) -> Message:
    """A request; number: its correlation id."""
    header = {"correlation_id": number, "client_id": client_id}
    return Message(api_key, api_version, "request", header, body)


def a_response(api_key: int, api_version: int, number: int = 0, **body: Any) -> Message:
    return Message(api_key, api_version, "response", {"correlation_id": number}, body)


def request_frame(*api_and_number: Any, **body: Any) -> bytes:
    """A request as bytes without their size; arguments of `a_request`."""
    return encode_message(a_request(*api_and_number, **body))


def response_frame(*api_and_number: Any, **body: Any) -> bytes:
    return encode_message(a_response(*api_and_number, **body))


def exchange(
    number: int, api_key: int, version: int, request: dict[str, Any], response: dict[str, Any]
) -> Exchange:
    return (
        request_frame(api_key, version, number, **request),
        response_frame(api_key, version, number, **response),
    )


def fetch(number: int, topic: Any, records: Sequence[bytes], version: int = 12) -> Exchange:
    """A Fetch of a topic (a name, or from v13 on an id); one record set per partition."""
    key = "topic" if version < 13 else "topic_id"
    asked = [{"partition": at} for at in range(len(records))]
    given = [{"partition_index": at, "records": data} for at, data in enumerate(records)]
    request = {"topics": [{key: topic, "partitions": asked}]}
    return exchange(
        number, FETCH, version, request, {"responses": [{key: topic, "partitions": given}]}
    )


def snapshot_piece(
    number: int, position: int, size: int, data: bytes, follower: int = -1, end_offset: int = 100
) -> Exchange:
    """A FetchSnapshot of the metadata log: bytes of the snapshot from a position on."""
    place = {"snapshot_id": {"end_offset": end_offset, "epoch": 1}, "position": position}
    asked = {"partition": 0, **place}
    given = {"index": 0, "size": size, "unaligned_records": data, **place}
    topics = [{"name": "__cluster_metadata", "partitions": [each]} for each in (asked, given)]
    request = {"replica_id": follower, "topics": topics[:1]}
    return exchange(number, FETCH_SNAPSHOT, 0, request, {"topics": topics[1:]})


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
        (number, one)
        for number, (_, one) in catalog.records("metadata").items()
        if one.name == record
    )
    return bytes([1, number, version]) + message_codec.encode(definition, version, fields)


def numbered_batch(first: int, count: int = 2, **more: Any) -> bytes:
    """Records with offsets from `first` on."""
    return encode_batch(
        [
            {"offset": at, "timestamp_ms": 5, "key": b"k", "value": b"%d" % at, "headers": []}
            for at in range(first, first + count)
        ],
        **more,
    )
