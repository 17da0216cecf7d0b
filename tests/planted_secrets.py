"""A capture with the same secret in each field of each definition that may hold one.

The list of fields is this module's own, by name and from Kafka's documentation. `unclassified`
finds fields of new definitions that sound like a secret and that nobody has judged yet.
"""

import base64
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from kdissect.protocol import catalog
from kdissect.protocol.model import SIDES, Definition, Field, Type
from tests.builders.messages import Exchange, batch, exchange, fetch, metadata_record, write_capture

SECRET = b"Correct/Horse+Battery-Staple=0123456789abcdefghijklmnopqrstuvwxyz"
SHOWN_MAX = 12  # so many bytes of it in a row are a leak
_FIELDS = frozenset({
    "auth_bytes", "hmac", "salt", "salted_password", "stored_key", "server_key",
    "request_data", "response_data",
})  # fmt: skip
_SOUNDS = re.compile("secret|passw|token|hmac|salt|auth|key$|proof|cred")
_HARMLESS = frozenset({
    "token_id", "token_requester_principal_type", "token_requester_principal_name",
    "key",  # of a coordinator, of a pair of names
})  # fmt: skip
_HANDSHAKE, _SCRAM, _SNAPSHOT_TOPIC = 17, 51, "__cluster_metadata"


@cache
def spellings() -> tuple[bytes, ...]:
    """The first bytes of the secret as they are, in hexadecimal digits, and in base64."""
    part = SECRET[:SHOWN_MAX]
    shifted = (base64.b64encode(bytes(shift) + SECRET[: SHOWN_MAX - shift]) for shift in (0, 1, 2))
    return part, part.hex().encode(), part.hex(" ").encode(), *(one[4:16] for one in shifted)


def _is_config(fields: tuple[Field, ...]) -> bool:
    texts = {field.name for field in fields if field.type is Type.STRING}
    return {"name", "value"} <= texts


def _filled(fields: tuple[Field, ...], version: int) -> dict[str, Any]:
    """Values of these fields with the secret at every place for one; {} if there is none."""
    values: dict[str, Any] = {}
    present = [field for field in fields if version in field.versions]
    for field in present:
        value: Any = None
        if field.name in _FIELDS:
            value = SECRET
        elif field.fields:
            value = _structs(field, version)
        if value:
            values[field.name] = value
    return values


def _structs(field: Field, version: int) -> Any:
    values = _filled(field.fields, version)
    if not _is_config(field.fields):
        return [values] if values and field.is_array else values
    named = {**values, "name": "ssl.keystore.password", "value": SECRET.decode()}
    has_flag = any(one.name == "is_sensitive" and version in one.versions for one in field.fields)
    flagged = {**values, "name": "some.plugin", "value": SECRET.decode(), "is_sensitive": True}
    return [named, flagged] if has_flag else [named]


@cache
def secret_messages() -> list[tuple[int, int, int]]:
    """(API, version, side) of the first and last version of each message with a secret."""
    found = []
    for key, api in catalog.apis().items():
        for side, name in enumerate(SIDES):
            definition = api.side(name)
            for version in sorted({definition.versions.first, definition.versions.last}):
                if _filled(definition.fields, version):
                    found.append((key, version, side))
    return found


def body(api_key: int, version: int, side: int) -> dict[str, Any]:
    """A body of that message with the secret in every field for one."""
    return _filled(catalog.api(api_key).side(SIDES[side]).fields, version)


def exchanges() -> Iterator[Exchange]:
    """Exchanges with secrets on one side: plain, with an unknown tag, with bytes after their end,
    and cut within the body."""
    number = 0
    for api_key, version, side in secret_messages():
        values = body(api_key, version, side)
        definition = catalog.api(api_key).side(SIDES[side])
        tagged = {**values, "_unknown_tags": {4321: SECRET}}
        for kind in range(4):
            chosen = tagged if kind == 1 and version in definition.flexible else values
            frames = list(exchange(number, api_key, version, *_pair(side, chosen)))
            if kind == 2:
                frames[side] += SECRET
            elif kind == 3:
                frames[side] = frames[side][:-3]
            number += 1
            yield frames[0], frames[1]
    yield from _within_others(number)


def _pair(side: int, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return ({}, values) if side else (values, {})


def _within_others(number: int) -> Iterator[Exchange]:
    """Secrets inside an Envelope, in records of the metadata log, and in tokens."""
    inner, _ = exchange(number, _SCRAM, 0, body(_SCRAM, 0, 0), {})
    yield exchange(number, 58, 0, {"request_data": inner, "client_host_address": bytes(4)}, {})
    scram = metadata_record(
        "UserScramCredentialRecord", name="alice", mechanism=1, salt=SECRET, stored_key=SECRET,
        server_key=SECRET,
    )  # fmt: skip
    config = metadata_record(
        "ConfigRecord", resource_type=4, resource_name="1", name="sasl.jaas.config",
        value=SECRET.decode(),
    )  # fmt: skip
    records = batch([(b"", scram), (b"", config), (b"", scram[:-3])])
    yield fetch(number + 1, _SNAPSHOT_TOPIC, [records])
    for at, token in enumerate(_tokens()):
        yield exchange(number + 2 + at, 36, 2, {"auth_bytes": token}, {"auth_bytes": token})


def _tokens() -> list[bytes]:
    text = base64.b64encode(SECRET)
    return [
        b"\0alice\0" + SECRET,
        b"c=biws,r=abcdef,p=" + text,
        b"v=" + text,
        b"n,,\x01auth=Bearer " + text + b"." + text + b"." + text + b"\x01\x01",
    ]


def write_secrets(path: Path) -> Path:
    """The capture. Another connection has a raw token after a SaslHandshake v0.

    Each API has a connection of its own, since brokers' own connections are not replayed.
    """
    made = list(exchanges())
    ports = [50000 + int.from_bytes(request[:2], "big") for request, _ in made]
    handshake = exchange(9999, _HANDSHAKE, 0, {"mechanism": "PLAIN"}, {"mechanisms": ["PLAIN"]})
    raw = [handshake, (b"\0alice\0" + SECRET, b"")]
    return write_capture(path, made + raw, ports=[*ports, 49999, 49999])


def definitions() -> Iterator[tuple[str, Definition]]:
    """All definitions of messages and of records, by name."""
    for api in catalog.apis().values():
        yield api.request.name, api.request
        yield api.response.name, api.response
    yield from catalog.record_definitions().items()


def unclassified() -> list[str]:
    """Texts and bytes whose name sounds like a secret, and about which nobody has decided."""

    def walk(name: str, fields: tuple[Field, ...]) -> Iterator[str]:
        for field in fields:
            is_data = field.type in (Type.STRING, Type.BYTES)
            if is_data and _SOUNDS.search(field.name) and field.name not in _FIELDS | _HARMLESS:
                yield f"{name} {field.name}"
            yield from walk(name, field.fields)

    return [each for name, definition in definitions() for each in walk(name, definition.fields)]
