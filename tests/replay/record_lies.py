"""Lies about the records of a Fetch answer: batches lost, doubled, swapped or changed.

Each takes the record data of a partition and returns another one, with right checksums but for
"wrong CRC". It raises ValueError if the data has no room for it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import crc32c

_CRC_FROM, _HEADER_SIZE = 21, 61
_CODECS, _CONTROL = 7, 32


def _only(condition: bool, value: Any) -> Any:
    if not condition:
        raise ValueError
    return value


def _batches(data: bytes) -> list[bytes]:
    found, pos = [], 0
    while pos + _HEADER_SIZE <= len(data):
        size = 12 + struct.unpack_from(">i", data, pos + 8)[0]
        if pos + size > len(data):
            break
        found.append(data[pos : pos + size])
        pos += size
    return _only(bool(found) and all(each[16] == 2 for each in found), found)


def _is_control(batch: bytes) -> bool:
    return bool(struct.unpack_from(">h", batch, 21)[0] & _CONTROL)


def _sealed(batch: bytearray) -> bytes:
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    struct.pack_into(">I", batch, 17, crc32c.crc32c(bytes(batch[_CRC_FROM:])))
    return bytes(batch)


def _varint(data: bytes, pos: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), pos


def _records(batch: bytes) -> list[bytes]:
    """Each record with its length in front. ValueError if they are compressed or markers."""
    attributes = struct.unpack_from(">h", batch, 21)[0]
    _only(not attributes & (_CODECS | _CONTROL), None)
    found, pos = [], _HEADER_SIZE
    while pos < len(batch):
        size, begin = _varint(batch, pos)
        found.append(batch[pos : begin + size])
        pos = begin + size
    return found


def _with_records(batch: bytes, records: list[bytes]) -> bytes:
    made = bytearray(batch[:_HEADER_SIZE] + b"".join(records))
    struct.pack_into(">i", made, 57, len(records))
    return _sealed(made)


def _two_records_lost(data: bytes) -> bytes:
    """From the middle of each batch that has four."""
    found, made = _batches(data), []
    for batch in found:
        try:
            records = _records(batch)
            is_long = len(records) > 3
            made.append(_with_records(batch, [records[0], *records[3:]]) if is_long else batch)
        except ValueError:
            made.append(batch)
    return _only(made != found, b"".join(made))


def _value_changed(data: bytes) -> bytes:
    """The last byte of the first batch's last record."""
    first, *rest = _batches(data)
    _records(first)
    made = bytearray(first)
    made[-3] ^= 1
    return _sealed(made) + b"".join(rest)


def _header_changed(at: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        first, *rest = _batches(data)
        _only(not _is_control(first), None)
        made = bytearray(first)
        made[at] ^= 1
        return _sealed(made) + b"".join(rest)

    return change


def _wrong_crc(data: bytes) -> bytes:
    first, *rest = _batches(data)
    made = bytearray(first)
    made[17] ^= 1
    return bytes(made) + b"".join(rest)


def _lost(which: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        found = _batches(data)
        _only(len(found) > 1, None)
        found.pop(which)
        return b"".join(found)

    return change


def _markers_lost(data: bytes) -> bytes:
    found = _batches(data)
    kept = [each for each in found if not _is_control(each)]
    return _only(len(kept) < len(found), b"".join(kept))


def _swapped(data: bytes) -> bytes:
    first, second, *rest = _only(len(_batches(data)) > 1, _batches(data))
    return second + first + b"".join(rest)


RECORD_KINDS: dict[str, Callable[[bytes], bytes]] = {
    "two records lost": _two_records_lost,
    "value changed": _value_changed,
    "timestamp changed": _header_changed(34),
    "wrong CRC": _wrong_crc,
    "first batch lost": _lost(0),
    "last batch lost": _lost(-1),
    "middle batch lost": lambda data: _lost(1)(_only(len(_batches(data)) > 2, data)),
    "batch doubled": lambda data: data + _batches(data)[-1],
    "batches swapped": _swapped,
    "markers lost": _markers_lost,
    "all lost": lambda data: _only(bool(_batches(data)), b""),
}
