"""Decodes record sets (the bytes of a `records` field) into Arrow columns of batches and records.

Batches are scanned, their CRCs are checked, and they are decompressed until a chunk of a few
megabytes is full. Then their records are parsed and copied while they are still in the cache. The
bytes are not trusted: a fault costs only the records that it makes unreadable and becomes a row of
`faults`. Only a batch with an impossible length ends its set, because the next one cannot be found.

The format: a record set is a sequence of entries. Each begins with an offset (8 bytes) and a length
(4 bytes) and has its magic at byte 16. The last entry may be cut off, because a broker sends only
as many bytes as requested. Magic 2 (KIP-98) is a record batch: a header of 61 bytes, then records
in zigzag varints, compressed together. Magic 0 and 1 are messages: each entry is a record, or a
wrapper, whose value is a compressed message set.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import crc32c
import numpy as np
import pyarrow as pa

from kdissect.arrays import Bools, Bytes, Indices, Ints, Positions, Rows, address_of, take
from kdissect.codec import record_kernel as rk
from kdissect.codec.compression import CODEC_NAMES, Codec, DecompressionLimits, decompress
from kdissect.codec.strings import as_text, gathered
from kdissect.status import Status

TIMESTAMP_TYPES = ("NoTimestampType", "CreateTime", "LogAppendTime")
CONTROL_TYPES = (
    "ABORT",
    "COMMIT",
    "LEADER_CHANGE",
    "SNAPSHOT_HEADER",
    "SNAPSHOT_FOOTER",
    "KRAFT_VERSION",
    "KRAFT_VOTERS",
    "UNKNOWN",
)

_NAMES = pa.dictionary(pa.int8(), pa.string())
_HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])

# One row per record batch. `pos` is its position in the input; docs/tables.md has the others.
BATCHES = pa.schema(
    [
        ("set_index", pa.int32()),
        ("batch_index", pa.int32()),
        ("pos", pa.int64()),
        ("base_offset", pa.int64()),
        ("last_offset", pa.int64()),
        ("magic", pa.int8()),
        ("codec", _NAMES),
        ("crc_ok", pa.bool_()),
        ("is_partial", pa.bool_()),
        ("size", pa.int64()),
        ("uncompressed_size", pa.int64()),
        ("record_count", pa.int64()),
        ("base_timestamp_ms", pa.int64()),
        ("max_timestamp_ms", pa.int64()),
        ("timestamp_type", _NAMES),
        ("producer_id", pa.int64()),
        ("producer_epoch", pa.int16()),
        ("base_sequence", pa.int32()),
        ("partition_leader_epoch", pa.int32()),
        ("is_transactional", pa.bool_()),
        ("is_control", pa.bool_()),
        ("delete_horizon_ms", pa.int64()),
    ]
)

RECORD_SCHEMA = pa.schema(
    [
        ("set_index", pa.int32()),
        ("batch_index", pa.int32()),
        ("record_index", pa.int64()),
        ("offset", pa.int64()),
        ("timestamp_ms", pa.int64()),
        ("timestamp_type", _NAMES),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(_HEADER)),
        ("control_type", _NAMES),
    ]
)


class FaultStage(IntEnum):
    """Step at which a fault was found; it gives the meaning of the Status in FAULT."""

    FRAMING = 0  # UNKNOWN_MAGIC. TRUNCATED, NEGATIVE_LENGTH: an impossible length.
    CRC = 1  # BAD_CRC
    CODEC = 2  # CORRUPT, LIMIT, UNKNOWN_CODEC
    # COUNT_MISMATCH, LIMIT (of headers), or why a record is malformed. BAD_CRC: of a message inside
    # a wrapper.
    RECORDS = 3
    TEXT = 4  # INVALID_UTF8: header keys


# pos, byte_count: the batch in the input; for a batch of impossible length the rest of its set
# (such a batch has no row in `batches`).
FAULT = np.dtype(
    [
        ("set_index", "<i4"),
        ("batch_index", "<i4"),
        ("kind", "u1"),  # Status
        ("stage", "u1"),  # FaultStage
        ("pos", "<i8"),
        ("byte_count", "<i8"),
        ("key_count", "<i8"),  # of TEXT: such keys of the batch's records in this chunk
    ]
)


@dataclass(frozen=True, slots=True)
class RecordChunk:
    """A part of the result of bounded size. `batches` are those whose records end in this chunk."""

    batches: pa.RecordBatch  # BATCHES
    records: pa.RecordBatch  # RECORD_SCHEMA
    faults: Rows  # FAULT


@dataclass(frozen=True, slots=True)
class RecordSet:
    """One record set as rows: dicts with the columns of BATCHES and RECORD_SCHEMA."""

    batches: list[dict[str, Any]]
    records: list[dict[str, Any]]
    faults: Rows  # FAULT


def decode_record_set(data: bytes) -> RecordSet:
    """Decode one record set. Raises nothing: faults are listed in `faults`."""
    buf = np.frombuffer(data, np.uint8)
    chunks = list(iter_record_chunks(buf, np.zeros(1, np.int64), np.array([len(data)])))
    return RecordSet(
        [row for chunk in chunks for row in chunk.batches.to_pylist()],
        [row for chunk in chunks for row in chunk.records.to_pylist()],
        np.concatenate([np.empty(0, FAULT), *(chunk.faults for chunk in chunks)]),
    )


_WINDOW = 16384  # batches scanned at a time
_RECORDS = 131072  # parsed at a time
_HEADERS = 131072
_MESSAGE = struct.Struct(">qiIb")  # magic 0 and 1: offset, size, CRC, magic
_DEFAULT_LIMITS = DecompressionLimits()


def iter_record_chunks(
    buf: Bytes,
    start: Positions,
    length: Positions,
    limits: DecompressionLimits = _DEFAULT_LIMITS,
    chunk_bytes: int = 8 << 20,
) -> Iterator[RecordChunk]:
    """Yield the record sets buf[start[i]:start[i] + length[i]], decoded, in order.

    buf: uint8[n]. start, length: int64[m]. A chunk has at most about `chunk_bytes` of record data
    (or one larger record) and does not refer to `buf`. A batch may continue in the next chunk.
    Raises ValueError if the arguments do not fit each other, never because of the bytes.
    """
    buf = np.asarray(buf)
    if buf.dtype != np.uint8 or buf.ndim != 1 or not buf.flags.c_contiguous:
        raise ValueError("buf must be a contiguous 1-D array of uint8")
    start = np.ascontiguousarray(start, np.int64)
    length = np.ascontiguousarray(length, np.int64)
    if start.ndim != 1 or start.shape != length.shape:
        raise ValueError("start and length must be 1-D and of one size")
    if start.size >= 1 << 31:
        raise ValueError("start must have fewer than 2^31 record sets")
    if ((start < 0) | (length < 0) | (start > buf.size) | (length > buf.size - start)).any():
        raise ValueError("start and length must lie inside buf")
    if not 1 <= chunk_bytes <= 1 << 28:
        raise ValueError("chunk_bytes must be from 1 to 2^28")
    return _Decoder(buf, start, length, limits, chunk_bytes).chunks()


class _Decoder:
    """Decodes windows of scanned batches, BATCH rows, chunk by chunk."""

    def __init__(
        self,
        buf: Bytes,
        start: Positions,
        length: Positions,
        limits: DecompressionLimits,
        chunk_bytes: int,
    ) -> None:
        self.buf, self.start, self.length = buf, start, length
        self.limits = limits
        self.chunk_bytes = chunk_bytes
        self.window = np.empty(_WINDOW, rk.BATCH)
        self.records = np.empty(_RECORDS, rk.RECORD)
        self.headers = np.empty(_HEADERS, rk.HEADER)
        self._make_arena(2 * chunk_bytes)
        # by codec, size and CRC: a compressed section, place and size of its records in the arena
        self.in_arena: dict[tuple[int, int, int], tuple[Bytes, int, int]] = {}
        self.current_set = -1
        self.set_bytes_left = 0

    def _make_arena(self, size: int) -> None:
        self.arena = np.empty(size, np.uint8)  # decompressed records
        self.arena_address = address_of(self.arena)
        self.arena_used = 0

    def chunks(self) -> Iterator[RecordChunk]:
        place = rk.scan_start()
        window = self.window
        while count := int(rk.scan_batches(self.buf, self.start, self.length, place, window)):
            b = window[:count]
            self._check_crcs(b)
            is_plain = (b["state"] == rk.WHOLE) & (b["attributes"] & 7 == Codec.NONE)
            b["data_address"] = address_of(self.buf) + b["section_start"]
            b["data_size"] = np.where(is_plain, b["section_size"], -1)
            while len(b):
                size = self._fill_arena(b)
                yield from self._parse(b[:size])
                b = b[size:]

    def _check_crcs(self, b: Rows) -> None:
        rk.small_crcs(self.buf, b)
        is_left = (b["magic"] < 2) | (b["size"] > rk.SMALL_BATCH)
        rows = np.flatnonzero((b["state"] == rk.WHOLE) & is_left)
        ends = b["pos"] + b["size"]
        for row, start, end in zip(
            rows.tolist(), b["crc_start"][rows].tolist(), ends[rows].tolist(), strict=True
        ):
            compute = crc32c.crc32c if b["magic"][row] == 2 else zlib.crc32
            b["computed_crc"][row] = compute(self.buf[start:end].data)

    def _fill_arena(self, b: Rows) -> int:
        """Decompress batches until their records, and those of the batches between them, fill a
        chunk or the arena; returns how many batches the chunk has."""
        self.arena_used = filled_bytes = 0
        self.in_arena.clear()
        plain_bytes = np.cumsum(np.maximum(b["data_size"], 0))
        is_compressed = (b["state"] == rk.WHOLE) & (b["attributes"] & 7 != Codec.NONE)
        for row in np.flatnonzero(is_compressed).tolist():
            if plain_bytes[row] + filled_bytes >= self.chunk_bytes:
                break
            if not self._decompress(b, row):
                return row
            filled_bytes += max(int(b["data_size"][row]), 0)
        filled = np.cumsum(np.maximum(b["data_size"], 0))
        return min(int(np.searchsorted(filled, self.chunk_bytes)) + 1, len(b))

    def _decompress(self, b: Rows, row: int) -> bool:
        """Decompress the records of a batch into the arena; False: there is no room for them."""
        # b["magic"][row] takes a seventh of the time of b[row]["magic"]
        start, size = int(b["section_start"][row]), int(b["section_size"][row])
        codec, magic = int(b["attributes"][row] & 7), int(b["magic"][row])
        if size < 0:
            b["codec_status"][row] = Status.CORRUPT  # a wrapper without a value
            return True
        if b["set_index"][row] != self.current_set:
            self.current_set = b["set_index"][row]
            self.set_bytes_left = self.limits.set_allowance(int(self.length[self.current_set]))
        allowance = min(self.limits.batch_allowance(size), self.set_bytes_left)
        data = self.buf[start : start + size]
        # A broker forwards the bytes that it received, often at once: then they are here already.
        key = codec, size, int(b["computed_crc"][row])
        equal, place, written = self.in_arena.get(key, (None, 0, 0))
        status = Status.OK
        is_there = written <= allowance and equal is not None and equal.tobytes() == data.tobytes()
        while not is_there:
            place = self.arena_used
            out = self.arena[place:][:allowance]
            status, written = decompress(codec, data, out)
            if status != Status.ROOM_NEEDED or len(out) == allowance:
                break
            if self.arena_used:
                return False
            self._make_arena(4 * len(self.arena))
        if status != Status.OK:
            b["codec_status"][row] = Status.LIMIT if status == Status.ROOM_NEEDED else status
            # Failed work counts as well, so that hostile batches use up the budget.
            self.set_bytes_left -= min(allowance, self.limits.ratio_free_size)
            return True
        if magic < 2:
            inside = self.arena[place : place + written].tobytes()
            is_wrong, last_offset = _read_inner(inside, magic)
            b["is_wrong_inside"][row] = is_wrong
            # KIP-31: the offsets inside count from 0, and the wrapper has the last one's absolute
            # offset. A stored 0 means that no offsets were assigned yet: then they stay.
            if magic == 1 and b["base_offset"][row] != 0 and last_offset is not None:
                with np.errstate(over="ignore"):
                    b["shift"][row] = b["base_offset"][row] - np.int64(last_offset)
        b["data_address"][row], b["data_size"][row] = self.arena_address + place, written
        self.set_bytes_left -= written
        if not is_there:
            self.arena_used += written
            self.in_arena[key] = data, place, written
        return True

    def _parse(self, batches: Rows) -> Iterator[RecordChunk]:
        """Parse the records of batches, which lie in the input and in the arena."""
        position = np.zeros(1, rk.PARSE_POSITION)[0]
        done = 0
        while done < len(batches):
            status = rk.parse_records(
                batches,
                position,
                self.chunk_bytes,
                self.limits.record_headers_max,
                self.records,
                self.headers,
            )
            if position["headers_needed"]:
                self.headers = np.empty(int(position["headers_needed"]), rk.HEADER)
                continue
            records = self.records[: position["row_count"]]
            headers, invalid = _headers(records, self.headers[: position["header_count"]])
            behind = int(position["batch"])
            faults = np.concatenate(
                [*_faults(batches[done:behind]), _text_faults(batches, records, invalid)]
            )
            yield RecordChunk(
                _batches(batches[done:behind]),
                _records(batches, records, headers),
                faults[np.lexsort((faults["stage"], faults["batch_index"], faults["set_index"]))],
            )
            done = behind
            if status == Status.OK:
                break


def _records(b: Rows, records: Rows, headers: pa.Array) -> pa.RecordBatch:
    """Rows of parsed records; headers: of each."""
    batch = records["batch"]
    control_type = records["control_type"]
    columns = [
        pa.array(b["set_index"].astype(np.int32)[batch]),
        pa.array(b["batch_index"].astype(np.int32)[batch]),
        *(pa.array(records[name].copy()) for name in ("record_index", "offset", "timestamp")),
        _named(_timestamp_types(b)[batch], TIMESTAMP_TYPES),
        gathered(records["key_address"], records["key_length"]),
        gathered(records["value_address"], records["value_length"]),
        headers,
        _named(control_type.astype(np.int8), CONTROL_TYPES, control_type >= 0),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)


def _batches(b: Rows) -> pa.RecordBatch:
    """Rows of batches whose records were parsed."""
    is_batch = b["state"] != rk.BAD_LENGTH
    b = b if is_batch.all() else take(b, np.flatnonzero(is_batch))
    whole, partial = b["state"] == rk.WHOLE, b["state"] == rk.PARTIAL
    magic, attributes, visible = b["magic"], b["attributes"], b["visible"]
    is_v2 = magic == 2
    has_magic = (whole | partial) & (magic >= 0) & (magic <= 2)
    codec = attributes & 7
    read = b["parsed_records"]
    # a wrapper has its last offset; the first one comes from the messages inside
    is_wrapper = whole & ~is_v2 & (codec != 0) & (read > 0)

    def seen(v2_end: int, legacy_end: int = rk.MAGIC_POS + 1) -> Bools:
        """bool: batches of known magic of which this many bytes are there."""
        is_seen: Bools = has_magic & (visible >= np.where(is_v2, v2_end, legacy_end))
        return is_seen

    has_attributes = seen(23, rk.MESSAGE_HEADER_SIZE_V0)
    horizon = is_v2 & (attributes & 64 != 0) & seen(35)
    values = {
        "set_index": (b["set_index"], None),
        "batch_index": (b["batch_index"], None),
        "pos": (b["pos"], None),
        "base_offset": (np.where(is_wrapper, b["first_offset"], b["base_offset"]), visible >= 8),
        "last_offset": (b["last_offset"], seen(27)),
        "magic": (magic, visible > rk.MAGIC_POS),
        "crc_ok": (b["computed_crc"] == b["crc"], whole),
        "is_partial": (partial, whole | partial),
        "size": (b["size"], None),
        "uncompressed_size": (b["data_size"], whole & (b["codec_status"] == Status.OK)),
        "record_count": (np.where(whole, read, b["record_count"]), whole | (is_v2 & seen(61))),
        "base_timestamp_ms": (b["base_timestamp"], is_v2 & seen(35)),
        "max_timestamp_ms": (b["max_timestamp"], seen(43, 0) & _time_seen(b)),
        "producer_id": (b["producer_id"], seen(51)),
        "producer_epoch": (b["producer_epoch"], seen(53)),
        "base_sequence": (b["base_sequence"], seen(57)),
        "partition_leader_epoch": (b["leader_epoch"], seen(16)),
        "is_transactional": (is_v2 & (attributes & 16 != 0), has_attributes),
        "is_control": (is_v2 & (attributes & 32 != 0), has_attributes),
        "delete_horizon_ms": (b["base_timestamp"], horizon),
    }
    names = {
        "codec": _named(codec.astype(np.int8), CODEC_NAMES, has_attributes & (codec <= 4)),
        "timestamp_type": _named(_timestamp_types(b), TIMESTAMP_TYPES, has_attributes),
    }
    arrays = []
    for field in BATCHES:
        if field.name in names:
            arrays.append(names[field.name])
            continue
        column, valid = values[field.name]
        column = column.astype(str(field.type))  # Arrow and NumPy have the same names
        arrays.append(pa.array(column, mask=None if valid is None else ~valid))
    return pa.RecordBatch.from_arrays(arrays, schema=BATCHES)


def _faults(b: Rows) -> Iterator[Rows]:
    """FAULT rows of batches whose records were parsed."""
    state = b["state"]
    is_bad = state == rk.BAD_LENGTH
    is_negative = is_bad & (b["record_count"] < 0)
    is_short = (is_bad & ~is_negative) | (state == rk.TOO_SMALL)
    is_wrong = (state == rk.WHOLE) & (b["crc"] != b["computed_crc"])
    yield _fault_rows(b, is_negative, Status.NEGATIVE_LENGTH, FaultStage.FRAMING)
    yield _fault_rows(b, is_short, Status.TRUNCATED, FaultStage.FRAMING)
    yield _fault_rows(b, state == rk.ALIEN, Status.UNKNOWN_MAGIC, FaultStage.FRAMING)
    yield _fault_rows(b, is_wrong, Status.BAD_CRC, FaultStage.CRC)
    yield _fault_rows(b, b["is_wrong_inside"] != 0, Status.BAD_CRC, FaultStage.RECORDS)
    yield _fault_rows(b, b["codec_status"] != 0, b["codec_status"], FaultStage.CODEC)
    yield _fault_rows(b, b["status"] != 0, b["status"], FaultStage.RECORDS)


def _text_faults(b: Rows, records: Rows, wrong: Indices) -> Rows:
    """FAULT rows of batches with header keys that are no UTF-8; wrong: these headers."""
    owners = np.repeat(records["batch"], records["header_count"])[wrong]
    count = np.bincount(owners, minlength=len(b))
    faults = _fault_rows(b, count > 0, Status.INVALID_UTF8, FaultStage.TEXT)
    faults["key_count"] = count[count > 0]
    return faults


def _fault_rows(b: Rows, where: Bools, kind: Status | Ints, stage: FaultStage) -> Rows:
    """FAULT rows of the chosen batches. kind: the Status of all, or of each batch."""
    rows = np.flatnonzero(where)
    chosen = take(b, rows)
    faults = np.zeros(len(rows), FAULT)
    for name in ("set_index", "batch_index", "pos"):
        faults[name] = chosen[name]
    faults["byte_count"] = chosen["size"]
    faults["kind"] = kind[rows] if isinstance(kind, np.ndarray) else kind
    faults["stage"] = stage
    return faults


def _time_seen(b: Rows) -> Bools:
    """bool: whether a message's timestamp is there; magic 0 has none."""
    return (b["magic"] != 1) | (b["visible"] >= rk.MESSAGE_HEADER_SIZE_V1)


