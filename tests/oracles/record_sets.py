"""Record sets read one value at a time: the rows and faults that the kernels must give.

A record set is a sequence of entries. Each begins with an offset (8 bytes) and a length (4 bytes)
and has its magic at byte 16. The last entry may be cut off, because a broker sends only as many
bytes as requested.

Magic 2 (KIP-98) is a record batch: a header of 61 bytes, then records in zigzag varints, each with
its own size, compressed together. Its CRC-32C covers all bytes after it.

Magic 0 and 1 are messages: each entry is a record. Compressed messages are wrapped: the value of a
message is a compressed message set. Inner offsets of magic 1 count from 0 (KIP-31), and the wrapper
has the offset of its last message. Their CRC-32 covers all bytes after it as well.
"""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import crc32c

from kdissect.status import Status

Row = dict[str, Any]
# Returns (OK, the bytes), or (why not, nothing), from a codec's number, bytes and the bytes allowed
Decompress = Callable[[int, bytes, int], tuple[Status, bytes]]

_ENTRY_LENGTH_MIN = 14
_HEADER_SIZE = {0: 26, 1: 34, 2: 61}  # bytes of the smallest entry
_CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
_CONTROL_TYPES = [
    *("ABORT", "COMMIT", "LEADER_CHANGE", "SNAPSHOT_HEADER"),
    *("SNAPSHOT_FOOTER", "KRAFT_VERSION", "KRAFT_VOTERS"),
]
_FRAMING, _CRC, _CODEC, _RECORDS, _TEXT = range(5)  # the steps at which a fault is found
_COLUMNS = """
    base_offset last_offset magic codec crc_ok is_partial size uncompressed_size record_count
    base_timestamp_ms max_timestamp_ms timestamp_type producer_id producer_epoch base_sequence
    partition_leader_epoch is_transactional is_control delete_horizon_ms
"""
_UNKNOWN = dict.fromkeys(_COLUMNS.split())


@dataclass(slots=True)
class RecordSet:
    """The content of a record set.

    batches, records: rows with the columns of `record_batches` and `records`, without set_index.
    faults: (batch_index, kind, stage, pos, byte_count, key_count).
    """

    batches: list[Row] = field(default_factory=list)
    records: list[Row] = field(default_factory=list)
    faults: list[tuple[Any, ...]] = field(default_factory=list)


class _Malformed(Exception):
    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


class _Reader:
    """Reads values from data[pos:end]."""

    def __init__(self, data: bytes, pos: int, end: int) -> None:
        self.data, self.pos, self.end = data, pos, end

    @property
    def left(self) -> int:
        return self.end - self.pos

    def take(self, size: int) -> bytes:
        self.pos += size
        return self.data[self.pos - size : self.pos]

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big", signed=True)

    def zigzag(self, bits: int = 32) -> int:
        raw = shift = 0
        while True:
            if self.left < 1:
                raise _Malformed(Status.TRUNCATED)
            byte = self.take(1)[0]
            raw |= (byte & 0x7F) << shift
            shift += 7
            if shift >= bits and (byte & 0x80 or raw >> bits):
                raise _Malformed(Status.VARINT_OVERFLOW)
            if not byte & 0x80:
                return (raw >> 1) ^ -(raw & 1)

    def sized(self, size: int, behind: int = 0) -> bytes | None:
        """Bytes of a size that was read, of which `behind` more must follow; null for -1."""
        if size < -1:
            raise _Malformed(Status.NEGATIVE_LENGTH)
        if size > self.left - behind:
            raise _Malformed(Status.TRUNCATED)
        return None if size < 0 else self.take(size)


def decode_record_set(data: bytes, limits: Any, decompress: Decompress) -> RecordSet:
    """Decode one record set. limits: the product's `DecompressionLimits`."""
    decoder = _Decoder(data, limits, decompress)
    pos = 0
    while pos < len(data):
        pos += decoder.entry(pos)
    decoder.found.faults.sort(key=lambda fault: (fault[0], fault[2]))
    return decoder.found


