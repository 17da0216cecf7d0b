"""Workloads from captures and saved files: the same requests from each."""

import gzip
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from kdissect.errors import CaptureError
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Exchange, Workload
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.workload import messages as api
from kdissect.replay.workload import saved_file
from kdissect.replay.workload.fetch_sessions import FetchSessions
from kdissect.replay.workload.messages import response_body
from kdissect.replay.workload.saved_file import save, without_secrets
from kdissect.replay.workload.source import load_workload
from tests.builders.workloads import call
from tests.replay.other_cluster import everything

NAMES = ["librdkafka.pcap", "java_0_10_2_2.pcap"]


def clients(workload: Workload) -> list[Exchange]:
    """What a saved file keeps."""
    return [
        each
        for each in workload.exchanges()
        if not each.internal_reason and each.api_key not in api.TARGET_OWN_APIS
    ]


def test_facts_of_a_capture(captures: Path) -> None:
    """Cluster, brokers, topics and connections of a capture whose content is known."""
    workload = load_workload(str(captures / "librdkafka.pcap"))
    assert workload.kind == "capture"
    assert sum(1 for _ in workload.exchanges()) == 319
    facts = workload.facts
    assert facts.cluster_ids == ["4L6g3nShT-eMCtK--X86sw"]
    assert facts.brokers == {1: ("127.0.0.1", 9092)}
    assert ("127.0.0.1", 9092) in facts.listeners
    topic = facts.topics["rd-events"]
    assert (topic.partition_count, topic.is_created) == (3, True)
    assert facts.topics["__consumer_offsets"].is_internal
    starts = [each.exchanges[0].request_time_ns for each in workload.connections]
    assert starts == sorted(starts)
    for number, connection in enumerate(workload.connections):
        for index, each in enumerate(connection.exchanges):
            assert (each.connection, each.index) == (number, index)
            assert each.request_packet > 0
    ours = [each for each in workload.exchanges() if each.internal_reason]
    assert {each.api_key for each in ours} >= {62, 63}
    assert all(each.expects_response or each.response is None for each in workload.exchanges())


@pytest.mark.parametrize("name", NAMES)
def test_the_versions_that_the_captured_broker_offered(captures: Path, name: str) -> None:
    """Also of requests after all ApiVersions of the capture, but not of its controllers."""
    path = str(captures / name)
    whole = load_workload(path)
    offers = [each for each in whole.exchanges() if each.api_key == ApiKey.API_VERSIONS]
    late = load_workload(path, from_ns=max(each.request_time_ns for each in offers) + 1)
    assert late.facts.offered == whole.facts.offered
    assert ApiKey.PRODUCE in late.facts.offered
    assert ApiKey.VOTE not in late.facts.offered


