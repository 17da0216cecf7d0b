"""Compiles definitions to the programs that the column kernel runs.

A `ColumnPlan` has, for one side of one API, the columns that any of its versions needs, and one
program per version over these columns. All programs lie in one array. A field that a
version lacks costs no instruction. `codec/column_kernel.py` runs the programs; nothing here reads
bytes.

*Levels and columns.* Level 0 has one row per message. Every array field opens a level of its own
with one row per element. Structs open no level: their fields are ordinary columns. The columns of
the message header come first in level 0. A column has values of `WIDTH` bytes and one validity byte
per row. A value is an integer, the bits of a float, the packed place of a string
(`pos << 31 | length`), the place of a uuid, or the length of a list. The presence of a struct has
the validity byte only. Record data has no column: a mark gives its place.

*Instructions* are rows of `INSTRUCTION`, which names their words:

    END
    RUN       count, size, level, marks       `count` entries follow: values of fixed width, one
                                              check of `size` bytes
    BYTES     column, level, form, role       a string, bytes or records
    ARRAY     column, level, child_level, form, smallest, jump
                                              an array of structs; jump: if it is empty
    NEXT      child_level, jump               the next element; jump: its first instruction
    ARRAY_OF  column, level, child_level, child_column, form, kind, role
                                              an array of primitive values
    NULLABLE  column, level, is_tagged, jump  a struct after a presence byte; in a tagged field
                                              after a varint, 0 for null; jump: if it is null
    TAGS      count, level, jump              `count` entries (tag, jump) follow: a tagged section;
                                              jump: after its end
    TAG_END                                   ends a tagged field
    BIND      column, id_column, level        marks a topic's name together with its id

A run's entry is (kind, column, role, offset, default). Kinds from `PRESENT` on take no bytes. They
write the presence of a struct, or the default of a tagged field that the tagged section after the
run may overwrite. A form is `FORM_INT16`, `FORM_INT32` or `FORM_COMPACT`, plus `NULLABLE_FLAG`.
"""

from __future__ import annotations

import struct as struct_module
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.layout import FIXED_SIZE, Layout, Slot, layout
from kdissect.protocol.model import Api, Definition, Field, Type

END, RUN, BYTES, ARRAY, NEXT, ARRAY_OF, NULLABLE, TAGS, TAG_END, BIND = range(10)
_WORDS: dict[str, tuple[str, int]] = {
    "op": ("<i4", 0),
    "tag": ("<i4", 0),
    "column": ("<i4", 4),
    "count": ("<i4", 4),
    "level": ("<i4", 8),
    "offset": ("<i4", 8),
    "child_level": ("<i4", 12),
    "id_column": ("<i4", 12),
    "marks": ("<i4", 12),
    "default": ("<i8", 12),
    "form": ("<i4", 16),
    "is_tagged": ("<i4", 16),
    "role": ("<i4", 20),
    "child_column": ("<i4", 24),
    "jump": ("<i4", 24),
    "kind": ("<i4", 28),
    "size": ("<i4", 28),
    "smallest": ("<i4", 28),
}
# Words that no instruction has at once share their bytes.
INSTRUCTION = np.dtype(
    {
        "names": list(_WORDS),
        "formats": [kind for kind, _ in _WORDS.values()],
        "offsets": [at for _, at in _WORDS.values()],
    }
)
FORM_INT16, FORM_INT32, FORM_COMPACT = range(3)
NULLABLE_FLAG = 4

# Kinds: the encoding of a value and its stored form. The second group takes no bytes.
K_BOOL, K_INT8, K_INT16, K_UINT16, K_INT32, K_UINT32, K_INT64, K_UUID, K_STRING, K_BYTES = range(10)
K_PRESENT, K_FILL_8, K_FILL_16, K_FILL_32, K_FILL_64 = range(10, 15)

