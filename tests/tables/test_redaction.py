"""Redaction hides the fields of the rules, at any depth of lists, and no others."""

import pyarrow as pa
import pytest

from kdissect.tables.redaction import TEXT, is_sensitive_name, redact_body


def test_bytes_of_a_token_are_hidden_and_null_stays() -> None:
    """SaslAuthenticate's auth_bytes become [redacted] in ASCII."""
    kind = pa.struct([("auth_bytes", pa.binary()), ("other", pa.int32())])
    body = pa.array(
        [{"auth_bytes": b"\0u\0p", "other": 1}, {"auth_bytes": None, "other": 2}, None], kind
    )
    shown = redact_body(body, 36, 0).to_pylist()
    assert shown == [
        {"auth_bytes": TEXT.encode(), "other": 1},
        {"auth_bytes": None, "other": 2},
        None,
    ]


def test_configs_hide_by_name_and_by_the_brokers_word() -> None:
    """A DescribeConfigs value is hidden by the broker's flag, or by its name."""
    synonym = pa.struct([("name", pa.string()), ("value", pa.string())])
    config = pa.struct(
        [
            ("name", pa.string()),
            ("value", pa.string()),
            ("is_sensitive", pa.bool_()),
            ("synonyms", pa.list_(synonym)),
        ]
    )
    kind = pa.struct([("results", pa.list_(pa.struct([("configs", pa.list_(config))])))])

    def entry(name: str, value: str | None, flag: bool) -> dict[str, object]:
        return {
            "name": name,
            "value": value,
            "is_sensitive": flag,
            "synonyms": [{"name": name, "value": value}],
        }

    given = [
        {"results": [{"configs": [entry("ssl.key.password", "x", False), entry("a", "1", True)]}]},
        {"results": None},
        {"results": [{"configs": []}, {"configs": [entry("retention.ms", "7", False)]}]},
    ]
    shown = redact_body(pa.array(given, kind), 32, 1).to_pylist()
    first = shown[0]["results"][0]["configs"]
    assert [item["value"] for item in first] == [TEXT, TEXT]
    assert first[0]["synonyms"][0]["value"] == TEXT
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
    ],
)
def test_names_tell_secrets(name: str, hidden: bool) -> None:
    """The name of a config decides when the broker does not."""
    assert is_sensitive_name(name) is hidden


def test_sliced_arrays_keep_their_rows() -> None:
    """Rules apply to a slice of a column as to the whole."""
    kind = pa.struct([("auth_bytes", pa.binary())])
    body = pa.array([{"auth_bytes": b"1"}, None, {"auth_bytes": None}, {"auth_bytes": b"2"}], kind)
    assert redact_body(body.slice(1), 36, 0).to_pylist() == [
        None,
        {"auth_bytes": None},
        {"auth_bytes": TEXT.encode()},
    ]
