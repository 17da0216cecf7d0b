"""Authenticates a replay to the target: TLS contexts and the client's side of SASL.

Mechanisms are generators of client tokens, without input or output: PLAIN (RFC 4616),
SCRAM-SHA-256 and SCRAM-SHA-512 (RFC 5802, RFC 7677), OAUTHBEARER (RFC 7628). Secrets come from
files or environment variables; they are never shown in errors.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import ssl
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from kdissect.replay.model import OptionError

PASSWORD_VARIABLE, TOKEN_VARIABLE = "KDISSECT_SASL_PASSWORD", "KDISSECT_SASL_TOKEN"
KEY_PASSWORD_VARIABLE = "KDISSECT_TLS_KEY_PASSWORD"
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
SCRAM_ITERATIONS_MAX = 1_000_000  # brokers use 4096 to 16384; more would only stall us

Tokens = Generator[bytes, bytes, None]


class LoginFailed(Exception):
    """The target refused the login, or its proof of the password is wrong. The text says why."""


@dataclass(frozen=True)
class TlsOptions:
    """verify: check the target's certificate and name. ca: a PEM file. cert: one with the
    client's certificate and its key."""

    ca: str | None = None
    cert: str | None = None
    verify: bool = True


@cache
def tls_context(options: TlsOptions) -> ssl.SSLContext:
    """Made once, for all connections. Raises OptionError if a file cannot be used."""
    context = ssl.create_default_context()
    if not options.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    for path in (options.ca, options.cert):
        if path is not None and not Path(path).is_file():
            raise OptionError(f"{path}: no such file")
    try:
        if options.ca is not None:
            context.load_verify_locations(cafile=options.ca)
    except (ssl.SSLError, OSError) as error:
        raise OptionError(f"{options.ca}: no certificates in PEM form ({_why(error)})") from None
    if options.cert is not None:
        # never the terminal's prompt: an encrypted key without its password is an error
        password = os.environ.get(KEY_PASSWORD_VARIABLE, "")
        try:
            context.load_cert_chain(options.cert, password=password)
        except (ssl.SSLError, OSError) as error:
            raise OptionError(
                f"{options.cert}: certificate and key cannot be used ({_why(error)}); the "
                f"password of an encrypted key goes into {KEY_PASSWORD_VARIABLE}"
            ) from None
    return context


def _why(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or type(error).__name__


@dataclass(frozen=True)
class Sasl:
    """mechanism: one of MECHANISMS. secret: the password, or the token of OAUTHBEARER."""

    mechanism: str
    user: str = ""
    secret: str = field(default="", repr=False)

    def tokens(self) -> Tokens:
        """The client's tokens; the target's are sent in. Raises LoginFailed."""
        if self.mechanism == "PLAIN":
            return _plain(self.user, self.secret)
        if self.mechanism == "OAUTHBEARER":
            return _bearer(self.secret)
        digest = "sha256" if self.mechanism == "SCRAM-SHA-256" else "sha512"
        return _scram(self.user, self.secret, digest, secrets.token_urlsafe(24))


def sasl_from(mechanism: str, user: str | None) -> Sasl:
    """SASL settings from options; secrets come from the environment.

    Raises OptionError.
    """
    mechanism = mechanism.upper()
    if mechanism not in MECHANISMS:
        raise OptionError(f"SASL mechanism {mechanism} is none of {', '.join(MECHANISMS)}")
    if mechanism == "OAUTHBEARER":
        return Sasl(mechanism, "", _secret(TOKEN_VARIABLE))
    if not user:
        raise OptionError(f"{mechanism} needs --sasl-user")
    return Sasl(mechanism, user, _secret(PASSWORD_VARIABLE))


def _secret(variable: str) -> str:
    if variable in os.environ:
        return os.environ[variable]
    raise OptionError(f"the environment variable {variable} is needed")


def _plain(user: str, password: str) -> Tokens:
    yield b"\0".join([b"", user.encode(), password.encode()])


def _bearer(token: str) -> Tokens:
    answer = yield b"n,,\x01auth=Bearer " + token.encode() + b"\x01\x01"
    if answer:  # RFC 7628, 3.2.3: the error, to be answered with one byte
        yield b"\x01"
        raise LoginFailed("the token was refused: " + answer.decode("utf-8", "replace")[:200])


def _scram(user: str, password: str, digest: str, nonce: str) -> Tokens:
    name = user.replace("=", "=3D").replace(",", "=2C")
    first = f"n={name},r={nonce}"
    challenge = (yield b"n,," + first.encode()).decode("utf-8", "replace")
    parts = _attributes(challenge)
    their_nonce, salt, rounds = parts.get("r", ""), parts.get("s", ""), parts.get("i", "")
    if not their_nonce.startswith(nonce) or not rounds.isdigit():
        raise LoginFailed(f"SCRAM: no challenge that can be answered ({parts.get('e', 'damaged')})")
    if not 0 < int(rounds) <= SCRAM_ITERATIONS_MAX:
        raise LoginFailed(f"SCRAM: {rounds} iterations asked for")
    try:
        salted = hashlib.pbkdf2_hmac(
            digest, password.encode(), base64.b64decode(salt, validate=True), int(rounds)
        )
    except ValueError:
        raise LoginFailed("SCRAM: the challenge's salt is damaged") from None
    last = f"c=biws,r={their_nonce}"
    signed = f"{first},{challenge},{last}".encode()
    client_key = hmac.digest(salted, b"Client Key", digest)
    signature = hmac.digest(hashlib.new(digest, client_key).digest(), signed, digest)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    final = yield f"{last},p={base64.b64encode(proof).decode()}".encode()
    parts = _attributes(final.decode("utf-8", "replace"))
    if "e" in parts:
        raise LoginFailed(f"SCRAM: {parts['e']}")
    expected = hmac.digest(hmac.digest(salted, b"Server Key", digest), signed, digest)
    if not hmac.compare_digest(parts.get("v", ""), base64.b64encode(expected).decode()):
        raise LoginFailed("SCRAM: the target does not know the password either")


def _attributes(text: str) -> dict[str, str]:
    return {part[:1]: part[2:] for part in text.split(",") if part[1:2] == "="}
