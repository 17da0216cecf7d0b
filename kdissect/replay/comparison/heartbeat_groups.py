"""Finds answers that contradict what the run has shown of groups whose members only heartbeat.

These are consumer groups (KIP-848), share groups (KIP-932) and streams groups (KIP-1071): the
coordinator assigns their partitions or tasks.

- A member's epoch does not fall before it joins again. It rises at most as often as the group
  changed.
- An assignment names partitions of Metadata, or tasks of the topology, each once, and no topic
  without one.
- The only member of a group has all partitions of each assigned topic. In a consumer group it gets
  no more of them without a new epoch.
- A member that joins gets an assignment, and the first one of a streams group without a task gets
  the reason.
- After two seconds and three heartbeats of each member without a change of the group, its members
  have all partitions that the captured members had then. A share group needs 1.5 seconds.
- A status of a streams group is one that the captured group had, or one that passes.
- A streams group whose members have no endpoint has no endpoint information.
- A description has the epochs that its state and the heartbeats before it imply. Its target
  assignment has each partition or active task once, and that of a consumer group the members'
  assignments and the names of topics. In a stable group it is the assignment. Its topology has an
  epoch that a member has sent.
- ListGroups has the protocol type of the group's members.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import FOREVER_NS, Outcome
from kdissect.replay.translation.groups import TASKS
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import (
    MEMBER_HEARTBEATS,
    decoded,
    entries,
    request_of,
    response_of,
)

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]
Share = tuple[str, int]  # the target's name of a topic, or a subtopology; and its partition

# Coordinators compute assignments at most once a second. Members revoke, acknowledge and get them.
_SETTLED_NS, _SETTLED_COUNT = 2_000_000_000, 3
_SHARE_SETTLED_NS = 1_500_000_000  # members of share groups revoke nothing (KIP-932)
_ASSIGNMENT_NS = 1_000_000_000
_PATTERN_NS = 15_000_000_000  # topics of a regular expression are looked up every ten seconds
_STATIC_LEAVE = -2  # member_epoch of a static member that will be back: it keeps its partitions
_SILENT_NS = 5_000_000_000  # the least session timeout of a member, by default settings
_DESCRIPTIONS = frozenset(
    {
        ApiKey.CONSUMER_GROUP_DESCRIBE, ApiKey.SHARE_GROUP_DESCRIBE,
        ApiKey.STREAMS_GROUP_DESCRIBE,
    }
)  # fmt: skip
# Requests that change the metadata of a group's topics, and so the group's epoch.
_TOPIC_CHANGES = frozenset({ApiKey.CREATE_TOPICS, ApiKey.CREATE_PARTITIONS, ApiKey.DELETE_TOPICS})
_SUBSCRIPTIONS = ("subscribed_topic_names", "subscribed_topic_regex", "topology")
_OWNED = ("assignment.topic_partitions", "active_tasks")  # each has one owner; no standby task
_STABLE = "Stable"
_NOT_READY = "NotReady"  # a streams group whose internal topics are missing
_WITHOUT_ASSIGNMENT = ("Assigning", "Empty")  # that of the last change is not made
_PASSING = frozenset({3, 5})  # codes: internal topics are missing, the assignment is delayed


_PROTOCOL_TYPES = {
    ApiKey.CONSUMER_GROUP_HEARTBEAT: "consumer", ApiKey.SHARE_GROUP_HEARTBEAT: "share",
    ApiKey.STREAMS_GROUP_HEARTBEAT: "streams",
}  # fmt: skip


class _Heartbeat(NamedTuple):
    """A heartbeat, or one time that it was sent. request: as captured, or the replay's own one.
    answer: None without one, or with an error. captured: the same of the capture."""

    outcome: Outcome
    sent_ns: int
    answered_ns: int
    request: Body
    answer: Body | None
    captured: Body | None


@dataclass(slots=True)
class _HeartbeatGroup:
    """Heartbeats by member, in order of sending. changes_ns: when its epoch may have risen.
    first_epoch: of the first answer to a member. settled_ns: time without a change until members
    have their assignments."""

    members: dict[str, list[_Heartbeat]] = field(default_factory=lambda: defaultdict(list))
    changes_ns: list[int] = field(default_factory=list)
    first_epoch: int = -1
    settled_ns: int = _SETTLED_NS

    @property
    def heartbeats(self) -> Iterator[_Heartbeat]:
        for each in self.members.values():
            yield from each

    def epoch_limit(self, at_ns: int) -> int:
        """The highest epoch that the group can have at a moment."""
        return self.first_epoch + bisect_right(self.changes_ns, at_ns)


class HeartbeatGroups:
    """Facts of a run about groups whose members only heartbeat."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._groups: dict[str, _HeartbeatGroup] = defaultdict(_HeartbeatGroup)
        self._described: list[tuple[Outcome, Body]] = []
        self._listed: list[tuple[Outcome, Body]] = []  # before any group is deleted
        self._are_deleted = False
        self._topic_changes_ns: list[int] = []
        self._are_partitions_added = False

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        if outcome.sent is None:
            return
        if api_key in _TOPIC_CHANGES:
            self._topic_changes_ns.append(outcome.sent_ns)
            self._are_partitions_added |= api_key == ApiKey.CREATE_PARTITIONS
        elif api_key in MEMBER_HEARTBEATS:
            self._heartbeat(outcome, api_key)
        elif api_key == ApiKey.DELETE_GROUPS:
            self._are_deleted = True
        elif api_key in _DESCRIPTIONS | {ApiKey.LIST_GROUPS} and outcome.answer is not None:
            answer = decoded(outcome.answer, "response", api_key, outcome.api_version)
            if answer is not None and api_key in _DESCRIPTIONS:
                self._described.append((outcome, answer.body))
            elif answer is not None and not self._are_deleted:
                self._listed.append((outcome, answer.body))

    def _heartbeat(self, outcome: Outcome, api_key: int) -> None:
        sent = decoded(outcome.sent or b"", "request", api_key, outcome.api_version)
        request, captured = request_of(outcome.step.exchange), response_of(outcome.step.exchange)
        if sent is None or request is None:
            return
        body, group = request.body, self._groups[sent.body["group_id"]]
        before = None if captured is None else captured.body
        times = [(each.sent_ns, each.answered_ns, each.answer) for each in outcome.earlier]
        times.append((outcome.sent_ns, outcome.answered_ns, outcome.answer or b""))
        for sent_ns, answered_ns, frame in times:
            answer = decoded(frame, "response", api_key, outcome.api_version)
            taken = None if answer is None or answer.body["error_code"] else answer.body
            member = sent.body["member_id"] or ("" if taken is None else taken["member_id"] or "")
            group.members[member].append(
                _Heartbeat(outcome, sent_ns, answered_ns, body, taken, before)
            )
            is_change = body["member_epoch"] <= 0 or any(body.get(each) for each in _SUBSCRIPTIONS)
            if is_change and group.first_epoch >= 0:
                group.changes_ns.append(times[0][0])
            if group.first_epoch < 0 and taken is not None:
                group.first_epoch = taken["member_epoch"]
        for attempt in outcome.followed:
            own = decoded(attempt.sent, "request", api_key, outcome.api_version)
            answer = decoded(attempt.answer, "response", api_key, outcome.api_version)
            if own is not None:
                taken = None if answer is None or answer.body["error_code"] else answer.body
                group.members[own.body["member_id"]].append(
                    _Heartbeat(outcome, attempt.sent_ns, attempt.answered_ns, own.body, taken, None)
                )
                if own.body["member_epoch"] == 0:
                    group.changes_ns.append(attempt.sent_ns)
        for each in entries((body.get("topology") or {}).get("subtopologies")):
            internal = len(each["state_changelog_topics"]) + len(each["repartition_source_topics"])
            group.changes_ns += [outcome.sent_ns] * internal  # the coordinator creates them
        if body.get("subscribed_topic_regex"):
            group.settled_ns = _PATTERN_NS
            group.changes_ns.append(outcome.sent_ns)  # topics are looked up after the answer
        elif api_key == ApiKey.SHARE_GROUP_HEARTBEAT:
            group.settled_ns = _SHARE_SETTLED_NS

    def _add_changes(self, group: _HeartbeatGroup) -> None:
        """Add those of topics, and of members whose session may have ended."""
        first_ns = min(each.sent_ns for each in group.heartbeats)
        group.changes_ns += [at for at in self._topic_changes_ns if at >= first_ns - _SILENT_NS]
        for heartbeats in group.members.values():
            heartbeats.sort(key=lambda each: each.sent_ns)
            sent = [each.sent_ns for each in heartbeats]
            group.changes_ns += [
                at + _SILENT_NS
                for at, following in zip(sent, [*sent[1:], FOREVER_NS], strict=True)
                if following - at > _SILENT_NS
            ]
        group.changes_ns.sort()

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        for group in self._groups.values():
            self._add_changes(group)
        for group in self._groups.values():
            for begin, end in pairwise([-1, *group.changes_ns, FOREVER_NS]):
                if end - begin >= group.settled_ns:
                    self._check_settled(group, begin, end, add)
            for heartbeats in group.members.values():
                _check_epochs(group, heartbeats, add)
                if len(group.members) == 1:
                    self._check_gains(heartbeats, add)
                for each in heartbeats:
                    _check_joined(each, add)
                    self._check_assignment(each, add)
                    if len(group.members) == 1 and not self._are_partitions_added:
                        self._check_only_member(each, add)
            self._check_tasks(group, add)
            _check_status(group, add)
            _check_first_member(group, add)
            _check_endpoint_epochs(group, add)
        for outcome, answer in self._listed:
            self._check_listed(outcome, answer, add)
        for outcome, answer in self._described:
            for at, described in enumerate(entries(answer["groups"])):
                name = described["group_id"]
                if not described["error_code"] and name in self._groups:
                    path = f"groups[{at}]."
                    _check_description(outcome, path, described, self._groups[name], add)
                    self._check_members(outcome, path, described, add)
                    if outcome.step.exchange.api_key != ApiKey.SHARE_GROUP_DESCRIBE:
                        self._check_targets(outcome, path, described, add)
                    if outcome.step.exchange.api_key == ApiKey.STREAMS_GROUP_DESCRIBE:
                        _check_topology(outcome, path, described, self._groups[name], add)

    def _check_listed(self, outcome: Outcome, answer: Body, add: Add) -> None:
        for at, listed in enumerate(entries(answer["groups"])):
            group = self._groups.get(listed["group_id"])
            for each in () if group is None else group.heartbeats:
                protocol_type = _PROTOCOL_TYPES[ApiKey(each.outcome.step.exchange.api_key)]
                if _is_before(each, outcome) and each.answer is not None:
                    if listed["protocol_type"] != protocol_type:
                        path, note = f"groups[{at}].protocol_type", "its members have another one"
                        add(outcome, path, protocol_type, listed["protocol_type"], note)
                    break

    def _shares(self, answer: Body | None) -> Iterator[tuple[Share, str]]:
        """Assigned partitions and tasks of an answer, with the path of their list."""
        body = answer or {}
        for topic in entries((body.get("assignment") or {}).get("topic_partitions")):
            name = self._ids.target.names.get(topic["topic_id"], str(topic["topic_id"]))
            for number in entries(topic["partitions"]):
                yield (name, number), "assignment.topic_partitions"
        for path in TASKS:
            for task in entries(body.get(path)):
                for number in entries(task["partitions"]):
                    yield (task["subtopology_id"], number), path

    def _captured_shares(self, captured: Body | None) -> Iterator[Share]:
        """Partitions and active tasks that a captured answer assigns, as the target names them."""
        body = captured or {}
        for topic in entries((body.get("assignment") or {}).get("topic_partitions")):
            name = self._ids.topic(self._ids.names.get(topic["topic_id"], ""))
            for number in entries(topic["partitions"]):
                if (name, number) in self._ids.target.leaders:
                    yield name, number
        for task in entries(body.get("active_tasks")):
            for number in entries(task["partitions"]):
                yield task["subtopology_id"], number

    def _task_counts(self, group: _HeartbeatGroup) -> dict[str, int]:
        """The number of tasks of each subtopology: of partitions in its largest source topic, as
        far as the target's Metadata has the topics."""
        sizes = Counter(name for name, _ in self._ids.target.leaders)
        counts: dict[str, int] = {}
        for each in group.heartbeats:
            for one in entries((each.request.get("topology") or {}).get("subtopologies")):
                names = [
                    *one["source_topics"],
                    *(t["name"] for t in one["repartition_source_topics"]),
                ]
                known = [sizes.get(self._ids.topic(name), 0) for name in names]
                is_known = known and all(known) and not one["source_topic_regex"]
                counts[one["subtopology_id"]] = max(known) if is_known else 0
        return counts

    def _check_tasks(self, group: _HeartbeatGroup, add: Add) -> None:
        """Tasks are of the group's topology, one for each partition of its topics."""
        counts = self._task_counts(group)
        for each in group.heartbeats if counts and not self._are_partitions_added else ():
            for (name, number), path in self._shares(each.answer):
                count = counts.get(name, -1)
                if path in TASKS and (count < 0 or 0 < count <= number):
                    note = "the topology has no such task"
                    add(each.outcome, path, "a task", f"{name} partition {number}", note)

    def _check_assignment(self, heartbeat: _Heartbeat, add: Add) -> None:
        target = self._ids.target
        assignment = (heartbeat.answer or {}).get("assignment") or {}
        for topic in entries(assignment.get("topic_partitions")):
            if not topic["partitions"]:
                path, name = "assignment.topic_partitions", target.topic_name(topic)
                add(heartbeat.outcome, path, f"partitions of {name}", "none", "its topic is listed")
        for (share, path), count in Counter(self._shares(heartbeat.answer)).items():
            name, number = share
            text = f"{name} partition {number}"
            if count > 1:
                add(heartbeat.outcome, path, "each once", text, "it is assigned twice")
            is_there = share in target.leaders
            is_known = name not in target.names.values() or target.has_topic(name)
            if path not in TASKS and is_known and not is_there:
                note = "Metadata has no such partition"
                add(heartbeat.outcome, path, "a partition of a topic", text, note)

    def _check_only_member(self, heartbeat: _Heartbeat, add: Add) -> None:
        shares = {share for share, path in self._shares(heartbeat.answer) if path not in TASKS}
        names = {name for name, _ in shares}
        missing = {share for share in self._ids.target.leaders if share[0] in names} - shares
        if missing:
            name, number = min(missing)
            note = "the group has no other member"
            path = "assignment.topic_partitions"
            add(heartbeat.outcome, path, f"{name} partition {number}", "not assigned", note)

    def _check_gains(self, heartbeats: list[_Heartbeat], add: Add) -> None:
        """The assignment of an epoch is made as a whole (KIP-848). Its only member waits for no
        other member to release a partition. A share group adds partitions when they are initialised
        (KIP-932)."""
        last: tuple[int, set[Share], _Heartbeat] | None = None
        for heartbeat in heartbeats:
            answer = heartbeat.answer
            if answer is None or answer.get("assignment") is None:
                continue
            if heartbeat.outcome.step.exchange.api_key != ApiKey.CONSUMER_GROUP_HEARTBEAT:
                return
            epoch, shares = answer["member_epoch"], {share for share, _ in self._shares(answer)}
            if last is not None and last[0] == epoch and shares > last[1]:
                note = "the only member of the group has more of them in the same epoch"
                text = f"{len(last[1])} partitions"
                path = "assignment.topic_partitions"
                add(last[2].outcome, path, f"{len(shares)} partitions", text, note)
            last = epoch, shares, heartbeat

    def _check_members(self, outcome: Outcome, path: str, described: Body, add: Add) -> None:
        """Members of a consumer or share group have what heartbeats gave them."""
        for at, member in enumerate(described["members"]):
            heartbeats = self._groups[described["group_id"]].members.get(member["member_id"], [])
            begun = [each for each in heartbeats if each.sent_ns < outcome.answered_ns]
            has_partitions = "topic_partitions" in member["assignment"]  # no tasks
            is_known = has_partitions and all(_is_before(each, outcome) for each in begun)
            given = _last_assignment(each.answer for each in begun)
            counts = Counter(share for share, _ in self._shares(member))
            here = f"{path}members[{at}].assignment"
            for (name, number), count in counts.items():
                if count > 1:
                    text = f"{name} partition {number}"
                    add(outcome, here, "each once", text, "it is assigned twice")
            if is_known and given and set(counts) != {share for share, _ in self._shares(given)}:
                note = "heartbeats have given it another assignment"
                wanted = f"{sum(1 for _ in self._shares(given))} partitions"
                add(outcome, here, wanted, f"{len(counts)} partitions", note)
            self._check_topic_names(outcome, f"{path}members[{at}].", member, add)

    def _check_targets(self, outcome: Outcome, path: str, described: Body, add: Add) -> None:
        """The target assignment has each partition, or active task, once. It is the assignment in a
        stable consumer group."""
        targets: Counter[Share] = Counter()
        for at, member in enumerate(described["members"]):
            listed = {share for share, _ in self._shares(member)}
            target = _as_answer(member["target_assignment"])
            aims = [share for share, where in self._shares(target) if where in _OWNED]
            is_stable = described["group_state"] == _STABLE
            if "topic_partitions" in member["assignment"] and is_stable and set(aims) != listed:
                here, text = f"{path}members[{at}].target_assignment", f"{len(aims)} partitions"
                note = "the group is stable, so it is the assignment"
                add(outcome, here, f"{len(listed)} partitions", text, note)
            targets.update(aims)
        is_made = described["group_state"] not in (*_WITHOUT_ASSIGNMENT, _NOT_READY)
        missing = self._captured_targets(outcome, described) - targets.keys() if is_made else set()
        for (name, number), note in (
            *((share, "it is assigned twice") for share, count in targets.items() if count > 1),
            *((share, "no member has it") for share in sorted(missing)[:1]),
        ):
            text = f"{name} partition {number}"
            add(outcome, f"{path}members[].target_assignment", "each once", text, note)

    def _check_topic_names(self, outcome: Outcome, path: str, member: Body, add: Add) -> None:
        for name in ("assignment", "target_assignment"):
            for topic in entries(member.get(name, {}).get("topic_partitions")):
                wanted = self._ids.target.names.get(topic["topic_id"], topic["topic_name"])
                if topic["topic_name"] != wanted:
                    here = f"{path}{name}.topic_partitions[].topic_name"
                    add(outcome, here, wanted, topic["topic_name"], "the topic of this id")

    def _captured_targets(self, outcome: Outcome, described: Body) -> set[Share]:
        """Partitions in the captured description of a group."""
        captured = response_of(outcome.step.exchange)
        return {
            share
            for group in entries(None if captured is None else captured.body["groups"])
            if self._ids.group(group["group_id"]) == described["group_id"]
            for member in group["members"]
            for share in self._captured_shares(_as_answer(member["target_assignment"]))
        }

    def _check_settled(self, group: _HeartbeatGroup, begin: int, end: int, add: Add) -> None:
        """Report partitions that the captured members had, and no member of the target's has, in an
        interval in which the group does not change."""
        wanted: dict[Share, _Heartbeat] = {}
        assigned: set[Share] = set()
        for heartbeats in group.members.values():
            first, after = _inside(heartbeats, begin, end)
            last_epoch = heartbeats[first - 1].request["member_epoch"] if first else 0
            assignment = _last_assignment(each.answer for each in heartbeats[:after])
            if last_epoch == _STATIC_LEAVE:
                assigned.update(share for share, _ in self._shares(assignment))
            if not after or last_epoch < 0:
                continue  # it has not joined yet, or has left
            answered = [each for each in heartbeats[first:after] if each.answer is not None]
            if len(answered) < _SETTLED_COUNT:
                return
            if answered[-1].sent_ns - max(begin, heartbeats[0].sent_ns) < group.settled_ns:
                return
            captured = _last_assignment(each.captured for each in heartbeats[:after])
            wanted |= dict.fromkeys(self._captured_shares(captured), answered[-1])
            assigned.update(share for share, _ in self._shares(assignment))
        for share in sorted(wanted.keys() - assigned)[:1]:
            is_streams = "active_tasks" in (wanted[share].answer or {})
            path, text = "active_tasks" if is_streams else "assignment", f"{share[0]} {share[1]}"
            add(wanted[share].outcome, path, text, "not assigned", "no member of the group has it")


