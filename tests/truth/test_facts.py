"""Errors, groups, topics, clients and brokers in the tables are those of the log."""

import functools
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.truth import definitions, request_log
from tests.truth.definitions import Layout
from tests.truth.matching import direct, match
from tests.truth.material import ALL, JSON_LOGGED, Capture, each
from tests.truth.request_log import Entry
from tests.truth.rows import Row

SHOWN = 8
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ANONYMOUS = "User:ANONYMOUS"
ZERO_UUID = "A" * 22
METADATA_TOPIC, METADATA_TOPIC_ID = "__cluster_metadata", "A" * 21 + "Q"
API_VERSIONS, METADATA, DESCRIBE_CLUSTER = 18, 3, 60
every_capture = each("capture", JSON_LOGGED)


def _sides(entry: Entry) -> Iterator[tuple[str, Layout, dict[str, Any]]]:
    """The logged bodies of a request whose version is known; acks=0 has no response."""
    api_key, api_version = entry.key[4:]
    if definitions.has_version(api_key, api_version):
        yield "request", definitions.layout(api_key, "Request", api_version), entry.request
        if entry.response:
            yield "response", definitions.layout(api_key, "Response", api_version), entry.response


def _is_whole(row: Row) -> bool:
    return row["status"] == "paired" and row["response_decode_status"] == "ok"


@functools.lru_cache(maxsize=2)
def _topic_names(capture: Capture) -> dict[str, str]:
    """Topic id -> name, from every struct of the log that has both, and Kafka's own constant."""
    found = {}
    for entry in direct(capture):
        for _, layout, body in _sides(entry):
            for inner, struct in definitions.structs(layout, body):
                topic_id = struct.get("topicId", ZERO_UUID)
                for member in inner.fields:
                    if member.entity == "topicName" and topic_id != ZERO_UUID:
                        found[topic_id] = struct.get(member.log_name)
    names = {topic_id: name for topic_id, name in found.items() if name}
    return {METADATA_TOPIC_ID: METADATA_TOPIC, **names}


@every_capture
def test_errors_and_throttling_are_those_of_the_response(capture: Capture) -> None:
    """The first non-zero error code in wire order, all of them ascending, the throttle time."""
    differ = []
    for entry, row in match(capture).pairs:
        if not _is_whole(row):
            continue
        for side, layout, body in _sides(entry):
            if side == "request":
                continue
            members = list(definitions.values(layout, body))
            codes = [
                value
                for member, value in members
                if member.log_name.endswith(("errorCode", "ErrorCode"))
            ]
            expected = next((code for code in codes if code), 0)
            distinct = sorted({code for code in codes if code})
            throttle = body.get("throttleTimeMs")
            found = row["error_code"] or 0, row["error_codes"] or [], row["throttle_time_ms"]
            if found != (expected, distinct, throttle):
                differ.append(f"{entry}: {found}, log {expected, distinct, throttle}")
            if codes and row["error_code"] is None:
                differ.append(f"{entry}: no error code")
    assert not differ, differ[:SHOWN]


@every_capture
def test_groups_and_transactional_ids_are_those_of_the_request(capture: Capture) -> None:
    """The columns have the group and the transactional ID of the logged request."""
    differ = []
    for entry, row in match(capture).pairs:
        for side, layout, body in _sides(entry):
            if side == "response":
                continue
            for member in layout.fields:
                if member.is_array or member.type != "string":
                    continue
                expected = body.get(member.log_name, member.default)
                if member.entity == "groupId" and row["group_id"] != expected:
                    differ.append(f"{entry}: group {row['group_id']!r}, log {expected!r}")
                if member.entity == "transactionalId" and row["transactional_id"] != expected:
                    differ.append(f"{entry}: {row['transactional_id']!r}, log {expected!r}")
    assert not differ, differ[:SHOWN]


@every_capture
def test_topics_of_an_exchange_are_those_of_its_messages(capture: Capture) -> None:
    """Names in either message, and names of the topic ids in them."""
    names = _topic_names(capture)
    differ = []
    for entry, row in match(capture).pairs:
        if not _is_whole(row):
            continue
        expected = set()
        for _, layout, body in _sides(entry):
            for member, value in definitions.values(layout, body):
                if member.entity == "topicName":
                    expected.add(value)
                elif member.log_name == "topicId" and value in names:
                    expected.add(names[value])
        expected.discard("")
        found = row["topics"] or []
        if set(found) != expected or len(set(found)) != len(found):
            differ.append(f"{entry}: {sorted(found)}, log {sorted(expected)}")
    assert not differ, (len(differ), differ[:SHOWN])


