"""Groups of which some messages were not captured."""

import json
from typing import Any

import pyarrow as pa
import pytest

from kdissect.protocol.api_keys import ApiKey
from kdissect.stories.events import GROUP_EVENT
from kdissect.stories.groups import group_events_table

MEMBERS = ["a", "b", "c"]  # a leads


def _join(generation: int, member: str, instance: str | None = None) -> dict[str, Any]:
    data = {
        "asked_as": member,
        "type": "consumer",
        "offered": ["range"],
        "reason": "",
        "instance": instance,
        "protocol": "range",
        "leader": "a",
        "members": MEMBERS if member == "a" else [],
    }
    return _step(ApiKey.JOIN_GROUP, generation, member, data)


def _sync(generation: int, member: str) -> dict[str, Any]:
    data = {"gives": MEMBERS if member == "a" else [], "assigned": f"orders[{member}]"}
    return _step(ApiKey.SYNC_GROUP, generation, member, data)


def _step(api_key: int, generation: int, member: str, data: dict[str, Any]) -> dict[str, Any]:
    time_ns = generation * 1000 + 100 * (api_key == ApiKey.SYNC_GROUP) + ord(member)
    return dict.fromkeys(GROUP_EVENT.names) | {
        "group_id": "g",
        "api_key": api_key,
        "time_ns": time_ns,
        "end_ns": time_ns + 1,
        "exchange_id": time_ns,
        "client_id": member,
        "member_id": member,
        "generation": generation,
        "error_code": 0,
        "data": json.dumps(data),
    }


def _events(event: str, *steps: dict[str, Any]) -> list[dict[str, Any]]:
    table = group_events_table(pa.Table.from_pylist(list(steps), schema=GROUP_EVENT))
    return [row for row in table.to_pylist() if row["event"] == event]


def _rebalances(*steps: dict[str, Any]) -> dict[int, str]:
    """The detail of each generation."""
    return {row["generation"]: row["detail"] for row in _events("rebalance", *steps)}


def _whole(generation: int) -> list[dict[str, Any]]:
    return [step(generation, member) for step in (_join, _sync) for member in MEMBERS]


def test_the_leaders_assignments_name_the_members_that_its_lost_join_has() -> None:
    """The join of the leader is lost, not its sync: all members are known, and none is missing."""
    lossy = [step for step in _whole(2) if step != _join(2, "a")]
    detail = _rebalances(*_whole(1), *lossy)[2]
    assert "generation 2 of 3 members: a, b, c;" in detail
    assert "did not come back" not in detail


def test_members_without_a_message_of_the_leader_are_a_lower_bound() -> None:
    """Neither join nor sync of the leader was captured: a member may be missing from the capture,
    so that it neither left nor joined."""
    lossy = [_join(2, "b"), _sync(2, "b")]
    details = _rebalances(*_whole(1), *lossy, *_whole(3))
    assert "generation 2 of at least 2 members: a, b;" in details[2]
    assert "did not come back" not in details[2]
    assert details[3].endswith("why: the generation before was not captured whole")


def test_static_members_that_an_admin_removes_have_their_names() -> None:
    """The admin names the instance alone (KIP-345); a member's id comes from its join."""
    joins = [_join(1, member, f"instance-{member}") for member in MEMBERS]
    leaves = [
        _step(ApiKey.LEAVE_GROUP, 1, member, {"reason": "gone", "instance": f"instance-{member}"})
        | {"member_id": ""}
        for member in ("b", "c")
    ]
    alone = json.loads(_join(2, "a")["data"]) | {"members": ["a"]}
    last = [_join(2, "a") | {"data": json.dumps(alone)}, _sync(2, "a")]
    details = _rebalances(*joins, *_whole(1)[3:], *leaves, *last)
    assert details[2].endswith("why: b left (gone), c left (gone)")


def test_all_members_of_a_first_generation_joined() -> None:
    """A group starts without members, so that only later generations need earlier history."""
    details = _rebalances(*_whole(1), *_whole(7))
    assert details[1].endswith("why: a joined, b joined, c joined")
    assert details[7].endswith("why: the generation before was not captured")


STALE_MEMBER_EPOCH, ILLEGAL_GENERATION = 113, 22


def _refused(error_code: int) -> dict[str, Any]:
    return _step(ApiKey.OFFSET_COMMIT, 1, "m", {"refused": ""}) | {"error_code": error_code}


@pytest.mark.parametrize(
    ("error_code", "expected"), [(STALE_MEMBER_EPOCH, "consumer"), (ILLEGAL_GENERATION, "classic")]
)
def test_the_type_of_a_group_by_its_commits_alone(error_code: int, expected: str) -> None:
    """Epochs belong to the consumer protocol (KIP-848), generations to the classic one."""
    (row,) = _events("commit_error", _refused(error_code))
    assert row["group_type"] == expected


def test_the_type_comes_from_other_members() -> None:
    """A refused commit gets the type that another member's request shows."""
    heartbeat = _step(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, "n", {"epoch": 5})
    (row,) = _events("commit_error", _refused(ILLEGAL_GENERATION), heartbeat)
    assert row["group_type"] == "consumer"
