"""What ran out of time in the capture, and so has to run out at the target before a request.

A classic group removes a member that sends nothing for its session timeout. Static members go in
this way instead of leaving (KIP-345). Requests about the group may then need that it is empty.

A coordinator aborts a transaction that is open longer than its producer asked for, and refuses what
the producer sends for it then. A request that was refused for this would end the transaction well
where it comes too early.

At the target these times run anew. The run asks it, before such a request, until they are over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
_GROUP_NS = 5_000_000_000  # until the coordinator has removed a member
# transaction.abort.timed.out.transaction.cleanup.interval.ms is 10 s by default.
_TRANSACTION_NS = 15_000_000_000
_MEMBER_APIS = frozenset({ApiKey.SYNC_GROUP, ApiKey.HEARTBEAT, ApiKey.OFFSET_COMMIT})
_OTHER_APIS = frozenset(
    {
        ApiKey.LIST_GROUPS, ApiKey.DESCRIBE_GROUPS, ApiKey.DELETE_GROUPS, ApiKey.OFFSET_DELETE,
        ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT, ApiKey.CONSUMER_GROUP_HEARTBEAT,
    }
)  # fmt: skip
_ABORTED = frozenset(
    {
        ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_TXN_STATE, ErrorCode.PRODUCER_FENCED,
        ErrorCode.CONCURRENT_TRANSACTIONS,  # the coordinator aborts it
    }
)  # fmt: skip


def mark_timeouts(steps: Sequence[Step]) -> None:
    """Set `Step.awaits` of steps, which are in order of time."""
    _mark_groups(steps)
    _mark_transactions(steps)


@dataclass(slots=True)
class _Group:
    """timeout_ns: the longest session of a member. heard_ns: when a member sent something last."""

    timeout_ns: int
    heard_ns: int


def _mark_groups(steps: Sequence[Step]) -> None:
    groups: dict[str, _Group] = {}
    for step in steps:
        api_key, request = step.exchange.api_key, None
        if step.skipped is None and api_key in _MEMBER_APIS | _OTHER_APIS | {ApiKey.JOIN_GROUP}:
            request = request_of(step.exchange)
        if request is None:
            continue
        name, member = member_of(step.exchange)
        if api_key == ApiKey.JOIN_GROUP:
            heard_ns = step.at_ns + max(step.exchange.latency_ns, 0)
            timeout_ns = request.body["session_timeout_ms"] * _MS_NS
            before = groups.get(name)
            groups[name] = _Group(max(timeout_ns, before.timeout_ns if before else 0), heard_ns)
        elif api_key in _MEMBER_APIS and member:
            if name in groups:
                groups[name].heard_ns = step.at_ns
        elif api_key in _OTHER_APIS:
            named = groups if api_key == ApiKey.LIST_GROUPS else group_names(step.exchange)
            step.awaits += tuple(
                (("group", each), groups[each].timeout_ns + _GROUP_NS)
                for each in named
                if each in groups and step.at_ns - groups[each].heard_ns > groups[each].timeout_ns
            )
            if api_key == ApiKey.CONSUMER_GROUP_HEARTBEAT:
                groups.pop(name, None)  # it is no classic group any more


def _mark_transactions(steps: Sequence[Step]) -> None:
    timeouts_ns: dict[str, int] = {}
    begun_ns: dict[str, int] = {}  # of each open transaction
    for step in steps:
        if step.step_class != TRANSACTIONS or step.skipped is not None:
            continue
        request, response = request_of(step.exchange), response_of(step.exchange)
        codes = set(error_codes(response.body)) if response is not None else set()
        for name in _transactions(request) if request is not None else ():
            if step.exchange.api_key == ApiKey.INIT_PRODUCER_ID:
                assert request is not None
                timeouts_ns[name] = request.body["transaction_timeout_ms"] * _MS_NS
                begun_ns.pop(name, None)
                continue
            if name in timeouts_ns and name in begun_ns and codes & _ABORTED:
                if step.at_ns - begun_ns[name] >= timeouts_ns[name]:
                    step.awaits += ((("txn", name), timeouts_ns[name] + _TRANSACTION_NS),)
            if step.exchange.api_key != ApiKey.END_TXN:
                begun_ns.setdefault(name, step.at_ns)
            elif codes == {0}:
                begun_ns.pop(name, None)


def _transactions(request: Message) -> Iterator[str]:
    """Transactional ids of a request; brokers name several in AddPartitionsToTxn v4 (KIP-890)."""
    own = request.body.get("transactional_id") or request.body.get("v3_and_below_transactional_id")
    if own:
        yield own
    for each in entries(request.body.get("transactions")):
        yield each["transactional_id"]
