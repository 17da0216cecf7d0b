"""Responses that contradict the run's own earlier ones, whatever the capture has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest

from kdissect.codec.record_codec import encode_batch
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.cluster_state import ClusterState
from kdissect.replay.comparison.committed_offsets import CommittedOffsets
from kdissect.replay.comparison.group_state import GroupState
from kdissect.replay.comparison.log_bounds import LogBounds
from kdissect.replay.comparison.log_state import LogState
from kdissect.replay.translation.id_map import IdMap
from tests.builders.messages import numbered_batch as batch
from tests.replay.comparison.made_run import Body, Run, S, Said

ABORT, COMMIT = b"\0\0\0\0", b"\0\0\0\1"


def marker(offset: int, key: bytes) -> bytes:
    """Of producer 9."""
    record = {"offset": offset, "timestamp_ms": 5, "key": key, "value": b"\0" * 6, "headers": []}
    return encode_batch([record], producer_id=9, producer_epoch=0, is_transactional=True,
                        is_control=True)  # fmt: skip


RECORDS = "responses[0].partitions[0].records"
HIGH = "responses[0].partitions[0].high_watermark"


@pytest.mark.parametrize(
    ("records", "said", "is_disorder"),
    [
        (batch(0) + batch(2) + batch(4), [], False),
        (batch(2) + batch(4), [(RECORDS, "offset 2")], False),
        (batch(0) + batch(4), [(RECORDS, "offset 4")], False),
        (batch(0) + batch(2) + batch(2) + batch(4), [(RECORDS, "offset 2")], True),
        (batch(2) + batch(0) + batch(4), [(RECORDS, "offset 0"), (RECORDS, "offset 2")], True),
        (batch(0, 6, skipped=[2]), [(f"{RECORDS}[offset 0]", "5 records")], False),
    ],
    ids=["whole", "first lost", "middle lost", "doubled", "swapped", "record lost"],
)
def test_records_of_an_answer(
    records: bytes, said: list[tuple[str, str]], is_disorder: bool
) -> None:
    """is_disorder: whether a compacted log, which may leave offsets out, is at fault too."""
    run = Run()
    run.fetch(1, 0, records, 6)
    assert sorted(each[1:] for each in run.said(LogState)) == said
    compacted = Run("compact")
    compacted.fetch(1, 0, records, 6)
    twice = [each for each in compacted.said(LogState) if each[1:] not in said]
    assert not twice
    assert len(compacted.said(LogState)) == is_disorder


def test_records_that_were_produced_come_back() -> None:
    """A fetched batch that differs from the written one is a contradiction."""
    run = Run()
    run.produce(1, 0, batch(0))
    run.fetch(2, 0, batch(0), 2)
    assert run.said(LogState) == []
    changed = bytearray(batch(0))
    changed[-2] ^= 1
    number = run.fetch(3, 0, bytes(changed), 2)
    assert run.said(LogState) == [(number, f"{RECORDS}[offset 0]", "other records")]


def test_offsets_of_produce_responses() -> None:
    """Each is given once, and is that of a delivered batch."""
    run = Run()
    run.produce(1, 0, batch(0))
    run.produce(2, 2, batch(2))
    run.fetch(3, 0, batch(0) + batch(2), 4)
    assert run.said(LogState) == []
    inside = run.produce(4, 3, batch(4))
    path = "responses[0].partition_responses[0].base_offset"
    assert (inside, path, "3") in run.said(LogState)
    twice = Run()
    twice.produce(1, 0, batch(0))
    number = twice.produce(2, 0, batch(2))
    assert twice.said(LogState) == [(number, path, "0")]


def test_the_latest_offset() -> None:
    """The end of a log that is lower than the records written is a contradiction."""
    run = Run()
    run.produce(1, 0, batch(0, 4))
    partition = {"partition_index": 0, "timestamp": -1}
    asked = {"topics": [{"name": "t", "partitions": [partition]}]}
    for at_s, offset in ((2, 4), (3, 3)):
        told = {"name": "t", "partitions": [{"partition_index": 0, "offset": offset}]}
        number = run.add(at_s, ApiKey.LIST_OFFSETS, 2, asked, {"topics": [told]})
    assert run.said(LogState) == [(number, "topics[0].partitions[0].offset", "3")]


def test_bounds_of_a_log_that_a_later_answer_contradicts() -> None:
    """Log starts, log ends and leader epochs are at most those of later answers."""
    run = Run()
    offset, epoch = "topics[0].partitions[0].offset", "topics[0].partitions[0].leader_epoch"
    run.list_offsets(1, -2, 0, 2)
    start = run.list_offsets(2, -2, 1, 2)
    run.list_offsets(3, -1, 4, 2)
    end = run.list_offsets(4, -1, 5, 3)
    run.fetch(5, 4, b"", 4, log_start_offset=0)
    run.metadata(6, 2)
    assert run.said(LogBounds) == [(start, offset, "1"), (end, offset, "5"), (end, epoch, "3")]


def test_bounds_of_a_log_until_its_topic_is_deleted() -> None:
    """The topic may be made again, with other offsets."""
    run = Run()
    start = run.list_offsets(1, -2, 3, 0)
    run.list_offsets(2, -2, 2, 0)
    run.add(3, ApiKey.DELETE_TOPICS, 1, {"topic_names": ["t"]}, {})
    run.list_offsets(4, -2, 0, 0)
    assert run.said(LogBounds) == [(start, "topics[0].partitions[0].offset", "3")]


def test_a_log_start_before_the_one_that_delete_records_has_answered() -> None:
    """A Fetch that was sent before the answer may have the old one."""
    run = Run()
    topic = {"name": "t", "partitions": [{"partition_index": 0, "low_watermark": 3}]}
    run.add(1, ApiKey.DELETE_RECORDS, 1, {"topics": []}, {"topics": [topic]})
    run.fetch(1.0005, 4, b"", 4, log_start_offset=0)
    assert run.said(LogBounds) == []
    number = run.fetch(2, 4, b"", 4, log_start_offset=0)
    path = "responses[0].partitions[0].log_start_offset"
    assert run.said(LogBounds) == [(number, path, "0")]


def test_a_low_answer_does_not_contradict_those_before_it() -> None:
    """One that is below earlier answers of its own API may be the wrong one."""
    run = Run()
    run.fetch(1, 4, b"", 4)
    run.list_offsets(2, -1, 4, 0)
    run.fetch(3, 4, b"", 0)
    assert run.said(LogBounds) == []


def test_a_current_leader_that_the_only_broker_cannot_have() -> None:
    """A ShareFetch response may name the current leader with its epoch."""
    run = Run()
    run.topics = (("t", UUID(int=5), 1),)

    def answer(epoch: int) -> int:
        leader = {"leader_id": 1, "leader_epoch": epoch}
        partition = {"partition_index": 0, "current_leader": leader}
        topic = {"topic_id": UUID(int=5), "partitions": [partition]}
        return run.add(1, ApiKey.SHARE_FETCH, 1, {}, {"responses": [topic]})

    answer(0)
    number = answer(1)
    path = "responses[0].partitions[0].current_leader.leader_epoch"
    assert run.said(LogBounds) == [(number, path, "1")]


def test_a_leader_epoch_that_the_only_broker_cannot_have() -> None:
    """Metadata of the replay has a lower one, and no connection was lost."""
    run = Run()
    number = run.list_offsets(1, -1, 9, 4)
    ids = IdMap(run.plan)
    ids.target.nodes, ids.target.leaders = {1: ("broker", 9092)}, {("t", 0): (1, 3)}
    found: list[tuple[int, str]] = []
    run.collected(LogBounds(ids)).check(
        lambda outcome, _, expected, __, ___: found.append((outcome.step.number, expected))
    )
    assert found == [(number, "at most 3")]


def test_bounds_of_a_log_with_replicas() -> None:
    """Brokers lag: their offsets are not compared, and epochs only some seconds later."""
    run = Run()
    late = run.list_offsets(1, -1, 9, 4)
    run.list_offsets(8, -1, 9, 4)
    run.fetch(9, 4, b"", 4)
    run.metadata(10, 3)
    path = "topics[0].partitions[0].leader_epoch"
    assert run.said(LogBounds, brokers=3) == [(late, path, "4")]


def test_a_batch_has_the_append_time_of_its_response() -> None:
    """If the broker sets the times of the topic's records."""
    run = Run()
    run.produce(1, 0, batch(0), append_ms=5)
    number = run.produce(1, 2, batch(2), append_ms=6)
    appended = batch(2, timestamp_type="LogAppendTime")
    run.fetch(2, 0, batch(0) + appended, 4)
    path = "responses[0].partition_responses[0].log_append_time_ms"
    assert (number, path, "6") in run.said(LogState)


