"""The plain decoder and encoder: every wire type, every definition, every fault."""

import random
import struct
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.codec import message_codec
from kdissect.codec.message import decode_message
from kdissect.codec.message_codec import decode, encode
from kdissect.errors import DecodeError, EncodeError
from kdissect.protocol import catalog
from kdissect.protocol.layout import layout
from kdissect.status import REASONS, Status
from tests.codec.definitions import SHAPE, of
from tests.codec.message_values import values
from tests.codec.vectors import (
    WITH_KEYS,
    internal_vectors,
    message_vectors,
    to_json,
    value_definition,
)


def all_definitions():
    found = [catalog.REQUEST_HEADER, catalog.RESPONSE_HEADER]
    for api in catalog.apis().values():
        found += [api.request, api.response]
    return [*found, *catalog.record_definitions().values()]


ALL = [
    (definition, version)
    for definition in all_definitions()
    for version in range(definition.versions.first, definition.versions.last + 1)
]


# Wire types


@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        ("int8", {b"\x80": -128, b"\x7f": 127}),
        ("int16", {b"\x80\x00": -32768, b"\x01\x02": 258}),
        ("uint16", {b"\xff\xff": 65535}),
        ("int32", {b"\xff\xff\xff\xfe": -2}),
        ("int64", {b"\x80" + bytes(7): -(2**63)}),
        ("float64", {struct.pack(">d", -1.5): -1.5}),
        ("bool", {b"\0": False, b"\1": True}),
        ("uuid", {bytes(range(16)): UUID(bytes=bytes(range(16))), bytes(16): UUID(int=0)}),
        ("uvarint", {b"\0": 0, b"\x7f": 127, b"\x80\x01": 128, b"\xff\xff\xff\xff\x0f": 2**32 - 1}),
        ("string", {b"\0\0": "", b"\0\2\xc3\xa9": "é", b"\0\1\xff": "\udcff"}),
        ("compact_string", {b"\1": "", b"\3\xc3\xa9": "é"}),
        ("bytes", {b"\0\0\0\0": b"", b"\0\0\0\1x": b"x"}),
        ("compact_bytes", {b"\1": b"", b"\2x": b"x"}),
    ],
)
def test_a_wire_type_is_read_whole_cut_and_with_a_tail(kind, pairs):
    """Each type is read and written; a cut value is a fault at its first byte."""
    reader = getattr(message_codec, f"read_{kind}")
    writer = getattr(message_codec, f"write_{kind}")
    for data, value in pairs.items():
        assert reader(data, 0) == (value, len(data))
        assert reader(b"ab" + data + b"tail", 2) == (value, len(data) + 2)
        out = bytearray()
        writer(out, value)
        assert bytes(out) == data
        for size in range(len(data)):
            with pytest.raises(DecodeError) as caught:
                reader(b"ab" + data[:size], 2)
            assert (caught.value.pos, caught.value.reason) == (2, REASONS[Status.TRUNCATED])


@pytest.mark.parametrize(
    ("read", "data"),
    [
        ("string", b"\xff\xff"),
        ("compact_string", b"\0"),
        ("bytes", b"\xff" * 4),
        ("compact_bytes", b"\0"),
    ],
)
def test_null_is_read_only_where_it_is_allowed(read, data):
    """Null of a nullable type is a value; elsewhere it is a negative length."""
    reader = getattr(message_codec, f"read_{read}")
    assert reader(data, 0, True) == (None, len(data))
    with pytest.raises(DecodeError, match="negative length"):
        reader(data, 0)
    out = bytearray()
    getattr(message_codec, f"write_{read}")(out, None)
    assert bytes(out) == data


def test_lengths_below_null_are_faults():
    """A length below -1 is a fault for nullable types, too."""
    for reader, data in (
        (message_codec.read_string, b"\xff\xfe"),
        (message_codec.read_bytes, b"\x80\0\0\0"),
    ):
        with pytest.raises(DecodeError, match="negative length"):
            reader(data, 0, True)


def test_any_byte_but_zero_is_true():
    """Kafka's reader takes any byte but 0 as true."""
    read = [message_codec.read_bool(bytes([byte]), 0)[0] for byte in (0, 1, 2, 0xFF)]
    assert read == [False, True, True, True]


