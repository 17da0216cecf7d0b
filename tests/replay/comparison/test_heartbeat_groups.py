"""Answers about consumer, share and streams groups that contradict the rest of a run."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.heartbeat_groups import HeartbeatGroups
from kdissect.replay.model import Attempt, EarlierAnswer
from tests.replay.comparison.made_run import Run, S, Said
from tests.replay.made import request, response

TOPIC = UUID(int=5)
CONSUMER, SHARE, STREAMS = (
    ApiKey.CONSUMER_GROUP_HEARTBEAT, ApiKey.SHARE_GROUP_HEARTBEAT, ApiKey.STREAMS_GROUP_HEARTBEAT,
)  # fmt: skip
VERSIONS = {CONSUMER: 1, SHARE: 1, STREAMS: 0}
DESCRIBE = {
    CONSUMER: (ApiKey.CONSUMER_GROUP_DESCRIBE, 0), SHARE: (ApiKey.SHARE_GROUP_DESCRIBE, 1),
    STREAMS: (ApiKey.STREAMS_GROUP_DESCRIBE, 0),
}  # fmt: skip
Body = dict[str, Any]
LACKS = ("assignment.topic_partitions", "not assigned")


class Group(Run):
    """Members of group g, whose topic t has two partitions."""

    topics = (("t", TOPIC, 2),)

    def __init__(self, api_key: ApiKey = CONSUMER) -> None:
        super().__init__()
        self.api_key = api_key

    def heartbeat(
        self, at_s: float, epoch: int, answered: int, assigned: Any = None,
        captured: Any = None, member: str = "m", pattern: str = "", **more: Any,
    ) -> int:  # fmt: skip
        """A heartbeat in an epoch; the answered one, and the assignments of both sides."""
        sent = {"group_id": "g", "member_id": member, "member_epoch": epoch}
        if pattern:
            sent["subscribed_topic_regex"] = pattern
        both = []
        for given in (assigned, captured):
            body = {"member_id": member, "member_epoch": answered, **self._assignment(given)}
            both.append(body | more)
        return self.add(at_s, self.api_key, VERSIONS[self.api_key], sent, *both)

    def _assignment(self, given: Any) -> Body:
        """given: numbers of partitions of topic t, or of tasks of subtopology 0."""
        if self.api_key == STREAMS:
            tasks = None if given is None else [{"subtopology_id": "0", "partitions": given}]
            return {"active_tasks": tasks}
        topics = [{"topic_id": TOPIC, "partitions": given}] if given else []
        return {"assignment": None if given is None else {"topic_partitions": topics}}

    def describe(self, at_s: float, state: str, epoch: int, assigned: int, *members: int) -> int:
        api_key, version = DESCRIBE[self.api_key]
        described = {
            "group_id": "g", "group_state": state, "group_epoch": epoch,
            "assignment_epoch": assigned,
            "members": [{"member_id": "m", "member_epoch": each} for each in members],
        }  # fmt: skip
        return self.add(at_s, api_key, version, {"group_ids": ["g"]}, {"groups": [described]})

    def found(self) -> Said:
        """Findings, without those about partitions that the only member of a group lacks."""
        return [each for each in self.said(HeartbeatGroups) if each[1:] != LACKS]


def test_the_only_member_of_a_group_has_all_partitions_of_a_topic() -> None:
    """Partition 1 is missing until another member joins, or partitions are added."""
    run = Group()
    number = run.heartbeat(1, 0, 1, [0])
    assert run.said(HeartbeatGroups) == [(number, *LACKS)]
    run.heartbeat(2, 0, 2, member="other")
    assert run.said(HeartbeatGroups) == []
    grown = Group()
    grown.heartbeat(1, 0, 1, [0])
    grown.add(0, ApiKey.CREATE_PARTITIONS, 3, {"topics": []}, {"results": []})
    assert grown.said(HeartbeatGroups) == []


def test_an_assigned_topic_has_partitions() -> None:
    run = Group()
    empty = {"topic_partitions": [{"topic_id": TOPIC, "partitions": []}]}
    number = run.heartbeat(1, 0, 1, assignment=empty)
    assert (number, "assignment.topic_partitions", "none") in run.said(HeartbeatGroups)


def test_the_only_member_of_a_group_gains_no_partition_in_an_epoch() -> None:
    """It may lose some before its next epoch, and a share group adds those that are initialised."""
    for api_key, epoch, said in (
        (CONSUMER, 1, ["0 partitions"]), (CONSUMER, 2, []), (SHARE, 1, []),
    ):  # fmt: skip
        run = Group(api_key)
        number = run.heartbeat(1, 0, 1, [])
        run.heartbeat(2, 0, epoch, [0, 1])
        run.heartbeat(3, epoch, epoch, [])
        found = [each for each in run.said(HeartbeatGroups) if each[1] == LACKS[0]]
        assert found == [(number, LACKS[0], each) for each in said]


def test_a_listed_group_has_the_protocol_type_of_its_members() -> None:
    """Before a group is deleted, and only if the run knows a member."""
    run = Group(SHARE)
    run.heartbeat(1, 0, 1)

    def listed(at_s: float, group: str, protocol_type: str) -> int:
        groups = [{"group_id": group, "protocol_type": protocol_type}]
        return run.add(at_s, ApiKey.LIST_GROUPS, 3, {}, {"groups": groups})

    listed(2, "g", "share")
    listed(2, "other", "consumer")
    number = listed(2, "g", "")
    path = "groups[0].protocol_type"
    assert [each for each in run.said(HeartbeatGroups) if each[1] == path] == [(number, path, "")]
    run.add(1.5, ApiKey.DELETE_GROUPS, 2, {"groups_names": ["g"]}, {"results": []})
    assert path not in {each[1] for each in run.said(HeartbeatGroups)}


@pytest.mark.parametrize(
    ("tasks", "epoch", "state", "said"),
    [
        ([0, 1], 3, "Stable", []), ([], 3, "NotReady", []),
        ([0], 3, "Stable", ["0 partition 1"]), ([0, 1, 1], 3, "Stable", ["0 partition 1"]),
        ([0, 1], 4, "Stable", ["4", "4"]), ([0, 1], None, "Stable", ["null"]),
    ],
)  # fmt: skip
def test_a_description_of_a_streams_group(
    tasks: list[int], epoch: int | None, state: str, said: list[str]
) -> None:
    """The captured group had two active tasks, and its member sent the topology in epoch 3."""
    run = Group(STREAMS)
    topology = {"epoch": 3, "subtopologies": []}
    sent = {"group_id": "g", "member_id": "m", "member_epoch": 0, "topology": topology}
    run.add(1, STREAMS, 0, sent, {"member_id": "m", "member_epoch": 1})
    run.heartbeat(1.1, 1, 1)

    def describe(tasks: list[int], epoch: int | None, state: str) -> Body:
        active = [{"subtopology_id": "0", "partitions": tasks}]
        member = {"member_id": "m", "member_epoch": 1, "topology_epoch": epoch or 3,
                  "target_assignment": {"active_tasks": active}}  # fmt: skip
        group = {"group_id": "g", "group_state": state, "group_epoch": 1, "assignment_epoch": 1,
                 "topology": epoch and {"epoch": epoch}, "members": [member]}  # fmt: skip
        return {"groups": [group]}

    answers = describe(tasks, epoch, state), describe([0, 1], 3, "Stable")
    run.add(2, *DESCRIBE[STREAMS], {"group_ids": ["g"]}, *answers)
    assert [each[2] for each in run.said(HeartbeatGroups)] == said


def assigned(api_key: ApiKey, given: list[int], *, other: bool = False) -> Said:
    """A member in a settled group for five seconds. The captured one had both partitions."""
    run = Group(api_key)
    run.heartbeat(1, 0, 1, given, [0, 1])
    if other:
        run.heartbeat(2, 0, 2, [1], [0, 1], member="other")
        run.heartbeat(3, 1, 2)
    for at_s in (3, 4, 5):
        run.heartbeat(at_s, 1, 2 if other else 1)
        if other:
            run.heartbeat(at_s, 1, 2, member="other")
    return run.found()


@pytest.mark.parametrize("api_key", [CONSUMER, SHARE, STREAMS])
def test_members_of_a_settled_group_have_all_partitions(api_key: ApiKey) -> None:
    """Some member has each partition or task that a captured member had."""
    path = "active_tasks" if api_key == STREAMS else "assignment"
    assert assigned(api_key, [0, 1]) == []
    assert assigned(api_key, [0]) == [(3, path, "not assigned")]
    assert assigned(api_key, []) == [(3, path, "not assigned")]
    assert assigned(api_key, [0], other=True) == []


def test_a_heartbeat_that_was_sent_again_without_an_assignment() -> None:
    """Each time that it was sent counts."""
    run = Group()
    number = run.heartbeat(1, 0, 1, [], [0, 1])
    outcome = run.outcomes[0]
    assert run.found() == []
    frames = outcome.sent or b"", outcome.answer or b""
    outcome.earlier = [EarlierAnswer(*frames, "", at * S, at * S + 1) for at in (1, 2, 3)]
    outcome.sent_ns, outcome.answered_ns = 4 * S, 4 * S + 1
    assert run.found() == [(number, "assignment", "not assigned")]


def followed(run: Group, at_s: float, epoch: int, answered: int, given: list[int]) -> None:
    """The replay has sent another heartbeat of member m itself after the first exchange."""
    body = {"member_id": "m", "member_epoch": answered, **run._assignment(given)}
    frames = (
        request(run.api_key, 1, group_id="g", member_id="m", member_epoch=epoch),
        response(run.api_key, 1, **body),
    )
    first, at_ns = run.outcomes[0], int(at_s * S)
    attempt = Attempt(0, frames[0], at_ns, frames[1], at_ns + 1)
    first.followed = [*first.followed, attempt]


def test_heartbeats_of_the_replay_itself_bring_assignments() -> None:
    """Partition 1 came with one. If it joined again, it caused another epoch."""
    run = Group()
    run.heartbeat(1, 0, 1, [0], [0, 1])
    followed(run, 2, 0, 2, [0, 1])
    for at_s in (3, 4, 5):
        run.heartbeat(at_s, 1, 2)
    assert run.found() == []
    high = run.heartbeat(6, 1, 3)
    assert run.found() == [(high, "member_epoch", "3")]


def test_an_assignment_that_a_later_one_replaced_does_not_count() -> None:
    """A member had both partitions, and has one after the group's other member has left."""
    run = Group(SHARE)
    run.heartbeat(1, 0, 1, [0], [0, 1])
    followed(run, 1.1, 1, 1, [0, 1])
    run.heartbeat(1.2, 0, 2, [1], [1], member="other")
    run.heartbeat(1.3, -1, -1, member="other")
    run.heartbeat(2, 1, 3, [0], [0, 1])
    run.heartbeat(2.5, 3, 3)
    assert run.found() == []
    last = run.heartbeat(3, 3, 3)
    assert run.found() == [(last, "assignment", "not assigned")]


