"""Every request of real captures in the terms of a made-up cluster, and its answers judged."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.codec.record_batches import decode_record_set
from kdissect.codec.record_encoder import encode_batch
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batches import headers, is_sealed, patch_producer
from kdissect.replay.comparison.kinds import kinds_of
from kdissect.replay.model import PlanOptions, SkipCode, Skipped, Step, TranslateOptions, Verdict
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.translation.id_map import IdMap, OffsetMap, Producer, Producers
from kdissect.replay.translation.translator import Translator
from kdissect.replay.workload.messages import partitions, request_of, response_of
from kdissect.replay.workload.source import load_workload
from tests.builders.messages import a_request, a_response, numbered_batch
from tests.builders.workloads import exchange, fetch, fetched, planned, produce, produced, workload
from tests.material import CAPTURES, needs_material
from tests.replay.made import sent_again, translated
from tests.replay.other_cluster import OtherCluster, Replayed, everything, expected, replay

SHIPPED = [
    "librdkafka.pcap", "java_2_0_1.pcap", "java_0_10_2_2.pcap", "kafkajs.pcap.gz", "sarama.pcap.gz",
]  # fmt: skip
# Requests that a translation sends otherwise than the made-up cluster's plain rules would have it:
# leader epochs are the target's current ones, ids that nobody gave stay.
FREE = {"OffsetForLeaderEpoch", "OffsetCommit", "ListTransactions", "RenewDelegationToken",
        "ExpireDelegationToken"}  # fmt: skip
# Large captures, and those whose requests are also in smaller ones.
REPEATED = [
    "cluster/cluster", "java_latest/java_latest", "share_streams/share", "share_streams/streams",
    "version_sweep/sweep_4_3_1", "other_clients/kafka_python", "perf/perf_tshark", "sasl/sasl",
    "zookeeper/zk_3_9_1_ibp_2_4",
]  # fmt: skip
SHARED = [
    "admin/admin", "odd/odd_conversations", "old_clients/java_0_8_2_2", "sasl/sasl_handshake_v0",
    "transactions/transactions", "zookeeper/zk_1_1_1",
    *(pytest.param(name, marks=pytest.mark.heavy) for name in REPEATED),
]  # fmt: skip

SHARE = ("ShareFetch", "ShareAcknowledge")
MOVED = ("Fetch", "SyncGroup", "ConsumerGroupHeartbeat", *SHARE)  # see `_is_expected`


def replayed(path: Path) -> tuple[Replayed, OtherCluster]:
    found = load_workload(str(path))
    cluster = OtherCluster(found)
    return replay(found, cluster), cluster


def check(done: Replayed, cluster: OtherCluster) -> None:
    """Requests arrive as the cluster would have them, every answer is taken for the same."""
    for number, frame in done.sent.items():
        step = done.plan.steps[number]
        wanted = expected(cluster, step.exchange)
        if isinstance(frame, Skipped) or wanted is None or step.api_name in FREE:
            continue
        if frame != wanted:
            assert step.api_name in MOVED, step.api_name
            assert _is_expected(step, frame, wanted), (number, step.api_name)
    bad = {
        number: judgement
        for number, judgement in done.judgements.items()
        if judgement.verdict in (Verdict.DIFFERENT, Verdict.ERROR)
    }
    assert bad == {}
    assert done.unready == []


def _is_expected(step: Step, frame: bytes, wanted: bytes) -> bool:
    """Return whether a frame differs from the wanted one in known ways only.

    Leader epochs are the target's last known. A generation that no member joined stays. A Fetch of
    a session has all partitions of the session, and goes out without it; one of a share session has
    them, too, and at a second broker another member. A member reports the partitions that the
    target has assigned to it.
    """
    sent, meant = (decode_message(each, side="request").body for each in (frame, wanted))
    if step.api_name == "SyncGroup":
        response = response_of(step.exchange)
        return response is not None and response.body["error_code"] != 0
    if step.api_name == "ConsumerGroupHeartbeat":
        return {**sent, "topic_partitions": 0} == {**meant, "topic_partitions": 0}
    asked = []
    for body in (sent, meant):
        entries = {}
        for topic, number, partition in partitions(body):
            partition["current_leader_epoch"] = partition["last_fetched_epoch"] = 0
            entries[topic.get("topic_id", topic.get("topic")), number] = partition
        asked.append(entries)
    names = {"topics"}
    if step.api_name in SHARE:
        names.add("member_id")
    else:
        assert (sent["session_id"], sent["session_epoch"]) == (0, -1)
        names |= {"session_id", "session_epoch", "forgotten_topics_data"}
    is_equal = all(sent[name] == meant[name] for name in sent.keys() - names)
    return is_equal and asked[0].items() >= asked[1].items()


@pytest.mark.parametrize("topic", ["t", ""])
@pytest.mark.parametrize(("code", "kept"), [(6, [1]), (19, [1]), (20, [0, 1]), (0, [0, 1])])
def test_batches_refused_without_effect_are_left_out(
    code: int, kept: list[int], topic: str
) -> None:
    """Error 20 is NOT_ENOUGH_REPLICAS_AFTER_APPEND: the broker has written the batch."""
    request, response = produce(0, 1), produced(0, -1, 1, 7, codes=[code])
    request.body["topic_data"][0]["name"] = response.body["responses"][0]["name"] = topic
    translator, [step] = translated(exchange(0, request, 0, 5, response))
    frame = translator.request(step)
    assert isinstance(frame, bytes)
    body = decode_message(frame, side="request").body
    assert [number for _, number, _ in partitions(body)] == kept
    assert step.skipped is None


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_captures_reach_another_cluster(captures: Path, name: str) -> None:
    """Each request has the other cluster's ids, and nothing else changes."""
    check(*replayed(captures / name))


