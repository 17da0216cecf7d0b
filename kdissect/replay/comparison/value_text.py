"""Values of messages as text for people, short."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from kdissect.replay.batch_headers import headers

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


def element_text(element: dict[str, Any]) -> str:
    fields = (
        f"{name}={text_of(value)}"
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
