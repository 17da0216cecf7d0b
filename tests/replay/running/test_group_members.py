"""Members of the target's groups join again when it says so, though their lanes do not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Exchange, Outcome, Step
from kdissect.replay.running import group_members
from kdissect.replay.running.group_members import GroupMembers
from kdissect.replay.running.result import Attempt
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

    def member_request(self, join: Step, api_key: int) -> bytes:
        return int(api_key).to_bytes(2, "big") + bytes(6)


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


def asked(
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
    assert asked(REBALANCE, joined) == [ApiKey.HEARTBEAT, ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP]
    assert asked(REBALANCE, joined[:1]) == [ApiKey.HEARTBEAT, ApiKey.JOIN_GROUP]
    assert asked(0, joined) == [ApiKey.HEARTBEAT]


def test_members_that_do_not() -> None:
    """One that left, one whose client is gone, and any while JoinGroup waits as long as usual."""
    joined = [ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP]
    assert asked(REBALANCE, [*joined, ApiKey.LEAVE_GROUP]) == []
    assert asked(REBALANCE, joined, is_over=True) == []
    assert asked(REBALANCE, joined, waits_s=1) == []
