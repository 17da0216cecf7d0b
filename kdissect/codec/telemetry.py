"""Decodes metrics that clients push (KIP-714): OpenTelemetry's MetricsData in protobuf.

`_DEFINITIONS` has the messages of opentelemetry/proto/metrics/v1, and `_Reader` reads the wire
format (https://protobuf.dev/programming-guides/encoding/). Each metric becomes a row with the
attributes of its resource. Unknown fields are skipped, as protobuf requires. Every length is
compared with the bytes of the enclosing message. Limits: values nest at most `DEPTH_MAX` deep;
`LIMITS` bounds the decompressed size, `PARTS_MAX` the parts of a message, `COPIED_MAX` the copies
of resource attributes and scope names. A message beyond them fails with "limit reached" or
`TOO_DEEP`.
"""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

from kdissect.codec.compression import Codec, DecompressionLimits, decompressed
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
_FIXED_SIZE = {_FIXED64: 8, _FIXED32: 4}
_WIRE = {
    **dict.fromkeys(("bool", "int64", "sint32"), _VARINT),
    **dict.fromkeys(("double", "fixed64"), _FIXED64),
}
_TEMPORALITY = {0: "unspecified", 1: "delta", 2: "cumulative"}
_INT64_MAX = 2**63 - 1

# The number and the type of the fields that are read, the type of a repeated one in brackets.
_DEFINITIONS = """
MetricsData: 1 resource_metrics [ResourceMetrics]
ResourceMetrics: 1 resource Resource, 2 scopes [ScopeMetrics]
Resource: 1 attributes [KeyValue]
ScopeMetrics: 1 scope Scope, 2 metrics [Metric]
Scope: 1 name string, 2 version string
Metric: 1 name string, 2 description string, 3 unit string, 5 gauge Gauge, 7 sum Sum
Metric: 9 histogram Histogram, 10 exponential_histogram ExponentialHistogram, 11 summary Summary
Gauge: 1 data_points [NumberPoint]
Sum: 1 data_points [NumberPoint], 2 aggregation_temporality int64, 3 is_monotonic bool
Histogram: 1 data_points [HistogramPoint], 2 aggregation_temporality int64
ExponentialHistogram: 1 data_points [ExponentialPoint], 2 aggregation_temporality int64
Summary: 1 data_points [SummaryPoint]
NumberPoint: 2 start_time fixed64, 3 time fixed64, 4 value double, 6 int_value fixed64
NumberPoint: 7 attributes [KeyValue]
HistogramPoint: 2 start_time fixed64, 3 time fixed64, 4 count fixed64, 5 sum double
HistogramPoint: 6 bucket_counts [fixed64], 7 explicit_bounds [double], 9 attributes [KeyValue]
HistogramPoint: 11 min double, 12 max double
ExponentialPoint: 1 attributes [KeyValue], 2 start_time fixed64, 3 time fixed64, 4 count fixed64
ExponentialPoint: 5 sum double, 6 scale sint32, 7 zero_count fixed64, 8 positive Buckets
ExponentialPoint: 9 negative Buckets, 12 min double, 13 max double
SummaryPoint: 2 start_time fixed64, 3 time fixed64, 4 count fixed64, 5 sum double
SummaryPoint: 6 quantiles [Quantile], 7 attributes [KeyValue]
Buckets: 1 offset sint32, 2 bucket_counts [int64]
Quantile: 1 quantile double, 2 value double
KeyValue: 1 key string, 2 value AnyValue
AnyValue: 1 string string, 2 bool bool, 3 int int64, 4 double double, 5 array ArrayValue
AnyValue: 6 map KeyValueList, 7 bytes bytes
ArrayValue: 1 values [AnyValue]
KeyValueList: 1 values [KeyValue]
"""


def _messages(text: str) -> dict[str, dict[int, tuple[str, str]]]:
    """By message, and by the number of a field: its name and type."""
    messages: dict[str, dict[int, tuple[str, str]]] = {}
    for line in text.strip().split("\n"):
        message, _, fields = line.partition(": ")
        for field in fields.split(", "):
            number, name, kind = field.split()
            messages.setdefault(message, {})[int(number)] = name, kind
    return messages