@needs_material
@pytest.mark.parametrize("name", SHARED)
def test_captures_reach_another_cluster(name: str) -> None:
    """The same for captures beside the project."""
    check(*replayed(CAPTURES / f"{name}.pcap"))


def test_a_twin_gets_the_captured_bytes(captures: Path) -> None:
    """A cluster that calls everything as the capture does is sent the very same requests."""
    found = load_workload(str(captures / "librdkafka.pcap"))
    done = replay(found, OtherCluster(found, is_moved=False))
    assert len(done.sent) > 250
    for number, frame in done.sent.items():
        assert frame == done.plan.steps[number].exchange.request
    assert set(done.verdicts()) == {"same"}


def test_renames_reach_every_place_of_a_name(captures: Path) -> None:
    """Topic, group and transactional id, in fields and inside the consumer protocol's bytes."""
    found = load_workload(str(captures / "librdkafka.pcap"))
    named = [("topic", name) for name in found.facts.topics if name[0] != "_"]
    groups, transactions = set(), set()
    for each in found.exchanges():
        request = request_of(each)
        if request is not None and each.internal_reason == "":
            groups.add(request.body.get("group_id") or "")
            transactions.add(request.body.get("transactional_id") or "")
    named += [("group", name) for name in groups if name]
    named += [("transactional-id", name) for name in transactions if name]
    plan = make_plan(found, everything())
    translator = Translator(
        IdMap(plan, TranslateOptions(renames={each: f"new-{each[1]}" for each in named}))
    )
    old = [name.encode() for _, name in named]
    checked = 0
    for step in plan.steps:
        if step.skipped is not None:
            continue
        frame = translator.request(step)
        if isinstance(frame, Skipped):
            continue
        message = decode_message(frame, side="request")
        for topic in message.body.get("topic_data") or []:
            for partition in topic["partition_data"]:
                partition["records"] = b""  # what records say is the clients' own
        text = repr({**message.body, "reason": "", "configs": ""}).encode()
        for name in old:
            assert text.replace(b"new-" + name, b"").count(name) == 0, (step.api_name, name)
            checked += text.count(b"new-" + name)
    assert checked > 150


