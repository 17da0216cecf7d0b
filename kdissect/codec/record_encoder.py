"""Encodes record batches and messages of magic 0 and 1; `record_batches` reads them.

A record is a dict with offset, timestamp_ms, key, value and optionally headers, a list of dicts
with key (str or bytes) and value, as `record_batches.decode_record_set` returns it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import crc32c

from kdissect.codec.compression import CODEC_NAMES, compress
from kdissect.codec.message_codec import write_uvarint

Fields = dict[str, Any]  # of a record, or of the header of a batch

_BATCH = struct.Struct(">qiibIhiqqqhii")
_HEADER: Fields = {
    "base_offset": None,
    "last_offset": None,
    "codec": "none",
    "timestamp_type": "CreateTime",
    "base_timestamp_ms": None,
    "max_timestamp_ms": None,
    "producer_id": -1,
    "producer_epoch": -1,
    "base_sequence": -1,
    "partition_leader_epoch": -1,
    "is_transactional": False,
    "is_control": False,
    "delete_horizon_ms": None,
}


def _write_zigzag(out: bytearray, value: int) -> None:
    write_uvarint(out, (value << 1) ^ (value >> 63))


def _write_bytes(out: bytearray, value: bytes | None) -> None:
    _write_zigzag(out, -1 if value is None else len(value))
    out += value or b""


def _encode_record(record: Fields, base_offset: int, base_timestamp_ms: int) -> bytes:
    """A record of magic 2, with its size in front."""
    body = bytearray(1)  # attributes, which have no meaning
    delta = record["timestamp_ms"] - base_timestamp_ms
    _write_zigzag(body, (delta + (1 << 63)) % (1 << 64) - (1 << 63))  # as Java's long wraps around
    _write_zigzag(body, record["offset"] - base_offset)
    _write_bytes(body, record["key"])
    _write_bytes(body, record["value"])
    headers = record.get("headers") or []
    _write_zigzag(body, len(headers))
    for header in headers:
        key = header["key"]
        _write_bytes(body, key.encode() if isinstance(key, str) else key)
        _write_bytes(body, header["value"])
    out = bytearray()
    _write_bytes(out, bytes(body))
    return bytes(out)


def encode_batch(
    records: Sequence[Fields],
    *,
    record_count: int | None = None,
    xerial: bool = True,
    **header: Any,
) -> bytes:
    """A record batch of magic 2.

    header: fields of the batch, named as the columns of `record_batches`. Offsets and times that
    are missing or None are computed from the records. xerial: frame snappy as Java clients do.
    record_count may be wrong, for tests. Raises TypeError for a field that is none of the header.
    """
    if header.keys() - _HEADER.keys():
        raise TypeError(f"no fields of a batch: {sorted(header.keys() - _HEADER.keys())}")
    values = {**_HEADER, **header}

    def either(name: str, computed: int) -> int:
        value = values[name]
        return computed if value is None else int(value)

    offsets = [record["offset"] for record in records]
    times = [record["timestamp_ms"] for record in records]
    base_offset = either("base_offset", offsets[0] if offsets else 0)
    last_offset = either("last_offset", offsets[-1] if offsets else base_offset)
    base_time = either("base_timestamp_ms", times[0] if times else -1)
    base_time = either("delete_horizon_ms", base_time)  # KIP-534: it takes the base time's place
    codec = CODEC_NAMES.index(values["codec"])
    attributes = (
        codec
        | (8 if values["timestamp_type"] == "LogAppendTime" else 0)
        | (16 if values["is_transactional"] else 0)
        | (32 if values["is_control"] else 0)
        | (64 if values["delete_horizon_ms"] is not None else 0)
    )
    section = b"".join(_encode_record(record, base_offset, base_time) for record in records)
    section = compress(codec, section, xerial=xerial)
    packed = _BATCH.pack(
        base_offset,
        _BATCH.size - 12 + len(section),
        values["partition_leader_epoch"],
        2,
        0,
        attributes,
        last_offset - base_offset,
        base_time,
        either("max_timestamp_ms", max(times, default=-1)),
        values["producer_id"],
        values["producer_epoch"],
        values["base_sequence"],
        len(records) if record_count is None else record_count,
    )
    crc = crc32c.crc32c(section, crc32c.crc32c(packed[21:]))
    return packed[:17] + crc.to_bytes(4, "big") + packed[21:] + section


def encode_message(record: Fields, magic: int, attributes: int = 0) -> bytes:
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
    records: Sequence[Fields],
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


def encode_entry(batch: Fields, records: list[Fields]) -> bytes:
    """Encode an entry of a record set from its rows (as `decode_record_set` returns them)."""
    if batch["magic"] == 2:
        return encode_batch(records, **{name: batch[name] for name in _HEADER})
    return encode_messages(
        records,
        batch["magic"],
        codec=batch["codec"],
        timestamp_type=batch["timestamp_type"],
        wrapper_timestamp_ms=batch["max_timestamp_ms"],
    )
