"""Finds answers that contradict what the run has shown of the target's groups.

Classic groups:

- A heartbeat is answered REBALANCE_IN_PROGRESS as in the capture, or only if another member has
  joined, left or fallen silent since the assignment.
- The leader of a generation gets all members that joined it.

Consumer, share and streams groups, whose coordinator assigns partitions or tasks (KIP-848, KIP-932,
KIP-1071): if a group has not changed for a while, its members have all partitions that the captured
members had then, and but for share groups no partition has two owners.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.comparison.logs import Readers
from kdissect.replay.model import FOREVER_NS, Contradiction, Difference, Reply
from kdissect.replay.translation.groups import assignment_in
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import (
    MEMBER_HEARTBEATS,
    Body,
    MessageTopics,
    apis,
    response_body,
)

# Coordinators compute assignments at most once a second. Members revoke, acknowledge and get them.
_SETTLED_NS, _SETTLED_COUNT = 2_000_000_000, 3
_PATTERN_NS = 15_000_000_000  # topics of a regular expression are looked up every ten seconds
_SILENT_NS = 5_000_000_000  # the least session timeout of a member, by default settings
_STATIC_LEAVE = -2  # member_epoch of a static member that will be back: it keeps its partitions
_CLASSIC_APIS = apis("JoinGroup SyncGroup Heartbeat LeaveGroup")
_TOPIC_CHANGES = apis("CreateTopics CreatePartitions DeleteTopics")  # of groups
_SUBSCRIPTIONS = ("subscribed_topic_names", "subscribed_topic_regex", "topology")

Share = tuple[str, int]  # the capture's name of a topic, or a subtopology; and its partition


class _Heartbeat(NamedTuple):
    """One time that a heartbeat was sent. shares: the last assignment that answers have brought by
    then. captured: the same in the capture."""

    reply: Reply
    epoch: int
    shares: list[Share]
    captured: list[Share]


@dataclass(slots=True)
class _AssignedGroup:
    """Heartbeats by member. changes_ns: when members, subscriptions or topics may have changed."""

    api_key: int
    members: dict[str, list[_Heartbeat]] = field(default_factory=lambda: defaultdict(list))
    changes_ns: list[int] = field(default_factory=list)
    settled_ns: int = _SETTLED_NS


class Groups:
    """The groups of a run, by the target's names. readers: of each reply, those that were followed
    by another try included."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._classic: dict[str, dict[int, list[Reply]]] = defaultdict(lambda: defaultdict(list))
        self._assigned: dict[str, _AssignedGroup] = {}
        self._topic_changes_ns: list[int] = []
        self.readers: Readers = {
            **dict.fromkeys(
                _TOPIC_CHANGES, lambda reply: self._topic_changes_ns.append(reply.sent_ns)
            ),
            **dict.fromkeys(MEMBER_HEARTBEATS, self._heartbeat),
            **dict.fromkeys(_CLASSIC_APIS, self._add_classic),
        }

    def _add_classic(self, reply: Reply) -> None:
        by_api = self._classic[reply.request["group_id"]]
        by_api[reply.step.exchange.api_key].append(reply)

    def _heartbeat(self, reply: Reply) -> None:
        exchange, request = reply.step.exchange, reply.request
        name, epoch = request["group_id"], request["member_epoch"]
        group = self._assigned.setdefault(name, _AssignedGroup(exchange.api_key))
        known = group.members[request["member_id"] or reply.taken.get("member_id") or ""]
        shares, captured = (known[-1].shares, known[-1].captured) if known else ([], [])
        shares = _shares(reply.taken, self._ids.target_topics, shares)
        captured = _shares(response_body(exchange), self._ids.names, captured)
        is_again = bool(known) and known[-1].reply.step is reply.step
        known.append(_Heartbeat(reply, epoch, shares, captured))
        if not is_again and (epoch <= 0 or any(request.get(name) for name in _SUBSCRIPTIONS)):
            group.changes_ns.append(reply.sent_ns)
        if request.get("subscribed_topic_regex"):
            group.settled_ns = _PATTERN_NS

    # -- contradictions -------------------------------------------------------------------------

    def contradictions(self) -> Iterator[Contradiction]:
        for name, by_api in self._classic.items():
            if name not in self._assigned:  # members of the other protocol join otherwise (KIP-848)
                yield from _check_heartbeats(by_api)
            yield from _check_members(by_api[ApiKey.JOIN_GROUP])
        for group in self._assigned.values():
            for heartbeats in group.members.values():
                heartbeats.sort(key=lambda each: each.reply.sent_ns)
            changes_ns = sorted({*group.changes_ns, *self._topic_changes_ns, *_silences(group)})
            for begin, end in pairwise([-1, *changes_ns, FOREVER_NS]):
                if end - begin >= group.settled_ns:
                    yield from self._check_settled(group, begin, end)

    def _check_settled(
        self, group: _AssignedGroup, begin: int, end: int
    ) -> Iterator[Contradiction]:
        """Compare the owners with the captured ones, in an interval in which the group does not
        change."""
        wanted: dict[Share, Reply] = {}
        owners: Counter[Share] = Counter()
        last = None
        for heartbeats in group.members.values():
            times = [each.reply.sent_ns for each in heartbeats]
            first, after = bisect_right(times, begin), bisect_left(times, end)
            last_epoch = heartbeats[first - 1].epoch if first else 0
            if after and last_epoch == _STATIC_LEAVE:
                owners.update(heartbeats[after - 1].shares)
            if not after or last_epoch < 0:
                continue  # it has not joined yet, or has left
            answered = [each.reply for each in heartbeats[first:after] if each.reply.taken]
            if len(answered) < _SETTLED_COUNT:
                return
            last = answered[-1]
            if last.sent_ns - max(begin, times[0]) < group.settled_ns:
                return
            _, _, shares, captured = heartbeats[after - 1]
            wanted |= dict.fromkeys(filter(self._exists, captured), last)
            owners.update(shares)
        if last is None:
            return
        is_streams = group.api_key == ApiKey.STREAMS_GROUP_HEARTBEAT
        place = "active_tasks" if is_streams else "assignment"
        for topic, number in sorted(wanted.keys() - owners.keys()):
            note = "no member of the group has it, long after the last change"
            one = Difference(place, (), f"{topic} {number}", "not assigned", note=note)
            yield wanted[topic, number].wrong(one)
        for (topic, number), count in sorted(owners.items()):
            if count > 1 and group.api_key != ApiKey.SHARE_GROUP_HEARTBEAT:
                texts = f"one owner of {topic} {number}", f"{count} owners"
                yield last.wrong(Difference(place, (), *texts, note="long after the last change"))

    def _exists(self, share: Share) -> bool:
        """Return whether the target has a partition; of tasks, always."""
        target, name = self._ids.target, self._ids.topic(share[0])
        return name not in target.topics or (name, share[1]) in target.leaders