KIND = {
    Type.BOOL: K_BOOL,
    Type.INT8: K_INT8,
    Type.INT16: K_INT16,
    Type.UINT16: K_UINT16,
    Type.INT32: K_INT32,
    Type.UINT32: K_UINT32,
    Type.INT64: K_INT64,
    Type.FLOAT64: K_INT64,
    Type.UUID: K_UUID,
    Type.STRING: K_STRING,
    Type.BYTES: K_BYTES,
}
_WIRE_SIZE = {KIND[kind]: size for kind, size in FIXED_SIZE.items()}
# Bytes of a column's values: of uuids and of strings it holds the places.
WIDTH = {**_WIRE_SIZE, K_UUID: 8, K_STRING: 8, K_BYTES: 8}
_FILL = {1: K_FILL_8, 2: K_FILL_16, 4: K_FILL_32, 8: K_FILL_64}
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
    BOUND_NAME = 5  # place of a name; the next mark is BOUND_ID
    BOUND_ID = 6  # start of the id of the topic with that name
    PARTITION = 7  # partition number
    GROUP_ID = 8  # place
    TRANSACTIONAL_ID = 9  # place
    RECORDS = 10  # place of the record data
    BASE_OFFSET = 11  # offset of the first produced record
    REPLICA_ID = 12  # node id of a fetching broker, -1: a consumer
    SNAPSHOT_POSITION = 13  # position in the snapshot of the following bytes
    MAX_WAIT_MS = 14  # longest time in ms that the broker may hold a Fetch
    MIN_BYTES = 15  # record bytes that end the wait


class RoleRule(NamedTuple):
    """Assigns a role to fields of these types that have one of the entities or names."""

    role: Role
    types: tuple[Type, ...]
    entities: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    suffix: str = "\0"
    apis: frozenset[int] = frozenset()  # only in these APIs; empty: in all


# The first matching rule decides. Elements of string arrays get the role as well.
ROLE_RULES = (
    RoleRule(Role.ERROR_CODE, (Type.INT16,), names=frozenset({"error_code"}), suffix="_error_code"),
    RoleRule(Role.THROTTLE_TIME_MS, (Type.INT32,), names=frozenset({"throttle_time_ms"})),
    RoleRule(Role.TOPIC_NAME, (Type.STRING,), frozenset({"topicName"}),
         frozenset({"topic", "topic_name", "topic_names", "subscribed_topic_names"})),
    RoleRule(Role.TOPIC_ID, (Type.UUID,), names=frozenset({"topic_id", "topic_ids"})),
    RoleRule(Role.PARTITION, (Type.INT32,),
         names=frozenset({"partition_index", "partition", "partition_id", "index"})),
    RoleRule(Role.GROUP_ID, (Type.STRING,), frozenset({"groupId"}), frozenset({"group_id"})),
    RoleRule(Role.TRANSACTIONAL_ID, (Type.STRING,), frozenset({"transactionalId"}),
         frozenset({"transactional_id"})),
    RoleRule(Role.RECORDS, (Type.RECORDS,), suffix=""),
    RoleRule(Role.BASE_OFFSET, (Type.INT64,), names=frozenset({"base_offset"}),
         apis=frozenset({ApiKey.PRODUCE})),
    RoleRule(Role.REPLICA_ID, (Type.INT32,), names=frozenset({"replica_id"}),
         apis=frozenset({ApiKey.FETCH})),
    RoleRule(Role.SNAPSHOT_POSITION, (Type.INT64,), names=frozenset({"position"}),
         apis=frozenset({ApiKey.FETCH_SNAPSHOT})),
    RoleRule(Role.MAX_WAIT_MS, (Type.INT32,), names=frozenset({"max_wait_ms"})),
    RoleRule(Role.MIN_BYTES, (Type.INT32,), names=frozenset({"min_bytes"})),
)  # fmt: skip

_RULES_OF_TYPE: dict[Type, list[RoleRule]] = {kind: [] for kind in Type}
for _rule in ROLE_RULES:
    for _type in _rule.types:
        _RULES_OF_TYPE[_type].append(_rule)


def role_of(api_key: int, this: Field) -> Role:
    """The role of a field, or of an array's elements."""
    for rule in _RULES_OF_TYPE[this.type]:
        if rule.apis and api_key not in rule.apis:
            continue
        if (
            this.entity in rule.entities
            or this.name in rule.names
            or this.name.endswith(rule.suffix)
        ):
            return rule.role
    return Role.NONE


