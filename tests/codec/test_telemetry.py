"""Pushed metrics: every kind of metric, limits, and bytes that are no metrics."""

import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.codec import telemetry
from kdissect.codec.compression import Codec, compress
from kdissect.codec.telemetry import read_metrics
from kdissect.errors import DecodeError


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))


def part(number: int, *parts: bytes | str) -> bytes:
    """A field with a length: a string or the fields of an inner message."""
    data = b"".join(one.encode() if isinstance(one, str) else one for one in parts)
    return varint(number << 3 | 2) + varint(len(data)) + data


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def fixed(field: int, value: float) -> bytes:
    form = "<d" if isinstance(value, float) else "<q"
    return varint(field << 3 | 1) + struct.pack(form, value)


def pair(field: int, key: str, value: bytes) -> bytes:
    return part(field, part(1, key), part(2, value))


def message(*metrics: bytes, attributes: bytes = b"") -> bytes:
    scope = part(1, part(1, "meter"), part(2, "1.2"))
    inner = b"".join(part(2, metric) for metric in metrics)
    return part(1, part(1, attributes), part(2, scope, inner))


TIMES = fixed(2, 5_000_000_000) + fixed(3, 6_000_001_234)


def one(*metric: bytes, **options: Any) -> dict[str, Any]:
    (found,) = read_metrics(message(b"".join(metric), **options), Codec.NONE)
    return found


def test_a_gauge_with_its_resource_and_times() -> None:
    """Resource, scope, unit, times and value of OTLP's gauge."""
    point = part(1, pair(7, "topic", part(1, "t")), TIMES, fixed(4, 2.5))
    metric = part(1, "size") + part(2, "how much") + part(3, "By") + part(5, point)
    found = one(metric, attributes=pair(1, "client_rack", part(1, "r1")))
    assert found == {
        "resource_attributes": [{"key": "client_rack", "value": "r1"}],
        "scope_name": "meter",
        "scope_version": "1.2",
        "name": "size",
        "description": "how much",
        "unit": "By",
        "type": "gauge",
        "data_points": [
            {
                "attributes": [{"key": "topic", "value": "t"}],
                "start_time": 5_000_000,
                "start_time_ns": 5_000_000_000,
                "time": 6_000_001,
                "time_ns": 6_000_001_234,
                "value": 2.5,
            }
        ],
    }


def test_a_sum_of_integers() -> None:
    """Temporality and direction of a sum; an integer is also a float."""
    point = part(1, fixed(6, -3))
    found = one(part(1, "n"), part(7, point, number(2, 2), number(3, 1)))
    expected = (*("sum", "cumulative"), True)
    assert (found["type"], found["aggregation_temporality"], found["is_monotonic"]) == expected
    assert found["data_points"][0] == {"attributes": [], "int_value": -3, "value": -3.0}


def test_histograms_and_summaries() -> None:
    """Counts, bounds and quantiles of the three other kinds."""
    packed = struct.pack("<qq", 4, 5)
    bounds = struct.pack("<d", 0.5)
    point = part(
        1,
        *(fixed(4, 9), fixed(5, 1.5), part(6, packed), part(7, bounds)),
        *(fixed(11, 0.1), fixed(12, 0.9), pair(9, "a", part(1, "b"))),
    )
    (found,) = one(part(9, point, number(2, 1)))["data_points"]
    assert (found["count"], found["sum"], found["min"], found["max"]) == (9, 1.5, 0.1, 0.9)
    assert (found["bucket_counts"], found["explicit_bounds"]) == ([4, 5], [0.5])
    assert found["attributes"] == [{"key": "a", "value": "b"}]

    buckets = part(8, number(1, 3), part(2, varint(1) + varint(300)))
    point = part(1, fixed(4, 9), number(6, 1), fixed(7, 2), buckets)
    (found,) = one(part(10, point))["data_points"]
    assert (found["scale"], found["zero_count"]) == (-1, 2)
    assert found["positive"] == {"offset": -2, "bucket_counts": [1, 300]}

    point = part(1, fixed(4, 9), fixed(5, 1.0), part(6, fixed(1, 0.99), fixed(2, 7.0)))
    (found,) = one(part(11, point))["data_points"]
    assert found["quantiles"] == [{"quantile": 0.99, "value": 7.0}]