def test_records_that_an_answer_withholds() -> None:
    """The high watermark says that there is more, and there was room for it."""
    run = Run()
    run.fetch(1, 0, batch(0) + batch(2), 4)
    assert run.said(LogState) == []
    number = run.fetch(2, 0, batch(0), 4)
    empty = run.fetch(3, 2, b"", 4)
    assert run.said(LogState) == [
        (number, RECORDS, "ends before offset 2"), (empty, RECORDS, "ends before offset 2"),
    ]  # fmt: skip


def test_a_fetch_response_without_a_requested_partition() -> None:
    """It has all of them, unless it is throttled or the next one of a session."""
    run = Run()
    topics = [{"topic": "t", "partitions": [{"partition": 0, "fetch_offset": 0}]}]
    answer = {"responses": []}
    number = run.add(1, ApiKey.FETCH, 11, {"session_epoch": -1, "topics": topics}, answer)
    run.add(2, ApiKey.FETCH, 11, {"session_epoch": 4, "topics": topics}, answer)
    run.add(
        3, ApiKey.FETCH, 11, {"session_epoch": -1, "topics": topics},
        {**answer, "throttle_time_ms": 9},
    )  # fmt: skip
    assert run.said(LogState) == [(number, "responses", "not t partition 0")]


def test_a_high_watermark_is_at_least_the_acknowledged_offset() -> None:
    """A high watermark is at least the acknowledged offset, and at most the possible one."""
    run = Run()
    run.produce(1, 0, batch(0, 4))
    good = run.fetch(2, 4, b"", 4)
    assert run.said(LogState) == []
    below = run.fetch(3, 4, b"", 3)
    delivered = run.fetch(4, 0, batch(0, 4), 2)
    above = run.fetch(5, 9, b"", 9)
    stable = HIGH.replace("high_watermark", "last_stable_offset")
    assert run.said(LogState) == [
        (above, HIGH, "9"), (below, HIGH, "3"), (delivered, HIGH, "2"), (delivered, stable, "2"),
    ]  # fmt: skip
    assert good not in {number for number, *_ in run.said(LogState)}