# --- the columns -----------------------------------------------------------------------------


@dataclass(slots=True)
class Leaf:
    """A primitive value: one column."""

    name: str
    type: Type
    column: int = -1


@dataclass(slots=True)
class Struct:
    """A struct: its children, and a presence column (-1 for an element or a root, always
    present)."""

    name: str
    children: dict[str, Node]
    column: int = -1


@dataclass(slots=True)
class List:
    """An array: a column of lengths, and the level of its elements."""

    name: str
    element: Leaf | Struct
    column: int = -1
    level: int = -1


Node = Leaf | Struct | List


def _nodes(fields: Iterable[Field], where: str) -> dict[str, Node]:
    """The union over all versions: fields of one name become one node and must have one type."""
    named: dict[str, list[Field]] = {}
    for one in fields:
        if one.type is not Type.RECORDS:
            named.setdefault(one.name, []).append(one)
    nodes: dict[str, Node] = {}
    for name, same in named.items():
        first = same[0]
        if len({(one.type, one.is_array) for one in same}) > 1:
            raise ValueError(f"{where}{name}: fields of one name differ in type")
        element: Leaf | Struct
        if first.type is Type.STRUCT:
            inner = first.fields if len(same) == 1 else [f for one in same for f in one.fields]
            element = Struct(name, _nodes(inner, f"{where}{name}."))
        else:
            element = Leaf(name, first.type)
        nodes[name] = List(name, element) if first.is_array else element
    return nodes


class _Columns:
    """Numbers the levels, then the columns level by level."""

    def __init__(self, header: Struct, body: Struct) -> None:
        self.levels: list[list[tuple[Node, int]]] = [[]]
        self._collect(header, 0)
        self.header_count = len(self.levels[0])
        self._collect(body, 0)
        self.width: list[int] = []
        self.first = [0]
        for level in self.levels:
            for node, width in level:
                node.column = len(self.width)
                self.width.append(width)
            self.first.append(len(self.width))

    def _collect(self, root: Struct, level: int) -> None:
        for node in root.children.values():
            self._add(node, level)

    def _add(self, node: Node, level: int) -> None:
        if isinstance(node, Leaf):
            self.levels[level].append((node, WIDTH[KIND[node.type]]))
        elif isinstance(node, Struct):
            self.levels[level].append((node, 0))
            self._collect(node, level)
        else:
            self.levels[level].append((node, 4))
            node.level = len(self.levels)
            self.levels.append([])
            if isinstance(node.element, Leaf):
                self._add(node.element, node.level)
            else:
                self._collect(node.element, node.level)


# --- the programs ----------------------------------------------------------------------------


@dataclass(slots=True)
class ColumnPlan:
    """Columns and programs of one side of one API.

    program: INSTRUCTION rows of all versions.
    entries: int32 per version from first_version on, the pc at which that version starts, or -1.
    paths: per pc the field that it reads, with "[]" for each element index.
    column_width: int64, bytes per row (0: a presence).
    level_first: int64, the first column of each level, and the end.
    header_count: columns of the header in level 0.
    present: bool[versions, columns], columns that a version can fill.
    depth: most levels and tagged sections open at once.
    """

    api_key: int
    side: str
    header: Struct
    body: Struct
    program: NDArray[np.void]
    entries: NDArray[np.int32]
    first_version: int
    paths: list[str]
    column_width: NDArray[np.int64]
    level_first: NDArray[np.int64]
    header_count: int
    present: NDArray[np.bool_]
    depth: int
    memo: dict[str, Any] = field(default_factory=dict)  # values that codec/ derives once per plan


Words = dict[str, int]