@every_capture
def test_topics_are_those_of_messages(capture: Capture) -> None:
    """Every name with its id that the log has; an id the log does not know came from elsewhere."""
    expected = {(name, topic_id) for topic_id, name in _topic_names(capture).items()}
    expected.remove((METADATA_TOPIC, METADATA_TOPIC_ID))  # known to Kafka, told by nobody
    found = {(row["topic"], row["topic_id"]) for row in capture.rows("topics")}
    assert expected <= found, expected - found
    told = set()
    for entry in request_log.load(capture.request_log_path):
        if entry.key[4] == METADATA:
            told |= {topic["name"] for topic in entry.response["topics"] if topic["errorCode"] == 0}
    assert told <= {name for name, _ in found}, told - {name for name, _ in found}


@each("capture", ALL)
def test_every_record_batch_has_the_name_of_its_topic(capture: Capture) -> None:
    """These captures have the names of all topic IDs, or the IDs are Kafka's constants."""
    for row in capture.rows("record_batches"):
        assert row["topic"], row
        if row["source"] == "raft_fetch":
            assert row["topic"] == METADATA_TOPIC, row


@every_capture
def test_brokers_are_those_of_metadata(capture: Capture) -> None:
    """The table `brokers` has exactly the brokers of logged Metadata responses."""
    expected = set()
    for entry in request_log.load(capture.request_log_path):
        if entry.key[4] in (METADATA, DESCRIBE_CLUSTER) and not entry.is_forwarded:
            for broker in entry.response["brokers"]:
                node = broker.get("nodeId", broker.get("brokerId"))
                expected.add((node, broker["host"], broker["port"], broker.get("rack")))
    found = {(r["node_id"], r["host"], r["port"], r["rack"]) for r in capture.rows("brokers")}
    assert found == expected


@every_capture
def test_connections_tell_their_clients(capture: Capture) -> None:
    """Client ids, software and user of a connection, as each request in the log has them."""
    client_ids: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    software: dict[tuple[Any, ...], set[tuple[str, str]]] = defaultdict(set)
    principals: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for entry in request_log.load(capture.request_log_path):
        if entry.is_forwarded:
            continue
        at = entry.key[:3]
        client_ids[at].add(entry.client_id)
        principals[at].add(entry.principal)
        if entry.key[4] == API_VERSIONS and "clientSoftwareName" in entry.request:
            software[at].add(
                (entry.request["clientSoftwareName"], entry.request["clientSoftwareVersion"])
            )
    for row in capture.rows("connections"):
        at = row["client_ip"], row["client_port"], row["broker_port"]
        assert client_ids[at] - {""} <= set(row["client_ids"] or ()), row
        if software[at]:
            assert (row["client_software_name"], row["client_software_version"]) in software[at], (
                row
            )
        users = principals[at] - {ANONYMOUS}
        if row["sasl_mechanism"] is not None and users:
            assert row["principal"] in users, row  # of a delegation token: its owner
        if row["sasl_mechanism"] is None:
            assert row["principal"] is None, row


@each("capture", ALL)
def test_times_and_durations_of_an_exchange_agree(capture: Capture) -> None:
    """Latency is from the request's last byte to the answer's first, duration from end to end."""
    for row in capture.rows("exchanges"):
        for side in ("request", "response"):
            start, end = row[f"{side}_time"], row[f"{side}_end_time"]
            assert (start is None) == (row[f"{side}_size"] is None) == (end is None), row
            if start is not None:
                assert start <= end, row
                microseconds = (start - EPOCH) // timedelta(microseconds=1)
                assert microseconds == row[f"{side}_time_ns"] // 1000, row
        if row["request_time"] is None or row["response_time"] is None:
            assert row["latency_ms"] is None, row
            assert row["duration_ms"] is None, row
        else:
            latency = (row["response_time"] - row["request_end_time"]) / timedelta(milliseconds=1)
            duration = (row["response_end_time"] - row["request_time"]) / timedelta(milliseconds=1)
            assert row["latency_ms"] == pytest.approx(latency, abs=1e-6), row
            assert row["duration_ms"] == pytest.approx(duration, abs=1e-6), row
