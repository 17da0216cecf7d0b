"""Members of the target's groups do what their clients would do, though their lanes do not."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.model import Attempt, Exchange, Mode, Outcome, ReplayPlan, Step
from kdissect.replay.running import members
from kdissect.replay.running.members import Members
from kdissect.replay.running.runner import Lane
from tests.builders.messages import exchange, request_frame
from tests.replay.made import Counting, PlanMaker

S = 1_000_000_000
SESSION_MS = 10_000
JOINED = {"error_code": 0, "generation_id": 1, "protocol_name": "range", "leader": "a",
          "member_id": "a", "members": []}  # fmt: skip
BODIES: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {
    ApiKey.JOIN_GROUP: ({"member_id": "a", "session_timeout_ms": SESSION_MS}, JOINED),
    ApiKey.SYNC_GROUP: ({"member_id": "a", "generation_id": 1}, {"assignment": b""}),
    ApiKey.LEAVE_GROUP: ({"member_id": "a"}, {}),
}
CONSUMER = ApiKey.CONSUMER_GROUP_HEARTBEAT
GROUP = ((("group", "g"), Mode.WRITE),)


class Asking(Counting):
    """Requests of members are only their API key and the number of a step; codes: of answers."""

    def __init__(self, codes: Sequence[int] = ()) -> None:
        super().__init__()
        self.codes = list(codes)

    def member_heartbeat(self, last: Step) -> bytes:
        is_classic = last.exchange.api_key == ApiKey.JOIN_GROUP
        return _frame(ApiKey.HEARTBEAT if is_classic else CONSUMER, last)

    def member_join(self, join: Step) -> bytes:
        return _frame(ApiKey.JOIN_GROUP, join)

    def request(self, step: Step) -> bytes:
        return _frame(step.exchange.api_key, step)

    def learn_member(self, last: Step, answer: bytes) -> int:
        return self.codes.pop(0)


def _frame(api_key: int, step: Step) -> bytes:
    return bytes((0, api_key, 0, step.number)) + bytes(4)


def outcome(number: int, api_key: int) -> Outcome:
    """Of member a of the classic group g, on connection 0."""
    sent, answered = BODIES[api_key]
    frames = exchange(number, api_key, 2, {"group_id": "g", **sent}, answered)
    one = Exchange(number, 0, number, api_key, 2, "c", *frames, 0, 0, 0, 0)
    step = Step(number, 0, one, "", "groups", 0, True, accesses=GROUP)
    return Outcome(step, *frames, 0, 1, api_version=2)


def heartbeat(number: int, member: str, epoch: int) -> Outcome:
    """An answered heartbeat of a member of the consumer group g."""
    asked = {"group_id": "g", "member_id": member, "member_epoch": epoch}
    frames = exchange(number, CONSUMER, 1, asked, {"member_id": member, "member_epoch": epoch + 1})
    one = Exchange(number, 0, number, CONSUMER, 1, "c", *frames, 0, 0, 0, 0)
    step = Step(number, 0, one, "", "groups", 0, True, accesses=GROUP)
    return Outcome(step, *frames, 0, 1, api_version=1)


class Run:
    """The members of a run whose captured connection 0 sends its next request `next_s` after its
    first one, or has sent all (None). asked: (API key, step) of the replay's own requests."""

    def __init__(self, next_s: float | None = 1.0, codes: Sequence[int] = ()) -> None:
        maker = PlanMaker()
        maker.add(0)
        maker.add(0, 1000 * (next_s or 0))
        plan: ReplayPlan = maker.plan()
        lane = Lane(plan.lanes[0], pos=2 if next_s is None else 1)
        self.asked: list[tuple[int, int]] = []
        self.members = Members(plan, cast(Any, Asking(codes)), [lane], self._ask)

    async def _ask(self, lane: Lane, node: int | None, frame: bytes) -> Attempt:
        self.asked.append((frame[1], frame[3]))
        return Attempt(frame, 0, bytes(10), 1)

    def answered(self, *outcomes: Outcome) -> None:
        for each in outcomes:
            self.members.sent(each)
            self.members.done(each)

    def keep(self, now_s: float) -> list[int]:
        """The APIs of requests that are sent when the run has lasted so long."""

        async def wait() -> None:
            task = asyncio.ensure_future(self.members.keep(lambda: int(now_s * S)))
            await asyncio.sleep(members.CHECK_S * 1.5)
            task.cancel()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(members, "CHECK_S", 0.02)
            asyncio.run(wait())
        return [api_key for api_key, _ in self.asked]


