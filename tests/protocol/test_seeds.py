"""All grammars of the five editions of the protocol guide, against the definitions.

The guides (parsed, beside the checkout) print types but neither tags nor presence bytes; names
differ between editions. So wire types and nesting are compared, and for the newest edition names
and nullable strings too; what it never prints is in ``nullables_and_tags.csv``.
"""

import csv
import json

import pytest

from kdissect.protocol import catalog
from kdissect.protocol.model import Type
from tests.material import ABSENT, SEEDS

pytestmark = pytest.mark.skipif(not SEEDS.is_dir(), reason=ABSENT)

TAGS = "tags"
ANY = "any"  # the guide lost the type
BLOBS = {"BYTES", "RECORDS", "MESSAGE_SET"}
# Announced in full by the newest edition, later than the definition below it was drafted.
FIXED = {Type.BOOL: "INT8", Type.RECORDS: "BYTES"}


def guide_type(text, compact):
    if text is None:
        return ANY
    text = text.replace("COMPACT_", "").replace("NULLABLE_", "")
    if text in BLOBS:
        text = "BYTES"
    if text == "BOOLEAN":
        text = "INT8"  # one edition prints it so; the byte is the same
    return ("COMPACT_" + text) if compact else text


def guide_shape(fields):
    shape = []
    for field in fields:
        if field["kind"] == "array":
            inner = (
                guide_shape(field["fields"])
                if field["elem"] == "struct"
                else [guide_type(field["elem"], field.get("elem_compact"))]
            )
            shape.append([bool(field["compact"]), *inner])
        elif field["kind"] == "struct":
            shape += guide_shape(field["fields"])
        elif field["kind"] == "tagged":
            shape.append(TAGS)
        else:
            shape.append(guide_type(field["type"], field["compact"]))
    return shape


def our_type(field, flexible):
    name = FIXED.get(field.type, field.type.value.upper())
    compact = flexible and field.type in (Type.STRING, Type.BYTES, Type.RECORDS)
    return ("COMPACT_" + name) if compact else name


def our_shape(fields, version, flexible):
    shape = []
    for field in fields:
        if version not in field.versions or version in field.tagged:
            continue
        if field.is_array:
            inner = (
                our_shape(field.fields, version, flexible)
                if field.type is Type.STRUCT
                else [our_type(field, flexible)]
            )
            shape.append([flexible, *inner])
        elif field.type is Type.STRUCT:
            shape += our_shape(field.fields, version, flexible)
        else:
            shape.append(our_type(field, flexible))
    return [*shape, TAGS] if flexible else shape


def agree(guide, ours):
    if isinstance(guide, list) and isinstance(ours, list):
        return len(guide) == len(ours) and all(map(agree, guide, ours))
    return guide in (ANY, ours)


def named(fields, version):
    """(name, nullable string) in wire order, structs opened."""
    for field in fields:
        if version in field.versions and version not in field.tagged:
            is_string = field.type is Type.STRING and not field.is_array
            yield field.name, is_string and version in field.nullable
            yield from named(field.fields, version)


def guide_named(fields):
    for field in fields:
        if field["kind"] != "tagged":
            yield field["name"], "NULLABLE_STRING" in str(field["type"])
            yield from guide_named(field.get("fields", ()))


def grammars(seed):
    text = (SEEDS / f"seed_{seed:03d}.json").read_text(encoding="utf-8")
    return json.loads(text)["grammars"]


@pytest.mark.parametrize(("seed", "count"), [(0, 538), (1, 70), (2, 35), (3, 16), (4, 50)])
def test_every_grammar_of_a_guide_is_covered(seed, count):
    """Each printed grammar has the shape of our definition in its version."""
    found = grammars(seed)
    assert len(found) == count
    for grammar in found:
        version = grammar["version"]
        definition = catalog.api(grammar["api_key"]).side(grammar["direction"])
        assert version in definition.versions
        flexible = version in definition.flexible
        ours = our_shape(definition.fields, version, flexible)
        guide = guide_shape(grammar["fields"])
        if seed == 3:  # a message set is printed with its size before it
            guide = without_sizes(guide, grammar["fields"])
        assert agree(guide, ours), f"{definition.name} v{version}\n{guide}\n{ours}"


def without_sizes(shape, fields):
    """The hand-written guide prints a size, then a message set; together they are bytes."""
    made = []
    for part, field in zip(shape, fields, strict=True):
        if isinstance(part, list):
            part = (
                [part[0], *without_sizes(part[1:], field["fields"])]
                if field.get("fields")
                else part
            )
        if field["type"] == "MESSAGE_SET":
            assert made.pop() == "INT32"
        made.append(part)
    return made


def test_newest_guide_has_the_same_names_and_nullable_strings():
    """Names and nullable strings of the newest guide are those of the definitions."""
    for grammar in grammars(0):
        definition = catalog.api(grammar["api_key"]).side(grammar["direction"])
        ours = list(named(definition.fields, grammar["version"]))
        assert list(guide_named(grammar["fields"])) == ours, definition.name


def test_tags_and_nullable_arrays_match_a_list():
    """Tagged fields and nullable arrays, which the guide does not print, match a list."""
    with (SEEDS / "nullables_and_tags.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 150
    for row in rows:
        version = int(row["version"])
        fields = catalog.api(int(row["api_key"])).side(row["direction"]).fields
        for name in row["path"].strip("/").split("/") if row["path"] != "/" else ():
            field = next(each for each in fields if each.name == name and version in each.versions)
            fields = field.fields
        if row["kind"] == "tagged":
            (tagged,) = [
                each for each in fields if version in each.tagged and each.tag == int(row["tag"])
            ]
            if row["source"] == "kafka-json":  # the others have names of their own
                assert tagged.name == row["tagged_name"]
        else:
            assert version in field.nullable, row
            assert field.is_array == (row["kind"] == "nullable_array")
