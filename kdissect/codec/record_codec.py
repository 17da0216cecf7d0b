"""Decodes and encodes record sets in plain Python, one batch at a time; it defines `records`.

A record set is a sequence of entries. Each begins with an offset (8 bytes) and a length (4 bytes)
and has its magic at byte 16. The last entry may be cut off, because a broker sends only as many
bytes as requested.

Magic 2 (KIP-98) is a record batch: a header of 61 bytes, then records in zigzag varints, each with
its own size, compressed together. Its CRC-32C covers all bytes after it.

Magic 0 and 1 are messages: each entry is a record. Compressed messages are wrapped: the value of a
message is a compressed message set. Inner offsets of magic 1 count from 0 (KIP-31), and the wrapper
has the offset of its last message. Their CRC-32 covers all bytes after it as well.

`encode_batch` and `encode_messages` write the bytes that `decode_record_set` reads.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import crc32c
import numpy as np

from kdissect.codec.compression import CODEC_NAMES, Codec, DecompressionLimits, compress, decompress
from kdissect.codec.record_batches import (
    BATCHES,
    CONTROL_TYPES,
    TIMESTAMP_TYPES,
    FaultStage,
    wrong_inner_crc,
)
from kdissect.status import Status

_ENTRY_LENGTH_MIN = 14
_HEADER_SIZE = {0: 26, 1: 34, 2: 61}  # bytes of the smallest entry
_BATCH = struct.Struct(">qiibIhiqqqhii")
_UNKNOWN_ROW: dict[str, Any] = dict.fromkeys(
    field.name for field in BATCHES if field.name not in ("set_index", "batch_index", "pos")
)


@dataclass(slots=True)
class RecordSet:
    """The content of a record set; rows have the columns of `records`, without set_index."""

    batches: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    faults: list[tuple[Any, ...]] = field(default_factory=list)  # FAULT, without set_index


class _Malformed(Exception):
    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


def decode_record_set(data: bytes, limits: DecompressionLimits | None = None) -> RecordSet:
    """Decode one record set. Never raises: faults are listed in `faults`."""
    limits = limits or DecompressionLimits()
    result = RecordSet()
    budget = [limits.set_allowance(len(data))]
    pos = 0
    index = 0
    while pos < len(data):
        size = _decode_entry(data, pos, index, result, limits, budget)
        pos += size
        index += 1
    result.faults.sort(key=lambda fault: (fault[0], fault[2]))
    return result


def _decode_entry(
    data: bytes,
    pos: int,
    index: int,
    result: RecordSet,
    limits: DecompressionLimits,
    budget: list[int],
) -> int:
    """Decode the entry at `pos` into `result`; returns its size in bytes."""
    left = len(data) - pos
    row: dict[str, Any] = {"batch_index": index, "pos": pos, **_UNKNOWN_ROW}

    def fault(kind: Status, stage: FaultStage, a: int = 0, b: int = 0) -> None:
        result.faults.append((index, kind, stage, pos, row["size"], a, b))

    row["size"] = left
    announced_size = 12
    if left >= 12:
        length = int.from_bytes(data[pos + 8 : pos + 12], "big", signed=True)
        if length < _ENTRY_LENGTH_MIN:
            # The next entry cannot be found; the rest of the set is lost.
            kind = Status.NEGATIVE_LENGTH if length < 0 else Status.TRUNCATED
            fault(kind, FaultStage.FRAMING, length)
            return left
        announced_size += length
    entry = data[pos : pos + announced_size]
    row["is_partial"] = len(entry) < announced_size
    row["size"] = len(entry)
    result.batches.append(row)
    if len(entry) >= 8:
        row["base_offset"] = int.from_bytes(entry[:8], "big", signed=True)
    if len(entry) < 17:
        return len(entry)
    row["magic"] = magic = int.from_bytes(entry[16:17], "big", signed=True)
    if magic not in (0, 1, 2):
        if not row["is_partial"]:
            row["is_partial"] = None
            fault(Status.UNKNOWN_MAGIC, FaultStage.FRAMING, magic)
        return len(entry)
    if not row["is_partial"] and len(entry) < _HEADER_SIZE[magic]:
        row["is_partial"] = None
        fault(Status.TRUNCATED, FaultStage.FRAMING, len(entry) - 12)
        return len(entry)

    section, announced = _decode_header(entry, magic, row)
    if row["is_partial"]:
        return len(entry)
    crc_end = 21 if magic == 2 else 16
    stored = int.from_bytes(entry[crc_end - 4 : crc_end], "big")
    computed = crc32c.crc32c(entry[21:]) if magic == 2 else zlib.crc32(entry[16:])
    row["crc_ok"] = stored == computed
    if stored != computed:
        fault(Status.BAD_CRC, FaultStage.CRC, stored, computed)

    row["record_count"] = 0
    codec = entry[22 if magic == 2 else 17] & 7
    if codec != Codec.NONE:
        size = 0 if section is None else len(section)
        status, section, allowance = _section(codec, section, limits, budget)
        if status != Status.OK:
            fault(
                status,
                FaultStage.CODEC,
                codec if status is Status.UNKNOWN_CODEC else allowance,
                size,
            )
            return len(entry)
    assert section is not None
    row["uncompressed_size"] = len(section)

    before = len(result.records)
    decode = _decode_records if magic == 2 else _decode_messages
    status = decode(section, row, announced, codec != Codec.NONE, result.records, limits)
    row["record_count"] = len(result.records) - before
    if magic < 2 and codec != Codec.NONE and row["record_count"]:
        row["base_offset"] = result.records[before]["offset"]
    if magic < 2 and codec != Codec.NONE:
        stored, computed = wrong_inner_crc(section, magic)
        if stored != computed:
            fault(Status.BAD_CRC, FaultStage.RECORDS, stored, computed)
    if status != Status.OK:
        fault(status, FaultStage.RECORDS, announced, row["record_count"])
    invalid = 0
    for record in result.records[before:]:
        for header in record["headers"]:
            key, header["key"] = header["key"], header["key"].decode("utf-8", "replace")
            invalid += header["key"].encode() != key
    if invalid:
        fault(Status.INVALID_UTF8, FaultStage.TEXT, invalid)
    return len(entry)


def _decode_header(entry: bytes, magic: int, row: dict[str, Any]) -> tuple[bytes | None, int]:
    """Fill `row` from the header's bytes; returns (bytes of the section, record count)."""

    def read(start: int, size: int) -> int | None:
        if len(entry) < start + size:
            return None
        return int.from_bytes(entry[start : start + size], "big", signed=True)

    if magic < 2:
        row["last_offset"] = row["base_offset"]
        row["partition_leader_epoch"] = row["producer_id"] = row["producer_epoch"] = -1
        row["base_sequence"] = -1
        row["max_timestamp_ms"] = read(18, 8) if magic == 1 else -1
        attributes = read(17, 1)
        if attributes is None:
            return None, -1
        row["is_transactional"] = row["is_control"] = False
        _decode_attributes(attributes, magic, row)
        if row["is_partial"] or attributes & 7 == 0:
            return entry, -1
        return _wrapped_value(entry, 26 if magic == 1 else 18), -1

    row["partition_leader_epoch"] = read(12, 4)
    delta = read(23, 4)
    row["last_offset"] = None if delta is None else _int64(row["base_offset"] + delta)
    row["base_timestamp_ms"] = read(27, 8)
    row["max_timestamp_ms"] = read(35, 8)
    row["producer_id"] = read(43, 8)
    row["producer_epoch"] = read(51, 2)
    row["base_sequence"] = read(53, 4)
    row["record_count"] = read(57, 4)
    attributes = read(21, 2)
    if attributes is not None:
        row["is_transactional"] = bool(attributes & 16)
        row["is_control"] = bool(attributes & 32)
        # KIP-534: with this bit the first timestamp in the header is the delete horizon.
        row["delete_horizon_ms"] = row["base_timestamp_ms"] if attributes & 64 else None
        _decode_attributes(attributes, magic, row)
    count = row["record_count"]
    return entry[61:], -1 if count is None else count


