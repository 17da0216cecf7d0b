"""Members of the target's groups join again when it says so, though their lanes do not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.model import Attempt, Exchange, Outcome, Step
from kdissect.replay.running import group_members
from kdissect.replay.running.group_members import GroupMembers
from tests.replay.made import Counting, request, response

REBALANCE = 27
JOINED = {"error_code": 0, "generation_id": 1, "protocol_name": "range", "leader": "a",
          "member_id": "a", "members": []}  # fmt: skip
BODIES: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {
    ApiKey.JOIN_GROUP: ({"member_id": "a", "session_timeout_ms": 1}, JOINED),
    ApiKey.SYNC_GROUP: ({"member_id": "a", "generation_id": 1}, {"assignment": b""}),
    ApiKey.LEAVE_GROUP: ({"member_id": "a"}, {}),
}


class Asking(Counting):
    """Requests of members are only their API keys."""

    def member_heartbeat(self, last: Step) -> bytes:
        return int(ApiKey.HEARTBEAT).to_bytes(2, "big") + bytes(6)

    def member_join(self, join: Step) -> bytes:
        return int(ApiKey.JOIN_GROUP).to_bytes(2, "big") + bytes(6)


class Coordinator:
    """Instead of connections: answers Heartbeats with a code, and the others with nothing."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.asked: list[int] = []

    async def ask(
        self, lane: int, frames: Sequence[tuple[int | None, bytes]], expects_response: bool
    ) -> list[Attempt]:
        frame = frames[0][1]
        self.asked.append(int.from_bytes(frame[:2], "big"))
        answer = bytes(8) + self.code.to_bytes(2, "big")
        return [Attempt(0, frame, 0, answer, 1)]


def outcome(number: int, api_key: int) -> Outcome:
    sent, answered = BODIES[api_key]
    frames = request(api_key, 2, group_id="g", **sent), response(api_key, 2, **answered)
    exchange = Exchange(number, 0, number, api_key, 2, 7, "c", *frames, 0, 0, 0, 0)
    step = Step(number, 0, exchange, "", "groups", 0, True)
    return Outcome(step, *frames, 0, 1, api_version=2)


def sent_requests(
    code: int, before: Sequence[int], *, is_over: bool = False, waits_s: float = 10
) -> list[int]:
    """Which requests are sent for member a, whose lane had these, while another one's JoinGroup
    waits for some time."""
    side, attempts = Coordinator(code), list[Attempt]()
    members = GroupMembers(cast(Any, Asking()), side, lambda _: is_over, attempts)
    for number, api_key in enumerate(before):
        done = outcome(number, api_key)
        members.sent(done.step, 0)
        members.done(done)
    members.sent(outcome(9, ApiKey.JOIN_GROUP).step, 0)
    if ApiKey.LEAVE_GROUP not in before:
        members.done(outcome(0, ApiKey.JOIN_GROUP))
        for number, api_key in enumerate(before[1:], 1):
            members.done(outcome(number, api_key))

    async def run() -> None:
        task = asyncio.ensure_future(members.keep(lambda: int(waits_s * 1e9)))
        await asyncio.sleep(group_members.CHECK_S * 1.5)
        task.cancel()

    asyncio.run(run())
    assert len(attempts) == len(side.asked)
    return side.asked


def test_a_heartbeat_in_a_rebalance_makes_a_member_join_again() -> None:
    """A heartbeat with REBALANCE_IN_PROGRESS makes the member join and sync again."""
    joined = [ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP]
    assert sent_requests(REBALANCE, joined) == [
        ApiKey.HEARTBEAT,
        ApiKey.JOIN_GROUP,
        ApiKey.SYNC_GROUP,
    ]
    assert sent_requests(REBALANCE, joined[:1]) == [ApiKey.HEARTBEAT, ApiKey.JOIN_GROUP]
    assert sent_requests(0, joined) == [ApiKey.HEARTBEAT]


def test_members_that_do_not() -> None:
    """One that left, one whose client is gone, and any while JoinGroup waits as long as usual."""
    joined = [ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP]
    assert sent_requests(REBALANCE, [*joined, ApiKey.LEAVE_GROUP]) == []
    assert sent_requests(REBALANCE, joined, is_over=True) == []
    assert sent_requests(REBALANCE, joined, waits_s=1) == []


class Epochs(Counting):
    """A translation whose heartbeats are an API key and a number of the step; codes: of answers."""

    def __init__(self, codes: Sequence[int]) -> None:
        super().__init__()
        self.codes = list(codes)

    def member_heartbeat(self, last: Step) -> bytes:
        return bytes((0, 68, 0, last.number)) + bytes(4)

    def member_join(self, join: Step) -> bytes:
        return bytes((0, 0, 0, join.number)) + bytes(4)

    def learn_member(self, last: Step, answer: bytes) -> int:
        return self.codes.pop(0)


def member_step(number: int, member: str, epoch: int, connection: int = 0) -> Outcome:
    """An answered heartbeat of a member of group g."""
    key = ApiKey.CONSUMER_GROUP_HEARTBEAT
    sent = request(key, 1, group_id="g", member_id=member, member_epoch=epoch)
    answer = response(key, 1, member_id=member, member_epoch=epoch + 1)
    exchange = Exchange(number, connection, number, key, 1, 7, "c", sent, answer, 0, 0, 0, 0)
    step = Step(number, connection, exchange, "", "groups", 0, True)
    return Outcome(step, sent, answer, 0, 1, api_version=1)


def describe_step() -> Step:
    """A ConsumerGroupDescribe of group g."""
    frame = request(ApiKey.CONSUMER_GROUP_DESCRIBE, 1, group_ids=["g"])
    key = ApiKey.CONSUMER_GROUP_DESCRIBE
    return Step(9, 9, Exchange(9, 9, 0, key, 1, 7, "c", frame, None, 0, 0), "", "read", 0, True)


def sent_before_again(step: Step, codes: Sequence[int], outcomes: Sequence[Outcome]) -> list[int]:
    """The steps, and 0 for joins, whose requests the replay sends before a request again."""
    attempts: list[Attempt] = []
    side = Coordinator(0)
    members = GroupMembers(cast(Any, Epochs(codes)), cast(Any, side), lambda _: False, attempts)
    for done in outcomes:
        members.sent(done.step, 0)
        members.done(done)
    asyncio.run(members.before_again(step))
    frames = [each.sent for each in attempts]
    return [frame[3] if frame[1] == ApiKey.CONSUMER_GROUP_HEARTBEAT else 0 for frame in frames]


def test_members_whose_partitions_the_broker_assigns() -> None:
    """Before a request about their group is sent again, each sends a heartbeat with its last epoch;
    one that the target has removed joins again, and one that left sends nothing."""
    joined = [member_step(1, "a", 0), member_step(2, "b", 0), member_step(3, "a", 1)]
    assert sorted(sent_before_again(describe_step(), [0, 0], joined)) == [2, 3]
    removed = int(ErrorCode.UNKNOWN_MEMBER_ID)
    assert sent_before_again(describe_step(), [removed, 0], joined[:1]) == [1, 0]
    left = [*joined, member_step(4, "a", -1)]
    assert sent_before_again(describe_step(), [0], left) == [2]
    assert sent_before_again(joined[2].step, [0], joined) == [2]  # a's own heartbeat is that step