class _Decoder:
    def __init__(self, data: bytes, limits: Any, decompress: Decompress) -> None:
        self.data = data
        self.limits = limits
        self.decompress = decompress
        self.bytes_left = limits.set_allowance(len(data))
        self.found = RecordSet()

    def fault(self, kind: Status, stage: int, key_count: int = 0) -> None:
        row = self.row
        self.found.faults.append(
            (row["batch_index"], kind, stage, row["pos"], row["size"], key_count)
        )

    def entry(self, pos: int) -> int:
        """Decode the entry at `pos`; returns its size in bytes."""
        left = len(self.data) - pos
        self.row = row = {"batch_index": len(self.found.batches), "pos": pos, **_UNKNOWN}
        row["size"] = left
        size = 12
        if left >= 12:
            length = int.from_bytes(self.data[pos + 8 : pos + 12], "big", signed=True)
            if length < _ENTRY_LENGTH_MIN:
                # The next entry cannot be found; the rest of the set is lost.
                kind = Status.NEGATIVE_LENGTH if length < 0 else Status.TRUNCATED
                self.fault(kind, _FRAMING)
                return left
            size += length
        entry = self.data[pos : pos + size]
        row["is_partial"] = len(entry) < size
        row["size"] = len(entry)
        self.found.batches.append(row)
        if len(entry) >= 8:
            row["base_offset"] = int.from_bytes(entry[:8], "big", signed=True)
        if len(entry) < 17:
            return len(entry)
        row["magic"] = magic = int.from_bytes(entry[16:17], "big", signed=True)
        if magic not in _HEADER_SIZE:
            if not row["is_partial"]:
                row["is_partial"] = None
                self.fault(Status.UNKNOWN_MAGIC, _FRAMING)
        elif not row["is_partial"] and len(entry) < _HEADER_SIZE[magic]:
            row["is_partial"] = None
            self.fault(Status.TRUNCATED, _FRAMING)
        else:
            announced, section = _header(entry, row)
            if not row["is_partial"]:
                self.content(entry, announced, section)
        return len(entry)

    def content(self, entry: bytes, announced: int, section: bytes | None) -> None:
        """Check the CRC of a whole entry, decompress its section, and read its records."""
        row, magic = self.row, self.row["magic"]
        crc_end = 21 if magic == 2 else 16
        stored = int.from_bytes(entry[crc_end - 4 : crc_end], "big")
        computed = crc32c.crc32c(entry[21:]) if magic == 2 else zlib.crc32(entry[16:])
        row["crc_ok"] = stored == computed
        if stored != computed:
            self.fault(Status.BAD_CRC, _CRC)
        row["record_count"] = 0
        codec = entry[22 if magic == 2 else 17] & 7
        if codec:
            section = self.decompressed(codec, section)
        if section is None:
            return
        row["uncompressed_size"] = len(section)
        records: list[Row] = []
        reader = _Reader(section, 0, len(section))
        if magic < 2 and codec:
            if _has_wrong_crc(section, magic):
                self.fault(Status.BAD_CRC, _RECORDS)
        try:
            if magic == 2:
                self.read_records(reader, announced, records)
            else:
                self.read_messages(reader, bool(codec), records)
        except _Malformed as malformed:
            self.fault(malformed.status, _RECORDS)
        row["record_count"] = len(records)
        if magic < 2 and codec and records:
            row["base_offset"] = records[0]["offset"]
        invalid = 0
        for index, record in enumerate(records):
            record |= {"record_index": index, "batch_index": row["batch_index"]}
            record["timestamp_type"] = row["timestamp_type"]
            for header in record["headers"]:
                key, header["key"] = header["key"], header["key"].decode("utf-8", "replace")
                invalid += header["key"].encode() != key
        if invalid:
            self.fault(Status.INVALID_UTF8, _TEXT, invalid)
        self.found.records += records

    def decompressed(self, codec: int, section: bytes | None) -> bytes | None:
        if section is None:
            self.fault(Status.CORRUPT, _CODEC)
            return None
        allowance = min(self.limits.batch_allowance(len(section)), self.bytes_left)
        status, data = self.decompress(codec, section, allowance)
        if status == Status.OK:
            self.bytes_left -= len(data)
            return data
        # failed work counts as well
        self.bytes_left -= min(allowance, self.limits.ratio_free_size)
        self.fault(status, _CODEC)
        return None

    def read_records(self, reader: _Reader, announced: int, records: list[Row]) -> None:
        """Read as many records of magic 2 as announced, or as there are."""
        while len(records) < announced and reader.left:
            records.append(self.record(reader))
        if len(records) != announced or reader.left:
            raise _Malformed(Status.COUNT_MISMATCH)

    def record(self, section: _Reader) -> Row:
        size = section.zigzag()
        if size < 0:
            raise _Malformed(Status.NEGATIVE_LENGTH)
        if size > section.left or size < 1:
            raise _Malformed(Status.TRUNCATED)
        reader = _Reader(section.data, section.pos, section.pos + size)
        section.pos = reader.end
        reader.take(1)  # attributes, which have no meaning
        time_delta, offset_delta = reader.zigzag(64), reader.zigzag()
        key = reader.sized(reader.zigzag())
        value = reader.sized(reader.zigzag())
        count = reader.zigzag()
        if count < 0:
            raise _Malformed(Status.NEGATIVE_LENGTH)
        if count > reader.left // 2:  # a header has at least two bytes
            raise _Malformed(Status.COUNT_IMPOSSIBLE)
        if count > self.limits.record_headers_max:
            raise _Malformed(Status.LIMIT)
        headers = []
        for _ in range(count):
            name = reader.sized(reader.zigzag())
            if name is None:
                raise _Malformed(Status.NEGATIVE_LENGTH)
            headers.append({"key": name, "value": reader.sized(reader.zigzag())})
        if reader.left:
            raise _Malformed(Status.SIZE_MISMATCH)
        time = _int64(self.row["base_timestamp_ms"] + time_delta)
        if self.row["timestamp_type"] == "LogAppendTime":
            time = self.row["max_timestamp_ms"]
        return {
            "offset": _int64(self.row["base_offset"] + offset_delta),
            "timestamp_ms": time,
            "key": key,
            "value": value,
            "headers": headers,
            "control_type": _control_type(key) if self.row["is_control"] else None,
        }

    def read_messages(self, reader: _Reader, is_wrapped: bool, records: list[Row]) -> None:
        """Read the messages inside a wrapper, or one uncompressed message."""
        shift = 0
        # A stored 0 means that no offsets were assigned yet: then the inner ones stay.
        if is_wrapped and self.row["magic"] == 1 and self.row["last_offset"] != 0:
            inner = [offset for offset, _, _ in _messages(reader.data)]
            shift = self.row["last_offset"] - inner[-1] if inner else 0
        while reader.left:
            record = self.message(reader)
            record["offset"] = _int64(record["offset"] + shift)
            records.append(record)

    def message(self, section: _Reader) -> Row:
        if section.left < 12:
            raise _Malformed(Status.TRUNCATED)
        offset, size = section.integer(8), section.integer(4)
        if size < 0:
            raise _Malformed(Status.NEGATIVE_LENGTH)
        if size < _ENTRY_LENGTH_MIN or size > section.left:
            raise _Malformed(Status.TRUNCATED)
        reader = _Reader(section.data, section.pos + 4, section.pos + size)
        section.pos = reader.end
        if reader.integer(1) != self.row["magic"]:
            raise _Malformed(Status.UNKNOWN_MAGIC)
        if reader.integer(1) & 7:
            raise _Malformed(Status.UNKNOWN_CODEC)  # a wrapper inside a wrapper
        time = -1
        if self.row["magic"] == 1:
            if reader.left < 16:
                raise _Malformed(Status.TRUNCATED)
            time = reader.integer(8)
            if self.row["timestamp_type"] == "LogAppendTime":
                time = self.row["max_timestamp_ms"]
        key = reader.sized(reader.integer(4), behind=4)
        value = reader.sized(reader.integer(4))
        if reader.left:
            raise _Malformed(Status.SIZE_MISMATCH)
        return {
            "offset": offset,
            "timestamp_ms": time,
            "key": key,
            "value": value,
            "headers": [],
            "control_type": None,
        }