def _decode_attributes(attributes: int, magic: int, row: dict[str, Any]) -> None:
    codec = attributes & 7
    row["codec"] = CODEC_NAMES[codec] if codec < len(CODEC_NAMES) else None
    row["timestamp_type"] = TIMESTAMP_TYPES[0 if magic == 0 else 2 if attributes & 8 else 1]


def _wrapped_value(entry: bytes, pos: int) -> bytes | None:
    """The value of a wrapper whose key length is at `pos`; None if there is none."""
    key_size = int.from_bytes(entry[pos : pos + 4], "big", signed=True)
    pos += 4 + max(key_size, 0)
    if len(entry) - pos < 4:
        return None
    size = int.from_bytes(entry[pos : pos + 4], "big", signed=True)
    pos += 4
    return entry[pos : pos + size] if 0 <= size <= len(entry) - pos else None


def _section(
    codec: int, data: bytes | None, limits: DecompressionLimits, budget: list[int]
) -> tuple[Status, bytes | None, int]:
    """Decompress a record section: (status, bytes, bytes allowed)."""
    if data is None:
        return Status.CORRUPT, None, 0
    allowance = min(limits.batch_allowance(len(data)), budget[0])
    source = np.frombuffer(data, np.uint8)
    room = 0
    while True:
        room = min(max(4 * room, 1 << 16), allowance)
        out = np.empty(room, np.uint8)
        status, size = decompress(codec, source, out)
        if status != Status.ROOM_NEEDED or room == allowance:
            break
    if status == Status.OK:
        budget[0] -= size
        return Status.OK, out[:size].tobytes(), allowance
    budget[0] -= min(allowance, limits.ratio_free_size)
    return Status.LIMIT if status == Status.ROOM_NEEDED else status, None, allowance


