"""Compiles definitions to the programs that the column kernel runs.

A `ColumnPlan` has, for one side of one API, the columns that any of its versions needs, and one
program per version over these columns. All programs lie in one flat int32 array. A field that a
version lacks costs no instruction. `codec/column_kernel.py` runs the programs; nothing here reads
bytes.

*Levels and columns.* Level 0 has one row per message. Every array field opens a level of its own
with one row per element. Structs open no level: their fields are ordinary columns. The columns of
the message header come first in level 0. A column has values of `WIDTH` bytes and one validity byte
per row. A value is an integer, the bits of a float, the packed place of a string
(`pos << 31 | length`), the place of a uuid, or the length of a list. The presence of a struct has
the validity byte only. Record data has no column: a mark gives its place.

*Instructions* are `WORDS` int32 words; the first is the op:

    END RUN       count, size, level, marks    then `count` entries: values of fixed width, one
    check BYTES     column, level, form, role    string, bytes or records ARRAY     column, level,
    child level, form, smallest element, pc after    array of structs NEXT      child level, pc of
    the first instruction of the element ARRAY_OF  column, level, child level, form, kind, child
    column, role    array of primitive values NULLABLE  column, level, pc after, tagged    a struct
    after a presence byte; in a tagged field
                                           after a varint, 0 for null
    TAGS      count, level, pc after       then `count` entries (tag, pc): a tagged section
    TAG_END                                ends a tagged field
    BIND      name column, id column, level    marks a topic's name together with its id

A run's entry is (kind, column, role, position in the run, low word, high word). Kinds from
`PRESENT` on take no bytes. They write the presence of a struct, or the default of a tagged field
(`low | high << 32`) that the tagged section after the run may overwrite.
A form is `FORM_INT16`, `FORM_INT32` or `FORM_COMPACT`, plus `NULLABLE_FLAG`.
"""

from __future__ import annotations

import struct as struct_module
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import Api, Definition, Field, Type

WORDS = 8
_END, RUN, BYTES, ARRAY, NEXT, ARRAY_OF, NULLABLE, TAGS, TAG_END, BIND = range(10)
FORM_INT16, FORM_INT32, FORM_COMPACT = range(3)
NULLABLE_FLAG = 4

# Kinds: the encoding of a value and its stored form. The second group takes no bytes.
K_BOOL, K_8, K_16, K_U16, K_32, K_U32, K_64, K_UUID, K_STRING, K_BYTES = range(10)
K_PRESENT, K_FILL_8, K_FILL_16, K_FILL_32, K_FILL_64 = range(10, 15)

KIND = {
    Type.BOOL: K_BOOL,
    Type.INT8: K_8,
    Type.INT16: K_16,
    Type.UINT16: K_U16,
    Type.INT32: K_32,
    Type.UINT32: K_U32,
    Type.INT64: K_64,
    Type.FLOAT64: K_64,
    Type.UUID: K_UUID,
    Type.STRING: K_STRING,
    Type.BYTES: K_BYTES,
}
WIRE_SIZE = {K_BOOL: 1, K_8: 1, K_16: 2, K_U16: 2, K_32: 4, K_U32: 4, K_64: 8, K_UUID: 16}
WIDTH = {K_BOOL: 1, K_8: 1, K_16: 2, K_U16: 2, K_32: 4, K_U32: 4, K_64: 8, K_UUID: 8, K_STRING: 8,
         K_BYTES: 8}  # fmt: skip
_FILL = {1: K_FILL_8, 2: K_FILL_16, 4: K_FILL_32, 8: K_FILL_64}
NO_PLACE = -1  # place of a default uuid, the zero uuid


