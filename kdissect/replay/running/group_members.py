"""Members of the target's groups do what their clients would do there.

A captured lane has the rebalances of the captured coordinator. The target may need others.

Classic groups: two members that joined one generation in the capture may join two at the target.
The first one then has to join again, but its lane has no request for that, and the second one's
JoinGroup stays without an answer. So while a JoinGroup waits for long, each other member of its
group sends a Heartbeat of the replay's own, and joins again if the answer is REBALANCE_IN_PROGRESS.
Before a SyncGroup or an OffsetCommit that was answered so is sent again, its member does the same.

Consumer, share and streams groups (KIP-848, KIP-932, KIP-1071): the coordinator assigns partitions,
and moves one only after its owner's heartbeat has reported that it is free. So before a request
about such a group is sent again, the group's other members send a heartbeat of the replay's own,
with the epoch and the partitions that the target gave them. A member that the target has removed
joins again.

These requests use connections of their own: Kafka does not bind a member to a connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from kdissect.errors import Error
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.model import Attempt, Outcome, Skipped, Step, Translation
from kdissect.replay.running.lanes import NodeConnections
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.workload.messages import (
    MEMBER_HEARTBEATS,
    REJOINING_APIS,
    decoded,
    group_names,
    member_of,
    request_of,
    response_of,
)

WAIT_NS = 2_000_000_000  # longer than rebalances take in which every lane has its JoinGroup
CHECK_S = 0.25
_CODE_AT = 8  # of a Heartbeat response v1: after correlation id and throttle time
_CLASSIC_APIS = frozenset({ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP, ApiKey.LEAVE_GROUP})
_MEMBER_APIS = _CLASSIC_APIS | MEMBER_HEARTBEATS
_REMOVED = frozenset({ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH})

Member = tuple[str, str]  # captured group and member id


@dataclass(slots=True)
class _Joined:
    """A member that joined at the target. last: its last heartbeat that was answered, or the
    outcome of `join`. sync: its SyncGroup, if that was answered."""

    join: Step
    last: Outcome
    sync: Step | None = None
    is_followed: bool = False


class GroupMembers:
    """The members of one run. is_over: whether a connection's lane has ended; attempts: where
    exchanges of the replay's own are added."""

    def __init__(
        self,
        translation: Translation,
        side: NodeConnections,
        is_over: Callable[[int], bool],
        attempts: list[Attempt],
    ) -> None:
        self._translation, self._nodes, self._is_over = translation, side, is_over
        self._attempts = attempts
        self._members: dict[Member, _Joined] = {}
        self._link_numbers: dict[Member, int] = {}  # of connections beside the lanes
        self._waiting: dict[int, tuple[str, int]] = {}  # JoinGroup step -> group, sent_ns
        self._tasks: set[asyncio.Task[None]] = set()

    def sent(self, step: Step, now: int) -> None:
        """A request has gone out."""
        api_key = step.exchange.api_key
        request = request_of(step.exchange) if api_key in _MEMBER_APIS else None
        if request is None:
            return
        group = request.body["group_id"]
        if api_key == ApiKey.JOIN_GROUP:
            self._waiting[step.number] = group, now
            self._members.pop((group, request.body["member_id"]), None)
        elif api_key == ApiKey.LEAVE_GROUP:
            left = [request.body.get("member_id")]
            left += [each["member_id"] for each in request.body.get("members") or ()]
            for member in left:
                self._members.pop((group, member or ""), None)
        elif api_key in MEMBER_HEARTBEATS and request.body["member_epoch"] < 0:
            self._members.pop((group, request.body["member_id"]), None)

    def done(self, outcome: Outcome) -> None:
        """Note the member of a request that succeeded in the capture and at the target."""
        step, api_key = outcome.step, outcome.step.exchange.api_key
        self._waiting.pop(step.number, None)
        if api_key not in _MEMBER_APIS or outcome.answer is None:
            return
        request, captured = request_of(step.exchange), response_of(step.exchange)
        if request is None or captured is None or captured.body["error_code"]:
            return
        answer = decoded(outcome.answer, "response", api_key, outcome.api_version)
        if answer is None or answer.body["error_code"]:
            return
        member = member_of(step.exchange)
        if api_key == ApiKey.JOIN_GROUP:
            self._members[member[0], captured.body["member_id"]] = _Joined(step, outcome)
        elif api_key in MEMBER_HEARTBEATS and request.body["member_epoch"] == 0:
            self._members[member] = _Joined(step, outcome)
        elif (joined := self._members.get(member)) is not None:
            if api_key == ApiKey.SYNC_GROUP:
                joined.sync = step
            elif api_key in MEMBER_HEARTBEATS:
                joined.last = outcome

    async def keep(self, now: Callable[[], int]) -> None:
        """Until cancelled: if a JoinGroup of a group waits for long, the group's other members
        send heartbeats, and join again if the target's group rebalances."""
        while True:
            await asyncio.sleep(CHECK_S)
            late = {group for group, sent_ns in self._waiting.values() if now() - sent_ns > WAIT_NS}
            for member, joined in self._others(late):
                task = asyncio.get_running_loop().create_task(self._follow(member, joined))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _others(self, groups: set[str]) -> Iterator[tuple[Member, _Joined]]:
        for member, joined in list(self._members.items()):
            if member[0] not in groups or joined.is_followed:
                continue
            if self._is_over(joined.join.connection):
                del self._members[member]  # its client was gone in the capture, too
            else:
                yield member, joined

    async def before_again(self, step: Step) -> None:
        """Bring the members of a request's groups up to date before it is sent again.

        The member of a SyncGroup or OffsetCommit joins the group's next generation. For other
        requests, members whose partitions the broker assigns send a heartbeat.
        """
        own = member_of(step.exchange)
        if step.exchange.api_key in REJOINING_APIS:
            joined = self._members.get(own)
            if joined is not None and not joined.is_followed:
                is_synced = step.exchange.api_key == ApiKey.SYNC_GROUP
                await self._follow(own, joined, but=step if is_synced else None)
            return
        for member, joined in self._others(group_names(step.exchange)):
            is_assigned = joined.join.exchange.api_key in MEMBER_HEARTBEATS
            if is_assigned and (member != own or step.exchange.api_key not in MEMBER_HEARTBEATS):
                await self._follow(member, joined)

    async def _follow(self, member: Member, joined: _Joined, but: Step | None = None) -> None:
        """Send a heartbeat of a member, and join again if the answer says so. but: a SyncGroup that
        the member's lane sends."""
        joined.is_followed = True
        try:
            with suppress(ConnectFailed, Error):
                if joined.join.exchange.api_key == ApiKey.JOIN_GROUP:
                    await self._follow_classic(member, joined, but)
                else:
                    await self._follow_assigned(member, joined)
        finally:
            joined.is_followed = False

    async def _follow_classic(self, member: Member, joined: _Joined, but: Step | None) -> None:
        translation = self._translation
        node = translation.target_node(joined.join)
        attempt = await self._ask(member, node, translation.member_heartbeat(joined.join))
        if int.from_bytes(attempt.answer[_CODE_AT:], "big") != ErrorCode.REBALANCE_IN_PROGRESS:
            return
        frame = translation.member_join(joined.join)
        translation.learn(joined.join, (await self._ask(member, node, frame)).answer)
        if joined.sync not in (None, but) and self._members.get(member) is joined:
            assert joined.sync is not None
            again = translation.request(joined.sync, 0)
            if not isinstance(again, Skipped):
                await self._ask(member, node, again)

    async def _follow_assigned(self, member: Member, joined: _Joined) -> None:
        translation, last = self._translation, joined.last
        code = await self._ask_assigned(member, last, translation.member_heartbeat(last.step))
        if code in _REMOVED and self._members.get(member) is joined:
            await self._ask_assigned(member, last, translation.member_join(joined.join))

    async def _ask_assigned(self, member: Member, last: Outcome, frame: bytes) -> int:
        """Return the error code of the answer."""
        attempt = await self._ask(member, self._translation.target_node(last.step), frame)
        last.followed = [*last.followed, attempt]
        return self._translation.learn_member(last.step, attempt.answer)

    async def _ask(self, member: Member, node: int | None, frame: bytes) -> Attempt:
        number = self._link_numbers.setdefault(member, -1 - len(self._link_numbers))
        [attempt] = await self._nodes.ask(number, [(node, frame)], True)
        self._attempts.append(attempt)
        return attempt