def test_a_last_stable_offset_is_at_an_open_transaction() -> None:
    """It is the high watermark if a marker ends each transaction."""
    run = Run()
    path = HIGH.replace("high_watermark", "last_stable_offset")
    data = batch(2, 2, producer_id=9, is_transactional=True)
    run.produce(1, 0, batch(0))
    run.produce(2, 2, data)
    run.fetch(9, 4, b"", 4, last_stable_offset=2)
    early = run.fetch(10, 4, b"", 4, last_stable_offset=1)
    ended = {"last_stable_offset": 5, "aborted_transactions": []}
    run.fetch(20, 0, batch(0) + data + marker(4, COMMIT), 5, **ended)
    late = run.fetch(21, 5, b"", 5, last_stable_offset=3)
    assert run.said(LogState) == [(early, path, "1"), (late, path, "3")]


def test_a_session_and_a_replica_that_an_answer_cannot_have() -> None:
    """An ended session has no ID, and a broker does not name itself as preferred replica."""
    run = Run()
    number = run.fetch(1, 0, b"", 0, preferred_read_replica=1)
    sent = {"session_id": 4, "session_epoch": 3, "topics": []}
    other = run.add(2, ApiKey.FETCH, 11, sent, {"session_id": 5, "responses": []})
    replica = HIGH.replace("high_watermark", "preferred_read_replica")
    assert run.said(LogState) == [(other, "session_id", "5"), (number, replica, "1")]


def test_a_broker_without_fetch_sessions() -> None:
    """A request without a session is different if no request gets one, and the captured had."""
    run = Run()
    sent = {"session_id": 0, "session_epoch": 0, "topics": []}
    none, some = ({"session_id": number, "responses": []} for number in (0, 7))
    number = run.add(1, ApiKey.FETCH, 11, sent, none, some)
    run.add(2, ApiKey.FETCH, 11, sent, none, none)
    assert run.said(LogState) == [(number, "session_id", "0")]
    run.add(3, ApiKey.FETCH, 11, sent, some, some)
    assert run.said(LogState) == []


def commit(run: Run, at_s: float, offset: int) -> int:
    partition = {"partition_index": 0, "committed_offset": offset}
    return run.add(
        at_s, ApiKey.OFFSET_COMMIT, 7,
        {"group_id": "g", "topics": [{"name": "t", "partitions": [partition]}]},
        {"topics": [{"name": "t", "partitions": [{"partition_index": 0, "error_code": 0}]}]},
    )  # fmt: skip


@pytest.mark.parametrize("version", [5, 8])
def test_a_committed_offset_is_that_of_the_last_commit(version: int) -> None:
    """An answer has the offset of the last commit, or of one that is in flight."""
    run = Run()

    def fetch(at_s: float, offset: int) -> int:
        partition = {"partition_index": 0, "committed_offset": offset}
        topics = [{"name": "t", "partitions": [partition]}]
        asked = [{"name": "t", "partition_indexes": [0]}]
        if version < 8:
            return run.add(
                at_s, ApiKey.OFFSET_FETCH, version, {"group_id": "g", "topics": asked},
                {"topics": topics},
            )  # fmt: skip
        groups = [{"group_id": "g", "topics": topics}]
        sent = {"groups": [{"group_id": "g", "topics": asked}]}
        return run.add(at_s, ApiKey.OFFSET_FETCH, version, sent, {"groups": groups})

    fetch(0.5, 77)  # of an earlier run
    commit(run, 1, 5)
    fetch(2, 5)
    commit(run, 3, 8)
    commit(run, 3.0005, 9)
    fetch(4, 8)
    fetch(4.1, 9)
    fetch(2.9995, 5)
    number = fetch(5, 5)
    path = ("groups[0]." if version == 8 else "") + "topics[0].partitions[0].committed_offset"
    assert run.said(CommittedOffsets) == [(number, path, "5")]


