"""Plans: one layout per side of an API, roles from definitions, bounds of the output."""

from dataclasses import replace

import numpy as np
import pytest

from kdissect.protocol import catalog, column_plan
from kdissect.protocol.column_plan import ColumnPlan, Node, Role, compile_plan, role_of
from kdissect.protocol.model import ALWAYS, SIDES, Api, Definition, Field, Type, VersionRange


def all_plans() -> list[ColumnPlan]:
    return [column_plan.plan(key, side) for key in catalog.apis() for side in SIDES]


def nodes_of(root: Node, level: int = 0) -> list[tuple[int, Node]]:
    """(level, column) of the nodes inside a struct."""
    found: list[tuple[int, Node]] = []
    for node in root.children.values():
        found += [(level, node), *nodes_of(node, level)]
        if node.element is not None:
            if node.element.at >= 0:
                found.append((node.level, node.element))
            found += nodes_of(node.element, node.level)
    return found


def test_all_plans_compile() -> None:
    """All versions of all APIs, both sides: one program each."""
    assert sum(int((one.entries >= 0).sum()) for one in all_plans()) == 722


def test_columns_share_no_bytes() -> None:
    """The columns of a level fill its rows, and the header's come first."""
    for one in all_plans():
        head = nodes_of(one.header)
        places: list[list[int]] = [[] for _ in one.row_size]
        for level, node in head + nodes_of(one.body):
            width = 4 if node.element is not None else column_plan.WIDTH[node.type]
            places[level] += range(node.at, node.at + 1 + width)
        for level, size in enumerate(one.row_size.tolist()):
            assert sorted(places[level]) == list(range(size))
        assert all(level == 0 and node.at < one.header_size for level, node in head)
        assert len(one.program) == len(one.paths)
        assert len(one.templates) == one.row_size.sum() * (len(one.entries) + 1)


def test_a_version_reads_its_fields_and_no_others() -> None:
    """Fetch responses have topic names until version 12, ids from 13 on."""
    fetch = column_plan.plan(1, "response")
    topics = fetch.body.children["responses"].element
    assert topics is not None
    assert fetch.first_version == 0
    ends = np.append(fetch.entries, len(fetch.program))[1:]
    for name, versions in (("topic", range(13)), ("topic_id", range(13, 19))):
        path = f"responses[].{name}"
        read = [
            version
            for version, (low, high) in enumerate(zip(fetch.entries, ends, strict=True))
            if path in fetch.paths[low:high]
        ]
        assert read == list(versions)


def test_element_bytes_bound_the_rows() -> None:
    """A byte on the wire costs a bounded number of bytes in the rows, whatever the message."""
    arrays = [one.program[one.program["op"] == column_plan.ARRAY] for one in all_plans()]
    worst = max(
        float((one.row_size[steps["child_level"]] / steps["size"]).max())
        for one, steps in zip(all_plans(), arrays, strict=True)
        if len(steps)
    )
    print(f"at worst {worst:.1f} bytes of rows for a byte of an array")
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
