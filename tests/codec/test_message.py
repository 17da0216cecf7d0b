"""`Message`, `decode_message`, `encode_message`: frames of Kafka's own writer, and edges."""

import pytest

from kdissect import DecodeError, EncodeError, Message, decode_message, encode_message
from kdissect.protocol import catalog
from tests.codec.vectors import message_vectors, to_json


def test_every_message_of_kafkas_own_writer():
    """Each API and version as Kafka's classes wrote it decodes and encodes to the same bytes."""
    seen = set()
    for (key, side), vectors in message_vectors().items():
        for vector in vectors:
            frame, version = vector["frame"], vector["api_version"]
            message = decode_message(frame, side=side, api_key=key, api_version=version)
            where = f"{vector['api']} v{version} {side}"
            assert message.api_name == vector["api"], where
            assert (message.api_key, message.api_version) == (key, version), where
            assert to_json(message.header) == vector["header"], where
            assert to_json(message.body) == vector["body"], where
            assert message.surplus == b"", where
            made = Message(key, version, side, message.header, message.body)
            assert encode_message(message) == encode_message(made) == frame, where
            seen.add((key, version, side))
    assert (sum(map(len, message_vectors().values())), len(seen)) == (2166, 2 * 361)


def test_missing_values_are_defaults():
    """Values that are not given take the definition's defaults, in elements, too."""
    message = Message(api_key=1, api_version=12, side="request", body={"topics": [{"topic": "t"}]})
    assert message.header == {
        "request_api_key": 1,
        "request_api_version": 12,
        "correlation_id": 0,
        "client_id": "",
    }
    assert message.body["max_bytes"] == 2**31 - 1
    assert message.body["replica_id"] == -1
    assert message.body["cluster_id"] is None
    assert message.body["topics"] == [{"topic": "t", "partitions": []}]
    assert decode_message(encode_message(message), side="request") == message


def test_every_message_can_be_made_of_defaults():
    """A message without values encodes and decodes in every version."""
    for key, api in catalog.apis().items():
        for version in range(api.request.versions.first, api.request.versions.last + 1):
            for side in ("request", "response"):
                message = Message(key, version, side)
                frame = encode_message(message)
                again = decode_message(frame, side=side, api_key=key, api_version=version)
                assert again == message, (api.name, version, side)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"body": {"topix": []}}, "Metadata v12 request > topix: no field of that name in version"),
        ({"body": {"topics": [{}, {"name": "x", "nam": "y"}]}}, r"topics\[1\].nam"),
        ({"header": {"client": "x"}}, "client"),
        ({"header": {"request_api_key": 4}}, "header says api 4"),
        ({"api_version": 99}, "no version 99"),
        ({"api_key": 99}, "no API has key 99"),
        ({"side": "reply"}, "side must be"),
        ({"body": {"topics": {}}}, "expected a list"),
        ({"body": {"_unknown_tags": {1: b""}}, "api_version": 1}, "_unknown_tags"),
    ],
)
def test_a_body_that_does_not_fit_is_a_value_error(arguments, reason):
    """A wrong API, version, side or name raises ValueError with the reason."""
    with pytest.raises(ValueError, match=reason):
        Message(**{"api_key": 3, "api_version": 12, "side": "request", **arguments})


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"topics": [{"name": 5}]}, "topics[0].name"),
        ({"topics": [{"topic_id": "text"}]}, "topics[0].topic_id"),
        ({"allow_auto_topic_creation": 1}, "allow_auto_topic_creation"),
        ({"topics": [{"name": "\ud800"}]}, "topics[0].name"),
        ({"_unknown_tags": {-1: b""}}, "_unknown_tags"),
        ({"_unknown_tags": {7: "text"}}, "_unknown_tags"),
    ],
)
def test_a_value_of_the_wrong_kind_names_its_field(body, path):
    """EncodeError has the path of the field."""
    with pytest.raises(EncodeError) as caught:
        encode_message(Message(3, 12, "request", body=body))
    assert caught.value.path == path
    assert str(caught.value).startswith(f"Metadata v12 request > {path}: ")


def test_numbers_out_of_range_are_refused():
    """A number beyond its type, and a bool for a number, raise EncodeError."""
    with pytest.raises(EncodeError, match=r"throttle_time_ms: 2147483648 does not fit"):
        encode_message(Message(12, 1, "response", body={"throttle_time_ms": 2**31}))
    with pytest.raises(EncodeError, match=r"error_code: expected a number, not bool"):
        encode_message(Message(12, 1, "response", body={"error_code": True}))