def test_members_join_again_beside_a_late_join() -> None:
    """Another member's JoinGroup waits: those that are there join, and sync if they had before;
    nobody does while it waits no longer than usual, nor one that left or whose client is gone."""
    member = [outcome(1, ApiKey.JOIN_GROUP), outcome(2, ApiKey.SYNC_GROUP)]
    for before, waits_s, next_s, asked in (
        (member, 3, 1.0, [ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP]),
        (member[:1], 3, 1.0, [ApiKey.JOIN_GROUP]),
        (member, 1, 1.0, []),
        (member, 3, None, []),
        ([*member, outcome(3, ApiKey.LEAVE_GROUP)], 3, 1.0, []),
    ):
        run = Run(next_s)
        run.answered(*before)
        other = outcome(9, ApiKey.JOIN_GROUP)
        frame = request_frame(ApiKey.JOIN_GROUP, 2, group_id="g", member_id="b")
        other.step.exchange.request = frame
        run.members.sent(other)
        assert run.keep(waits_s) == asked


def test_sessions_are_kept() -> None:
    """A member that the replay holds up for half of its session sends a Heartbeat; one that was
    silent for longer than that in the capture does not."""
    for next_s, now_s, asked in ((3.0, 6, [ApiKey.HEARTBEAT]), (3.0, 4, []), (20.0, 6, [])):
        run = Run(next_s)
        run.answered(outcome(1, ApiKey.JOIN_GROUP))
        assert run.keep(now_s) == asked


def test_a_group_is_racing_once_a_session_is_over_that_lasted_in_the_capture() -> None:
    """Also of a client that has sent all its requests; not if it was over in the capture, or is
    another group."""
    for api_key, group, captured_s, sent_s, is_racing in (
        (ApiKey.LIST_GROUPS, "", 9, 11, True),
        (ApiKey.LIST_GROUPS, "", 9, 9, False),
        (ApiKey.LIST_GROUPS, "", 12, 12, False),
        (ApiKey.DESCRIBE_GROUPS, "g", 9, 11, True),
        (ApiKey.DESCRIBE_GROUPS, "h", 9, 11, False),
    ):
        run = Run(next_s=None)
        run.answered(outcome(1, ApiKey.JOIN_GROUP))
        assert run.keep(0.1) == []
        exchange = Exchange(2, 0, 2, api_key, 2, "c", b"", b"", 0, 0, 0, 0)
        named = ((("group", group), Mode.READ),)
        step = Step(2, 0, exchange, "", "read", captured_s * S, True, accesses=named)
        read = Outcome(step, b"", sent_ns=sent_s * S)
        run.members.sent(read)
        assert (read.is_racing, step.is_racing) == (is_racing, False)  # other runs share the step


def test_a_refused_member_joins_again() -> None:
    """Before its SyncGroup is sent again it joins; before another request it syncs, too."""
    sync = outcome(2, ApiKey.SYNC_GROUP)
    run = Run()
    run.answered(outcome(1, ApiKey.JOIN_GROUP), sync)
    asyncio.run(run.members.before_again(sync.step))
    assert run.asked == [(ApiKey.JOIN_GROUP, 1)]
    commit = outcome(3, ApiKey.SYNC_GROUP)
    commit.step.exchange.api_key = ApiKey.OFFSET_COMMIT
    frame = request_frame(ApiKey.OFFSET_COMMIT, 2, group_id="g", member_id="a")
    commit.step.exchange.request = frame
    asyncio.run(run.members.before_again(commit.step))
    assert run.asked[1:] == [(ApiKey.JOIN_GROUP, 1), (ApiKey.SYNC_GROUP, 2)]


def test_members_whose_partitions_the_broker_assigns() -> None:
    """Before a request about their group is sent again, each sends a heartbeat with its last epoch;
    one that the target has removed joins again, and one that left sends nothing."""
    frame = request_frame(ApiKey.CONSUMER_GROUP_DESCRIBE, 1, group_ids=["g"])
    exchange = Exchange(9, 0, 0, ApiKey.CONSUMER_GROUP_DESCRIBE, 1, "c", frame, None, 0, 0)
    describe = Step(9, 0, exchange, "", "read", 0, True, accesses=GROUP)
    joined = [heartbeat(1, "a", 0), heartbeat(2, "b", 0), heartbeat(3, "a", 1)]
    removed = int(ErrorCode.UNKNOWN_MEMBER_ID)
    for before, codes, step, asked in (
        (joined, [0, 0], describe, [(CONSUMER, 3), (CONSUMER, 2)]),
        (joined[:1], [removed, 0], describe, [(CONSUMER, 1), (ApiKey.JOIN_GROUP, 1)]),
        ([*joined, heartbeat(4, "a", -1)], [0], describe, [(CONSUMER, 2)]),
        (joined, [0], joined[2].step, [(CONSUMER, 2)]),  # a's own heartbeat is that request
    ):
        run = Run(codes=codes)
        run.answered(*before)
        asyncio.run(run.members.before_again(step))
        assert run.asked == asked
