"""Ids and names of one side in the vocabulary of the capture.

Messages of the capture and of a target use other ids for the same thing. `CapturedTerms` and
`TargetTerms` give both the same word for it: the captured name of a topic instead of its id, the
captured member and producer, and an offset's position in the captured log. They are made after the
run, when the `IdMap` has learnt all that the answers tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from uuid import UUID

from kdissect.codec import message_codec
from kdissect.errors import DecodeError, EncodeError
from kdissect.protocol import catalog
from kdissect.replay.translation.id_map import ZERO_UUID, IdMap, Producer
from kdissect.replay.translation.offsets import Log
from kdissect.replay.workload.messages import entries

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
_ACL_TYPES = {_TOPIC: "topic", _GROUP: "group", 4: "cluster", _TRANSACTIONAL_ID: "transactional id",
              6: "delegation token", 7: "user"}  # fmt: skip


class Position(NamedTuple):
    """An offset of the capture: `position` counts in the captured log as `TargetTerms` does, so
    that it may differ from the offset `shown` next to transaction markers and log starts."""

    position: int
    shown: int


def resource_word(number: int, *, is_acl: bool) -> str:
    """``topic`` for the type of a config's or an ACL's resource."""
    return (_ACL_TYPES if is_acl else _CONFIG_TYPES).get(number, f"type {number}")


class CapturedTerms:
    """The capture's own ids. Two of them that are one thing at the target are one thing here."""

    def __init__(self, ids: IdMap) -> None:
        self.ids = ids
        self._members = ids.groups.members
        self._first: dict[tuple[str, str], str] = {}
        for (group, captured), target in self._members.items():
            self._first.setdefault((group, target), captured)

    def topic(self, name: str) -> str:
        return name

    def topic_of(self, topic_id: UUID) -> str:
        """The name of a topic id; "" for none."""
        return "" if topic_id == ZERO_UUID else self.ids.names.get(topic_id, str(topic_id))

    def group(self, name: str) -> str:
        return name

    def transactional_id(self, name: str) -> str:
        return name

    def member(self, group: str, member_id: str) -> str:
        target = self._members.get((group, member_id))
        return member_id if target is None else self._first[group, target]

    def node(self, node: int) -> Any:
        known = self.ids.captured_nodes
        return A_BROKER if node in known or (not known and node >= 0) else node

    def offset(self, log: Log, offset: int) -> Position | int:
        offsets = self.ids.offsets
        position = offsets.to_capture(log, offsets.to_target(log, offset))
        return offset if position == offset else Position(position, offset)

    def produced(self, step: int, log: Log, base_offset: int) -> int | None:
        return base_offset

    def producer(self, producer_id: int, epoch: int) -> tuple[int, int]:
        return producer_id, epoch

    def opaque(self, name: str, value: Any) -> Any:
        """None if the value has no counterpart."""
        return value if (name, value) in self.ids.opaque else None

    def replicas(self, value: Any) -> Any:
        """A number of replicas as the target can have it."""
        count, text = len(self.ids.target.nodes), str(value)
        if text.isascii() and text.isdigit() and 0 < count < int(text):
            return type(value)(count)
        return value

    def resource(self, number: int, name: str, *, is_acl: bool) -> str:
        return name

    def protocol(self, name: str, data: bytes) -> bytes:
        return data


class TargetTerms:
    """The ids of a target's answers."""

    def __init__(self, ids: IdMap) -> None:
        self.ids = ids
        self._old = {
            kind: {new: old for old, new in renames.items()}
            for kind, renames in ids.renames.items()
        }
        self._topics = {target: captured for captured, target in ids.topic_ids.items()}
        self._members: dict[tuple[str, str], str] = {}
        for (group, captured), target in ids.groups.members.items():
            self._members.setdefault((group, target), captured)
        self._producers: dict[int, list[tuple[Producer, Producer]]] = {}
        for captured_one, target_one in ids.producers.targets.items():
            self._producers.setdefault(target_one.producer_id, []).append(
                (captured_one, target_one)
            )
        self._opaque = {(name, new): old for (name, old), new in ids.opaque.items()}
        self._nodes: dict[int, int] = {}
        for node in ids.captured_nodes:
            self._nodes.setdefault(ids.node(node), node)

    def topic(self, name: str) -> str:
        return self._old["topic"].get(name, name)

    def topic_of(self, topic_id: UUID) -> str:
        if topic_id == ZERO_UUID:
            return ""
        name = self.ids.target.names.get(topic_id)
        if name is not None:
            return self.topic(name)
        captured = self._topics.get(topic_id, topic_id)
        return self.ids.names.get(captured, str(captured))

    def group(self, name: str) -> str:
        return self._old["group"].get(name, name)

    def transactional_id(self, name: str) -> str:
        return self._old["transactional-id"].get(name, name)

    def member(self, group: str, member_id: str) -> str:
        return self._members.get((self.group(group), member_id), member_id)

    def node(self, node: int) -> Any:
        known = self.ids.target.nodes
        return A_BROKER if node in known or (not known and node >= 0) else node

    def offset(self, log: Log, offset: int) -> int:
        return self.ids.offsets.to_capture(log, offset)

    def produced(self, step: int, log: Log, base_offset: int) -> int | None:
        """By the batches before this one; None for the first of a log."""
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
        return self._opaque.get((name, value))

    def replicas(self, value: Any) -> Any:
        return value

    def resource(self, number: int, name: str, *, is_acl: bool) -> str:
        """The name of a config's or an ACL's resource: their types have different numbers."""
        rename: Mapping[int, Callable[[str], str]] = (
            {_TOPIC: self.topic, _GROUP: self.group, _TRANSACTIONAL_ID: self.transactional_id}
            if is_acl
            else {_TOPIC: self.topic, _GROUP_CONFIG: self.group}
        )
        if number in rename:
            return rename[number](name)
        if not is_acl and number in (_BROKER, _LOGGER) and name.isascii() and name.isdigit():
            return str(self._nodes.get(int(name), int(name)))
        return name

    def protocol(self, name: str, data: bytes) -> bytes:
        """A consumer's subscription or assignment with the captured names of topics; other bytes
        stay as they are."""
        definition = catalog.definition(_PROTOCOLS[name])
        if not self._old["topic"]:
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


Terms = CapturedTerms | TargetTerms
