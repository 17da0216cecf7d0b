"""Finds descriptions of groups and transactions that contradict themselves or later answers.

- A group or transaction that is described without an error has a state. A dead group has an error
  since DescribeGroups v6 (KIP-1043).
- Beside an error there is no epoch, no member and no partition: brokers leave fields at their
  defaults.
- The epochs of a group do not fall while no member joins it (KIP-848). A group that was deleted has
  no description before a member joins, or a request sets its offsets. Nor does the epoch of a
  producer in transactions fall (KIP-98).
- ListGroups without a filter has each group that a member has joined and that has members later,
  if none joins in between. A broker that was restarted may not have loaded its groups yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import FOREVER_NS, Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import MEMBER_HEARTBEATS, decoded, entries

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]

_GROUPS = ("groups", "group_id", "group_state")
# Descriptions: the array, the name and the state of its elements.
_DESCRIBED = {
    ApiKey.DESCRIBE_GROUPS: _GROUPS,
    ApiKey.CONSUMER_GROUP_DESCRIBE: _GROUPS,
    ApiKey.SHARE_GROUP_DESCRIBE: _GROUPS,
    ApiKey.STREAMS_GROUP_DESCRIBE: _GROUPS,
    ApiKey.DESCRIBE_TRANSACTIONS: ("transaction_states", "transactional_id", "transaction_state"),
}
_EPOCHS = ("group_epoch", "assignment_epoch")
_RISING = (*_EPOCHS, "producer_epoch")
_DEAD = "Dead"
_DEAD_IS_ERROR = 6  # versions of DescribeGroups
_ABSENT_BESIDE_ERRORS = (*_EPOCHS, "members", "topics")
# Requests that may make a group, or give it a member.
_JOINING = MEMBER_HEARTBEATS | {ApiKey.JOIN_GROUP, ApiKey.ALTER_SHARE_GROUP_OFFSETS}
_WITH_MEMBERS = frozenset({"Assigning", "CompletingRebalance", "Reconciling", "Stable"})


class _GroupDescription(NamedTuple):
    """A group without an error. path: with a dot at its end."""

    outcome: Outcome
    path: str
    body: Body


class Descriptions:
    """Descriptions and lists of a run."""

    def __init__(self, ids: IdMap) -> None:
        self._has_one_node = ids.target.has_one_node
        self._is_connected = True  # all the time: the broker was not restarted
        self._described: list[tuple[Outcome, Body]] = []
        self._listed: list[tuple[Outcome, Body, bool]] = []  # of all groups?
        # (sent, answered) of each request that may make a group or give it a member
        self._joins: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        self._is_connected &= not outcome.error
        if outcome.sent is None:
            return
        if api_key in _JOINING:
            self._join(outcome, api_key)
        elif api_key in _DESCRIBED or api_key == ApiKey.LIST_GROUPS:
            request = decoded(outcome.sent, "request", api_key, outcome.api_version)
            answer = decoded(outcome.answer or b"", "response", api_key, outcome.api_version)
            if request is None or answer is None:
                return
            if api_key in _DESCRIBED:
                self._described.append((outcome, answer.body))
            elif not answer.body["error_code"]:
                filters = request.body.get("states_filter"), request.body.get("types_filter")
                self._listed.append((outcome, answer.body, not any(filters)))

    def _join(self, outcome: Outcome, api_key: int) -> None:
        first_ns = outcome.earlier[0].sent_ns if outcome.earlier else outcome.sent_ns
        last_ns = outcome.answered_ns if outcome.answer is not None else FOREVER_NS
        times = [(outcome.sent or b"", first_ns, last_ns)]
        times += [(each.sent, each.sent_ns, each.answered_ns) for each in outcome.followed]
        for frame, sent_ns, answered_ns in times:
            request = decoded(frame, "request", api_key, outcome.api_version)
            if request is not None and request.body.get("member_epoch", 0) <= 0:
                self._joins[request.body["group_id"]].append((sent_ns, answered_ns))

    def _may_join(self, group: str, begin_ns: int, end_ns: int) -> bool:
        """Return whether a member may have joined between two moments."""
        joins = self._joins.get(group, ())
        return any(sent_ns <= end_ns and begin_ns <= answered_ns for sent_ns, answered_ns in joins)

    def _has_joined(self, group: str, at_ns: int) -> bool:
        return any(answered_ns < at_ns for _, answered_ns in self._joins.get(group, ()))

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        groups: dict[tuple[Any, ...], list[_GroupDescription]] = defaultdict(list)
        for outcome, answer in self._described:
            api_key = ApiKey(outcome.step.exchange.api_key)
            array, name, state = _DESCRIBED[api_key]
            for at, described in enumerate(entries(answer[array])):
                path = f"{array}[{at}]."
                if described["error_code"]:
                    _check_beside_error(outcome, path, described, add)
                else:
                    _check_state(outcome, path, described, state, add)
                    group = _GroupDescription(outcome, path, described)
                    producer = described.get("producer_id")
                    groups[api_key, described[name], producer].append(group)
        for (_, group_id, _), descriptions in groups.items():
            for first, second in pairwise(descriptions):
                times = first.outcome.sent_ns, second.outcome.answered_ns
                is_later = first.outcome.answered_ns <= second.outcome.sent_ns
                if is_later and not self._may_join(group_id, *times):
                    _check_epochs(first, second, add)
        for outcome, answer, is_whole in self._listed:
            if is_whole and self._has_one_node and self._is_connected:
                self._check_listed(outcome, answer, add)

    def _check_listed(self, outcome: Outcome, answer: Body, add: Add) -> None:
        """Compare a list with later ones of its connection, whose user sees the same groups."""
        names = {each["group_id"] for each in entries(answer["groups"])}
        missing = {
            group
            for later, group in self._with_members(outcome.step.exchange.connection)
            if later.sent_ns >= outcome.answered_ns
            and group not in names
            and self._has_joined(group, outcome.sent_ns)
            and not self._may_join(group, outcome.sent_ns, later.answered_ns)
        }
        for group in sorted(missing):
            note = "it has members later, and none has joined since"
            add(outcome, "groups", f"group {group}", "not listed", note)

    def _with_members(self, connection: int) -> Iterator[tuple[Outcome, str]]:
        for outcome, answer, _ in self._listed:
            for each in entries(answer["groups"]):
                is_own = outcome.step.exchange.connection == connection
                if is_own and each.get("group_state") in _WITH_MEMBERS:
                    yield outcome, each["group_id"]


def _check_beside_error(outcome: Outcome, path: str, described: Body, add: Add) -> None:
    for name in _ABSENT_BESIDE_ERRORS:
        value = described.get(name)
        if value:
            expected, answered = (0, value) if name in _EPOCHS else ("none", f"some {name}")
            add(outcome, f"{path}{name}", expected, answered, "beside an error")


def _check_state(outcome: Outcome, path: str, described: Body, name: str, add: Add) -> None:
    is_classic = outcome.step.exchange.api_key == ApiKey.DESCRIBE_GROUPS
    if described[name] == _DEAD and is_classic and outcome.api_version >= _DEAD_IS_ERROR:
        add(outcome, f"{path}error_code", "an error", 0, "the group is dead")
    if described[name]:
        return
    is_empty = not any(described.get(each) for each in _ABSENT_BESIDE_ERRORS)
    if is_empty:  # as beside an error
        add(outcome, f"{path}error_code", "an error", 0, "it has no state")
    else:
        add(outcome, f"{path}{name}", "a state", '""', "there is no error")


def _check_epochs(first: _GroupDescription, second: _GroupDescription, add: Add) -> None:
    for name in _RISING:
        before, after = first.body.get(name, 0), second.body.get(name, 0)
        if before > after:
            where = f"{first.path}{name}"
            add(first.outcome, where, f"at most {after}", before, "a later answer is lower")
