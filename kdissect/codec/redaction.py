"""Hides secrets: passwords, tokens, salts, HMACs, values of sensitive configs.

A field of a secret name is secret (`SECRET_FIELDS`), and so is the value of a config that is
sensitive (`is_sensitive_name`). Secrets are strings or bytes. A name means the same in all
definitions. A secret becomes ``[redacted]``, bytes the same in ASCII; null stays null.

- Tables: `redact_column`; messages inside an Envelope, which become JSON, `redact_body`.
- Bytes of anomalies: ``[redacted]`` for `secret_apis`, records with secrets, and bytes of a stream
  that are in no message.
- The trees of `show`, and the differences of `replay`: they ask `is_secret` for each field.
- Saved replays: `redact_frame`. `extract --anonymize` has a table of fields of its own.
- The state that an append saves: no bytes of an open exchange of `secret_apis`, or of one that
  returns records of the metadata log (`resume.progress`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Bools
from kdissect.codec.message import decode_message, encode_message
from kdissect.codec.message_codec import UNKNOWN_TAGS
from kdissect.codec.nested_columns import with_fields, with_values
from kdissect.errors import DecodeError, EncodeError
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import SIDES, Field, Type

TEXT = "[redacted]"
_BYTES = TEXT.encode()

# Fields that hold a secret in every definition and in every embedded token.
SECRET_FIELDS = frozenset(
    {
        "auth_bytes",  # SaslAuthenticate: a token of any mechanism
        "hmac",  # of a delegation token (KIP-48)
        "salt", "salted_password", "stored_key", "server_key",  # SCRAM credentials (KIP-554)
        "request_data", "response_data",  # Envelope (KIP-590): another message and its secrets
        "password", "proof", "server_signature", "token",  # of a token that was decoded
    }
)  # fmt: skip
# A struct with these two texts is a config, a claim or an extension of a token.
_NAME, _VALUE, _FLAG = "name", "value", "is_sensitive"

# Kafka's configs of type PASSWORD and the usual words for a secret. `key` is a word by itself, but
# for the classes that read and write keys. KIP-48: `tokenauth` says that the user is a token's id.
_SENSITIVE = re.compile(
    r"password|passwd|passphrase|secret|credentials?$|jaas|user\.info|token(?!auth$)|api_?key"
    r"|certificate\.chain|truststore\.certificates"
    r"|(^|[._-])key($|[._-])(?!(de)?serializer|converter|type)",
    re.IGNORECASE,
)


def is_sensitive_name(name: str) -> bool:
    """Return whether a config's name indicates that its value is a secret."""
    return bool(_SENSITIVE.search(name))


def is_secret(name: str, holder: Mapping[str, Any]) -> bool:
    """Return whether the field `name` of a struct holds a secret: by its own name, or as the value
    of a config that the broker or the config's name calls sensitive."""
    if name in SECRET_FIELDS:
        return True
    config = holder.get(_NAME)
    if name != _VALUE or not isinstance(config, str):
        return False
    return bool(holder.get(_FLAG)) or is_sensitive_name(config)


# -- definitions ----------------------------------------------------------------------------


def _may_hold(fields: tuple[Field, ...]) -> bool:
    names = {field.name for field in fields if field.type in (Type.STRING, Type.BYTES)}
    is_here = not SECRET_FIELDS.isdisjoint(names) or {_NAME, _VALUE} <= names
    return is_here or any(_may_hold(field.fields) for field in fields)


@cache
def may_hold_secrets(api_key: int, side: int) -> bool:
    """Return whether messages of that API and side have fields for secrets."""
    return api_key in catalog.apis() and _may_hold(catalog.api(api_key).side(SIDES[side]).fields)


@cache
def secret_apis() -> frozenset[int]:
    """APIs whose bytes may hold secrets. After a SaslHandshake v0, tokens without header follow."""
    found = {key for key in catalog.apis() for side in (0, 1) if may_hold_secrets(key, side)}
    return frozenset({*found, ApiKey.SASL_HANDSHAKE})


@cache
def record_may_hold_secrets(name: str) -> bool:
    """Return whether records of that definition (``ConfigRecord``) have fields for secrets."""
    definition = catalog.record_definitions().get(name)
    return definition is not None and _may_hold(definition.fields)


# -- decoded messages and frames ------------------------------------------------------------


