"""Lies of the catalogue: which a response has room for, and which share a run."""

from __future__ import annotations

import datetime
from dataclasses import replace

import pytest
from kio.schema.errors import ErrorCode
from kio.schema.list_offsets.v8.response import (
    ListOffsetsPartitionResponse,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from kio.schema.offset_fetch.v5.response import (
    OffsetFetchResponse,
    OffsetFetchResponsePartition,
    OffsetFetchResponseTopic,
)
from kio.schema.types import TopicName
from kio.static.primitive import i32, i32Timedelta, i64

from tests.broker.lies import Lie, alter, lies_in
from tools.replay_detection import do_meet, is_reported, rounds

NONE = ErrorCode.none
PARTITION = OffsetFetchResponsePartition(
    partition_index=i32(0), committed_offset=i64(7), committed_leader_epoch=i32(0),
    metadata="m", error_code=NONE,
)  # fmt: skip
COMMITS = OffsetFetchResponse(
    throttle_time=i32Timedelta.parse(datetime.timedelta()), error_code=NONE,
    topics=(OffsetFetchResponseTopic(name=TopicName("t"), partitions=(PARTITION,)),),
)  # fmt: skip
OFFSET = "topics[].partitions[].committed_offset"


def test_a_field_can_be_null_if_kafka_allows_it() -> None:
    """Metadata of a commit is nullable, an offset is not."""
    kinds = lies_in(COMMITS)
    assert ("topics[].partitions[].metadata", "null") in kinds
    assert (OFFSET, "null") not in kinds
    [topic] = alter(COMMITS, "topics[].partitions[].metadata", "null").topics
    assert topic.partitions == (replace(PARTITION, metadata=None),)


@pytest.mark.parametrize(("kind", "offset"), [("plus 1", 8), ("plus 5000", 5007), ("zero", 0)])
def test_an_offset_can_be_another_one(kind: str, offset: int) -> None:
    """The offset changes, and nothing else."""
    [topic] = alter(COMMITS, OFFSET, kind).topics
    assert topic.partitions == (replace(PARTITION, committed_offset=offset),)


def test_a_field_without_another_value_has_no_lie() -> None:
    """A list without elements cannot be emptied or shortened."""
    empty = ListOffsetsResponse(throttle_time=COMMITS.throttle_time, topics=())
    assert not [kind for path, kind in lies_in(empty) if path.startswith("topics")]
    partition = ListOffsetsPartitionResponse(partition_index=i32(0), error_code=NONE)
    topic = ListOffsetsTopicResponse(name=TopicName("t"), partitions=(partition,))
    assert ("topics[].partitions", "shortened") not in lies_in(replace(empty, topics=(topic,)))


@pytest.mark.parametrize(
    ("one", "other", "is_met"),
    [
        (Lie("Fetch", "responses[].partitions[].high_watermark", "zero"),
         Lie("Fetch", "responses[].partitions[].last_stable_offset", "zero"), False),
        (Lie("Fetch", "responses[].partitions[].error_code", "error"),
         Lie("Fetch", "responses[].partitions[].last_stable_offset", "zero"), True),
        (Lie("Fetch", "responses", "emptied"),
         Lie("Fetch", "responses[].partitions[].last_stable_offset", "zero"), True),
        (Lie("Fetch", "responses", "emptied"), Lie("Produce", "responses", "emptied"), False),
        (Lie("Fetch", "connection", "cut"), Lie("Produce", "responses", "emptied"), True),
        (Lie("Fetch", "connection", "cut"), Lie("Produce", "connection", "cut"), False),
    ],
)  # fmt: skip
def test_lies_that_hide_each_other_do_not_share_a_run(one: Lie, other: Lie, is_met: bool) -> None:
    """An error hides its struct, a lost list its elements, and a cut connection everything."""
    assert do_meet(one, other) == do_meet(other, one) == is_met
    assert len(rounds([one, other])) == 1 + is_met
    assert len(rounds([one, other], is_again=True)) == 1 + (is_met or one.api == other.api)


def test_a_finding_counts_for_the_only_lie_that_can_be_its_cause() -> None:
    """One about a list may be due to either of two lies about its elements."""
    code, text = (
        Lie("StreamsGroupHeartbeat", f"status[].{name}", "zero")
        for name in ("status_code", "status_detail")
    )
    above, own = ("StreamsGroupHeartbeat", "status"), ("StreamsGroupHeartbeat", code.path)
    assert is_reported(code, {above}, [code])
    assert not is_reported(code, {above}, [code, text])
    plain = (own[0], own[1].replace("[]", ""))
    assert is_reported(code, {plain}, [code, text])
    assert not is_reported(text, {plain}, [code, text])
    assert is_reported(code, {above}, [code, Lie("Metadata", "topics", "emptied")])
