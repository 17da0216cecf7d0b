"""What ``kdissect definitions`` prints."""

import json

from kdissect.protocol import catalog, describe, grammar
from kdissect.protocol.describe import Change


def test_the_list_has_a_line_for_every_api():
    """93 APIs with versions, flexible versions and drafts."""
    lines = describe.api_list_text().splitlines()
    assert len(lines) == 94
    assert lines[0].split() == ["key", "api", "versions", "flexible", "drafts"]
    assert lines[2].split() == ["1", "Fetch", "0-18", "12+"]
    assert lines[18].split() == ["17", "SaslHandshake", "0-1", "never"]
    assert lines[23].split() == ["22", "InitProducerId", "0-6", "2+", "6"]


def test_an_api_is_described_in_its_notation():
    """The text parses to the definition itself."""
    text = describe.api_text("fetch")
    assert grammar.parse(text) == [catalog.api(1)]


def test_one_version_has_its_fields_only():
    """A version's text has its headers and fields, without ranges."""
    assert (
        describe.api_text("SaslAuthenticate", 1)
        == """\
api 36 SaslAuthenticate, version 1

request, header 1
  auth_bytes: bytes

response, header 0
  error_code: int16
  error_message: string?
  auth_bytes: bytes
  session_lifetime_ms: int64
"""
    )
    assert "version 6, flexible, draft" in describe.api_text("InitProducerId", 6)
    assert "  (empty)" in describe.api_text("ListGroups", 0)


def test_every_version_of_every_api_can_be_described():
    """Text and JSON exist for each version."""
    for key, api in catalog.apis().items():
        for version in range(api.request.versions.first, api.request.versions.last + 1):
            assert describe.api_text(key, version).count("\n") > 4
            json.dumps(describe.api_json(key, version))
        json.dumps(describe.api_json(key))
    json.dumps(describe.api_list_json())


def test_records_are_described_too():
    """The text of a record's file parses to its definition."""
    assert catalog.source("OffsetCommitValue").startswith("group 1 OffsetCommit\n")
    assert catalog.source("TopicRecord").startswith("# Version 0 had other bytes")
    assert catalog.source("FetchResponse") == describe.api_text("Fetch")
    for name, definition in catalog.record_definitions().items():
        (parsed,) = grammar.parse(catalog.source(name))
        assert definition in (parsed, getattr(parsed, "request", 0), getattr(parsed, "response", 0))


def test_json_has_ranges_or_one_version():
    """Without a version each field has its ranges."""
    over_all = describe.api_json("Fetch")
    assert over_all["versions"] == "0-18"
    assert over_all["request"][0] == {
        "name": "cluster_id",
        "type": "string",
        "is_array": False,
        "versions": "12+",
        "nullable_versions": "12+",
        "tagged_versions": "12+",
        "tag": 0,
        "default": None,
        "entity": None,
    }
    one = describe.api_json("Fetch", 18)
    assert (one["request_header_version"], one["response_header_version"]) == (2, 1)
    (topics,) = [field for field in one["request"] if field["name"] == "topics"]
    (partitions,) = [field for field in topics["fields"] if field["name"] == "partitions"]
    (watermark,) = [field for field in partitions["fields"] if field["name"] == "high_watermark"]
    assert watermark["default"] == str(2**63 - 1)  # too large for a JSON number


def test_changes_between_versions():
    """Fields that were removed or added are listed with their types."""
    changes = describe.compare_versions("Produce", 12, 13)
    assert changes == [
        Change("request", "topic_data.name", "removed", "name: string @topicName", ""),
        Change("request", "topic_data.topic_id", "added", "", "topic_id: uuid"),
        Change("response", "responses.name", "removed", "name: string @topicName", ""),
        Change("response", "responses.topic_id", "added", "", "topic_id: uuid"),
    ]
    assert describe.comparison_text("Heartbeat", 1, 2) == (
        "Heartbeat: version 1 to 2\n\nrequest\n  same bytes\n\nresponse\n  same bytes\n"
    )
    text = describe.comparison_text("Fetch", 11, 12)
    assert "  ~ plain -> flexible encoding\n" in text
    assert "  + responses.partitions.snapshot_id: SnapshotId tag 2\n" in text
    assert "snapshot_id.epoch" not in text
    document = describe.comparison_json("Produce", 12, 13)
    assert document["changes"][1]["after"] == "topic_id: uuid"
    json.dumps(document)


def test_a_field_that_becomes_nullable_is_a_change():
    """The text has both types."""
    (change,) = [
        each for each in describe.compare_versions("Metadata", 0, 1) if each.side == "request"
    ]
    assert (change.what, change.path) == ("changed", "topics")
    assert "~ topics: [MetadataRequestTopic] -> [MetadataRequestTopic]?" in (
        describe.comparison_text("Metadata", 0, 1)
    )
