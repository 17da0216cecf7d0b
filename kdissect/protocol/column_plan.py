"""Compiles definitions to the programs that the column kernel runs.

A `ColumnPlan` has, for one side of one API, the columns that any of its versions needs, and one
program per version over these columns. All programs lie in one array. A field that a
version lacks costs no instruction. `codec/column_kernel.py` runs the programs; nothing here reads
bytes.

*Levels and rows.* Level 0 has one row per message. Every array field opens a level of its own
with one row per element. Structs open no level: their fields are ordinary columns. A row has, for
each column of its level, a validity byte and then the value. A value is an integer, the bits of a
float, the packed place of a string (`pos << 31 | length`), the place of a uuid, or the length of a
list. The presence of a struct has the validity byte only. The columns of the message header come
first in level 0. Record data has no column: a mark gives its place.

*Templates.* A new row is a copy of the row that its version has as a template. There, structs that
cannot be null are present, tagged fields have their defaults (KIP-482), and all else is null.

*Instructions* are rows of `INSTRUCTION`, which names their words. `at` is the place of a column in
a row of `level`:

    END
    VALUE     at, level, size, role           a value of `size` bytes
    BYTES     at, level, form, role, size     a string, bytes or records; marked with `size` bytes
                                              or more: empty names in arrays have no marks
    ARRAY     at, level, child_level, form, size, jump
                                              an array, with `size` bytes or more per element;
                                              jump: if it is empty
    NEXT      child_level, jump               the next element; jump: its first instruction
    NULLABLE  at, level, form, jump           a struct after a presence byte; in a tagged field
                                              (FORM_COMPACT) after a varint, 0 for null; jump: if
                                              it is null
    TAGS      count, jump                     `count` entries (tag, jump) follow: a tagged section;
                                              jump: after its end
    TAG_END                                   ends a tagged field

A form is `FORM_INT16`, `FORM_INT32` or `FORM_COMPACT`, plus `NULLABLE_FLAG`.
"""

from __future__ import annotations

import struct as struct_module
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kdissect.arrays import Bytes, Indices, Ints, Rows
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.layout import FIXED_SIZE, Layout, Slot, layout
from kdissect.protocol.model import Api, Definition, Field, Type

END, VALUE, BYTES, ARRAY, NEXT, NULLABLE, TAGS, TAG_END = range(8)
_WORDS = (*("op", "at", "level", "child_level", "form", "size", "role", "jump"), *("tag", "count"))
INSTRUCTION = np.dtype([(word, "i8") for word in _WORDS])
FORM_INT16, FORM_INT32, FORM_COMPACT = range(3)
NULLABLE_FLAG = 4

# Bytes of a column's values: of uuids, strings and bytes it holds the places.
WIDTH = {**FIXED_SIZE, Type.UUID: 8, Type.STRING: 8, Type.BYTES: 8, Type.STRUCT: 0}
_COUNT_WIDTH = 4  # of a list's length
NO_PLACE = -1  # place of a default uuid, the zero uuid


class Role(IntEnum):
    """The meaning of a mark: of its value, and of its length where it has one.

    A place is a value and a length: where bytes start in the buffer, and their number (-1: null).
    """

    NONE = 0
    ERROR_CODE = 1  # the code; marked if it is not 0 or the first of the message
    THROTTLE_TIME_MS = 2  # milliseconds
    TOPIC_NAME = 3  # place of the name
    TOPIC_ID = 4  # start of the 16 bytes
    PARTITION = 5  # partition number
    GROUP_ID = 6  # place
    TRANSACTIONAL_ID = 7  # place
    RECORDS = 8  # place of the record data
    BASE_OFFSET = 9  # offset of the first produced record
    REPLICA_ID = 10  # node id of a fetching broker, -1: a consumer
    SNAPSHOT_POSITION = 11  # position in the snapshot of the following bytes
    MAX_WAIT_MS = 12  # longest time in ms that the broker may hold a Fetch
    MIN_BYTES = 13  # record bytes that end the wait
    UNKNOWN_TAG = 14  # a tag, and the pc of its TAGS; UNKNOWN_DATA and UNKNOWN_AT marks follow
    UNKNOWN_DATA = 15  # place of its data
    UNKNOWN_AT = 16  # index in an array around it, from the outermost on