def record_section(batch: bytes) -> bytes | None:
    """The records of a whole batch of magic 2, uncompressed; None if they cannot be read."""
    codec, data = batch[22] & 7, batch[_HEADER_SIZE[2] :]
    if codec == Codec.NONE:
        return data
    limits = DecompressionLimits()
    return _section(codec, data, limits, [limits.set_allowance(len(data))])[1]


def _decode_records(
    section: bytes,
    row: dict[str, Any],
    announced: int,
    is_compressed: bool,
    records: list[dict[str, Any]],
    limits: DecompressionLimits,
) -> Status:
    """Read as many records of magic 2 as announced, or as there are."""
    pos = 0
    read = 0
    while read < announced and pos < len(section):
        try:
            record, pos = _decode_record(section, pos, row, limits)
        except _Malformed as malformed:
            return malformed.status
        record["record_index"] = read
        records.append(record)
        read += 1
    return Status.OK if read == announced and pos == len(section) else Status.COUNT_MISMATCH


def _decode_record(
    section: bytes, pos: int, row: dict[str, Any], limits: DecompressionLimits
) -> tuple[dict[str, Any], int]:
    size, pos = read_varint(section, pos, len(section))
    if size < 0:
        raise _Malformed(Status.NEGATIVE_LENGTH)
    if size > len(section) - pos or size < 1:
        raise _Malformed(Status.TRUNCATED)
    end = pos + size
    # after the attributes byte, which has no meaning
    time_delta, pos = read_varlong(section, pos + 1, end)
    offset_delta, pos = read_varint(section, pos, end)
    key, pos = _read_bytes(section, pos, end)
    value, pos = _read_bytes(section, pos, end)
    count, pos = read_varint(section, pos, end)
    if count < 0:
        raise _Malformed(Status.NEGATIVE_LENGTH)
    if count > (end - pos) // 2:  # a header has at least two bytes
        raise _Malformed(Status.COUNT_IMPOSSIBLE)
    if count > limits.record_headers_max:
        raise _Malformed(Status.LIMIT)
    headers = []
    for _ in range(count):
        name, pos = _read_bytes(section, pos, end)
        if name is None:
            raise _Malformed(Status.NEGATIVE_LENGTH)
        header_value, pos = _read_bytes(section, pos, end)
        headers.append({"key": name, "value": header_value})
    if pos != end:
        raise _Malformed(Status.SIZE_MISMATCH)
    if row["timestamp_type"] == "LogAppendTime":
        time = row["max_timestamp_ms"]
    else:
        time = _int64(row["base_timestamp_ms"] + time_delta)
    record = {
        "batch_index": row["batch_index"],
        "offset": _int64(row["base_offset"] + offset_delta),
        "timestamp_ms": time,
        "timestamp_type": row["timestamp_type"],
        "key": key,
        "value": value,
        "headers": headers,
        "control_type": control_type(key) if row["is_control"] else None,
    }
    return record, pos


