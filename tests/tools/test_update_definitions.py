"""Bringing the definition files up to a release: merging, jars, and that a second run is idle."""

import json
import shutil
import zipfile

import pytest

from kdissect.errors import DefinitionError
from kdissect.protocol import grammar
from tests.material import DEFINITIONS as FACTS
from tests.material import needs_material
from tools import update_definitions as update
from tools.definition_text import format_field
from tools.merge_definitions import merge


def facts(versions, *fields, **more):
    return {
        "apiKey": 7,
        "type": "request",
        "name": "ThingRequest",
        "validVersions": versions,
        "flexibleVersions": "2+",
        "fields": [field(*each.split()) for each in fields],
        **more,
    }


def field(name, kind, versions, **more):
    return {"name": name, "type": kind, "versions": versions, **more}


def lines(definition):
    return [format_field(each) for each in definition.fields]


def merged(old, new):
    return merge(update.definition_of(old), update.definition_of(new))


def test_names_follow_kafkas_rule():
    """The examples are those where the rule is not obvious."""
    expected = {
        "ThrottleTimeMs": "throttle_time_ms",
        "KRaftVersion": "k_raft_version",
        "isKRaftController": "is_k_raft_controller",
        "Enable2Pc": "enable2_pc",
        "V3AndBelowTopics": "v3_and_below_topics",
        "V0Host": "v0_host",
        "timeoutMs": "timeout_ms",
        "LastKnownELR": "last_known_elr",
    }
    assert {name: update.snake_case(name) for name in expected} == expected


def test_dropped_versions_keep_their_layout():
    """Versions that the newer release lacks keep their fields."""
    both = merged(
        facts("0-3", "Gone string 0-1", "Kept int32 0+", "Wide int32 0+"),
        facts("2-4", "Kept int32 2+", "Added int64 4+", "Wide int32 0+"),
    )
    assert tuple(both.versions) == (0, 4)
    expected = ["gone: string 0-1", "kept: int32 0+", "added: int64 4+", "wide: int32 0+"]
    assert lines(both) == expected


def test_newest_names_win_where_both_releases_have_the_version():
    """A renamed field has its old name in old versions only."""
    both = merged(facts("0-1", "OldName int32 0+"), facts("1-2", "NewName int32 0+"))
    assert lines(both) == ["old_name: int32 0", "new_name: int32 1+"]


def test_a_new_version_changes_only_the_lines_it_touches():
    """The diff of a release is small."""
    old = facts("0-3", "A int32 0+", "B string 1+")
    new = facts("0-4", "A int32 0+", "B string 1+", "C bool 4+")
    assert lines(merged(old, new)) == [*lines(update.definition_of(old)), "c: bool 4+"]


def test_fields_of_structs_are_merged_too():
    """Structs are merged field by field."""

    def nested(versions, *inner):
        made = facts(versions)
        made["fields"] = [
            {**field("Items", "[]Item", "0+"), "fields": [field(*each.split()) for each in inner]}
        ]
        return made

    both = merged(
        nested("0-1", "A int32 0", "B int32 0+"), nested("1-2", "B int32 0+", "C int8 2+")
    )
    (items,) = both.fields
    expected = ["a: int32 0", "b: int32 0+", "c: int8 2+"]
    assert [format_field(each) for each in items.fields] == expected


def test_a_release_that_lost_its_newest_version_is_refused():
    """DefinitionError names the version."""
    with pytest.raises(DefinitionError, match="lacks version 3"):
        merged(facts("0-3"), facts("0-2"))


def test_comments_of_kafkas_json_are_passed_over():
    """Slashes inside of strings stay."""
    text = '// licence\n{"name": "a//b", // why\n "x": 1}'
    assert update.parse_json(text) == {"name": "a//b", "x": 1}


@pytest.fixture
def release_jar(tmp_path):
    """A jar as Kafka packs one, with one new version of one API and one new record."""
    request = facts(
        "0-1", "A int32 0+", "B bool 1+", apiKey=93, name="NovelRequest", flexibleVersions="0+"
    )
    response = {**request, "type": "response", "name": "NovelResponse"}
    record = facts("0", "A int32 0+", apiKey=99, name="NovelRecord", type="metadata")
    jar = tmp_path / "kafka-clients-9.0.1.jar"
    with zipfile.ZipFile(jar, "w") as archive:
        for each in (request, response, record):
            text = "// Licensed under\n" + json.dumps(each)
            archive.writestr(f"common/message/{each['name']}.json", text)
    return jar


def test_a_jar_is_merged_into_the_files(tmp_path, release_jar, capsys):
    """New definitions and releases are written and listed."""
    out = tmp_path / "definitions"
    shutil.copytree(update.DEFINITIONS, out)
    update.main(["--jar", str(release_jar), "--out", str(out)])
    expected = ["93_novel.kdef", "records/novel_record.kdef", "releases.kdef", "3 files changed"]
    assert capsys.readouterr().out.splitlines() == expected
    (api,) = grammar.parse((out / "93_novel.kdef").read_text(encoding="utf-8"))
    assert lines(api.request) == ["a: int32 0+", "b: bool 1+"]
    assert (out / "releases.kdef").read_text(encoding="utf-8").endswith("release 9.0.1\n")
    update.main(["--jar", str(release_jar), "--out", str(out)])
    assert capsys.readouterr().out == "0 files changed\n"


@needs_material
def test_packaged_files_follow_from_the_facts(tmp_path):
    """The command writes the files as they are: from all releases, and from one after the other."""
    releases = {
        folder.name: [update.parse_json(path.read_text()) for path in sorted(folder.glob("*.json"))]
        for folder in FACTS.iterdir()
        if folder.is_dir()
    }
    update.update(releases, tmp_path / "at_once")
    older = {label: facts for label, facts in releases.items() if label < "4"}
    update.update(older, tmp_path / "one_by_one")
    newer = {label: releases[label] for label in releases.keys() - older.keys()}
    update.update(newer, tmp_path / "one_by_one")
    packaged = {
        path.relative_to(update.DEFINITIONS): path.read_text(encoding="utf-8")
        for path in update.definition_files(update.DEFINITIONS)
    }
    for made in ("at_once", "one_by_one"):
        folder = tmp_path / made
        written = {
            path.relative_to(folder): path.read_text(encoding="utf-8")
            for path in update.definition_files(folder)
        }
        if made == "one_by_one":  # notes name the release before the run, not the very last one
            written = {path: without_notes(text) for path, text in written.items()}
            packaged = {path: without_notes(text) for path, text in packaged.items()}
        assert written == packaged


def without_notes(text):
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
