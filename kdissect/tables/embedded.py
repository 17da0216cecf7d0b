"""Columns `<field>_decoded` of ``apis/<ApiName>``: decoded content of opaque bytes in messages.

`add_decoded` inserts a decoded column after each such field, at any depth of lists. The types
depend on the API alone, so all files of a table agree, even if a side is absent.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Indices
from kdissect.codec.group_protocols import (
    DECODED,
    Embedded,
    FormatFault,
    assignments,
    principals,
    subscriptions,
)
from kdissect.codec.message import Message, decode_message
from kdissect.codec.nested_columns import with_fields, with_values
from kdissect.codec.redaction import redact_body
from kdissect.codec.sasl_tokens import Token, read_token
from kdissect.codec.telemetry import DEPTH_MAX, read_metrics
from kdissect.errors import DecodeError
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES, Type, walk
from kdissect.status import REASONS, Status
from kdissect.tables.arrow_arrays import TIME_TYPE

_Fields = list[tuple[str, pa.DataType]]


def _typed(kind: pa.DataType, *names: str) -> _Fields:
    return [(name, kind) for name in names]


_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()
_NAMED = pa.list_(pa.struct(_typed(_TEXT, "name", "value")))
_ATTRIBUTES = pa.list_(pa.struct(_typed(_TEXT, "key", "value")))
SASL_TOKEN_TYPE = pa.struct(
    [
        *_typed(_TEXT, "mechanism", "step", "authzid", "authcid", "password", "nonce", "salt"),
        ("iterations", pa.int32()),
        *_typed(_TEXT, "channel_binding", "proof", "server_signature", "error", "token"),
        *_typed(_NAMED, "claims", "extensions"),
    ]
)
INNER_MESSAGE = pa.struct(
    [
        ("api_key", pa.int16()),
        ("api_name", _TEXT),
        ("api_version", pa.int16()),
        ("correlation_id", pa.int32()),
        *_typed(_TEXT, "client_id", "body"),
    ]
)
_BUCKETS = pa.struct([("offset", pa.int32()), ("bucket_counts", pa.list_(_INT))])
DATA_POINT = pa.struct(
    [
        ("attributes", _ATTRIBUTES),
        *_typed(TIME_TYPE, "start_time", "time"),
        *_typed(_INT, "start_time_ns", "time_ns"),
        ("value", _FLOAT),
        *_typed(_INT, "int_value", "count"),
        *_typed(_FLOAT, "sum", "min", "max"),
        ("bucket_counts", pa.list_(_INT)),
        ("explicit_bounds", pa.list_(_FLOAT)),
        ("scale", pa.int32()),
        ("zero_count", _INT),
        *_typed(_BUCKETS, "positive", "negative"),
        ("quantiles", pa.list_(pa.struct(_typed(_FLOAT, "quantile", "value")))),
    ]
)
METRICS = pa.list_(
    pa.struct(
        [
            ("resource_attributes", _ATTRIBUTES),
            *_typed(_TEXT, "scope_name", "scope_version", "name", "description", "unit", "type"),
            ("aggregation_temporality", _TEXT),
            ("is_monotonic", pa.bool_()),
            ("data_points", pa.list_(DATA_POINT)),
        ]
    )
)
_STATUS_OF = {reason: status for status, reason in REASONS.items()}


@dataclass(frozen=True, slots=True)
class EmbeddedFault:
    """Embedded bytes in the message of row `row` that have a known format but are faulty."""

    row: int
    side: int
    status: Status
    detail: str


class _Sides:
    """Request and response bodies of the same exchanges, and the faults so far."""

    def __init__(
        self, request: pa.StructArray, response: pa.StructArray, reveal: bool, nesting: int
    ) -> None:
        self.bodies = [request, response]
        self.nesting = nesting
        self.reveal_secrets = reveal
        self.faults: list[EmbeddedFault] = []

    def text(self, side: int, name: str) -> pa.StringArray:
        """A string field of the body; null if there is no body."""
        return pc.struct_field(self.bodies[side], name)

    def beside(
        self, entries: pa.StructArray, name: str, embedded: Embedded, side: int, rows: Indices
    ) -> pa.StructArray:
        """`entries` with the decoded column inserted after field `name`; rows: messages of the
        entries."""
        for fault in embedded.faults:
            row = int(rows[fault.index])
            if self.bodies[side][row].is_valid:
                detail = f"{name}: {fault.detail}"
                self.faults.append(EmbeddedFault(row, side, fault.status, detail))
        return with_fields(entries, {name + DECODED: embedded.column}, after=name)

    def add(self, side: int, name: str, embedded: Embedded) -> None:
        """Insert the decoded column after field `name` of the body."""
        body = self.bodies[side]
        self.bodies[side] = self.beside(body, name, embedded, side, _top(body))

    def decode(
        self, side: int, name: str, kind: pa.DataType, read: Callable[[int, bytes], Any]
    ) -> None:
        """Decode the bytes of field `name` one by one, with `read`, from their row on."""
        values: list[Any] = []
        faults = []
        for row, data in enumerate(self.bodies[side].field(name).to_pylist()):
            values.append(None)
            try:
                values[row] = None if data is None else read(row, data)
            except DecodeError as error:
                status = _STATUS_OF.get(error.reason, Status.TRUNCATED)
                faults.append(FormatFault(row, status, str(error)))
        self.add(side, name, Embedded(pa.array(values, kind), faults))


def _top(array: pa.Array) -> Indices:
    return np.arange(len(array))


def _inside(
    array: pa.StructArray,
    path: tuple[str, ...],
    rows: Indices,
    parents: Indices,
    change: Callable[[pa.StructArray, Indices, Indices], pa.StructArray],
) -> pa.StructArray:
    """`array` with the structs at a path of lists changed.

    rows, parents: of each struct, its message and its row in the list around it; `change` gets them
    for the structs at the path.
    """
    if not path:
        return change(array, rows, parents)
    lists = array.field(path[0])
    parents = pc.list_parent_indices(lists).to_numpy()
    elements = _inside(lists.flatten(), path[1:], rows[parents], parents, change)
    return with_fields(array, {path[0]: with_values(lists, elements)})


def _known(first: pa.Array, other: pa.Array) -> pa.Array:
    """The values of `first`, or of `other` where `first` is empty."""
    return pc.if_else(pc.equal(first, "").fill_null(True), other, first)


# Where messages have what group members say: side, lists, and fields with their reader.
_Reader = Callable[[pa.Array, pa.Array, pa.Array], Embedded]
_MEMBER_FIELDS: dict[int, list[tuple[int, tuple[str, ...], dict[str, _Reader]]]] = {
    ApiKey.JOIN_GROUP: [
        (REQUEST, ("protocols",), {"metadata": subscriptions}),
        (RESPONSE, ("members",), {"metadata": subscriptions}),
    ],
    ApiKey.SYNC_GROUP: [
        (REQUEST, ("assignments",), {"assignment": assignments}),
        (RESPONSE, (), {"assignment": assignments}),
    ],
    ApiKey.DESCRIBE_GROUPS: [
        (
            RESPONSE,
            ("groups", "members"),
            {"member_metadata": subscriptions, "member_assignment": assignments},
        )
    ],
}


def _members(sides: _Sides, api_key: int) -> None:
    if api_key == ApiKey.DESCRIBE_GROUPS:
        groups = sides.bodies[RESPONSE].field("groups").flatten()
        kind, assignor = groups.field("protocol_type"), groups.field("protocol_data")
    else:
        kind = _known(sides.text(REQUEST, "protocol_type"), sides.text(RESPONSE, "protocol_type"))
        assignor = sides.text(RESPONSE, "protocol_name")
        if api_key == ApiKey.SYNC_GROUP:
            assignor = _known(sides.text(REQUEST, "protocol_name"), assignor)
    for side, path, readers in _MEMBER_FIELDS[api_key]:

        def change(
            entries: pa.StructArray,
            rows: Indices,
            parents: Indices,
            side: int = side,
            readers: dict[str, _Reader] = readers,
        ) -> pa.StructArray:
            # a member that joins says what it needs for each assignor that it has
            is_joining = "name" in entries.type.names
            name = entries.field("name") if is_joining else assignor.take(parents)
            for field, read in readers.items():
                found = read(entries.field(field), kind.take(parents), name)
                entries = sides.beside(entries, field, found, side, rows)
            return entries

        body = sides.bodies[side]
        sides.bodies[side] = _inside(body, path, _top(body), _top(body), change)


def group_members(value: pa.StructArray) -> pa.Array:
    """Members of GroupMetadata values: list<struct<member_id, subscription, assignment>>.

    Null where the value is null; a member's columns are null if its bytes do not match the group's
    protocol type.
    """
    members = pc.struct_field(value, "members")
    entries = members.flatten()
    parents = pc.list_parent_indices(members)
    of = value.field("protocol_type").take(parents), value.field("protocol").take(parents)
    columns = [
        entries.field("member_id"),
        subscriptions(entries.field("subscription"), *of).column,
        assignments(entries.field("assignment"), *of).column,
    ]
    names = ["member_id", "subscription", "assignment"]
    return with_values(members, pa.StructArray.from_arrays(columns, names))


def _sasl_authenticate(sides: _Sides, _: int) -> None:
    for side in (REQUEST, RESPONSE):
        sides.decode(side, "auth_bytes", SASL_TOKEN_TYPE, partial(_token, side))


def _token(side: int, _: int, data: bytes) -> Token | None:
    return read_token(data, side)


def _envelope(sides: _Sides, _: int) -> None:
    requests: dict[int, Message] = {}

    def request_row(row: int, data: bytes) -> dict[str, Any] | None:
        if not data:
            return None
        requests[row] = decode_message(data, side="request")
        return _shown(requests[row], REQUEST, sides.reveal_secrets)

    def response_row(row: int, data: bytes) -> dict[str, Any] | None:
        if not data or row not in requests:
            return None
        key, api_version = requests[row].api_key, requests[row].api_version
        message = decode_message(data, side="response", api_key=key, api_version=api_version)
        return _shown(message, RESPONSE, sides.reveal_secrets)

    sides.decode(REQUEST, "request_data", INNER_MESSAGE, request_row)
    found = principals(sides.bodies[REQUEST].field("request_principal"))
    sides.add(REQUEST, "request_principal", found)
    sides.decode(RESPONSE, "response_data", INNER_MESSAGE, response_row)


def _shown(message: Message, side: int, reveal: bool) -> dict[str, Any]:
    """An inner message as a row; its body is JSON without record data and secrets."""
    fields = walk(catalog.api(message.api_key).side(SIDES[side]).fields)
    records = frozenset(one.name for one in fields if one.type is Type.RECORDS)
    body = message.body if reveal else redact_body(message.body, message.api_key, side)
    return {
        "api_key": message.api_key,
        "api_name": message.api_name,
        "api_version": message.api_version,
        "correlation_id": message.header["correlation_id"],
        "client_id": _jsonable(message.header.get("client_id")),
        "body": json.dumps(
            _jsonable(body, records), ensure_ascii=False, separators=(",", ":"), allow_nan=False
        ),
    }


def _jsonable(value: Any, records: frozenset[str] = frozenset()) -> Any:
    """The value in types that JSON has.

    Bytes become base64, uuids Kafka's form (22 characters of URL-safe base64), tags strings,
    non-finite floats names. Bytes that are no UTF-8 become U+FFFD. records: fields that become
    null.
    """
    if isinstance(value, dict):
        return {
            str(name): None if name in records else _jsonable(inner, records)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_jsonable(inner, records) for inner in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, UUID):
        return base64.urlsafe_b64encode(value.bytes).decode("ascii").rstrip("=")
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _push_telemetry(sides: _Sides, _: int) -> None:
    codecs = sides.bodies[REQUEST].field("compression_type").to_pylist()

    def metrics(row: int, data: bytes) -> list[dict[str, Any]]:
        return read_metrics(data, codecs[row], sides.nesting)

    sides.decode(REQUEST, "metrics", METRICS, metrics)


_APIS: dict[int, Callable[[_Sides, int], None]] = {
    **dict.fromkeys(_MEMBER_FIELDS, _members),
    ApiKey.SASL_AUTHENTICATE: _sasl_authenticate,
    ApiKey.ENVELOPE: _envelope,
    ApiKey.PUSH_TELEMETRY: _push_telemetry,
}


def add_decoded(
    api_key: int,
    request: pa.StructArray,
    response: pa.StructArray,
    reveal_secrets: bool,
    nesting: int = DEPTH_MAX,
) -> tuple[pa.StructArray, pa.StructArray, list[EmbeddedFault]]:
    """(request, response, faults): both sides with their `_decoded` columns, and embedded faults.

    request, response: of `message_columns.body_type` of that API, not redacted. Without
    `reveal_secrets` the JSON of inner messages contains no secrets; `redact_column` handles the
    columns. nesting: depth limit for values of pushed metrics.
    """
    decode = _APIS.get(api_key)
    if decode is None:
        return request, response, []
    sides = _Sides(request, response, reveal_secrets, nesting)
    decode(sides, api_key)
    return sides.bodies[REQUEST], sides.bodies[RESPONSE], sides.faults