def control_type(key: bytes | None) -> str:
    """Name of the type in a control record's key: int16 key version, int16 type."""
    if key is not None and len(key) >= 4:
        key_version, number = struct.unpack_from(">hH", key)
        if key_version >= 0 and number < len(CONTROL_TYPES):
            return CONTROL_TYPES[number]
    return "UNKNOWN"


def _decode_messages(
    section: bytes,
    row: dict[str, Any],
    announced: int,
    is_compressed: bool,
    records: list[dict[str, Any]],
    limits: DecompressionLimits,
) -> Status:
    """Read the messages of a section: those inside a wrapper, or one uncompressed message."""
    shift = 0
    if is_compressed and row["magic"] == 1 and row["last_offset"] != 0:
        # A stored 0 means that no offsets were assigned yet: then the inner ones stay.
        last = _last_inner_offset(section)
        shift = 0 if last is None else row["last_offset"] - last
    pos = 0
    read = 0
    while pos < len(section):
        try:
            record, pos = _decode_message(section, pos, row)
        except _Malformed as malformed:
            return malformed.status
        record["record_index"] = read
        record["offset"] = _int64(record["offset"] + shift)
        records.append(record)
        read += 1
    return Status.OK


def _last_inner_offset(section: bytes) -> int | None:
    pos = 0
    last = None
    while len(section) - pos >= 12:
        offset, size = struct.unpack_from(">qi", section, pos)
        if size < _ENTRY_LENGTH_MIN or size > len(section) - pos - 12:
            break
        last = offset
        pos += 12 + size
    return last


def _decode_message(section: bytes, pos: int, row: dict[str, Any]) -> tuple[dict[str, Any], int]:
    if len(section) - pos < 12:
        raise _Malformed(Status.TRUNCATED)
    offset, size = struct.unpack_from(">qi", section, pos)
    if size < 0:
        raise _Malformed(Status.NEGATIVE_LENGTH)
    if size < _ENTRY_LENGTH_MIN or size > len(section) - pos - 12:
        raise _Malformed(Status.TRUNCATED)
    end = pos + 12 + size
    if section[pos + 16] != row["magic"]:
        raise _Malformed(Status.UNKNOWN_MAGIC)
    if section[pos + 17] & 7:
        raise _Malformed(Status.UNKNOWN_CODEC)  # a wrapper inside a wrapper
    time = -1
    pos += 18
    if row["magic"] == 1:
        if end - pos < 16:
            raise _Malformed(Status.TRUNCATED)
        time = int.from_bytes(section[pos : pos + 8], "big", signed=True)
        pos += 8
        if row["timestamp_type"] == "LogAppendTime":
            time = row["max_timestamp_ms"]
    key, pos = _read_bytes32(section, pos, end - 4)
    value, pos = _read_bytes32(section, pos, end)
    if pos != end:
        raise _Malformed(Status.SIZE_MISMATCH)
    record = {
        "batch_index": row["batch_index"],
        "offset": offset,
        "timestamp_ms": time,
        "timestamp_type": row["timestamp_type"],
        "key": key,
        "value": value,
        "headers": [],
        "control_type": None,
    }
    return record, pos


