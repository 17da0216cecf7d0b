"""Decodes and encodes any definition in plain Python; it also documents Kafka's encoding.

Every wire type is a pair ``read_x(buf, pos) -> (value, next_pos)`` and ``write_x(out, value)``. The
column kernel (`message_columns`) decodes the same bytes to the same values. This module is its
oracle in tests, and explains single messages.

Values: integers int, bool bool, float64 float, string str (invalid UTF-8 bytes become lone
surrogates, ``surrogateescape``), bytes and records bytes, uuid `uuid.UUID`, arrays list, structs
dict, and None if null is allowed. A dict has exactly the fields of the version. A tagged field that
is not on the wire has its default, and ``_unknown_tags`` is {tag: bytes} if there are any.

Position of a fault (equal in the kernel)
-----------------------------------------
``pos`` is where the faulty value starts, counted in the given buffer:

- bytes end inside a value: its first byte; for a string, bytes, records or array its length or
  count, also if that exceeds the remaining bytes;
- varint overflow: the varint's first byte, also for a length, count, tag or size;
- a negative length (below -1, or null if null is not allowed): the length;
- an element count that the remaining bytes cannot hold (count x smallest element > bytes left),
  also of tags (at least 2 bytes per tag): the count;
- a tag that does not ascend: the tag; a size that exceeds the remaining bytes: the size; a tagged
  field that ends before its size: the first extra byte.

``path`` names the field: ``topics[3].partitions[0].index``. Faults of a count name the array,
without index. Faults of a tag section (count, tag, size) name its struct, "" at the top. A fault
inside a known tagged field, or at its early end, names that field.

The remaining bytes are those of the buffer, or inside a tagged field those of its size.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any
from uuid import UUID

from kdissect.errors import DecodeError, EncodeError
from kdissect.protocol.layout import ENCODING, Layout, Slot, layout
from kdissect.protocol.model import Definition, Type
from kdissect.status import REASONS, Status

UNKNOWN_TAGS = "_unknown_tags"
NO_VALUE: Any = object()  # marks a missing value; None means null

_TAG_SIZE_MIN = 2  # at least a tag and a size

Bytes = bytes | bytearray | memoryview


def _fault(status: Status, pos: int) -> DecodeError:
    return DecodeError(REASONS[status], pos=pos)


# Wire types, read


def _fixed(layout: str) -> Callable[[Bytes, int], tuple[Any, int]]:
    form = struct.Struct(layout)
    size, unpack = form.size, form.unpack_from

    def read(buf: Bytes, pos: int) -> tuple[Any, int]:
        if len(buf) - pos < size:
            raise _fault(Status.TRUNCATED, pos)
        return unpack(buf, pos)[0], pos + size

    return read


read_int8 = _fixed(">b")
read_int16 = _fixed(">h")
read_uint16 = _fixed(">H")
read_int32 = _fixed(">i")
read_uint32 = _fixed(">I")
read_int64 = _fixed(">q")
read_float64 = _fixed(">d")


def read_bool(buf: Bytes, pos: int) -> tuple[bool, int]:
    """Any byte other than zero is true."""
    value, pos = read_int8(buf, pos)
    return value != 0, pos


def read_uuid(buf: Bytes, pos: int) -> tuple[UUID, int]:
    """16 bytes, big-endian. The zero uuid is an ordinary value."""
    if len(buf) - pos < 16:
        raise _fault(Status.TRUNCATED, pos)
    return uuid_of(bytes(buf[pos : pos + 16])), pos + 16


@lru_cache(4096)  # topic ids repeat in most messages
def uuid_of(data: bytes) -> UUID:
    return UUID(bytes=data)


def read_uvarint(buf: Bytes, pos: int) -> tuple[int, int]:
    """An unsigned varint of 32 bits: 7 bits per byte, the low ones first, at most five bytes."""
    if pos < len(buf) and buf[pos] < 0x80:  # most are one byte
        return buf[pos], pos + 1
    value = 0
    for count in range(5):
        if pos + count >= len(buf):
            raise _fault(Status.TRUNCATED, pos)
        byte = buf[pos + count]
        if count == 4 and byte > 0x0F:
            break
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, pos + count + 1
    raise _fault(Status.VARINT_OVERFLOW, pos)


def _read_sized(
    length: int, nullable: bool, buf: Bytes, start: int, pos: int
) -> tuple[bytes | None, int]:
    """`length` bytes at `pos`, None for -1; faults are at `start`, the position of the length."""
    if length < 0:
        if length == -1 and nullable:
            return None, pos
        raise _fault(Status.NEGATIVE_LENGTH, start)
    if length > len(buf) - pos:
        raise _fault(Status.TRUNCATED, start)
    return bytes(buf[pos : pos + length]), pos + length


def read_bytes(buf: Bytes, pos: int, nullable: bool = False) -> tuple[bytes | None, int]:
    """An int32 length and that many bytes; -1 means null. Records have the same form."""
    length, after = read_int32(buf, pos)
    return _read_sized(length, nullable, buf, pos, after)


def read_compact_bytes(buf: Bytes, pos: int, nullable: bool = False) -> tuple[bytes | None, int]:
    """KIP-482: a uvarint of the length + 1, and the bytes; 0 means null."""
    length, after = read_uvarint(buf, pos)
    return _read_sized(length - 1, nullable, buf, pos, after)


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "surrogateescape")


def read_string(buf: Bytes, pos: int, nullable: bool = False) -> tuple[str | None, int]:
    """An int16 length and that many bytes of UTF-8; -1 means null."""
    length, after = read_int16(buf, pos)
    data, pos = _read_sized(length, nullable, buf, pos, after)
    return _text(data), pos


def read_compact_string(buf: Bytes, pos: int, nullable: bool = False) -> tuple[str | None, int]:
    """KIP-482: a uvarint of the length + 1, and the UTF-8; 0 means null."""
    data, pos = read_compact_bytes(buf, pos, nullable)
    return _text(data), pos


def read_count(
    buf: Bytes, pos: int, element_size_min: int, *, compact: bool, nullable: bool = False
) -> tuple[int | None, int]:
    """Number of elements of an array, None for null: int32, or a uvarint of the count + 1.

    A count that the remaining bytes cannot hold, at `element_size_min` bytes per element, is a
    fault.
    """
    if compact:
        count, after = read_uvarint(buf, pos)
        count -= 1
    else:
        count, after = read_int32(buf, pos)
    if count < 0:
        if count == -1 and nullable:
            return None, after
        raise _fault(Status.NEGATIVE_LENGTH, pos)
    if count * element_size_min > len(buf) - after:
        raise _fault(Status.COUNT_IMPOSSIBLE, pos)
    return count, after


def read_presence(buf: Bytes, pos: int, tagged: bool = False) -> tuple[bool, int]:
    """Return whether a nullable struct follows.

    The flag is a byte, negative for null. In a tagged field, Kafka's classes write a uvarint
    instead, 0 for null.
    """
    if tagged:
        value, pos = read_uvarint(buf, pos)
        return value > 0, pos
    value, pos = read_int8(buf, pos)
    return value >= 0, pos


def write_presence(out: bytearray, present: bool, tagged: bool = False) -> None:
    write_int8(out, 1 if present else 0 if tagged else -1)


# Wire types, written


def _fixed_writer(layout: str) -> Callable[[bytearray, Any], None]:
    form = struct.Struct(layout)
    is_float = layout[-1] == "d"

    def write(out: bytearray, value: Any) -> None:
        if is_float and isinstance(value, (int, float)) and not isinstance(value, bool):
            out += form.pack(value)
            return
        if not isinstance(value, int) or isinstance(value, bool):
            raise EncodeError(f"expected a number, not {type(value).__name__}")
        try:
            out += form.pack(value)
        except struct.error:
            raise EncodeError(f"{value} does not fit") from None

    return write


write_int8 = _fixed_writer(">b")
write_int16 = _fixed_writer(">h")
write_uint16 = _fixed_writer(">H")
write_int32 = _fixed_writer(">i")
write_uint32 = _fixed_writer(">I")
write_int64 = _fixed_writer(">q")
write_float64 = _fixed_writer(">d")


def write_bool(out: bytearray, value: Any) -> None:
    if not isinstance(value, bool):
        raise EncodeError(f"expected a bool, not {type(value).__name__}")
    out.append(value)


def write_uuid(out: bytearray, value: Any) -> None:
    if not isinstance(value, UUID):
        raise EncodeError(f"expected a UUID, not {type(value).__name__}")
    out += value.bytes


def write_uvarint(out: bytearray, value: int) -> None:
    """Write the shortest form."""
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _write_length(out: bytearray, length: int, form: Callable[[bytearray, int], None]) -> None:
    """Write a length or count, -1 for null; `form` is `write_uvarint` for the compact form."""
    if form is write_uvarint:
        length += 1
        if length > 0xFFFF_FFFF:
            raise EncodeError(f"{length - 1} is too long")
    form(out, length)


def _write_data(out: bytearray, value: Any, form: Callable[[bytearray, int], None]) -> None:
    if value is None:
        _write_length(out, -1, form)
        return
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise EncodeError(f"expected bytes, not {type(value).__name__}")
    data = bytes(value)
    _write_length(out, len(data), form)
    out += data


def write_bytes(out: bytearray, value: Any) -> None:
    _write_data(out, value, write_int32)


def write_compact_bytes(out: bytearray, value: Any) -> None:
    _write_data(out, value, write_uvarint)


def _encoded(value: Any) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise EncodeError(f"expected a str, not {type(value).__name__}")
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise EncodeError(f"no UTF-8 for {value[error.start]!r}") from None


def write_string(out: bytearray, value: Any) -> None:
    _write_data(out, _encoded(value), write_int16)


def write_compact_string(out: bytearray, value: Any) -> None:
    _write_data(out, _encoded(value), write_uvarint)


# By the number of an encoding (`protocol.layout`): its reader and its writer

_TEXT = (read_string, write_string), (read_compact_string, write_compact_string)
_DATA = (read_bytes, write_bytes), (read_compact_bytes, write_compact_bytes)
_CODECS: dict[Type, tuple[tuple[Any, Any], ...]] = {
    Type.BOOL: ((read_bool, write_bool),) * 2,
    Type.INT8: ((read_int8, write_int8),) * 2,
    Type.INT16: ((read_int16, write_int16),) * 2,
    Type.UINT16: ((read_uint16, write_uint16),) * 2,
    Type.INT32: ((read_int32, write_int32),) * 2,
    Type.UINT32: ((read_uint32, write_uint32),) * 2,
    Type.INT64: ((read_int64, write_int64),) * 2,
    Type.FLOAT64: ((read_float64, write_float64),) * 2,
    Type.UUID: ((read_uuid, write_uuid),) * 2,
    Type.STRING: _TEXT,
    Type.BYTES: _DATA,
    Type.RECORDS: _DATA,
    Type.STRUCT: ((None, None),) * 2,
}
assert [ENCODING[kind] for kind in _CODECS] == list(range(0, 2 * len(_CODECS), 2))
_READERS, _WRITERS = zip(*(pair for pairs in _CODECS.values() for pair in pairs), strict=True)


# Decoding


def decode(
    definition: Definition, version: int, data: Bytes, pos: int = 0
) -> tuple[dict[str, Any], int]:
    """Decode one `definition` at `pos` of `data`; returns (values, position after them).

    Raises DecodeError (path, pos, reason), and ValueError for an unknown version.
    """
    struct_layout = layout(definition, version)
    try:
        return _READER.struct(struct_layout, memoryview(data), pos)
    except DecodeError as error:
        raise DecodeError(
            error.reason, path=error.path, pos=error.pos, message=f"{definition.name} v{version}"
        ) from None


def _within(error: DecodeError, step: str) -> DecodeError:
    """The same fault with `step` added to the front of its path."""
    inner = error.path
    joint = "." if inner and not inner.startswith("[") else ""
    return DecodeError(error.reason, path=step + joint + inner, pos=error.pos)


class Reader:
    """Reads structs field by field; a subclass can note where each value begins and ends."""

    def struct(self, of: Layout, data: memoryview, pos: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        for slot in of.plain:
            try:
                values[slot.name], pos = self.field(slot, data, pos)
            except DecodeError as error:
                raise _within(error, slot.name) from None
        if not of.flexible:
            return values, pos
        tags, unknown, pos = self.tags(of, data, pos)
        for tag, slot in of.tagged.items():
            values[slot.name] = tags[tag] if tag in tags else slot.default()
        if unknown:
            values[UNKNOWN_TAGS] = unknown
        return values, pos

    def field(self, slot: Slot, data: memoryview, pos: int) -> tuple[Any, int]:
        if slot.field.is_array:
            return self._array(slot, data, pos)
        if slot.is_sized:
            return _READERS[slot.encoding](data, pos, slot.nullable)
        if slot.inner is None:
            return _READERS[slot.encoding](data, pos)
        if slot.nullable:
            present, pos = read_presence(data, pos, slot.is_tagged)
            if not present:
                return None, pos
        return self.struct(slot.inner, data, pos)

    def _array(self, slot: Slot, data: memoryview, pos: int) -> tuple[list[Any] | None, int]:
        count, pos = self.count(slot, data, pos)
        if count is None:
            return None, pos
        elements = []
        read = _READERS[slot.encoding]
        for index in range(count):
            try:
                if slot.inner is None:
                    element, pos = read(data, pos)
                else:
                    element, pos = self.element(slot.inner, index, data, pos)
            except DecodeError as error:
                raise _within(error, f"[{index}]") from None
            elements.append(element)
        return elements, pos

    def count(self, slot: Slot, data: memoryview, pos: int) -> tuple[int | None, int]:
        """Read the number of elements of an array."""
        return read_count(
            data, pos, slot.element_size_min, compact=slot.compact, nullable=slot.nullable
        )

    def element(
        self, of: Layout, index: int, data: memoryview, pos: int
    ) -> tuple[dict[str, Any], int]:
        """Read a struct of an array."""
        return self.struct(of, data, pos)

    def tags(
        self, of: Layout, data: memoryview, pos: int
    ) -> tuple[dict[int, Any], dict[int, bytes], int]:
        """(values of known tags, bytes of unknown tags, position after the section)."""
        values: dict[int, Any] = {}
        unknown: dict[int, bytes] = {}
        start = pos
        count, pos = read_uvarint(data, pos)
        if count * _TAG_SIZE_MIN > len(data) - pos:
            raise _fault(Status.COUNT_IMPOSSIBLE, start)
        last = -1
        for _ in range(count):
            first = pos
            tag, pos = read_uvarint(data, pos)
            if tag <= last:
                raise _fault(Status.DUPLICATE_TAG, first)
            last = tag
            start = pos
            size, pos = read_uvarint(data, pos)
            if size > len(data) - pos:
                raise _fault(Status.TRUNCATED, start)
            end = pos + size
            slot = of.tagged.get(tag)
            if slot is None:
                unknown[tag] = self.unknown_tag(tag, data[:end], first, pos)
            else:
                try:
                    values[tag] = self.tag(slot, data[:end], first, pos)
                except DecodeError as error:
                    raise _within(error, slot.name) from None
            pos = end
        return values, unknown, pos

    def tag(self, slot: Slot, data: memoryview, start: int, pos: int) -> Any:
        """Read a tagged field: its tag is at `start`, its value at `pos`; it ends with `data`."""
        value, after = self.field(slot, data, pos)
        if after != len(data):
            raise _fault(Status.TAG_SIZE_MISMATCH, after)
        return value

    def unknown_tag(self, tag: int, data: memoryview, start: int, pos: int) -> bytes:
        return bytes(data[pos:])


_READER = Reader()


# Encoding


def encode(definition: Definition, version: int, values: Mapping[str, Any]) -> bytes:
    """The bytes of `values`, equal to those of Kafka's writer: tagged fields with defaults are
    left out.

    Missing fields are written as their defaults. Raises EncodeError with the field's path, and
    ValueError for an unknown version.
    """
    out = bytearray()
    _write_struct(layout(definition, version), values, out)
    return bytes(out)


def complete(definition: Definition, version: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with every missing field set to its default, at all depths.

    Raises EncodeError for a key that the version does not have.
    """
    return _complete(layout(definition, version), values)


