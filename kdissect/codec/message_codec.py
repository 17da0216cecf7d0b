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
from typing import Any, TypeVar
from uuid import UUID

from kdissect.errors import DecodeError, EncodeError
from kdissect.protocol.layout import Layout, Slot, layout
from kdissect.protocol.model import Definition
from kdissect.status import REASONS, Status

UNKNOWN_TAGS = "_unknown_tags"
NO_VALUE: Any = object()  # marks a missing value; None means null

_TAG_SIZE_MIN = 2  # at least a tag and a size

Bytes = bytes | bytearray | memoryview
Read = Callable[..., tuple[Any, int]]  # (buf, pos), and whether null is allowed where it may be
Write = Callable[[bytearray, Any], None]


def _fault(status: Status, pos: int) -> DecodeError:
    return DecodeError(REASONS[status], pos=pos)


# Wire types


def _fixed(form: str) -> tuple[Read, Write]:
    """The reader and the writer of a number, by the form that `struct` has for it."""
    packed = struct.Struct(">" + form)

    def read(buf: Bytes, pos: int) -> tuple[Any, int]:
        if len(buf) - pos < packed.size:
            raise _fault(Status.TRUNCATED, pos)
        return packed.unpack_from(buf, pos)[0], pos + packed.size

    def write(out: bytearray, value: Any) -> None:
        kinds = (int, float) if form == "d" else int
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise EncodeError(f"expected a number, not {type(value).__name__}")
        try:
            out += packed.pack(value)
        except struct.error:
            raise EncodeError(f"{value} does not fit") from None

    return read, write


read_int8, write_int8 = _fixed("b")
read_int16, write_int16 = _fixed("h")
read_uint16, write_uint16 = _fixed("H")
read_int32, write_int32 = _fixed("i")
read_int64, write_int64 = _fixed("q")
read_float64, write_float64 = _fixed("d")


def read_bool(buf: Bytes, pos: int) -> tuple[bool, int]:
    """Any byte other than zero is true."""
    value, pos = read_int8(buf, pos)
    return value != 0, pos


def read_uuid(buf: Bytes, pos: int) -> tuple[UUID, int]:
    """16 bytes, big-endian. The zero uuid is an ordinary value."""
    if len(buf) - pos < 16:
        raise _fault(Status.TRUNCATED, pos)
    return UUID(bytes=bytes(buf[pos : pos + 16])), pos + 16


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


def _write_length(out: bytearray, length: int, form: Write) -> None:
    """Write a length or count, -1 for null; `form` is `write_uvarint` for the compact form."""
    if form is write_uvarint:
        length += 1
        if length > 0xFFFF_FFFF:
            raise EncodeError(f"{length - 1} is too long")
    form(out, length)


def _write_data(out: bytearray, value: Any, form: Write) -> None:
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


# By the encoding (`protocol.layout.Slot`)
_CODECS: dict[str, tuple[Read, Write]] = {
    "bool": (read_bool, write_bool),
    "int8": (read_int8, write_int8),
    "int16": (read_int16, write_int16),
    "uint16": (read_uint16, write_uint16),
    "int32": (read_int32, write_int32),
    "int64": (read_int64, write_int64),
    "float64": (read_float64, write_float64),
    "uuid": (read_uuid, write_uuid),
    "string": (read_string, write_string),
    "compact string": (read_compact_string, write_compact_string),
    "bytes": (read_bytes, write_bytes),
    "compact bytes": (read_compact_bytes, write_compact_bytes),
    "records": (read_bytes, write_bytes),
    "compact records": (read_compact_bytes, write_compact_bytes),
}


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
        error.message = f"{definition.name} v{version}"
        raise


Fault = TypeVar("Fault", DecodeError, EncodeError)


def _outside(error: Fault, step: str) -> Fault:
    """The fault with `step` added to the front of its path."""
    joint = "." if error.path and not error.path.startswith("[") else ""
    error.path = step + joint + error.path
    return error


class Reader:
    """Reads structs field by field; a subclass can note where each value begins and ends."""

    def struct(self, of: Layout, data: memoryview, pos: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        for slot in of.plain:
            try:
                values[slot.name], pos = self.field(slot, data, pos)
            except DecodeError as error:
                raise _outside(error, slot.name) from None
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
            return _CODECS[slot.encoding][0](data, pos, slot.nullable)
        if slot.inner is None:
            return _CODECS[slot.encoding][0](data, pos)
        if slot.nullable:
            # a byte, negative for null; in a tagged field a uvarint, 0 for null
            presence, pos = read_uvarint(data, pos) if slot.is_tagged else read_int8(data, pos)
            if presence < slot.is_tagged:
                return None, pos
        return self.struct(slot.inner, data, pos)

    def _array(self, slot: Slot, data: memoryview, pos: int) -> tuple[list[Any] | None, int]:
        count, pos = self.count(slot, data, pos)
        if count is None:
            return None, pos
        elements = []
        for index in range(count):
            try:
                if slot.inner is None:
                    element, pos = _CODECS[slot.encoding][0](data, pos)
                else:
                    element, pos = self.element(slot.inner, index, data, pos)
            except DecodeError as error:
                raise _outside(error, f"[{index}]") from None
            elements.append(element)
        return elements, pos

    def count(self, slot: Slot, data: memoryview, pos: int) -> tuple[int | None, int]:
        """Read the number of elements of an array, None for null: int32, or a uvarint of the
        count + 1.

        A count that the remaining bytes cannot hold is a fault.
        """
        if slot.compact:
            number, after = read_uvarint(data, pos)
            number -= 1
        else:
            number, after = read_int32(data, pos)
        if number < 0:
            if number == -1 and slot.nullable:
                return None, after
            raise _fault(Status.NEGATIVE_LENGTH, pos)
        if number * slot.element_size_min > len(data) - after:
            raise _fault(Status.COUNT_IMPOSSIBLE, pos)
        return number, after

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
                    raise _outside(error, slot.name) from None
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
        _CODECS[slot.encoding][1](out, value)
    else:
        if slot.nullable:
            write_int8(out, 1 if value is not None else 0 if slot.is_tagged else -1)
        if value is not None:
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
                _CODECS[slot.encoding][1](out, element)
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
