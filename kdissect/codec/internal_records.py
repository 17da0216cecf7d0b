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

import base64
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from kdissect.arrays import Bools, Codes
from kdissect.codec.embedded_structs import (
    DecodedStructs,
    Ints,
    Places,
    decode_structs,
    read_uvarints,
)
from kdissect.protocol import catalog
from kdissect.status import REASONS, Status

GROUP, TRANSACTION, SHARE = "group", "transaction", "share"
METADATA, CONTROL = "metadata", "control"
METADATA_TOPIC = "__cluster_metadata"
METADATA_TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAQ"  # KIP-595: a fixed id
METADATA_MARKS = (base64.urlsafe_b64decode(METADATA_TOPIC_ID + "=="), METADATA_TOPIC.encode())
LOG_OF_TOPIC = {
    "__consumer_offsets": GROUP,
    "__transaction_state": TRANSACTION,
    "__share_group_state": SHARE,
    METADATA_TOPIC: METADATA,
}
METADATA_FRAME_VERSION = 1


def names_metadata_log(message: bytes) -> bool:
    """Return whether a frame has the name or id of the metadata log, whose records hold secrets."""
    return any(mark in message for mark in METADATA_MARKS)


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
    key_version: Codes | None
    value_version: Codes
    has_value: Bools
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
    structs: DecodedStructs | None = None
    at: Ints | None = None  # their places in `structs`

    def detail(self, at: int) -> str:
        """Text of the fault of record rows[at]."""
        if self.status is Status.UNKNOWN_API:
            return f"no definition for {self.what} {int(self.number[at])}"
        if self.status is Status.UNKNOWN_VERSION:
            return f"no definition for {self.what} version {int(self.number[at])}"
        if self.status is Status.SIZE_MISMATCH:
            return f"{int(self.number[at])} bytes after the end of a {self.what}"
        text = f"{self.what}: {REASONS[self.status]}"
        if self.structs is None or self.at is None:
            return text
        return self.structs.detail(int(self.at[at]))


def decode_internal(
    log: str, keys: pa.Array, values: pa.Array
) -> tuple[list[InternalColumns], list[InternalFaults]]:
    """Decode records of a log, from their keys and values as binary columns of one length.

    log: GROUP, TRANSACTION, SHARE, METADATA, or CONTROL for control records of any topic. Returns
    (columns by record type, faults).
    """
    key_places, value_places = Places.of(keys), Places.of(values)
    faults: list[InternalFaults] = []
    key_version = None
    if log == METADATA:
        types, has_type, body, version = _framed(value_places, faults)
        has_version = has_type
    else:
        key_version, has_key = key_places.int16()
        types, has_type = key_version, has_key
        version, has_version = value_places.int16()
        has_prefix = has_version
        if log == CONTROL:
            types, has_type = key_places.int16(2)
            has_type &= key_version >= 0
            types = np.where(types == catalog.COMMIT, catalog.ABORT, types)
            # in other control records the version is the body's first field
            has_prefix = has_version & (types == catalog.ABORT)
        else:
            rows = np.flatnonzero(~has_type)
            _add_fault(faults, f"{log} record key", Status.TRUNCATED, rows, in_key=True)
        body = value_places.without(np.where(has_prefix, 2, 0))
    tables = []
    definitions = catalog.records(log)
    for number in np.unique(types[has_type]).tolist():
        rows = np.flatnonzero(has_type & (types == number))
        if number not in definitions:
            if log != CONTROL:  # there the type is UNKNOWN in `records`; Kafka's readers skip it
                what = f"{log} record type"
                in_key = log != METADATA
                _add_fault(faults, what, Status.UNKNOWN_API, rows, types[rows], in_key)
            continue
        key_definition, definition = definitions[number]
        key = None
        if key_definition is not None:
            key_body = key_places.take(rows).without(2)
            key = decode_structs(key_definition, key_body, np.zeros(len(rows), np.int64))
            if log != CONTROL:
                _add_struct_faults(faults, rows, key, in_key=True)
        value = decode_structs(definition, body.take(rows), version[rows], has_version[rows])
        _add_struct_faults(faults, rows, value)
        tables.append(_columns(rows, key, key_version, value))
    return tables, faults


def _framed(values: Places, faults: list[InternalFaults]) -> tuple[Ints, Bools, Places, Ints]:
    """(types, bool: a record with a type, bodies, versions) of records of the metadata log."""
    (frame, types, versions), behind, status = read_uvarints(values, 3)
    what = "metadata record"
    for code in (Status.TRUNCATED, Status.VARINT_OVERFLOW):
        _add_fault(faults, what, code, np.flatnonzero(status == code))
    is_read = status == Status.OK
    is_framed = frame == METADATA_FRAME_VERSION
    other = np.flatnonzero(is_read & ~is_framed)
    _add_fault(faults, f"{what} frame", Status.UNKNOWN_VERSION, other, frame[other])
    return types, is_read & is_framed, values.without(behind), versions


def _columns(
    rows: Ints, key: DecodedStructs | None, key_version: Ints | None, value: DecodedStructs
) -> InternalColumns:
    """The records whose key decoded, and whose value decoded or is a tombstone."""
    is_good = value.status == Status.OK
    if key is not None:
        is_good &= key.status == Status.OK
    has_value = ~value.is_null[is_good]
    kept = pa.array(is_good)
    return InternalColumns(
        value.definition.name.removesuffix("Value"),
        rows[is_good],
        None if key_version is None else key_version[rows[is_good]].astype(np.int16),
        np.where(has_value, value.version[is_good], 0).astype(np.int16),
        has_value,
        None if key is None else key.columns.body.filter(kept),
        value.columns.body.filter(kept),
        value.columns.unknown_tags.filter(kept),
    )


def _add_struct_faults(
    faults: list[InternalFaults], rows: Ints, structs: DecodedStructs, in_key: bool = False
) -> None:
    name, status, columns = structs.definition.name, structs.status, structs.columns
    for code in np.unique(status[status != Status.OK]).tolist():
        at = np.flatnonzero(status == code)
        number = structs.version[at]
        faults.append(InternalFaults(name, Status(code), in_key, rows[at], number, structs, at))
    is_good = (status == Status.OK) & ~structs.is_null
    over = is_good & (columns.surplus > 0)
    _add_fault(faults, name, Status.SIZE_MISMATCH, rows[over], columns.surplus[over], in_key)
    garbled = is_good & columns.invalid_utf8
    _add_fault(faults, name, Status.INVALID_UTF8, rows[garbled], in_key=in_key)


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
