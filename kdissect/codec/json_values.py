"""Values of `decode_message` as JSON."""

from __future__ import annotations

import base64
import json
import math
from typing import Any
from uuid import UUID

from kdissect.protocol.model import Definition, Field, Type


def to_json(values: Any) -> str:
    """One line of JSON; `jsonable` has the types."""
    return json.dumps(jsonable(values), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def jsonable(value: Any) -> Any:
    """The value in types that JSON has.

    Bytes become base64, uuids Kafka's form (22 characters of URL-safe base64), tags strings,
    non-finite floats names. Bytes that are no UTF-8 become U+FFFD.
    """
    if isinstance(value, dict):
        return {str(name): jsonable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [jsonable(inner) for inner in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, UUID):
        return base64.urlsafe_b64encode(value.bytes).decode("ascii").rstrip("=")
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def without_records(definition: Definition, values: dict[str, Any]) -> dict[str, Any]:
    """A copy of a body's values with null in place of record data, at any depth."""
    return _without_records(definition.fields, values)


def _without_records(fields: tuple[Field, ...], values: dict[str, Any]) -> dict[str, Any]:
    changed = dict(values)
    for one in fields:
        value = changed.get(one.name)
        if value is None:
            continue
        if one.type is Type.RECORDS:
            changed[one.name] = None
        elif one.type is Type.STRUCT and isinstance(value, list):
            changed[one.name] = [_without_records(one.fields, inner) for inner in value]
        elif one.type is Type.STRUCT:
            changed[one.name] = _without_records(one.fields, value)
    return changed