def _timestamp_types(b: Rows) -> Ints:
    return np.where(b["magic"] == 0, 0, np.where(b["attributes"] & 8 != 0, 2, 1)).astype(np.int8)


def _headers(records: Rows, headers: Rows) -> tuple[pa.Array, Indices]:
    """(list column, headers whose key is no UTF-8)."""
    places = np.zeros(len(records) + 1, np.int32)
    np.cumsum(records["header_count"], out=places[1:])
    keys, wrong = as_text(gathered(headers["key_address"], headers["key_length"]))
    values = gathered(headers["value_address"], headers["value_length"])
    pairs = pa.StructArray.from_arrays([keys, values], fields=list(_HEADER))
    return pa.ListArray.from_arrays(pa.array(places), pairs), wrong


def _named(indices: Ints, names: tuple[str, ...], valid: Bools | None = None) -> pa.Array:
    """Dictionary column of `names`; null where not `valid`."""
    mask = None if valid is None else ~valid
    return pa.DictionaryArray.from_arrays(pa.array(indices, mask=mask), pa.array(names))


def _read_inner(section: bytes, magic: int) -> tuple[bool, int | None]:
    """(a message in a wrapper has a wrong CRC; offset of the last message, None without one).

    CRCs are checked up to the first message of another magic.
    """
    pos = 0
    is_wrong, last_offset, is_checked = False, None, True
    while len(section) - pos > rk.MAGIC_POS:
        offset, size, stored, inner_magic = _MESSAGE.unpack_from(section, pos)
        end = pos + rk.ENTRY_HEADER_SIZE + size
        if size < rk.ENTRY_LENGTH_MIN or end > len(section):
            break
        last_offset = offset
        is_checked = is_checked and inner_magic == magic
        is_wrong |= is_checked and stored != zlib.crc32(section[pos + rk.MAGIC_POS : end])
        pos = end
    return is_wrong, last_offset