def read_varint(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """A zigzag varint of at most 32 bits: (value, next pos)."""
    return _read_zigzag(data, pos, end, 32)


def read_varlong(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """A zigzag varint of at most 64 bits: (value, next pos)."""
    return _read_zigzag(data, pos, end, 64)


def _read_zigzag(data: bytes, pos: int, end: int, bits: int) -> tuple[int, int]:
    raw = 0
    shift = 0
    while True:
        if pos >= end:
            raise _Malformed(Status.TRUNCATED)
        byte = data[pos]
        pos += 1
        raw |= (byte & 0x7F) << shift
        shift += 7
        if shift >= bits and (byte & 0x80 or raw >> bits):
            raise _Malformed(Status.VARINT_OVERFLOW)
        if not byte & 0x80:
            return (raw >> 1) ^ -(raw & 1), pos


def _read_bytes(data: bytes, pos: int, end: int) -> tuple[bytes | None, int]:
    size, pos = read_varint(data, pos, end)
    return _sized(data, pos, end, size)


def _read_bytes32(data: bytes, pos: int, end: int) -> tuple[bytes | None, int]:
    size = int.from_bytes(data[pos : pos + 4], "big", signed=True)
    return _sized(data, pos + 4, end, size)


def _sized(data: bytes, pos: int, end: int, size: int) -> tuple[bytes | None, int]:
    if size < -1:
        raise _Malformed(Status.NEGATIVE_LENGTH)
    if size > end - pos:
        raise _Malformed(Status.TRUNCATED)
    if size < 0:
        return None, pos
    return data[pos : pos + size], pos + size


def _int64(value: int) -> int:
    """The value wrapped around like Java's long."""
    return ((value + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def write_varint(value: int) -> bytes:
    """The zigzag varint of a signed integer of at most 64 bits."""
    raw = (value << 1) ^ (value >> 63)
    out = bytearray()
    while raw > 0x7F:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    out.append(raw)
    return bytes(out)


def _write_bytes(value: bytes | None) -> bytes:
    return write_varint(-1) if value is None else write_varint(len(value)) + value


def encode_record(record: dict[str, Any], base_offset: int, base_timestamp_ms: int) -> bytes:
    """A record of magic 2, with its size in front."""
    headers: Iterable[dict[str, Any]] = record.get("headers") or []
    headers = list(headers)
    parts = [
        b"\x00",
        write_varint(_int64(record["timestamp_ms"] - base_timestamp_ms)),
        write_varint(record["offset"] - base_offset),
        _write_bytes(record["key"]),
        _write_bytes(record["value"]),
        write_varint(len(headers)),
    ]
    for header in headers:
        key = header["key"]
        parts += [_write_bytes(key.encode() if isinstance(key, str) else key)]
        parts += [_write_bytes(header["value"])]
    body = b"".join(parts)
    return write_varint(len(body)) + body


def encode_batch(
    records: Sequence[dict[str, Any]],
    *,
    base_offset: int | None = None,
    last_offset: int | None = None,
    codec: str = "none",
    timestamp_type: str = "CreateTime",
    base_timestamp_ms: int | None = None,
    max_timestamp_ms: int | None = None,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    partition_leader_epoch: int = -1,
    is_transactional: bool = False,
    is_control: bool = False,
    delete_horizon_ms: int | None = None,
    record_count: int | None = None,
    xerial: bool = True,
) -> bytes:
    """A record batch of magic 2.

    records: dicts with offset, timestamp_ms, key, value and optionally headers, a list of dicts
    with key (str or bytes) and value. Arguments that are None are computed from the records.
    xerial: frame snappy as Java clients do. record_count may be wrong, for tests.
    """
    offsets = [record["offset"] for record in records]
    times = [record["timestamp_ms"] for record in records]
    if base_offset is None:
        base_offset = offsets[0] if offsets else 0
    if last_offset is None:
        last_offset = offsets[-1] if offsets else base_offset
    if delete_horizon_ms is not None:
        base_timestamp_ms = delete_horizon_ms
    if base_timestamp_ms is None:
        base_timestamp_ms = times[0] if times else -1
    if max_timestamp_ms is None:
        max_timestamp_ms = max(times, default=-1)
    number = CODEC_NAMES.index(codec)
    attributes = (
        number
        | (8 if timestamp_type == "LogAppendTime" else 0)
        | (16 if is_transactional else 0)
        | (32 if is_control else 0)
        | (64 if delete_horizon_ms is not None else 0)
    )
    section = b"".join(encode_record(record, base_offset, base_timestamp_ms) for record in records)
    section = compress(number, section, xerial=xerial)
    header = _BATCH.pack(
        base_offset,
        _BATCH.size - 12 + len(section),
        partition_leader_epoch,
        2,
        0,
        attributes,
        last_offset - base_offset,
        base_timestamp_ms,
        max_timestamp_ms,
        producer_id,
        producer_epoch,
        base_sequence,
        len(records) if record_count is None else record_count,
    )
    crc = crc32c.crc32c(section, crc32c.crc32c(header[21:]))
    return header[:17] + crc.to_bytes(4, "big") + header[21:] + section


def encode_message(record: dict[str, Any], magic: int, attributes: int = 0) -> bytes:
    """A message of magic 0 or 1 with its offset and size in front."""
    parts = [struct.pack(">bb", magic, attributes)]
    if magic == 1:
        parts.append(struct.pack(">q", record["timestamp_ms"]))
    for name in ("key", "value"):
        value = record[name]
        parts.append(
            struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value
        )
    body = b"".join(parts)
    return struct.pack(">qiI", record["offset"], 4 + len(body), zlib.crc32(body)) + body


def encode_messages(
    records: Sequence[dict[str, Any]],
    magic: int,
    *,
    codec: str = "none",
    timestamp_type: str = "CreateTime",
    wrapper_offset: int | None = None,
    wrapper_timestamp_ms: int | None = None,
    xerial: bool = True,
) -> bytes:
    """A message set of magic 0 or 1: one wrapper, or one entry per record if codec is ``none``.

    A wrapper of magic 1 gets the last record's offset, and its inner offsets count from 0 (KIP-31).
    If `wrapper_offset` is 0, the inner offsets stay.
    """
    attributes = 8 if magic == 1 and timestamp_type == "LogAppendTime" else 0
    if codec == "none":
        return b"".join(encode_message(record, magic, attributes) for record in records)
    shift = records[0]["offset"] if magic == 1 and wrapper_offset != 0 else 0
    inner = b"".join(
        encode_message(record | {"offset": record["offset"] - shift}, magic) for record in records
    )
    number = CODEC_NAMES.index(codec)
    if wrapper_timestamp_ms is None:
        wrapper_timestamp_ms = max(record["timestamp_ms"] for record in records)
    wrapper = {
        "offset": records[-1]["offset"] if wrapper_offset is None else wrapper_offset,
        "timestamp_ms": wrapper_timestamp_ms,
        "key": None,
        "value": compress(number, inner, xerial=xerial, old_lz4=magic == 0),
    }
    return encode_message(wrapper, magic, attributes | number)


def encode_entry(batch: dict[str, Any], records: list[dict[str, Any]]) -> bytes:
    """Encode an entry of a record set from its rows (as `decode_record_set` returns them)."""
    codec = batch["codec"]
    if batch["magic"] < 2:
        return encode_messages(
            records,
            batch["magic"],
            codec=codec,
            timestamp_type=batch["timestamp_type"],
            wrapper_timestamp_ms=batch["max_timestamp_ms"],
        )
    return encode_batch(
        records,
        base_offset=batch["base_offset"],
        last_offset=batch["last_offset"],
        codec=codec,
        timestamp_type=batch["timestamp_type"],
        base_timestamp_ms=batch["base_timestamp_ms"],
        max_timestamp_ms=batch["max_timestamp_ms"],
        producer_id=batch["producer_id"],
        producer_epoch=batch["producer_epoch"],
        base_sequence=batch["base_sequence"],
        partition_leader_epoch=batch["partition_leader_epoch"],
        is_transactional=batch["is_transactional"],
        is_control=batch["is_control"],
        delete_horizon_ms=batch["delete_horizon_ms"],
    )