class _Compiler:
    """Emits the instructions of versions, one after the other.

    run: values of fixed width that no instruction has read so far.
    """

    def __init__(self, api_key: int) -> None:
        self.api_key = api_key
        self.instructions: list[Words] = []
        self.paths: list[str] = []
        self.run: list[tuple[str, Words]] = []
        self.level = 0
        self.depth = 0
        self.deepest = 0
        self.touched: set[int] = set()

    def emit(self, path: str, op: int = END, **words: int) -> Words:
        """Append an instruction, after the values that wait; returns its words."""
        if self.run:
            self.flush()
        if "column" in words:
            self.touched.add(words["column"])
        self.paths.append(path)
        self.instructions.append({"op": op, **words})
        return self.instructions[-1]

    def flush(self) -> None:
        """Append an instruction for the values that wait."""
        run, self.run = self.run, []
        size = sum(_WIRE_SIZE.get(words["kind"], 0) for _, words in run)
        marks = sum(words["role"] != Role.NONE for _, words in run)
        self.emit(run[0][0], RUN, count=len(run), size=size, level=self.level, marks=marks)
        offset = 0
        for path, words in run:
            self.emit(path, offset=offset, **words)
            offset += _WIRE_SIZE.get(words["kind"], 0)

    def fixed(self, path: str, kind: int, column: int, role: int = 0, default: int = 0) -> None:
        """Add a value of fixed width, a presence or a default to those that wait."""
        self.run.append((path, {"kind": kind, "column": column, "role": role, "default": default}))

    @property
    def here(self) -> int:
        """The pc of the next instruction."""
        if self.run:
            self.flush()
        return len(self.paths)

    def struct(self, of: Layout, nodes: dict[str, Node], prefix: str) -> None:
        """Read a struct, then its tagged section."""
        topic = {Role.TOPIC_NAME: -1, Role.TOPIC_ID: -1}
        for slot in of.plain:
            node = nodes.get(slot.name)
            role = self.value(slot, node, prefix)
            if role in topic and isinstance(node, Leaf):
                topic[role] = node.column
        if min(topic.values()) >= 0:
            name, ident = topic.values()
            self.emit(prefix, BIND, column=name, id_column=ident, level=self.level)
        if of.flexible:
            self.section(of, nodes, prefix)

    def section(self, of: Layout, nodes: dict[str, Node], prefix: str) -> None:
        """Write the defaults of tagged fields, then read those that are there."""
        for slot in of.tagged.values():
            self.fill(slot, nodes[slot.name], slot.default(), prefix + slot.name)
        path = prefix.removesuffix(".")
        tags = self.emit(path, TAGS, count=len(of.tagged), level=self.level)
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

    def value(self, slot: Slot, node: Node | None, prefix: str) -> Role:
        """Read a field; returns its role. Record data has no node."""
        path, kind = prefix + slot.name, slot.field.type
        role = role_of(self.api_key, slot.field)
        nullable = NULLABLE_FLAG if slot.nullable else 0
        if isinstance(node, List):
            self.array(slot, node, nullable, path, role)
        elif isinstance(node, Struct):
            assert slot.inner is not None
            if not nullable:
                self.fixed(path, K_PRESENT, node.column)
                self.struct(slot.inner, node.children, path + ".")
                return role
            opened = self.emit(
                path, NULLABLE, column=node.column, level=self.level, is_tagged=slot.is_tagged
            )
            self.struct(slot.inner, node.children, path + ".")
            opened["jump"] = self.here
        elif slot.is_sized:
            plain = FORM_INT16 if kind is Type.STRING else FORM_INT32
            form = (FORM_COMPACT if slot.compact else plain) | nullable
            column = -1 if node is None else node.column
            self.emit(path, BYTES, column=column, level=self.level, form=form, role=role)
        else:
            assert isinstance(node, Leaf)
            self.fixed(path, KIND[kind], node.column, role)
        return role

    def array(self, slot: Slot, node: List, nullable: int, path: str, role: Role) -> None:
        words = {
            "column": node.column,
            "level": self.level,
            "child_level": node.level,
            "form": (FORM_COMPACT if slot.compact else FORM_INT32) | nullable,
        }
        if isinstance(node.element, Leaf):
            child = node.element.column
            kind = KIND[slot.field.type]
            self.emit(path, ARRAY_OF, **words, child_column=child, kind=kind, role=role)
            self.touched.add(child)
            return
        assert slot.inner is not None
        opened = self.emit(path, ARRAY, **words, smallest=slot.element_size_min)
        outer, self.level = self.level, node.level
        self.deepen()
        first = self.here
        self.struct(slot.inner, node.element.children, path + "[].")
        self.emit(path, NEXT, child_level=node.level, jump=first)
        self.depth -= 1
        self.level = outer
        opened["jump"] = self.here

    def fill(self, slot: Slot, node: Node, default: Any, path: str) -> None:
        """Write the default of a tagged field, for messages without its tag."""
        if default is None:
            return
        if isinstance(node, List):
            self.fixed(path, K_FILL_32, node.column)
        elif isinstance(node, Struct):
            assert slot.inner is not None
            self.fixed(path, K_PRESENT, node.column)
            for inner in slot.inner.by_name.values():
                child = node.children[inner.name]
                self.fill(inner, child, inner.default(), f"{path}.{inner.name}")
        elif slot.is_sized:
            if default:
                raise ValueError(f"{path}: a tagged field's default must be empty or null")
            self.fixed(path, K_FILL_64, node.column)
        elif slot.field.type is Type.UUID:
            if default.int:
                raise ValueError(f"{path}: a tagged uuid's default must be the zero uuid")
            self.fixed(path, K_FILL_64, node.column, default=NO_PLACE)
        else:
            if slot.field.type is Type.FLOAT64:
                default = int.from_bytes(struct_module.pack(">d", default), "big", signed=True)
            fill = _FILL[WIDTH[KIND[slot.field.type]]]
            self.fixed(path, fill, node.column, default=int(default))

    def program(self) -> NDArray[np.void]:
        """INSTRUCTION rows. Words share places, so each is written only where it is used."""
        places: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in _WORDS}
        for pc, words in enumerate(self.instructions):
            for name, word in words.items():
                places[name][0].append(pc)
                places[name][1].append(word)
        rows = np.zeros(len(self.instructions), INSTRUCTION)
        for name, (at, values) in places.items():
            rows[name][at] = values
        return rows