def test_two_halves_by_time_have_all_exchanges(captures: Path) -> None:
    """Two halves by time have all exchanges; an empty part has a note."""
    path = str(captures / "librdkafka.pcap")
    whole = load_workload(path)
    times = sorted(each.request_time_ns for each in whole.exchanges())
    middle = times[len(times) // 2]
    early, late = load_workload(path, to_ns=middle), load_workload(path, from_ns=middle)
    counts = [sum(1 for _ in each.exchanges()) for each in (early, late)]
    assert sum(counts) == len(times)
    assert min(counts) > 100
    assert load_workload(path, to_ns=1).notes == ["no Kafka request was found"]


def test_a_later_part_knows_what_the_earlier_requests_show(captures: Path) -> None:
    """A fetch session goes on with its partitions, and topics have their ids (KIP-227, KIP-516)."""
    path = str(captures / "java_2_0_1.pcap")
    whole = load_workload(path)
    times = sorted(each.request_time_ns for each in whole.exchanges() if each.api_key == 1)
    late = load_workload(path, from_ns=times[len(times) // 2])
    asked, later = partitions_asked(whole), partitions_asked(late)
    assert len(later) > 10
    assert later.items() <= asked.items()
    assert all(later.values())
    then, now = whole.facts.topics["old.2.0.1"], late.facts.topics["old.2.0.1"]
    assert then.is_created
    assert now == replace(then, is_created=False)


def partitions_asked(workload: Workload) -> dict[int, object]:
    """Of each Fetch, with those that it does not name."""
    sessions = FetchSessions(workload.facts.fetch_sessions)
    return {
        each.exchange_id: sessions.after(connection.broker, *api.bodies(each))
        for connection in workload.connections
        for each in connection.exchanges
        if each.api_key == ApiKey.FETCH
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_file_is_the_same_workload(captures: Path, tmp_path: Path, name: str) -> None:
    """A saved file has the requests, responses and times of the capture."""
    workload = load_workload(str(captures / name))
    file = tmp_path / "orders.kreplay"
    counts = save(workload, str(file))
    again = load_workload(str(file))
    assert again.kind == "saved"
    before, after = clients(workload), clients(again)
    assert counts["exchanges"] == len(before) == len(after)
    assert counts["left_out"] == sum(1 for _ in workload.exchanges()) - len(before)
    order = {each.exchange_id: each for each in after}
    for each in before:
        other = order[each.exchange_id]
        for field in ("request", "response", "api_key", "api_version", "client_id",
                      "request_time_ns", "response_end_time_ns", "expects_response",
                      "request_packet", "response_missing"):  # fmt: skip
            assert getattr(each, field) == getattr(other, field), field
    assert workload.facts.topics.keys() >= again.facts.topics.keys()
    save(again, str(tmp_path / "twice.kreplay"))
    lines, twice = (
        gzip.decompress((tmp_path / each).read_bytes()).splitlines()[1:]
        for each in ("orders.kreplay", "twice.kreplay")
    )
    assert lines == twice
    first, second = (make_plan(each, everything()) for each in (workload, again))
    planned = [
        [step.exchange.exchange_id for step in plan.steps if step.skipped is None]
        for plan in (first, second)
    ]
    assert planned[0] == planned[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"kdissect": "replay", "format_version": 2}', "format_version 2"),
        ('{"kdissect": "replay", "format_version": 1}\n{"id": "1"}', ":2: no saved replay"),
        ('{"kdissect": "replay", "format_version": 1}\n[', ":2: no saved replay"),
        (
            '{"kdissect": "replay", "format_version": 1}\n{"connection": {"connection_id": "1"}}',
            ":2: no saved replay can be read there: no connection_id of this kind",
        ),
        ('{"kdissect": "replay"', ":1: no saved replay"),
    ],
)
def test_a_damaged_saved_file_names_the_line(tmp_path: Path, text: str, says: str) -> None:
    """CaptureError has the line and the reason."""
    file = tmp_path / "bad.kreplay"
    file.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(CaptureError, match=says):
        load_workload(str(file))


def test_a_cut_saved_file_is_refused(captures: Path, tmp_path: Path) -> None:
    """CaptureError names the file."""
    file = tmp_path / "cut.kreplay"
    save(load_workload(str(captures / "librdkafka.pcap")), str(file))
    file.write_bytes(file.read_bytes()[:-900])
    with pytest.raises(CaptureError, match=r"cut\.kreplay"):
        load_workload(str(file))


def test_a_saved_file_that_unpacks_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size when unpacked is compared with its size on disk."""
    monkeypatch.setattr(saved_file, "_FREE_SIZE", 1 << 10)
    file = tmp_path / "bomb.kreplay"
    file.write_bytes(gzip.compress(b'{"kdissect": "replay", "format_version": 1}' + bytes(1 << 22)))
    with pytest.raises(CaptureError, match=r"bomb\.kreplay: it unpacks to more than"):
        load_workload(str(file))


def test_secrets_are_left_out() -> None:
    """A request with secrets has a reason in its place."""
    upsertion = {"name": "u", "salt": b"salt", "salted_password": b"s3cret"}
    exchange = call(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, 5, upsertions=[upsertion])
    hidden = without_secrets(exchange)
    assert hidden.request is None
    assert hidden.request_missing == "it holds secrets, which are redacted"
    assert exchange.request is not None


def test_secrets_in_a_response_are_replaced_and_known_to_be() -> None:
    """A sensitive config is replaced; others stay."""
    config = {"name": "ssl.keystore.password", "value": "s3cret", "is_sensitive": True}
    plain = {"name": "retention.ms", "value": "5", "is_sensitive": False}
    resource = {"resource_type": 2, "resource_name": "t"}
    told = {"results": [{**resource, "configs": [config, plain]}]}
    exchange = call(ApiKey.DESCRIBE_CONFIGS, 4, 5, told=told, resources=[resource])
    hidden = without_secrets(exchange)
    assert hidden.request == exchange.request
    [result] = response_body(hidden)["results"]
    assert [each["value"] for each in result["configs"]] == ["[redacted]", "5"]


def test_records_of_the_metadata_log_are_left_out() -> None:
    """A Fetch of a session names no topic in its request; its response has the log's id."""
    partition = {"partition_index": 0, "high_watermark": 9, "records": b"credentials"}
    told = {"responses": [{"topic_id": UUID(int=1), "partitions": [partition]}]}
    exchange = call(ApiKey.FETCH, 13, 5, told=told, session_id=7, session_epoch=3, topics=[])
    assert without_secrets(exchange).response is None