def test_surplus_is_kept():
    """librdkafka's Metadata v13 has three bytes too many; brokers read over them."""
    frame = encode_message(Message(3, 12, "request")) + b"\0\0\0"
    message = decode_message(frame, side="request")
    assert message.surplus == b"\0\0\0"
    assert encode_message(message) == frame


def test_other_encodings_come_back_in_kafkas_form():
    """An overlong varint is decoded, and encoded in its short form."""
    plain = encode_message(Message(12, 4, "response", body={"error_code": 7}))
    overlong = plain[:-1] + b"\x80\x00"
    message = decode_message(overlong, side="response", api_key=12, api_version=4)
    assert encode_message(message) == plain


def test_known_tags_and_unknown_ones_are_merged_in_order():
    """Tags ascend on the wire (KIP-482); a known field's tag is refused."""
    body = {"supported_features": [], "_unknown_tags": {2000: b"z", 2: b"y", 9: b"x"}}
    with pytest.raises(EncodeError, match="tag 2 is the field"):
        encode_message(Message(18, 3, "response", body=body))
    del body["_unknown_tags"][2]
    body["finalized_features_epoch"] = 5
    frame = encode_message(Message(18, 3, "response", body=body))
    assert frame.endswith(
        b"\x03" + b"\x01\x08" + bytes(7) + b"\x05" + b"\x09\x01x" + b"\xd0\x0f\x01z"
    )


def test_apiversions_with_error_35_is_version_0():
    """UNSUPPORTED_VERSION comes in version 0, whatever was requested (KIP-511)."""
    body = {"error_code": 35, "api_keys": [{"api_key": 18, "min_version": 0, "max_version": 3}]}
    frame = encode_message(Message(18, 0, "response", {"correlation_id": 7}, body))
    for asked in (1, 2, 3, 4, 99):
        message = decode_message(frame, side="response", api_key=18, api_version=asked)
        assert (message.api_version, message.body) == (0, body)
        assert encode_message(message) == frame


def test_apiversions_that_fit_nothing_say_why_for_the_version_asked():
    """The error is the one of the requested version."""
    with pytest.raises(DecodeError, match="ApiVersionsResponse v3"):
        decode_message(b"\0\0\0\1\0\0\xff", side="response", api_key=18, api_version=3)


@pytest.mark.parametrize(
    ("data", "pos", "reason"),
    [
        (b"", 0, "the bytes end inside the value"),
        (b"\0\1\0", 2, "the bytes end inside the value"),
        (b"\x7f\xff\0\0\0\0\0\0", 0, "unknown api key"),
        (b"\0\1\x7f\xff\0\0\0\0", 2, "unknown api version"),
        (b"\0\1\0\4\0\0\0\0\0", 8, "the bytes end inside the value"),
    ],
)
def test_an_undecidable_request_is_a_decode_error(data, pos, reason):
    """A cut header, or an unknown API or version, has position and reason."""
    with pytest.raises(DecodeError, match=reason) as caught:
        decode_message(data, side="request")
    assert caught.value.pos == pos


def test_a_response_needs_its_api_and_version():
    """A response needs an API and version; a request's must equal its header's."""
    with pytest.raises(ValueError, match="needs the api_key"):
        decode_message(bytes(8), side="response")
    with pytest.raises(ValueError, match="side must be"):
        decode_message(bytes(8), side="reply", api_key=1, api_version=1)
    with pytest.raises(DecodeError, match="unknown api version"):
        decode_message(bytes(8), side="response", api_key=1, api_version=99)
    frame = encode_message(Message(3, 12, "request"))
    with pytest.raises(ValueError, match="header says 12"):
        decode_message(frame, side="request", api_version=11)


def test_controlled_shutdown_0_has_no_client_id():
    """Request header v0 ends after the correlation id."""
    message = decode_message(b"\0\7\0\0\0\0\0\5\0\0\0\1", side="request")
    assert "client_id" not in message.header
    assert message.body == {"broker_id": 1}


def test_data_may_be_any_bytes():
    """bytes, bytearray and memoryview give the same message."""
    frame = encode_message(Message(3, 12, "request", body={"topics": [{"name": "t"}]}))
    message = decode_message(frame, side="request")
    assert decode_message(bytearray(frame), side="request") == message
    assert decode_message(memoryview(frame), side="request") == message
