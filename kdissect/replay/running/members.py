"""Members of the target's groups do what their clients would do there.

A captured connection has the rebalances of the captured coordinator; the target may need others.
It also may be held up by the rest of the replay, while sessions run out. So the replay sends four
kinds of requests of its own, over connections beside the captured ones:

- A Heartbeat, if a member of a classic group has been silent for half of its session, although its
  client was not in the capture.
- A JoinGroup of each other member, if one waits for longer than in the capture: the target's group
  rebalances. A member that had sent its SyncGroup sends that again, too.
- The same of a member before its SyncGroup, OffsetCommit or OffsetFetch is sent again; or its
  heartbeat, if the broker assigns its partitions.
- Heartbeats of the other members of a group whose partitions the broker assigns (KIP-848, KIP-932,
  KIP-1071), before another request about it is sent again. A coordinator moves a partition only
  after a heartbeat of its owner has reported that it is free. A member that the target has removed
  joins again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kdissect.errors import Error
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Attempt, Outcome, ReplayPlan, Skipped, Step
from kdissect.replay.target.connection import ConnectFailed, Links
from kdissect.replay.translation.nodes import node_of
from kdissect.replay.translation.translator import Translator
from kdissect.replay.workload import messages

if TYPE_CHECKING:
    from kdissect.replay.running.runner import Lane

LATE_NS = 2_000_000_000  # longer than rebalances take in which every lane has its JoinGroup
CHECK_S = 0.25
_MEMBER_APIS = messages.MEMBER_HEARTBEATS | messages.apis(
    "JoinGroup SyncGroup Heartbeat OffsetCommit LeaveGroup"
)
_READING_APIS = messages.apis("ListGroups DescribeGroups")
_REMOVED = messages.codes("UNKNOWN_MEMBER_ID FENCED_MEMBER_EPOCH")

Member = tuple[str, str]  # captured group and member id
Ask = Callable[[Links, int | None, bytes], Awaitable[Attempt]]  # node, frame


@dataclass(slots=True)
class _Joined:
    """A member that joined at the target.

    last: its last heartbeat that was answered, or the outcome of `join`. sync: its SyncGroup, if
    that was answered. session_ns: of a classic group. heard_ns: when it sent something last.
    seen_ns: the same in the capture. links: for the replay's own requests.
    """

    join: Step
    last: Outcome
    session_ns: int
    heard_ns: int
    seen_ns: int
    is_classic: bool
    sync: Step | None = None
    links: Links = field(default_factory=dict)
    is_busy: bool = False


class Members:
    """The members of one run. ask: sends a frame and returns its answer."""

    def __init__(
        self, plan: ReplayPlan, translator: Translator, lanes: list[Lane], ask: Ask
    ) -> None:
        self._plan, self._translator, self._lanes, self._ask = plan, translator, lanes, ask
        self._members: dict[Member, _Joined] = {}
        self._joining: dict[int, tuple[str, int]] = {}  # JoinGroup step -> group, late from

    def sent(self, outcome: Outcome) -> None:
        """A request has gone out."""
        step, api_key = outcome.step, outcome.step.exchange.api_key
        if api_key in _READING_APIS:
            outcome.is_racing = self._has_lost_session(step, outcome.sent_ns)
        request = messages.request_of(step.exchange) if api_key in _MEMBER_APIS else None
        if request is None:
            return
        group, own = request.body["group_id"], request.body.get("member_id") or ""
        if (joined := self._members.get((group, own))) is not None:
            joined.heard_ns, joined.seen_ns = outcome.sent_ns, _seen_ns(step)
        if api_key == ApiKey.JOIN_GROUP:
            late_ns = outcome.sent_ns + max(step.exchange.latency_ns, 0) + LATE_NS
            self._joining[step.number] = group, late_ns
            self._members.pop((group, own), None)
        elif api_key == ApiKey.LEAVE_GROUP:
            for member in [own, *(each["member_id"] for each in request.body.get("members") or ())]:
                self._members.pop((group, member), None)
        elif api_key in messages.MEMBER_HEARTBEATS and request.body["member_epoch"] < 0:
            self._members.pop((group, own), None)

    def _has_lost_session(self, step: Step, now_ns: int) -> bool:
        """Return whether the session of a classic member may have run out by now, and had not when
        the capture's client read its group."""
        groups = set(step.named("group"))
        return any(
            joined.is_classic
            and (step.exchange.api_key == ApiKey.LIST_GROUPS or group in groups)
            and now_ns - joined.heard_ns >= joined.session_ns > step.at_ns - joined.seen_ns
            for (group, _), joined in self._members.items()
        )

    def done(self, outcome: Outcome) -> None:
        """Note the member of a request that succeeded in the capture and at the target."""
        step, api_key = outcome.step, outcome.step.exchange.api_key
        self._joining.pop(step.number, None)
        if api_key not in _MEMBER_APIS or outcome.answer is None:
            return
        request, captured = messages.request_of(step.exchange), messages.response_of(step.exchange)
        answer = messages.decoded(outcome.answer, "response", api_key, outcome.api_version)
        bodies = [each.body for each in (captured, answer) if each is not None]
        if request is None or len(bodies) < 2 or any(each.get("error_code") for each in bodies):
            return
        member = messages.member_of(step.exchange)
        if api_key == ApiKey.JOIN_GROUP or (
            api_key in messages.MEMBER_HEARTBEATS and request.body["member_epoch"] == 0
        ):
            session_ns = request.body.get("session_timeout_ms", 0) * 1_000_000
            chosen = member[0], bodies[0]["member_id"] or member[1]
            self._members[chosen] = _Joined(
                step, outcome, session_ns, outcome.answered_ns, _seen_ns(step),
                api_key == ApiKey.JOIN_GROUP,
            )  # fmt: skip
        elif (joined := self._members.get(member)) is not None:
            if api_key == ApiKey.SYNC_GROUP:
                joined.sync = step
            elif api_key in messages.MEMBER_HEARTBEATS:
                joined.last = outcome

    async def keep(self, now: Callable[[], int]) -> None:
        """Until cancelled: keep sessions, and let members join again beside a late JoinGroup."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(CHECK_S)
                late = {group for group, from_ns in self._joining.values() if now() > from_ns}
                for member, joined in self._present({group for group, _ in self._members}):
                    if not joined.is_classic:
                        continue
                    if member[0] in late:
                        tasks.create_task(self._busy(joined, self._join_again(member, joined)))
                    elif self._is_silent(joined, now()):
                        joined.heard_ns = now()
                        tasks.create_task(self._busy(joined, self._keep_session(joined)))

    async def _busy(self, joined: _Joined, work: Coroutine[None, None, None]) -> None:
        joined.is_busy = True
        try:
            with suppress(ConnectFailed, Error):
                await work
        finally:
            joined.is_busy = False

    def _present(self, groups: set[str]) -> Iterator[tuple[Member, _Joined]]:
        """Members of groups whose clients are there and that nothing is being sent for."""
        for member, joined in list(self._members.items()):
            is_there = not self._lanes[joined.join.connection].is_over
            if is_there and member[0] in groups and not joined.is_busy:
                yield member, joined

    def _is_silent(self, joined: _Joined, now: int) -> bool:
        """Return whether a session is in danger of running out here, and did not in the capture."""
        lane = self._lanes[joined.join.connection]
        next_ns = self._plan.steps[lane.numbers[lane.pos]].at_ns
        was_there = next_ns - joined.seen_ns < joined.session_ns
        return was_there and now - joined.heard_ns > joined.session_ns // 2

    async def before_again(self, step: Step) -> None:
        """Bring the members of a request's groups up to date before it is sent again."""
        own = messages.member_of(step.exchange)
        if step.exchange.api_key in messages.REJOINING_APIS:
            joined = self._members.get(own)
            if joined is not None and not joined.is_busy:
                syncs = step.exchange.api_key != ApiKey.SYNC_GROUP
                if joined.is_classic:
                    await self._busy(joined, self._join_again(own, joined, syncs))
                else:
                    await self._busy(joined, self._heartbeat(own, joined))
            return
        for member, joined in self._present(set(step.named("group"))):
            is_own = member == own and step.exchange.api_key in messages.MEMBER_HEARTBEATS
            if not joined.is_classic and not is_own:
                await self._busy(joined, self._heartbeat(member, joined))

    async def _join_again(self, member: Member, joined: _Joined, syncs: bool = True) -> None:
        """syncs: whether a SyncGroup follows; if not, the member's lane sends it."""
        translator, node = self._translator, self._node(joined.join)
        attempt = await self._ask(joined.links, node, translator.member_join(joined.join))
        translator.learn(joined.join, attempt.answer)
        if syncs and joined.sync is not None and self._members.get(member) is joined:
            frame = translator.request(joined.sync)
            if not isinstance(frame, Skipped):
                await self._ask(joined.links, node, frame)

    async def _keep_session(self, joined: _Joined) -> None:
        frame = self._translator.member_heartbeat(joined.join)
        await self._ask(joined.links, self._node(joined.join), frame)

    async def _heartbeat(self, member: Member, joined: _Joined) -> None:
        """A heartbeat of a member whose partitions the broker assigns."""
        translator, last = self._translator, joined.last
        code = await self._ask_assigned(joined, translator.member_heartbeat(last.step))
        if code in _REMOVED and self._members.get(member) is joined:
            await self._ask_assigned(joined, translator.member_join(joined.join))

    async def _ask_assigned(self, joined: _Joined, frame: bytes) -> int:
        """Return the error code of the answer."""
        last = joined.last
        attempt = await self._ask(joined.links, self._node(last.step), frame)
        last.followed = [*last.followed, attempt]
        return self._translator.learn_member(last.step, attempt.answer)

    def _node(self, step: Step) -> int | None:
        """The group's coordinator."""
        return node_of(self._translator.ids, step)


def _seen_ns(step: Step) -> int:
    """When the captured coordinator had heard of a member last: at the answer to a JoinGroup."""
    return step.at_ns + max(step.exchange.latency_ns, 0)
