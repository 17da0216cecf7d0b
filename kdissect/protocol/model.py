"""Definitions in memory: APIs, fields, version ranges. No file format, no bytes.

A *definition* is Kafka's layout of one message over all its versions. Requests, responses, the two
headers, and structs inside records and opaque bytes (consumer protocol, coordinator records,
metadata records) are `Definition`s. Field names are Kafka's own in snake_case
(``throttle_time_ms``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple
from uuid import UUID

# The sides of an exchange, as numbers in arrays and as words.
REQUEST, RESPONSE = 0, 1
Side = Literal["request", "response"]
SIDES: tuple[Side, Side] = ("request", "response")

_SNAKE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

NO_LIMIT = 32767  # api_version is an int16, so an open range ends here


class VersionRange(NamedTuple):
    """Inclusive range of versions; empty if last < first."""

    first: int
    last: int

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.first <= version <= self.last

    @property
    def is_empty(self) -> bool:
        return self.last < self.first


NEVER = VersionRange(0, -1)
ALWAYS = VersionRange(0, NO_LIMIT)


class Type(Enum):
    """Wire types. Whether string, bytes, records and arrays are compact depends on the version
    (flexible or not) and on `Field.never_flexible`."""

    BOOL = "bool"
    INT8 = "int8"
    INT16 = "int16"
    UINT16 = "uint16"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT64 = "float64"
    UUID = "uuid"
    STRING = "string"
    BYTES = "bytes"
    RECORDS = "records"
    STRUCT = "struct"


Default = bool | int | float | str | bytes | UUID | None


@dataclass(frozen=True, slots=True)
class Field:
    """One field. An array has `is_array` and the element's type in `type`.

    versions: in which the field is on the wire, also as a tagged field.
    nullable: versions that allow null.
    tagged, tag: versions in which it is a tagged field, and its tag (-1: never).
    default: value if the field is missing on the wire (tagged) or in the caller's dict. For arrays
    None means null, () means empty; for structs None means null (else built from fields).
    never_flexible: has the non-compact form in flexible versions too (RequestHeader.client_id).
    entity: Kafka's entityType ("topicName", "groupId", "transactionalId", "brokerId", ...), or "".
    fields: of a struct or an array of structs, in wire order.
    struct_name: Kafka's name of the struct type, or "".
    map_key: part of the element's key in Kafka's keyed collections (not visible on the wire).
    """

    name: str
    type: Type
    versions: VersionRange
    is_array: bool = False
    nullable: VersionRange = NEVER
    tagged: VersionRange = NEVER
    tag: int = -1
    default: Default | tuple[()] = None
    never_flexible: bool = False
    entity: str = ""
    map_key: bool = False
    fields: tuple[Field, ...] = ()
    struct_name: str = ""


def walk(fields: tuple[Field, ...], version: int | None = None) -> Iterator[Field]:
    """Fields at any depth, each before those inside it; only those of a version if it is given."""
    for one in fields:
        if version is None or version in one.versions:
            yield one
            yield from walk(one.fields, version)


@dataclass(frozen=True, slots=True)
class Definition:
    """The layout of one message over its versions.

    name: Kafka's name of the definition ("FetchRequest", "OffsetCommitValue").
    versions: valid versions. flexible: those with compact forms and tagged fields (KIP-482).
    unstable: versions that are drafts in the newest release that has them.
    kind: "message" (a side of an API), "header", "data" (opaque bytes inside messages), or the log
    of the record: "group" (__consumer_offsets), "share", "transaction", "metadata", "control".
    record_key: the record's type in its log (first 2 bytes of a key, metadata record id, control
    type), or -1.
    notes: remarks for readers of the definition, one sentence each.
    """

    name: str
    versions: VersionRange
    flexible: VersionRange
    fields: tuple[Field, ...]
    unstable: VersionRange = NEVER
    kind: str = "message"
    record_key: int = -1
    notes: tuple[str, ...] = ()

    def __hash__(self) -> int:  # fast, because definitions are keys of caches
        return hash(self.name)


@dataclass(frozen=True, slots=True)
class Api:
    """An API: its key, name without Request/Response, and both sides."""

    key: int
    name: str
    request: Definition
    response: Definition
    notes: tuple[str, ...] = field(default=())

    def side(self, side: str) -> Definition:
        if side == "request":
            return self.request
        if side == "response":
            return self.response
        raise ValueError(f"side must be 'request' or 'response', not {side!r}")

    def request_header_version(self, api_version: int) -> int:
        """2 for flexible versions, else 1; ControlledShutdown v0 has header v0 (no client id)."""
        if self.key == 7 and api_version == 0:
            return 0
        return 2 if api_version in self.request.flexible else 1

    def response_header_version(self, api_version: int) -> int:
        """1 for flexible versions, else 0; ApiVersions responses always have header v0
        (KIP-511)."""
        if self.key == 18:
            return 0
        return 1 if api_version in self.response.flexible else 0


def snake_case(name: str) -> str:
    """Kafka's field name in snake_case: ``ThrottleTimeMs`` becomes ``throttle_time_ms``."""
    return _SNAKE.sub("_", name).lower()