def _inside(heartbeats: list[_Heartbeat], begin: int, end: int) -> tuple[int, int]:
    """The first heartbeat after a change of the group, and the one after the last before the next
    change, of a member."""
    times = [each.sent_ns for each in heartbeats]
    return bisect_right(times, begin), bisect_left(times, end)


def _last_assignment(answers: Iterable[Body | None]) -> Body | None:
    """The last answer with an assignment. One without leaves the assignment as it was."""
    last = None
    for answer in answers:
        given = answer or {}
        if given.get("assignment") is not None or given.get("active_tasks") is not None:
            last = answer
    return last


def _check_epochs(group: _HeartbeatGroup, heartbeats: list[_Heartbeat], add: Add) -> None:
    epoch = 0
    for heartbeat in heartbeats:
        if heartbeat.answer is None or heartbeat.request["member_epoch"] < 0:
            continue
        if heartbeat.request["member_epoch"] == 0:
            epoch = 0
        limit, answered = group.epoch_limit(heartbeat.answered_ns), heartbeat.answer["member_epoch"]
        least = max(epoch, 1)  # KIP-848: a member that has joined is in an epoch
        if least <= answered <= limit:
            epoch = answered
        else:
            note = "more than the group's changes can have caused, or less than before"
            add(heartbeat.outcome, "member_epoch", f"{least} to {limit}", answered, note)


