"""ShareFetch answers that contradict themselves or other deliveries of a run."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.share_state import ShareState
from kdissect.replay.model import EarlierAnswer
from tests.builders.messages import numbered_batch as batch
from tests.replay.comparison.made_run import Run

TOPIC = UUID(int=5)
PARTITION = "responses[0].partitions[0]"
COUNT = f"{PARTITION}.acquired_records[0].delivery_count"


def share(run: Run, acquired: list[tuple[int, int, int]], records: bytes, **more: Any) -> int:
    """A ShareFetch of group g. acquired: first and last offset, delivery count. more: fields of the
    partition."""
    rows = [
        {"first_offset": first, "last_offset": last, "delivery_count": count}
        for first, last, count in acquired
    ]
    partition = {"partition_index": 0, "records": records, "acquired_records": rows, **more}
    return run.add(
        1, ApiKey.SHARE_FETCH, 1, {"group_id": "g"},
        {"responses": [{"topic_id": TOPIC, "partitions": [partition]}]},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("acquired", "said"),
    [
        ([(0, 1, 1)], []),
        ([(0, 0, 1), (1, 1, 1)], []),
        ([], ["none"]),
        ([(0, 5, 1)], ["0 to 5"]),
        ([(0, 1, 1), (1, 1, 1)], ["1 to 1"]),
    ],
)
def test_a_member_acquires_records_of_its_answer_once(
    acquired: list[tuple[int, int, int]], said: list[str]
) -> None:
    """The answer has two records from offset 0."""
    run = Run()
    number = share(run, acquired, batch(0, 2))
    path = f"{PARTITION}.acquired_records"
    assert run.said(ShareState) == [(number, path, each) for each in said]


def test_records_of_an_answer_are_in_their_order() -> None:
    """A second batch with the offsets of the first one, or with earlier ones, is wrong."""
    run = Run()
    share(run, [(0, 3, 1)], batch(0, 2) + batch(2, 2))
    assert run.said(ShareState) == []
    run = Run()
    twice = share(run, [(4, 5, 1)], batch(4, 2) * 2)
    swapped = share(run, [(6, 9, 1)], batch(8, 2) + batch(6, 2))
    path = f"{PARTITION}.records"
    assert run.said(ShareState) == [(twice, path, "offset 4"), (swapped, path, "offset 6")]


def test_a_delivery_count_needs_other_deliveries() -> None:
    """Twice means that another answer of the run brought the records, or had no answer."""
    run = Run()
    number = share(run, [(0, 1, 2)], batch(0, 2))
    assert run.said(ShareState) == [(number, COUNT, "2")]
    share(run, [(0, 1, 1)], batch(0, 2))
    assert run.said(ShareState) == []
    never = share(run, [(2, 3, 0)], batch(2, 2))
    assert run.said(ShareState) == [(never, COUNT, "0")]
    lost = share(run, [(4, 5, 2)], batch(4, 2))
    assert (lost, COUNT, "2") in run.said(ShareState)
    run.outcomes[0].answer = None
    assert run.said(ShareState) == []


def test_an_answer_that_was_not_final_is_checked_too() -> None:
    """It acquires an offset without its record; the final one has all records."""
    run = Run()
    share(run, [(0, 2, 1)], batch(0, 2))
    answer = run.outcomes.pop().answer or b""
    number = share(run, [(3, 4, 1)], batch(3, 2))
    sent = run.outcomes[number].sent or b""
    run.outcomes[number].earlier = [EarlierAnswer(sent, answer, "not all records", 0, 1)]
    assert run.said(ShareState) == [(number, f"{PARTITION}.acquired_records", "0 to 2")]


@pytest.mark.parametrize("code", [0, 6])
def test_a_leader_is_named_beside_an_error_only(code: int) -> None:
    """Error 6 is NOT_LEADER_OR_FOLLOWER."""
    run = Run()
    leader = {"leader_id": 1, "leader_epoch": 0}
    number = share(run, [(0, 1, 1)], batch(0, 2), current_leader=leader, error_code=code)
    path = f"{PARTITION}.current_leader.leader_id"
    assert run.said(ShareState) == ([] if code else [(number, path, "1")])


def test_a_description_has_the_partitions_of_deliveries() -> None:
    """A member has got records of partition 0, before and after the request for all topics."""
    run = Run()
    share(run, [(0, 1, 1)], batch(0, 2))

    def describe(at_s: float, *numbers: int) -> int:
        partitions = [{"partition_index": each, "start_offset": 0} for each in numbers]
        topic = {"topic_name": "t", "topic_id": TOPIC, "partitions": partitions}
        return run.add(
            at_s, ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, 1,
            {"groups": [{"group_id": "g", "topics": None}]},
            {"groups": [{"group_id": "g", "topics": [topic]}]},
        )  # fmt: skip

    describe(0.5)
    describe(2, 0, 1)
    number = describe(3, 1)
    assert run.said(ShareState) == [(number, "groups[0].topics", "not listed")]
    run.outcomes.pop()
    number = describe(3, 0, 0)
    assert run.said(ShareState) == [(number, "groups[0].topics", f"{TOPIC} partition 0")]
    run.outcomes.pop()
    describe(3)
    run.add(2.5, ApiKey.DELETE_GROUPS, 2, {"groups_names": ["g"]}, {"results": []})
    assert run.said(ShareState) == []


@pytest.mark.parametrize(("code", "count"), [(0, 1), (121, 0)])
def test_a_member_acknowledges_what_it_has_acquired(code: int, count: int) -> None:
    """It has got the offsets 0 and 1. Error 121 is INVALID_RECORD_STATE."""
    run = Run()
    share(run, [(0, 1, 1)], batch(0, 2))

    def acknowledge(first: int, last: int, code: int) -> int:
        sent = {"first_offset": first, "last_offset": last, "acknowledge_types": [1]}
        partition = {"partition_index": 0, "acknowledgement_batches": [sent]}
        return run.add(
            2, ApiKey.SHARE_ACKNOWLEDGE, 1,
            {"group_id": "g", "topics": [{"topic_id": TOPIC, "partitions": [partition]}]},
            {"responses": [{"topic_id": TOPIC, "partitions": [
                {"partition_index": 0, "error_code": code}]}]},
        )  # fmt: skip

    acknowledge(0, 1, 0)
    number = acknowledge(1, 2, code)
    assert run.said(ShareState) == [(number, "responses", "not acquired")] * count


@pytest.mark.parametrize(("start", "count"), [(0, 1), (1, 1), (2, 0), (3, 0)])
def test_a_group_starts_after_finished_records(start: int, count: int) -> None:
    """Offsets 0 and 1 were finished before the acknowledgement of 2; 3 is released."""
    run = Run()
    share(run, [(0, 3, 1)], batch(0, 4))
    for at_s, first, types in ((2, 0, [1, 3]), (3, 2, [1, 2])):
        sent = {"first_offset": first, "last_offset": first + 1, "acknowledge_types": types}
        partition = {"partition_index": 0, "acknowledgement_batches": [sent]}
        run.add(
            at_s, ApiKey.SHARE_ACKNOWLEDGE, 1,
            {"group_id": "g", "topics": [{"topic_id": TOPIC, "partitions": [partition]}]},
            {"responses": [{"topic_id": TOPIC, "partitions": [{"partition_index": 0}]}]},
        )  # fmt: skip
    described = {"partition_index": 0, "start_offset": start}
    topic = {"topic_name": "t", "topic_id": TOPIC, "partitions": [described]}
    number = run.add(
        4, ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, 1, {"groups": [{"group_id": "g", "topics": None}]},
        {"groups": [{"group_id": "g", "topics": [topic]}]},
    )  # fmt: skip
    path = "groups[0].topics[0].partitions[0].start_offset"
    assert run.said(ShareState) == [(number, path, str(start))] * count


@pytest.mark.parametrize(("changed_s", "count"), [(9, 1), (2.5, 0)])
def test_a_group_does_not_start_earlier(changed_s: float, count: int) -> None:
    """A request may set its offsets back."""
    run, numbers = Run(), []
    for at_s, start in ((1, 3), (2, 5), (3, 4)):
        described = {"partition_index": 0, "start_offset": start}
        topic = {"topic_name": "t", "topic_id": TOPIC, "partitions": [described]}
        numbers.append(
            run.add(
                at_s, ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, 1,
                {"groups": [{"group_id": "g", "topics": None}]},
                {"groups": [{"group_id": "g", "topics": [topic]}]},
            )
        )  # fmt: skip
    run.add(changed_s, ApiKey.ALTER_SHARE_GROUP_OFFSETS, 0, {"group_id": "g", "topics": []}, {})
    path = "groups[0].topics[0].partitions[0].start_offset"
    assert run.said(ShareState) == [(numbers[1], path, "5")] * count
