"""Finds wrong names in answers that were not final.

A change that is under way explains another number or a missing element. It does not explain

- an answer about other topics, partitions, groups or transactions than the request names, if the
  captured response is about just those;
- a group, a transactional id or a producer id that an answer has twice, and a name that a list has
  twice;
- one of these, a topic or a member of a group that the run does not know and that the final answer
  does not have.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple
from uuid import UUID

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.comparison.tree_diff import RequestNames
from kdissect.replay.model import Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.field_kinds import FieldKind, iter_fields
from kdissect.replay.workload.messages import MEMBER_HEARTBEATS, decoded

Names = dict[FieldKind, Counter[Hashable]]
TopicName = Callable[[str, UUID | None], str]

_KINDS = frozenset(
    {
        FieldKind.TOPIC, FieldKind.TOPIC_ID, FieldKind.PARTITION, FieldKind.GROUP,
        FieldKind.TRANSACTIONAL_ID, FieldKind.PRODUCER_ID, FieldKind.MEMBER,
    }
)  # fmt: skip
_REQUESTED = _KINDS - {FieldKind.TOPIC_ID, FieldKind.PRODUCER_ID, FieldKind.MEMBER}
_ONCE = (FieldKind.GROUP, FieldKind.TRANSACTIONAL_ID, FieldKind.PRODUCER_ID)
_OF_MEMBERS = MEMBER_HEARTBEATS | {ApiKey.JOIN_GROUP}
_NEW = (*_ONCE, FieldKind.TOPIC, FieldKind.MEMBER)  # names that only requests make


class WrongName(NamedTuple):
    """The field with the name, and two texts for people."""

    path: str
    expected: str
    answered: str


class AnswerNames:
    """Finds wrong names, by what a run has learnt."""

    def __init__(self, ids: IdMap, names: RequestNames, outcomes: Sequence[Outcome]) -> None:
        """outcomes: of the whole run, when `wrong` is called."""
        self._ids = ids
        self._requested = names
        self._outcomes = outcomes

    @cached_property
    def _members(self) -> dict[str, set[str]]:
        """The members that requests and answers of their own name, by the target's group."""
        members: dict[str, set[str]] = defaultdict(set)
        for outcome in self._outcomes:
            key, version = outcome.step.exchange.api_key, outcome.api_version
            if key not in _OF_MEMBERS:
                continue
            request = decoded(outcome.sent or b"", "request", key, version)
            if request is None:
                continue
            answers = (outcome.answer, *(each.answer for each in outcome.earlier))
            found = (decoded(each or b"", "response", key, version) for each in answers)
            for message in (request, *found):
                for field in () if message is None else iter_fields(message):
                    if field.kind is FieldKind.MEMBER:
                        members[request.body["group_id"]].update(filter(None, field.values))
        return members

    def wrong(
        self, captured: tuple[Message, Message], sent: Message, answer: Message, final: Message
    ) -> Iterator[WrongName]:
        """The wrong names of an answer to the request `sent`. captured: request and response."""
        request, response = (_names(each, self._ids.topic_name) for each in captured)
        wanted, answered = (_names(each, self._target_name) for each in (sent, answer))
        for kind in _REQUESTED:
            missing, other = wanted[kind] - answered[kind], answered[kind] - wanted[kind]
            is_about_request = response[kind] and request[kind] == response[kind]
            if is_about_request and (missing or other):
                yield WrongName(_path(kind), _texts(missing) or "no other", _texts(other) or "none")
        last = _names(final, self._target_name)
        for kind in _ONCE:
            for name, count in answered[kind].items():
                if count > max(response[kind].values(), default=1):
                    yield WrongName(_path(kind), "each once", f"{_text(name)}, {count} times")
        for kind in _NEW:
            for name in answered[kind].keys() - last[kind].keys():
                if not self._is_known(kind, name):
                    yield WrongName(_path(kind), "a known one", _text(name))
        for field in iter_fields(answer):
            if field.kind in _KINDS and len(set(field.values)) < len(field.values):
                yield WrongName(_path(field.kind), "each once", _texts(field.values))

    def _target_name(self, name: str, topic_id: UUID | None) -> str:
        return self._ids.target.topic_name({"name": name, "topic_id": topic_id})

    def _is_known(self, kind: FieldKind, name: Hashable) -> bool:
        if isinstance(name, tuple) and kind is FieldKind.PRODUCER_ID:
            return self._ids.producers.is_target(name[-1])
        if isinstance(name, tuple) and kind is FieldKind.MEMBER:
            members = self._members.get(name[0])
            return members is None or name[-1] in members
        if kind is FieldKind.TOPIC:
            if isinstance(name, tuple) or self._ids.target.has_topic(str(name)):
                return True
        return not self._requested.is_foreign(_path(kind), str(name))


def _names(message: Message, topic_name: TopicName) -> Names:
    """The names of each kind in a message, a topic by its name. A partition, a producer and a
    member have those around them in front."""
    names: Names = defaultdict(Counter)
    for field in iter_fields(message):
        kind, around = field.kind, field.around
        if kind not in _KINDS or (kind is FieldKind.TOPIC_ID and around.topic):
            continue
        topic = topic_name(around.topic, around.topic_id)
        for value in field.values:
            if kind is FieldKind.PARTITION:
                names[kind][topic, value] += 1
            elif kind is FieldKind.PRODUCER_ID:
                names[kind][topic, around.partition, value] += 1
            elif kind is FieldKind.MEMBER:
                names[kind][around.group, value] += 1
            elif kind is FieldKind.TOPIC_ID:
                names[FieldKind.TOPIC][topic_name("", value) or ("", value)] += 1
            else:
                names[kind][value] += 1
    return names


def _path(kind: FieldKind) -> str:
    return kind.name.lower()


def _texts(names: Iterable[Hashable]) -> str:
    return ", ".join(sorted(map(_text, names)))


def _text(name: Hashable) -> str:
    """A name with what is around it, without the unknown."""
    parts = name if isinstance(name, tuple) else (name,)
    return " ".join(str(part) for part in parts if part not in ("", -1)) or '""'
