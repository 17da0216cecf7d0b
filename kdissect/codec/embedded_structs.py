"""Decodes structs in opaque bytes: one definition, any versions, into Arrow columns.

Such bytes are keys and values of Kafka's own records (`internal_records`), and fields of messages
that brokers do not interpret (`group_protocols`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa

from kdissect.arrays import Bools, Bytes, Ints, States
from kdissect.codec.message_columns import MessageColumns, decode_columns
from kdissect.protocol.column_plan import ColumnPlan, compile_plan
from kdissect.protocol.model import ALWAYS, NEVER, Api, Definition, Field, Type
from kdissect.status import REASONS, Status

VALUE_MAX = 1 << 28  # bytes of a value; Kafka's own limit on messages is 1 MB by default


@dataclass(frozen=True, slots=True)
class Places:
    """Places of n values in a buffer: start, length int64[n]; length -1 means null."""

    buf: Bytes
    start: Ints
    length: Ints

    @staticmethod
    def of(array: pa.Array | pa.ChunkedArray) -> Places:
        """The places of a binary column's values."""
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        count = len(array)
        _, offsets, data = array.buffers()
        buf = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
        if not count:
            return Places(buf, np.zeros(0, np.int64), np.zeros(0, np.int64))
        bounds = np.frombuffer(offsets, np.int32)[array.offset : array.offset + count + 1]
        start = bounds[:-1].astype(np.int64)
        length = np.diff(bounds).astype(np.int64)
        if array.null_count:
            length[array.is_null().to_numpy(zero_copy_only=False)] = -1
        return Places(buf, start, length)

    def take(self, rows: Ints) -> Places:
        return Places(self.buf, self.start[rows], self.length[rows])

    def int16(self, skip: int = 0) -> tuple[Ints, Bools]:
        """(int16 after `skip` bytes of each value, bool: it is there); 0 if it is not."""
        value, is_present = self._number(skip, 2)
        return value.astype(np.int16).astype(np.int64), is_present

    def int32(self, skip: int = 0) -> tuple[Ints, Bools]:
        """(int32 after `skip` bytes of each value, bool: it is there); 0 if it is not."""
        value, is_present = self._number(skip, 4)
        return value.astype(np.int32).astype(np.int64), is_present

    def _number(self, skip: int, size: int) -> tuple[Ints, Bools]:
        is_present = self.length >= skip + size
        at = np.where(is_present, self.start + skip, 0)
        value = np.zeros(len(at), np.int64)
        if is_present.any():
            for k in range(size):
                value = (value << 8) | self.buf[at + k]
        return np.where(is_present, value, 0), is_present

    def without(self, size: Ints | int) -> Places:
        """The same values without their first `size` bytes, which must exist."""
        return Places(self.buf, self.start + size, self.length - size)


def read_uvarints(places: Places, count: int) -> tuple[list[Ints], Ints, States]:
    """(`count` unsigned varints of at most 32 bits per value, their total bytes, Status)."""
    size = len(places.start)
    status = np.zeros(size, np.int8)
    used = np.zeros(size, np.int64)
    numbers = []
    padded = places.buf if len(places.buf) else np.zeros(1, np.uint8)
    for _ in range(count):
        value = np.zeros(size, np.int64)
        is_open = status == Status.OK
        for k in range(5):
            short = is_open & (used >= places.length)
            status[short] = Status.TRUNCATED
            is_open = is_open & ~short
            byte = padded[np.where(is_open, places.start + used, 0)].astype(np.int64)
            if k == 4:
                over = is_open & (byte > 15)
                status[over] = Status.VARINT_OVERFLOW
                is_open &= ~over
            value |= np.where(is_open, (byte & 127) << (7 * k), 0)
            used += is_open
            is_open &= byte >= 128
            if not is_open.any():
                break
        numbers.append(value)
    return numbers, used, status


@cache
def definition_plan(definition: Definition) -> ColumnPlan:
    """The plan of a definition without message header."""
    # the kernel's callers read a correlation id from the header; in this header no version has one
    header = Definition("", ALWAYS, NEVER, (Field("correlation_id", Type.INT32, NEVER),))
    return compile_plan(Api(-1, definition.name, definition, definition), "request", header)


@dataclass(frozen=True, slots=True)
class DecodedStructs:
    """n values decoded with one definition.

    version: int64[n], as on the wire. status: int8[n], Status; OK for null values. columns: of
    these values; `body` is null for null values, and where the status is not OK.
    """

    definition: Definition
    version: Ints
    is_null: Bools
    status: States
    columns: MessageColumns

    def detail(self, row: int) -> str:
        """Text of the fault of a value."""
        reason = REASONS[Status(int(self.status[row]))]
        if self.columns.status[row] != self.status[row]:  # too long, or too short for a version
            return f"{self.definition.name}: {reason}"
        path = self.columns.error_path(row)
        where = " > ".join(part for part in (self.definition.name, path) if part)
        return f"{where}, pos {int(self.columns.error_pos[row])} of the body: {reason}"


def decode_structs(
    definition: Definition,
    places: Places,
    version: Ints,
    has_version: Bools | None = None,
    reads_newer: bool = False,
) -> DecodedStructs:
    """Decode the values at places, each in its version.

    Values without a version (not `has_version`) are truncated. reads_newer: read versions above the
    newest known one as that one.
    """
    is_null = places.length < 0
    is_long = places.length > VALUE_MAX
    is_short = np.zeros(len(is_null), np.bool_) if has_version is None else ~has_version & ~is_null
    last = definition.versions.last
    is_read = ~(is_null | is_long | is_short) & (version >= 0) & (reads_newer | (version <= last))
    columns = decode_columns(
        definition_plan(definition),
        places.buf,
        np.where(is_read, places.start, 0),
        np.where(is_read, places.start + places.length, 0),
        np.where(is_read, np.minimum(version, last), -1).astype(np.int16),
    )
    status = columns.status.copy()
    status[is_short] = Status.TRUNCATED
    status[is_long] = Status.LIMIT
    status[is_null] = Status.OK
    return DecodedStructs(definition, version, is_null, status, columns)
