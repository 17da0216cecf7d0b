"""Reads acks from a Produce request; it decides whether a response is expected.

acks follow the transactional id, so a few lengths must be skipped first.
"""

from __future__ import annotations

from kdissect.arrays import Struct
from kdissect.jit import int64, kernel
from kdissect.kafka.walk import Stream
from kdissect.tcp.byte_ranges import peek

FLEXIBLE_PRODUCE = 9  # first Produce version with tagged fields and compact strings (KIP-482)
ACKS_MAX = 127  # -1 means all; before 0.9 a client could ask for any number of brokers
TAGS_MAX = 64  # tagged fields of a request header; acks after more of them are not looked for


@kernel
def _acks_at(stream: Stream, index: int, pos: int, header: Struct) -> int:
    """Position of acks in the Produce request at `pos`; -1 if it cannot be found.

    Bytes before acks are missing then, or they are no tagged fields of a header.

    v0-2 begin with acks. v3-8 begin with the transactional id, a nullable string. From v9 on the
    header ends with tagged fields and the string is compact.
    """
    # size int32, api key int16, api version int16, correlation id int32, client id int16 + text
    at = pos + 14 + max(int64(0), header["client_length"])
    end = pos + 4 + header["size"]
    api_version = header["api_version"]
    if api_version < 3:
        length = int64(0)
    elif api_version < FLEXIBLE_PRODUCE:
        length = peek(stream.pieces, index, stream.stop, at, 2)
        if length < 0:
            return -1
        at += 2
        # length -1: the transactional id is null
        if length == 0xFFFF:
            length = 0
    else:
        # KIP-482: the header's tagged fields: a count, then tag, size and bytes of each
        tags, at = _uvarint(stream, index, at)
        if tags < 0 or tags > TAGS_MAX:
            return -1
        for _ in range(tags):
            _, at = _uvarint(stream, index, at)
            size, at = _uvarint(stream, index, at)
            if size < 0 or size > end - at:
                return -1
            at += size
        length, at = _uvarint(stream, index, at)
        if length < 0:
            return -1
        # KIP-482: a compact string's length is stored plus one, 0 means null
        length = max(int64(0), length - 1)
    return at + length


@kernel
def acks_of(stream: Stream, index: int, pos: int, header: Struct) -> int:
    """acks of the Produce request at `pos`, unsigned (0 to 65535); -1 if they cannot be read."""
    at = _acks_at(stream, index, pos, header)
    if at < 0 or at + 2 > pos + 4 + header["size"]:
        return -1
    return peek(stream.pieces, index, stream.stop, at, 2)


@kernel
def may_be_produce(stream: Stream, index: int, pos: int, header: Struct) -> bool:
    """Return whether the bytes after the header at `pos` can be a Produce request: True if acks
    cannot be found.

    acks must have a plausible value, and there must be room for the topics that the request claims.
    """
    at = _acks_at(stream, index, pos, header)
    end = pos + 4 + header["size"]
    if at < 0:
        return True
    if at + 7 > end:
        return False
    acks = peek(stream.pieces, index, stream.stop, at, 2)
    if ACKS_MAX < acks < 0xFFFF:
        return False
    # acks int16, timeout int32, then the array of topics: at least 6 bytes per topic (name, array),
    # or 3 in compact form
    if header["api_version"] < FLEXIBLE_PRODUCE:
        count = peek(stream.pieces, index, stream.stop, at + 6, 4)
        return count * 6 <= end - (at + 10)
    count, at = _uvarint(stream, index, at + 6)
    return (count - 1) * 3 <= end - at


@kernel
def _uvarint(stream: Stream, index: int, pos: int) -> tuple[int, int]:
    """(value, next position) of an unsigned varint; value -1 if it is missing or longer than 5
    bytes."""
    value = int64(0)
    for number in range(5):
        byte = peek(stream.pieces, index, stream.stop, pos, 1)
        pos += 1
        if byte < 0:
            return int64(-1), pos
        value |= (byte & 127) << (7 * number)
        if byte < 128:
            return value, pos
    return int64(-1), pos