def test_a_topic_has_as_many_replicas_as_the_target_has_brokers() -> None:
    """And so has min.insync.replicas; what was refused in the capture stays as it was."""
    configs = [{"name": "min.insync.replicas", "value": "2"}, {"name": "segment.ms", "value": "9"}]
    asked = [
        {"name": name, "num_partitions": 9, "replication_factor": 3, "configs": configs}
        for name in ("t", "refused")
    ]
    told = [{"name": "t"}, {"name": "refused", "error_code": 38}]
    request, response = (
        a_request(ApiKey.CREATE_TOPICS, 5, topics=asked),
        a_response(ApiKey.CREATE_TOPICS, 5, topics=told),
    )
    translator, [step] = translated(exchange(0, request, 0, 1, response))
    translator.ids.target.nodes = {1: ("h", 1)}
    frame = translator.request(step)
    assert isinstance(frame, bytes)
    topic, refused = decode_message(frame, side="request").body["topics"]
    assert (topic["num_partitions"], topic["replication_factor"]) == (9, 1)
    assert [each["value"] for each in topic["configs"]] == ["1", "9"]
    assert refused["replication_factor"] == 3
    assert refused["configs"][0]["value"] == "2"


def test_a_version_that_the_target_lacks_is_a_finding() -> None:
    """The step is skipped with the target's versions."""
    translator, [step] = translated(exchange(0, produce(0), 0, 1, produced(0, 0)))
    translator.ids.target.ranges = {0: (11, 13)}
    answer = translator.request(step)
    assert isinstance(answer, Skipped)
    assert answer.code is SkipCode.API_VERSION
    assert "v11 to v13" in answer.reason


def sent_as(message: Message, api_version: int) -> tuple[Message | Skipped, dict[str, object]]:
    """A request as it goes to a target that speaks only one version of its API, and what it lacks
    there. The target has the topic "t", and no other."""
    plan = planned(exchange(0, message, 0, 1, None))
    translator = Translator(IdMap(plan, TranslateOptions(reencode=True)))
    translator.ids.target.ranges = {message.api_key: (api_version, api_version)}
    partition = {"partition_index": 0, "leader_id": 1}
    topic = {"error_code": 0, "name": "t", "topic_id": UUID(int=7), "partitions": [partition]}
    node = {"node_id": 1, "host": "h", "port": 1}
    translator.ids.target.learn_metadata({"brokers": [node], "topics": [topic]})
    frame = translator.request(plan.steps[0])
    lacks = translator.dropped.get(plan.steps[0].number, ())
    dropped = {each.path: each.captured for each in lacks}
    return frame if isinstance(frame, Skipped) else decode_message(frame, side="request"), dropped


def test_reencode_sends_the_nearest_version() -> None:
    """Produce v9 names topics, v13 identifies them; the records are the same."""
    message = produce(0)
    sent, _ = sent_as(message, 13)
    assert isinstance(sent, Message)
    [topic], [named] = sent.body["topic_data"], message.body["topic_data"]
    assert (sent.api_version, topic["topic_id"]) == (13, UUID(int=7))
    assert topic["partition_data"] == named["partition_data"]


# Fields of Kafka's message definitions that came with a version, or went with one.
JOIN = {"group_id": "g", "session_timeout_ms": 9, "member_id": "", "protocol_type": "consumer",
        "protocols": []}  # fmt: skip
LEAVE = {"member_id": "m", "group_instance_id": None}
COMMIT = {"group_id": "g", "topics": []}
OLDER: list[tuple[Message, int, dict[str, object]]] = [
    (a_request(9, 7, group_id="g", topics=[], require_stable=True), 6, {"require_stable": True}),
    (a_request(9, 7, group_id="g", topics=[], require_stable=False), 6, {}),
    (a_request(9, 9, groups=[{"group_id": "g", "member_epoch": 3, "topics": []}]), 8,
     {"groups[0].member_epoch": 3}),
    (a_request(8, 4, **COMMIT, retention_time_ms=86_400_000), 8, {"retention_time_ms": 86_400_000}),
    (a_request(8, 4, **COMMIT, retention_time_ms=0), 8, {"retention_time_ms": 0}),
    (a_request(8, 4, **COMMIT), 8, {}),
    (a_request(2, 10, topics=[], timeout_ms=30_000), 9, {"timeout_ms": 30_000}),
    (a_request(2, 10, topics=[], timeout_ms=0), 9, {}),
    (a_request(11, 5, **JOIN, rebalance_timeout_ms=300_000), 0, {"rebalance_timeout_ms": 300_000}),
    (a_request(11, 8, **JOIN, rebalance_timeout_ms=5, reason="again"), 7, {"reason": "again"}),
    (a_request(13, 5, group_id="g", members=[{**LEAVE, "reason": "closed"}]), 4,
     {"members[0].reason": "closed"}),
    (a_request(3, 4, topics=[{"name": "t"}], allow_auto_topic_creation=False), 3,
     {"allow_auto_topic_creation": False}),
    (a_request(3, 4, topics=[{"name": "t"}], allow_auto_topic_creation=True), 3, {}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "api_version", "dropped"), OLDER)