def test_an_epoch_ends_with_the_last_record() -> None:
    """An end offset after the last produced record contradicts the run, and so does one before it
    in the current epoch. An earlier epoch may have ended there."""
    run = Run()
    run.topics = (("t", UUID(int=5), 1),)  # in epoch 0
    run.produce(1, 0, batch(0, 4))
    asked = {"topics": [{"topic": "t", "partitions": [{"partition": 0, "leader_epoch": 0}]}]}

    def end(at_s: float, offset: int, epoch: int = 0) -> int:
        partition = {"error_code": 0, "partition": 0, "leader_epoch": epoch, "end_offset": offset}
        answered = {"topics": [{"topic": "t", "partitions": [partition]}]}
        return run.add(at_s, ApiKey.OFFSET_FOR_LEADER_EPOCH, 3, asked, answered)

    end(2, 4)
    late = end(3, 9)
    early = end(4, 0)
    end(5, 0, epoch=-1)
    path = "topics[0].partitions[0].end_offset"
    assert run.said(LogState) == [(late, path, "9"), (early, path, "0")]
    other = end(6, 4, epoch=1)
    path = "topics[0].partitions[0].leader_epoch"
    assert run.said(LogBounds) == [(other, path, "1")]


def test_leader_epochs_in_answers_about_share_groups() -> None:
    """ShareAcknowledge and DescribeShareGroupOffsets have no epoch above that of the leader."""
    run = Run()
    run.topics = (("t", UUID(int=5), 1),)  # in epoch 0

    def add(epoch: int) -> None:
        leader = {"leader_id": 1, "leader_epoch": epoch}
        partition = {"partition_index": 0, "error_code": 0}
        topic = {"topic_id": UUID(int=5), "partitions": [partition | {"current_leader": leader}]}
        run.add(1, ApiKey.SHARE_ACKNOWLEDGE, 1, {}, {"responses": [topic]})
        topic = {"topic_name": "t", "partitions": [partition | {"leader_epoch": epoch}]}
        groups = [{"group_id": "g", "topics": [topic]}]
        run.add(2, ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, 0, {}, {"groups": groups})

    add(0)
    assert run.said(LogBounds) == []
    add(1)
    assert sorted(each[1:] for each in run.said(LogBounds)) == [
        ("groups[0].topics[0].partitions[0].leader_epoch", "1"),
        ("responses[0].partitions[0].current_leader.leader_epoch", "1"),
    ]


def test_an_epoch_of_old_records_is_no_later_one() -> None:
    """OffsetForLeaderEpoch may have a lower epoch than Metadata, and no higher one."""
    run = Run()

    def epoch(at_s: float, epoch: int) -> int:
        partition = {"error_code": 0, "partition": 0, "leader_epoch": epoch, "end_offset": 4}
        asked = {"topics": [{"topic": "t", "partitions": [{"partition": 0}]}]}
        answered = {"topics": [{"topic": "t", "partitions": [partition]}]}
        return run.add(at_s, ApiKey.OFFSET_FOR_LEADER_EPOCH, 3, asked, answered)

    run.metadata(1, epoch=7)
    epoch(2, 3)
    high = epoch(3, 8)
    run.metadata(4, epoch=7)
    path = "topics[0].partitions[0].leader_epoch"
    assert run.said(LogBounds) == [(high, path, "8")]


def test_a_read_committed_answer_has_a_list_of_aborted_transactions() -> None:
    run = Run()
    run.fetch(1, 0, batch(0), 2, aborted_transactions=[])
    number = run.fetch(1, 0, batch(0), 2, aborted_transactions=None)
    path = "responses[0].partitions[0].aborted_transactions"
    assert run.said(LogState) == [(number, path, "null")]


@pytest.mark.parametrize(
    ("first", "committed_s", "fields"),
    [
        ({}, 9, []),
        ({"committed_offset": 4_999}, 9, ["committed_offset"]),
        ({"committed_offset": 4_999}, 3, []),
        ({"metadata": None}, 9, ["metadata"]),
        ({"committed_leader_epoch": 0}, 9, ["committed_leader_epoch"]),
    ],
)
def test_answers_before_the_first_commit_say_the_same(
    first: Body, committed_s: float, fields: list[str]
) -> None:
    """Their requests are sent after 1 and 3 seconds."""
    run = Run()
    none = {"partition_index": 0, "committed_offset": -1, "committed_leader_epoch": -1,
            "metadata": ""}  # fmt: skip
    for at_s, partition in (1, none | first), (3, none):
        topics = [{"name": "t", "partitions": [partition]}]
        run.add(at_s, ApiKey.OFFSET_FETCH, 5, {"group_id": "g"}, {"topics": topics})
    commit(run, committed_s, 5)
    path = "topics[0].partitions[0]"
    said = [each[:2] for each in run.said(CommittedOffsets)]
    assert said == [(0, f"{path}.{each}") for each in fields]


