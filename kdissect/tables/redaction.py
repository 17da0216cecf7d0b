"""Hides secrets by default: passwords, tokens, salts, HMACs, sensitive configuration values.

A rule names a field of an API by its path in the body; list levels are transparent. The value
becomes ``[redacted]`` (bytes: the same in ASCII); null stays null.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.codec.message_codec import UNKNOWN_TAGS
from kdissect.protocol.api_keys import ApiKey

TEXT = "[redacted]"

# (api key, side) -> paths of fields that are always hidden.
ALWAYS_HIDDEN: dict[tuple[int, int], tuple[str, ...]] = {
    (36, 0): ("auth_bytes",),
    (36, 1): ("auth_bytes",),
    (38, 1): ("hmac",),
    (39, 0): ("hmac",),
    (40, 0): ("hmac",),
    (41, 1): ("tokens.hmac",),
    (51, 0): ("upsertions.salt", "upsertions.salted_password"),
    (58, 0): ("request_data",),
    (58, 1): ("response_data",),
}

SECRET_FIELDS = frozenset(
    path.rpartition(".")[2] for paths in ALWAYS_HIDDEN.values() for path in paths
)

# (api key, side) -> (list path, name field, value field, flag field or "") of config entries.
CONFIGS: dict[tuple[int, int], tuple[tuple[str, str, str, str], ...]] = {
    (19, 0): (("topics.configs", "name", "value", ""),),
    (19, 1): (("topics.configs", "name", "value", "is_sensitive"),),
    (32, 1): (
        ("results.configs", "name", "value", "is_sensitive"),
        ("results.configs.synonyms", "name", "value", ""),
    ),
    (33, 0): (("resources.configs", "name", "value", ""),),
    (44, 0): (("resources.configs", "name", "value", ""),),
}

# Metadata records -> fields that are always hidden, and (name field, value field) of a config.
RECORDS_ALWAYS = {"UserScramCredentialRecord": ("salt", "stored_key", "server_key")}
RECORDS_CONFIGS = {"ConfigRecord": ("name", "value")}

# Messages whose bytes may contain secrets; anomalies.data shows [redacted] by default.
SECRET_APIS = frozenset(
    {
        ApiKey.SASL_HANDSHAKE,
        ApiKey.CREATE_TOPICS,
        ApiKey.DESCRIBE_CONFIGS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.SASL_AUTHENTICATE,
        ApiKey.CREATE_DELEGATION_TOKEN,
        ApiKey.RENEW_DELEGATION_TOKEN,
        ApiKey.EXPIRE_DELEGATION_TOKEN,
        ApiKey.DESCRIBE_DELEGATION_TOKEN,
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        ApiKey.ENVELOPE,
    }
)

SENSITIVE_NAME = re.compile(
    r"password|secret|token|jaas|(^|[._-])key($|[._-])|\.key", re.IGNORECASE
)
# names with "key" that contain no key material
_HARMLESS = re.compile(r"key\.(de)?serializer|key\.type|keystore\.(type|location)", re.IGNORECASE)


def is_sensitive_name(name: str) -> bool:
    """Return whether a config's name indicates that its value is a secret."""
    return bool(SENSITIVE_NAME.search(name)) and not _HARMLESS.search(name)


def is_secret(name: str, holder: Mapping[str, Any]) -> bool:
    """Return whether the field `name` of a struct holds a secret: hidden by its own name, or the
    value of a sensitive config."""
    if name in SECRET_FIELDS:
        return True
    config = holder.get("name")
    is_named = name == "value" and isinstance(config, str)
    return is_named and (bool(holder.get("is_sensitive")) or is_sensitive_name(config or ""))


def redact_body(body: pa.StructArray, api_key: int, side: int) -> pa.StructArray:
    """The struct column with the rules of that API and side applied."""
    for path in ALWAYS_HIDDEN.get((api_key, side), ()):
        body = _at(body, path.split("."), _hide_all)
    for path, name, value, flag in CONFIGS.get((api_key, side), ()):

        def hide(
            entries: pa.Array, name: str = name, value: str = value, flag: str = flag
        ) -> pa.Array:
            return _hide_configs(entries, name, value, flag)

        body = _at(body, path.split("."), hide)
    return body


