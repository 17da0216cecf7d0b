"""Decodes records of Kafka's own logs: keys and values to Arrow columns, grouped by record type.

The bytes before a body give its layout:

    coordinators   key: int16 type, body of version 0   value: int16 version, body; null: tombstone
    metadata       key: none                            value: uvarints frame version 1, type and
                                                               version, body
    control        key: int16 version, int16 type       value: EndTxnMarker int16 version, body;
                                                               others begin with their version

All records of a type are decoded by one call of the column kernel, whatever their versions. A
record that does not decode is left out and reported in `InternalFaults`. If drafts of a definition
had another layout, the definition is that of the newest release.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kdissect.codec.message_columns import MessageColumns, decode_plan
from kdissect.protocol import catalog
from kdissect.protocol.column_plan import ColumnPlan, compile_plan
from kdissect.protocol.model import ALWAYS, NEVER, Api, Definition, Field, Type
from kdissect.status import REASONS, Status

GROUP, TRANSACTION, SHARE, METADATA, CONTROL = (
    "group",
    "transaction",
    "share",
    "metadata",
    "control",
)
LOG_OF_TOPIC = {
    "__consumer_offsets": GROUP,
    "__transaction_state": TRANSACTION,
    "__share_group_state": SHARE,
    "__cluster_metadata": METADATA,
}
METADATA_FRAME_VERSION = 1
VALUE_MAX = 1 << 28  # bytes of a key or value; Kafka's own limit on messages is 1 MB by default
_CONTROL_KEY = "ControlRecordTypeSchema"
_END_TXN_MARKERS = (0, 1)  # control types whose value begins with its version

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


class Framing(IntEnum):
    """The position of an embedded struct's version."""

    PREFIX = 0  # an int16 before the body
    FIELD_INT16 = 1  # the body's first field
    FIELD_INT32 = 2


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

    def int16(self, skip: int = 0) -> tuple[Ints, NDArray[np.bool_]]:
        """(int16 after `skip` bytes of each value, bool: it is there); 0 if it is not."""
        value, is_present = self._number(skip, 2)
        return value.astype(np.int16).astype(np.int64), is_present

    def int32(self, skip: int = 0) -> tuple[Ints, NDArray[np.bool_]]:
        """(int32 after `skip` bytes of each value, bool: it is there); 0 if it is not."""
        value, is_present = self._number(skip, 4)
        return value.astype(np.int32).astype(np.int64), is_present

    def _number(self, skip: int, size: int) -> tuple[Ints, NDArray[np.bool_]]:
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


@dataclass(frozen=True, slots=True)
class Bodies:
    """The non-null values of a column, decoded with one definition.

    rows: int64[m] into the column, ascending. api_version: int64[m] as on the wire. status:
    int8[m], Status. columns: of these m values.
    """

    definition: Definition
    rows: Ints
    api_version: Ints
    status: NDArray[np.int8]
    columns: MessageColumns

    def struct(self, rows: Ints) -> pa.StructArray:
        """Decoded values at these rows of the column; null if there is none."""
        return self._at(rows, self.columns.body)

    def unknown_tags(self, rows: Ints) -> pa.ListArray:
        return self._at(rows, self.columns.unknown_tags)

    def _at(self, rows: Ints, array: pa.Array) -> pa.Array:
        if np.array_equal(rows, self.rows):
            return array
        if not len(self.rows):
            return pa.nulls(len(rows), array.type)
        at = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return array.take(pa.array(at, mask=self.rows[at] != rows))


@dataclass(frozen=True, slots=True)
class InternalColumns:
    """Records of one type.

    name: of the definition, without "Value" (OffsetCommit, TopicRecord).
    rows: int64[m] into the given columns, ascending.
    key_version: int16[m], the first two bytes of the key; None without keys.
    value_version: int16[m].
    has_value: bool[m], False for a tombstone.
    key, value: structs; key is None without keys.
    value_unknown_tags: list<struct<path, tag, data>>, null if there are none.
    """

    name: str
    rows: Ints
    key_version: NDArray[np.int16] | None
    value_version: NDArray[np.int16]
    has_value: NDArray[np.bool_]
    key: pa.StructArray | None
    value: pa.StructArray
    value_unknown_tags: pa.ListArray


