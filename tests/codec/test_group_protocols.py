"""Group protocols in messages decode by type or by their bytes, whole or cut."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.codec import message_codec
from kdissect.codec.group_protocols import (
    CONNECT,
    CONSUMER,
    STREAMS_ASSIGNOR,
    Embedded,
    assignments,
    principals,
    subscriptions,
)
from kdissect.protocol import catalog
from kdissect.status import Status
from tests.codec.vectors import internal_vectors, same, value_definition


def texts(*values: str | None) -> pa.Array:
    return pa.array(values, pa.string())


def blobs(values: list[bytes | None]) -> pa.Array:
    return pa.array(values, pa.binary())


def encoded(name: str, version: int, values: dict[str, Any], prefix: bool = True) -> bytes:
    body = message_codec.encode(catalog.definition(name), version, values)
    return (version.to_bytes(2, "big") if prefix else b"") + body


def row(embedded: Embedded, at: int = 0) -> Any:
    embedded.column.validate(full=True)
    return embedded.column[at].as_py()


@pytest.mark.parametrize("told", [True, False])
def test_kafkas_own_consumer_subscriptions_and_assignments_decode(told: bool) -> None:
    """Every vector decodes, with its protocol type and by its bytes alone."""
    for vector in internal_vectors()["consumer_protocol"]:
        definition = value_definition(vector)
        read = subscriptions if definition.name.endswith("Subscription") else assignments
        kind = texts(CONSUMER if told else None)
        found = read(blobs([vector["value"]]), kind, texts("range"))
        assert not found.faults
        got = row(found)
        assert (got["protocol"], got["format_version"]) == (CONSUMER, vector["version"])
        assert got[CONNECT] is None
        fields = {one.name: got[one.name] for one in definition.fields}
        same(vector["value_body"], fields, definition.fields)


@pytest.mark.parametrize("told", [True, False])
def test_streams_subscriptions_are_in_the_user_data(told: bool) -> None:
    """The assignor's name or the content shows Kafka Streams."""
    for vector in internal_vectors()["streams_subscription"]:
        values = {"topics": ["a"], "user_data": vector["value"]}
        data = encoded("ConsumerProtocolSubscription", 3, values)
        name = texts(STREAMS_ASSIGNOR if told else "")
        found = subscriptions(blobs([data]), texts(CONSUMER), name)
        assert not found.faults
        same(vector["value_body"], row(found)["user_data_decoded"], value_definition(vector).fields)


def test_user_data_of_other_assignors_stays_as_it_is() -> None:
    """The bytes of Streams under another name are another assignor's."""
    vector = internal_vectors()["streams_subscription"][0]
    values = {"topics": [], "user_data": vector["value"]}
    data = encoded("ConsumerProtocolSubscription", 0, values)
    got = row(subscriptions(blobs([data]), texts(CONSUMER), texts("sticky")))
    assert got["user_data"] == vector["value"]
    assert got["user_data_decoded"] is None


def test_streams_assignments_with_their_tasks() -> None:
    """Active and standby tasks are decoded from the user data."""
    standby = {"topic_group_id": 1, "partition": 2, "named_topology": [], "partitions": []}
    inner = {
        "version": 11,
        "active_tasks": [{"topic_group_id": 0, "partition": 3, "named_topology": []}],
        "standby_tasks": [standby],
        "next_rebalance_ms": 77,
    }
    user_data = encoded("StreamsAssignment", 11, inner, prefix=False)
    values = {"assigned_partitions": [], "user_data": user_data}
    data = encoded("ConsumerProtocolAssignment", 1, values)
    found = assignments(blobs([data]), texts(None), texts(STREAMS_ASSIGNOR))
    got = row(found)["user_data_decoded"]
    assert got["active_tasks"][0]["partition"] == 3
    assert (got["standby_tasks"][0]["topic_group_id"], got["next_rebalance_ms"]) == (1, 77)


