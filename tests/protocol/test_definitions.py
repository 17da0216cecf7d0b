"""The definition files agree with Kafka's own.

Compared field by field, for every version, with the facts of the releases beside the checkout, and
with a real jar that ``KDISSECT_KAFKA_JAR`` names (a new Kafka release is found out this way).
The walk over Kafka's JSON here shares nothing with `tools.update_definitions`.
"""

import csv
import json
import os
from pathlib import Path

import pytest

from kdissect.protocol import catalog
from kdissect.protocol.model import Type
from tests.material import DEFINITIONS as FACTS
from tests.material import needs_material
from tests.truth.definitions import snake_case, versions_of
from tools import update_definitions

NEWEST, OLD = "4.3.1", "3.9.1"
SCALARS = {kind.value for kind in Type} - {"struct"}


def default_said(field, is_array, kind, nullable):
    said = field.get("default", "")
    if said == "null":
        return None
    if said is None or said == "":  # JSON's null is no default to Kafka's generator
        return "zero"
    if kind == "bool":
        return "zero" if said in (False, "false") else True
    if kind == "string":
        return said
    value = said if isinstance(said, int) else int(said, 0)
    return value or "zero"


def facts_tree(fields, structs, version):
    tree = []
    for field in fields:
        tagged = version in versions_of(field.get("taggedVersions"))
        present = versions_of(field.get("versions", field.get("taggedVersions")))
        if version not in present:
            continue
        type_name = field["type"].removeprefix("[]")
        is_array = field["type"].startswith("[]")
        inner = field.get("fields", structs.get(type_name, ()))
        nullable = version in versions_of(field.get("nullableVersions"))
        tree.append(
            (
                snake_case(field["name"]),
                type_name if type_name in SCALARS else "struct",
                is_array,
                nullable,
                int(field["tag"]) if tagged else None,
                default_said(field, is_array, type_name, nullable),
                field.get("entityType", ""),
                field.get("mapKey", False),
                field.get("flexibleVersions") == "none",
                facts_tree(inner, structs, version),
            )
        )
    return tree


def facts_of_version(facts, version):
    structs = {each["name"]: each["fields"] for each in facts.get("commonStructs", ())}
    flexible = version in versions_of(facts.get("flexibleVersions"))
    return flexible, facts_tree(facts["fields"], structs, version)


def our_default(field):
    value = field.default
    empty = value is not None and not isinstance(value, bool) and not value
    if empty or value is False or getattr(value, "int", 1) == 0:
        return "zero"
    if value is None and field.type is Type.RECORDS and field.nullable:
        return "zero"
    return value


def our_tree(fields, version):
    return [
        (
            field.name,
            field.type.value,
            field.is_array,
            version in field.nullable,
            field.tag if version in field.tagged else None,
            our_default(field),
            field.entity,
            field.map_key,
            field.never_flexible,
            our_tree(field.fields, version),
        )
        for field in fields
        if version in field.versions
    ]


def our_version(definition, version):
    return version in definition.flexible, our_tree(definition.fields, version)


def layout(described):
    """The definition without names, defaults, entities and keys, which change no byte."""
    flexible, tree = described

    def bare(fields):
        return [
            (field[1], field[2], field[3], field[4], field[8], bare(field[9])) for field in fields
        ]

    return flexible, bare(tree)


def definition_for(facts):
    if facts["type"] in ("request", "response"):
        return catalog.api(facts["apiKey"]).side(facts["type"])
    return catalog.definition(facts["name"])


def release(name):
    for path in sorted((FACTS / name).glob("*.json")):
        yield json.loads(path.read_text(encoding="utf-8"))


def compare(all_facts):
    compared = 0
    for facts in all_facts:
        versions = versions_of(facts["validVersions"])
        if not versions:
            continue
        definition = definition_for(facts)
        assert facts["name"] == definition.name
        if facts["type"] in ("metadata", "coordinator-key", "coordinator-value"):
            assert facts["apiKey"] == definition.record_key
        for version in versions:
            assert version in definition.versions, f"{definition.name} v{version} is new"
            ours = our_version(definition, version)
            assert ours == facts_of_version(facts, version), f"{definition.name} v{version}"
            compared += 1
    return compared


@needs_material
def test_newest_release_is_described_word_by_word():
    """Each definition equals Kafka's own JSON."""
    assert compare(release(NEWEST)) == 734  # 604 of messages


@needs_material
def test_versions_that_only_the_older_release_has_are_described_word_by_word():
    """Dropped versions equal the older JSON."""
    newest = {facts["name"]: versions_of(facts["validVersions"]) for facts in release(NEWEST)}
    compared = 0
    for facts in release(OLD):
        if facts["type"] not in ("request", "response"):
            continue
        definition = definition_for(facts)
        for version in versions_of(facts["validVersions"]):
            if version in newest.get(definition.name, ()):
                continue
            ours, theirs = our_version(definition, version), facts_of_version(facts, version)
            assert layout(ours) == layout(theirs), f"{definition.name} v{version}"
            assert [field[0] for field in ours[1]] == [field[0] for field in theirs[1]]
            compared += 1
    assert compared == 2 * 59


@needs_material
def test_releases_disagree_only_where_the_file_says_so():
    """Differences between releases are notes in the files."""
    for facts in release(OLD):
        if facts["type"] not in ("request", "response", "metadata"):
            continue
        definition = definition_for(facts)
        for version in versions_of(facts["validVersions"]):
            ours, theirs = our_version(definition, version), facts_of_version(facts, version)
            plain = [
                (flexible, [field for field in tree if field[4] is None])
                for flexible, tree in (ours, theirs)
            ]
            if layout(plain[0]) != layout(plain[1]):
                notes = definition.notes
                if facts["type"] != "metadata":
                    notes = catalog.api(facts["apiKey"]).notes
                assert any(f"ersion {version} had other bytes" in note for note in notes), facts[
                    "name"
                ]


@needs_material
def test_pairs_header_versions_and_drafts_are_kafkas():
    """The list of versions equals the one of Kafka's classes."""
    with (FACTS / "pairs.csv").open(encoding="utf-8") as file:
        rows = {(int(row["api_key"]), int(row["api_version"])): row for row in csv.DictReader(file)}
    ours = {
        (key, version)
        for key, api in catalog.apis().items()
        for version in range(api.request.versions.first, api.request.versions.last + 1)
    }
    assert ours == set(rows)
    for (key, version), row in rows.items():
        api = catalog.api(key)
        assert api.name == row["api_name"]
        assert api.request_header_version(version) == int(row["request_header_version"])
        assert api.response_header_version(version) == int(row["response_header_version"])
        assert (version in api.request.flexible) == (row["flexible"] == "1")
        assert (version in api.request.unstable) == (row["unstable"] == "1")


@pytest.mark.skipif(
    "KDISSECT_KAFKA_JAR" not in os.environ, reason="KDISSECT_KAFKA_JAR names no Kafka jar"
)
def test_a_kafka_jar_says_the_same():
    """A jar named by KDISSECT_KAFKA_JAR has the same definitions."""
    facts = update_definitions.facts_of_jar(Path(os.environ["KDISSECT_KAFKA_JAR"]))
    assert compare(facts) > 0