_MESSAGES = _messages(_DEFINITIONS)
_POINTS = "gauge", "sum", "histogram", "exponential_histogram", "summary"
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Buckets": {"offset": 0, "bucket_counts": []},
    "Quantile": {"quantile": 0.0, "value": 0.0},
}

Values = dict[str, Any]


def _fault(status: Status, pos: int) -> DecodeError:
    return DecodeError(REASONS[status], pos=pos)


class _Reader:
    """Reads the messages of one push, and counts their parts."""

    def __init__(self, data: bytes, depth_max: int) -> None:
        self.data = data
        self.depth_max = depth_max
        self.parts = PARTS_MAX

    def message(self, kind: str, pos: int, end: int, depth: int = 0) -> Values:
        """The fields of the message in data[pos:end]; of a repeated field a list.

        depth: of values within values. A field with another wire type than its own is skipped.
        """
        if kind == "AnyValue":
            if depth > self.depth_max:
                raise DecodeError(TOO_DEEP, pos=pos, path="attributes")
            depth += 1
        fields = _MESSAGES[kind]
        values: Values = {}
        while pos < end:
            at = pos
            tag, pos = self._varint(pos, end)
            number, wire = tag >> 3, tag & 7
            start, plain = pos, 0
            if wire == _VARINT:
                plain, pos = self._varint(pos, end)
            elif wire == _LENGTH:
                size, start = self._varint(pos, end)
                pos = start + size
                if not self.parts:
                    raise _fault(Status.LIMIT, at)
                self.parts -= 1
            elif wire in _FIXED_SIZE:
                pos += _FIXED_SIZE[wire]
            else:
                raise DecodeError("no protobuf wire type", pos=at)
            if pos > end:
                raise _fault(Status.TRUNCATED, at)
            if not number:
                raise DecodeError("protobuf field 0", pos=at)
            if number not in fields:
                continue
            name, of = fields[number]
            inner = of.strip("[]")
            found: list[Any]
            if wire == _LENGTH:
                found = self._sized(inner, start, pos, depth, of != inner)
            elif wire == _WIRE.get(inner):
                word = plain if wire == _VARINT else self._fixed64(start)
                found = [_scalar(inner, word)]
            else:
                continue
            if of != inner:
                values.setdefault(name, []).extend(found)
            elif found:
                values.pop(name, None)  # the last one of several counts, and comes last
                values[name] = found[0]
        return {**_DEFAULTS[kind], **values} if kind in _DEFAULTS else values

    def _sized(self, kind: str, start: int, end: int, depth: int, is_repeated: bool) -> list[Any]:
        """The values of a field with a length: one, or the packed numbers of a repeated field."""
        if kind == "string":
            return [self.data[start:end].decode("utf-8", "replace")]
        if kind == "bytes":
            return [base64.b64encode(self.data[start:end]).decode("ascii")]
        if kind in _MESSAGES:
            return [self.message(kind, start, end, depth)]
        if not is_repeated:
            return []
        words = []
        if _WIRE[kind] == _FIXED64:  # an incomplete last number is ignored
            words = [self._fixed64(pos) for pos in range(start, end - 7, 8)]
        else:
            while start < end:
                word, start = self._varint(start, end)
                words.append(word)
        return [_scalar(kind, word) for word in words]

    def _fixed64(self, pos: int) -> int:
        return int.from_bytes(self.data[pos : pos + 8], "little")

    def _varint(self, pos: int, end: int) -> tuple[int, int]:
        if pos < end and self.data[pos] < 0x80:
            return self.data[pos], pos + 1
        value = 0
        for count in range(10):
            if pos + count >= end:
                raise _fault(Status.TRUNCATED, pos)
            byte = self.data[pos + count]
            value |= (byte & 0x7F) << (7 * count)
            if byte < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, pos + count + 1
        raise _fault(Status.VARINT_OVERFLOW, pos)