def _check_status(group: _HeartbeatGroup, add: Add) -> None:
    """KIP-1071: all members of a streams group get its status, until the reason has passed."""
    captured_codes = {
        code for heartbeat in group.heartbeats for code in _status_codes(heartbeat.captured)
    }
    for heartbeat in group.heartbeats:
        for code, count in Counter(_status_codes(heartbeat.answer)).items():
            if count > 1:
                add(heartbeat.outcome, "status", "each code once", code, "it is listed twice")
            if code not in captured_codes | _PASSING:
                note = "the captured group never had it"
                add(heartbeat.outcome, "status", _either(captured_codes), code, note)


def _check_joined(heartbeat: _Heartbeat, add: Add) -> None:
    """A member that joins gets the assignment, or all lists of tasks, that the captured one got:
    null means that nothing has changed since its last heartbeat."""
    outcome = heartbeat.outcome
    is_first = not outcome.earlier or heartbeat.sent_ns == outcome.earlier[0].sent_ns
    is_joining = heartbeat.request["member_epoch"] == 0 and is_first
    if not is_joining or heartbeat.answer is None or heartbeat.captured is None:
        return
    for path in ("assignment", *TASKS):
        if heartbeat.captured.get(path) is not None and heartbeat.answer[path] is None:
            add(outcome, path, "an assignment", "null", "its member has just joined")