def test_a_group_that_changes_has_no_settled_assignment() -> None:
    """Others join every second, or there are too few heartbeats. A subscription by a pattern takes
    longer."""
    run = Group()
    run.heartbeat(1, 0, 1, [0], [0, 1])
    run.heartbeat(4, 1, 1)
    assert run.found() == []
    slow = Group()
    slow.heartbeat(1, 0, 1, [0], [0, 1], pattern="t.*")
    for at_s in (5, 9, 13):
        slow.heartbeat(at_s, 1, 1)
    assert slow.found() == []
    last = slow.heartbeat(17, 1, 1)
    assert slow.found() == [(last, "assignment", "not assigned")]
    for at_s in range(5, 10):
        run.heartbeat(at_s, 0, at_s - 3, member=f"m-{at_s}")
        run.heartbeat(at_s + 0.5, 1, at_s - 3)
    assert run.found() == []


def test_an_assignment_names_each_partition_of_metadata_once() -> None:
    """Partition 2 does not exist, and 1 is assigned twice."""
    run = Group()
    number = run.heartbeat(1, 0, 1, [0, 1, 1, 2])
    path = "assignment.topic_partitions"
    assert run.found() == [(number, path, "t partition 1"), (number, path, "t partition 2")]


@pytest.mark.parametrize("api_key", [CONSUMER, SHARE, STREAMS])
def test_epochs_of_a_member(api_key: ApiKey) -> None:
    """An epoch does not fall, and rises only with the members of the group."""
    run = Group(api_key)
    run.heartbeat(1, 0, 1)
    run.heartbeat(2, 0, 2, member="other")
    run.heartbeat(3, 1, 2)
    fallen = run.heartbeat(4, 2, 1)
    risen = run.heartbeat(5, 2, 1000)
    assert run.found() == [(fallen, "member_epoch", "1"), (risen, "member_epoch", "1000")]
    run.heartbeat(6, 0, 3)
    assert len(run.found()) == 2