def compile_plan(api: Api, side: str, header: Definition) -> ColumnPlan:
    """Compile all versions of one side of an API, with that side's header definition.

    Raises ValueError for a definition without a column form: one name with two types in a struct,
    or a tagged field whose default string is not empty.
    """
    definition = api.side(side)
    header_version = (
        api.request_header_version if side == "request" else api.response_header_version
    )
    head = Struct("", _nodes(header.fields, "header."))
    body = Struct("", _nodes(definition.fields, ""))
    columns = _Columns(head, body)
    compiler = _Compiler(api.key)
    versions = range(definition.versions.first, definition.versions.last + 1)
    present = np.zeros((len(versions), len(columns.width)), dtype=np.bool_)
    entries = np.full(len(versions), -1, dtype=np.int32)
    for index, version in enumerate(versions):
        entries[index] = compiler.here
        compiler.touched.clear()
        compiler.struct(layout(header, header_version(version)), head.children, "header.")
        compiler.struct(layout(definition, version), body.children, "")
        compiler.emit("")
        compiler.touched.discard(-1)
        present[index, list(compiler.touched)] = True
    return ColumnPlan(
        api_key=api.key,
        side=side,
        header=head,
        body=body,
        program=compiler.program(),
        entries=entries,
        first_version=definition.versions.first,
        paths=compiler.paths,
        column_width=np.array(columns.width, dtype=np.int64),
        level_first=np.array(columns.first, dtype=np.int64),
        header_count=columns.header_count,
        present=present,
        depth=compiler.deepest,
    )


_PLANS: dict[tuple[int, str], ColumnPlan] = {}


def plan(api_key: int, side: str) -> ColumnPlan:
    """The plan of one side of an API of the catalog, compiled on first use in a process.

    Raises ValueError for an unknown api_key or side.
    """
    compiled = _PLANS.get((api_key, side))
    if compiled is None:
        from kdissect.protocol import catalog

        api = catalog.api(api_key)
        header = catalog.REQUEST_HEADER if side == "request" else catalog.RESPONSE_HEADER
        compiled = _PLANS.setdefault((api_key, side), compile_plan(api, side, header))
    return compiled
