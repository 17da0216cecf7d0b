"""Tests whether a frame is a response by its bytes alone, and how strong the evidence is.

A response contains neither its API nor its version. `fits` tests a definition: it must decode the
frame to its last byte, with error codes that Kafka has, a plausible throttle time and printable
text. That alone is weak: ten zeros fit dozens of definitions. `weight` adds up evidence that occurs
only if the definition is the right one, and is 0 if a value is impossible:

- a length followed by that many bytes of printable text;
- a count followed by that many elements, whose own lengths fit;
- a host followed by a port;
- a broker id that is among those listed with their hosts;
- a random uuid, with its version and variant;
- record batches with a correct checksum.

Lengths and counts of one byte (compact forms) weigh less than those of two or four. Zeros, -1 and
small numbers weigh nothing, because other protocols are full of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any
from uuid import RFC_4122

import crc32c
import numpy as np
from numpy.typing import NDArray

from kdissect.codec import message_codec
from kdissect.codec.message_codec import UNKNOWN_TAGS
from kdissect.codec.message_columns import decode_columns
from kdissect.errors import DecodeError
from kdissect.protocol import catalog
from kdissect.protocol.column_plan import Role, role_of
from kdissect.protocol.error_codes import ErrorCode
from kdissect.protocol.layout import Layout, Slot, layout
from kdissect.protocol.model import Type

THROTTLE_MAX_MS = 3_600_000
PARTITION_MAX = 1 << 20  # larger than any partition number; Kafka's clusters end at some 200 000
COUNT_WEIGHT, COMPACT_COUNT_WEIGHT = 6, 3
NUMBERS_WEIGHT = 3  # an array of primitive values
TEXT_WEIGHT, COMPACT_TEXT_WEIGHT = 4, 3
_LONG_TEXT, LONG_TEXT_WEIGHT = 4, 2  # text of at least so many characters weighs more
TEXTS_WEIGHT_MAX = 10  # for all texts together, because many protocols are lists of texts
PORT_WEIGHT = 6
BROKER_WEIGHT = 3
UUID_WEIGHT = 4
CHECKSUM_WEIGHT = 24
_CONTROL = frozenset("\t\n\r")  # characters allowed in error messages beside printable ones
TOPIC_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
TOPIC_MAX = 249
MECHANISM_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")  # RFC 4422, 3.1
KNOWN_BROKERS = {"node_id", "broker_id", "leader_id"}  # of structs with a host

Pair = tuple[int, int]  # api key, api version


@cache
def every_response() -> frozenset[Pair]:
    """(api key, version) of every defined response."""
    return frozenset(
        (key, version)
        for key, api in catalog.apis().items()
        for version in range(api.response.versions.first, api.response.versions.last + 1)
        if not api.response.versions.is_empty
    )


@cache
def _known_errors() -> NDArray[np.int64]:
    return np.array(sorted(ErrorCode), np.int64)


def fits(
    key: int,
    version: int,
    buf: NDArray[np.uint8],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """bool[m]: whether buf[start:end] can be a response of that API and version."""
    versions = np.full(len(start), version, np.int16)
    columns = decode_columns(key, "response", buf, start, end, versions)
    is_fitting = np.asarray(
        (columns.status == 0) & (columns.surplus == 0) & (columns.invalid_utf8 == 0)
    )
    marks = columns.marks
    codes = marks[marks["role"] == Role.ERROR_CODE]
    is_fitting[codes["row"][~np.isin(codes["value"], _known_errors())]] = False
    throttles = marks[marks["role"] == Role.THROTTLE_TIME_MS]
    wrong = (throttles["value"] < 0) | (throttles["value"] > THROTTLE_MAX_MS)
    is_fitting[throttles["row"][wrong]] = False
    return is_fitting


class _Impossible(Exception):
    """A value that no broker sends."""


def weight(key: int, version: int, frame: bytes) -> int:
    """Weight of the evidence that a frame (without its size) is this response.

    0 if it does not fit or contains an impossible value. For frames that passed `fits`; plain
    Python.
    """
    api = catalog.api(key)
    try:
        header, pos = message_codec.decode(
            catalog.RESPONSE_HEADER, api.response_header_version(version), frame
        )
        body, end = message_codec.decode(api.response, version, frame, pos)
    except DecodeError:
        return 0
    if end != len(frame) or UNKNOWN_TAGS in header:
        return 0
    try:
        return _Scale(key, body).weigh(layout(api.response, version), body)
    except _Impossible:
        return 0


def _brokers(value: Any) -> Iterator[int]:
    """The ids of brokers that a message lists with their hosts."""
    if isinstance(value, list):
        for element in value:
            yield from _brokers(element)
    elif isinstance(value, dict):
        if value.get("host"):
            yield from (value[name] for name in KNOWN_BROKERS & value.keys())
        for inner in value.values():
            if isinstance(inner, list | dict):
                yield from _brokers(inner)


class _Scale:
    """Weighs the values of a body in wire order."""

    def __init__(self, key: int, body: dict[str, Any]) -> None:
        self.key = key
        self.brokers = frozenset(_brokers(body))
        self.is_behind_zero = True  # the previous value is a number 0, or there is none
        self.texts = 0

    def weigh(self, layout: Layout, body: dict[str, Any]) -> int:
        return self._struct(layout, body) + min(self.texts, TEXTS_WEIGHT_MAX)

    def _struct(self, layout: Layout, values: dict[str, Any]) -> int:
        if UNKNOWN_TAGS in values:
            raise _Impossible
        points = 0
        has_host = bool(values.get("host"))
        for slot in layout.by_name.values():
            value = values[slot.name]
            if value is None:
                self.is_behind_zero = False
            elif slot.field.is_array:
                points += self._array(slot, value)
            elif slot.inner is not None:
                points += self._struct(slot.inner, value)
            else:
                points += self._value(slot, value, has_host)
        return points

    def _array(self, slot: Slot, values: list[Any]) -> int:
        self.is_behind_zero = not values
        if not values:
            return 0
        if slot.inner is None:
            points = 0 if slot.compact else NUMBERS_WEIGHT
            return points + sum(self._value(slot, value, False) for value in values)
        points = COMPACT_COUNT_WEIGHT if slot.compact else COUNT_WEIGHT
        return points + sum(self._struct(slot.inner, value) for value in values)

    def _value(self, slot: Slot, value: Any, has_host: bool) -> int:
        kind = slot.field.type
        was_zero = self.is_behind_zero
        self.is_behind_zero = kind is not Type.BOOL and value == 0
        if kind is Type.STRING:
            self.is_behind_zero = not value
            self.texts += self._text(slot, value, was_zero)
            return 0
        if kind is Type.UUID:
            return UUID_WEIGHT if value.version == 4 and value.variant == RFC_4122 else 0
        if kind is Type.RECORDS:
            return _records(value)
        if kind in (Type.BYTES, Type.BOOL, Type.FLOAT64):
            return 0
        return self._number(slot, value, has_host)

    def _text(self, slot: Slot, value: str, was_zero: bool) -> int:
        if not value:
            return 0
        if slot.name == "error_message":
            if not all(one.isprintable() or one in _CONTROL for one in value):
                raise _Impossible
        elif not value.isprintable():
            raise _Impossible
        if role_of(self.key, slot.field) is Role.TOPIC_NAME:
            if len(value) > TOPIC_MAX or not TOPIC_CHARACTERS.issuperset(value):
                raise _Impossible
        if slot.name == "mechanisms" and not MECHANISM_CHARACTERS.issuperset(value):
            raise _Impossible
        if was_zero and not slot.compact:
            return 0  # text of another protocol with a longer length would look the same
        points = COMPACT_TEXT_WEIGHT if slot.compact else TEXT_WEIGHT
        return points + (LONG_TEXT_WEIGHT if len(value) >= _LONG_TEXT else 0)

    def _number(self, slot: Slot, value: int, has_host: bool) -> int:
        role = role_of(self.key, slot.field)
        if role is Role.ERROR_CODE and value not in _known_errors():
            raise _Impossible
        if role is Role.THROTTLE_TIME_MS and not 0 <= value <= THROTTLE_MAX_MS:
            raise _Impossible
        if role is Role.PARTITION and not 0 <= value < PARTITION_MAX:
            raise _Impossible
        if slot.name == "port" and has_host:
            if not 0 < value < 1 << 16:
                raise _Impossible
            return PORT_WEIGHT
        if slot.field.entity == "brokerId" and not has_host:
            if value < -1:
                raise _Impossible
            return BROKER_WEIGHT if value in self.brokers else 0
        if slot.name.endswith("epoch") and value < -1:
            raise _Impossible
        return 0


def _records(value: bytes) -> int:
    """CHECKSUM_WEIGHT if the first batch has a correct checksum, else 0."""
    end = 12 + int.from_bytes(value[8:12], "big")
    if not 17 <= end <= len(value) or value[16] > 2:
        return 0
    start = 21 if value[16] == 2 else 16
    data = value[start:end]
    computed = crc32c.crc32c(data) if value[16] == 2 else zlib.crc32(data)
    return CHECKSUM_WEIGHT if computed == int.from_bytes(value[start - 4 : start], "big") else 0