def redact_values(body: dict[str, Any], api_key: int, side: int) -> dict[str, Any]:
    """`redact_body` for one message as plain values, for output as text; changes and returns
    `body`.

    Bytes become a str too. Unknown tags of a message with secrets are hidden as well, because their
    content is unknown.
    """
    always = ALWAYS_HIDDEN.get((api_key, side), ())
    configs = CONFIGS.get((api_key, side), ())
    for path in always:
        *outer, name = path.split(".")
        for holder in holders(body, outer):
            if holder.get(name) is not None:
                holder[name] = TEXT
    for path, name, value, flag in configs:
        for entry in holders(body, path.split(".")):
            sensitive = is_sensitive_name(entry.get(name) or "") or entry.get(flag)
            if sensitive and entry.get(value) is not None:
                entry[value] = TEXT
    if always or configs:
        _hide_tags(body)
    return body


def holders(body: dict[str, Any], path: list[str]) -> list[dict[str, Any]]:
    """The structs at a path; lists on the way stand for all their elements."""
    structs = [body]
    for name in path:
        inner = [one.get(name) for one in structs]
        structs = []
        for each in inner:
            structs += each if isinstance(each, list) else [each] if each is not None else []
    return structs


def _hide_tags(value: Any) -> None:
    if isinstance(value, list):
        for each in value:
            _hide_tags(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name == UNKNOWN_TAGS:
                value[name] = dict.fromkeys(each, TEXT)
            else:
                _hide_tags(each)


def redact_record(value: pa.StructArray, name: str) -> tuple[pa.StructArray, np.ndarray]:
    """(values of metadata records of that name without secrets, bool: value had secrets)."""
    hidden = np.zeros(len(value), np.bool_)
    if name in RECORDS_ALWAYS:
        for path in RECORDS_ALWAYS[name]:
            value = _at(value, [path], _hide_all)
        hidden[:] = True
    elif name in RECORDS_CONFIGS:
        name_field, value_field = RECORDS_CONFIGS[name]
        before = value.field(value_field)
        value = _hide_configs(value, name_field, value_field, "")
        changed = pc.not_equal(before, value.field(value_field)).fill_null(False)
        hidden = changed.to_numpy(zero_copy_only=False)
    return value, hidden


def holds_secrets(name: str) -> bool:
    """Return whether records of that name may contain secrets, so that raw bytes must not be
    shown."""
    return name in RECORDS_ALWAYS or name in RECORDS_CONFIGS


def _at(array: pa.Array, path: list[str], change: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """`array` with `change` applied to the values at `path`, through lists and structs."""
    if pa.types.is_list(array.type):
        inner = _at(array.values, path, change)
        return pa.Array.from_buffers(
            pa.list_(pa.field("item", inner.type)),
            len(array),
            array.buffers()[:2],
            offset=array.offset,
            children=[inner],
        )
    if not path:
        return change(array)
    index = array.type.get_field_index(path[0])
    if index < 0:
        return array
    # field() respects the parent's offset; flatten() would push its nulls into the children
    children = [array.field(i) for i in range(array.type.num_fields)]
    children[index] = _at(children[index], path[1:], change)
    fields = [
        pa.field(array.type[i].name, child.type, array.type[i].nullable)
        for i, child in enumerate(children)
    ]
    mask = array.is_null() if array.null_count else None
    return pa.StructArray.from_arrays(children, fields=fields, mask=mask)


def _hide_all(values: pa.Array) -> pa.Array:
    text = pa.scalar(TEXT.encode() if pa.types.is_binary(values.type) else TEXT, values.type)
    return pc.if_else(values.is_valid(), text, values)


def _hide_configs(entries: pa.Array, name: str, value: str, flag: str) -> pa.Array:
    index = entries.type.get_field_index(value)
    if index < 0:
        return entries
    names = entries.field(entries.type.get_field_index(name)).dictionary_encode()
    by_name = np.array(
        [is_sensitive_name(text or "") for text in names.dictionary.to_pylist()] + [False]
    )
    codes = names.indices.fill_null(len(by_name) - 1).to_numpy(zero_copy_only=False)
    hidden = by_name[codes]
    if flag and entries.type.get_field_index(flag) >= 0:
        flags = entries.field(entries.type.get_field_index(flag)).fill_null(False)
        hidden = hidden | flags.to_numpy(zero_copy_only=False)

    def hide(values: pa.Array) -> pa.Array:
        return pc.if_else(pc.and_(pa.array(hidden), values.is_valid()), TEXT, values)

    return _at(entries, [value], hide)