def _scalar(kind: str, word: int) -> Any:
    """A number of that type from the 64 bits on the wire."""
    if kind == "double":
        return struct.unpack("<d", word.to_bytes(8, "little"))[0]
    if kind == "bool":
        return word != 0
    if kind == "sint32":  # zigzag
        word &= 0xFFFF_FFFF
        return (word >> 1) ^ -(word & 1)
    return word - (1 << 64) if word >> 63 else word


def read_metrics(data: bytes, codec: int, depth_max: int = DEPTH_MAX) -> list[Values]:
    """The metrics of a PushTelemetry request, in wire order.

    codec: its compression_type. depth_max: how deep values may nest. Keys per metric:
    resource_attributes, scope_name, scope_version, name, description, unit, type,
    aggregation_temporality, is_monotonic, data_points; `tables.embedded.METRICS` has the values.
    Times of points are in microseconds, beside nanoseconds. Raises DecodeError; its `pos` counts in
    the decompressed bytes.
    """
    message = data
    if codec != Codec.NONE and data:
        status, message = decompressed(codec, data, LIMITS.batch_allowance(len(data)))
        if status != Status.OK:
            raise DecodeError(REASONS[status])
    copied = COPIED_FREE + COPIED_MAX * len(message)
    pushed = _Reader(message, depth_max).message("MetricsData", 0, len(message))
    metrics: list[Values] = []
    for resource_metrics in pushed.get("resource_metrics", ()):
        attributes = _attributes(resource_metrics.get("resource", {}))
        size = sum(len(one["key"]) + len(one["value"] or "") for one in attributes)
        for scope_metrics in resource_metrics.get("scopes", ()):
            scope = {"name": "", "version": "", **scope_metrics.get("scope", {})}
            for metric in scope_metrics.get("metrics", ()):
                copied -= size + len(scope["name"]) + len(scope["version"])
                if copied < 0:
                    raise DecodeError(REASONS[Status.LIMIT], path="resource_attributes")
                names = {"scope_name": scope["name"], "scope_version": scope["version"]}
                metrics.append({"resource_attributes": attributes, **names, **_metric(metric)})
    return metrics


def _metric(message: Values) -> Values:
    metric: Values = {"name": "", "description": "", "unit": "", "data_points": []}
    for name, value in message.items():
        if name not in _POINTS:
            metric[name] = value
            continue
        metric["type"] = name
        metric["data_points"] = [_point(one) for one in value.get("data_points", ())]
        if name in ("sum", "histogram", "exponential_histogram"):
            number = value.get("aggregation_temporality", 0)
            metric["aggregation_temporality"] = _TEMPORALITY.get(number, str(number))
        if name == "sum":
            metric["is_monotonic"] = value.get("is_monotonic", False)
    return metric


def _point(point: Values) -> Values:
    """A data point with readable attributes and times."""
    point["attributes"] = _attributes(point)
    for name in ("start_time", "time"):
        time_ns = point.pop(name, 0)
        if 0 < time_ns <= _INT64_MAX:  # 0 means unknown
            point[name], point[name + "_ns"] = time_ns // 1000, time_ns
    if "int_value" in point:
        point["value"] = float(point["int_value"])
    return point


def _attributes(holder: Values) -> list[Values]:
    """Keys with their values as text: strings unchanged, bytes in base64, others as JSON."""
    attributes = []
    for pair in holder.get("attributes", ()):
        value = _plain(pair.get("value", {}))
        is_text = value is None or isinstance(value, str)
        text = value if is_text else json.dumps(value)
        attributes.append({"key": pair.get("key", ""), "value": text})
    return attributes


def _plain(any_value: Values) -> Any:
    """A string, number, bool, list or dict; None if there is no value."""
    if not any_value:
        return None
    name, value = list(any_value.items())[-1]
    if name == "array":
        return [_plain(one) for one in value.get("values", ())]
    if name == "map":
        pairs = value.get("values", ())
        return {pair.get("key", ""): _plain(pair.get("value", {})) for pair in pairs}
    return value
