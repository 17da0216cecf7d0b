"""Answers that contradict what the run has shown of the target's groups."""

from typing import Any
from uuid import UUID

import pytest

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Attempt
from tests.replay.comparison.made_run import Run, S

TOPIC = UUID(int=5)
CONSUMER, SHARE, STREAMS = (
    ApiKey.CONSUMER_GROUP_HEARTBEAT, ApiKey.SHARE_GROUP_HEARTBEAT, ApiKey.STREAMS_GROUP_HEARTBEAT,
)  # fmt: skip
VERSIONS = {CONSUMER: 1, SHARE: 1, STREAMS: 0}


class Classic(Run):
    """Members of classic group g."""

    def join(
        self, at_s: float, member: str, leader: str = "a", members: str = "", generation: int = 1
    ) -> int:
        """members: letters of those that the leader gets."""
        listed = [{"member_id": each, "metadata": b""} for each in members]
        return self.add(
            at_s, ApiKey.JOIN_GROUP, 5,
            {"group_id": "g", "member_id": member, "session_timeout_ms": 10_000,
             "protocol_type": "consumer", "protocols": [{"name": "range", "metadata": b""}]},
            {"error_code": 0, "generation_id": generation, "protocol_name": "range",
             "leader": leader, "member_id": member, "members": listed},
        )  # fmt: skip

    def sync(self, at_s: float, member: str, answered: bytes, **sent: bytes) -> int:
        """sent: the assignments that a leader sends, by member."""
        given = [{"member_id": each, "assignment": data} for each, data in sent.items()]
        return self.add(
            at_s, ApiKey.SYNC_GROUP, 3,
            {"group_id": "g", "generation_id": 1, "member_id": member, "assignments": given},
            {"error_code": 0, "assignment": answered},
        )  # fmt: skip

    def heartbeat(self, at_s: float, member: str, code: int) -> int:
        body = {"group_id": "g", "generation_id": 1, "member_id": member}
        return self.add(at_s, ApiKey.HEARTBEAT, 3, body, {"error_code": code}, {"error_code": 0})


def test_a_rebalance_begins_when_a_member_joins_leaves_or_is_silent() -> None:
    """A member that has its assignment gets 27 only then, and until it joins again."""
    run = Classic()
    run.join(1, "a", members="ab")
    run.join(1, "b")
    run.sync(1.1, "a", b"x", a=b"x", b=b"y")
    run.sync(1.1, "b", b"y")
    wrong = run.heartbeat(2, "a", 27)
    assert run.said() == [(wrong, "error_code", "27")]
    run.heartbeat(8, "a", 27)
    run.join(9, "c", generation=2)
    run.heartbeat(30, "a", 27)
    assert run.said() == [(wrong, "error_code", "27")]
    run.add(1.5, ApiKey.LEAVE_GROUP, 1, {"group_id": "g", "member_id": "b"}, {"error_code": 0})
    assert run.said() == []


def test_the_leader_gets_all_members() -> None:
    run = Classic()
    number = run.join(1, "a", members="a")
    run.join(1, "b")
    assert run.said() == [(number, "members[b]", "not listed")]
    right = Classic()
    right.join(1, "a", members="ab")
    right.join(1, "b")
    right.join(60, "c")  # b again: a static member gets a new id in the same generation (KIP-345)
    assert right.said() == []


class Assigned(Run):
    """Members of group g, whose topic t has two partitions."""

    topics = (("t", TOPIC, 2),)

    def __init__(self, api_key: ApiKey = CONSUMER) -> None:
        super().__init__()
        self.api_key = api_key

    def heartbeat(
        self, at_s: float, epoch: int, assigned: Any = None, captured: Any = None, member: str = "m"
    ) -> int:
        """A heartbeat in an epoch; the assignments of both sides."""
        sent = {"group_id": "g", "member_id": member, "member_epoch": epoch}
        both = [
            {"member_id": member, "member_epoch": 1, **self._assignment(given)}
            for given in (assigned, captured)
        ]
        return self.add(at_s, self.api_key, VERSIONS[self.api_key], sent, *both)

    def _assignment(self, given: Any) -> dict[str, Any]:
        """given: numbers of partitions of topic t, or of tasks of subtopology 0."""
        if self.api_key == STREAMS:
            tasks = None if given is None else [{"subtopology_id": "0", "partitions": given}]
            return {"active_tasks": tasks}
        topics = [{"topic_id": TOPIC, "partitions": given}] if given else []
        return {"assignment": None if given is None else {"topic_partitions": topics}}

    def settle(self, *members: str) -> int:
        """Four heartbeats of each member, two seconds after they joined; the last one."""
        number = -1
        for at_s in (3, 4, 5, 6):
            for member in members:
                number = self.heartbeat(at_s, 1, member=member)
        return number


@pytest.mark.parametrize("api_key", [CONSUMER, SHARE, STREAMS])
def test_all_partitions_have_an_owner_when_the_group_has_settled(api_key: ApiKey) -> None:
    """Those that the captured members had."""
    run = Assigned(api_key)
    run.heartbeat(1, 0, [0], [0, 1])
    assert run.said() == []
    number = run.settle("m")
    path = "active_tasks" if api_key == STREAMS else "assignment"
    assert run.said() == [(number, path, "not assigned")]
    run.heartbeat(2, 1, [0, 1])
    assert run.said() == []


@pytest.mark.parametrize(("api_key", "is_wrong"), [(CONSUMER, True), (SHARE, False)])
def test_a_partition_has_one_owner(api_key: ApiKey, is_wrong: bool) -> None:
    """But for share groups, whose members share partitions."""
    run = Assigned(api_key)
    run.heartbeat(1, 0, [0, 1], [0, 1], "m")
    run.heartbeat(1, 0, [1], [], "n")
    number = run.settle("m", "n")
    assert run.said() == [(number, "assignment", "2 owners")] * is_wrong


def test_a_join_that_is_sent_again_changes_nothing() -> None:
    """As is one whose member got no partitions."""
    run = Assigned()
    number = run.heartbeat(4, 0, [], [0, 1])
    outcome = run.outcomes[number]
    sent, answer = outcome.sent or b"", outcome.answer or b""
    outcome.earlier = [Attempt(sent, at * S, answer, at * S + 1) for at in (1, 2, 3)]
    assert run.said() == [(number, "assignment", "not assigned")] * 2


def test_partitions_that_the_target_does_not_have() -> None:
    """The captured topic may have had more."""
    run = Assigned()
    run.heartbeat(1, 0, [0, 1], [0, 1, 2])
    run.settle("m")
    assert run.said() == []


def test_a_group_that_changes_has_not_settled() -> None:
    """A member that is silent for long may have lost its partitions."""
    run = Assigned()
    run.heartbeat(1, 0, [0], [0, 1])
    run.settle("m")
    run.heartbeat(3.5, 0, [], member="other")
    assert run.said() == []