def _outside(error: EncodeError, step: str) -> EncodeError:
    joint = "." if error.path and not error.path.startswith("[") else ""
    return EncodeError(error.reason, path=step + joint + error.path)


def _check_names(struct_layout: Layout, values: Mapping[str, Any]) -> None:
    if not isinstance(values, Mapping):
        raise EncodeError(f"expected a dict, not {type(values).__name__}")
    for name in values:
        if name in struct_layout.by_name or (name == UNKNOWN_TAGS and struct_layout.flexible):
            continue
        reason = f"no field of that name in version {struct_layout.version}"
        raise EncodeError(reason, path=str(name))


def _complete(struct_layout: Layout, values: Mapping[str, Any]) -> dict[str, Any]:
    _check_names(struct_layout, values)
    completed: dict[str, Any] = {}
    for name, slot in struct_layout.by_name.items():
        value = values.get(name, NO_VALUE)
        if value is NO_VALUE:
            value = slot.default()
        elif slot.inner is not None and value is not None:
            try:
                value = _complete_inner(slot, slot.inner, value)
            except EncodeError as error:
                raise _outside(error, name) from None
        completed[name] = value
    if values.get(UNKNOWN_TAGS):
        completed[UNKNOWN_TAGS] = dict(values[UNKNOWN_TAGS])
    return completed