CONNECT_ASSIGNMENT = {
    "error": 0,
    "leader": "connect-1-4f",
    "leader_url": "http://w:8083/",
    "config_offset": 12,
    "assignment": [{"connector": "sink", "tasks": [-1, 0, 1]}],
}


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("told", [CONNECT, None])
def test_connects_workers_eager_and_cooperative(version: int, told: str | None) -> None:
    """A subscription's allocation is an assignment of its own version."""
    values = {"url": "http://w:8083/", "config_offset": 12}
    if version:
        values["allocation"] = encoded("ConnectProtocolAssignment", 1, CONNECT_ASSIGNMENT)
    found = subscriptions(
        blobs([encoded("ConnectProtocolSubscription", version, values)]), texts(told), texts(None)
    )
    got = row(found)
    assert (got["protocol"], got["format_version"], got["topics"]) == (CONNECT, version, None)
    assert (got[CONNECT]["url"], got[CONNECT]["config_offset"]) == ("http://w:8083/", 12)
    allocation = got[CONNECT]["allocation_decoded"]
    if version:
        assert allocation["format_version"] == 1
        assert allocation["assignment"] == CONNECT_ASSIGNMENT["assignment"]
    else:
        assert allocation is None
    data = encoded("ConnectProtocolAssignment", version, CONNECT_ASSIGNMENT)
    got = row(assignments(blobs([data]), texts(told), texts(None)))
    assert got[CONNECT]["assignment"] == CONNECT_ASSIGNMENT["assignment"]
    assert got[CONNECT]["leader"] == "connect-1-4f"


def test_a_newer_version_is_read_as_the_newest_known() -> None:
    """As clients do: fields are only ever added at the end."""
    data = encoded("ConsumerProtocolSubscription", 3, {"topics": ["a"], "rack_id": "r"})
    data = (9).to_bytes(2, "big") + data[2:] + b"more"
    found = subscriptions(blobs([data]), texts(CONSUMER), texts(None))
    got = row(found)
    assert (got["format_version"], got["topics"], got["rack_id"]) == (9, ["a"], "r")
    assert not found.faults
    assert row(subscriptions(blobs([data]), texts(None), texts(None))) is None


def test_cut_values_of_a_known_protocol_are_null_with_a_fault() -> None:
    """Cut bytes of a known protocol have a fault."""
    whole = encoded("ConsumerProtocolSubscription", 1, {"topics": ["aa", "b"], "user_data": b"x"})
    cuts = [whole[:at] for at in range(len(whole) + 1)]
    kinds = texts(*[CONSUMER] * len(cuts))
    unknown = texts(*[None] * len(cuts))
    found = subscriptions(blobs(cuts), kinds, unknown)
    valid = found.column.is_valid().to_pylist()
    assert valid == [False] * len(whole) + [True]
    assert [fault.index for fault in found.faults] == list(range(1, len(whole)))
    assert found.faults[0].status is Status.TRUNCATED
    expected = {Status.TRUNCATED, Status.COUNT_IMPOSSIBLE}
    assert {fault.status for fault in found.faults[1:]} == expected
    assert "ConsumerProtocolSubscription > topics" in found.faults[3].detail
    untold = subscriptions(blobs(cuts), unknown, unknown)
    assert not untold.faults
    assert untold.column.is_valid().to_pylist()[-1]


def test_other_protocol_types_and_empty_values_are_null() -> None:
    """The Schema Registry's members speak JSON; a follower's assignment is empty while it waits."""
    found = assignments(
        blobs([b'{"x":1}', b"", None]), texts("sr", CONSUMER, CONSUMER), texts(*[None] * 3)
    )
    assert found.column.null_count == 3
    assert not found.faults


def test_principals_of_kafkas_own_making() -> None:
    """Principals of forwarded requests decode as Kafka wrote them."""
    for vector in internal_vectors()["principal"]:
        found = principals(blobs([vector["value"]]))
        got = row(found)
        assert got.pop("format_version") == vector["version"]
        same(vector["value_body"], got, value_definition(vector).fields)


def test_slices_are_read_at_their_places() -> None:
    """Offsets of a sliced Arrow array are respected."""
    data = encoded("ConsumerProtocolSubscription", 0, {"topics": ["t"]})
    array = blobs([b"skip me", data, None]).slice(1)
    got = subscriptions(
        array, texts("x", CONSUMER, CONSUMER).slice(1), texts(None, None)
    ).column.to_pylist()
    assert got[0]["topics"] == ["t"]
    assert got[1] is None


@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.binary(max_size=60)),
            st.sampled_from([None, "", CONSUMER, CONNECT, "sr"]),
            st.sampled_from([None, "", STREAMS_ASSIGNOR, "range"]),
        ),
        max_size=8,
    )
)
def test_any_bytes_give_values_or_nulls(rows: list[tuple[bytes | None, str, str]]) -> None:
    """Any bytes give a valid column, and faults of known protocols only."""
    values = blobs([data for data, _, _ in rows])
    kinds, names = texts(*[kind for _, kind, _ in rows]), texts(*[name for *_, name in rows])
    for read in (subscriptions, assignments):
        found = read(values, kinds, names)
        found.column.validate(full=True)
        assert len(found.column) == len(rows)
        assert all(rows[fault.index][1] for fault in found.faults)
