"""SASL tokens against the examples of the RFCs, and options that cannot be used."""

import base64

import pytest

from kdissect.replay.model import OptionError
from kdissect.replay.target import auth
from kdissect.replay.target.auth import LoginFailed, Sasl, sasl_from


def test_plain_sends_user_and_password() -> None:
    """RFC 4616: no authorization id, user, password."""
    tokens = Sasl("PLAIN", "tim", "tanstaaftanstaaf").tokens()
    assert next(tokens) == b"\0tim\0tanstaaftanstaaf"
    with pytest.raises(StopIteration):
        tokens.send(b"")


def test_scram_sha_256() -> None:
    """The exchange of RFC 7677, section 3."""
    tokens = auth._scram("user", "pencil", "sha256", "rOprNGfwEbeRWgbNEkqO")
    assert next(tokens) == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    nonce = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    final = tokens.send(f"r={nonce},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096".encode())
    assert final.decode() == (f"c=biws,r={nonce},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
    with pytest.raises(StopIteration):
        tokens.send(b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")


@pytest.mark.parametrize(
    ("challenge", "final", "reason"),
    [
        (b"r=other,s=QUFB,i=4096", b"", "no challenge"),
        (b"e=unknown-user", b"", "unknown-user"),
        (b"r=abcdef,s=QUFB,i=99999999999", b"", "iterations"),
        (b"r=abcdef,s=*,i=4096", b"", "salt"),
        (b"\xff\xfe", b"", "no challenge"),
        (b"r=abcdef,s=QUFB,i=4096", b"e=invalid-proof", "invalid-proof"),
        (b"r=abcdef,s=QUFB,i=4096", b"v=QUFB", "does not know the password"),
    ],
)
def test_scram_that_fails(challenge: bytes, final: bytes, reason: str) -> None:
    """A damaged or hostile challenge, and a target that cannot prove itself."""
    tokens = auth._scram("user", "pencil", "sha512", "abc")
    next(tokens)
    with pytest.raises(LoginFailed, match=reason):  # noqa: PT012 two steps may fail
        tokens.send(challenge)
        tokens.send(final)


def test_scram_names_are_escaped() -> None:
    """A user name's comma and equals sign are escaped (RFC 5802, section 5.1)."""
    tokens = auth._scram("a=b,c", "x", "sha256", "n")
    assert next(tokens) == b"n,,n=a=3Db=2Cc,r=n"


def test_bearer_sends_the_token() -> None:
    """RFC 7628: the token; an error from the target is answered with one byte."""
    tokens = Sasl("OAUTHBEARER", secret="abc.def").tokens()
    assert next(tokens) == b"n,,\x01auth=Bearer abc.def\x01\x01"
    assert tokens.send(b'{"status":"invalid_token"}') == b"\x01"
    with pytest.raises(LoginFailed, match="invalid_token"):
        tokens.send(b"")


def test_secrets_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passwords and tokens come from a variable, and no text shows them."""
    monkeypatch.delenv(auth.PASSWORD_VARIABLE, raising=False)
    with pytest.raises(OptionError, match="KDISSECT_SASL_PASSWORD"):
        sasl_from("PLAIN", "u")
    monkeypatch.setenv(auth.PASSWORD_VARIABLE, "from environment")
    sasl = sasl_from("SCRAM-SHA-512", "u")
    assert sasl.secret == "from environment"
    assert "environment" not in repr(sasl)
    monkeypatch.setenv(auth.TOKEN_VARIABLE, base64.b64encode(b"t").decode())
    assert sasl_from("oauthbearer", None).secret == "dA=="