def _complete_inner(slot: Slot, inner: Layout, value: Any) -> Any:
    if not slot.field.is_array:
        return _complete(inner, value)
    if not isinstance(value, (list, tuple)):
        raise EncodeError(f"expected a list, not {type(value).__name__}")
    elements = []
    for index, element in enumerate(value):
        try:
            elements.append(_complete(inner, element))
        except EncodeError as error:
            raise _outside(error, f"[{index}]") from None
    return elements


def _write_struct(struct_layout: Layout, values: Mapping[str, Any], out: bytearray) -> None:
    _check_names(struct_layout, values)
    for slot in struct_layout.plain:
        try:
            value = values.get(slot.name, NO_VALUE)
            _write_field(slot, slot.default() if value is NO_VALUE else value, out)
        except EncodeError as error:
            raise _outside(error, slot.name) from None
    if struct_layout.flexible:
        _write_tags(struct_layout, values, out)


def _write_field(slot: Slot, value: Any, out: bytearray) -> None:
    if value is None and not slot.nullable:
        raise EncodeError("null is not allowed")
    if slot.field.is_array:
        _write_array(slot, value, out)
    elif slot.inner is None:
        _WRITERS[slot.encoding](out, value)
    elif value is None:
        write_presence(out, False, slot.is_tagged)
    else:
        if slot.nullable:
            write_presence(out, True, slot.is_tagged)
        _write_struct(slot.inner, value, out)


