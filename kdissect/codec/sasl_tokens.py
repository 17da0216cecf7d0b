"""Decodes SASL tokens by their shape: PLAIN, SCRAM and OAUTHBEARER to named values.

A token does not name its mechanism, and the SaslHandshake that did may be missing in the capture.
The shapes do not overlap:

    PLAIN        authzid NUL authcid NUL password                                     RFC 4616
    SCRAM        n,a=authzid,n=user,r=nonce     r=nonce,s=salt,i=iterations           RFC 5802
                 c=binding,r=nonce,p=proof      v=signature or e=error
    OAUTHBEARER  n,a=authzid,^Aauth=Bearer token^Aname=value^A^A                      RFC 7628
                 {"status": "invalid_token", ...}, answered by ^A
    GSSAPI       an ASN.1 application tag; recognised, not decoded                    RFC 4121

Tokens of other mechanisms are not recognised.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import Any

from kdissect.protocol.model import REQUEST

_PLAIN, SCRAM, OAUTHBEARER, GSSAPI = "PLAIN", "SCRAM", "OAUTHBEARER", "GSSAPI"
_GSS_TAG = 0x60
_SEPARATOR = "\x01"
_GS2_HEADER = re.compile(r"(?:n|y|p=[A-Za-z0-9.-]*),(?:a=([^,\x00\x01]*))?,")
_ITERATIONS_DIGITS_MAX = 9

Token = dict[str, Any]
Pairs = list[dict[str, str]]


def read_token(data: bytes, side: int) -> Token | None:
    """The fields of a token, or None if its shape is unknown.

    Keys, as far as they apply: mechanism, step, authzid, authcid, password, nonce, salt,
    iterations, channel_binding, proof, server_signature, error, token (bearer token), claims (of a
    JWT, as {"name", "value"}), extensions (likewise).
    """
    if not data:
        return None
    if data[0] == _GSS_TAG:
        return {"mechanism": GSSAPI}
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return _of_client(text) if side == REQUEST else _of_server(text)


def _of_client(text: str) -> Token | None:
    if text.count("\0") == 2:
        acting_as, authcid, password = text.split("\0")
        names = {"authzid": acting_as or None, "authcid": authcid, "password": password}
        return {"mechanism": _PLAIN, "step": "initial", **names}
    if text == _SEPARATOR:
        return {"mechanism": OAUTHBEARER, "step": "client-error"}
    if text.startswith("c="):
        given = _attributes(text)
        if given is None or "p" not in given:
            return None
        return _scram("client-final", given, {"c": "channel_binding", "r": "nonce", "p": "proof"})
    header = _GS2_HEADER.match(text)
    if header is None:
        return None
    authzid = header[1] or None
    rest = text[header.end() :]
    if rest.startswith(_SEPARATOR):
        return _bearer(authzid, rest)
    given = _attributes(rest)
    if given is None or "n" not in given or "r" not in given:
        return None
    token = _scram("client-first", given, {"n": "authcid", "r": "nonce"})
    token["authzid"] = authzid
    token["authcid"] = _unescaped(token["authcid"])
    return token


def _of_server(text: str) -> Token | None:
    if text.startswith("{"):
        given = _json_object(text)
        if given is None or not isinstance(given.get("status"), str):
            return None
        error = clean(given["status"])
        rest = {name: value for name, value in given.items() if name != "status"}
        fields = {"error": error, "extensions": _pairs(rest)}
        return {"mechanism": OAUTHBEARER, "step": "server-error", **fields}
    attributes = _attributes(text)
    if attributes is None:
        return None
    if "v" in attributes:
        return _scram("server-final", attributes, {"v": "server_signature"})
    if "e" in attributes:
        return _scram("server-final", attributes, {"e": "error"})
    if "r" not in attributes or "s" not in attributes:
        return None
    token = _scram("server-first", attributes, {"r": "nonce", "s": "salt"}, hidden=("i",))
    count = attributes.get("i", "")
    if count.isascii() and count.isdigit() and len(count) <= _ITERATIONS_DIGITS_MAX:
        token["iterations"] = int(count)
    return token


def _attributes(text: str) -> dict[str, str] | None:
    """``n=user,r=nonce`` as {"n": "user", "r": "nonce"}; None for other text."""
    attributes: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or not name or name in attributes:
            return None
        attributes[name] = value
    return attributes


def _scram(
    step: str, given: dict[str, str], names: dict[str, str], hidden: tuple[str, ...] = ()
) -> Token:
    token: Token = {"mechanism": SCRAM, "step": step}
    for short, name in names.items():
        token[name] = given.get(short)
    others = {name: given[name] for name in given if name not in names and name not in hidden}
    token["extensions"] = _pairs(others)
    return token


def _unescaped(name: str) -> str:
    """RFC 5802: a user name has "=2C" for a comma and "=3D" for an equals sign."""
    return name.replace("=2C", ",").replace("=3D", "=")


def _bearer(authzid: str | None, rest: str) -> Token | None:
    given: dict[str, str] = {}
    for part in rest.strip(_SEPARATOR).split(_SEPARATOR):
        name, equals, value = part.partition("=")
        if not equals:
            return None
        given[name] = value
    scheme, _, bearer = given.pop("auth", "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    return {
        "mechanism": OAUTHBEARER,
        "step": "initial",
        "authzid": authzid,
        "token": bearer.strip(),
        "claims": jwt_claims(bearer.strip()),
        "extensions": _pairs(given),
    }


def jwt_claims(token: str) -> Pairs | None:
    """The claims of a JSON web token (RFC 7519), with unchecked signature; None for other text.

    Strings stay, other values become JSON.
    """
    parts = token.split(".")
    if len(parts) != 3:
        return None
    text = parts[1]
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    claims = _json_object(data)
    return None if claims is None else _pairs(claims)


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _pairs(values: dict[str, Any]) -> Pairs:
    return [
        {
            "name": clean(name),
            "value": clean(value if isinstance(value, str) else json.dumps(value)),
        }
        for name, value in values.items()
    ]


def clean(text: str) -> str:
    """The text with lone surrogates (from JSON escapes) replaced by U+FFFD, so that UTF-8 can
    encode it."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
