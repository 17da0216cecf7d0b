"""Rows of `group_events`: who joined, led, synced and left, and how long each rebalance took.

Every event makes a row. Two more kinds of rows are derived from all events together:

rebalance: for a classic group a generation, from the first join answered with it to its last sync.
For other groups (KIP-848, KIP-932, KIP-1071) a member epoch, from the first request answered with
it until every known member has it.

stable: the end of a rebalance; all members that synced have their assignment.

A member is known if its joining or heartbeat was captured.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any

import pyarrow as pa

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode, error_name
from kdissect.stories.events import NO_TIME
from kdissect.stories.group_messages import EPOCH_HEARTBEATS, Body, Places, places
from kdissect.tables.schemas import GROUP_EVENTS, Row, table_of_rows

CLASSIC = "classic"
TYPES: dict[int, str] = {
    ApiKey.CONSUMER_GROUP_HEARTBEAT: "consumer",
    ApiKey.SHARE_GROUP_HEARTBEAT: "share",
    ApiKey.STREAMS_GROUP_HEARTBEAT: "streams",
}
_CLASSIC_APIS = (ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP, ApiKey.LEAVE_GROUP, ApiKey.HEARTBEAT)
STATIC_LEAVE = -2
# A broker does not send these to classic members.
_EPOCH_ERRORS = (ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.STALE_MEMBER_EPOCH)
_FIRST_GENERATION = 1  # an empty group has 0, so all members joined
# Reasons by which a client only follows others.
_FOLLOWS = ("group is already rebalancing", "need to re-join with the given member-id")


@dataclass(slots=True)
class _Event:
    """An event with its JSON parsed; error_code is None without a response."""

    group_id: str
    api_key: int
    time_ns: int
    end_ns: int
    exchange_id: int
    client_id: str | None
    member_id: str | None
    generation: int | None
    error_code: int | None
    data: Body

    @property
    def answer_ns(self) -> int:
        return self.end_ns if self.end_ns != NO_TIME else self.time_ns

    @property
    def is_good(self) -> bool:
        return self.error_code == 0

    @property
    def waited_ms(self) -> float | None:
        return (self.end_ns - self.time_ns) / 1e6 if self.end_ns != NO_TIME else None


@dataclass(slots=True)
class _Generation:
    """A generation of a classic group, from its responses.

    listed: members, as the leader's response lists them. given: members that the leader assigns
    partitions to.
    """

    number: int
    leader: str
    protocol: str | None
    joins: list[_Event] = field(default_factory=list)
    syncs: list[_Event] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)
    given: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether all members are known: the leader's messages have them."""
        return bool(self.listed or self.given)

    @property
    def members(self) -> list[str]:
        if self.listed:
            return self.listed
        steps = [*self.joins, *(sync for sync in self.syncs if sync.is_good)]
        seen = {self.leader, *self.given, *(step.member_id or "" for step in steps)}
        return sorted(seen - {""})


def group_events_table(events: pa.Table) -> pa.Table:
    """`group_events` from GROUP_EVENT in order of time."""
    columns: list[Iterable[Any]] = [events[column.name].to_pylist() for column in fields(_Event)]
    columns[-1] = map(json.loads, columns[-1])
    read = [_Event(*values) for values in zip(*columns, strict=True)]
    read.sort(key=lambda event: event.group_id)  # a stable sort, so events stay in order of time
    rows: list[Row] = []
    for _, group in groupby(read, key=lambda event: event.group_id):
        rows += _group_rows(list(group))
    return table_of_rows(GROUP_EVENTS, rows)


def _row(event: _Event, group_type: str, name: str, parts: list[str], **others: object) -> Row:
    """Return a row about an event. others: columns with other values than the event has."""
    return {
        "group_id": event.group_id,
        "group_type": group_type,
        "time": event.time_ns,
        "event": name,
        "member_id": event.member_id,
        "client_id": event.client_id,
        "generation": event.generation,
        "exchange_id": event.exchange_id,
        "detail": "; ".join(part for part in parts if part),
        **others,
    }


def _whole(
    event: _Event, group_type: str, name: str, number: int, parts: list[str], **others: object
) -> Row:
    """Return a row about the whole group, derived from an event of one member."""
    of_group = {"member_id": None, "client_id": None, "duration_ms": None, "generation": number}
    return _row(event, group_type, name, parts, **(of_group | others))


