"""Batches of record sets. Headers are read and patched in place; records are decoded to compare."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import crc32c

from kdissect.codec.compression import CODEC_NAMES, Codec, DecompressionLimits, decompressed
from kdissect.codec.record_batches import decode_record_set
from kdissect.status import Status
from kdissect.tables.schemas import Row

_ENTRY = struct.Struct(">qi")  # base offset, length of what follows
_MAGIC_AT = 16
_CRC_AT, _CRC_FROM = 17, 21
_PRODUCER_AT = 43
_PRODUCER = struct.Struct(">qhi")  # producer id, epoch, base sequence
_HEADER = struct.Struct(">qiibIhiqqqhii")
BATCH_HEADER_SIZE = _HEADER.size  # 61
_LENGTH_MIN = 14
_TRANSACTIONAL, _CONTROL = 16, 32
_ATTRIBUTES_AT, _TIMES_AT, _COUNT_AT = 21, 27, 57
_MARKER_AT = 68  # its type: brokers write one record without deltas, after its version
_CODEC_MASK, _APPEND_TIME = 7, 8
_LIMITS = DecompressionLimits()


class BatchHeader(NamedTuple):
    """Header of a record batch (magic 2) in a record set.

    pos, size: position and byte count of the batch. `is_partial`: the record set ends before that.
    is_abort: it is the marker of an aborted transaction. A message of magic 0 or 1 has its offset
    as both offsets, -1 for the producer's fields, and counts as one record.
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
    is_abort: bool
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
            is_control, marker = bool(attributes & _CONTROL), pos + _MARKER_AT
            yield BatchHeader(
                pos, size, magic, base_offset, base_offset + delta, producer_id, epoch, sequence,
                count, bool(attributes & _TRANSACTIONAL), is_control,
                is_control and data[marker : marker + 2] == b"\0\0", is_partial,
            )  # fmt: skip
        elif magic != 2:
            no_producer, marks = (-1, -1, -1), (False, False, False)
            yield BatchHeader(
                pos, size, magic, base_offset, base_offset, *no_producer, 1, *marks, is_partial
            )
        pos += size


def last_data(data: bytes) -> int:
    """The last offset of batches that are whole and no markers; -1 where there are none."""
    whole = (each for each in headers(data) if not each.is_partial and not each.is_control)
    return max((each.last_offset for each in whole), default=-1)


def aborted(found: Sequence[BatchHeader]) -> Iterator[BatchHeader]:
    """Those of a log's batches whose transactions later markers abort, the last first (KIP-98)."""
    producers: set[int] = set()
    for header in reversed(found):
        if not header.is_control:
            if header.is_transactional and header.producer_id in producers:
                yield header
        elif header.is_abort:
            producers.add(header.producer_id)
        else:
            producers.discard(header.producer_id)


def patch_producer(
    data: bytearray, header: BatchHeader, producer_id: int, epoch: int, base_sequence: int
) -> None:
    """Give the batch another producer. A right CRC-32C stays right, a wrong one stays as it is."""
    was_sealed = is_sealed(data, header)
    _PRODUCER.pack_into(data, header.pos + _PRODUCER_AT, producer_id, epoch, base_sequence)
    if was_sealed:
        struct.pack_into(">I", data, header.pos + _CRC_AT, _checksum(data, header))


def is_sealed(data: bytes | bytearray, header: BatchHeader) -> bool:
    """Return whether the CRC-32C of a whole batch of magic 2 is right."""
    stored = int.from_bytes(data[header.pos + _CRC_AT : header.pos + _CRC_FROM], "big")
    return _checksum(data, header) == stored


def _checksum(data: bytes | bytearray, header: BatchHeader) -> int:
    covered = memoryview(data)[header.pos + _CRC_FROM : header.pos + header.size]
    return int(crc32c.crc32c(covered))


# -- records --------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """A whole batch in a record set, or a message of magic 0 or 1."""

    record_set: bytes
    header: BatchHeader

    @property
    def data(self) -> bytes:
        return self.record_set[self.header.pos : self.header.pos + self.header.size]

    def rows(self) -> dict[int, Row]:
        """The decoded records by their offsets."""
        return _rows_of(self.record_set).get(self.header.pos, {})


@lru_cache(maxsize=4)  # those of a captured and a delivered batch are read in turn
def _rows_of(record_set: bytes) -> dict[int, dict[int, Row]]:
    """The records of each batch, by its position."""
    found = decode_record_set(record_set)
    positions = [batch["pos"] for batch in found.batches]
    rows: dict[int, dict[int, Row]] = defaultdict(dict)
    for row in found.records:
        rows[positions[row["batch_index"]]][row["offset"]] = row
    return rows


def batches_of(data: bytes) -> list[Batch]:
    """The whole batches of a record set."""
    return [Batch(data, each) for each in headers(data) if not each.is_partial]


# These take batches of magic 2.


def are_equal(one: bytes, other: bytes) -> bool:
    """Return whether two batches hold the same records byte for byte, with the same times; those
    that a broker set are no matter."""
    have_times = not has_append_time(one) and not has_append_time(other)
    if have_times and one[_TIMES_AT:_PRODUCER_AT] != other[_TIMES_AT:_PRODUCER_AT]:
        return False
    return one[_COUNT_AT:] == other[_COUNT_AT:]


def have_same_content(one: bytes, other: bytes) -> bool:
    """Return whether two batches hold the same records; they may be compressed differently."""
    return one[_COUNT_AT:] == other[_COUNT_AT:] or _section(one) == _section(other)


def _section(batch: bytes) -> bytes | None:
    """The records of a whole batch, uncompressed; None if they cannot be read."""
    codec, data = batch[_ATTRIBUTES_AT + 1] & _CODEC_MASK, batch[BATCH_HEADER_SIZE:]
    if codec == Codec.NONE:
        return data
    status, section = decompressed(codec, data, _LIMITS.batch_allowance(len(data)))
    return section if status == Status.OK else None


def content_digest(batch: bytes) -> int:
    """A hash of the records of a batch, uncompressed; valid in this process."""
    return hash(_section(batch))


def has_append_time(batch: bytes) -> bool:
    """Return whether the broker set the times of a batch."""
    return bool(batch[_ATTRIBUTES_AT + 1] & _APPEND_TIME)


def timestamp_type(batch: bytes) -> str:
    return "LogAppendTime" if has_append_time(batch) else "CreateTime"


def codec_of(batch: bytes) -> str:
    """The name of the compression of a batch."""
    number = batch[_ATTRIBUTES_AT + 1] & _CODEC_MASK
    return CODEC_NAMES[number] if number < len(CODEC_NAMES) else str(number)