_SEARCHED = 1 << 16  # positions at a time
# largest number of bytes checked per input byte, because hostile bytes can resemble many batches
_WORK_FACTOR = 8


def first_batch(data: Bytes) -> int:
    """Position of the first complete batch in data (uint8[n]); n if there is none.

    A snapshot is fetched in pieces that ignore batch boundaries (FetchSnapshot, KIP-630), so a
    piece may begin inside a batch. A boundary is a complete batch of magic 2 with a correct
    CRC-32C. Also n if the search would take more than linear time.
    """
    size = len(data)
    work = _WORK_FACTOR * size
    behind = max(size - rk.BATCH_HEADER_SIZE + 1, 0)
    for low in range(0, behind, _SEARCHED):
        for pos, end in _plausible(data, low, min(low + _SEARCHED, behind)):
            work -= end - pos
            if work < 0:
                return size
            stored = int.from_bytes(data[pos + 17 : pos + 21].tobytes(), "big")
            if crc32c.crc32c(data[pos + 21 : end]) == stored:
                return pos
    return size


def _plausible(data: Bytes, low: int, high: int) -> list[tuple[int, int]]:
    """(start, end) of each plausible complete batch that begins in [low, high)."""
    magic = data[low + rk.MAGIC_POS : high + rk.MAGIC_POS]
    places = low + np.flatnonzero(magic == 2)

    def int32(skip: int) -> Positions:
        value = np.zeros(len(places), np.int64)
        for k in range(4):
            value = (value << 8) | data[places + skip + k]
        return value

    ends = places + 12 + int32(8)
    kept = (
        (ends >= places + rk.BATCH_HEADER_SIZE)
        & (ends <= len(data))
        & (data[places] < 0x80)  # base offset
        & (data[places + 21] == 0)  # attributes
        & (data[places + 22] & 7 <= 4)
        & (data[places + 23] < 0x80)  # last offset delta
        & (data[places + 57] < 0x80)  # record count
    )
    return list(zip(places[kept].tolist(), ends[kept].tolist(), strict=True))