@dataclass(frozen=True, slots=True)
class InternalFaults:
    """Records with one kind of fault.

    Records with INVALID_UTF8 or SIZE_MISMATCH (bytes after the end of the body) are in the columns
    nevertheless.

    rows: int64[m] into the given columns.
    status: UNKNOWN_API means a type without definition.
    in_key: the fault is in the key.
    number: int64[m], the unknown type or version.
    """

    what: str
    status: Status
    in_key: bool
    rows: Ints
    number: Ints
    bodies: Bodies | None = None

    def detail(self, at: int) -> str:
        """Text of the fault of record rows[at]."""
        if self.status is Status.UNKNOWN_API:
            return f"no definition for {self.what} {int(self.number[at])}"
        if self.status is Status.UNKNOWN_VERSION:
            return f"no definition for {self.what} version {int(self.number[at])}"
        if self.status is Status.SIZE_MISMATCH:
            return f"{int(self.number[at])} bytes after the end of a {self.what}"
        text = f"{self.what}: {REASONS[self.status]}"
        if self.bodies is None or self.status is Status.INVALID_UTF8:
            return text
        row = int(np.searchsorted(self.bodies.rows, self.rows[at]))
        if int(self.bodies.columns.status[row]) != self.status:
            return text  # too short for a version
        path = self.bodies.columns.error_path(row)
        place = f"pos {int(self.bodies.columns.error_pos[row])} of the body"
        where = " > ".join(part for part in (self.what, path) if part)
        return f"{where}, {place}: {REASONS[self.status]}"


@cache
def definition_plan(definition: Definition) -> ColumnPlan:
    """The plan of a definition without message header."""
    # the kernel's callers read a correlation id from the header; in this header no version has one
    header = Definition("", ALWAYS, NEVER, (Field("correlation_id", Type.INT32, NEVER),))
    return compile_plan(Api(-1, definition.name, definition, definition), "request", header)


def decode_embedded(definition: Definition, values: Any, framing: Framing) -> Bodies:
    """Decode structs in opaque bytes (consumer protocol, principals): one definition, any
    versions."""
    places = values if isinstance(values, Places) else Places.of(values)
    rows = np.flatnonzero(places.length >= 0)
    chosen = places.take(rows)
    number, is_present = chosen.int32() if framing is Framing.FIELD_INT32 else chosen.int16()
    if framing is Framing.PREFIX:
        chosen = chosen.without(np.where(is_present, 2, 0))
    return _bodies(definition, rows, chosen, number, is_present)


def _bodies(
    definition: Definition,
    rows: Ints,
    places: Places,
    api_version: Ints,
    there: NDArray[np.bool_],
) -> Bodies:
    """Decode bodies at places; those without version (not `there`) are truncated."""
    too_long = places.length > VALUE_MAX
    skipped = too_long | ~there
    is_known = (api_version >= 0) & (api_version <= definition.versions.last)
    columns = decode_plan(
        definition_plan(definition),
        places.buf,
        np.where(skipped, 0, places.start),
        np.where(skipped, 0, places.start + places.length),
        np.where(is_known & ~skipped, api_version, -1).astype(np.int16),
    )
    status = columns.status.copy()
    status[~there] = Status.TRUNCATED
    status[too_long] = Status.LIMIT
    return Bodies(definition, rows, api_version, status, columns)


def decode_internal(
    log: str, keys: pa.Array, values: pa.Array
) -> tuple[list[InternalColumns], list[InternalFaults]]:
    """Decode records of a log, from their keys and values as binary columns of one length.

    log: GROUP, TRANSACTION, SHARE, METADATA, or CONTROL for control records of any topic. Returns
    (columns by record type, faults).
    """
    if log == METADATA:
        return _metadata(Places.of(values))
    if log == CONTROL:
        return _control(Places.of(keys), Places.of(values))
    return _coordinator(log, Places.of(keys), Places.of(values))


def _coordinator(
    log: str, keys: Places, values: Places
) -> tuple[list[InternalColumns], list[InternalFaults]]:
    definitions = catalog.coordinator_records(log)
    tables: list[InternalColumns] = []
    faults: list[InternalFaults] = []
    types, has_type = keys.int16()
    _add_fault(
        faults, f"{log} record key", Status.TRUNCATED, np.flatnonzero(~has_type), in_key=True
    )
    for number in np.unique(types[has_type]).tolist():
        rows = np.flatnonzero(has_type & (types == number))
        if number not in definitions:
            what = f"{log} record type"
            _add_fault(faults, what, Status.UNKNOWN_API, rows, types[rows], in_key=True)
            continue
        key_definition, value_definition = definitions[number]
        zeros = np.zeros(len(rows), np.int64)
        every = np.ones(len(rows), np.bool_)
        key = _bodies(key_definition, rows, keys.take(rows).without(2), zeros, every)
        value = _of_rows(value_definition, values, rows, Framing.PREFIX)
        _body_faults(faults, key, in_key=True)
        _body_faults(faults, value)
        name = key_definition.name.removesuffix("Key")
        tables.append(_columns(name, rows, key, types[rows], value))
    return tables, faults


def _of_rows(definition: Definition, values: Places, rows: Ints, framing: Framing) -> Bodies:
    bodies = decode_embedded(definition, values.take(rows), framing)
    return Bodies(definition, rows[bodies.rows], bodies.api_version, bodies.status, bodies.columns)


