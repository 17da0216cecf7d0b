"""Plans: one layout per side of an API, roles from definitions, bounds of the output."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kdissect.protocol import catalog, column_plan
from kdissect.protocol.column_plan import (
    ColumnPlan,
    Leaf,
    List,
    Node,
    Role,
    Struct,
    compile_plan,
    role_of,
)
from kdissect.protocol.model import ALWAYS, SIDES, Api, Definition, Field, Type, VersionRange


def all_plans() -> list[ColumnPlan]:
    return [column_plan.plan(key, side) for key in catalog.apis() for side in SIDES]


def nodes_of(root: Struct) -> list[Node]:
    found: list[Node] = []
    for node in root.children.values():
        found.append(node)
        inner = node.element if isinstance(node, List) else node
        if inner is not node and isinstance(inner, Leaf):
            found.append(inner)
        if isinstance(inner, Struct):
            found += nodes_of(inner)
    return found


def test_all_plans_compile() -> None:
    """All versions of all APIs, both sides: one program each."""
    assert sum(int((one.entries >= 0).sum()) for one in all_plans()) == 722


def test_columns_are_numbered_once() -> None:
    """Every node has one column, levels hold neighbours, and the header's columns come first."""
    for one in all_plans():
        head = [node.column for node in nodes_of(one.header)]
        nodes = nodes_of(one.header) + nodes_of(one.body)
        columns = sorted(node.column for node in nodes)
        assert columns == list(range(len(one.column_width)))
        assert head == list(range(one.header_count))
        assert one.level_first[0] == 0
        assert one.level_first[-1] == len(columns)
        assert (np.diff(one.level_first) >= 0).all()
        assert len(one.program) == len(one.paths)


def test_a_version_fills_its_fields_and_no_others() -> None:
    """`present` of Fetch responses: topic names until version 12, ids from 13 on."""
    fetch = column_plan.plan(1, "response")
    topics = fetch.body.children["responses"]
    assert isinstance(topics, List)
    assert isinstance(topics.element, Struct)
    name, ident = (topics.element.children[each].column for each in ("topic", "topic_id"))
    assert fetch.first_version == 0
    assert fetch.present[:, name].tolist() == [True] * 13 + [False] * 6
    assert fetch.present[:, ident].tolist() == [False] * 13 + [True] * 6


def test_element_bytes_bound_the_builders() -> None:
    """A byte on the wire costs a bounded number of bytes in the builders, whatever the message."""
    worst = 0.0
    for one in all_plans():
        width = one.column_width + 1
        instructions = iter(one.program)
        for step in instructions:
            if step["op"] in (column_plan.RUN, column_plan.TAGS):
                for _ in range(step["count"]):
                    next(instructions)
            elif step["op"] == column_plan.ARRAY:
                level = step["child_level"]
                first, last = one.level_first[level : level + 2]
                worst = max(worst, float(width[first:last].sum()) / step["smallest"])
    print(f"at worst {worst:.1f} builder bytes for a byte of an array")
    assert worst < 64


def test_roles_of_fields() -> None:
    """A field's role comes from its API, its name, its type and its entity."""

    def role(key: int, name: str, kind: Type, entity: str = "") -> Role:
        return role_of(key, Field(name, kind, ALWAYS, entity=entity))

    assert role(3, "error_code", Type.INT16) is Role.ERROR_CODE
    assert role(24, "partition_error_code", Type.INT16) is Role.ERROR_CODE
    assert role(3, "error_code", Type.INT32) is Role.NONE
    assert role(3, "name", Type.STRING, "topicName") is Role.TOPIC_NAME
    assert role(3, "name", Type.STRING) is Role.NONE
    assert role(0, "base_offset", Type.INT64) is Role.BASE_OFFSET
    assert role(1, "base_offset", Type.INT64) is Role.NONE
    assert role(0, "records", Type.RECORDS) is Role.RECORDS
    assert role(59, "unaligned_records", Type.RECORDS) is Role.RECORDS
    assert role(1, "topic_id", Type.UUID) is Role.TOPIC_ID
    assert role(1, "replica_directory_id", Type.UUID) is Role.NONE
    assert role(42, "groups_names", Type.STRING, "groupId") is Role.GROUP_ID


def test_every_records_field_has_a_partition_before_it() -> None:
    """In the definitions with records an int32 with the role PARTITION precedes them."""
    met = []

    def walk(key: int, fields: tuple[Field, ...]) -> None:
        seen = False
        for one in fields:
            if one.type is Type.RECORDS:
                met.append(key)
                assert seen, key
            if role_of(key, one) is Role.PARTITION and not one.is_array:
                assert not seen, "one partition per struct"
                seen = True
            walk(key, one.fields)

    for key, api in catalog.apis().items():
        for side in SIDES:
            walk(key, api.side(side).fields)
    assert met == [0, 1, 59, 78]


def api_of(*fields: Field) -> Api:
    definition = Definition("XRequest", VersionRange(0, 1), ALWAYS, fields)
    return Api(99, "X", definition, definition)


def test_definitions_without_columns_are_refused() -> None:
    """A field with two types, or a tagged one with a default, has no column."""
    header = catalog.REQUEST_HEADER
    text = Field("x", Type.STRING, VersionRange(0, 0))
    again = replace(text, versions=VersionRange(1, 1))
    assert compile_plan(api_of(text, again), "request", header).body.children["x"].name == "x"
    with pytest.raises(ValueError, match="x: fields of one name differ in type"):
        compile_plan(api_of(text, replace(again, type=Type.INT8)), "request", header)
    tagged = Field("y", Type.STRING, ALWAYS, tagged=ALWAYS, tag=0, default="full")
    with pytest.raises(ValueError, match="y: a tagged field's default"):
        compile_plan(api_of(tagged), "request", header)


def test_an_unknown_api_or_side_is_refused() -> None:
    """A plan for an unknown API or side is refused by name."""
    with pytest.raises(ValueError, match="no API has key 999"):
        column_plan.plan(999, "request")
    with pytest.raises(ValueError, match="side must be"):
        column_plan.plan(1, "both")
