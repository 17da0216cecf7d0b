"""Ids and names of one side in the vocabulary of the capture.

Messages of the capture and of a target use other ids for the same thing. `Terms` give both the same
word for it: the captured name of a topic instead of its id, the captured member and producer, and
an offset's position in the captured log. They are made after the run, when the `IdMap` has learnt
all that the answers tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kdissect.replay.fields import FieldContext, FieldKind, told
from kdissect.replay.model import ABSENT, Log, Step
from kdissect.replay.translation.groups import with_topics
from kdissect.replay.translation.id_map import IdMap, Producer, Producers, limited, resource_word
from kdissect.replay.workload.messages import Body, TopicNames

A_BROKER = "a broker"
# Kinds of values that are the cluster's choice
CHOSEN = frozenset(
    {
        FieldKind.GENERATION,
        FieldKind.LEADER_EPOCH,
        FieldKind.COUNTER,
        FieldKind.TIME,
        FieldKind.TEXT,
    }
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A value that the cluster chooses: only whether it is set is compared."""

    value: Any


def plain(value: Any) -> Any:
    """The value that stands in a message, to show it."""
    return value.value if isinstance(value, Chosen) else value


def is_set(value: Any) -> bool:
    return plain(value) not in (None, "", b"", -1, ABSENT)


class Terms:
    """The words of one side's messages for ids and names: equal for what is equal. topics: their
    names."""

    def __init__(self, ids: IdMap, *, is_target: bool) -> None:
        """Use `Terms.of_capture` or `Terms.of_target`."""
        self.ids = ids
        self._is_target = is_target
        self.topics: TopicNames = ids.target_topics if is_target else ids.names
        self._names: dict[tuple[str, str], str] = ids.old_names if is_target else {}
        self._members: dict[tuple[str, str], str] = {}
        self._producers = Producers()
        self._opaque = {key: key[1] for key in ids.opaque}
        self._nodes = frozenset(ids.target.nodes if is_target else ids.captured_nodes)
        self._brokers: dict[str, str] = {}

    @classmethod
    def of_capture(cls, ids: IdMap) -> Terms:
        """The capture's own ids. Two of them that are one thing at the target are one here."""
        terms, first = cls(ids, is_target=False), dict[tuple[str, str], str]()
        for (group, captured), target in ids.groups.members.items():
            terms._members[group, captured] = first.setdefault((group, target), captured)
        return terms

    @classmethod
    def of_target(cls, ids: IdMap) -> Terms:
        """The captured ids of those in a target's answers."""
        terms = cls(ids, is_target=True)
        terms._members |= ids.groups.earlier
        for (group, captured), member in ids.groups.members.items():
            terms._members.setdefault((group, member), captured)
        for captured_producer, producer in ids.producers.targets.items():
            terms._producers.learn(producer, captured_producer)
        terms._opaque = {(name, new): old for (name, old), new in ids.opaque.items()}
        for node in ids.captured_nodes:
            terms._brokers.setdefault(str(ids.node(node)), str(node))
        return terms

    def topic(self, name: str) -> str:
        return self.topics.name(name, None)

    def logs(self, body: dict[str, Any] | None) -> Iterator[tuple[Log, dict[str, Any]]]:
        """Each partition in a message about records or offsets, with its struct."""
        return self.topics.logs(body or {})

    def group(self, name: str) -> str:
        return self._names.get(("group", name), name)

    def transactional_id(self, name: str) -> str:
        return self._names.get(("transactional-id", name), name)

    def _position(self, step: Step, kind: FieldKind, offset: int, around: FieldContext) -> Any:
        """Where an offset is in the captured log. While another request writes, and next to
        transaction markers, that is no matter: `logs` compares it with the target's log. One of
        the capture counts as the target's do: next to markers and log starts the numbers differ."""
        log = self.topics.name(around.topic, around.topic_id), around.partition
        is_marked, offsets = log in self.ids.marked, self.ids.offsets
        if kind is FieldKind.PRODUCED_OFFSET:  # by the batches before it; the first has none
            shift = self.ids.shifts.get((step.number, log)) if self._is_target else 0
            return Chosen(offset) if is_marked or shift is None else offset - shift
        if step.is_racing or (is_marked and kind is FieldKind.OFFSET):
            return Chosen(offset)
        there = offset if self._is_target else offsets.to_target(log, offset)
        return offsets.to_capture(log, there)

    def word(
        self,
        step: Step,
        kind: FieldKind | None,
        name: str,
        value: Any,
        holder: Body,
        around: FieldContext,
    ) -> Any:
        """The word for a value in a field of a struct, by the kind of the field."""
        if kind is None or kind is FieldKind.EXACT:
            return value
        if kind in CHOSEN:
            return Chosen(value)
        if isinstance(value, list):
            found = [self.word(step, kind, name, each, holder, around) for each in value]
            return found if kind is FieldKind.OFFSET else sorted(found, key=_order)
        if value == 0 and holder.get("error_code"):
            return value  # Kafka's default, and no id: the struct only says what is wrong
        match kind:
            case FieldKind.OFFSET | FieldKind.STORED_OFFSET | FieldKind.PRODUCED_OFFSET:
                return value if value < 0 else self._position(step, kind, value, around)
            case FieldKind.TOPIC:
                return self.topic(value)
            case FieldKind.TOPIC_ID:
                topic = self.topics.name("", value)
                return Chosen(value) if topic == str(value) else topic  # its name is unknown
            case FieldKind.GROUP:
                return self.group(value)
            case FieldKind.TRANSACTIONAL_ID:
                return self.transactional_id(value)
            case FieldKind.COORDINATOR:
                group = self.group(value)
                return group if group != value else self.transactional_id(value)
            case FieldKind.MEMBER:
                return self._members.get((self.group(around.group), value), value)
            case FieldKind.NODE:
                is_known = value in self._nodes or (not self._nodes and value >= 0)
                return A_BROKER if is_known else value
            case FieldKind.PRODUCER_ID:
                epoch = holder.get(name.removesuffix("_id") + "_epoch", -1)
                return value if value < 0 else self._producer(value, epoch).producer_id
            case FieldKind.PRODUCER_EPOCH:
                number = holder.get(name.removesuffix("_epoch") + "_id", -1)
                return value if value < 0 or number < 0 else self._producer(number, value).epoch
            case FieldKind.OPAQUE:
                return self._opaque.get((name, value), Chosen(value))
            case FieldKind.REPLICAS if not self._is_target:
                return limited(value, len(self.ids.target.nodes))
            case FieldKind.RESOURCE:
                is_acl = "principal" in holder or "acls" in holder
                word = resource_word(holder.get("resource_type", 0), is_acl=is_acl)
                if word.startswith("broker"):
                    return self._brokers.get(value, value)
                return self._names.get((word.replace(" ", "-"), value), value)
            case FieldKind.PROTOCOL if self._names:
                what = "Assignment" if "assignment" in name else "Subscription"
                return with_topics(value, what, self.topic)
        return value

    def _producer(self, producer_id: int, epoch: int) -> Producer:
        producer = Producer(producer_id, epoch)
        return self._producers.target(producer) or producer


def _order(value: Any) -> tuple[int, str]:
    """Numbers by size, everything else as text."""
    return (value, "") if isinstance(value, int) else (0, told(value))
