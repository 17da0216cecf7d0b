"""A message as a tree whose nodes know their bytes, also as far as a faulty one can be read.

The walk follows `codec.message_codec` field by field, with its readers, and notes where each began
and ended. A fault ends the walk: the nodes before it stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kdissect.codec.message_codec import (
    UNKNOWN_TAGS,
    read_count,
    read_presence,
    read_uvarint,
    read_value,
)
from kdissect.errors import DecodeError
from kdissect.protocol.layout import Layout, Slot, layout
from kdissect.protocol.model import Definition, Field, Type

Path = tuple[str | int, ...]
TAG_COUNT = "tagged fields"  # what stands in front of them


@dataclass(slots=True)
class Node:
    """A field: `path` from the message's start (names and indices), its bytes [start, end), and
    its value where it is no struct and no list of structs.

    is_default: a tagged field that is not there. count: of a list or map; None for others.
    """

    path: Path
    start: int
    end: int
    value: Any = None
    is_leaf: bool = False
    is_default: bool = False
    count: int | None = None
    is_records: bool = False
    definition: Field | None = None  # of the field, where it has one of its own

    @property
    def name(self) -> str:
        last = self.path[-1]
        return f"[{last}]" if isinstance(last, int) else last

    @property
    def depth(self) -> int:
        return len(self.path)


@dataclass(slots=True)
class ByteTree:
    """nodes in the order of their bytes; error: where it ended, if it did not reach the end."""

    data: memoryview
    nodes: list[Node] = field(default_factory=list)
    error: DecodeError | None = None

    def message(
        self, name: str, definition: Definition, version: int, pos: int
    ) -> tuple[dict[str, Any], int]:
        """Walk one definition as the member `name`; its values (what there is) and the end."""
        values: dict[str, Any] = {}
        node = self._open((name,), pos)
        if self.error is None:
            try:
                pos = self._struct(layout(definition, version), values, (name,), pos)
            except DecodeError as error:
                self.error = error
                pos = error.pos if error.pos is not None else pos
        node.end = pos
        return values, pos

    def _open(self, path: Path, pos: int, count: int | None = None) -> Node:
        node = Node(path, pos, pos, count=count)
        self.nodes.append(node)
        return node

    def _struct(self, made: Layout, values: dict[str, Any], path: Path, pos: int) -> int:
        for slot in made.plain:
            values[slot.name], pos = self._field(slot, (*path, slot.name), pos, values)
        if not made.flexible:
            return pos
        return self._tags(made, values, path, pos)

    def _field(
        self, slot: Slot, path: Path, pos: int, owner: dict[str, Any], tagged_end: int | None = None
    ) -> tuple[Any, int]:
        data = self.data if tagged_end is None else self.data[:tagged_end]
        if slot.field.is_array:
            return self._array(slot, path, pos, data, owner)
        if slot.inner is None:
            start = pos
            value, pos = read_value(slot, data, pos)
            is_records = slot.field.type is Type.RECORDS
            node = Node(path, start, pos, value, True, False, None, is_records, slot.field)
            self.nodes.append(node)
            return value, pos
        node = self._open(path, pos)
        if slot.nullable:
            present, pos = read_presence(data, pos, slot.is_tagged)
            if not present:
                node.end, node.is_leaf = pos, True
                return None, pos
        values: dict[str, Any] = {}
        owner[slot.name] = values
        pos = self._struct(slot.inner, values, path, pos)
        node.end = pos
        return values, pos

    def _array(
        self, slot: Slot, path: Path, pos: int, data: memoryview, owner: dict[str, Any]
    ) -> tuple[list[Any] | None, int]:
        node = self._open(path, pos)
        count, pos = read_count(
            data, pos, slot.element_size_min, compact=slot.compact, nullable=slot.nullable
        )
        if count is None:
            node.end, node.is_leaf = pos, True
            return None, pos
        node.count = count
        elements: list[Any] = []
        owner[slot.name] = elements
        if slot.inner is None:
            for _ in range(count):
                element, pos = read_value(slot, data, pos)
                elements.append(element)
            node.value, node.is_leaf, node.definition = elements, True, slot.field
            node.end = pos
            return elements, pos
        for index in range(count):
            inner = self._open((*path, index), pos)
            values: dict[str, Any] = {}
            elements.append(values)
            pos = self._struct(slot.inner, values, (*path, index), pos)
            inner.end = pos
        node.end = pos
        return elements, pos

    def _tags(self, made: Layout, values: dict[str, Any], path: Path, pos: int) -> int:
        start = pos
        count, pos = read_uvarint(self.data, pos)
        self.nodes.append(Node((*path, TAG_COUNT), start, pos, count, is_leaf=True))
        last = -1
        unknown: dict[int, bytes] = {}
        met = set()
        for _ in range(count):
            start = pos
            tag, pos = read_uvarint(self.data, pos)
            size, pos = read_uvarint(self.data, pos)
            if tag <= last or size > len(self.data) - pos:
                raise DecodeError("tagged fields are out of order or too long", path="", pos=start)
            last = tag
            end = pos + size
            slot = made.tagged.get(tag)
            if slot is None:
                unknown[tag] = bytes(self.data[pos:end])
                where = (*path, f"{UNKNOWN_TAGS}[{tag}]")
                self.nodes.append(Node(where, start, end, unknown[tag], is_leaf=True))
            else:
                met.add(tag)
                first = len(self.nodes)
                values[slot.name], after = self._field(slot, (*path, slot.name), pos, values, end)
                if after != end:
                    raise DecodeError("a tagged field has another size", path="", pos=after)
                self.nodes[first].start = start
            pos = end
        for tag, slot in made.tagged.items():
            if tag not in met:
                value = slot.default()
                values[slot.name] = value
                self.nodes.append(
                    Node((*path, slot.name), pos, pos, value, is_leaf=True, is_default=True)
                )
        if unknown:
            values[UNKNOWN_TAGS] = unknown
        return pos


def value_at(values: Any, path: Path) -> Any:
    """The value at a path in nested dicts and lists; None if there is none."""
    for step in path:
        if isinstance(values, Mapping):
            values = values.get(step)
        elif isinstance(values, list) and isinstance(step, int) and step < len(values):
            values = values[step]
        else:
            return None
    return values
