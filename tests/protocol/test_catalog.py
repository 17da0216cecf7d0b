"""Finding definitions by number and by name."""

import sys

import pytest

from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import RETRIABLE, ErrorCode, error_name
from kdissect.protocol.model import snake_case
from tests.processes import run


def test_every_pair_of_the_releases_is_there():
    """93 APIs with 361 versions, in order of their keys."""
    pairs = [
        (key, version)
        for key, api in catalog.apis().items()
        for version in range(api.request.versions.first, api.request.versions.last + 1)
    ]
    assert (len(catalog.apis()), len(pairs)) == (93, 361)
    assert all(catalog.has_version(key, version) for key, version in pairs)
    assert list(catalog.apis()) == sorted(catalog.apis())


def test_both_sides_have_the_same_versions():
    """Request and response have equal ranges of versions and of flexible ones."""
    for api in catalog.apis().values():
        assert api.request.versions == api.response.versions
        assert api.request.flexible == api.response.flexible


@pytest.mark.parametrize("name", ["Fetch", "fetch", "FetchRequest", "FetchResponse", "1", 1])
def test_an_api_is_found_by_any_of_its_names(name):
    """Its name in any case, the names of its messages, and its key."""
    assert catalog.api(name).name == "Fetch"


@pytest.mark.parametrize("key", [-1, 93, 32767])
def test_an_unknown_key_is_a_value_error(key):
    """ValueError names the range of keys."""
    with pytest.raises(ValueError, match="0 to 92"):
        catalog.api(key)
    assert not catalog.has_version(key, 0)


def test_versions_beyond_the_known_are_not_there():
    """Neither a version above the highest nor -1 exists."""
    assert not catalog.has_version(1, 19)
    assert not catalog.has_version(1, -1)


@pytest.mark.parametrize(
    "name",
    ["FetchRequest", "ResponseHeader", "OffsetCommitKey", "OffsetCommitValue", "TopicRecord"],
)
def test_a_definition_is_found_by_kafkas_name(name):
    """Messages, records and headers have Kafka's names."""
    assert catalog.definition(name).name == name


def test_every_record_definition_is_found_by_its_name():
    """The name of a record leads to its definition."""
    for name, definition in catalog.record_definitions().items():
        assert catalog.definition(name) is definition


@pytest.mark.parametrize("find", [catalog.definition, catalog.source])
def test_an_unknown_definition_is_answered_with_near_ones(find):
    """ValueError suggests a similar name."""
    with pytest.raises(ValueError, match="OffsetCommitValue"):
        find("OffsetComitValue")


def test_records_are_found_by_their_types():
    """The type in a record's key leads to its definition, for each kind of log."""
    key, value = catalog.records("group")[1]
    assert key is not None
    assert (key.name, value.name) == ("OffsetCommitKey", "OffsetCommitValue")
    assert catalog.records("transaction")[0][1].name == "TransactionLogValue"
    assert catalog.records("share")[0][1].name == "ShareSnapshotValue"
    assert catalog.records("metadata")[2] == (None, catalog.definition("TopicRecord"))
    assert catalog.records("control")[0] is catalog.records("control")[1]
    assert catalog.records("control")[6][1].name == "VotersRecord"


def test_header_versions_follow_kafkas_rules():
    """ControlledShutdown v0 and ApiVersions responses are exceptions (KIP-511)."""
    assert catalog.api("ControlledShutdown").request_header_version(0) == 0
    assert catalog.api("ControlledShutdown").request_header_version(1) == 1
    assert catalog.api("ApiVersions").request_header_version(3) == 2
    assert catalog.api("ApiVersions").response_header_version(4) == 0
    assert catalog.api("Fetch").response_header_version(12) == 1
    assert catalog.REQUEST_HEADER.fields[-1].never_flexible


def test_one_api_costs_one_file():
    """A command that shows one message does not pay for the other 92 APIs."""
    script = (
        "from kdissect.protocol import catalog; catalog.api(1); catalog.api('Fetch');"
        "assert catalog._api.cache_info().currsize == 1"
    )
    run(sys.executable, "-c", script, check=True)


def test_api_keys_are_those_of_the_definitions():
    """The enum ApiKey has the keys and names of the definitions."""
    names = {key: snake_case(api.name).upper() for key, api in catalog.apis().items()}
    assert {key.value: key.name for key in ApiKey} == names


def test_error_codes_have_no_holes():
    """The enum ErrorCode has -1 to 133; other codes have a made name."""
    assert list(ErrorCode) == list(range(-1, 134))
    expected = ("NOT_LEADER_OR_FOLLOWER", True, False)
    assert (ErrorCode(6).name, 6 in RETRIABLE, 1 in RETRIABLE) == expected
    assert (error_name(0), error_name(35)) == ("NONE", "UNSUPPORTED_VERSION")
    assert error_name(9999) == "UNKNOWN_ERROR_CODE_9999"
