"""Sessions of group members that ran out in the capture, and the requests that came after.

A classic group removes a member that sends nothing for its session timeout. Static members go in
this way instead of leaving (KIP-345). Requests about the group may then need that it is empty. At a
pace above the recorded one they would come too early, so they wait for the same timeout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Step
from kdissect.replay.workload.field_kinds import group_names
from kdissect.replay.workload.messages import entries, member_of, request_of, response_of

_MS_NS = 1_000_000
_NOTICE_NS = 1_000_000_000  # until the coordinator has removed a member
_MEMBER_APIS = frozenset({ApiKey.SYNC_GROUP, ApiKey.HEARTBEAT, ApiKey.OFFSET_COMMIT})
_OTHER_APIS = frozenset(
    {
        ApiKey.LIST_GROUPS, ApiKey.DESCRIBE_GROUPS, ApiKey.DELETE_GROUPS, ApiKey.OFFSET_DELETE,
        ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT, ApiKey.CONSUMER_GROUP_HEARTBEAT,
    }
)  # fmt: skip


@dataclass(slots=True)
class _Session:
    """Of a member. last: its last request. instance: the id of a static member, or None."""

    last: Step
    timeout_ns: int
    instance: str | None


def mark_expired_sessions(steps: Iterable[Step]) -> None:
    """Set `Step.pauses` of steps, which are in order of time, and let them wait for the
    last requests of these sessions."""
    groups: dict[str, dict[str, _Session]] = {}
    for step in steps:
        api_key = step.exchange.api_key
        if step.skipped is not None:
            continue
        if api_key == ApiKey.JOIN_GROUP:
            _join(step, groups)
        elif api_key == ApiKey.LEAVE_GROUP:
            _leave(step, groups)
        elif api_key in _MEMBER_APIS and member_of(step.exchange)[1]:
            group, member = member_of(step.exchange)
            if member in (sessions := groups.get(group, {})):
                sessions[member].last = step
        elif api_key in _OTHER_APIS and groups:
            names = groups if api_key == ApiKey.LIST_GROUPS else group_names(step.exchange)
            step.pauses = tuple(
                wait for name in names for wait in _ended(step, groups.get(name, {}))
            )
            last_steps = {number for number, _ in step.pauses}
            step.depends_on = tuple(sorted(last_steps.union(step.depends_on)))


def _join(step: Step, groups: dict[str, dict[str, _Session]]) -> None:
    request, response = request_of(step.exchange), response_of(step.exchange)
    if request is None or response is None or response.body["error_code"]:
        return
    instance = request.body.get("group_instance_id")
    sessions = groups.setdefault(request.body["group_id"], {})
    _remove(sessions, {"member_id": "", "group_instance_id": instance})  # it gets another id
    timeout_ns = request.body["session_timeout_ms"] * _MS_NS
    sessions[response.body["member_id"]] = _Session(step, timeout_ns, instance)


def _leave(step: Step, groups: dict[str, dict[str, _Session]]) -> None:
    request = request_of(step.exchange)
    if request is not None:
        for each in entries(request.body.get("members")) or [request.body]:
            _remove(groups.get(request.body["group_id"], {}), each)


def _remove(sessions: dict[str, _Session], member: dict[str, Any]) -> None:
    """Remove a member by its id, or by its instance id."""
    sessions.pop(member["member_id"], None)
    instance = member.get("group_instance_id")
    for name in [name for name, each in sessions.items() if instance and each.instance == instance]:
        del sessions[name]


def _ended(step: Step, sessions: dict[str, _Session]) -> list[tuple[int, int]]:
    """(last step, least time after it) of the members of a group that had all gone."""
    if any(step.at_ns - each.last.at_ns <= each.timeout_ns for each in sessions.values()):
        return []
    return [(each.last.number, each.timeout_ns + _NOTICE_NS) for each in sessions.values()]