def test_metadata_of_a_committed_offset() -> None:
    """An answer has the metadata with which the run has committed its offset."""
    run = Run()
    partition = {"partition_index": 0, "committed_offset": 5}
    sent = [{"name": "t", "partitions": [partition | {"committed_metadata": "m"}]}]
    run.add(1, ApiKey.OFFSET_COMMIT, 2, {"group_id": "g", "topics": sent}, {"topics": []})
    numbers = [
        run.add(at_s, ApiKey.OFFSET_FETCH, 5, {"group_id": "g"}, {
            "topics": [{"name": "t", "partitions": [partition | {"metadata": metadata}]}]})
        for at_s, metadata in ((0, ""), (2, "m"), (3, ""))
    ]  # fmt: skip
    path = "topics[0].partitions[0].metadata"
    assert run.said(CommittedOffsets) == [(numbers[2], path, "")]


@pytest.mark.parametrize("key", [ABORT, COMMIT])
def test_a_transaction_is_listed_as_aborted_only_if_it_was(key: bytes) -> None:
    """Listed if they were aborted, and only then."""
    records = batch(0, producer_id=9, producer_epoch=0, is_transactional=True) + marker(2, key)
    listed = [{"producer_id": 9, "first_offset": 0}]
    run = Run()
    without = run.fetch(1, 0, records, 3, aborted_transactions=[])
    with_it = run.fetch(2, 0, records, 3, aborted_transactions=listed)
    path = "responses[0].partitions[0].aborted_transactions"
    wrong = (without, path, "not listed") if key == ABORT else (
        (with_it, path, "producer 9 from offset 0")
    )  # fmt: skip
    assert run.said(LogState) == [wrong]


def test_a_high_watermark_while_somebody_writes() -> None:
    """The broker reads it before the records: one that is appended meanwhile may be above it."""
    run = Run()
    run.fetch(2, 0, batch(0, 3) + batch(3, 1), 3)
    assert [each[1] for each in run.said(LogState)][:1] == [HIGH]
    run.produce(2, 3, batch(3, 1))
    assert run.said(LogState) == []


# -- groups -----------------------------------------------------------------------------------


def join(
    run: Run,
    at_s: float,
    member: str,
    members: Sequence[str],
    leader: str = "a",
    generation: int = 1,
    subscription: bytes = b"",
) -> int:
    return run.add(
        at_s, ApiKey.JOIN_GROUP, 5,
        {"group_id": "g", "member_id": member, "session_timeout_ms": 40_000,
         "protocols": [{"name": "range", "metadata": subscription}]},
        {"generation_id": generation, "protocol_name": "range", "leader": leader,
         "member_id": member,
         "members": [{"member_id": each, "metadata": b""} for each in members]},
    )  # fmt: skip


def sync(run: Run, at_s: float, member: str) -> int:
    sent = {"group_id": "g", "generation_id": 1, "member_id": member}
    return run.add(at_s, ApiKey.SYNC_GROUP, 3, sent, {"assignment": b""})


def heartbeat(run: Run, at_s: float, member: str, code: int) -> int:
    sent = {"group_id": "g", "generation_id": 1, "member_id": member}
    return run.add(at_s, ApiKey.HEARTBEAT, 3, sent, {"error_code": code})


@pytest.mark.parametrize(("listed", "is_wrong"), [("i", False), ("j", True), (None, True)])
def test_the_leader_gets_the_instance_ids_of_members(listed: str | None, is_wrong: bool) -> None:
    run = Run()
    sent = {"group_id": "g", "member_id": "a", "session_timeout_ms": 9, "group_instance_id": "i",
            "protocols": [{"name": "range", "metadata": b""}]}  # fmt: skip
    member = {"member_id": "a", "group_instance_id": listed, "metadata": b""}
    answer = {"generation_id": 1, "protocol_name": "range", "leader": "a", "member_id": "a",
              "members": [member]}  # fmt: skip
    number = run.add(1, ApiKey.JOIN_GROUP, 5, sent, answer)
    found = [(number, "members[0].group_instance_id", str(listed))] * is_wrong
    assert run.said(GroupState) == found


@pytest.mark.parametrize(
    ("at_s", "code", "is_wrong"),
    [(1.2, 0, False), (2, 0, True), (2, 27, False), (2.9999, 0, False), (4, 0, False)],
)
def test_a_group_rebalances_while_a_member_waits(at_s: float, code: int, is_wrong: bool) -> None:
    """Its JoinGroup waits from 1 s to 3 s."""
    run = Run()
    run.outcomes[join(run, 1, "b", ["a", "b"], leader="b")].answered_ns = 3 * S
    number = heartbeat(run, at_s, "a", code)
    assert run.said(GroupState) == ([(number, "error_code", "0")] if is_wrong else [])


def test_a_rebalance_ends_when_all_members_joined() -> None:
    """27 while members join or after one has left; never in between."""
    run = Run()
    join(run, 1, "a", ["a", "b"])
    join(run, 1, "b", [])
    heartbeat(run, 1.5, "a", 27)
    sync(run, 2, "a")
    sync(run, 2, "b")
    assert run.said(GroupState) == []
    number = heartbeat(run, 10, "a", 27)
    assert run.said(GroupState) == [(number, "error_code", "27")]
    run.add(9, ApiKey.LEAVE_GROUP, 1, {"group_id": "g", "member_id": "b"}, {})
    assert run.said(GroupState) == []