def test_attributes_of_every_type() -> None:
    """Values become text: lists and maps as JSON, bytes as base64."""
    values = {
        "text": (part(1, "x"), "x"),
        "yes": (number(2, 1), "true"),
        "minus": (number(3, -7), "-7"),
        "float": (fixed(4, 0.5), "0.5"),
        "list": (part(5, part(1, number(3, 1)), part(1, part(1, "z"))), '[1, "z"]'),
        "map": (part(6, pair(1, "k", number(2, 0))), '{"k": false}'),
        "bytes": (part(7, b"\x00\xff"), "AP8="),
        "nothing": (b"", None),
    }
    attributes = b"".join(pair(1, key, data) for key, (data, _) in values.items())
    found = one(part(1, "n"), attributes=attributes)["resource_attributes"]
    assert {each["key"]: each["value"] for each in found} == {
        key: text for key, (_, text) in values.items()
    }


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_compressed_as_clients_do(codec: Codec) -> None:
    """Each codec is decompressed; empty data have no metric."""
    data = message(*[part(1, f"metric.{n}") for n in range(3000)])
    names = [each["name"] for each in read_metrics(compress(codec, data), codec)]
    assert names == [f"metric.{n}" for n in range(3000)]
    assert read_metrics(b"", codec) == []


def reason(data: bytes, codec: int = Codec.NONE) -> str:
    with pytest.raises(DecodeError) as caught:
        read_metrics(data, codec)
    return caught.value.reason


def test_bombs_end_at_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decompression, parts and copies of attributes are bounded, and say so."""
    bomb = compress(Codec.ZSTD, bytes(64 << 20))
    assert reason(bomb, Codec.ZSTD) == "limit reached"
    monkeypatch.setattr(telemetry, "PARTS_MAX", 100)
    assert reason(message(*[b""] * 200)) == "limit reached"
    monkeypatch.setattr(telemetry, "PARTS_MAX", 1 << 19)
    many = message(*[b""] * 2000, attributes=pair(1, "a", part(1, "b" * 2000)))
    assert reason(many) == "limit reached"
    deep = number(3, 1)
    for _ in range(40):
        deep = part(5, part(1, deep))
    assert reason(message(b"", attributes=pair(1, "a", deep))) == "nested too deep"
    assert len(telemetry.read_metrics(message(b"", attributes=pair(1, "a", deep)), 0, 50)) == 1


def test_bytes_that_are_no_protobuf_raise_an_error() -> None:
    """DecodeError has the reason."""
    assert reason(b"\x0a\x05ab") == "the bytes end inside the value"
    assert reason(b"\xff" * 11) == "varint overflow"
    assert reason(b"\x0b") == "no protobuf wire type"
    assert reason(b"\x00\x00") == "protobuf field 0"
    assert reason(b"plain text", Codec.GZIP) == "corrupt compressed data"
    assert reason(b"x", 9) == "unknown codec"


def test_unknown_fields_are_skipped() -> None:
    """Fields of later OTLP releases are no fault."""
    metric = part(1, "n") + number(99, 5) + varint(98 << 3 | 5) + b"abcd" + part(97, "later")
    assert one(metric)["name"] == "n"


@given(st.binary(max_size=120), st.data())
def test_any_bytes_give_metrics_or_an_error(noise: bytes, data: st.DataObject) -> None:
    """Random and cut bytes raise nothing but DecodeError."""
    point = part(1, pair(7, "topic", part(1, "t")), TIMES, fixed(4, 2.5))
    whole = message(part(1, "n") + part(5, point) + part(9, point) + part(10, point))
    at = data.draw(st.integers(0, len(whole)))
    for frame in (noise, whole[:at] + noise, whole[:at], whole[:at] + noise + whole[at:]):
        with suppress(DecodeError):
            read_metrics(frame, Codec.NONE)