class RoleRule(NamedTuple):
    """Assigns a role to fields of a type that have one of the entities or names, or whose name ends
    with the suffix."""

    role: Role
    type: Type
    entities: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    suffix: str = "\0"  # matches no name
    apis: frozenset[int] = frozenset()  # only in these APIs; empty: in all


# The first matching rule decides. An array that is no array of structs gives its elements the role.
ROLE_RULES = (
    RoleRule(Role.ERROR_CODE, Type.INT16, names=frozenset({"error_code"}), suffix="_error_code"),
    RoleRule(Role.THROTTLE_TIME_MS, Type.INT32, names=frozenset({"throttle_time_ms"})),
    RoleRule(Role.TOPIC_NAME, Type.STRING, frozenset({"topicName"}),
         frozenset({"topic", "topic_name", "topic_names", "subscribed_topic_names"})),
    RoleRule(Role.TOPIC_ID, Type.UUID, names=frozenset({"topic_id", "topic_ids"})),
    RoleRule(Role.PARTITION, Type.INT32,
         names=frozenset({"partition_index", "partition", "partition_id", "index"})),
    RoleRule(Role.GROUP_ID, Type.STRING, frozenset({"groupId"}), frozenset({"group_id"})),
    RoleRule(Role.TRANSACTIONAL_ID, Type.STRING, frozenset({"transactionalId"}),
         frozenset({"transactional_id"})),
    RoleRule(Role.RECORDS, Type.RECORDS, suffix=""),
    RoleRule(Role.BASE_OFFSET, Type.INT64, names=frozenset({"base_offset"}),
         apis=frozenset({ApiKey.PRODUCE})),
    RoleRule(Role.REPLICA_ID, Type.INT32, names=frozenset({"replica_id"}),
         apis=frozenset({ApiKey.FETCH})),
    RoleRule(Role.SNAPSHOT_POSITION, Type.INT64, names=frozenset({"position"}),
         apis=frozenset({ApiKey.FETCH_SNAPSHOT})),
    RoleRule(Role.MAX_WAIT_MS, Type.INT32, names=frozenset({"max_wait_ms"})),
    RoleRule(Role.MIN_BYTES, Type.INT32, names=frozenset({"min_bytes"})),
)  # fmt: skip


def role_of(api_key: int, this: Field) -> Role:
    """The role of a field, or of an array's elements."""
    for rule in ROLE_RULES:
        if this.type is not rule.type or (rule.apis and api_key not in rule.apis):
            continue
        if (
            this.entity in rule.entities
            or this.name in rule.names
            or this.name.endswith(rule.suffix)
        ):
            return rule.role
    return Role.NONE


# --- the columns -----------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Node:
    """A field over all versions.

    at: its place in a row of its level; -1: no column, because it is always present (a root, or a
    struct that is an element). level: of an array's elements. element: of an array. children: of a
    struct.
    """

    name: str
    type: Type
    at: int = -1
    level: int = -1
    element: Node | None = None
    children: dict[str, Node] = field(default_factory=dict)


class _Rows:
    """Gives columns their places; row_size: bytes of a row of each level."""

    def __init__(self) -> None:
        self.row_size = [0]

    def placed(self, node: Node, level: int, width: int) -> Node:
        node.at = self.row_size[level]
        self.row_size[level] += 1 + width
        return node

    def struct(self, node: Node, fields: Iterable[Field], level: int, where: str = "") -> Node:
        """Add the union over all versions: fields of one name become one node and must have one
        type."""
        named: dict[str, list[Field]] = {}
        for one in fields:
            if one.type is not Type.RECORDS:
                named.setdefault(one.name, []).append(one)
        for name, same in named.items():
            first = same[0]
            if len({(one.type, one.is_array) for one in same}) > 1:
                raise ValueError(f"{where}{name}: fields of one name differ in type")
            inner = first.fields if len(same) == 1 else [f for one in same for f in one.fields]
            child = Node(name, first.type)
            node.children[name] = child
            if not first.is_array:
                self.placed(child, level, WIDTH[first.type])
                self.struct(child, inner, level, f"{where}{name}.")
                continue
            self.placed(child, level, _COUNT_WIDTH)
            child.level = len(self.row_size)
            self.row_size.append(0)
            child.element = Node(name, first.type)
            if first.type is not Type.STRUCT:
                self.placed(child.element, child.level, WIDTH[first.type])
            self.struct(child.element, inner, child.level, f"{where}{name}.")
        return node