def _control(keys: Places, values: Places) -> tuple[list[InternalColumns], list[InternalFaults]]:
    definitions = catalog.control_records()
    tables: list[InternalColumns] = []
    faults: list[InternalFaults] = []
    key_version, _ = keys.int16()
    types, has_type = keys.int16(2)
    has_type &= key_version >= 0
    # a type without definition is UNKNOWN in `records`; Kafka's readers skip it too
    for definition in dict.fromkeys(definitions.values()):
        numbers = [number for number, one in definitions.items() if one is definition]
        rows = np.flatnonzero(has_type & np.isin(types, numbers))
        if not len(rows):
            continue
        zeros = np.zeros(len(rows), np.int64)
        key = _bodies(
            catalog.definition(_CONTROL_KEY),
            rows,
            keys.take(rows).without(2),
            zeros,
            np.ones(len(rows), np.bool_),
        )
        is_marker = numbers[0] in _END_TXN_MARKERS
        framing = Framing.PREFIX if is_marker else Framing.FIELD_INT16
        value = _of_rows(definition, values, rows, framing)
        _body_faults(faults, value)
        tables.append(_columns(definition.name, rows, key, key_version[rows], value))
    return tables, faults


def _metadata(values: Places) -> tuple[list[InternalColumns], list[InternalFaults]]:
    definitions = catalog.metadata_records()
    tables: list[InternalColumns] = []
    faults: list[InternalFaults] = []
    heads, behind, status = read_uvarints(values, 3)
    frame, types, versions = heads
    what = "metadata record"
    for code in (Status.TRUNCATED, Status.VARINT_OVERFLOW):
        _add_fault(faults, what, code, np.flatnonzero(status == code))
    framed = frame == METADATA_FRAME_VERSION
    other = np.flatnonzero((status == Status.OK) & ~framed)
    _add_fault(faults, f"{what} frame", Status.UNKNOWN_VERSION, other, frame[other])
    is_record = framed & (status == Status.OK)
    for number in np.unique(types[is_record]).tolist():
        rows = np.flatnonzero(is_record & (types == number))
        if number not in definitions:
            _add_fault(faults, f"{what} type", Status.UNKNOWN_API, rows, types[rows])
            continue
        definition = definitions[number]
        places = values.without(behind).take(rows)
        every = np.ones(len(rows), np.bool_)
        value = _bodies(definition, rows, places, versions[rows], every)
        _body_faults(faults, value)
        tables.append(_columns(definition.name, rows, None, None, value))
    return tables, faults


def read_uvarints(places: Places, count: int) -> tuple[list[Ints], Ints, NDArray[np.int8]]:
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


def _columns(
    name: str, rows: Ints, key: Bodies | None, key_version: Ints | None, value: Bodies
) -> InternalColumns:
    """The records whose key decoded, and whose value decoded or is a tombstone."""
    bad = value.rows[value.status != Status.OK]
    if key is not None:
        bad = np.union1d(bad, key.rows[key.status != Status.OK])
    kept = ~np.isin(rows, bad)
    good = rows[kept]
    has_value = np.isin(good, value.rows)
    api_version = np.zeros(len(good), np.int16)
    api_version[has_value] = value.api_version[np.searchsorted(value.rows, good[has_value])]
    return InternalColumns(
        name,
        good,
        None if key_version is None else key_version[kept].astype(np.int16),
        api_version,
        has_value,
        None if key is None else key.struct(good),
        value.struct(good),
        value.unknown_tags(good),
    )


def _body_faults(faults: list[InternalFaults], bodies: Bodies, in_key: bool = False) -> None:
    name = bodies.definition.name
    for code in np.unique(bodies.status[bodies.status != Status.OK]).tolist():
        chosen = bodies.status == code
        rows, number = bodies.rows[chosen], bodies.api_version[chosen]
        faults.append(InternalFaults(name, Status(code), in_key, rows, number, bodies))
    surplus = bodies.columns.surplus
    over = (surplus > 0) & (bodies.status == Status.OK)
    _add_fault(faults, name, Status.SIZE_MISMATCH, bodies.rows[over], surplus[over], in_key)
    garbled = bodies.columns.invalid_utf8 & (bodies.status == Status.OK)
    _add_fault(faults, name, Status.INVALID_UTF8, bodies.rows[garbled], in_key=in_key)


def _add_fault(
    faults: list[InternalFaults],
    what: str,
    status: Status,
    rows: Ints,
    number: Ints | None = None,
    in_key: bool = False,
) -> None:
    if len(rows):
        number = np.zeros(len(rows), np.int64) if number is None else number
        faults.append(InternalFaults(what, status, in_key, rows, number))