def _header(entry: bytes, row: Row) -> tuple[int, bytes | None]:
    """Fill `row` from the bytes of a header; returns (record count, bytes of the section)."""

    def read(start: int, size: int) -> int | None:
        if len(entry) < start + size:
            return None
        return int.from_bytes(entry[start : start + size], "big", signed=True)

    magic = row["magic"]
    if magic < 2:
        row["last_offset"] = row["base_offset"]
        row["partition_leader_epoch"] = row["producer_id"] = row["producer_epoch"] = -1
        row["base_sequence"] = -1
        row["max_timestamp_ms"] = read(18, 8) if magic == 1 else -1
        attributes = read(17, 1)
        if attributes is not None:
            row["is_transactional"] = row["is_control"] = False
            _attributes(attributes, row)
            if not row["is_partial"] and attributes & 7:
                return -1, _wrapped_value(entry, 26 if magic == 1 else 18)
        return -1, entry

    row["partition_leader_epoch"] = read(12, 4)
    delta = read(23, 4)
    row["last_offset"] = None if delta is None else _int64(row["base_offset"] + delta)
    row["base_timestamp_ms"] = read(27, 8)
    row["max_timestamp_ms"] = read(35, 8)
    row["producer_id"] = read(43, 8)
    row["producer_epoch"] = read(51, 2)
    row["base_sequence"] = read(53, 4)
    row["record_count"] = count = read(57, 4)
    attributes = read(21, 2)
    if attributes is not None:
        row["is_transactional"] = bool(attributes & 16)
        row["is_control"] = bool(attributes & 32)
        # KIP-534: with this bit the first timestamp in the header is the delete horizon.
        row["delete_horizon_ms"] = row["base_timestamp_ms"] if attributes & 64 else None
        _attributes(attributes, row)
    return -1 if count is None else count, entry[61:]


