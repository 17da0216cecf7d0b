"""Finds answers that contradict what the run has shown of the target's classic groups.

- A group rebalances from a JoinGroup, a LeaveGroup or the end of a member's session until
  its members have their assignments. REBALANCE_IN_PROGRESS (27) at any other time is wrong, and so
  is no error while a JoinGroup waits for the other members.
- The leader of a generation gets its members, among them all that joined it; others get none.
- Members of the same generation have the same leader, one of them, and the same protocol.
- A member gets the assignment that the leader of its generation sent for it, if the captured
  response does not say which.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.model import FOREVER_NS, Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import decoded, entries, response_of

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]

# An answer and the event that it follows from are seen a moment apart.
_SLACK_NS = 1_000_000_000
_WAITING_NS = 500_000_000  # a JoinGroup that long has reached the coordinator


@dataclass(slots=True)
class _Exchange:
    outcome: Outcome
    request: Body
    answer: Body | None

    @property
    def end_ns(self) -> int:
        """When it was answered, far away if it was not."""
        return self.outcome.answered_ns if self.answer is not None else FOREVER_NS

    @property
    def is_taken(self) -> bool:
        return self.answer is not None and not self.answer["error_code"]


@dataclass(slots=True)
class _Group:
    """Requests of one classic group by their API, in order of sending. seen: member -> when its
    last request was sent; timeouts_ns: of its session."""

    by_api: dict[int, list[_Exchange]] = field(default_factory=lambda: defaultdict(list))
    seen: dict[str, int] = field(default_factory=dict)
    timeouts_ns: dict[str, int] = field(default_factory=dict)


class _Waiting:
    """Times in which a JoinGroup waited at the coordinator, so that the group was rebalancing."""

    def __init__(self, group: _Group) -> None:
        joins = [each for each in group.by_api[ApiKey.JOIN_GROUP] if each.is_taken]
        joins.sort(key=lambda each: each.outcome.sent_ns)
        self._starts = [each.outcome.sent_ns + _WAITING_NS for each in joins]
        self._ends = list(accumulate((each.end_ns for each in joins), max))

    def is_one(self, exchange: _Exchange) -> bool:
        """Return whether one waited during a whole exchange."""
        place = bisect_right(self._starts, exchange.outcome.sent_ns) - 1
        return place >= 0 and exchange.end_ns < self._ends[place]


class GroupState:
    """Facts of a run about classic groups."""

    def __init__(self, ids: IdMap) -> None:
        self._groups: dict[str, _Group] = defaultdict(_Group)

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        if outcome.sent is None or api_key not in _GROUP_APIS:
            return
        request = decoded(outcome.sent, "request", api_key, outcome.api_version)
        if request is not None:
            self._add(outcome, api_key, request)

    def _add(self, outcome: Outcome, api_key: int, request: Message) -> None:
        body, answer = request.body, None
        if outcome.answer is not None:
            answer = decoded(outcome.answer, "response", api_key, outcome.api_version)
        exchange = _Exchange(outcome, body, None if answer is None else answer.body)
        group = self._groups[body["group_id"]]
        member = body.get("member_id") or ""
        group.by_api[api_key].append(exchange)
        if api_key == ApiKey.JOIN_GROUP and exchange.is_taken and exchange.answer is not None:
            member = exchange.answer["member_id"]
            group.timeouts_ns[member] = body["session_timeout_ms"] * 1_000_000
        if member:
            group.seen[member] = outcome.sent_ns

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        for group in self._groups.values():
            rebalances, waiting = list(_rebalances(group)), _Waiting(group)
            for exchange in group.by_api[ApiKey.HEARTBEAT]:
                _check_heartbeat(exchange, waiting, rebalances, add)
            _check_generations(group, add)
            _check_assignments(group, add)


_GROUP_APIS = frozenset(
    {
        ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP, ApiKey.HEARTBEAT, ApiKey.LEAVE_GROUP,
        ApiKey.OFFSET_COMMIT,
    }
)  # fmt: skip


def _rebalances(group: _Group) -> Iterator[tuple[int, int]]:
    """(first, last) moments in which the group may be rebalancing."""
    joins, syncs = group.by_api[ApiKey.JOIN_GROUP], group.by_api[ApiKey.SYNC_GROUP]
    synced: dict[int, int] = defaultdict(int)  # generation -> when its last member was assigned
    for exchange in syncs:
        if exchange.is_taken:
            number = exchange.request["generation_id"]
            synced[number] = max(synced[number], exchange.end_ns)
    starts = sorted(each.outcome.sent_ns for each in joins)
    for exchange in joins:
        begin = exchange.outcome.earlier[0].sent_ns if exchange.outcome.earlier else (
            exchange.outcome.sent_ns
        )  # fmt: skip
        if exchange.answer is None or exchange.answer["error_code"]:
            yield begin, FOREVER_NS if exchange.answer is None else exchange.end_ns
        else:
            yield begin, synced.get(exchange.answer["generation_id"], FOREVER_NS)
    ends = [each.outcome.sent_ns for each in group.by_api[ApiKey.LEAVE_GROUP]]
    ends += [seen + group.timeouts_ns.get(member, 0) // 2 for member, seen in group.seen.items()]
    starts.append(FOREVER_NS)
    for begin in ends:
        yield begin, starts[bisect_right(starts, begin)]


def _check_heartbeat(
    exchange: _Exchange, waiting: _Waiting, rebalances: list[tuple[int, int]], add: Add
) -> None:
    if exchange.answer is None:
        return
    code = int(ErrorCode.REBALANCE_IN_PROGRESS)
    if not exchange.answer["error_code"] and waiting.is_one(exchange):
        note = "a JoinGroup was waiting for the other members"
        add(exchange.outcome, "error_code", code, 0, note)
    if exchange.answer["error_code"] != code:
        return
    begin, end = exchange.outcome.sent_ns - _SLACK_NS, exchange.end_ns + _SLACK_NS
    if not any(first <= end and begin <= last for first, last in rebalances):
        add(exchange.outcome, "error_code", 0, code, "no member joins or leaves at that time")


def _check_generations(group: _Group, add: Add) -> None:
    """Generations do not fall. Who joined one agrees on its leader, its protocol and members."""
    joined: dict[int, list[_Exchange]] = defaultdict(list)
    for exchange in group.by_api[ApiKey.JOIN_GROUP]:
        if exchange.is_taken and exchange.answer is not None:
            joined[exchange.answer["generation_id"]].append(exchange)
    ends = sorted((each.end_ns, number) for number, taken in joined.items() for each in taken)
    times = [end_ns for end_ns, _ in ends]
    highest = [1, *accumulate((number for _, number in ends), max)]
    for number, exchanges in joined.items():
        for exchange in exchanges:
            place = bisect_left(times, exchange.outcome.sent_ns)
            if number < highest[place]:
                note = "an earlier answer had a later one" if place else "generations begin at 1"
                add(exchange.outcome, "generation_id", f"at least {highest[place]}", number, note)
    for exchanges in joined.values():
        answers = [each.answer for each in exchanges if each.answer is not None]
        everyone = {answer["member_id"] for answer in answers}
        leaders = [answer["leader"] for answer in answers]
        leader = max(set(leaders), key=leaders.count)
        protocols = [answer["protocol_name"] for answer in answers]
        protocol = max(set(protocols), key=protocols.count)
        subscriptions = {
            join.answer["member_id"]: {
                one["metadata"] for one in join.request["protocols"] if one["name"] == protocol
            }
            for join in exchanges
            if join.answer is not None
        }
        instances = {
            join.answer["member_id"]: join.request.get("group_instance_id")
            for join in exchanges
            if join.answer is not None
        }
        for exchange, answer in zip(exchanges, answers, strict=True):
            listed = {member["member_id"] for member in answer["members"]}
            offered = {each["name"] for each in exchange.request["protocols"]}
            if answer["leader"] != leader:
                note = "other members of this generation have another leader"
                add(exchange.outcome, "leader", leader, answer["leader"], note)
            elif listed and leader not in listed:
                add(exchange.outcome, "leader", "a member", leader, "it is not in the list")
            if answer["protocol_name"] != protocol or protocol not in offered:
                note = "not the protocol of this generation"
                add(exchange.outcome, "protocol_name", protocol, answer["protocol_name"], note)
            if answer["member_id"] != leader:
                if listed:
                    note = "only the leader gets the members"
                    add(exchange.outcome, "members", "none", f"{len(listed)} members", note)
                continue
            _check_members(exchange, subscriptions, instances, add)
            if not answer.get("skip_assignment") and not everyone <= listed:
                note = "members that joined this generation are not listed"
                said = f"{len(listed)} of {len(everyone)}"
                add(exchange.outcome, "members", f"{len(everyone)} members", said, note)


def _check_assignments(group: _Group, add: Add) -> None:
    """For members whose captured response has an error, so that there is nothing to compare."""
    leaders = {
        (join.answer["generation_id"], join.answer["leader"])
        for join in group.by_api[ApiKey.JOIN_GROUP]
        if join.answer is not None and join.is_taken
    }
    sent: dict[tuple[int, str], set[bytes]] = defaultdict(set)  # generation, member
    for sync in group.by_api[ApiKey.SYNC_GROUP]:
        number = sync.request["generation_id"]
        if (number, sync.request["member_id"]) in leaders:
            for each in entries(sync.request["assignments"]):
                sent[number, each["member_id"]].add(each["assignment"])
    for sync in group.by_api[ApiKey.SYNC_GROUP]:
        captured = response_of(sync.outcome.step.exchange)
        if sync.answer is None or captured is None or not captured.body["error_code"]:
            continue
        member = sync.request["generation_id"], sync.request["member_id"]
        if sync.is_taken and member in sent and sync.answer["assignment"] not in sent[member]:
            note = "not the one that the leader sent"
            add(sync.outcome, "assignment", "as sent", "other bytes", note)


def _check_members(
    exchange: _Exchange,
    subscriptions: dict[str, set[bytes]],
    instances: dict[str, str | None],
    add: Add,
) -> None:
    """The leader gets each member once, with the subscription and the instance id that the member
    joined with."""
    seen: set[str] = set()
    for at, described in enumerate(entries((exchange.answer or {})["members"])):
        member, path = described["member_id"], f"members[{at}]"
        if member in seen:
            note = "it is listed twice"
            add(exchange.outcome, f"{path}.member_id", "each member once", member, note)
        seen.add(member)
        instance = described.get("group_instance_id")
        if instance != instances.get(member, instance):
            note = "not the one that this member joined with"
            add(exchange.outcome, f"{path}.group_instance_id", instances[member], instance, note)
        if described["metadata"] not in subscriptions.get(member, {described["metadata"]}):
            note = "not the subscription that this member joined with"
            add(exchange.outcome, f"{path}.metadata", "as joined", "other bytes", note)
