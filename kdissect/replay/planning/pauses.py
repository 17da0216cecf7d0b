"""Pauses between steps: what ran out of time in the capture runs out at the target, too.

A classic group removes a member that sends nothing for its session timeout. Static members go in
this way instead of leaving (KIP-345). Requests about the group may then need that it is empty.

A coordinator aborts a transaction that is open longer than its producer asked for, and refuses what
the producer sends for it then. It looks for such transactions every few seconds. A request that was
refused for this would end the transaction well where it comes too early.

A broker takes the telemetry of a client only at intervals, which its answer about subscriptions has
(KIP-714). The last push of a client may come at any time.

At the target these times run anew, so the requests wait as long after the last request of the
member, the first one of the transaction, or the push before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.model import TRANSACTIONS, Step
from kdissect.replay.workload.messages import (
    entries,
    error_codes,
    group_names,
    member_of,
    request_of,
    response_of,
)

_MS_NS = 1_000_000
_NOTICE_NS = 1_000_000_000  # until the coordinator has removed a member
# transaction.abort.timed.out.transaction.cleanup.interval.ms is 10 s by default.
_ABORT_NS = 11_000_000_000
_MEMBER_APIS = frozenset({ApiKey.SYNC_GROUP, ApiKey.HEARTBEAT, ApiKey.OFFSET_COMMIT})
_OTHER_APIS = frozenset(
    {
        ApiKey.LIST_GROUPS, ApiKey.DESCRIBE_GROUPS, ApiKey.DELETE_GROUPS, ApiKey.OFFSET_DELETE,
        ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT, ApiKey.CONSUMER_GROUP_HEARTBEAT,
    }
)  # fmt: skip
_TELEMETRY_APIS = frozenset({ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY})
_ENDED = frozenset(
    {
        ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_TXN_STATE, ErrorCode.PRODUCER_FENCED,
        ErrorCode.CONCURRENT_TRANSACTIONS,  # the coordinator aborts it
    }
)  # fmt: skip


def mark_pauses(steps: list[Step]) -> None:
    """Set `Step.pauses` of steps, which are in order of time, and let them wait for the steps from
    which the pauses count."""
    _mark_sessions(steps)
    _mark_transactions(steps)
    _mark_pushes(steps)


def _pause(step: Step, pauses: Iterable[tuple[int, int]]) -> None:
    step.pauses = (*step.pauses, *pauses)
    step.depends_on = tuple(sorted({number for number, _ in step.pauses}.union(step.depends_on)))


# -- sessions -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Session:
    """Of a member. last: its last request. instance: the id of a static member, or None."""

    last: Step
    timeout_ns: int
    instance: str | None


def _mark_sessions(steps: Iterable[Step]) -> None:
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
            _pause(step, [wait for name in names for wait in _ended(step, groups.get(name, {}))])


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


# -- transactions -------------------------------------------------------------------------------


def _mark_transactions(steps: Iterable[Step]) -> None:
    timeouts_ns: dict[str, int] = {}
    first: dict[str, Step] = {}  # of each open transaction
    for step in steps:
        if step.step_class != TRANSACTIONS or step.skipped is not None:
            continue
        request, response = request_of(step.exchange), response_of(step.exchange)
        names = () if request is None else _names(request)
        codes = set(error_codes(response.body)) if response is not None else set()
        for name in names:
            if step.exchange.api_key == ApiKey.INIT_PRODUCER_ID:
                assert request is not None
                timeouts_ns[name] = request.body["transaction_timeout_ms"] * _MS_NS
                first.pop(name, None)
                continue
            if name in timeouts_ns and name in first and codes & _ENDED:
                if step.at_ns - first[name].at_ns >= timeouts_ns[name]:
                    _pause(step, [(first[name].number, timeouts_ns[name] + _ABORT_NS)])
            if step.exchange.api_key != ApiKey.END_TXN:
                first.setdefault(name, step)
            elif codes == {0}:
                first.pop(name, None)


def _names(request: Message) -> Iterator[str]:
    """Transactional ids of a request; brokers name several in AddPartitionsToTxn v4 (KIP-890)."""
    own = request.body.get("transactional_id") or request.body.get("v3_and_below_transactional_id")
    if own:
        yield own
    for each in entries(request.body.get("transactions")):
        yield each["transactional_id"]


# -- telemetry ----------------------------------------------------------------------------------


def _mark_pushes(steps: Iterable[Step]) -> None:
    intervals_ns: dict[UUID, int] = {}  # by client
    pushes: dict[UUID, Step] = {}  # the last one of each client
    for step in steps:
        api_key = step.exchange.api_key
        if step.skipped is not None or api_key not in _TELEMETRY_APIS:
            continue
        request, response = request_of(step.exchange), response_of(step.exchange)
        if request is None or response is None:
            continue
        if api_key == ApiKey.GET_TELEMETRY_SUBSCRIPTIONS:
            client = response.body["client_instance_id"]
            intervals_ns[client] = response.body["push_interval_ms"] * _MS_NS
            pushes.pop(client, None)
            continue
        client = request.body["client_instance_id"]
        is_due = not response.body["error_code"] and not request.body["terminating"]
        if is_due and client in pushes and client in intervals_ns:
            _pause(step, [(pushes[client].number, intervals_ns[client])])
        pushes[client] = step
