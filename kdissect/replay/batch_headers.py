"""Headers of record batches, read and patched in place: no record is decompressed or moved."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import crc32c

_ENTRY = struct.Struct(">qi")  # base offset, length of what follows
_MAGIC_AT = 16
_CRC_AT, _CRC_FROM = 17, 21
_SPAN_AT, _SPAN = 21, struct.Struct(">hi")  # attributes, last offset delta
_PRODUCER_AT = 43
_PRODUCER = struct.Struct(">qhi")  # producer id, epoch, base sequence
_HEADER = struct.Struct(">qiibIhiqqqhii")
BATCH_HEADER_SIZE = _HEADER.size  # 61
_LENGTH_MIN = 14
_LOG_APPEND_TIME, _TRANSACTIONAL, _CONTROL = 8, 16, 32
_MAX_TIMESTAMP_AT, _TIMESTAMP = 35, struct.Struct(">q")


class BatchHeader(NamedTuple):
    """Header of a record batch (magic 2) in a record set.

    pos, size: position and byte count of the batch. `is_partial`: the record set ends before that.
    A message of magic 0 or 1 has its offset as both offsets, -1 for the producer's fields, and
    counts as one record.
    """

    pos: int
    size: int
    magic: int
    base_offset: int
    last_offset: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int
    is_transactional: bool
    is_control: bool
    is_partial: bool


def headers(data: bytes) -> Iterator[BatchHeader]:
    """The headers of a record set's batches and messages, up to the first incomplete header."""
    pos = 0
    while pos + _MAGIC_AT < len(data):
        base_offset, length = _ENTRY.unpack_from(data, pos)
        if length < _LENGTH_MIN:
            return
        size = length + _ENTRY.size
        magic = data[pos + _MAGIC_AT]
        is_partial = pos + size > len(data)
        if magic == 2 and pos + BATCH_HEADER_SIZE <= len(data) and size >= BATCH_HEADER_SIZE:
            (_, _, _, _, _, attributes, delta, _, _, producer_id, epoch, sequence, count) = (
                _HEADER.unpack_from(data, pos)
            )
            yield BatchHeader(
                pos, size, magic, base_offset, base_offset + delta, producer_id, epoch, sequence,
                count, bool(attributes & _TRANSACTIONAL), bool(attributes & _CONTROL), is_partial,
            )  # fmt: skip
        elif magic != 2:
            yield BatchHeader(
                pos, size, magic, base_offset, base_offset, -1, -1, -1, 1, False, False, is_partial
            )
        pos += size


def max_timestamp(batch: bytes) -> int:
    """The latest time of a batch's records (magic 2)."""
    time: int = _TIMESTAMP.unpack_from(batch, _MAX_TIMESTAMP_AT)[0]
    return time


def has_append_time(batch: bytes) -> bool:
    """Return whether the broker set the times of a batch (magic 2)."""
    return bool(batch[_SPAN_AT + 1] & _LOG_APPEND_TIME)


def last_data(data: bytes) -> int:
    """The last offset of batches that are whole and no markers; -1 where there are none."""
    pos, last, size = 0, -1, len(data)
    while pos + _MAGIC_AT < size:
        base_offset, length = _ENTRY.unpack_from(data, pos)
        end = pos + length + _ENTRY.size
        if length < _LENGTH_MIN or end > size:
            break
        if data[pos + _MAGIC_AT] != 2:
            last = max(last, base_offset)
        elif end - pos >= BATCH_HEADER_SIZE:
            attributes, delta = _SPAN.unpack_from(data, pos + _SPAN_AT)
            if not attributes & _CONTROL:
                last = max(last, base_offset + delta)
        pos = end
    return last


def has_producer(data: bytes) -> bool:
    """Return whether a batch has a producer id. True as well if a quick look cannot exclude
    that."""
    pos, size = 0, len(data)
    while pos + BATCH_HEADER_SIZE <= size:
        _, length = _ENTRY.unpack_from(data, pos)
        if length < _LENGTH_MIN or data[pos + _MAGIC_AT] != 2 or data[pos + _PRODUCER_AT] < 0x80:
            return True
        pos += length + _ENTRY.size
    return pos < size


def patch_producer(
    data: bytearray,
    header: BatchHeader,
    producer_id: int,
    epoch: int,
    base_sequence: int,
    *,
    seal: bool = True,
) -> None:
    """Give the batch another producer, and the CRC-32C that goes with it (`seal`)."""
    _PRODUCER.pack_into(data, header.pos + _PRODUCER_AT, producer_id, epoch, base_sequence)
    if seal:
        _seal(data, header)


def _seal(data: bytearray, header: BatchHeader) -> None:
    covered = memoryview(data)[header.pos + _CRC_FROM : header.pos + header.size]
    struct.pack_into(">I", data, header.pos + _CRC_AT, crc32c.crc32c(covered))


def is_sealed(data: bytes, header: BatchHeader) -> bool:
    """Return whether the CRC-32C of a whole batch of magic 2 is right."""
    stored = int.from_bytes(data[header.pos + _CRC_AT : header.pos + _CRC_FROM], "big")
    covered = memoryview(data)[header.pos + _CRC_FROM : header.pos + header.size]
    return bool(crc32c.crc32c(covered) == stored)
