"""Decodes record sets (the bytes of a `records` field) into Arrow columns of batches and records.

Batches are scanned, checked and decompressed one after the other until a chunk of a few megabytes
is full. Then their records are parsed and copied while they are still in the cache. The bytes are
not trusted: a fault costs only the records that it makes unreadable and becomes a row of `faults`.
Only a batch with an impossible length ends its set, because the next one cannot be found.

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
from typing import Any, NamedTuple

import crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kdissect.arrays import take
from kdissect.codec import record_kernel as rk
from kdissect.codec.compression import CODEC_NAMES, Codec, DecompressionLimits, decompress
from kdissect.codec.strings import as_text, gathered
from kdissect.status import Status

__all__ = [
    "BATCHES",
    "FAULT",
    "RECORD_SCHEMA",
    "DecompressionLimits",
    "FaultStage",
    "RecordChunk",
    "RecordSet",
    "decode_record_set",
    "first_batch",
    "iter_record_chunks",
]

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

    # UNKNOWN_MAGIC (a: the magic). TRUNCATED, NEGATIVE_LENGTH: an impossible length (a).
    FRAMING = 0
    # BAD_CRC. a: stored CRC, b: computed CRC.
    CRC = 1
    # CORRUPT, LIMIT (a: bytes allowed), UNKNOWN_CODEC (a: its number). b: compressed size.
    CODEC = 2
    # COUNT_MISMATCH, LIMIT (of headers), or why a record is malformed. a: records announced, b:
    # records read before it. BAD_CRC: the first message inside a wrapper with a wrong CRC; a, b as
    # for CRC.
    RECORDS = 3
    # INVALID_UTF8. a: number of invalid header keys of the batch's records in this chunk.
    TEXT = 4


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
        ("a", "<i8"),
        ("b", "<i8"),
    ]
)


@dataclass(frozen=True, slots=True)
class RecordChunk:
    """A part of the result of bounded size. `batches` are those whose records end in this chunk."""

    batches: pa.RecordBatch  # BATCHES
    records: pa.RecordBatch  # RECORD_SCHEMA
    faults: npt.NDArray[np.void]  # FAULT


@dataclass(frozen=True, slots=True)
class RecordSet:
    """One record set as rows: dicts with the columns of BATCHES and RECORD_SCHEMA."""

    batches: list[dict[str, Any]]
    records: list[dict[str, Any]]
    faults: npt.NDArray[np.void]  # FAULT


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
_KEPT_HEADERS = 1 << 18
_MESSAGE = struct.Struct(">qiIb")  # magic 0 and 1: offset, size, CRC, magic
_DEFAULT_LIMITS = DecompressionLimits()


def iter_record_chunks(
    buf: npt.NDArray[np.uint8],
    start: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
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
    return _chunks(buf, start, length, limits, chunk_bytes)


def _chunks(
    buf: Any, start: Any, length: Any, limits: DecompressionLimits, chunk_bytes: int
) -> Any:
    try:
        workspace = _IDLE.pop()
    except IndexError:
        workspace = _Workspace()
    decoder = _Decoder(buf, length, limits, chunk_bytes, workspace)
    position = rk.scan_start()
    try:
        while True:
            count = rk.scan_batches(buf, start, length, position, workspace.batches)
            if count == 0:
                return
            yield from decoder.window(count)
    finally:
        workspace.trim(chunk_bytes)
        _IDLE.append(workspace)


class _Workspace:
    """Buffers that decoders reuse, because page faults on fresh ones halve the speed."""

    def __init__(self) -> None:
        self.batches = np.empty(_WINDOW, rk.SCANNED_BATCH)
        self.take_arena(0)
        self.records = rk.record_columns(_RECORDS)
        self.headers = rk.header_columns(_HEADERS)

    def take_arena(self, size: int) -> None:
        self.arena = np.empty(0, np.uint8)  # freed before its successor is allocated
        self.arena = np.empty(size, np.uint8)
        self.arena_address = self.arena.ctypes.data  # kept, because reading it is slow

    def trim(self, chunk_bytes: int) -> None:
        """Free the extra memory that an unusual batch needed."""
        if self.arena.size > 2 * max(chunk_bytes, 8 << 20):
            self.take_arena(0)
        if self.headers.key_address.size > _KEPT_HEADERS:
            self.headers = rk.header_columns(_HEADERS)


# Workspaces of finished decoders; list.pop and list.append are atomic, so threads may share it.
_IDLE: list[_Workspace] = []


class _Section(NamedTuple):
    """The compressed section buf[start:start + size] of batch `row`."""

    row: int
    set_index: int
    magic: int
    codec: int
    start: int
    size: int


class _Decoder:
    """Decodes windows of scanned batches; one per call of iter_record_chunks."""

    def __init__(
        self,
        buf: Any,
        length: Any,
        limits: DecompressionLimits,
        chunk_bytes: int,
        workspace: _Workspace,
    ) -> None:
        self.buf = buf
        self.view = memoryview(buf)
        self.length = length
        self.limits = limits
        self.chunk_bytes = chunk_bytes
        self.workspace = workspace
        self.arena_used = 0
        # (row, address, size) of batches whose records are in the arena
        self.decompressed: list[tuple[int, int, int]] = []
        self.current_set = -1
        self.set_bytes_left = 0

    def window(self, count: int) -> Iterator[RecordChunk]:
        """Decode `count` batches that were scanned into the workspace."""
        self.b = b = self.workspace.batches[:count]
        self.state = b["state"]
        self.magic = b["magic"]
        self.codec = b["attributes"] & 7
        whole = self.state == rk.WHOLE
        self.sections = self._sections(whole)
        self.crc = b["crc"].copy()
        self.codec_status = np.zeros(count, np.uint8)
        self.codec_allowance = np.zeros(count, np.int64)
        # of the first message with a wrong CRC in each wrapper
        self.inner_crcs = np.zeros((2, count), np.int64)
        self.uncompressed_size = b["section_size"].copy()
        plain = whole & (self.codec == Codec.NONE)
        plain_bytes = np.zeros(count + 1, np.int64)
        np.cumsum(np.where(plain, b["section_size"], 0), out=plain_bytes[1:])
        low = 0
        base = 0
        checked = np.flatnonzero(whole)
        columns = (
            checked,
            plain_bytes[checked],
            b["crc_start"][checked],
            (b["pos"] + b["size"])[checked],
            b["set_index"][checked],
            self.magic[checked],
            self.codec[checked],
            b["section_start"][checked],
            b["section_size"][checked],
        )
        for i, bytes_before, crc_start, end, set_index, magic, codec, start, size in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            if bytes_before - base + self.arena_used >= self.chunk_bytes:
                yield from self._flush(low, i)
                low, base = i, bytes_before
            covered = self.view[crc_start:end]
            self.crc[i] = crc32c.crc32c(covered) if magic == 2 else zlib.crc32(covered)
            if not codec:
                continue
            section = _Section(i, set_index, magic, codec, start, size)
            if not self._decompress(section):
                yield from self._flush(low, i)
                low, base = i, bytes_before
                self._decompress(section)
        yield from self._flush(low, count)

    def _sections(self, whole: Any) -> Any:
        """Sections to parse, as far as they are known before decompression."""
        b = self.b
        sections = np.zeros(whole.size, rk.SECTION)
        is_batch = whole & (self.magic == 2)
        is_log_append = b["attributes"] & 8 != 0
        is_wrapper = ~is_batch & (self.codec != Codec.NONE)
        kind = np.where(is_batch, rk.RECORDS, rk.MESSAGES)
        sections["kind"] = np.where(whole & (self.codec == Codec.NONE), kind, rk.SKIP)
        sections["address"] = self.buf.ctypes.data + b["section_start"]
        sections["length"] = b["section_size"]
        sections["record_count"] = b["record_count"]
        sections["offset"] = b["base_offset"]
        sections["timestamp"] = np.where(
            is_batch & ~is_log_append, b["base_timestamp"], b["max_timestamp"]
        )
        sections["flags"] = (
            np.where(is_log_append & (self.magic > 0), rk.IS_LOG_APPEND, 0)
            | np.where(is_batch & (b["attributes"] & 32 != 0), rk.IS_CONTROL, 0)
            | np.where(is_wrapper, rk.IS_WRAPPER, 0)
        )
        sections["magic"] = self.magic
        return sections

    def _decompress(self, section: _Section) -> bool:
        """Decompress a section into the arena; False: flush the arena first."""
        i, size = section.row, section.size
        if size < 0:
            self.codec_status[i] = Status.CORRUPT  # a wrapper without a value
            return True
        if section.set_index != self.current_set:
            self.current_set = section.set_index
            self.set_bytes_left = self.limits.set_allowance(int(self.length[section.set_index]))
        allowance = min(self.limits.batch_allowance(size), self.set_bytes_left)
        data = self.buf[section.start : section.start + size]
        workspace = self.workspace
        while True:
            room = min(workspace.arena.size - self.arena_used, allowance)
            out = workspace.arena[self.arena_used : self.arena_used + room]
            status, written = decompress(section.codec, data, out)
            if status != Status.ROOM_NEEDED or room == allowance:
                break
            if self.arena_used:
                return False
            workspace.take_arena(max(2 * self.chunk_bytes, 4 * workspace.arena.size))
        if status != Status.OK:
            self.codec_allowance[i] = allowance
            self.codec_status[i] = Status.LIMIT if status == Status.ROOM_NEEDED else status
            # Failed work counts as well, so that hostile batches use up the budget.
            self.set_bytes_left -= min(allowance, self.limits.ratio_free_size)
            return True
        address = workspace.arena_address + self.arena_used
        if section.magic < 2:
            self.inner_crcs[:, i] = wrong_inner_crc(out[:written].tobytes(), section.magic)
        self.set_bytes_left -= written
        self.arena_used += written
        self.decompressed.append((i, address, written))
        return True

    def _place_decompressed(self) -> None:
        """Set the addresses of the decompressed records for the parser."""
        if not self.decompressed:
            return
        rows, address, size = np.array(self.decompressed, np.int64).T
        self.decompressed.clear()
        self.sections["kind"][rows] = np.where(self.magic[rows] == 2, rk.RECORDS, rk.MESSAGES)
        self.sections["address"][rows] = address
        self.sections["length"][rows] = size
        self.uncompressed_size[rows] = size

    def _flush(self, low: int, high: int) -> Iterator[RecordChunk]:
        """Parse the batches low..high, whose sections lie in the input and in the arena."""
        self._place_decompressed()
        workspace = self.workspace
        position = np.zeros(1, rk.PARSE_POSITION)[0]
        done = low
        while low < high:
            status = rk.parse_records(
                self.sections[low:high],
                position,
                self.chunk_bytes,
                self.limits.record_headers_max,
                workspace.records,
                workspace.headers,
            )
            if position["headers_needed"]:
                workspace.headers = rk.header_columns(int(position["headers_needed"]))
                continue
            next_section = low + int(position["section"])
            records = rk.RecordColumns(
                *(column[: position["row_count"]] for column in workspace.records)
            )
            headers = rk.HeaderColumns(
                *(column[: position["header_count"]] for column in workspace.headers)
            )
            yield self._chunk(low, done, next_section, records, headers)
            done = next_section
            if status == Status.OK:
                break
        self.arena_used = 0

    def _chunk(
        self, low: int, done: int, high: int, records: rk.RecordColumns, headers: rk.HeaderColumns
    ) -> RecordChunk:
        header_array, invalid = _headers(records, headers)
        faults = self._faults(done, high)
        if invalid is not None:
            texts = _faults(self.b, low + invalid[0], Status.INVALID_UTF8, FaultStage.TEXT)
            texts["a"] = invalid[1]
            faults = np.concatenate([faults, texts])
        return RecordChunk(
            self._batches(done, high),
            self._records(low, records, header_array),
            faults[np.lexsort((faults["stage"], faults["batch_index"], faults["set_index"]))],
        )

    def _records(self, low: int, records: rk.RecordColumns, headers: pa.Array) -> pa.RecordBatch:
        batch = records.section + low
        control_type = records.control_type
        columns = [
            pa.array(self.b["set_index"].astype(np.int32)[batch]),
            pa.array(self.b["batch_index"].astype(np.int32)[batch]),
            pa.array(records.record_index.copy()),
            pa.array(records.offset.copy()),
            pa.array(records.timestamp.copy()),
            _named(_timestamp_types(self.b)[batch], TIMESTAMP_TYPES),
            gathered(records.key_address, records.key_length),
            gathered(records.value_address, records.value_length),
            headers,
            _named(control_type.astype(np.int8), CONTROL_TYPES, control_type >= 0),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)

    def _batches(self, low: int, high: int) -> pa.RecordBatch:
        chosen = low + np.flatnonzero(self.state[low:high] != rk.BAD_LENGTH)
        b = take(self.b, chosen)
        state = self.state[chosen]
        whole = state == rk.WHOLE
        partial = state == rk.PARTIAL
        magic = b["magic"]
        is_v2 = magic == 2
        has_magic = (whole | partial) & (magic >= 0) & (magic <= 2)
        attributes = b["attributes"]
        codec = attributes & 7
        sections = take(self.sections, chosen)
        read = sections["parsed_records"]
        # a wrapper has its last offset; the first one comes from the messages inside
        is_wrapper = whole & ~is_v2 & (codec != 0) & (read > 0)
        base_offset = np.where(is_wrapper, sections["first_offset"], b["base_offset"])

        def seen(v2_end: int, legacy_end: int = rk.MAGIC_POS + 1) -> Any:
            """bool: batches of known magic of which this many bytes are there."""
            return has_magic & (b["visible"] >= np.where(is_v2, v2_end, legacy_end))

        has_attributes = seen(23, rk.MESSAGE_HEADER_SIZE_V0)
        horizon = is_v2 & (attributes & 64 != 0) & seen(35)
        values = {
            "set_index": (b["set_index"], None),
            "batch_index": (b["batch_index"], None),
            "pos": (b["pos"], None),
            "base_offset": (base_offset, b["visible"] >= 8),
            "last_offset": (b["last_offset"], seen(27)),
            "magic": (magic, b["visible"] > rk.MAGIC_POS),
            "crc_ok": (self.crc[chosen] == b["crc"], whole),
            "is_partial": (partial, whole | partial),
            "size": (b["size"], None),
            "uncompressed_size": (
                self.uncompressed_size[chosen],
                whole & (self.codec_status[chosen] == 0),
            ),
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
            column = column.astype(field.type.to_pandas_dtype())
            arrays.append(pa.array(column, mask=None if valid is None else ~valid))
        return pa.RecordBatch.from_arrays(arrays, schema=BATCHES)

    def _faults(self, low: int, high: int) -> Any:
        part = slice(low, high)
        b, state = self.b, self.state[part]
        parts = []

        def add(where: Any, kind: Any, stage: FaultStage, a: Any, second: Any) -> None:
            chosen = low + np.flatnonzero(where)
            if chosen.size:
                faults = _faults(b, chosen, kind, stage)
                if isinstance(kind, np.ndarray):
                    faults["kind"] = kind[chosen]
                faults["a"] = a[chosen]
                faults["b"] = second[chosen]
                parts.append(faults)

        whole = state == rk.WHOLE
        nothing = np.zeros(b.size, np.int64)
        length = np.where(self.state == rk.BAD_LENGTH, b["record_count"], b["size"] - 12)
        is_negative = (state == rk.BAD_LENGTH) & (length[part] < 0)
        is_short = ((state == rk.BAD_LENGTH) & ~is_negative) | (state == rk.TOO_SMALL)
        framing = FaultStage.FRAMING
        add(is_negative, Status.NEGATIVE_LENGTH, framing, length, nothing)
        add(is_short, Status.TRUNCATED, framing, length, nothing)
        add(state == rk.ALIEN, Status.UNKNOWN_MAGIC, framing, self.magic, nothing)
        crc_wrong = whole & (self.crc[part] != b["crc"][part])
        add(crc_wrong, Status.BAD_CRC, FaultStage.CRC, b["crc"], self.crc)
        stored, computed = self.inner_crcs
        inner_wrong = stored[part] != computed[part]
        add(inner_wrong, Status.BAD_CRC, FaultStage.RECORDS, stored, computed)
        codec_status = self.codec_status
        a = np.where(codec_status == Status.UNKNOWN_CODEC, self.codec, self.codec_allowance)
        add(
            codec_status[part] != 0,
            codec_status,
            FaultStage.CODEC,
            a,
            np.maximum(b["section_size"], 0),
        )
        status, read = self.sections["status"], self.sections["parsed_records"]
        add(status[part] != 0, status, FaultStage.RECORDS, b["record_count"], read)
        return np.concatenate(parts) if parts else np.empty(0, FAULT)


def _faults(b: Any, chosen: Any, kind: Any, stage: FaultStage) -> Any:
    faults = np.zeros(chosen.size, FAULT)
    faults["set_index"] = b["set_index"][chosen]
    faults["batch_index"] = b["batch_index"][chosen]
    faults["kind"] = 0 if isinstance(kind, np.ndarray) else kind
    faults["stage"] = stage
    faults["pos"] = b["pos"][chosen]
    faults["byte_count"] = b["size"][chosen]
    return faults


def _time_seen(b: Any) -> Any:
    """bool: whether a message's timestamp is there; magic 0 has none."""
    return (b["magic"] != 1) | (b["visible"] >= rk.MESSAGE_HEADER_SIZE_V1)