def _check_first_member(group: _HeartbeatGroup, add: Add) -> None:
    """Nothing but a status keeps tasks from the first member of a streams group (KIP-1071)."""
    first = min(group.heartbeats, key=lambda each: each.sent_ns)
    if first.answer is None or first.captured is None or first.request["member_epoch"] != 0:
        return
    is_new = first.answer["member_epoch"] <= first.captured["member_epoch"]
    has_tasks = any(first.answer.get(path) for path in TASKS)
    known = set(_status_codes(first.captured))
    if is_new and known and not has_tasks and not _status_codes(first.answer):
        add(first.outcome, "status", _either(known), "none", "the first member gets no task")


def _check_endpoint_epochs(group: _HeartbeatGroup, add: Add) -> None:
    """The epoch counts changes of the endpoints that members name in requests (KIP-1071)."""
    name = "endpoint_information_epoch"
    if any(each.request.get("user_endpoint") for each in group.heartbeats):
        return
    limit = max((each.captured or {}).get(name, 0) for each in group.heartbeats)
    for each in group.heartbeats:
        answered = (each.answer or {}).get(name, 0)
        if answered > limit:
            add(each.outcome, name, f"at most {limit}", answered, "no member has an endpoint")


def _status_codes(body: Body | None) -> list[int]:
    return [each["status_code"] for each in entries((body or {}).get("status"))]


