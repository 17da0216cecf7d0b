"""Kafka frames written byte by byte, with their size prefix."""

import struct


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
    correlation_id: int, acks: int, api_version: int = 7, client_id: str | None = "orders",
    room: int = 0,
) -> bytes:  # fmt: skip
    """A Produce request of no topic, with zeros after it; v9 and later are flexible."""
    if api_version >= 9:
        body = b"\0\0" + struct.pack(">hi", acks, 1000) + b"\x01\0"
    elif api_version >= 3:
        body = b"\xff\xff" + struct.pack(">hii", acks, 1000, 0)
    else:
        body = struct.pack(">hii", acks, 1000, 0)
    return request(correlation_id, 0, api_version, client_id, body + bytes(room))


def response(correlation_id: int, body: bytes = bytes(12)) -> bytes:
    return framed(struct.pack(">i", correlation_id) + body)
