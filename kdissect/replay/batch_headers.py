"""Headers of record batches, read and patched in place: no record is decompressed or moved."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import crc32c

_ENTRY = struct.Struct(">qi")  # base offset, length of what follows
_MAGIC_AT = 16
_CRC_AT, _CRC_FROM = 17, 21
_PRODUCER_AT = 43
_PRODUCER = struct.Struct(">qhi")  # producer id, epoch, base sequence
_HEADER = struct.Struct(">qiibIhiqqqhii")
BATCH_HEADER_SIZE = _HEADER.size  # 61
_LENGTH_MIN = 14
_TRANSACTIONAL, _CONTROL = 16, 32


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


def last_data(data: bytes) -> int:
    """The last offset of batches that are whole and no markers; -1 where there are none."""
    whole = (each for each in headers(data) if not each.is_partial and not each.is_control)
    return max((each.last_offset for each in whole), default=-1)


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
        struct.pack_into(">I", data, header.pos + _CRC_AT, _checksum(data, header))


def is_sealed(data: bytes, header: BatchHeader) -> bool:
    """Return whether the CRC-32C of a whole batch of magic 2 is right."""
    stored = int.from_bytes(data[header.pos + _CRC_AT : header.pos + _CRC_FROM], "big")
    return _checksum(data, header) == stored


def _checksum(data: bytes | bytearray, header: BatchHeader) -> int:
    covered = memoryview(data)[header.pos + _CRC_FROM : header.pos + header.size]
    return int(crc32c.crc32c(covered))