def _write_array(slot: Slot, value: Any, out: bytearray) -> None:
    form = write_uvarint if slot.compact else write_int32
    if value is None:
        _write_length(out, -1, form)
        return
    if not isinstance(value, (list, tuple)):
        raise EncodeError(f"expected a list, not {type(value).__name__}")
    _write_length(out, len(value), form)
    for index, element in enumerate(value):
        try:
            if element is None:
                raise EncodeError("null is not allowed")
            if slot.inner is None:
                _WRITERS[slot.encoding](out, element)
            else:
                _write_struct(slot.inner, element, out)
        except EncodeError as error:
            raise _outside(error, f"[{index}]") from None


def _write_tags(struct_layout: Layout, values: Mapping[str, Any], out: bytearray) -> None:
    fields: dict[int, bytes] = {}
    for tag, slot in struct_layout.tagged.items():
        value = values.get(slot.name, NO_VALUE)
        if value is NO_VALUE or _is_default(slot, value):
            continue
        data = bytearray()
        try:
            _write_field(slot, value, data)
        except EncodeError as error:
            raise _outside(error, slot.name) from None
        fields[tag] = bytes(data)
    unknown = values.get(UNKNOWN_TAGS) or {}
    for tag, data in unknown.items():
        if not isinstance(tag, int) or not 0 <= tag <= 0xFFFF_FFFF:
            raise EncodeError(f"{tag!r} is no tag", path=UNKNOWN_TAGS)
        if tag in struct_layout.tagged:
            name = struct_layout.tagged[tag].name
            raise EncodeError(f"tag {tag} is the field {name}", path=UNKNOWN_TAGS)
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise EncodeError(f"expected bytes, not {type(data).__name__}", path=UNKNOWN_TAGS)
        fields[tag] = bytes(data)
    write_uvarint(out, len(fields))
    for tag in sorted(fields):
        write_uvarint(out, tag)
        write_uvarint(out, len(fields[tag]))
        out += fields[tag]


def _is_default(slot: Slot, value: Any) -> bool:
    """Return whether Kafka's writer leaves this tagged field out."""
    if value is None or isinstance(value, float):
        same = slot.default()
        if value is None or same is None:
            return value is same
        # Java compares doubles by value here: NaN differs from every default, -0.0 equals 0.0.
        return not math.isnan(value) and value == same
    if slot.inner is not None and not slot.field.is_array:
        try:
            value = _complete(slot.inner, value)
        except EncodeError:
            return False  # writing it will raise the error
    default = slot.default()
    if isinstance(value, tuple):
        value = list(value)
    return type(value) is type(default) and bool(value == default)
