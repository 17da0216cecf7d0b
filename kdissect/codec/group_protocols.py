"""Decodes group protocols inside JoinGroup, SyncGroup and DescribeGroups into typed columns.

The broker does not interpret the metadata that members of a classic group exchange. Three layouts
are known:

    consumer  int16 version, ConsumerProtocolSubscription or -Assignment. Newer versions only add
              fields at the end, so an unknown one is read as the newest known, as clients do.
    connect   int16 version, ConnectProtocolSubscription or -Assignment (KIP-415). The allocation of
              a subscription is an assignment, with a version of its own.
    streams   in the user data of a consumer subscription or assignment whose assignor is called
              "stream": SubscriptionInfoData or StreamsAssignment, whose first field is the version.

Older messages contain neither protocol type nor assignor (SyncGroup before v5, for example). Then a
layout is chosen if it consumes all bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kdissect.codec.arrow_columns import arrow_type
from kdissect.codec.internal_records import VALUE_MAX, Places, definition_plan
from kdissect.codec.message_columns import MessageColumns, decode_plan
from kdissect.protocol import catalog
from kdissect.protocol.model import Definition
from kdissect.status import REASONS, Status

CONSUMER, CONNECT = "consumer", "connect"
STREAMS_ASSIGNOR = "stream"
DECODED = "_decoded"

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class FormatFault:
    """Value `index` has a known format, but is cut off or has a string that is no UTF-8."""

    index: int
    status: Status
    detail: str


@dataclass(frozen=True, slots=True)
class Embedded:
    """Decoded values, null if there is nothing to decode, and faults of some values."""

    column: pa.Array
    faults: list[FormatFault] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Layouts:
    """The three layouts of one kind of value."""

    consumer: Definition
    connect: Definition
    streams: Definition


def subscriptions(
    values: pa.Array, protocol_type: pa.Array | None, assignor: pa.Array | None
) -> Embedded:
    """Subscriptions of members, decoded.

    Per value: struct<protocol, format_version, the fields of a consumer's subscription,
    user_data_decoded, connect>. values: binary. protocol_type, assignor (name of the protocol):
    strings of the same length, null or empty if unknown; None: all unknown.
    """
    layouts = _Layouts(
        catalog.definition("ConsumerProtocolSubscription"),
        catalog.definition("ConnectProtocolSubscription"),
        catalog.definition("SubscriptionInfoData"),
    )
    return _decode(layouts, values, protocol_type, assignor)


def assignments(
    values: pa.Array, protocol_type: pa.Array | None, assignor: pa.Array | None
) -> Embedded:
    """Assignments of members, decoded; arguments as for `subscriptions`."""
    layouts = _Layouts(
        catalog.definition("ConsumerProtocolAssignment"),
        catalog.definition("ConnectProtocolAssignment"),
        catalog.definition("StreamsAssignment"),
    )
    return _decode(layouts, values, protocol_type, assignor)


def principals(values: pa.Array) -> Embedded:
    """Principals of Envelope requests: an int16 version and DefaultPrincipalData (KIP-590)."""
    given = _Given.of(values)
    is_layout = np.ones(len(values), np.bool_)
    read = _read(catalog.definition("DefaultPrincipalData"), given, given.has_bytes, is_layout)
    return Embedded(_with_version(read), read.faults)


@dataclass(frozen=True, slots=True)
class _Given:
    """Values to decode. places: bytes after the version. number: the version, -1 if cut off.
    has_bytes: bool, values with any bytes."""

    places: Places
    number: Ints
    has_bytes: Flags

    @staticmethod
    def of(values: pa.Array) -> _Given:
        places = Places.of(values)
        number, has_number = places.int16()
        number = np.where(has_number, number, -1)
        return _Given(places.without(np.where(has_number, 2, 0)), number, places.length > 0)


@dataclass(frozen=True, slots=True)
class _Read:
    """Values read with one layout.

    good: bool, decoded successfully. body: struct per value, null if not. number: versions.
    """

    good: Flags
    body: pa.StructArray
    number: Ints
    faults: list[FormatFault]


def _decode(
    layouts: _Layouts, values: pa.Array, protocol_type: pa.Array | None, assignor: pa.Array | None
) -> Embedded:
    given = _Given.of(values)
    unknown = _unknown(protocol_type, len(values))
    is_consumer = _equal(protocol_type, CONSUMER, len(values))
    is_connect = _equal(protocol_type, CONNECT, len(values))
    consumer = _read(
        layouts.consumer,
        given,
        given.has_bytes & (is_consumer | unknown),
        is_consumer,
        clamped=True,
    )
    wanted = given.has_bytes & (is_connect | (unknown & ~consumer.good))
    connect = _read(layouts.connect, given, wanted, is_connect)
    good = consumer.good | connect.good
    protocol = pc.if_else(
        pa.array(consumer.good), CONSUMER, pc.if_else(pa.array(connect.good), CONNECT, None)
    )
    columns: list[tuple[str, pa.Array]] = [
        ("protocol", protocol.cast(pa.string())),
        ("format_version", pa.array(given.number.astype(np.int16), mask=~good)),
    ]
    faults = consumer.faults + connect.faults
    for name, column in _fields(consumer.body):
        columns.append((name, column))
        if name == "user_data":
            streams = _streams(layouts.streams, column, assignor)
            columns.append((name + DECODED, streams.body))
            faults += streams.faults
    inner = []
    for name, column in _fields(connect.body):
        inner.append((name, column))
        if name == "allocation":
            allocation = _Given.of(column)
            definition = catalog.definition("ConnectProtocolAssignment")
            is_layout = np.ones(len(column), np.bool_)
            read = _read(definition, allocation, allocation.has_bytes, is_layout)
            inner.append((name + DECODED, _with_version(read)))
            faults += read.faults
    columns.append((CONNECT, struct_of(inner, ~connect.good)))
    return Embedded(struct_of(columns, ~good), sorted(faults, key=lambda fault: fault.index))


def _streams(definition: Definition, values: pa.Array, assignor: pa.Array | None) -> _Read:
    """User data of Kafka Streams; that of other assignors stays bytes."""
    places = Places.of(values)
    number, has_number = places.int32()
    given = _Given(places, number, has_number)
    is_layout = _equal(assignor, STREAMS_ASSIGNOR, len(values))
    return _read(
        definition, given, has_number & (is_layout | _unknown(assignor, len(values))), is_layout
    )


def _read(
    definition: Definition, given: _Given, wanted: Flags, is_layout: Flags, clamped: bool = False
) -> _Read:
    """Read the wanted values with one layout.

    is_layout: values that are known to have the layout; extra bytes after their end are ignored,
    and faults are reported. Other values must be consumed completely. clamped: read versions above
    the newest known one as that one.
    """
    rows = np.flatnonzero(wanted)
    plan = definition_plan(definition)
    good = np.zeros(len(wanted), np.bool_)
    if not len(rows):
        return _Read(good, pa.nulls(len(wanted), arrow_type(plan.body)), given.number, [])
    places = given.places.take(rows)
    versions = given.number[rows]
    last = definition.versions.last
    known = (versions >= definition.versions.first) & (clamped | (versions <= last))
    fits = known & (places.length <= VALUE_MAX)
    columns = decode_plan(
        plan,
        places.buf,
        np.where(fits, places.start, 0),
        np.where(fits, places.start + places.length, 0),
        np.where(fits, np.minimum(versions, last), -1).astype(np.int16),
    )
    decoded = columns.status == Status.OK
    good[rows] = decoded & (is_layout[rows] | (columns.surplus == 0))
    place = np.zeros(len(wanted), np.int64)
    place[rows] = np.arange(len(rows))
    body = columns.body.take(pa.array(place, mask=~good))
    wrong = (fits | (versions < definition.versions.first)) & ~decoded
    faults = [
        FormatFault(int(rows[at]), *_fault(definition, columns, at))
        for at in np.flatnonzero(
            is_layout[rows] & (wrong | (decoded & columns.invalid_utf8))
        ).tolist()
    ]
    return _Read(good, body, given.number, faults)


def _fault(definition: Definition, columns: MessageColumns, at: int) -> tuple[Status, str]:
    status = Status(int(columns.status[at]))
    if status is Status.OK:
        return Status.INVALID_UTF8, f"a string of a {definition.name} is no UTF-8"
    where = " > ".join(part for part in (definition.name, columns.error_path(at)) if part)
    return status, f"{where}, pos {int(columns.error_pos[at])} of the body: {REASONS[status]}"


def _fields(body: pa.StructArray) -> list[tuple[str, pa.Array]]:
    return [(body.type[i].name, body.field(i)) for i in range(body.type.num_fields)]


def _with_version(read: _Read) -> pa.StructArray:
    version = pa.array(read.number.astype(np.int16), mask=~read.good)
    return struct_of([("format_version", version), *_fields(read.body)], ~read.good)


def struct_of(columns: Sequence[tuple[str, pa.Array]], null: Flags) -> pa.StructArray:
    """A struct column of named columns, null where `null`."""
    fields = [pa.field(name, column.type) for name, column in columns]
    return pa.StructArray.from_arrays(
        [column for _, column in columns], fields=fields, mask=pa.array(null, pa.bool_())
    )


def _equal(texts: pa.Array | None, text: str, count: int) -> Flags:
    if texts is None:
        return np.zeros(count, np.bool_)
    return _flags(pc.equal(texts, text))


def _unknown(texts: pa.Array | None, count: int) -> Flags:
    """bool[n]: texts that are null or empty."""
    if texts is None:
        return np.ones(count, np.bool_)
    return _flags(pc.equal(texts, "")) | _flags(texts.is_null())


def _flags(array: Any) -> Flags:
    flags: Flags = array.fill_null(False).to_numpy(zero_copy_only=False)
    return flags