def test_fields_that_another_version_lacks_are_noted(
    message: Message, api_version: int, dropped: dict[str, object]
) -> None:
    """Each field that is not at its default; those that are say nothing."""
    sent, lacks = sent_as(message, api_version)
    assert isinstance(sent, Message)
    assert sent.api_version == api_version
    assert lacks == dropped


@pytest.mark.parametrize(
    ("message", "api_version", "said"),
    [
        (a_request(13, 3, group_id="g", members=[{"member_id": "m"}]), 2, "members"),
        (a_request(9, 2, group_id="g", topics=None), 1, "topics is null"),
        (
            a_request(0, 3, transactional_id="x", acks=1, timeout_ms=1, topic_data=[]),
            2,
            "Produce v2",
        ),
        (a_request(10, 1, key="x", key_type=1), 0, "key_type"),
    ],
)
def test_a_request_that_another_version_cannot_hold_is_not_sent(
    message: Message, api_version: int, said: str
) -> None:
    """Without it the request would ask for something else."""
    answer, dropped = sent_as(message, api_version)
    assert isinstance(answer, Skipped)
    assert answer.code is SkipCode.NOT_TRANSLATABLE
    assert said in answer.reason
    assert dropped == {}


def test_an_older_metadata_request_creates_nothing() -> None:
    """Metadata v3 cannot forbid that the topic is made: without --allow admin it is not sent."""
    message = a_request(3, 4, topics=[{"name": "new"}], allow_auto_topic_creation=True)
    plan = make_plan(workload([exchange(0, message, 0, 1, None)]), PlanOptions())
    translator = Translator(IdMap(plan, TranslateOptions(reencode=True)))
    translator.ids.target.ranges = {3: (0, 3)}
    answer = translator.request(plan.steps[0])
    assert isinstance(answer, Skipped)
    assert "--allow admin" in answer.reason


@pytest.mark.parametrize("name", ["java_0_10_2_2.pcap", "java_2_0_1.pcap"])
def test_reencode_of_old_clients(captures: Path, name: str) -> None:
    """Every request of old clients in a version of Kafka 4; old messages become record batches."""
    plan = make_plan(load_workload(str(captures / name)), everything())
    translator = Translator(IdMap(plan, TranslateOptions(reencode=True)))
    versions = {0: 12, 1: 12, 3: 12, 8: 9, 9: 7, 10: 3, 11: 9, 13: 2, 14: 5, 12: 4, 2: 9, 18: 4,
                19: 7, 20: 5}  # fmt: skip
    translator.ids.target.ranges = {key: (only, only) for key, only in versions.items()}
    sent = 0
    for step in plan.steps:
        if step.skipped is not None or step.exchange.api_key not in versions:
            continue
        before = request_of(step.exchange)
        assert before is not None
        if before.body.get("session_epoch", 0) > 0:
            continue  # goes on with a session that no answer has opened here
        frame = translator.request(step)
        if isinstance(frame, Skipped) and "producer id" in frame.reason:
            continue  # no answer has given one here
        assert isinstance(frame, bytes), (step.api_name, frame)
        if step.exchange.api_key == ApiKey.API_VERSIONS:
            continue
        message = decode_message(frame, side="request")
        assert message.api_version == versions[step.exchange.api_key]
        sent += 1
        if message.api_key == ApiKey.PRODUCE:
            for old, new in zip(before.body["topic_data"], message.body["topic_data"], strict=True):
                for one, other in zip(old["partition_data"], new["partition_data"], strict=True):
                    was, now = (decode_record_set(each["records"]) for each in (one, other))
                    assert not now.faults.size
                    assert {each["magic"] for each in now.batches} == {2}
                    assert [(each["key"], each["value"]) for each in was.records] == [
                        (each["key"], each["value"]) for each in now.records
                    ]
    assert sent > 60