def test_a_status_of_a_streams_group() -> None:
    """Internal topics may be missing for a while; a stale topology needs a captured one."""
    run = Group(STREAMS)

    def status(at_s: float, code: int) -> int:
        said = [{"status_code": code, "status_detail": "x"}]
        number = run.heartbeat(at_s, 1, 1, status=said)
        captured = run.outcomes[number].step.exchange
        captured.response = run.outcomes[0].step.exchange.response
        return number

    run.heartbeat(1, 0, 1)
    status(2, 3)
    assert run.found() == []
    stale = status(3, 0)
    twice = run.heartbeat(4, 1, 1, status=[{"status_code": 3, "status_detail": "x"}] * 2)
    assert run.found() == [(stale, "status", "0"), (twice, "status", "3")]


@pytest.mark.parametrize("api_key", [CONSUMER, SHARE, STREAMS])
def test_a_member_that_joins_gets_an_assignment(api_key: ApiKey) -> None:
    """Null, in a later answer, means that nothing has changed."""
    run = Group(api_key)
    run.heartbeat(1, 0, 1, [0, 1], [0, 1])
    run.heartbeat(1.5, 1, 1, None, [0, 1])
    assert run.found() == []
    number = run.heartbeat(2, 0, 2, None, [0, 1], member="other")
    path = "active_tasks" if api_key == STREAMS else "assignment"
    assert run.found() == [(number, path, "null")]


