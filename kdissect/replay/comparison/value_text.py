"""Values of messages as text for people, short."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from kdissect.codec.redaction import TEXT, is_secret
from kdissect.replay.batch_headers import headers
from kdissect.replay.model import DroppedField

_TEXT_MAX = 200


def text_of(value: Any, null: str = "null") -> str:
    """A value as text for people, short."""
    if value is None:
        return null
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        if not value:
            return ""
        text = value[:24].hex()
        return text if len(value) <= 24 else f"{text}... ({len(value)} bytes)"
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, list):
        text = "[" + ", ".join(text_of(each) for each in value[:20]) + "]"
        text = text if len(value) <= 20 else f"{text[:-1]}, ... {len(value)} in all]"
    elif isinstance(value, dict):
        text = element_text(value)
    else:
        text = str(value)
    return text if len(text) <= _TEXT_MAX else text[:_TEXT_MAX] + "..."


def field_text(name: str, value: Any, *holders: Mapping[str, Any]) -> str:
    """The value of a field as text for people, without a secret. holders: the structs that have
    the field, of the captured and of the answered message."""
    if value is not None and any(is_secret(name, holder) for holder in holders or ({},)):
        return TEXT
    return text_of(value)


def config_text(name: str, value: str) -> str:
    """The value of a config as text for people, without a secret."""
    return field_text("value", value, {"name": name})


def dropped_text(field: DroppedField) -> str:
    """The value that a request of another version lacks."""
    return field_text(field.path.rpartition(".")[2], field.value)


def element_text(element: dict[str, Any]) -> str:
    fields = (
        f"{name}={field_text(name, value, element)}"
        for name, value in element.items()
        if not isinstance(value, (dict, list, bytes))
    )
    return "{" + ", ".join(fields) + "}"


def records_text(data: bytes) -> str:
    whole = [each for each in headers(data) if not each.is_partial]
    if not whole:
        return "no records"
    count = sum(max(each.record_count, 0) for each in whole)
    return f"{count} records, offsets {whole[0].base_offset} to {whole[-1].last_offset}"
