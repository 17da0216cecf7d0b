"""Decides if timing explains an answer that was not final.

A replay sends a request again if its answer says "not yet", as clients do. So a broker that hides a
wrong answer behind a retry could pass. An answer that is not final is explained if

- a write of the run that touches the same resource was under way, or had been answered a bounded
  time before: the change was not seen everywhere yet (below); or
- it says "not ready", and no request of that API for that resource had succeeded before; or
- the target may have lost a fetch session (`lost_sessions`).

Any other is a finding, even if a later answer is right. At any time, so are

- a longer throttle time;
- UNKNOWN_SERVER_ERROR, unless a share partition is not initialised yet;
- another value of a field that stays the same while its group, topic or broker exists, unless the
  answer has an error and the field its default;
- an element that is listed twice;
- an element too many in a list if changes only add some, and one too few if they only remove some;
- a state that Kafka does not have.

A read without an error sees a write as soon as that is answered. Only changes that others finish
are late: transactions, the state of a group, metadata, and records that followers have to fetch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.comparison.lost_sessions import LostSessions
from kdissect.replay.comparison.tree_diff import ABSENT, TWICE
from kdissect.replay.model import (
    ADMIN,
    READ,
    Difference,
    EarlierAnswer,
    Mode,
    Outcome,
    Resource,
    Step,
    Verdict,
)
from kdissect.replay.translation.target_facts import ZERO_UUID
from kdissect.replay.workload.messages import SESSION_LOST, SHARE_APIS, TRANSIENT

# Seconds until a write is seen everywhere. Members, transactions and locks of share groups change
# by timers of the broker too, up to a minute after the last request.
WRITE_S = 5.0
TIMER_S = 60.0
METADATA_S = 1.0  # a broker applies metadata after its controller has answered, an only one too
_BY_TIMER = frozenset({"group", "groups", "share", "txn", "txns"})
_READS_OF_TIMERS = frozenset(
    {
        ApiKey.DESCRIBE_GROUPS, ApiKey.LIST_GROUPS, ApiKey.CONSUMER_GROUP_DESCRIBE,
        ApiKey.SHARE_GROUP_DESCRIBE, ApiKey.STREAMS_GROUP_DESCRIBE,
        ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, ApiKey.DESCRIBE_TRANSACTIONS,
        ApiKey.LIST_TRANSACTIONS, ApiKey.DESCRIBE_PRODUCERS,
    }
)  # fmt: skip
# Fields in answers to reads that do not change with states, offsets, members or configs.
_CONSTANT = frozenset(
    {
        "assignor_name", "authorized_operations", "client_host", "client_id",
        "cluster_authorized_operations", "cluster_id", "config_type", "documentation",
        "endpoint_type", "entity", "group_instance_id", "group_type", "hmac", "instance_id",
        "is_classic", "is_future_key", "is_internal", "is_sensitive", "log_dir", "member_type",
        "operation", "pattern_type", "permission_type", "principal_name", "principal_type",
        "process_id", "rack", "rack_id", "read_only", "renewers", "subtopologies", "token_id",
        "token_requester_principal_name", "token_requester_principal_type",
        "topic_authorized_operations", "transaction_timeout_ms",
    }
)  # fmt: skip
# States of groups (KIP-518, KIP-848, KIP-1071) and transactions (KIP-664).
_STATES = frozenset(
    {
        "Assigning", "CompleteAbort", "CompleteCommit", "CompletingRebalance", "Dead", "Empty",
        "NotReady", "Ongoing", "PrepareAbort", "PrepareCommit", "PrepareEpochFence",
        "PreparingRebalance", "Reconciling", "Stable",
    }
)  # fmt: skip
_ADDING = frozenset(
    {
        ApiKey.CREATE_DELEGATION_TOKEN, ApiKey.CREATE_PARTITIONS, ApiKey.CREATE_TOPICS,
    }
)  # fmt: skip
_REMOVING = frozenset({ApiKey.DELETE_GROUPS, ApiKey.DELETE_TOPICS, ApiKey.EXPIRE_DELEGATION_TOKEN})
_DEFAULTS = frozenset({"", "null", "[]", "false", "0", "-1", "-2147483648", str(ZERO_UUID)})
_OPERATIONS = "authorized_operations"  # -2147483648 by default: who may do nothing gets an error
_FETCHES = frozenset({ApiKey.FETCH, ApiKey.SHARE_FETCH})
_LATE_WRITES = frozenset({ApiKey.END_TXN, ApiKey.INIT_PRODUCER_ID})  # markers come after answers

Interval = tuple[int, int]  # sent_ns, answered_ns


class Timing:
    """Writes and successes of a finished run, for its retried requests."""

    def __init__(self, outcomes: Sequence[Outcome], *, has_one_node: bool) -> None:
        self._has_one_node = has_one_node
        self._lost_sessions = LostSessions(outcomes, has_one_node=has_one_node)
        retried_apis = {each.step.exchange.api_key for each in outcomes if each.earlier}
        self._resources: dict[int, list[Resource]] = {}  # by step
        self._writes: dict[Resource, list[tuple[Step, Interval]]] = {}
        self._successes: dict[tuple[int, Resource], int] = {}  # (API, resource) -> first answer
        for outcome in sorted(outcomes, key=lambda each: each.step.number):
            step = outcome.step
            api_key = step.exchange.api_key
            is_read = step.step_class == READ and not step.creates
            if outcome.sent is None or (is_read and api_key not in retried_apis):
                continue
            resources = [resource for resource, _ in step.accesses] or [("api", api_key)]
            self._resources[step.number] = resources
            interval = interval_of(outcome)
            for resource, mode in step.accesses:
                if not is_read and mode in (Mode.WRITE, Mode.COMMUTING_WRITE):
                    self._writes.setdefault(resource, []).append((step, interval))
            if outcome.answer is not None and _is_as_captured(outcome):
                for resource in resources:
                    key = api_key, resource
                    first = self._successes.get(key, outcome.answered_ns)
                    self._successes[key] = min(first, outcome.answered_ns)

    def explains(self, outcome: Outcome, answer: EarlierAnswer) -> bool:
        """Return whether timing explains an answer of `outcome.earlier`."""
        step = outcome.step
        has_failed = ErrorCode.UNKNOWN_SERVER_ERROR in answer.error_codes
        is_throttled = any(each.path == "throttle_time_ms" for each in answer.differences)
        if is_throttled or (has_failed and step.exchange.api_key not in SHARE_APIS):
            return False
        if step.step_class == READ:
            has_error = bool(answer.error_codes)
            if not all(_is_change(each, has_error) for each in answer.differences):
                return False
        if answer.error_codes & SESSION_LOST:
            return self._lost_sessions.may_be(outcome, answer)
        if step.is_racing or step.expired:
            return True
        resources = self._resources[step.number]
        writers = [each for resource in resources for each in self._writers(resource, step, answer)]
        if writers and _can_make(writers, answer):
            return True
        if not answer.error_codes & TRANSIENT:
            return False
        firsts = [self._successes.get((step.exchange.api_key, each)) for each in resources]
        return any(first is None or first > answer.sent_ns for first in firsts)

    def _writers(self, resource: Resource, step: Step, answer: EarlierAnswer) -> Iterator[Step]:
        """The requests whose change of a resource the answer may not show yet."""
        for writer, (sent_ns, answered_ns) in self._writes.get(resource, ()):
            bound_ns = self._bound_ns(resource, writer, step, answer)
            is_late = answered_ns >= answer.sent_ns - bound_ns
            if writer.number != step.number and sent_ns <= answer.answered_ns and is_late:
                yield writer

    def _bound_ns(self, resource: Resource, writer: Step, step: Step, answer: EarlierAnswer) -> int:
        """The time after the answer of a write in which a request may not see it."""
        api_key = step.exchange.api_key
        is_read = step.step_class == READ and not step.creates and api_key not in _FETCHES
        if is_read and api_key not in _READS_OF_TIMERS and not answer.error_codes:
            writes = writer.exchange.api_key
            is_shared = writer.step_class == ADMIN or writes == ApiKey.PRODUCE
            if writes in _LATE_WRITES or (is_shared and not self._has_one_node):
                return int(WRITE_S * 1e9)
            return int(METADATA_S * 1e9) if writer.step_class == ADMIN else 0
        return int((TIMER_S if resource[0] in _BY_TIMER else WRITE_S) * 1e9)


def _can_make(writers: Sequence[Step], answer: EarlierAnswer) -> bool:
    """Return whether an answer from before these changes can have the elements that it has."""
    has_more = any(each.captured == ABSENT for each in answer.differences)
    has_fewer = any(each.answered == ABSENT for each in answer.differences)
    apis = {each.exchange.api_key for each in writers}
    return (not has_more or not apis <= _ADDING) and (not has_fewer or not apis <= _REMOVING)


def _is_change(difference: Difference, has_error: bool) -> bool:
    """Return whether a change of the resource can make this difference, or an error in the answer,
    beside which brokers leave fields at their defaults."""
    if difference.note == TWICE:
        return False
    fields = [each.partition("[")[0] for each in difference.path.split(".")]
    is_none = fields[-1].endswith(_OPERATIONS) and difference.answered == "0"
    if has_error and difference.answered in _DEFAULTS and not is_none:
        return True
    if fields[-1].endswith("_state"):
        return difference.answered in _STATES
    is_list_null = difference.captured.startswith("[") and difference.answered == "null"
    return not is_list_null and _CONSTANT.isdisjoint(fields)


def interval_of(outcome: Outcome) -> Interval:
    """From the first time a request was sent; up to where it may still have been under way."""
    first = outcome.earlier[0].sent_ns if outcome.earlier else outcome.sent_ns
    last = outcome.answered_ns
    return first, last if last >= 0 else outcome.sent_ns + int(TIMER_S * 1e9)


def _is_as_captured(outcome: Outcome) -> bool:
    judgement = outcome.judgement
    return judgement is not None and judgement.verdict in (Verdict.SAME, Verdict.TOLERATED)