def test_a_member_that_joins_gets_each_list_of_tasks() -> None:
    """Standby and warmup tasks may be none, but not null."""
    run = Group(STREAMS)
    run.heartbeat(1, 0, 1, [0], [0], standby_tasks=[], warmup_tasks=[])
    assert run.found() == []
    answered = run.outcomes[0].step.exchange.response
    number = run.heartbeat(2, 0, 2, [1], [1], member="other", standby_tasks=[])
    run.outcomes[number].step.exchange.response = answered
    assert run.found() == [(number, "warmup_tasks", "null")]


@pytest.mark.parametrize(
    ("tasks", "codes", "wrong"), [([], [], True), ([], [5], False), ([0], [], False)]
)
def test_the_first_member_of_a_streams_group_gets_tasks_or_a_status(
    tasks: list[int], codes: list[int], wrong: bool
) -> None:
    """The captured member has got status 5, no tasks yet (KIP-1071)."""
    run = Group(STREAMS)
    run.heartbeat(1, 0, 1, [], [], status=[{"status_code": 5, "status_detail": "delayed"}])
    captured = run.outcomes.pop().step.exchange.response
    given = [{"subtopology_id": "0", "partitions": tasks}] if tasks else []
    said = [{"status_code": each, "status_detail": "x"} for each in codes]
    more = {"active_tasks": given, "standby_tasks": [], "warmup_tasks": [], "status": said}
    number = run.heartbeat(1, 0, 1, **more)
    run.outcomes[-1].step.exchange.response = captured
    assert run.found() == [(number, "status", "none")] * wrong