def _either(values: Iterable[Any]) -> str:
    return " or ".join(map(str, sorted(values))) or "none"


def _check_description(
    outcome: Outcome, path: str, described: Body, group: _HeartbeatGroup, add: Add
) -> None:
    """The state follows from the epochs of a group and its members (KIP-848)."""
    epoch, assigned = described["group_epoch"], described["assignment_epoch"]
    state, members = described["group_state"], described["members"]
    seen = {name: _last_epoch(each, outcome) for name, each in group.members.items()}
    before = (each for each in group.heartbeats if _is_before(each, outcome))
    least = max([1, *map(_epoch_of, before)])
    limit = group.epoch_limit(outcome.answered_ns)
    is_share = outcome.step.exchange.api_key == ApiKey.SHARE_GROUP_DESCRIBE
    if is_share:
        limit = _share_epoch_limit(group, outcome, limit)
    if not least <= epoch <= limit:
        note = "heartbeats show other epochs"
        add(outcome, f"{path}group_epoch", f"{least} to {limit}", epoch, note)
    is_behind = state in _WITHOUT_ASSIGNMENT
    if assigned > epoch or (is_behind and assigned == epoch):
        add(outcome, f"{path}assignment_epoch", f"below {epoch}", assigned, f"the group is {state}")
    elif not is_behind and not is_share and assigned != epoch:
        add(outcome, f"{path}assignment_epoch", epoch, assigned, f"the group is {state}")
    elif assigned < least:
        note = "a member has had a later one"
        add(outcome, f"{path}assignment_epoch", f"at least {least}", assigned, note)
    for at, member in enumerate(members):
        own, low = member["member_epoch"], seen.get(member["member_id"], 0)
        if own < 0:
            continue  # a static member that has left (KIP-345)
        low = assigned if state == "Stable" and not is_share else low
        if not low <= own <= assigned:
            note = "heartbeats and the assignment show other epochs"
            add(outcome, f"{path}members[{at}].member_epoch", f"{low} to {assigned}", own, note)