def _group_rows(events: list[_Event]) -> Iterator[Row]:
    types = _types(events)
    for event, group_type in zip(events, types, strict=True):
        yield from _own_rows(event, group_type)
    yield from _classic_rebalances(events)
    for api_key, group_type in TYPES.items():
        yield from _epoch_rebalances(
            [event for event in events if event.api_key == api_key], group_type
        )


def _types(events: list[_Event]) -> list[str]:
    """Group type per event; a commit has the type of its member, or of its group.

    If no join was captured, an error may reveal the type; otherwise it is classic, as Kafka lists
    groups that only commit.
    """
    by_member: dict[str | None, str] = {}
    first = "consumer" if any(event.error_code in _EPOCH_ERRORS for event in events) else CLASSIC
    for event in reversed(events):
        own_type = TYPES.get(event.api_key) or (CLASSIC if event.api_key in _CLASSIC_APIS else None)
        if own_type:
            by_member[event.member_id] = first = own_type
    return [
        TYPES.get(event.api_key)
        or (CLASSIC if event.api_key in _CLASSIC_APIS else by_member.get(event.member_id, first))
        for event in events
    ]


# -- rows of single events --------------------------------------------------------------------


def _own_rows(event: _Event, group_type: str) -> Iterator[Row]:
    def row(name: str, parts: list[str], duration_ms: float | None = None) -> Row:
        return _row(event, group_type, name, parts, duration_ms=duration_ms)

    data = event.data
    if event.api_key == ApiKey.JOIN_GROUP:
        yield row("join", _join_detail(event), event.waited_ms)
    elif event.api_key == ApiKey.SYNC_GROUP:
        assigned = data.get("assigned")
        gives = f"gives {len(data['gives'])} assignments" if data["gives"] else ""
        got = f"assigned {assigned}" if event.is_good and assigned is not None else ""
        yield row("sync", [_error(event), gives, got], event.waited_ms)
    elif event.api_key == ApiKey.LEAVE_GROUP:
        yield row("leave", [_error(event), data["reason"] or "", _instance(event)])
    elif event.api_key == ApiKey.HEARTBEAT:
        yield row("heartbeat_error", [_error(event)])
    elif event.api_key in EPOCH_HEARTBEATS:
        yield from _heartbeat_rows(event, row)
    else:
        yield row("commit_error", [data["refused"] or _error(event)])


def _heartbeat_rows(event: _Event, row: Callable[..., Row]) -> Iterator[Row]:
    data = event.data
    refused = [_error(event), data.get("message") or ""]
    if data["epoch"] == 0:
        subscribed = data["subscribed"]
        topics = f"subscribes {', '.join(subscribed)}" if subscribed else ""
        pattern = f"subscribes by {data['regex']}" if data["regex"] else ""
        yield row("join", [*refused, topics, pattern, _instance(event)], event.waited_ms)
    elif data["epoch"] < 0:
        why = "a static member, to come back" if data["epoch"] == STATIC_LEAVE else ""
        yield row("leave", [*refused, why, _instance(event)])
    elif not event.is_good and event.error_code is not None:
        yield row("heartbeat_error", refused)
    if event.is_good and "given" in data:
        yield row("sync", [f"assigned {places(data['given'])}"], event.waited_ms)


def _join_detail(event: _Event) -> list[str]:
    data = event.data
    parts = [_error(event)]
    if event.error_code == ErrorCode.MEMBER_ID_REQUIRED:
        parts.append("got its member id, to join again")
    if event.is_good:
        role = "leads" if data["leader"] == event.member_id else f"led by {data['leader']}"
        parts += [role, f"protocol {data['protocol']}"]
        if data["members"]:
            parts.append(_count(data["members"]))
    else:
        parts.append(f"offers {', '.join(data['offered'])}")
    if data["type"] not in ("consumer", ""):
        parts.append(f"protocol type {data['type']}")
    parts.append(data["reason"] or "")
    return [*parts, _instance(event)]


def _instance(event: _Event) -> str:
    instance = event.data.get("instance")
    return f"static member {instance}" if instance else ""


def _error(event: _Event) -> str:
    if event.error_code is None:
        return "not answered"
    return error_name(event.error_code) if event.error_code else ""


# -- classic groups -----------------------------------------------------------------------------