@pytest.mark.parametrize("endpoint", [None, {"host": "a", "port": 1}])
def test_the_epoch_of_endpoints(endpoint: Body | None) -> None:
    """It counts changes of endpoints, so it is 0 if no member has one."""
    run = Group(STREAMS)
    sent = {"group_id": "g", "member_id": "m", "member_epoch": 1, "user_endpoint": endpoint}
    body = {"member_id": "m", "member_epoch": 1}
    answered, captured = ({"endpoint_information_epoch": each} for each in (3, 0))
    number = run.add(1, STREAMS, 0, sent, body | answered, body | captured)
    expected = [] if endpoint else [(number, "endpoint_information_epoch", "3")]
    assert run.found() == expected


DESCRIBED: list[tuple[str, tuple[int, ...], str]] = [
    ("Stable", (2, 2, 2), ""),
    ("Stable", (2, 1, 1), "assignment_epoch"),
    ("Stable", (2, 3, 3), "assignment_epoch"),
    ("Stable", (2, 2, 1), "members[0].member_epoch"),
    ("Reconciling", (2, 2, 1), "members[0].member_epoch"),
    ("Assigning", (3, 2, 2), ""),
    ("Assigning", (2, 2, 2), "assignment_epoch"),
    ("Assigning", (3, 1, 1), "assignment_epoch"),
    ("Empty", (3, 2), ""),
    ("Empty", (3, 3), "assignment_epoch"),
    ("Empty", (4, 2), "group_epoch"),
    ("Empty", (1, 0), "group_epoch"),
    ("Stable", (2, 2, -2), ""),
]


@pytest.mark.parametrize(("state", "epochs", "path"), DESCRIBED)
def test_a_description_of_a_group(state: str, epochs: tuple[int, ...], path: str) -> None:
    """Epochs of the group, of its assignment and of its member, which has come to epoch 2. Two
    joins and a leave allow epochs up to 3."""
    run = Group()
    run.heartbeat(1, 0, 1)
    run.heartbeat(1.5, 0, 1, member="other")
    run.heartbeat(2, 1, 2)
    run.heartbeat(3, -1, -1, member="other")
    number = run.describe(4, state, *epochs)
    found = [each[:2] for each in run.found()]
    assert (number, f"groups[0].{path}") in found if path else found == []


@pytest.mark.parametrize(
    ("rejoined_s", "epoch", "is_wrong"), [(0, 3, False), (0, 4, True), (4.5, 4, False)]
)
def test_an_empty_share_group_has_the_epoch_of_its_last_leave(
    rejoined_s: float, epoch: int, is_wrong: bool
) -> None:
    """Member m is in epoch 2 for two seconds, and leaves. Another one may join in the meantime."""
    run = Group(SHARE)
    run.heartbeat(1, 0, 1)
    run.heartbeat(1.5, 0, 2, member="other")
    run.heartbeat(1.6, -1, -1, member="other")
    for at_s in (2.5, 3.5, 4.5):
        run.heartbeat(at_s, 2, 2)
    if rejoined_s:
        run.heartbeat(rejoined_s, 0, 3, member="other")
    run.heartbeat(5, -1, -1)
    number = run.describe(6, "Empty", epoch, 3 if rejoined_s else 2)
    assert run.found() == [(number, "groups[0].group_epoch", str(epoch))] * is_wrong


@pytest.mark.parametrize(("tasks", "is_wrong"), [([0, 1], False), ([2], True)])
def test_tasks_are_of_the_topology(tasks: list[int], is_wrong: bool) -> None:
    """Subtopology 0 reads topic t, which has two partitions; there is no subtopology 1."""
    run = Group(STREAMS)
    subtopology = {"subtopology_id": "0", "source_topics": ["t"], "source_topic_regex": [],
                   "state_changelog_topics": [], "repartition_sink_topics": [],
                   "repartition_source_topics": [], "copartition_groups": []}  # fmt: skip
    sent = {"group_id": "g", "member_id": "m", "member_epoch": 0,
            "topology": {"epoch": 0, "subtopologies": [subtopology]}}  # fmt: skip

    def joined(name: str, tasks: list[int]) -> int:
        body = {"member_id": "m", "member_epoch": 1, "standby_tasks": [], "warmup_tasks": [],
                "active_tasks": [{"subtopology_id": name, "partitions": tasks}]}  # fmt: skip
        return run.add(1, STREAMS, 0, sent, body)

    number = joined("0", tasks)
    assert run.found() == [(number, "active_tasks", "0 partition 2")] * is_wrong
    other = joined("1", [0])
    assert (other, "active_tasks", "1 partition 0") in run.found()