def _as_answer(assignment: Body) -> Body:
    """A described assignment as a heartbeat's answer has it: partitions in a field, tasks not."""
    return {"assignment": assignment, **assignment}


def _check_topology(
    outcome: Outcome, path: str, described: Body, group: _HeartbeatGroup, add: Add
) -> None:
    """A group has a topology once a member has sent one, in the epoch of such a request
    (KIP-1071)."""
    sent = [each.request.get("topology") for each in group.heartbeats]
    if described["topology"] is None and any(
        each.answer is not None and _is_before(each, outcome) and each.request.get("topology")
        for each in group.heartbeats
    ):
        add(outcome, f"{path}topology", "a topology", "null", "a member has sent one")
    epochs = {topology["epoch"] for topology in sent if topology is not None}
    named = [(f"{path}topology.epoch", (described["topology"] or {}).get("epoch"))]
    named += [
        (f"{path}members[{at}].topology_epoch", member["topology_epoch"])
        for at, member in enumerate(described["members"])
    ]
    for where, epoch in named:
        if epochs and epoch not in epochs | {None}:
            add(outcome, where, _either(epochs), epoch, "the members have sent no such topology")


def _share_epoch_limit(group: _HeartbeatGroup, outcome: Outcome, limit: int) -> int:
    """The highest epoch of a share group in a description. If a member heartbeats in the same epoch
    for as long as an assignment can take, the group had that epoch; members that leave afterwards
    raise it by one each."""
    for heartbeats in group.members.values():
        known = [each for each in heartbeats if _is_before(each, outcome) and _epoch_of(each) > 0]
        if not known:
            continue
        last, epoch = known[-1], _epoch_of(known[-1])
        first = next(each for each in known if _epoch_of(each) == epoch)
        if last.sent_ns - first.answered_ns < _ASSIGNMENT_NS:
            continue
        leaving = sorted(
            each.sent_ns for each in group.heartbeats if each.request["member_epoch"] < 0
        )
        begin, end = last.sent_ns - _ASSIGNMENT_NS, outcome.answered_ns
        changed = [at for at in group.changes_ns if begin <= at <= end]
        if changed == [at for at in leaving if begin <= at <= end]:
            limit = min(limit, epoch + len(changed))
    return limit


def _last_epoch(heartbeats: list[_Heartbeat], outcome: Outcome) -> int:
    """The epoch of a member by its last answer before an exchange; 0 if it has none."""
    times = [each.answered_ns for each in heartbeats]
    for each in reversed(heartbeats[: bisect_left(times, outcome.sent_ns)]):
        if each.answer is not None:
            return max(_epoch_of(each), 0)
    return 0


def _epoch_of(heartbeat: _Heartbeat) -> int:
    return -1 if heartbeat.answer is None else int(heartbeat.answer["member_epoch"])


def _is_before(heartbeat: _Heartbeat, outcome: Outcome) -> bool:
    return 0 <= heartbeat.answered_ns < outcome.sent_ns