@pytest.mark.parametrize(
    ("code", "assignment", "is_wrong"),
    [(27, b"a", False), (27, b"b", True), (27, b"", True), (0, b"b", False)],
)
def test_an_assignment_that_the_captured_response_lacks(
    code: int, assignment: bytes, is_wrong: bool
) -> None:
    """It is the one that the leader sent."""
    run = Run()
    join(run, 1, "a", ["a"])
    sent = {"group_id": "g", "generation_id": 1, "member_id": "a",
            "assignments": [{"member_id": "a", "assignment": b"a"}]}  # fmt: skip
    number = run.add(2, ApiKey.SYNC_GROUP, 1, sent, {"assignment": assignment},
                     {"error_code": code, "assignment": b""})  # fmt: skip
    assert run.said(GroupState) == ([(number, "assignment", "other bytes")] if is_wrong else [])


def test_members_of_a_generation() -> None:
    """The leader's response lists all members, and others list no member."""
    run = Run()
    leader = join(run, 1, "a", [])
    join(run, 1, "b", [])
    assert run.said(GroupState) == [(leader, "members", "0 of 2")]
    other = Run()
    join(other, 1, "a", ["a", "b", "c"])
    number = join(other, 1, "b", ["a"])
    join(other, 1, "c", [])
    assert other.said(GroupState) == [(number, "members", "1 members")]
    two = Run()
    join(two, 1, "a", ["a", "b", "c"])
    number = join(two, 1, "b", [], leader="b")
    join(two, 1, "c", [])
    assert two.said(GroupState) == [(number, "leader", "b")]


def test_a_leader_is_a_member() -> None:
    """Who gets the members finds the leader among them."""
    run = Run()
    number = join(run, 1, "a", ["a"], leader="")
    assert (number, "leader", "") in run.said(GroupState)


def test_a_leader_gets_each_member_once_as_it_joined() -> None:
    """Its list repeats no member, and has the bytes of each JoinGroup."""
    run = Run()
    join(run, 1, "b", [], subscription=b"of b")
    number = join(run, 1, "a", ["a", "b", "b"])
    assert run.said(GroupState) == [
        (number, "members[1].metadata", "other bytes"), (number, "members[2].member_id", "b"),
        (number, "members[2].metadata", "other bytes"),
    ]  # fmt: skip


def test_generations_begin_at_1_and_do_not_fall() -> None:
    """A lower generation is a contradiction."""
    run = Run()
    zero = join(run, 1, "a", ["a"], generation=0)
    join(run, 2, "a", ["a"], generation=2)
    lower = join(run, 3, "a", ["a"], generation=1)
    path = "generation_id"
    assert run.said(GroupState) == [(zero, path, "0"), (lower, path, "1")]


# -- the cluster --------------------------------------------------------------------------------


def metadata(run: Run, at_s: float, **more: Any) -> int:
    """Of topic t with one partition, led by broker 1; more: fields of its partition, or of the
    whole response."""
    partition = {"partition_index": 0, "leader_id": 1, "replica_nodes": [1], "isr_nodes": [1],
                 "offline_replicas": []}  # fmt: skip
    partition |= {name: more.pop(name) for name in list(more) if name in partition}
    broker = {"node_id": 1, "host": "broker", "port": 9092}
    topics = [{"name": "t", "partitions": [partition]}]
    body = {"brokers": [broker], "controller_id": 1, "topics": topics, **more}
    return run.add(at_s, ApiKey.METADATA, 8, {"topics": None}, body)


PARTITION = {"partition_index": 0, "leader_id": 1, "replica_nodes": [1], "isr_nodes": [1]}


@pytest.mark.parametrize(
    ("topics", "paths"),
    [
        ([("t", [0, 1])], []),
        ([], ["topics"]),
        ([("t", [0, 1]), ("t", [0, 1])], ["topics[1].name"]),
        ([("t", [0, 1]), ("u", [0])], ["topics[1].name"]),
        ([("t", [0, 0])], ["topics[0].partitions"]),
        ([("t", [])], ["topics[0].partitions"]),
    ],
)
@pytest.mark.parametrize("api_key", [ApiKey.METADATA, ApiKey.DESCRIBE_TOPIC_PARTITIONS])
def test_partitions_of_topics(
    api_key: ApiKey, topics: list[tuple[str, list[int]]], paths: list[str]
) -> None:
    """Each requested topic once, and all of its partitions as in other answers."""
    run = Run()

    def answer(at_s: float, topics: list[tuple[str, list[int]]], api_key: ApiKey) -> int:
        listed = [
            {"name": name, "partitions": [PARTITION | {"partition_index": at} for at in numbers]}
            for name, numbers in topics
        ]
        body: Body = {"topics": listed}
        if api_key == ApiKey.METADATA:
            body["brokers"] = [{"node_id": 1, "host": "broker", "port": 9092}]
            body["controller_id"] = 1
        version = 8 if api_key == ApiKey.METADATA else 0
        return run.add(at_s, api_key, version, {"topics": [{"name": "t"}]}, body)

    answer(1, [("t", [0, 1])], ApiKey.METADATA)
    answer(2, [("t", [0, 1])], ApiKey.METADATA)
    number = answer(3, topics, api_key)
    assert [each[:2] for each in run.said(ClusterState)] == [(number, path) for path in paths]


