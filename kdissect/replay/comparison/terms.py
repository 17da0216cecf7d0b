"""Ids and names of one side in the vocabulary of the capture.

Messages of the capture and of a target use other ids for the same thing. `Terms` give both the same
word for it: the captured name of a topic instead of its id, the captured member and producer, and
an offset's position in the captured log. They are made after the run, when the `IdMap` has learnt
all that the answers tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple
from uuid import UUID

from kdissect.codec import message_codec
from kdissect.errors import DecodeError, EncodeError
from kdissect.protocol import catalog
from kdissect.replay.translation.id_map import ZERO_UUID, IdMap, Producer
from kdissect.replay.translation.offsets import Log
from kdissect.replay.workload.messages import entries, partitions

A_BROKER = "a broker"
# fields with the bytes of a consumer's protocol, by their names in messages of groups
_PROTOCOLS = {
    "assignment": "ConsumerProtocolAssignment",
    "member_assignment": "ConsumerProtocolAssignment",
    "metadata": "ConsumerProtocolSubscription",
    "member_metadata": "ConsumerProtocolSubscription",
}
_TOPIC, _GROUP, _BROKER, _TRANSACTIONAL_ID, _LOGGER, _GROUP_CONFIG = 2, 3, 4, 5, 8, 32
_CONFIG_TYPES = {_TOPIC: "topic", _BROKER: "broker", _LOGGER: "broker logger", 16: "client metrics",
                 _GROUP_CONFIG: "group"}  # fmt: skip
_NAMED_CONFIG = {_TOPIC: "topic", _GROUP_CONFIG: "group"}
_NAMED_ACL = {_TOPIC: "topic", _GROUP: "group", _TRANSACTIONAL_ID: "transactional-id"}
_ACL_TYPES = {_TOPIC: "topic", _GROUP: "group", 4: "cluster", _TRANSACTIONAL_ID: "transactional id",
              6: "delegation token", 7: "user"}  # fmt: skip


class Position(NamedTuple):
    """An offset of the capture: `position` counts in the captured log as the target's terms do, so
    that it may differ from the offset `shown` next to transaction markers and log starts."""

    position: int
    shown: int


def resource_word(number: int, *, is_acl: bool) -> str:
    """``topic`` for the type of a config's or an ACL's resource."""
    return (_ACL_TYPES if is_acl else _CONFIG_TYPES).get(number, f"type {number}")


class Terms:
    """The words of one side's messages for ids and names: equal for what is equal."""

    def __init__(self, ids: IdMap, *, is_target: bool) -> None:
        """Use `Terms.of_capture` or `Terms.of_target`."""
        self.ids = ids
        self._is_target = is_target
        self._names: dict[str, dict[str, str]] = {kind: {} for kind in ids.renames}
        self._topics: dict[UUID, str] = dict(ids.names)
        self._members: dict[tuple[str, str], str] = {}
        self._producers: dict[int, list[tuple[Producer, Producer]]] = defaultdict(list)
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
        for kind, renames in ids.renames.items():
            terms._names[kind] = {new: old for old, new in renames.items()}
        terms._topics = {
            **{target: ids.names.get(captured, str(captured))
               for captured, target in ids.topic_ids.items()},
            **{target: terms.topic(name) for target, name in ids.target.names.items()},
        }  # fmt: skip
        for (group, captured), member in ids.groups.members.items():
            terms._members.setdefault((group, member), captured)
        for one, other in ids.producers.targets.items():
            terms._producers[other.producer_id].append((one, other))
        terms._opaque = {(name, new): old for (name, old), new in ids.opaque.items()}
        for node in ids.captured_nodes:
            terms._brokers.setdefault(str(ids.node(node)), str(node))
        return terms

    def topic(self, name: str) -> str:
        return self._names["topic"].get(name, name)

    def topic_of(self, topic_id: UUID) -> str:
        """The name of a topic id, or the id as text; "" for none."""
        if topic_id == ZERO_UUID:
            return ""
        return self._topics.get(topic_id) or self.ids.names.get(topic_id, str(topic_id))

    def topic_in(self, topic: dict[str, Any]) -> str:
        """The name of a topic's struct; an unknown id as text, "" if it names none."""
        name = topic.get("name") or topic.get("topic")
        if name or topic.get("topic_id") is None:
            return self.topic(name or "")
        return self.topic_of(topic["topic_id"])

    def logs(self, body: dict[str, Any] | None) -> Iterator[tuple[Log, dict[str, Any]]]:
        """Each partition in a message about records or offsets, with its struct."""
        for topic, number, partition in partitions(body or {}):
            yield (self.topic_in(topic), number), partition

    def group(self, name: str) -> str:
        return self._names["group"].get(name, name)

    def transactional_id(self, name: str) -> str:
        return self._names["transactional-id"].get(name, name)

    def member(self, group: str, member_id: str) -> str:
        return self._members.get((self.group(group), member_id), member_id)

    def node(self, node: int) -> Any:
        is_known = node in self._nodes or (not self._nodes and node >= 0)
        return A_BROKER if is_known else node

    def offset(self, log: Log, offset: int) -> Position | int:
        """Its position in the captured log."""
        offsets = self.ids.offsets
        if self._is_target:
            return offsets.to_capture(log, offset)
        position = offsets.to_capture(log, offsets.to_target(log, offset))
        return offset if position == offset else Position(position, offset)

    def produced(self, step: int, log: Log, base_offset: int) -> int | None:
        """By the batches before this one; None for the first of the target's log."""
        if not self._is_target:
            return base_offset
        shift = self.ids.shifts.get((step, log))
        return None if shift is None else base_offset - shift

    def producer(self, producer_id: int, epoch: int) -> tuple[int, int]:
        """An epoch that no answer gave keeps its distance to the last one that an answer gave."""
        known = self._producers.get(producer_id)
        if not known:
            return producer_id, epoch
        for captured, target in known:
            if target.epoch == epoch:
                return captured.producer_id, captured.epoch
        captured, target = known[-1]
        return captured.producer_id, epoch if epoch < 0 else captured.epoch + epoch - target.epoch

    def opaque(self, name: str, value: Any) -> Any:
        """None if the value has no counterpart."""
        return self._opaque.get((name, value))

    def replicas(self, value: Any) -> Any:
        """A captured number of replicas as the target can have it."""
        count, text = len(self.ids.target.nodes), str(value)
        is_number = not self._is_target and text.isascii() and text.isdigit()
        return type(value)(count) if is_number and 0 < count < int(text) else value

    def resource(self, number: int, name: str, *, is_acl: bool) -> str:
        """The name of a config's or an ACL's resource: their types have different numbers."""
        kind = (_NAMED_ACL if is_acl else _NAMED_CONFIG).get(number)
        if kind is not None:
            return self._names[kind].get(name, name)
        is_broker = not is_acl and number in (_BROKER, _LOGGER)
        return self._brokers.get(name, name) if is_broker else name

    def protocol(self, name: str, data: bytes) -> bytes:
        """A consumer's subscription or assignment with the captured names of topics; other bytes
        stay as they are."""
        definition = catalog.definition(_PROTOCOLS[name])
        if not self._names["topic"]:
            return data
        try:
            format_version, pos = message_codec.read_int16(data, 0)
            version = min(format_version, definition.versions.last)
            values, pos = message_codec.decode(definition, version, data, pos)
            if "topics" in values:
                values["topics"] = [self.topic(each) for each in entries(values["topics"])]
            for holder in ("owned_partitions", "assigned_partitions"):
                for each in entries(values.get(holder)):
                    each["topic"] = self.topic(each["topic"])
            return data[:2] + message_codec.encode(definition, version, values) + data[pos:]
        except (DecodeError, EncodeError, ValueError):
            return data