def _redacted(value: Any, hidden: str | bytes, hides_tags: bool, hides_empty: bool) -> Any:
    """A copy of decoded values with `hidden` instead of secret bytes, and text instead of texts.

    hides_tags: replace the unknown tags as well, since nobody knows what they hold. hides_empty:
    replace empty secrets.
    """
    if isinstance(value, list):
        return [_redacted(each, hidden, hides_tags, hides_empty) for each in value]
    if not isinstance(value, dict):
        return value
    copy: dict[Any, Any] = {}
    for name, inner in value.items():
        if name == UNKNOWN_TAGS:
            copy[name] = dict.fromkeys(inner, hidden) if hides_tags else dict(inner)
        elif (inner or (hides_empty and inner is not None)) and is_secret(name, value):
            copy[name] = TEXT if isinstance(inner, str) else hidden
        else:
            copy[name] = _redacted(inner, hidden, hides_tags, hides_empty)
    return copy


def redact_body(body: dict[str, Any], api_key: int, side: int) -> dict[str, Any]:
    """A copy of a message's body without secrets, for output as text."""
    copy: dict[str, Any] = _redacted(
        body, TEXT, hides_tags=may_hold_secrets(api_key, side), hides_empty=True
    )
    return copy


def redact_frame(frame: bytes, api_key: int, api_version: int, side: int) -> bytes | None:
    """The frame without secrets: `frame` itself if there is none; None if it may hold some, but
    cannot be decoded."""
    if not may_hold_secrets(api_key, side):
        return frame
    try:
        message = decode_message(frame, side=SIDES[side], api_key=api_key, api_version=api_version)
        body = _redacted(message.body, _BYTES, hides_tags=True, hides_empty=False)
        if body == message.body and not message.surplus:
            return frame
        message.body, message.surplus = body, b""
        return encode_message(message)
    except (DecodeError, EncodeError, ValueError):
        return None


# -- Arrow columns --------------------------------------------------------------------------


def redact_column(column: pa.Array) -> pa.Array:
    """The column of structs, at any depth of lists, without secrets."""
    kind = column.type
    if not _has_secrets(kind):
        return column
    if pa.types.is_list(kind):
        return with_values(column, redact_column(column.flatten()))
    columns = {name: redact_column(column.field(name)) for name in kind.names}
    for name in SECRET_FIELDS.intersection(kind.names):
        columns[name] = _hidden(columns[name])
    if _is_config(kind):
        columns[_VALUE] = _hidden(columns[_VALUE], sensitive_configs(column))
    return with_fields(column, columns)


def hide_tags(tags: pa.ListArray) -> pa.ListArray:
    """A list<struct<path, tag, data>> of unknown tags without their data."""
    entries = tags.flatten()
    return with_values(tags, with_fields(entries, {"data": _hidden(entries.field("data"))}))


def secret_rows(column: pa.StructArray) -> Bools:
    """bool[n]: rows whose struct itself has a secret, not one within its lists and structs."""
    found = np.zeros(len(column), np.bool_)
    for name in SECRET_FIELDS.intersection(column.type.names):
        found |= column.field(name).is_valid().to_numpy(zero_copy_only=False)
    if _is_config(column.type):
        has_value = column.field(_VALUE).is_valid().to_numpy(zero_copy_only=False)
        found |= sensitive_configs(column) & has_value
    return found


@cache
def _has_secrets(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return _has_secrets(kind.value_type)
    if not pa.types.is_struct(kind):
        return False
    is_here = not SECRET_FIELDS.isdisjoint(kind.names) or _is_config(kind)
    return is_here or any(_has_secrets(field.type) for field in kind)


def _is_config(kind: pa.StructType) -> bool:
    return all(
        kind.get_field_index(name) >= 0 and pa.types.is_string(kind.field(name).type)
        for name in (_NAME, _VALUE)
    )


def sensitive_configs(entries: pa.StructArray) -> Bools:
    """bool[n]: entries whose value is a secret, by the broker's flag or by their name."""
    names = entries.field(_NAME).dictionary_encode()
    by_name = np.array([is_sensitive_name(each or "") for each in names.dictionary.to_pylist()])
    codes = names.indices.fill_null(len(by_name)).to_numpy(zero_copy_only=False)
    found: Bools = np.append(by_name, False).astype(np.bool_)[codes]
    if entries.type.get_field_index(_FLAG) >= 0:
        found = found | entries.field(_FLAG).fill_null(False).to_numpy(zero_copy_only=False)
    return found


def _hidden(values: pa.Array, chosen: Bools | None = None) -> pa.Array:
    """The values with [redacted] for those chosen (default: all) that are not null."""
    is_hidden = values.is_valid()
    if chosen is not None:
        is_hidden = pc.and_(is_hidden, pa.array(chosen))
    text = pa.scalar(_BYTES if pa.types.is_binary(values.type) else TEXT, values.type)
    return pc.if_else(is_hidden, text, values)