def test_each_requested_key_has_one_coordinator() -> None:
    """FindCoordinator from v4 on has a list (KIP-699)."""
    run = Run()
    metadata(run, 1)
    requested = {"coordinator_keys": ["g"]}
    one = {"key": "g", "node_id": 1, "host": "broker", "port": 9092}
    numbers = [
        run.add(2, ApiKey.FIND_COORDINATOR, 4, requested, {"coordinators": [one] * count})
        for count in (0, 1, 2)
    ]
    found = [(numbers[0], "coordinators", "0"), (numbers[2], "coordinators", "2")]
    assert run.said(ClusterState) == found


def test_topics_that_the_run_made() -> None:
    """Are in Metadata five seconds later, with their partitions."""
    run = Run()
    topic = {"name": "t", "num_partitions": 1, "replication_factor": 1}
    run.add(1, ApiKey.CREATE_TOPICS, 5, {"topics": [topic]}, {"topics": [topic]})
    metadata(run, 2, topics=[])
    more = metadata(run, 2, topics=[{"name": "t", "partitions": [
        PARTITION, PARTITION | {"partition_index": 1}]}])  # fmt: skip
    metadata(run, 9)
    number = metadata(run, 10, topics=[])
    fewer = metadata(run, 11, topics=[{"name": "t", "partitions": []}])
    assert run.said(ClusterState) == [
        (more, "topics[0].partitions", "2 partitions"),
        (number, "topics", "not listed"), (fewer, "topics[0].partitions", "none"),
    ]  # fmt: skip


class WithTopics(Run):
    """The target had topic t, and an internal one, before the first request."""

    def ids(self, brokers: int) -> IdMap:
        ids = super().ids(brokers)
        ids.target.first_topics = frozenset({"t", "__transaction_state"})
        return ids


def test_topics_that_the_target_had() -> None:
    """A response about all topics has them; of several brokers, one may learn of them later."""
    run = WithTopics()
    number = metadata(run, 1)
    assert run.said(ClusterState) == [(number, "topics", "not listed")]
    assert run.said(ClusterState, brokers=2) == []
    run.add(0, ApiKey.DELETE_TOPICS, 1, {"topic_names": ["__transaction_state"]}, {})
    assert run.said(ClusterState) == []


def test_a_page_of_a_description_of_topics() -> None:
    """A response with a cursor for the next page may lack partitions and topics."""
    run = Run()
    metadata(run, 1)
    metadata(run, 2)
    cursor = {"topic_name": "t", "partition_index": 1}
    page = {"topics": [{"name": "t", "partitions": []}], "next_cursor": cursor}
    run.add(3, ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, {"topics": [{"name": "t"}]}, page)
    assert run.said(ClusterState) == []


def test_a_transaction_that_does_not_end() -> None:
    """An ongoing transaction after its timeout, or after its end, contradicts the run."""
    run = Run()
    wanted = {"transactional_id": "x", "transaction_timeout_ms": 10_000}
    run.add(1, ApiKey.INIT_PRODUCER_ID, 1, wanted, {"producer_id": 9})
    run.add(2, ApiKey.ADD_PARTITIONS_TO_TXN, 1, {"v3_and_below_transactional_id": "x"}, {})

    def describe(at_s: float, state: str) -> int:
        told = {"transactional_id": "x", "transaction_state": state}
        return run.add(at_s, ApiKey.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": ["x"]},
                       {"transaction_states": [told]})  # fmt: skip

    describe(20, "Ongoing")
    assert run.said(ClusterState) == []
    late = describe(40, "Ongoing")
    path = "transaction_states[0].transaction_state"
    assert run.said(ClusterState) == [(late, path, "Ongoing")]
    run.add(50, ApiKey.END_TXN, 1, {"transactional_id": "x", "committed": True}, {})
    describe(51, "PrepareCommit")
    ended = describe(52, "Ongoing")
    stuck = describe(60, "PrepareCommit")
    assert run.said(ClusterState)[1:] == [(ended, path, "Ongoing"), (stuck, path, "PrepareCommit")]


class TwoPartitions(Run):
    """The target's topic t has two partitions."""

    topics = (("t", UUID(int=5), 2),)

    def log_dirs(self, *dirs: Body) -> Said:
        """Findings if the target has these log dirs, and the captured broker had both partitions
        in one."""
        captured = {"results": [log_dir([0, 1])]}
        self.outcomes.clear()
        self.add(1, ApiKey.DESCRIBE_LOG_DIRS, 5, {"topics": None}, {"results": [*dirs]}, captured)
        return [each[1:] for each in self.said(ClusterState)]


