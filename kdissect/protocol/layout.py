"""Layouts: the fields that one version of a definition has, in wire order, and their sizes.

The plain codec (`codec.message_codec`) and the compiler of column plans (`column_plan`) follow the
same layouts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kdissect.protocol.model import Definition, Field, Type

# Encoded bytes of values with a fixed size.
FIXED_SIZE = {
    Type.BOOL: 1,
    Type.INT8: 1,
    Type.INT16: 2,
    Type.UINT16: 2,
    Type.INT32: 4,
    Type.INT64: 8,
    Type.FLOAT64: 8,
    Type.UUID: 16,
}
# Bytes of the length of others; KIP-482: a compact length has at least one.
_LENGTH_SIZE = {Type.STRING: 2, Type.BYTES: 4, Type.RECORDS: 4}
_EMPTY: dict[Type, Any] = {Type.STRING: "", Type.BYTES: b"", Type.RECORDS: b""}


class Layout:
    """The fields of one struct in one version.

    plain: fields in wire order. tagged: tag -> field. size_min: fewest bytes of an instance.
    """

    __slots__ = ("by_name", "flexible", "plain", "size_min", "tagged", "version")

    def __init__(self, fields: tuple[Field, ...], version: int, flexible: bool) -> None:
        slots = [Slot(one, version, flexible) for one in fields if version in one.versions]
        self.version = version
        self.flexible = flexible
        self.by_name = {slot.name: slot for slot in slots}
        self.plain = [slot for slot in slots if not slot.is_tagged]
        self.tagged = {slot.field.tag: slot for slot in slots if slot.is_tagged}
        self.size_min = sum(slot.size_min for slot in self.plain) + flexible

    def defaults(self) -> dict[str, Any]:
        """Every field of the version with its default."""
        return {name: slot.default() for name, slot in self.by_name.items()}


class Slot:
    """One field in one version.

    encoding: of its values, or of an array's elements: the type, after "compact" if it is that.
    is_sized: a value with a length of its own, which may be null. inner: of a struct. size_min,
    element_size_min: fewest bytes of the field, and of an element of an array. An element has at
    least one, so that the remaining bytes bound a count.
    """

    __slots__ = (
        "compact",
        "element_size_min",
        "encoding",
        "field",
        "inner",
        "is_sized",
        "is_tagged",
        "name",
        "nullable",
        "size_min",
    )

    size_min: int

    def __init__(self, field: Field, version: int, flexible: bool) -> None:
        self.field = field
        self.name = field.name
        self.nullable = version in field.nullable
        self.is_tagged = flexible and version in field.tagged
        self.compact = flexible and not field.never_flexible
        is_short = self.compact and field.type in _LENGTH_SIZE
        self.encoding = f"compact {field.type.value}" if is_short else field.type.value
        self.is_sized = field.type in _LENGTH_SIZE and not field.is_array
        self.inner = Layout(field.fields, version, flexible) if field.type is Type.STRUCT else None
        if self.inner is not None:
            size = self.inner.size_min
        elif field.type in _LENGTH_SIZE:
            size = 1 if self.compact else _LENGTH_SIZE[field.type]
        else:
            size = FIXED_SIZE[field.type]
        self.element_size_min = max(size, 1)
        if field.is_array:
            size = 1 if self.compact else 4
        elif self.nullable and self.inner is not None:
            size = 1
        self.size_min = size

    def default(self) -> Any:
        """A fresh default; null only if this version allows it."""
        value = self.field.default
        if value is not None and value != ():
            return value
        if value is None and self.nullable:
            return None
        if self.field.is_array:
            return []
        if self.inner is not None:
            return self.inner.defaults()
        return _EMPTY[self.field.type]


@cache
def layout(definition: Definition, version: int) -> Layout:
    """The top struct of `definition` in `version`. Raises ValueError for an unknown version."""
    if version not in definition.versions:
        raise ValueError(f"{definition.name} has no version {version}")
    return Layout(definition.fields, version, version in definition.flexible)