def test_a_share_group_is_stable_before_its_assignment_is_made() -> None:
    """Its states say nothing about epochs (KIP-932)."""
    run = Group(SHARE)
    run.heartbeat(1, 0, 1)
    run.heartbeat(2, 0, 1, member="other")
    run.describe(3, "Stable", 2, 1, 1)
    assert run.found() == []


@pytest.mark.parametrize(
    ("has", "target", "other", "topic", "paths"),
    [
        ([0], [0], [1], "t", []),
        ([1], [0], [1], "t", ["members[0].assignment", "members[0].target_assignment"]),
        ([0], [0], [0, 1], "t", ["members[].target_assignment"]),
        ([0], [0], [], "t", ["members[].target_assignment"]),
        ([0], [0], [1], "", [
            f"members[{member}].{name}.topic_partitions[].topic_name"
            for member in (0, 1) for name in ("assignment", "target_assignment")
        ]),
    ],
)  # fmt: skip
def test_assignments_in_a_description(
    has: list[int], target: list[int], other: list[int], topic: str, paths: list[str]
) -> None:
    """As heartbeats gave them, each partition of the captured description once, and topics by their
    names."""
    run = Group()
    run.heartbeat(1, 0, 1, [0])

    def body(name: str, has: list[int], target: list[int]) -> Body:
        given = {"target_assignment" if each else "assignment": numbers
                 for each, numbers in enumerate((has, target))}  # fmt: skip
        one = {"topic_id": TOPIC, "topic_name": topic}
        parts = {name: {"topic_partitions": [{**one, "partitions": numbers}]}
                 for name, numbers in given.items()}  # fmt: skip
        return {"member_id": name, "member_epoch": 1, **parts}

    def groups(*members: Body) -> Body:
        described = {"group_id": "g", "group_state": "Stable", "group_epoch": 1,
                     "assignment_epoch": 1, "members": list(members)}  # fmt: skip
        return {"groups": [described]}

    run.add(
        2, ApiKey.CONSUMER_GROUP_DESCRIBE, 0, {"group_ids": ["g"]},
        groups(body("m", has, target), body("other", other, other)),
        groups(body("m", [0, 1], [0, 1])),
    )  # fmt: skip
    found = [each[1].partition(".")[2] for each in run.found()]
    assert found == paths


@pytest.mark.parametrize(
    ("has", "captured", "topic", "paths"),
    [
        ([0], [1], "t", []),
        ([1], [1], "t", ["members[0].assignment"]),
        ([0, 0], [0], "t", ["members[0].assignment"]),
        ([0], [0], "", ["members[0].assignment.topic_partitions[].topic_name"]),
    ],
)
def test_assignments_in_a_description_of_a_share_group(
    has: list[int], captured: list[int], topic: str, paths: list[str]
) -> None:
    """As heartbeats gave them, whichever partitions the captured member had."""
    run = Group(SHARE)
    run.heartbeat(1, 0, 1, [0])

    def groups(numbers: list[int]) -> Body:
        part = {"topic_id": TOPIC, "topic_name": topic, "partitions": numbers}
        member = {"member_id": "m", "member_epoch": 1, "assignment": {"topic_partitions": [part]}}
        described = {"group_id": "g", "group_state": "Stable", "group_epoch": 1,
                     "assignment_epoch": 1, "members": [member]}  # fmt: skip
        return {"groups": [described]}

    asked = {"group_ids": ["g"]}
    run.add(2, ApiKey.SHARE_GROUP_DESCRIBE, 1, asked, groups(has), groups(captured))
    assert [each[1].partition(".")[2] for each in run.found()] == paths