def test_reading_creates_no_topic(captures: Path) -> None:
    """Where making topics is not allowed, a Metadata request does not make one by asking."""
    plan = make_plan(load_workload(str(captures / "librdkafka.pcap")), PlanOptions())
    asked = 0
    for step in plan.steps:
        request = request_of(step.exchange)
        if step.skipped is None and step.api_name == "Metadata" and request is not None:
            frame = Translator(IdMap(plan)).request(step)
            assert isinstance(frame, bytes)
            if request.body["topics"]:
                body = decode_message(frame, side="request").body
                assert body["allow_auto_topic_creation"] is False
                asked += 1
    assert asked


# -- small parts ------------------------------------------------------------------------------


def test_offsets_by_what_was_produced_and_by_the_start() -> None:
    """Offsets move with the log's start and with produced batches."""
    offsets, earliest, captured = (
        OffsetMap(mode).of(("t", 0), 0) for mode in ("relative", "earliest", "captured")
    )
    assert offsets.to_target(5) == 5
    offsets.add_captured(start=100)
    offsets.target_starts(10)
    assert offsets.to_target((1 << 63) - 1) == (1 << 63) - 1  # no high watermark is known
    assert offsets.to_target(105) == 15
    offsets.produced(200, 40)
    offsets.produced(210, 53)
    assert [offsets.to_target(each) for each in (199, 200, 209, 210, 211, -1)] == [
        39, 40, 49, 53, 54, -1,
    ]  # fmt: skip
    assert [offsets.base_to_capture(each) for each in (63, 53, 40)] == [220, 213, None]
    assert captured.to_target(7) == 7
    earliest.add_captured(fetched=50)
    earliest.target_starts(3)
    assert earliest.to_target(52) == 5
    with pytest.raises(ValueError, match="none of"):
        OffsetMap("latest")


def test_negative_offsets_are_no_positions() -> None:
    """Some clients commit -2 where they have read nothing."""
    committed = [{"partition_index": 0, "committed_offset": -2}]
    topics = [{"name": "t", "partitions": committed}]
    commit = a_request(ApiKey.OFFSET_COMMIT, 5, group_id="g", topics=topics)
    translator, [step] = translated(exchange(0, commit, 0, 1, None))
    frame = translator.request(step)
    assert isinstance(frame, bytes)
    [(_, _, sent)] = partitions(decode_message(frame, side="request").body)
    assert sent["committed_offset"] == -2


def test_sequences_close_up_behind_a_batch_that_was_not_written() -> None:
    """Later sequence numbers leave no gap."""
    producers = Producers()
    captured, log = Producer(7, 0), ("t", 0)
    assert producers.target(captured) is None
    producers.learn(captured, Producer(900, 2))
    assert producers.target(captured) == Producer(900, 2)
    assert producers.target(Producer(7, 1)) == Producer(900, 3)  # raised by the client itself
    assert producers.sequence(captured, log, 40) == 40
    producers.lost(captured, log, 10)
    assert producers.sequence(captured, log, 50) == 40
    assert producers.sequence(captured, log, 5) == 2**31 - 5


@pytest.mark.parametrize(("producer_id", "is_sent_again"), [(7, True), (-1, False)])
def test_partitions_that_are_not_ready(producer_id: int, is_sent_again: bool) -> None:
    """One of two partitions is: the broker knows idempotent batches again, which others are not."""
    request, response = produce(0), produced(0, 0)
    topic, response_body = request.body["topic_data"][0], response.body["responses"][0]
    [part], [result] = topic["partition_data"], response_body["partition_responses"]
    out = bytearray(part["records"])
    patch_producer(out, next(headers(part["records"])), producer_id, 0, 0)
    topic["partition_data"] = [{"index": n, "records": bytes(out)} for n in (0, 1)]
    response_body["partition_responses"] = [{**result, "index": n} for n in (0, 1)]
    translator, [step] = translated(exchange(0, request, 0, 1, response))
    response_body["partition_responses"][1]["error_code"] = 51  # CONCURRENT_TRANSACTIONS
    assert sent_again(translator, step, response) is is_sent_again
    response_body["partition_responses"][0]["error_code"] = 51
    assert sent_again(translator, step, response)


