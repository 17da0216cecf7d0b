"""A decoder written out in Python for one message at one version: what the kernel is beside.

Kept to what makes generated code fast: no definition is looked at while decoding, neighbouring
values of fixed width are read by one `struct` call, structs become tuples. It checks nothing that
`struct` does not check itself, which favours it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from kdissect.protocol.model import Definition, Field, Type

FORMATS = {
    Type.BOOL: "?",
    Type.INT8: "b",
    Type.INT16: "h",
    Type.UINT16: "H",
    Type.INT32: "i",
    Type.UINT32: "I",
    Type.INT64: "q",
    Type.FLOAT64: "d",
    Type.UUID: "16s",
}


def _uvarint(buf: bytes, pos: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = buf[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos
        shift += 7


class _Writer:
    def __init__(self, definition: Definition, api_version: int) -> None:
        self.api_version = api_version
        self.flexible = api_version in definition.flexible
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"uvarint": _uvarint}
        self.count = 0

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def line(self, indent: int, text: str) -> None:
        self.lines.append("    " * indent + text)

    def struct(self, fields: tuple[Field, ...], indent: int) -> str:
        """Code that reads the fields; returns the expression of the struct's value."""
        values: list[str] = []
        run: list[tuple[str, str]] = []

        def flush() -> None:
            if run:
                reader = struct.Struct(">" + "".join(kind for _, kind in run))
                unpack = self.name("unpack")
                self.names[unpack] = reader.unpack_from
                self.line(indent, f"{''.join(f'{n}, ' for n, _ in run)}= {unpack}(buf, pos)")
                self.line(indent, f"pos += {reader.size}")
                run.clear()

        for field in fields:
            if self.api_version not in field.versions or self.api_version in field.tagged:
                continue
            value = self.name("v")
            values.append(value)
            if not field.is_array and field.type in FORMATS:
                run.append((value, FORMATS[field.type]))
                continue
            flush()
            self.variable(field, value, indent)
        flush()
        if self.flexible:
            self.tags(indent)
        return f"({''.join(f'{value}, ' for value in values)})"

    def length(self, field: Field, value: str, indent: int) -> None:
        if self.flexible and not field.never_flexible:
            self.line(indent, f"{value}, pos = uvarint(buf, pos)")
            self.line(indent, f"{value} -= 1")
            return
        is_short = field.type is Type.STRING and not field.is_array
        reader = struct.Struct(">h" if is_short else ">i")
        unpack = self.name("unpack")
        self.names[unpack] = reader.unpack_from
        self.line(indent, f"{value}, = {unpack}(buf, pos)")
        self.line(indent, f"pos += {reader.size}")

    def variable(self, field: Field, value: str, indent: int) -> None:
        if field.is_array:
            size, item = self.name("n"), self.name("item")
            self.length(field, size, indent)
            self.line(indent, f"{value} = []")
            self.line(indent, f"for _ in range({size}):")
            if field.type is Type.STRUCT:
                self.line(indent + 1, f"{item} = {self.struct(field.fields, indent + 1)}")
            elif field.type in FORMATS:
                reader = struct.Struct(">" + FORMATS[field.type])
                unpack = self.name("unpack")
                self.names[unpack] = reader.unpack_from
                self.line(indent + 1, f"{item}, = {unpack}(buf, pos)")
                self.line(indent + 1, f"pos += {reader.size}")
            else:
                self.text(field, item, indent + 1)
            self.line(indent + 1, f"{value}.append({item})")
        elif field.type is Type.STRUCT:
            if self.api_version in field.nullable:
                self.line(indent, f"{value} = None")
                self.line(indent, "pos += 1")
                self.line(indent, "if buf[pos - 1] < 128:")
                indent += 1
            self.line(indent, f"{value} = {self.struct(field.fields, indent)}")
        else:
            self.text(field, value, indent)

    def text(self, field: Field, value: str, indent: int) -> None:
        size = self.name("n")
        plain = Field(field.name, field.type, field.versions, never_flexible=field.never_flexible)
        self.length(plain, size, indent)
        self.line(indent, f"if {size} < 0:")
        self.line(indent + 1, f"{value} = None")
        self.line(indent, "else:")
        decode = ".decode()" if field.type is Type.STRING else ""
        self.line(indent + 1, f"{value} = buf[pos:pos + {size}]{decode}")
        self.line(indent + 1, f"pos += {size}")

    def tags(self, indent: int) -> None:
        count, size = self.name("n"), self.name("n")
        self.line(indent, f"{count}, pos = uvarint(buf, pos)")
        self.line(indent, f"for _ in range({count}):")
        self.line(indent + 1, "_, pos = uvarint(buf, pos)")
        self.line(indent + 1, f"{size}, pos = uvarint(buf, pos)")
        self.line(indent + 1, f"pos += {size}")


def generate(definition: Definition, api_version: int) -> Callable[[bytes, int], tuple[Any, int]]:
    """decode(body, pos) -> (tuple of values, next pos) of a definition at one version.

    Tagged fields are stepped over, not decoded (which favours it again).
    """
    writer = _Writer(definition, api_version)
    value = writer.struct(definition.fields, 1)
    source = "\n".join(["def decode(buf, pos):", *writer.lines, f"    return {value}, pos"])
    exec(compile(source, f"{definition.name} v{api_version}", "exec"), writer.names)
    decode: Callable[[bytes, int], tuple[Any, int]] = writer.names["decode"]
    return decode