def _classic_rebalances(events: list[_Event]) -> Iterator[Row]:
    generations = _generations(events)
    leaves: deque[_Event] = deque()
    id_of: dict[str, str | None] = {}  # of static members; a removal by an admin names no other
    for event in events:
        instance = event.data.get("instance")
        if event.api_key == ApiKey.JOIN_GROUP and instance:
            id_of[instance] = event.member_id
        elif event.api_key == ApiKey.LEAVE_GROUP and event.is_good:
            name = event.member_id or id_of.get(instance or "", instance)
            leaves.append(replace(event, member_id=name))
    waiting: list[_Event] = []
    before: _Generation | None = None
    for index, generation in enumerate(generations):
        left: list[_Event] = []
        if generation.joins:
            began = min(join.answer_ns for join in generation.joins)
            while leaves and leaves[0].time_ns <= began:
                waiting.append(leaves.popleft())
            # a member that is listed in spite of its leave left too late for this generation
            members = set(generation.members)
            left = [leave for leave in waiting if leave.member_id not in members]
            waiting = [leave for leave in waiting if leave.member_id in members]
        is_last = index + 1 == len(generations)
        yield from _generation_rows(generation, before, left, is_last)
        before = generation


def _generations(events: list[_Event]) -> list[_Generation]:
    """Generations in order of their responses, with their joins and syncs."""
    responses = [
        event for event in events if event.api_key in (ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP)
    ]
    responses.sort(key=lambda event: event.answer_ns)  # stable
    generations: list[_Generation] = []
    for event in responses:
        number = event.generation
        if number is None or number < 0:
            continue
        last = generations[-1] if generations else None
        if event.api_key == ApiKey.SYNC_GROUP:
            matching = next((one for one in generations[:-4:-1] if one.number == number), None)
            if matching is None and event.is_good:
                matching = _Generation(number, "", None)
                generations.append(matching)
            if matching is not None:
                matching.syncs.append(event)
                matching.given = matching.given or event.data["gives"]
        elif event.is_good:
            data = event.data
            if last is None or last.number != number or last.leader not in ("", data["leader"]):
                generations.append(_Generation(number, data["leader"], data["protocol"]))
            one = generations[-1]
            one.leader, one.protocol = data["leader"], data["protocol"]
            one.joins.append(event)
            one.listed = one.listed or sorted(data["members"])
    return generations


def _generation_rows(
    generation: _Generation, before: _Generation | None, left: list[_Event], is_last: bool
) -> Iterator[Row]:
    good = [sync for sync in generation.syncs if sync.is_good]
    ended = max((good or generation.syncs), key=lambda sync: sync.answer_ns, default=None)
    if generation.joins:
        first = min(generation.joins, key=lambda join: join.time_ns)
        duration = (ended.answer_ns - first.time_ns) / 1e6 if ended is not None else None
        members = generation.members
        count = _count(members) if generation.is_whole else f"at least {_count(members)}"
        parts = [
            f"generation {generation.number} of {count}: {', '.join(members)}",
            f"led by {generation.leader}",
            f"protocol {generation.protocol}",
            f"why: {_why(generation, before, left)}",
        ]
        if not good:
            parts.append("no sync was captured" if is_last else "did not become stable")
        yield _whole(first, CLASSIC, "rebalance", generation.number, parts, duration_ms=duration)
    if good and ended is not None:
        synced = {sync.member_id or "": sync.data.get("assigned", "") for sync in good}
        shares = [f"{member}: {assigned}" for member, assigned in sorted(synced.items())]
        missing = sorted(set(generation.members) - set(synced)) if generation.joins else []
        parts = ["; ".join(shares)]
        if missing:
            parts.append(f"without a sync: {', '.join(missing)}")
        yield _whole(ended, CLASSIC, "stable", generation.number, parts, time=ended.answer_ns)


def _count(members: list[str]) -> str:
    return "1 member" if len(members) == 1 else f"{len(members)} members"


