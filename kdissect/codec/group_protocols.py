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

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Bools, Ints
from kdissect.codec.arrow_columns import arrow_type
from kdissect.codec.embedded_structs import DecodedStructs, Places, decode_structs, definition_plan
from kdissect.codec.nested_columns import with_fields
from kdissect.protocol import catalog
from kdissect.protocol.model import Definition
from kdissect.status import Status

CONSUMER, CONNECT = "consumer", "connect"
STREAMS_ASSIGNOR = "stream"
DECODED = "_decoded"


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


def subscriptions(values: pa.Array, protocol_type: pa.Array, assignor: pa.Array) -> Embedded:
    """Subscriptions of members, decoded.

    Per value: struct<protocol, format_version, the fields of a consumer's subscription,
    user_data_decoded, connect>. values: binary. protocol_type, assignor (name of the protocol):
    strings of the same length, null or empty if unknown.
    """
    return _decode("Subscription", "SubscriptionInfoData", values, protocol_type, assignor)


def assignments(values: pa.Array, protocol_type: pa.Array, assignor: pa.Array) -> Embedded:
    """Assignments of members, decoded; arguments as for `subscriptions`."""
    return _decode("Assignment", "StreamsAssignment", values, protocol_type, assignor)


def principals(values: pa.Array) -> Embedded:
    """Principals of Envelope requests: an int16 version and DefaultPrincipalData (KIP-590)."""
    return _prefixed(catalog.definition("DefaultPrincipalData"), values)


def _prefixed(definition: Definition, values: pa.Array) -> Embedded:
    """Values that are known to have a layout, after its version."""
    places = Places.of(values)
    read = _read(definition, places, 2, places.length > 0, np.ones(len(values), np.bool_))
    version = pa.array(read.version.astype(np.int16), mask=~read.good)
    columns = {"format_version": version, **_fields(read.body)}
    return Embedded(struct_of(columns, ~read.good), read.faults)


@dataclass(frozen=True, slots=True)
class _Read:
    """Values read with one layout.

    good: bool, decoded successfully. body: struct per value, null if not.
    """

    good: Bools
    body: pa.StructArray
    version: Ints
    faults: list[FormatFault]


def _decode(
    kind: str, of_streams: str, values: pa.Array, protocol_type: pa.Array, assignor: pa.Array
) -> Embedded:
    """kind: Subscription or Assignment. of_streams: the definition that Kafka Streams has of it."""
    places = Places.of(values)
    has_bytes = places.length > 0
    unknown = _unknown(protocol_type)
    is_consumer = _equal(protocol_type, CONSUMER)
    is_connect = _equal(protocol_type, CONNECT)
    layout = catalog.definition(f"ConsumerProtocol{kind}")
    wanted = has_bytes & (is_consumer | unknown)
    consumer = _read(layout, places, 2, wanted, is_consumer, reads_newer=True)
    wanted = has_bytes & (is_connect | (unknown & ~consumer.good))
    layout = catalog.definition(f"ConnectProtocol{kind}")
    connect = _read(layout, places, 2, wanted, is_connect)
    good = consumer.good | connect.good
    protocol = pc.if_else(
        pa.array(consumer.good), CONSUMER, pc.if_else(pa.array(connect.good), CONNECT, None)
    )
    streams = _streams(catalog.definition(of_streams), consumer.body.field("user_data"), assignor)
    body = with_fields(consumer.body, {f"user_data{DECODED}": streams.body}, after="user_data")
    faults = consumer.faults + connect.faults + streams.faults
    of_connect = connect.body
    if "allocation" in of_connect.type.names:
        layout = catalog.definition("ConnectProtocolAssignment")
        found = _prefixed(layout, of_connect.field("allocation"))
        columns = {f"allocation{DECODED}": found.column}
        of_connect = with_fields(of_connect, columns, after="allocation")
        faults += found.faults
    columns = {
        "protocol": protocol.cast(pa.string()),
        "format_version": pa.array(consumer.version.astype(np.int16), mask=~good),
        **_fields(body),
        CONNECT: of_connect,
    }
    return Embedded(struct_of(columns, ~good), sorted(faults, key=lambda fault: fault.index))


def _streams(definition: Definition, values: pa.Array, assignor: pa.Array) -> _Read:
    """User data of Kafka Streams; that of other assignors stays bytes."""
    places = Places.of(values)
    is_layout = _equal(assignor, STREAMS_ASSIGNOR)
    wanted = (places.length >= 4) & (is_layout | _unknown(assignor))
    return _read(definition, places, 0, wanted, is_layout)


def _read(
    definition: Definition,
    places: Places,
    prefix: int,
    wanted: Bools,
    is_layout: Bools,
    reads_newer: bool = False,
) -> _Read:
    """Read the wanted values with one layout.

    prefix: 2 if the version is an int16 before the body, 0 if it is the body's first int32.
    is_layout: values that are known to have the layout; extra bytes after their end are ignored,
    and faults are reported. Other values must be consumed completely.
    """
    version, has_version = places.int16() if prefix else places.int32()
    if not wanted.any():
        body = pa.nulls(len(wanted), arrow_type(definition_plan(definition).body))
        return _Read(wanted, body, version, [])
    start = places.without(np.where(has_version, prefix, 0))
    chosen = Places(start.buf, start.start, np.where(wanted, start.length, -1))
    structs = decode_structs(definition, chosen, version, has_version, reads_newer)
    status, columns = structs.status, structs.columns
    is_decoded = wanted & (status == Status.OK)
    good = is_decoded & (is_layout | (columns.surplus == 0))
    body = columns.body.take(pa.array(np.arange(len(good)), mask=~good))
    is_newer = (status == Status.UNKNOWN_VERSION) & (version > definition.versions.last)
    is_wrong = wanted & ~is_decoded & ~is_newer & (status != Status.LIMIT)
    is_wrong |= is_decoded & columns.invalid_utf8
    faults = [
        FormatFault(row, *_fault(structs, row))
        for row in np.flatnonzero(is_layout & is_wrong).tolist()
    ]
    return _Read(good, body, version, faults)


def _fault(structs: DecodedStructs, row: int) -> tuple[Status, str]:
    status = Status(int(structs.status[row]))
    if status is Status.OK:
        return Status.INVALID_UTF8, f"a string of a {structs.definition.name} is no UTF-8"
    return status, structs.detail(row)


def _fields(body: pa.StructArray) -> dict[str, pa.Array]:
    return {name: body.field(name) for name in body.type.names}


def struct_of(columns: dict[str, pa.Array], null: Bools) -> pa.StructArray:
    """A struct column of named columns, null where `null`."""
    return pa.StructArray.from_arrays(list(columns.values()), list(columns), mask=pa.array(null))


def _equal(texts: pa.Array, text: str) -> Bools:
    flags: Bools = pc.equal(texts, text).fill_null(False).to_numpy(zero_copy_only=False)
    return flags


def _unknown(texts: pa.Array) -> Bools:
    """bool[n]: texts that are null or empty."""
    return _equal(texts.fill_null(""), "")