class Role(IntEnum):
    """The meaning of a mark's numbers a and b."""

    NONE = 0
    ERROR_CODE = 1  # a: the code; marked if it is not 0 or the first of the message
    THROTTLE_TIME_MS = 2  # a: milliseconds
    TOPIC_NAME = 3  # a: start of the name in the buffer, b: its length (-1: null)
    TOPIC_ID = 4  # a: start of the 16 bytes in the buffer
    TOPIC_BINDING = 5  # a: start << 31 | length of a name, b: start of the 16 bytes of its id
    PARTITION = 6  # a: partition number
    GROUP_ID = 7  # like TOPIC_NAME
    TRANSACTIONAL_ID = 8  # like TOPIC_NAME
    RECORDS = 9  # a: start of the record data in the buffer, b: its length (-1: null)
    ACKS = 10  # a: -1, 0, 1
    BASE_OFFSET = 11  # a: offset of the first produced record
    LOG_APPEND_TIME_MS = 12  # a: milliseconds since 1970, -1: none
    REPLICA_ID = 13  # a: node id of a fetching broker, -1: a consumer
    SNAPSHOT_POSITION = 14  # a: position in the snapshot of the following bytes
    MAX_WAIT_MS = 15  # a: longest time in ms that the broker may hold a Fetch
    MIN_BYTES = 16  # a: record bytes that end the wait


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
    RoleRule(Role.ACKS, (Type.INT16,), names=frozenset({"acks"}), apis=frozenset({ApiKey.PRODUCE})),
    RoleRule(Role.BASE_OFFSET, (Type.INT64,), names=frozenset({"base_offset"}),
         apis=frozenset({ApiKey.PRODUCE})),
    RoleRule(Role.LOG_APPEND_TIME_MS, (Type.INT64,), names=frozenset({"log_append_time_ms"}),
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


def smallest(this: Field, api_version: int, flexible: bool) -> int:
    """Fewest bytes of a field; for elements of an array use `smallest_element`."""
    compact = flexible and not this.never_flexible
    if this.is_array:
        return 1 if compact else 4
    return _smallest_value(this, api_version, flexible, nullable=api_version in this.nullable)


def smallest_element(this: Field, api_version: int, flexible: bool) -> int:
    """Fewest bytes of an array's element; at least 1, so that the remaining bytes bound a count."""
    return max(_smallest_value(this, api_version, flexible, nullable=False), 1)


def _smallest_value(this: Field, api_version: int, flexible: bool, nullable: bool) -> int:
    if this.type is Type.STRUCT:
        if nullable:
            return 1
        inner = (
            smallest(one, api_version, flexible)
            for one in this.fields
            if api_version in one.versions and not (flexible and api_version in one.tagged)
        )
        return sum(inner) + flexible
    if this.type in (Type.STRING, Type.BYTES, Type.RECORDS):
        if flexible and not this.never_flexible:
            return 1
        return 2 if this.type is Type.STRING else 4
    return WIRE_SIZE[KIND[this.type]]


@dataclass(slots=True)
class ColumnPlan:
    """Columns and programs of one side of one API.

    program: int32, `WORDS` words per instruction.
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
    program: NDArray[np.int32]
    entries: NDArray[np.int32]
    first_version: int
    paths: list[str]
    column_width: NDArray[np.int64]
    level_first: NDArray[np.int64]
    header_count: int
    present: NDArray[np.bool_]
    depth: int
    memo: dict[str, Any] = field(default_factory=dict)  # values that codec/ derives once per plan


class _Compiler:
    def __init__(self, api_key: int) -> None:
        self.api_key = api_key
        self.words: list[int] = []
        self.paths: list[str] = []
        self.run: list[tuple[int, int, int, int, int, str]] = []
        self.level = 0
        self.depth = 0
        self.deepest = 0
        self.touched: set[int] = set()

    def emit(self, path: str, *words: int) -> int:
        pc = len(self.paths)
        self.words.extend(words)
        self.words.extend((0,) * (WORDS - len(words)))
        self.paths.append(path)
        return pc

    def patch(self, pc: int, word: int) -> None:
        self.words[pc * WORDS + word] = len(self.paths)

    def flush(self) -> None:
        if not self.run:
            return
        run, self.run = self.run, []
        size = sum(WIRE_SIZE.get(entry[0], 0) for entry in run)
        marks = sum(entry[2] != 0 for entry in run)
        self.emit(run[0][5], RUN, len(run), size, self.level, marks)
        at = 0
        for kind, column, role, low, high, path in run:
            self.emit(path, kind, column, role, at, low, high)
            at += WIRE_SIZE.get(kind, 0)

    def fixed(self, kind: int, column: int, path: str, role: int = 0, value: int = 0) -> None:
        low, high = struct_module.unpack("<ii", struct_module.pack("<q", value))
        self.run.append((kind, column, role, low, high, path))
        self.touched.add(column)

    def message(self, definition: Definition, api_version: int, root: Struct, prefix: str) -> None:
        flexible = api_version in definition.flexible
        self.struct(definition.fields, root.children, api_version, flexible, prefix)

    def struct(
        self,
        fields: Sequence[Field],
        nodes: dict[str, Node],
        api_version: int,
        flexible: bool,
        prefix: str,
    ) -> None:
        tagged = []
        topic = {Role.TOPIC_NAME: -1, Role.TOPIC_ID: -1}
        for one in fields:
            if api_version not in one.versions:
                continue
            if flexible and api_version in one.tagged:
                tagged.append(one)
                continue
            node = nodes.get(one.name)
            role = role_of(self.api_key, one)
            self.value(one, node, api_version, flexible, prefix, role)
            if role in topic and isinstance(node, Leaf):
                topic[role] = node.column
        if min(topic.values()) >= 0:
            self.flush()
            name, topic_id = topic[Role.TOPIC_NAME], topic[Role.TOPIC_ID]
            self.emit(prefix, BIND, name, topic_id, self.level)
        if not flexible:
            return
        for one in tagged:
            self.fill(one, nodes[one.name], api_version, prefix)
        self.flush()
        self.section(tagged, nodes, api_version, prefix)

    def section(
        self, tagged: list[Field], nodes: dict[str, Node], api_version: int, prefix: str
    ) -> None:
        """Compile the tagged section after a struct."""
        tags = self.emit(prefix.removesuffix("."), TAGS, len(tagged), self.level)
        entries = [self.emit(prefix + one.name, one.tag) for one in tagged]
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)
        for one, entry in zip(tagged, entries, strict=True):
            self.patch(entry, 1)
            role = role_of(self.api_key, one)
            self.value(one, nodes[one.name], api_version, True, prefix, role)
            self.flush()
            self.emit(prefix + one.name, TAG_END)
        self.depth -= 1
        self.patch(tags, 3)

    def value(
        self,
        this: Field,
        node: Node | None,
        api_version: int,
        flexible: bool,
        prefix: str,
        role: int,
    ) -> None:
        path = prefix + this.name
        compact = flexible and not this.never_flexible
        nullable = NULLABLE_FLAG if api_version in this.nullable else 0
        if isinstance(node, List):
            form = (FORM_COMPACT if compact else FORM_INT32) | nullable
            self.array(this, node, form, api_version, flexible, path, role)
        elif isinstance(node, Struct):
            if nullable:
                self.flush()
                is_tagged = flexible and api_version in this.tagged
                pc = self.emit(path, NULLABLE, node.column, self.level, 0, is_tagged)
                self.touched.add(node.column)
            else:
                self.fixed(K_PRESENT, node.column, path)
            self.struct(this.fields, node.children, api_version, flexible, path + ".")
            if nullable:
                self.flush()
                self.patch(pc, 3)
        elif this.type in (Type.STRING, Type.BYTES, Type.RECORDS):
            self.flush()
            plain = FORM_INT16 if this.type is Type.STRING else FORM_INT32
            form = (FORM_COMPACT if compact else plain) | nullable
            column = -1 if node is None else node.column
            self.emit(path, BYTES, column, self.level, form, role)
            self.touched.add(column)
        else:
            assert isinstance(node, Leaf)
            self.fixed(KIND[this.type], node.column, path, role)

    def array(
        self,
        this: Field,
        node: List,
        form: int,
        api_version: int,
        flexible: bool,
        path: str,
        role: int,
    ) -> None:
        self.flush()
        self.touched.add(node.column)
        size = smallest_element(this, api_version, flexible)
        if isinstance(node.element, Leaf):
            column = node.element.column
            self.touched.add(column)
            kind = KIND[this.type]
            self.emit(path, ARRAY_OF, node.column, self.level, node.level, form, kind, column, role)
            return
        pc = self.emit(path, ARRAY, node.column, self.level, node.level, form, size)
        outer, self.level = self.level, node.level
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)
        body = len(self.paths)
        self.struct(this.fields, node.element.children, api_version, flexible, path + "[].")
        self.flush()
        self.emit(path, NEXT, node.level, body)
        self.depth -= 1
        self.level = outer
        self.patch(pc, 6)

    def fill(self, this: Field, node: Node, api_version: int, prefix: str) -> None:
        """Write the default of a tagged field, for messages without its tag."""
        path = prefix + this.name
        default = this.default
        if isinstance(node, List):
            if default is not None or api_version not in this.nullable:
                self.fixed(K_FILL_32, node.column, path)
        elif isinstance(node, Struct):
            if default is None and api_version in this.nullable:
                return
            self.fixed(K_PRESENT, node.column, path)
            for one in this.fields:
                if api_version in one.versions:
                    self.fill(one, node.children[one.name], api_version, path + ".")
        elif this.type in (Type.STRING, Type.BYTES):
            if default is None and api_version in this.nullable:
                return
            if default:
                raise ValueError(f"{path}: a tagged field's default must be empty or null")
            self.fixed(K_FILL_64, node.column, path)
        elif this.type is Type.UUID:
            if isinstance(default, UUID) and default.int:
                raise ValueError(f"{path}: a tagged uuid's default must be the zero uuid")
            self.fixed(K_FILL_64, node.column, path, value=NO_PLACE)
        else:
            number = default if isinstance(default, (int, float)) else 0
            if this.type is Type.FLOAT64:
                number = struct_module.unpack("<q", struct_module.pack("<d", number))[0]
            self.fixed(_FILL[WIDTH[KIND[this.type]]], node.column, path, value=int(number))


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
    for index, api_version in enumerate(versions):
        entries[index] = len(compiler.paths)
        compiler.touched.clear()
        compiler.message(header, header_version(api_version), head, "header.")
        compiler.message(definition, api_version, body, "")
        compiler.flush()
        compiler.emit("", _END)
        compiler.touched.discard(-1)
        present[index, list(compiler.touched)] = True
    return ColumnPlan(
        api_key=api.key,
        side=side,
        header=head,
        body=body,
        program=np.array(compiler.words, dtype=np.int32),
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