def log_dir(numbers: list[int], lag: int = 0, **more: Any) -> Body:
    """A log dir with partitions of topic t."""
    partitions = [{"partition_index": each, "offset_lag": lag} for each in numbers]
    return {"log_dir": "/a", "topics": [{"name": "t", "partitions": partitions}], **more}


# -- configs, clocks and tokens -----------------------------------------------------------------


@pytest.mark.parametrize(("due", "time", "is_wrong"), [
    (-1, -1, False), (-1, 4_999, True), (-2, 0, True), (-3, 4_999, False), (-4, 1, True),
])  # fmt: skip
def test_an_end_of_a_log_has_no_time(due: int, time: int, is_wrong: bool) -> None:
    """Only the largest timestamp (-3) and the first record of a time have one."""
    run = Run()
    asked = {"name": "t", "partitions": [{"partition_index": 0, "timestamp": due}]}
    found = {"partition_index": 0, "timestamp": time, "offset": 0}
    answer = {"topics": [{"name": "t", "partitions": [found]}]}
    number = run.add(1, ApiKey.LIST_OFFSETS, 7, {"topics": [asked]}, answer)
    path = "topics[0].partitions[0].timestamp"
    assert run.said(LogState) == ([(number, path, str(time))] if is_wrong else [])


@pytest.mark.parametrize(
    ("epochs", "high", "wrong"),
    [([50, 51], 60, []), ([70, 60, 60], 70, [0]), ([5060, 5061], 61, [2])],
)
def test_the_epoch_of_features_is_an_offset_of_the_metadata_log(
    epochs: list[int], high: int, wrong: list[int]
) -> None:
    """It does not fall, and is no later than the high watermark of the quorum."""
    run = Run()
    for at_s, epoch in enumerate(epochs):
        run.add(at_s, ApiKey.API_VERSIONS, 3, {}, {"finalized_features_epoch": epoch})
        run.outcomes[-1].node_id = None  # of the connection to the bootstrap address
    voter = {"replica_id": 1, "log_end_offset": high}
    log = {"leader_id": 1, "high_watermark": high, "current_voters": [voter]}
    topic = {"topic_name": "__cluster_metadata", "partitions": [log]}
    run.add(9, ApiKey.DESCRIBE_QUORUM, 0, {}, {"topics": [topic]})
    assert [each[0] for each in run.said(LogBounds)] == wrong


@pytest.mark.parametrize(
    ("start", "lag", "said"),
    [(2, 0, []), (0, 2, []), (3, 0, [("start_offset", "3"), ("lag", "3")]), (1, 2, [("lag", "3")])],
)
def test_offsets_of_a_share_group(start: int, lag: int, said: list[tuple[str, str]]) -> None:
    """The log has two records."""
    run = TwoPartitions()
    run.produce(1, 0, batch(0))
    partition = {"partition_index": 0, "start_offset": start, "lag": lag}
    topic = {"topic_name": "t", "topic_id": UUID(int=5), "partitions": [partition]}
    number = run.add(
        2, ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, 1, {"groups": [{"group_id": "g", "topics": None}]},
        {"groups": [{"group_id": "g", "topics": [topic]}]},
    )  # fmt: skip
    path = "groups[0].topics[0].partitions[0]"
    assert run.said(LogState) == [(number, f"{path}.{name}", end) for name, end in said]


def test_a_record_found_by_its_time() -> None:
    """It is no older than the requested time, and no newer than its batch."""
    run = Run()
    run.fetch(1, 0, batch(0), 2)  # the time of its records is 5

    def find(due: int, time: int) -> int:
        partition = {"partition_index": 0, "timestamp": due}
        answered = {"partition_index": 0, "offset": 1, "timestamp": time}
        return run.add(
            2, ApiKey.LIST_OFFSETS, 4, {"topics": [{"name": "t", "partitions": [partition]}]},
            {"topics": [{"name": "t", "partitions": [answered]}]},
        )  # fmt: skip

    find(3, 5)
    numbers = [find(5, 4), find(3, 6)]
    assert [each[0] for each in run.said(LogState)] == numbers


def test_records_are_deleted_up_to_the_requested_offset() -> None:
    """The log starts there or later."""
    run = Run()

    def delete(start: int) -> int:
        partition, answered = {"offset": 3}, {"low_watermark": start}
        return run.add(
            1, ApiKey.DELETE_RECORDS, 1,
            {"topics": [{"name": "t", "partitions": [{"partition_index": 0, **partition}]}]},
            {"topics": [{"name": "t", "partitions": [{"partition_index": 0, **answered}]}]},
        )  # fmt: skip

    delete(3)
    number = delete(0)
    path = "topics[0].partitions[0].low_watermark"
    assert run.said(LogState) == [(number, path, "0")]
