"""A message as a tree whose nodes know their bytes, also as far as a faulty one can be read.

A fault ends the walk: the nodes before it stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kdissect.codec.message_codec import UNKNOWN_TAGS, Reader, read_uvarint
from kdissect.errors import DecodeError
from kdissect.protocol.layout import Layout, Slot, layout
from kdissect.protocol.model import Definition, Type
from kdissect.tables.schemas import Row

Path = tuple[str | int, ...]
TAG_COUNT = "tagged fields"  # what stands in front of them


@dataclass(slots=True)
class Node:
    """A field: `path` from the message's start (names and indices), its bytes [start, end), and
    its value where it is no struct and no list of structs.

    is_default: a tagged field that is not there. is_decoded: a value out of the bytes before it.
    count: of a list; None for others.
    """

    path: Path
    start: int
    end: int
    value: Any = None
    is_leaf: bool = False
    is_default: bool = False
    is_decoded: bool = False
    count: int | None = None
    is_records: bool = False

    @property
    def name(self) -> str:
        last = self.path[-1]
        return f"[{last}]" if isinstance(last, int) else last

    @property
    def depth(self) -> int:
        return len(self.path)


class ByteTree(Reader):
    """nodes in the order of their bytes; error: where it ended, if it did not reach the end."""

    def __init__(self, data: memoryview) -> None:
        self.nodes: list[Node] = []
        self.error: DecodeError | None = None
        self._data = data
        self._path: Path = ()

    def message(self, name: str, definition: Definition, version: int, pos: int) -> int:
        """Walk one definition as the member `name`; return its end, or the position of a fault."""
        self._path = ()
        node = self._open(name, pos)
        try:
            _, node.end = self.struct(layout(definition, version), self._data, pos)
        except DecodeError as error:
            self.error = error
            node.end = pos if error.pos is None else error.pos
        return node.end

    def _open(self, step: str | int, pos: int) -> Node:
        self._path = (*self._path, step)
        node = Node(self._path, pos, pos)
        self.nodes.append(node)
        return node

    def field(self, slot: Slot, data: memoryview, pos: int) -> tuple[Any, int]:
        node = self._open(slot.name, pos)
        value, node.end = super().field(slot, data, pos)
        self._path = node.path[:-1]
        node.is_records = slot.field.type is Type.RECORDS
        node.is_leaf = slot.inner is None or value is None
        node.value = value if node.is_leaf else None
        return value, node.end

    def count(self, slot: Slot, data: memoryview, pos: int) -> tuple[int | None, int]:
        self.nodes[-1].count, after = super().count(slot, data, pos)
        return self.nodes[-1].count, after

    def element(self, of: Layout, index: int, data: memoryview, pos: int) -> tuple[Row, int]:
        node = self._open(index, pos)
        values, node.end = super().element(of, index, data, pos)
        self._path = node.path[:-1]
        return values, node.end

    def tags(
        self, of: Layout, data: memoryview, pos: int
    ) -> tuple[dict[int, Any], dict[int, bytes], int]:
        count, after = read_uvarint(data, pos)
        self.nodes.append(Node((*self._path, TAG_COUNT), pos, after, count, is_leaf=True))
        values, unknown, end = super().tags(of, data, pos)
        self.nodes += [
            Node((*self._path, slot.name), end, end, slot.default(), is_leaf=True, is_default=True)
            for tag, slot in of.tagged.items()
            if tag not in values
        ]
        return values, unknown, end

    def tag(self, slot: Slot, data: memoryview, start: int, pos: int) -> Any:
        first = len(self.nodes)
        value = super().tag(slot, data, start, pos)
        self.nodes[first].start = start
        return value

    def unknown_tag(self, tag: int, data: memoryview, start: int, pos: int) -> bytes:
        value = super().unknown_tag(tag, data, start, pos)
        where = (*self._path, f"{UNKNOWN_TAGS}[{tag}]")
        self.nodes.append(Node(where, start, len(data), value, is_leaf=True))
        return value


def value_nodes(value: Any, path: Path, pos: int) -> Iterator[Node]:
    """The nodes of a value that was decoded out of bytes; they have no bytes of their own."""
    is_leaf = not isinstance(value, dict | list) or not value
    if isinstance(value, list) and value:
        is_leaf = not isinstance(value[0], dict | list)
    yield Node(path, pos, pos, value if is_leaf else None, is_leaf, is_decoded=True)
    if not is_leaf:
        for step, item in value.items() if isinstance(value, dict) else enumerate(value):
            if item is not None or isinstance(value, list):
                yield from value_nodes(item, (*path, step), pos)


def value_at(values: object, path: Path) -> object:
    """The value at a path in nested dicts and lists; None if there is none."""
    for step in path:
        if isinstance(values, Mapping):
            values = values.get(step)
        elif isinstance(values, list) and isinstance(step, int) and step < len(values):
            values = values[step]
        else:
            return None
    return values