def test_a_code_that_the_capture_has_there_is_final() -> None:
    """But not in another partition; and with a reference, both targets are asked again."""
    request, captured = produce(0, 1), produced(0, -1, 1, 7, codes=[6])
    refused = [produced(0, -1, codes=[6]), produced(1, -1, codes=[6])]
    translator, [step] = translated(exchange(0, request, 0, 5, captured))
    assert [sent_again(translator, step, each) for each in refused] == [False, True]
    options = TranslateOptions(has_reference=True)
    translator = Translator(IdMap(translator.ids.plan, options))
    assert [sent_again(translator, step, each) for each in refused] == [True, True]


@pytest.mark.parametrize(
    ("codes", "is_again"),
    [((5, 0), True), ((5, -1), False), ((5, 29), True), ((5, 3), True), ((0, -1), False)],
)
def test_an_error_beside_one_that_passes_is_final(codes: Sequence[int], is_again: bool) -> None:
    """The next answer might not have it, and nobody compares this one. But the capture has error
    29, and a topic that the target has not is missing in the next one, too."""

    def told(*codes: int) -> Message:
        names = zip("tu", codes, strict=True)
        topics = [{"name": name, "error_code": code, "partitions": []} for name, code in names]
        return a_response(ApiKey.METADATA, 7, topics=topics)

    asked = a_request(ApiKey.METADATA, 7, topics=[{"name": "t"}, {"name": "u"}])
    translator, [step] = translated(exchange(0, asked, 0, 1, told(0, 29 if 29 in codes else 0)))
    assert sent_again(translator, step, told(*codes)) is is_again


def test_an_error_beside_records_that_are_missing_is_final() -> None:
    """One of two partitions has them later, but the error of the other one would be lost."""
    captured = fetched(0, numbered_batch(0, 1))
    translator, [step] = translated(exchange(0, fetch(0), 0, 1, captured))
    answer = fetched(0)
    assert sent_again(translator, step, answer)
    other = {**answer.body["responses"][0]["partitions"][0], "partition_index": 1}
    answer.body["responses"][0]["partitions"].append({**other, "error_code": 1})
    assert not sent_again(translator, step, answer)


def test_a_fetch_that_is_sent_again_goes_on_behind_the_records_that_came() -> None:
    """The target's log has other segments, of which an answer brings one."""
    parts = [numbered_batch(first, 2) for first in (0, 2)]
    translator, [step] = translated(exchange(0, fetch(0), 0, 1, fetched(0, b"".join(parts))))

    def offset() -> int:
        frame = translator.request(step)
        assert isinstance(frame, bytes)
        [(_, _, asked)] = partitions(decode_message(frame, side="request").body)
        return asked["fetch_offset"]

    for records, before in ((b"", 0), (parts[0], 0), (b"", 2)):
        assert offset() == before
        assert sent_again(translator, step, fetched(0, records))
    assert offset() == 2
    assert not sent_again(translator, step, fetched(0, parts[1]))


def test_a_member_that_is_given_an_id_joins_once() -> None:
    """Beside a reference, too: its client joins with the id by its next request (KIP-394)."""
    answer = a_response(ApiKey.JOIN_GROUP, 5, error_code=79, member_id="m")
    asked = a_request(ApiKey.JOIN_GROUP, 5, group_id="g", session_timeout_ms=9)
    plan = planned(exchange(0, asked, 0, 5, answer))
    translator = Translator(IdMap(plan, TranslateOptions(has_reference=True)))
    assert not sent_again(translator, plan.steps[0], answer)


