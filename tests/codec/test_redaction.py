"""Columns, decoded messages and frames hide the same fields, at any depth, and no others."""

from typing import Any

import pyarrow as pa
import pytest

from kdissect.codec import redaction
from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.codec.message_columns import body_type
from kdissect.protocol import catalog
from kdissect.protocol.model import SIDES
from tests.planted_secrets import SECRET, body, definitions, secret_messages


def test_bytes_of_a_token_are_hidden_and_null_stays() -> None:
    """SaslAuthenticate's auth_bytes become [redacted] in ASCII."""
    kind = pa.struct([("auth_bytes", pa.binary()), ("other", pa.int32())])
    body = pa.array(
        [{"auth_bytes": b"\0u\0p", "other": 1}, {"auth_bytes": None, "other": 2}, None], kind
    )
    shown = redaction.redact_column(body).to_pylist()
    assert shown == [
        {"auth_bytes": redaction.TEXT.encode(), "other": 1},
        {"auth_bytes": None, "other": 2},
        None,
    ]


def test_configs_hide_by_name_and_by_the_brokers_word() -> None:
    """A DescribeConfigs value is hidden by the broker's flag, or by its name."""
    synonym = {"name": pa.string(), "value": pa.string()}
    config = synonym | {"is_sensitive": pa.bool_(), "synonyms": pa.list_(pa.struct(synonym))}
    kind = pa.struct({"results": pa.list_(pa.struct({"configs": pa.list_(pa.struct(config))}))})

    def entry(name: str, value: str | None, flag: bool) -> dict[str, object]:
        pair = {"name": name, "value": value}
        return pair | {"is_sensitive": flag, "synonyms": [pair]}

    given = [
        {"results": [{"configs": [entry("ssl.key.password", "x", False), entry("a", "1", True)]}]},
        {"results": None},
        {"results": [{"configs": []}, {"configs": [entry("retention.ms", "7", False)]}]},
    ]
    shown = redaction.redact_column(pa.array(given, kind)).to_pylist()
    first = shown[0]["results"][0]["configs"]
    assert [item["value"] for item in first] == [redaction.TEXT, redaction.TEXT]
    assert first[0]["synonyms"][0]["value"] == redaction.TEXT
    assert first[1]["synonyms"][0]["value"] == "1"
    assert shown[1:] == given[1:]


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("sasl.jaas.config", True),
        ("ssl.keystore.key", True),
        ("ssl.truststore.password", True),
        ("delegation.token.secret.key", True),
        ("key.serializer", False),
        ("retention.ms", False),
        ("ssl.keystore.type", False),
        ("ssl.keystore.certificate.chain", True),
        ("client.keystore.key.pem", True),
        ("ssl.keymanager.algorithm", False),
        ("key.converter", False),
        ("schema.registry.basic.auth.user.info", True),
        ("database.passwd", True),
        ("sasl.oauthbearer.client.credentials.client.id", False),
        ("tokenauth", False),
    ],
)
def test_names_tell_secrets(name: str, hidden: bool) -> None:
    """The name of a config decides when the broker does not."""
    assert redaction.is_sensitive_name(name) is hidden


def test_sliced_arrays_keep_their_rows() -> None:
    """Rules apply to a slice of a column as to the whole."""
    kind = pa.struct([("auth_bytes", pa.binary())])
    body = pa.array([{"auth_bytes": b"1"}, None, {"auth_bytes": None}, {"auth_bytes": b"2"}], kind)
    expected = [None, {"auth_bytes": None}, {"auth_bytes": redaction.TEXT.encode()}]
    assert redaction.redact_column(body.slice(1)).to_pylist() == expected


def test_the_messages_with_secrets() -> None:
    """The product finds the messages that this test's own list of fields has; raw tokens follow a
    SaslHandshake."""
    sides = {(key, side) for key, _, side in secret_messages()}
    assert sides == {
        (key, n) for key in catalog.apis() for n in (0, 1) if redaction.may_hold_secrets(key, n)
    }
    assert redaction.secret_apis() == {17, *(key for key, _ in sides)}
    records = {name for name, _ in definitions() if redaction.record_may_hold_secrets(name)}
    assert records == {"ConfigRecord", "UserScramCredentialRecord"}


def _hidden(value: Any, path: str = "") -> list[str]:
    """Paths whose value is redacted."""
    if isinstance(value, dict):
        return [each for name in value for each in _hidden(value[name], f"{path}.{name}")]
    if isinstance(value, list):
        return [each for inner in value for each in _hidden(inner, path)]
    return [path] if value in (redaction.TEXT, redaction.TEXT.encode()) else []


@pytest.mark.parametrize(("api_key", "version", "side"), secret_messages())
def test_all_forms_of_a_message_hide_the_same(api_key: int, version: int, side: int) -> None:
    """A decoded message, its column and its frame; a frame without secrets stays as it is."""
    header = {"correlation_id": 1} | ({} if side else {"client_id": "c"})
    values = body(api_key, version, side)
    message = Message(api_key, version, SIDES[side], header, values)
    frame = encode_message(message)
    shown = redaction.redact_body(message.body, api_key, side)
    column = redaction.redact_column(pa.array([values], body_type(api_key, SIDES[side])))
    redacted = redaction.redact_frame(frame, api_key, version, side)
    assert redacted is not None
    hidden = decode_message(redacted, side=SIDES[side], api_key=api_key, api_version=version)
    for form in (shown, column.to_pylist()[0], hidden.body):
        assert sorted(_hidden(form)) == sorted(_hidden(shown)) != []
        assert SECRET.decode() not in str(form)
    assert SECRET in frame
    assert SECRET not in redacted
    assert redaction.redact_frame(redacted, api_key, version, side) == redacted
    assert redaction.redact_frame(frame[:-1], api_key, version, side) is None


def test_unknown_tags_and_surplus_bytes_of_secret_messages() -> None:
    """Nobody knows what they hold, so they go; those of other messages stay."""
    entries = [{"name": "ssl.key.password", "value": None}, {"name": "retention.ms", "value": "1"}]
    resources = {"resources": [{"configs": entries}], "_unknown_tags": {7: b"who knows"}}
    shown = redaction.redact_body(resources, 44, 0)
    assert shown == {**resources, "_unknown_tags": {7: redaction.TEXT}}
    assert redaction.redact_body(resources, 3, 0) == resources
    message = Message(44, 1, "request", {"correlation_id": 1, "client_id": "c"}, {}, b"more")
    frame = encode_message(message)
    assert redaction.redact_frame(frame, 44, 1, 0) == frame.removesuffix(b"more")