def _why(generation: _Generation, before: _Generation | None, left: list[_Event]) -> str:
    """The events since the previous generation: joins, leaves, missing members, reasons."""
    members = generation.members
    if generation.number == _FIRST_GENERATION:
        return ", ".join(f"{member} joined" for member in members)
    follows = before is not None and before.number == generation.number - 1
    members_before = before.members if before is not None and follows and before.is_whole else None
    gone = {leave.member_id or "": leave.data["reason"] for leave in left}
    reasons = [
        f"{member} left ({reason})" if reason else f"{member} left"
        for member, reason in sorted(gone.items())
    ]
    fresh = {
        join.member_id or ""
        for join in generation.joins
        if not join.data["asked_as"] or _is_new(join, members_before)
    }
    if members_before is not None:
        fresh |= set(members) - set(members_before)
        away = set(members_before) - set(members) - set(gone) if generation.is_whole else set()
        reasons += [f"{member} did not come back" for member in sorted(away)]
    reasons = [f"{member} joined" for member in sorted(fresh)] + reasons
    for join in generation.joins:
        reason_text = join.data["reason"]
        if reason_text and not reason_text.startswith(_FOLLOWS):
            reasons.append(f"{join.member_id} rejoined ({reason_text})")
    if not reasons and members_before is None:
        captured = "not captured whole" if follows else "not captured"
        return f"the generation before was {captured}"
    return ", ".join(reasons) or "its members rejoined without a reason"


def _is_new(join: _Event, known: list[str] | None) -> bool:
    """Return whether a member joins with the id that it has just got: its second join (KIP-394)."""
    said = join.data["reason"] or ""
    return known is None and said.startswith("need to re-join with the given member-id")


# -- groups with member epochs --------------------------------------------------------------------


@dataclass(slots=True)
class _Epoch:
    """A member epoch while it spreads through the group.

    last: the response that gave the last member this epoch, or the partitions that others gave up.
    """

    number: int
    first: _Event
    joined: list[str]
    left: list[str]
    last: _Event | None = None
    shares: dict[str, Places | None] = field(default_factory=dict)


def _epoch_rebalances(events: list[_Event], group_type: str) -> Iterator[Row]:
    """Yield a row for each new epoch, and one when all known members have it.

    KIP-848: members give up partitions while they have the old epoch. They get more partitions with
    the new one, or later, after others gave them up.
    """
    members: dict[str, int] = {}
    numbers: Counter[int] = Counter()  # number of members with each epoch
    assigned: dict[str, Places] = {}
    current: _Epoch | None = None
    joined: list[str] = []
    left: list[str] = []
    for event in sorted(events, key=lambda event: event.answer_ns):
        if not event.is_good or event.member_id is None or event.generation is None:
            continue
        member, request_epoch = event.member_id, event.data["epoch"]
        old_epoch = members.pop(member, None)
        if old_epoch is not None:
            numbers[old_epoch] -= 1
        is_news = old_epoch != event.generation
        if request_epoch < 0:
            assigned.pop(member, None)
            left.append(member)
            is_news = current is not None and current.last is None
        else:
            if request_epoch == 0:
                joined.append(member)
                # a member that joins after that waits for the next epoch
                is_news = current is None or current.last is None
            if "given" in event.data:
                is_news |= _gains(assigned.get(member, {}), event.data["given"])
                assigned[member] = event.data["given"]
            members[member] = event.generation
            numbers[event.generation] += 1
            # an epoch that starts over belongs to a new group with the same id
            starts_over = request_epoch == 0 and len(members) == 1
            if current is None or event.generation > current.number or starts_over:
                if current is not None:
                    yield from _epoch_rows(current, group_type)
                current = _Epoch(event.generation, event, joined, left)
                joined, left = [], []
        if current is None or not is_news or not members:
            continue
        if numbers[current.number] == len(members):
            if current.last is None:
                current.shares = {name: assigned.get(name) for name in sorted(members)}
            elif member in members:
                current.shares[member] = assigned.get(member)
            current.last = event
    if current is not None:
        yield from _epoch_rows(current, group_type)


def _gains(before: Places, after: Places) -> bool:
    return any(set(parts) - set(before.get(name, ())) for name, parts in after.items())


def _epoch_rows(epoch: _Epoch, group_type: str) -> Iterator[Row]:
    reasons = [f"{member} joined" for member in epoch.joined]
    reasons += [f"{member} left" for member in epoch.left]
    first, last = epoch.first, epoch.last
    who = _count(list(epoch.shares)) if last is not None else "not all known members got it"
    parts = [f"epoch {epoch.number}", who, f"why: {', '.join(reasons) or 'unknown'}"]
    duration = None if last is None else (last.answer_ns - first.time_ns) / 1e6
    if last is not None:
        shares = [
            f"{name}: {'unknown' if given is None else places(given)}"
            for name, given in sorted(epoch.shares.items())
        ]
        yield _whole(last, group_type, "stable", epoch.number, shares, time=last.answer_ns)
    yield _whole(first, group_type, "rebalance", epoch.number, parts, duration_ms=duration)
