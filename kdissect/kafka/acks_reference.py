"""The acks of a Produce request as plain Python: the definitions of `acks.py`."""

from __future__ import annotations

from kdissect.kafka.acks import ACKS_MAX, FLEXIBLE_PRODUCE, TAGS_MAX
from kdissect.kafka.evidence_reference import Header
from kdissect.tcp.pieces_reference import PlainStream


def uvarint(stream: PlainStream, at: int) -> tuple[int | None, int]:
    """(value, next position); None where a byte of it is missing or there are more than 5."""
    value = 0
    for number in range(5):
        byte = stream.byte(at)
        at += 1
        if byte is None:
            return None, at
        value |= (byte & 127) << 7 * number
        if byte < 128:
            return value, at
    return None, at


def acks_at(stream: PlainStream, pos: int, header: Header) -> int | None:
    """Where a Produce request has its acks; None where that cannot be told."""
    assert header.size is not None
    assert header.api_version is not None
    end = pos + 4 + header.size
    at = pos + 14 + (int(header.client.split(" ")[0]) if header.client else 0)

    if header.api_version >= FLEXIBLE_PRODUCE:
        tags, at = uvarint(stream, at)
        if tags is None or tags > TAGS_MAX:
            return None
        for _ in range(tags):
            _, at = uvarint(stream, at)
            size, at = uvarint(stream, at)
            if size is None or size > end - at:
                return None
            at += size
        length, at = uvarint(stream, at)
        if length is None:
            return None
        at += max(0, length - 1)
    elif header.api_version >= 3:
        length = stream.number(at, 2)
        if length is None:
            return None
        at += 2 + (length if length < 0x8000 else 0)
    return at


def acks(stream: PlainStream, pos: int, header: Header) -> int | None:
    """acks of a Produce request, as an unsigned number; None where it cannot be read."""
    assert header.size is not None
    at = acks_at(stream, pos, header)
    return None if at is None or at + 2 > pos + 4 + header.size else stream.number(at, 2)


def may_be_produce(stream: PlainStream, pos: int, header: Header) -> bool:
    """Whether what follows the header of a Produce request can be one; missing bytes can."""
    assert header.size is not None
    assert header.api_version is not None
    at = acks_at(stream, pos, header)
    end = pos + 4 + header.size
    if at is None:
        return True
    if at + 7 > end or ACKS_MAX < (stream.number(at, 2) or 0) < 0xFFFF:
        return False
    if header.api_version < FLEXIBLE_PRODUCE:
        return (stream.number(at + 6, 4) or 0) * 6 <= end - (at + 10)
    count, at = uvarint(stream, at + 6)
    return ((count or 0) - 1) * 3 <= end - at
