"""SASL tokens by their shape, with the exchanges that the RFCs print."""

import base64
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kdissect.codec.sasl_tokens import read_token
from kdissect.protocol.model import REQUEST, RESPONSE


def token_fields(data: bytes, side: int = REQUEST) -> dict[str, Any]:
    token = read_token(data, side)
    assert token is not None
    return {name: value for name, value in token.items() if value not in (None, [])}


def test_plain_with_and_without_another_identity() -> None:
    """RFC 4616: authzid, authcid and password between NULs."""
    assert token_fields(b"\0tim\0tanstaaftanstaaf") == {
        "mechanism": "PLAIN",
        "step": "initial",
        "authcid": "tim",
        "password": "tanstaaftanstaaf",
    }
    assert token_fields("Ursel\0Kurt\0xipj3plmqü".encode())["authzid"] == "Ursel"


def test_the_scram_exchange_of_rfc_7677() -> None:
    """The four tokens of the RFC's example have their fields."""
    nonce = "rOprNGfwEbeRWgbNEkqO"
    both = nonce + "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    first = token_fields(b"n,,n=user,r=" + nonce.encode())
    assert (first["step"], first["authcid"], first["nonce"]) == ("client-first", "user", nonce)
    answer = token_fields(f"r={both},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096".encode(), RESPONSE)
    assert (answer["step"], answer["nonce"]) == ("server-first", both)
    assert (answer["salt"], answer["iterations"]) == ("W22ZaJ0SNY7soEsUEjb6gQ==", 4096)
    proof = "dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    final = token_fields(f"c=biws,r={both},p={proof}".encode())
    expected = (*("client-final", "biws"), proof)
    assert (final["step"], final["channel_binding"], final["proof"]) == expected
    last = token_fields(b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=", RESPONSE)
    assert last["server_signature"] == "6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    assert token_fields(b"e=invalid-proof", RESPONSE)["error"] == "invalid-proof"


def test_names_in_scram_are_unescaped_and_extensions_kept() -> None:
    """=2C and =3D are comma and equals sign (RFC 5802)."""
    token = token_fields(b"n,a=other,n=a=2Cb=3D,r=xyz,tokenauth=true")
    assert (token["authzid"], token["authcid"]) == ("other", "a,b=")
    assert token["extensions"] == [{"name": "tokenauth", "value": "true"}]


def bearer(claims: str) -> bytes:
    payload = base64.urlsafe_b64encode(claims.encode()).decode().rstrip("=")
    token = f"eyJhbGciOiJub25lIn0.{payload}.c2ln"
    return f"n,a=me,\x01auth=Bearer {token}\x01traceId=7\x01\x01".encode()


def test_a_bearers_claims() -> None:
    """The claims of a JSON web token are listed as texts."""
    token = token_fields(bearer(json.dumps({"sub": "admin", "exp": 12, "scope": ["a"]})))
    assert (token["mechanism"], token["authzid"]) == ("OAUTHBEARER", "me")
    assert token["token"].startswith("eyJhbGciOiJub25lIn0.")
    assert token["claims"] == [
        {"name": "sub", "value": "admin"},
        {"name": "exp", "value": "12"},
        {"name": "scope", "value": '["a"]'},
    ]
    assert token["extensions"] == [{"name": "traceId", "value": "7"}]
    assert token_fields(b"\x01")["step"] == "client-error"
    refused = token_fields(b'{"status":"invalid_token","scope":"x"}', RESPONSE)
    assert (refused["error"], refused["step"]) == ("invalid_token", "server-error")


@pytest.mark.parametrize(
    "claims",
    ["[" * 100_000, "{" + '"a":' * 20_000, "[1]", "9" * 10_000, "", "\x00", '"text"'],
    ids=["deep list", "deep object", "list", "long number", "empty", "nul", "text"],
)
def test_a_token_without_claims_is_a_token(claims: str) -> None:
    """A token with unreadable claims gives a row without claims."""
    token = token_fields(bearer(claims))
    assert "claims" not in token
    assert token["token"]


def test_lone_surrogates_of_json_become_replacement_characters() -> None:
    """The text can be encoded as UTF-8."""
    token = token_fields(bearer('{"sub": "a\\ud800b"}'))
    assert token["claims"][0]["value"].encode("utf-8")


def test_kerberos_is_recognised_and_other_bytes_are_not() -> None:
    """GSSAPI has its tag; other bytes give None."""
    assert token_fields(b"\x60\x82\x02\x00\x06\x09") == {"mechanism": "GSSAPI"}
    for data in (b"", b"\xff\xfe", b"hello", b"a\0b", b"c=biws", b"n,,x", b"n,,n=u"):
        assert read_token(data, REQUEST) is None
    for data in (b"", b"\xff", b"hello", b"r=only", b"{", b"[]", b'{"status":1}', b"r=1,r=2,s=3"):
        assert read_token(data, RESPONSE) is None


@given(st.one_of(st.binary(max_size=80), st.text("nyp=,acrvsie\x01\0{}:", max_size=40)))
@example("n,,\x01auth=Bearer ..\x01\x01")
@example("r=1,s=2,i=²")
def test_any_bytes_are_a_token_or_not(data: bytes | str) -> None:
    """Any bytes give None, or a token that is valid JSON."""
    raw = data if isinstance(data, bytes) else data.encode()
    for side in (REQUEST, RESPONSE):
        token = read_token(raw, side)
        if token is not None:
            json.dumps(token, ensure_ascii=False).encode("utf-8")