def test_an_overlong_varint_is_its_value():
    """A varint with unneeded bytes of zeros is read as its value."""
    assert message_codec.read_uvarint(b"\x81\x80\x80\x80\x00", 0) == (1, 5)


@given(st.integers(0, 2**32 - 1), st.binary(max_size=3))
def test_uvarints_survive(value, tail):
    """Any 32-bit number is written and read again, with other bytes after it."""
    out = bytearray()
    message_codec.write_uvarint(out, value)
    assert message_codec.read_uvarint(bytes(out) + tail, 0) == (value, len(out))


@pytest.mark.parametrize(
    ("presence", "expected"), [(-1, None), (-128, None), (1, {}), (0, {}), (5, {})]
)
def test_a_nullable_struct_has_a_presence_byte(presence, expected):
    """A negative byte stands for null, any other for a struct."""
    definition = of("  s: S? 0+\n    a: int8 0+\n")
    data = struct.pack("b", presence) + (b"\7" if expected is not None else b"")
    value = None if expected is None else {"a": 7}
    assert decode(definition, 0, data) == ({"s": value}, len(data))


def test_a_tagged_nullable_struct_has_a_presence_varint():
    """Null is 0 there; a broker writes it for every member of the new group protocol."""
    definition = of("  s: S? 1+ tag 0\n    a: int8 1+\n")
    for body, data in (
        ({"s": None}, b"\1\0\1\0"),
        ({"s": {"a": 7}}, b"\1\0\3\1\7\0"),
        ({"s": {"a": 0}}, b"\0"),
    ):
        assert encode(definition, 1, body) == data
        assert decode(definition, 1, data) == (body, len(data))


# Every definition


def test_no_element_of_an_array_is_empty_on_the_wire():
    """Else a count would say nothing about the bytes left."""

    def check(layout):
        for slot in layout.by_name.values():
            if slot.inner is not None:
                assert not slot.field.is_array or slot.inner.size_min > 0
                check(slot.inner)

    for definition, version in ALL:
        check(layout(definition, version))


@given(st.data())
def test_any_values_survive(data):
    """Values of any kind decode as they were encoded, in any version."""
    definition, version = data.draw(st.sampled_from(ALL))
    body = data.draw(values(definition, version))
    encoded = encode(definition, version, body)
    assert decode(definition, version, encoded) == (body, len(encoded))
    assert message_codec.complete(definition, version, body) == body


def test_what_decodes_encodes_again():
    """Changed bytes raise DecodeError, or give values that encode and decode to the same."""
    generator = random.Random(20)
    for (key, side), vectors in message_vectors().items():
        definition = catalog.api(key).side(side)
        for vector in vectors:
            version = vector["api_version"]
            message = decode_message(vector["frame"], side=side, api_key=key, api_version=version)
            changed = bytearray(encode(definition, version, message.body))
            for _ in range(generator.randint(1, 3) if changed else 0):
                changed[generator.randrange(len(changed))] = generator.choice(
                    (0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256))
                )
            try:
                body, end = decode(definition, version, bytes(changed))
            except DecodeError:
                continue
            assert end <= len(changed)
            again = encode(definition, version, body)
            assert to_json(decode(definition, version, again)[0]) == to_json(body)


# Faults, and what is left out


def test_the_sentence_of_a_fault_reads_as_a_path():
    """The message names the definition, the field and the position."""
    with pytest.raises(DecodeError) as caught:
        decode(of(SHAPE), 0, bytes.fromhex("00000001 00000000 00000001 0009 00000001"))
    assert str(caught.value) == ("Test v0 > topics[0].name, pos 12: the bytes end inside the value")


def test_a_default_sent_as_a_tag_decodes_and_is_left_out_again():
    """A tagged field with its default is read; Kafka's writer omits it."""
    definition = of(SHAPE)
    data = bytes.fromhex("00000001 01 00 ff 01 05 05 0000 0000 00")
    body, end = decode(definition, 1, data)
    assert end == len(data)
    assert body["late"] == {"x": 0, "y": 0}
    assert encode(definition, 1, body) == bytes.fromhex("00000001 01 00 ff 00")


