"""Decodes metrics that clients push (KIP-714): OpenTelemetry's MetricsData in protobuf.

This is a small reader of the protobuf wire format
(https://protobuf.dev/programming-guides/encoding/) and of opentelemetry/proto/metrics/v1. Each
metric becomes a row with the attributes of its resource. Unknown fields are skipped, as protobuf
requires. Every length is compared with the bytes of the enclosing message. Limits: values nest at
most `DEPTH_MAX` deep; `LIMITS` bounds the decompressed size, `PARTS_MAX` the parts of a message,
`COPIED_MAX` the copies of resource attributes and scope names. A message beyond them fails with
"limit reached" or `TOO_DEEP`.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from kdissect.codec.compression import Codec, DecompressionLimits, decompress
from kdissect.errors import DecodeError
from kdissect.status import REASONS, Status

# Brokers accept `telemetry.max.bytes` (1 MB by default) of compressed metrics; text compresses
# well.
LIMITS = DecompressionLimits(decompressed_size_max=16 << 20, ratio_max=200, ratio_free_size=1 << 20)
DEPTH_MAX = 16  # default
TOO_DEEP = "nested too deep"
PARTS_MAX = 1 << 19  # strings and nested messages; a push of a Java client has some 5000
COPIED_MAX = 4  # bytes of copied attributes and names per byte of the message
COPIED_FREE = 1 << 16

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_TEMPORALITY = {0: "unspecified", 1: "delta", 2: "cumulative"}
_KINDS = {5: "gauge", 7: "sum", 9: "histogram", 10: "exponential_histogram", 11: "summary"}
_ATTRIBUTES_FIELD = {5: 7, 7: 7, 9: 9, 10: 1, 11: 7}
_INT64_MAX = 2**63 - 1

Values = dict[str, Any]


class _Reading:
    """State shared by all parts of a push: parts that remain, allowed depth, and known
    attributes."""

    __slots__ = ("depth_max", "pairs", "parts")

    def __init__(self, depth_max: int) -> None:
        self.depth_max = depth_max
        self.parts = PARTS_MAX
        # cached, because metrics repeat the same few attributes
        self.pairs: dict[bytes, Values] = {}


class _ProtobufMessage:
    """A protobuf message within a buffer: yields (field number, wire type, value).

    Varints and fixed values are unsigned integers; a value with a length is a _ProtobufMessage.
    """

    __slots__ = ("buf", "end", "reading", "start")

    def __init__(self, buf: bytes, start: int, end: int, reading: _Reading) -> None:
        self.buf, self.start, self.end, self.reading = buf, start, end, reading

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        buf, pos, end, reading = self.buf, self.start, self.end, self.reading
        while pos < end:
            at = pos
            tag = buf[pos]
            if tag < 0x80:
                pos += 1
            else:
                tag, pos = self._varint(pos)
            number, kind = tag >> 3, tag & 7
            value: Any
            if kind == _LENGTH:
                size, pos = self._varint(pos)
                if size > end - pos:
                    raise _fault(Status.TRUNCATED, at)
                if not reading.parts:
                    raise _fault(Status.LIMIT, at)
                reading.parts -= 1
                value = _ProtobufMessage(buf, pos, pos + size, reading)
                pos += size
            elif kind == _VARINT:
                value, pos = self._varint(pos)
            elif kind in (_FIXED64, _FIXED32):
                size = 8 if kind == _FIXED64 else 4
                if size > end - pos:
                    raise _fault(Status.TRUNCATED, at)
                value = int.from_bytes(buf[pos : pos + size], "little")
                pos += size
            else:
                raise DecodeError("no protobuf wire type", pos=at)
            if not number:
                raise DecodeError("protobuf field 0", pos=at)
            yield number, kind, value

    def _varint(self, pos: int) -> tuple[int, int]:
        if pos < self.end and self.buf[pos] < 0x80:
            return self.buf[pos], pos + 1
        value = 0
        for count in range(10):
            if pos + count >= self.end:
                raise _fault(Status.TRUNCATED, pos)
            byte = self.buf[pos + count]
            value |= (byte & 0x7F) << (7 * count)
            if byte < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, pos + count + 1
        raise _fault(Status.VARINT_OVERFLOW, pos)

    def data(self) -> bytes:
        return self.buf[self.start : self.end]

    def text(self) -> str:
        return self.data().decode("utf-8", "replace")

    def packed(self, size: int) -> list[int]:
        """Fixed-size values in sequence; an incomplete last one is ignored."""
        data = self.data()
        return [
            int.from_bytes(data[at : at + size], "little")
            for at in range(0, len(data) // size * size, size)
        ]

    def varints(self) -> list[int]:
        values, pos = [], self.start
        while pos < self.end:
            value, pos = self._varint(pos)
            values.append(value)
        return values


def _fault(status: Status, pos: int) -> DecodeError:
    return DecodeError(REASONS[status], pos=pos)


def read_metrics(data: bytes, codec: int, depth_max: int = DEPTH_MAX) -> list[Values]:
    """The metrics of a PushTelemetry request, in wire order.

    codec: its compression_type. depth_max: how deep values may nest. Keys per metric:
    resource_attributes, scope_name, scope_version, name, description, unit, type,
    aggregation_temporality, is_monotonic, data_points; `tables.embedded.METRICS` has the values.
    Times of points are in microseconds, beside nanoseconds. Raises DecodeError; its `pos` counts in
    the decompressed bytes.
    """
    message = _decompressed(data, codec)
    return _flattened(_ProtobufMessage(message, 0, len(message), _Reading(depth_max)))


def _decompressed(data: bytes, codec: int) -> bytes:
    if codec == Codec.NONE or not data:
        return data
    source = np.frombuffer(data, np.uint8)
    allowed = LIMITS.batch_allowance(len(data))
    room = min(max(8 * len(data), 1 << 16), allowed)
    while True:
        out = np.empty(room, np.uint8)
        status, size = decompress(codec, source, out)
        if status == Status.OK:
            return out[:size].tobytes()
        if status != Status.ROOM_NEEDED:
            raise DecodeError(REASONS[status])
        if room == allowed:
            raise DecodeError(REASONS[Status.LIMIT])
        room = min(4 * room, allowed)


def _flattened(message: _ProtobufMessage) -> list[Values]:
    metrics: list[Values] = []
    copied = COPIED_FREE + COPIED_MAX * (message.end - message.start)
    for number, kind, value in message:
        if number != 1 or kind != _LENGTH:
            continue
        attributes, size, scopes = _resource_metrics(value)
        for scope in scopes:
            for one in _scope_metrics(scope):
                copied -= size + len(one["scope_name"]) + len(one["scope_version"])
                if copied < 0:
                    raise DecodeError(REASONS[Status.LIMIT], path="resource_attributes")
                metrics.append({"resource_attributes": attributes, **one})
    return metrics


def _resource_metrics(
    message: _ProtobufMessage,
) -> tuple[list[Values], int, list[_ProtobufMessage]]:
    """(attributes of the resource, their size in bytes, its scopes)."""
    attributes: list[Values] = []
    size = 0
    scopes = []
    for number, kind, value in message:
        if kind != _LENGTH:
            continue
        if number == 1:
            size += value.end - value.start
            attributes += [_attribute(one) for n, k, one in value if (n, k) == (1, _LENGTH)]
        elif number == 2:
            scopes.append(value)
    return attributes, size, scopes


def _scope_metrics(message: _ProtobufMessage) -> Iterator[Values]:
    name = version = ""
    metrics = []
    for number, kind, value in message:
        if kind != _LENGTH:
            continue
        if number == 1:
            for inner, inner_kind, text in value:
                if inner == 1 and inner_kind == _LENGTH:
                    name = text.text()
                elif inner == 2 and inner_kind == _LENGTH:
                    version = text.text()
        elif number == 2:
            metrics.append(value)
    for metric in metrics:
        yield {"scope_name": name, "scope_version": version, **_metric(metric)}


def _metric(message: _ProtobufMessage) -> Values:
    metric: Values = {"name": "", "description": "", "unit": "", "data_points": []}
    for number, kind, value in message:
        if kind != _LENGTH:
            continue
        if number in (1, 2, 3):
            metric[("name", "description", "unit")[number - 1]] = value.text()
        elif number in _KINDS:
            metric["type"] = _KINDS[number]
            for inner, inner_kind, one in value:
                if inner == 1 and inner_kind == _LENGTH:
                    metric["data_points"].append(_point(one, number))
                elif inner == 2 and inner_kind == _VARINT:
                    metric["aggregation_temporality"] = _TEMPORALITY.get(one, str(one))
                elif inner == 3 and inner_kind == _VARINT and number == 7:
                    metric["is_monotonic"] = one != 0
            if number in (7, 9, 10):
                metric.setdefault("aggregation_temporality", "unspecified")
            if number == 7:
                metric.setdefault("is_monotonic", False)
    return metric


def _point(message: _ProtobufMessage, metric_kind: int) -> Values:
    """A data point of any kind of metric; most field numbers are equal between kinds."""
    attributes: list[Values] = []
    point: Values = {"attributes": attributes}
    attributes_field = _ATTRIBUTES_FIELD[metric_kind]
    is_number = metric_kind in (5, 7)
    for number, kind, value in message:
        if number == attributes_field and kind == _LENGTH:
            attributes.append(_attribute(value))
        elif kind == _FIXED64 and number in (2, 3):
            name = "start_time" if number == 2 else "time"
            if 0 < value <= _INT64_MAX:  # 0 means unknown
                point[name], point[name + "_ns"] = value // 1000, value
        elif is_number:
            if number == 4 and kind == _FIXED64:
                point["value"] = _double(value)
            elif number == 6 and kind == _FIXED64:
                point["int_value"] = _signed(value)
                point["value"] = float(point["int_value"])
        elif number == 4 and kind == _FIXED64:
            point["count"] = _signed(value)
        elif number == 5 and kind == _FIXED64:
            point["sum"] = _double(value)
        elif metric_kind == 9:
            _histogram(point, number, kind, value)
        elif metric_kind == 10:
            _exponential_histogram(point, number, kind, value)
        elif number == 6 and kind == _LENGTH:
            quantile = {n: _double(v) for n, k, v in value if k == _FIXED64}
            pair = {"quantile": quantile.get(1, 0.0), "value": quantile.get(2, 0.0)}
            point.setdefault("quantiles", []).append(pair)
    return point


def _histogram(point: Values, number: int, kind: int, value: Any) -> None:
    if number in (6, 7) and kind in (_LENGTH, _FIXED64):
        given = value.packed(8) if kind == _LENGTH else [value]
        if number == 6:
            point.setdefault("bucket_counts", []).extend(map(_signed, given))
        else:
            point.setdefault("explicit_bounds", []).extend(map(_double, given))
    elif number in (11, 12) and kind == _FIXED64:
        point["min" if number == 11 else "max"] = _double(value)


def _exponential_histogram(point: Values, number: int, kind: int, value: Any) -> None:
    if number == 6 and kind == _VARINT:
        point["scale"] = _zigzag(value)
    elif number == 7 and kind == _FIXED64:
        point["zero_count"] = _signed(value)
    elif number in (8, 9) and kind == _LENGTH:
        buckets: Values = {"offset": 0, "bucket_counts": []}
        for inner, inner_kind, given in value:
            if inner == 1 and inner_kind == _VARINT:
                buckets["offset"] = _zigzag(given)
            elif inner == 2 and inner_kind in (_VARINT, _LENGTH):
                counts = given.varints() if inner_kind == _LENGTH else [given]
                buckets["bucket_counts"].extend(map(_signed, counts))
        point["positive" if number == 8 else "negative"] = buckets
    elif number in (12, 13) and kind == _FIXED64:
        point["min" if number == 12 else "max"] = _double(value)


def _double(bits: int) -> float:
    value: float = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    return value


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _zigzag(value: int) -> int:
    """Decode a sint32."""
    value &= 0xFFFF_FFFF
    return (value >> 1) ^ -(value & 1)


def _attribute(message: _ProtobufMessage) -> Values:
    """A key with its value as text: strings unchanged, bytes in base64, others as JSON."""
    data = message.data()
    attribute = message.reading.pairs.get(data)
    if attribute is None:
        key, any_value = _key_value(message, 0)
        is_text = any_value is None or isinstance(any_value, str)
        attribute = {"key": key, "value": any_value if is_text else json.dumps(any_value)}
        message.reading.pairs[data] = attribute
    return attribute


def _key_value(message: _ProtobufMessage, depth: int) -> tuple[str, Any]:
    key, any_value = "", None
    for number, kind, value in message:
        if number == 1 and kind == _LENGTH:
            key = value.text()
        elif number == 2 and kind == _LENGTH:
            any_value = _any_value(value, depth)
    return key, any_value


def _any_value(message: _ProtobufMessage, depth: int) -> Any:
    """A string, number, bool, list or dict; bytes in base64; None if there is no value."""
    if depth > message.reading.depth_max:
        raise DecodeError(TOO_DEEP, pos=message.start, path="attributes")
    decoded: Any = None
    for number, kind, value in message:
        if number == 1 and kind == _LENGTH:
            decoded = value.text()
        elif number == 2 and kind == _VARINT:
            decoded = value != 0
        elif number == 3 and kind == _VARINT:
            decoded = _signed(value)
        elif number == 4 and kind == _FIXED64:
            decoded = _double(value)
        elif number == 5 and kind == _LENGTH:
            decoded = [
                _any_value(one, depth + 1)
                for inner, inner_kind, one in value
                if (inner, inner_kind) == (1, _LENGTH)
            ]
        elif number == 6 and kind == _LENGTH:
            decoded = dict(
                _key_value(one, depth + 1)
                for inner, inner_kind, one in value
                if (inner, inner_kind) == (1, _LENGTH)
            )
        elif number == 7 and kind == _LENGTH:
            decoded = base64.b64encode(value.data()).decode("ascii")
    return decoded