def test_a_patched_batch_has_the_right_crc_and_the_same_records() -> None:
    """Producer, epoch and sequence are replaced in place."""
    records = [{"offset": 0, "timestamp_ms": 1, "key": b"k", "value": b"v" * 40, "headers": []}]
    data = encode_batch(records, codec="zstd", producer_id=5, producer_epoch=1, base_sequence=9)
    header = next(headers(data))
    out = bytearray(data)
    patch_producer(out, header, 77, 3, 11)
    assert is_sealed(bytes(out), header)
    found = decode_record_set(bytes(out))
    assert not found.faults.size
    assert (found.batches[0]["producer_id"], found.batches[0]["producer_epoch"]) == (77, 3)
    assert found.records == decode_record_set(data).records


# -- a proxy that changes one field ----------------------------------------------------------


def test_one_changed_field_is_found_and_grouped(captures: Path) -> None:
    """Every Metadata answer says another number of partitions' error; the rest is as it was."""
    found = load_workload(str(captures / "librdkafka.pcap"))

    def flip(step: Step, message: object) -> None:
        body = message.body  # type: ignore[attr-defined]
        if step.api_name == "ListOffsets":
            for topic in body["topics"]:
                topic["partitions"][0]["error_code"] = 44

    done = replay(found, OtherCluster(found), flip=flip)
    different = {n: j for n, j in done.judgements.items() if j.verdict is Verdict.DIFFERENT}
    assert different
    kind = next(each for each in kinds_of(done.outcomes) if each.first.place.endswith("error_code"))
    one = kind.first
    assert (kind.api_name, one.place) == ("ListOffsets", "topics[].partitions[].error_code")
    assert (one.captured, one.answered) == (0, 44)
    assert len(kind.found) >= len(different)
    assert {done.plan.steps[n].api_name for n in different} == {"ListOffsets"}


def heartbeat(epoch: int, assigned: tuple[int, ...] | None, **body: Any) -> tuple[Message, Message]:
    """A heartbeat of member m with its response, which has the member's next epoch."""
    asked = {"group_id": "g", "member_id": "m", "member_epoch": epoch, **body}
    parts = [{"topic_id": UUID(int=7), "partitions": list(assigned)}] if assigned else []
    response_body = {"error_code": 0, "member_id": "m", "member_epoch": epoch + 1,
            "assignment": None if assigned is None else {"topic_partitions": parts}}  # fmt: skip
    key = ApiKey.CONSUMER_GROUP_HEARTBEAT
    return a_request(key, 1, **asked), a_response(key, 1, **response_body)


def test_a_member_without_partitions_sends_its_heartbeat_again() -> None:
    """A coordinator may assign later than the captured one: the heartbeat is sent again until it
    brings partitions, if the captured response has some."""
    request, response = heartbeat(0, (0, 1))
    translator, [step] = translated(exchange(0, request, 0, 1, response))
    for assigned, is_again in ((None, True), ((), True), ((5,), False)):
        assert sent_again(translator, step, heartbeat(3, assigned)[1]) is is_again
    _, nothing = heartbeat(0, None)
    translator, [step] = translated(exchange(0, request, 0, 1, nothing))
    assert not sent_again(translator, step, heartbeat(3, ())[1])


def test_a_heartbeat_of_the_replay_has_the_state_of_the_target() -> None:
    """Its epoch and partitions are those of the last answer, and later captured heartbeats have
    them, too."""
    owned = [{"topic_id": UUID(int=7), "partitions": [0, 1]}]
    request, answer = heartbeat(0, (0, 1))
    reporting, unchanged = heartbeat(1, None, topic_partitions=owned)
    translator, [joined, later] = translated(
        exchange(0, request, 0, 1, answer), exchange(0, reporting, 2, 3, unchanged)
    )
    translator.ids.topic_ids[UUID(int=7)] = UUID(int=7)
    translator.learn(joined, encode_message(heartbeat(10, (4,))[1]))
    assert translator.learn_member(joined, encode_message(heartbeat(11, (5, 6))[1])) == 0
    sent = translator.request(later)
    assert isinstance(sent, bytes)
    for frame in (translator.member_heartbeat(joined), sent):
        body = decode_message(frame, side="request").body
        assert body["member_epoch"] == 12
        assert [each["partitions"] for each in body["topic_partitions"]] == [[5, 6]]
    assert decode_message(translator.member_join(joined), side="request").body["member_epoch"] == 0