def test_unknown_tags_keep_a_struct_from_being_its_default():
    """A tagged struct with unknown tags is written."""
    definition = of(SHAPE)
    body = {"late": {"x": 0, "y": 0, "_unknown_tags": {9: b"z"}}}
    data = encode(definition, 1, body)
    assert decode(definition, 1, data)[0]["late"] == body["late"]


def test_a_version_that_is_not_there_is_the_callers_fault():
    """An unknown version raises ValueError, not DecodeError."""
    with pytest.raises(ValueError, match="no version 2"):
        decode(of(SHAPE), 2, b"")


def test_null_where_it_is_not_allowed_is_not_encoded():
    """EncodeError names the field, also for an element of an array."""
    with pytest.raises(EncodeError, match=r"topics\[0\].name: null is not allowed"):
        encode(of(SHAPE), 0, {"topics": [{"name": None}]})
    with pytest.raises(EncodeError, match=r"names\[0\]: null"):
        encode(of(SHAPE), 0, {"names": [None]})


def test_a_string_too_long_for_its_form_is_refused():
    """An int16 length cannot hold 40,000 bytes; a compact string can."""
    with pytest.raises(EncodeError, match="does not fit"):
        encode(of("  s: string 0+\n"), 0, {"s": "x" * 40_000})
    assert len(encode(of("  s: string 0+\n"), 1, {"s": "x" * 40_000})) == 40_004


# Records and embedded data, as Kafka's own classes wrote them


def test_internal_records_of_kafkas_own_writer():
    """Keys and values of internal topics decode as Kafka's classes wrote them."""
    # what stands before a value: frame version, record id and version, each one byte here
    ahead = {"cluster_metadata": 3, "streams_subscription": 0}
    for kind, vectors in internal_vectors().items():
        for vector in vectors:
            if kind in WITH_KEYS:
                key = catalog.definition(vector["name"] + "Key")
                same(key, 0, vector["key"], 2, vector["key_body"])
            skip = ahead.get(kind, 2)
            if kind == "control_record" and vector["name"] != "EndTxnMarker":
                skip = 0
            if vector["value"] is not None:
                definition = value_definition(vector)
                same(definition, vector["version"], vector["value"], skip, vector["value_body"])
    assert sum(map(len, internal_vectors().values())) == 396


def same(definition, version, data, skip, body):
    decoded, end = decode(definition, version, data, skip)
    assert end == len(data), definition.name
    assert to_json(decoded) == body, definition.name
    assert encode(definition, version, decoded) == data[skip:], definition.name


def test_connects_group_protocol():
    """Subscriptions and assignments of Connect decode after their int16 version."""
    url = b"\0\x14http://worker-1:8083" + (7).to_bytes(8, "big")
    definition = catalog.definition("ConnectProtocolSubscription")
    expected = {"url": "http://worker-1:8083", "config_offset": 7}
    same(definition, 0, b"\0\0" + url, 2, expected)
    same(definition, 1, b"\0\1" + url + b"\xff" * 4, 2, {**expected, "allocation": None})
    head = b"\0\0\0\2w1\0\0" + (7).to_bytes(8, "big")
    data = head + b"\0\0\0\1\0\4copy" + struct.pack(">iii", 2, -1, 0)
    body = {
        "error": 0,
        "leader": "w1",
        "leader_url": "",
        "config_offset": 7,
        "assignment": [{"connector": "copy", "tasks": [-1, 0]}],
    }
    definition = catalog.definition("ConnectProtocolAssignment")
    same(definition, 0, data, 0, body)
    later = data + struct.pack(">ii", -1, 1000)
    same(definition, 2, later, 0, {**body, "revoked": None, "delay": 1000})


def test_a_captured_assignment_of_kafka_streams():
    """Version 11, four active tasks, as the leader of a captured group sent it."""
    words = [11, 11, 4, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    data = struct.pack(">20i", *words) + b"\x7f" + b"\xff" * 7
    body, end = decode(catalog.definition("StreamsAssignment"), 11, data)
    assert end == len(data)
    tasks = [(task["topic_group_id"], task["partition"]) for task in body["active_tasks"]]
    assert tasks == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (body["standby_tasks"], body["error_code"]) == ([], 0)
    assert body["next_rebalance_ms"] == 2**63 - 1