# --- the programs ----------------------------------------------------------------------------


@dataclass(slots=True)
class ColumnPlan:
    """Columns and programs of one side of one API.

    header, body: roots of the columns.
    program: INSTRUCTION rows of all versions.
    entries: int64 per version from first_version on, the pc at which that version starts.
    templates: uint8, per version the template of each level's rows, then those of an unknown one.
    paths: per pc the field that it reads, with "[]" for each element index.
    indices: int64, per pc the number of these.
    row_size: int64, bytes of a row of each level. header_size: bytes of level 0 for the header.
    depth: most arrays and tagged sections open at once.
    """

    header: Node
    body: Node
    program: Rows
    entries: Indices
    templates: Bytes
    first_version: int
    paths: list[str]
    indices: Ints
    row_size: Ints
    header_size: int
    depth: int


Words = dict[str, int]


class _Compiler:
    """Emits the instructions of versions, one after the other, and fills their templates.

    templates: of the levels of the current version.
    """

    def __init__(self, api_key: int) -> None:
        self.api_key = api_key
        self.instructions: list[Words] = []
        self.paths: list[str] = []
        self.templates: list[bytearray] = []
        self.level = 0
        self.depth = 0
        self.deepest = 0

    def emit(self, path: str, op: int = END, **words: int) -> Words:
        """Append an instruction; returns its words."""
        self.paths.append(path)
        self.instructions.append({"op": op, **words})
        return self.instructions[-1]

    @property
    def here(self) -> int:
        """The pc of the next instruction."""
        return len(self.paths)

    def struct(self, of: Layout, nodes: dict[str, Node], prefix: str) -> None:
        """Read a struct, then its tagged section."""
        for slot in of.plain:
            self.value(slot, nodes.get(slot.name), prefix)
        if of.flexible:
            self.section(of, nodes, prefix)

    def section(self, of: Layout, nodes: dict[str, Node], prefix: str) -> None:
        """Read the tagged fields that are there; the template has the defaults of the others."""
        for slot in of.tagged.values():
            self.fill(slot, nodes[slot.name], slot.default(), prefix + slot.name)
        tags = self.emit(prefix.removesuffix("."), TAGS, count=len(of.tagged))
        entries = [self.emit(prefix + slot.name, tag=tag) for tag, slot in of.tagged.items()]
        self.deepen()
        for slot, entry in zip(of.tagged.values(), entries, strict=True):
            entry["jump"] = self.here
            self.value(slot, nodes[slot.name], prefix)
            self.emit(prefix + slot.name, TAG_END)
        self.depth -= 1
        tags["jump"] = self.here

    def deepen(self) -> None:
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)

    def value(self, slot: Slot, node: Node | None, prefix: str) -> None:
        """Read a field. Record data has no node."""
        path = prefix + slot.name
        role = role_of(self.api_key, slot.field)
        if slot.field.is_array:
            assert node is not None
            self.array(slot, node, path, role)
        elif slot.inner is None:
            self.leaf(slot, node, path, role)
        else:
            assert node is not None
            if not slot.nullable:
                self.preset(node)
                self.struct(slot.inner, node.children, path + ".")
                return
            form = FORM_COMPACT if slot.is_tagged else 0
            opened = self.emit(path, NULLABLE, at=node.at, level=self.level, form=form)
            self.struct(slot.inner, node.children, path + ".")
            opened["jump"] = self.here

    def leaf(self, slot: Slot, node: Node | None, path: str, role: Role) -> None:
        """Read a value that is no struct: a field, or an element of an array."""
        kind = slot.field.type
        words = {"at": -1 if node is None else node.at, "level": self.level, "role": role}
        if kind in FIXED_SIZE:
            self.emit(path, VALUE, **words, size=FIXED_SIZE[kind])
            return
        plain = FORM_INT16 if kind is Type.STRING else FORM_INT32
        form = FORM_COMPACT if slot.compact else plain
        if slot.field.is_array:
            self.emit(path, BYTES, **words, form=form, size=1)
        else:
            null = NULLABLE_FLAG if slot.nullable else 0
            self.emit(path, BYTES, **words, form=form | null, size=-1)

    def array(self, slot: Slot, node: Node, path: str, role: Role) -> None:
        assert node.element is not None
        form = FORM_COMPACT if slot.compact else FORM_INT32
        opened = self.emit(
            path,
            ARRAY,
            at=node.at,
            level=self.level,
            child_level=node.level,
            form=form | (NULLABLE_FLAG if slot.nullable else 0),
            size=slot.element_size_min,
        )
        outer, self.level = self.level, node.level
        self.deepen()
        first = self.here
        if slot.inner is None:
            self.leaf(slot, node.element, path + "[]", role)
        else:
            self.struct(slot.inner, node.element.children, path + "[].")
        self.emit(path, NEXT, child_level=node.level, jump=first)
        self.depth -= 1
        self.level = outer
        opened["jump"] = self.here

    def preset(self, node: Node, value: int = 0, width: int = 0) -> None:
        """Write a value into the template of the current level."""
        end = node.at + 1 + width
        self.templates[self.level][node.at : end] = b"\1" + (value % (1 << 8 * width)).to_bytes(
            width, sys.byteorder
        )

    def fill(self, slot: Slot, node: Node, default: Any, path: str) -> None:
        """Preset the default of a tagged field, for messages without its tag."""
        if default is None:
            return
        kind = slot.field.type
        if slot.field.is_array:
            self.preset(node, 0, _COUNT_WIDTH)
        elif slot.inner is not None:
            self.preset(node)
            for inner in slot.inner.by_name.values():
                self.fill(inner, node.children[inner.name], inner.default(), f"{path}.{inner.name}")
        elif slot.is_sized:
            if default:
                raise ValueError(f"{path}: a tagged field's default must be empty or null")
            self.preset(node, 0, WIDTH[kind])
        elif kind is Type.UUID:
            if default.int:
                raise ValueError(f"{path}: a tagged uuid's default must be the zero uuid")
            self.preset(node, NO_PLACE, WIDTH[kind])
        else:
            if kind is Type.FLOAT64:
                default = int.from_bytes(struct_module.pack(">d", default), "big")
            self.preset(node, int(default), WIDTH[kind])

    def program(self) -> Rows:
        """INSTRUCTION rows."""
        rows = [tuple(words.get(word, 0) for word in _WORDS) for words in self.instructions]
        return np.array(rows, INSTRUCTION)