def _attributes(attributes: int, row: Row) -> None:
    codec = attributes & 7
    row["codec"] = _CODECS[codec] if codec < len(_CODECS) else None
    row["timestamp_type"] = "LogAppendTime" if attributes & 8 else "CreateTime"
    if row["magic"] == 0:
        row["timestamp_type"] = "NoTimestampType"


def _wrapped_value(entry: bytes, pos: int) -> bytes | None:
    """The value of a wrapper whose key's length is at `pos`; None if there is none."""
    reader = _Reader(entry, pos, len(entry))
    reader.take(max(reader.integer(4), 0))
    if reader.left < 4:
        return None
    size = reader.integer(4)
    return reader.take(size) if 0 <= size <= reader.left else None


def _messages(section: bytes) -> list[tuple[int, int, int]]:
    """(offset, start, end) of the messages in a section, up to the first impossible size."""
    found = []
    pos = 0
    while len(section) - pos >= 12:
        offset, size = struct.unpack_from(">qi", section, pos)
        if size < _ENTRY_LENGTH_MIN or size > len(section) - pos - 12:
            break
        found.append((offset, pos, pos + 12 + size))
        pos += 12 + size
    return found


def _has_wrong_crc(section: bytes, magic: int) -> bool:
    """Return whether a message of a wrapper has a wrong CRC, up to the first of another magic."""
    for _, pos, end in _messages(section):
        if section[pos + 16] != magic:
            break
        stored = int.from_bytes(section[pos + 12 : pos + 16], "big")
        if stored != zlib.crc32(section[pos + 16 : end]):
            return True
    return False


def _control_type(key: bytes | None) -> str:
    """Name of the type in a control record's key: int16 key version, int16 type."""
    if key is not None and len(key) >= 4:
        key_version, number = struct.unpack_from(">hH", key)
        if key_version >= 0 and number < len(_CONTROL_TYPES):
            return _CONTROL_TYPES[number]
    return "UNKNOWN"


def _int64(value: int) -> int:
    """The value wrapped around like Java's long."""
    return ((value + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)