def _timestamp_types(b: Any) -> Any:
    return np.where(b["magic"] == 0, 0, np.where(b["attributes"] & 8 != 0, 2, 1)).astype(np.int8)


def _headers(records: rk.RecordColumns, headers: rk.HeaderColumns) -> tuple[pa.Array, Any]:
    """(list column, (sections, counts) with header keys that are no UTF-8, or None)."""
    counts = records.header_count
    places = np.zeros(counts.size + 1, np.int32)
    np.cumsum(counts, out=places[1:])
    keys, wrong = as_text(gathered(headers.key_address, headers.key_length))
    invalid = None
    if len(wrong):
        owners = np.repeat(records.section, counts)[wrong]
        invalid = np.unique(owners, return_counts=True)
    values = gathered(headers.value_address, headers.value_length)
    pairs = pa.StructArray.from_arrays([keys, values], fields=list(_HEADER))
    return pa.ListArray.from_arrays(pa.array(places), pairs), invalid


def _named(indices: Any, names: tuple[str, ...], valid: Any = None) -> pa.Array:
    """Dictionary column of `names`; null where not `valid`."""
    mask = None if valid is None else ~valid
    return pa.DictionaryArray.from_arrays(pa.array(indices, mask=mask), pa.array(names))


def wrong_inner_crc(section: bytes, magic: int) -> tuple[int, int]:
    """(stored, computed) CRC of the first message in a wrapper with a wrong one; (0, 0) if all are
    right. The search ends where the section has no further message of this magic."""
    pos = 0
    while len(section) - pos > rk.MAGIC_POS:
        _, size, stored, inner_magic = _MESSAGE.unpack_from(section, pos)
        end = pos + rk.ENTRY_HEADER_SIZE + size
        if size < rk.ENTRY_LENGTH_MIN or end > len(section) or inner_magic != magic:
            break
        computed = zlib.crc32(section[pos + rk.MAGIC_POS : end])
        if stored != computed:
            return stored, computed
        pos = end
    return 0, 0


_SEARCHED = 1 << 16  # positions at a time
# largest number of bytes checked per input byte, because hostile bytes can resemble many batches
_WORK_FACTOR = 8


def first_batch(data: npt.NDArray[np.uint8]) -> int:
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


def _plausible(data: npt.NDArray[np.uint8], low: int, high: int) -> list[tuple[int, int]]:
    """(start, end) of each plausible complete batch that begins in [low, high)."""
    magic = data[low + rk.MAGIC_POS : high + rk.MAGIC_POS]
    places = low + np.flatnonzero(magic == 2)

    def int32(skip: int) -> npt.NDArray[np.int64]:
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