def compile_plan(api: Api, side: str, header: Definition) -> ColumnPlan:
    """Compile all versions of one side of an API, with that side's header definition.

    Raises ValueError for a definition without a column form: one name with two types in a struct,
    or a tagged field whose default string is not empty.
    """
    definition = api.side(side)
    header_version = (
        api.request_header_version if side == "request" else api.response_header_version
    )
    rows = _Rows()
    head = rows.struct(Node("", Type.STRUCT), header.fields, 0, "header.")
    header_size = rows.row_size[0]
    body = rows.struct(Node("", Type.STRUCT), definition.fields, 0)
    compiler = _Compiler(api.key)
    entries, templates = [], bytearray()
    for version in range(definition.versions.first, definition.versions.last + 1):
        entries.append(compiler.here)
        compiler.templates = [bytearray(size) for size in rows.row_size]
        compiler.struct(layout(header, header_version(version)), head.children, "header.")
        compiler.struct(layout(definition, version), body.children, "")
        compiler.emit("")
        templates += b"".join(compiler.templates)
    templates += bytes(sum(rows.row_size))
    return ColumnPlan(
        header=head,
        body=body,
        program=compiler.program(),
        entries=np.array(entries, np.int64),
        templates=np.frombuffer(templates, np.uint8),
        first_version=definition.versions.first,
        paths=compiler.paths,
        indices=np.array([path.count("[]") for path in compiler.paths], np.int64),
        row_size=np.array(rows.row_size, np.int64),
        header_size=header_size,
        depth=compiler.deepest,
    )


@cache
def plan(api_key: int, side: str) -> ColumnPlan:
    """The plan of one side of an API of the catalog, compiled on first use in a process.

    Raises ValueError for an unknown api_key or side.
    """
    header = catalog.REQUEST_HEADER if side == "request" else catalog.RESPONSE_HEADER
    return compile_plan(catalog.api(api_key), side, header)