# -- classic groups -------------------------------------------------------------------------------


def _check_heartbeats(by_api: dict[int, list[Reply]]) -> Iterator[Contradiction]:
    """A member with its assignment gets REBALANCE_IN_PROGRESS only if another member has joined or
    left since, or was silent for so long that its session may have ended."""
    code = int(ErrorCode.REBALANCE_IN_PROGRESS)
    heard: dict[str, list[int]] = defaultdict(list)
    for each in sorted(chain(*by_api.values()), key=lambda each: each.sent_ns):
        heard[each.request.get("member_id", "")].append(each.sent_ns)
    for reply in by_api[ApiKey.HEARTBEAT]:
        was_so = response_body(reply.step.exchange).get("error_code") == code
        if reply.body.get("error_code") != code or was_so:
            continue
        generation = reply.request["generation_id"]
        members = {
            each.request["member_id"]: each.sent_ns
            for each in by_api[ApiKey.SYNC_GROUP]
            if each.taken
            and each.request["generation_id"] == generation
            and each.end_ns <= reply.sent_ns
        }
        since = members.pop(reply.request["member_id"], FOREVER_NS)
        is_changed = since > reply.end_ns or any(
            each.sent_ns <= reply.end_ns
            and each.end_ns >= since
            and each.taken.get("generation_id") != generation
            for each in (*by_api[ApiKey.JOIN_GROUP], *by_api[ApiKey.LEAVE_GROUP])
        )
        is_silent = any(
            reply.end_ns - heard[each][bisect_right(heard[each], reply.end_ns) - 1] > _SILENT_NS
            for each in members
        )
        if not is_changed and not is_silent:
            note = "no member has joined or left since the assignment"
            yield reply.wrong(Difference("error_code", (), 0, code, note=note))


def _check_members(joins: list[Reply]) -> Iterator[Contradiction]:
    """The leader of a generation is a member that joined, and gets the members that joined it."""
    joined: dict[int, dict[str, int]] = defaultdict(dict)  # when each asked first
    for reply in joins:
        if reply.taken:
            joined[reply.taken["generation_id"]].setdefault(reply.taken["member_id"], reply.sent_ns)
    known = {each.request["member_id"] for each in joins}.union(*joined.values())
    for reply in joins:
        if not (answer := reply.taken):
            continue
        if (leader := answer["leader"]) not in known:
            note = "no such member has joined"
            yield reply.wrong(Difference("leader", (), "a member", leader, note=note))
        if answer["member_id"] != leader or answer.get("skip_assignment"):
            continue
        listed = {each["member_id"] for each in answer["members"]}
        in_time = joined[answer["generation_id"]].items()
        # a static member that restarts joins it later, by another id (KIP-345)
        there = {member for member, sent_ns in in_time if sent_ns <= reply.answered_ns}
        for member in sorted(there - listed):
            note = "it has joined this generation"
            yield reply.wrong(Difference("members[]", (member,), member, "not listed", note=note))


# -- groups whose coordinator assigns -------------------------------------------------------------


def _shares(body: Body, topics: MessageTopics, before: list[Share]) -> list[Share]:
    """Assigned partitions or active tasks after the answer to a heartbeat, which may have none."""
    assigned = assignment_in(body)
    if assigned is None:
        return before
    return [
        (each.get("subtopology_id") or topics.of(each), number)
        for name in ("topic_partitions", "active_tasks")
        for each in assigned.get(name, ())
        for number in each["partitions"]
    ]


def _silences(group: _AssignedGroup) -> Iterator[int]:
    """When sessions of members may have ended."""
    for heartbeats in group.members.values():
        times = [each.reply.sent_ns for each in heartbeats]
        for at_ns, following in pairwise([*times, FOREVER_NS]):
            if following - at_ns > _SILENT_NS:
                yield at_ns + _SILENT_NS
