"""Finds wrong names in answers that were not final.

A change that is under way explains another number or a missing element. It does not explain

- an answer about other topics, partitions, groups or transactions than the request names, if the
  captured response is about just those;
- a group, a transactional id or a producer id that an answer has twice;
- one that the run does not know and that the final answer does not have.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple
from uuid import UUID

from kdissect.codec.message import Message
from kdissect.replay.comparison.tree_diff import RequestNames
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.field_kinds import FieldKind, iter_fields

Names = dict[FieldKind, Counter[Hashable]]
TopicName = Callable[[str, UUID | None], str]

_KINDS = frozenset(
    {
        FieldKind.TOPIC, FieldKind.TOPIC_ID, FieldKind.PARTITION, FieldKind.GROUP,
        FieldKind.TRANSACTIONAL_ID, FieldKind.PRODUCER_ID,
    }
)  # fmt: skip
_REQUESTED = _KINDS - {FieldKind.TOPIC_ID, FieldKind.PRODUCER_ID}
_ONCE = (FieldKind.GROUP, FieldKind.TRANSACTIONAL_ID, FieldKind.PRODUCER_ID)


class WrongName(NamedTuple):
    """The field with the name, and two texts for people."""

    path: str
    expected: str
    answered: str


class AnswerNames:
    """Finds wrong names, by what a run has learnt."""

    def __init__(self, ids: IdMap, names: RequestNames) -> None:
        self._ids = ids
        self._requested = names

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
                if name not in last[kind] and not self._is_known(kind, name):
                    yield WrongName(_path(kind), "a known one", _text(name))

    def _target_name(self, name: str, topic_id: UUID | None) -> str:
        return self._ids.target.topic_name({"name": name, "topic_id": topic_id})

    def _is_known(self, kind: FieldKind, name: Hashable) -> bool:
        if kind is FieldKind.PRODUCER_ID:
            return isinstance(name, tuple) and self._ids.producers.is_target(name[-1])
        return not self._requested.is_foreign(_path(kind), str(name))


def _names(message: Message, topic_name: TopicName) -> Names:
    """The names of each kind in a message, a topic by its name. A partition and a producer have
    those around them in front."""
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
            elif kind is FieldKind.TOPIC_ID:
                names[FieldKind.TOPIC][topic_name("", value)] += 1
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
