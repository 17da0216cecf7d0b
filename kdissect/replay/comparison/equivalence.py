"""Decides if two values are the captured and the target's form of one id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.fields import FieldContext, FieldKind
from kdissect.replay.model import Step
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.producers import Producer
from kdissect.replay.translation.requests import acl_resource, config_resource, renamed_protocol
from kdissect.replay.translation.target_facts import ZERO_UUID

Body = dict[str, Any]


# fields with the bytes of a consumer's protocol, by their names in messages of groups
_PROTOCOLS = {
    "assignment": "ConsumerProtocolAssignment",
    "member_assignment": "ConsumerProtocolAssignment",
    "metadata": "ConsumerProtocolSubscription",
    "member_metadata": "ConsumerProtocolSubscription",
}


class Meaning:
    """Answers by what an `IdMap` has learnt."""

    def __init__(self, ids: IdMap) -> None:
        self.ids = ids
        self._checks: dict[str, Callable[[Any, Any, FieldContext, Body], bool]] = {
            "topic_id": self._topic_id,
            "producer_id": self._producer_id,
            "producer_epoch": self._producer_epoch,
            "member": self._member,
            "generation": self._generation,
            "offset": self._offset,
            "leader_epoch": self._leader_epoch,
            "node": self._node,
            "replication_factor": self._replication_factor,
        }
        self._kinds = {
            "topic_id": {FieldKind.TOPIC_ID},
            "name": {FieldKind.TOPIC, FieldKind.GROUP, FieldKind.TRANSACTIONAL_ID},
            "producer_id": {FieldKind.PRODUCER_ID},
            "producer_epoch": {FieldKind.PRODUCER_EPOCH},
            "member": {FieldKind.MEMBER},
            "generation": {FieldKind.GENERATION},
            "offset": {FieldKind.OFFSET},
            "leader_epoch": {FieldKind.LEADER_EPOCH},
            "node": {FieldKind.NODE},
        }

    @staticmethod
    def is_noted(translated_as: str) -> bool:
        """Return whether a difference of this kind is worth a line, and the verdict tolerated."""
        return translated_as in ("marked_log", "racing")

    def same(
        self,
        translated_as: str,
        kind: FieldKind | None,
        c: Any,
        a: Any,
        around: FieldContext,
        holder: Body,
        step: Step,
        path: str,
    ) -> bool:
        """Return whether `a` is what the target calls the captured `c`. holder: the captured
        struct."""
        wanted = self._kinds.get(translated_as)
        name = path.rpartition(".")[2]
        if translated_as == "name" and name in ("resource_name", "key") and c is not None:
            return bool(self.key(kind, c, holder, around, name) == a)
        if translated_as == "name" and isinstance(c, bytes) and isinstance(a, bytes):
            return self._renamed_protocol(name, c) == a
        if wanted is not None and kind not in wanted:
            return False
        if c is None or a is None or isinstance(c, (list, dict)):
            return False
        if translated_as == "name":
            assert kind is not None
            return bool(self.ids.renamed(kind, c) == a)
        if translated_as == "produced_offset":
            return self._produced_offset(c, a, around, step)
        if translated_as == "marked_log":
            log = self._log(around)
            return kind is FieldKind.OFFSET and self.ids.is_marked(log) and c >= 0 and a >= 0
        if translated_as == "offset" and step.exchange.api_key == ApiKey.PRODUCE:
            if path.endswith("base_offset"):
                return False  # that is where offsets are learnt
        if translated_as == "append_time":
            return self._looked_up(name, a, around, holder)
        if translated_as == "racing":
            if path.endswith("base_offset"):
                return False  # a Produce races DeleteRecords, which leaves the log end
            return kind is FieldKind.OFFSET and step.is_racing and c >= 0 and a >= 0
        if translated_as == "opaque":
            return self.ids.opaque.get((name, c), ZERO_UUID) == a
        return self._checks[translated_as](c, a, around, holder)

    def _looked_up(self, name: str, a: int, around: FieldContext, holder: Body) -> bool:
        """Return whether a lookup by time may find this. holder: what it found in the capture.

        The target has appended all records of the run later than the captured broker did, so that
        it finds the same record, or an earlier one.
        """
        log = self._log(around)
        topic = self.ids.plan.workload.facts.topics.get(log[0])
        if topic is None or not topic.has_append_times or a < 0:
            return False
        if holder["offset"] < 0:
            return True
        is_lookup = holder["timestamp"] >= 0 and name == "offset"
        expected = self.ids.offsets.to_target(log, holder["offset"])
        return is_lookup and expected is not None and a <= expected

    def _renamed_protocol(self, name: str, data: bytes) -> bytes | None:
        """A consumer's subscription or assignment with the target's names of topics."""
        definition = _PROTOCOLS.get(name)
        if definition is None or not self.ids.has_topic_renames:
            return None
        return renamed_protocol(self.ids, definition, data)

    def key(
        self, kind: FieldKind | None, value: Any, holder: Body, around: FieldContext, name: str
    ) -> Any:
        """The target's value for a captured one, to find the matching element of an array.

        holder: the captured struct that has the value in its field `name`.
        """
        if value is None or isinstance(value, (list, dict)):
            return value
        if name == "resource_name":
            return self._resource(value, holder)
        if name == "key":
            return self._renamed_anyhow(value)
        if kind is None:
            return self.ids.opaque.get((name, value), value)
        if kind in (FieldKind.TOPIC, FieldKind.GROUP, FieldKind.TRANSACTIONAL_ID):
            return self.ids.renamed(kind, value)
        if kind is FieldKind.TOPIC_ID:
            found = self.ids.topic_id(value)
            return value if found is None else found
        if kind is FieldKind.MEMBER:
            return self.ids.groups.member(around.group, value)
        if kind is FieldKind.PRODUCER_ID:
            found_id = self.ids.producers.target_id(value)
            return value if found_id is None else found_id
        if kind is FieldKind.NODE:
            return self.ids.node(value)
        if kind is FieldKind.OFFSET:
            return self.ids.offsets.to_target(self._log(around), value)
        return value

    def _resource(self, name: str, holder: Body) -> str:
        """A config's or an ACL's resource: their types have different numbers."""
        number = holder.get("resource_type", 0)
        if "acls" in holder or "principal" in holder:
            return acl_resource(self.ids, number, name) or name
        return config_resource(self.ids, number, name)

    def _renamed_anyhow(self, key: str) -> str:
        """The key of a coordinator: a group, or a transactional id."""
        return self.ids.group(key) if self.ids.group(key) != key else self.ids.transactional_id(key)

    def captured_topic(self, name: str, topic_id: UUID | None) -> tuple[str, UUID | None]:
        """The capture's name and id of a topic that an answer names; the run may have deleted it
        since."""
        if topic_id is not None and topic_id != ZERO_UUID:
            target_name = self.ids.target.names.get(topic_id)
            for captured, captured_name in self.ids.names.items():
                is_named = target_name is not None and self.ids.topic(captured_name) == target_name
                if is_named or self.ids.topic_id(captured) == topic_id:
                    return captured_name, captured
        return self.ids.captured_topic_name(name), topic_id

    def _log(self, around: FieldContext) -> tuple[str, int]:
        return self.ids.topic_name(around.topic, around.topic_id), around.partition

    def _topic_id(self, c: UUID, a: UUID, around: FieldContext, holder: Body) -> bool:
        found = self.ids.topic_id(c)
        if found is None:
            return c != ZERO_UUID and a != ZERO_UUID  # its name is unknown
        return found == a

    def _producer_id(self, c: int, a: int, around: FieldContext, holder: Body) -> bool:
        if c < 0 or a < 0:
            return c == a
        found = self.ids.producers.target_id(c)
        return found is None or found == a

    def _producer_epoch(self, c: int, a: int, around: FieldContext, holder: Body) -> bool:
        if c < 0 or a < 0:
            return c == a
        for name, value in holder.items():
            if name.endswith("producer_id"):
                found = self.ids.producers.target(Producer(value, c))
                return found is None or found.epoch == a
        return False

    def _member(self, c: str, a: str, around: FieldContext, holder: Body) -> bool:
        if not c or not a:
            return c == a
        return not self.ids.groups.knows_member(around.group, c) or (
            self.ids.groups.member(around.group, c) == a
        )

    def _generation(self, c: int, a: int, around: FieldContext, holder: Body) -> bool:
        member = holder.get("member_id") or ""
        return self.ids.groups.generation(around.group, member, c) == a

    def _offset(self, c: int, a: int, around: FieldContext, holder: Body) -> bool:
        return self.ids.offsets.to_target(self._log(around), c) == a

    def _produced_offset(self, c: int, a: int, around: FieldContext, step: Step) -> bool:
        if c < 0 or a < 0:
            return c == a
        expected = self.ids.expected_offset(step, self._log(around))
        return expected is None or expected == a

    def _leader_epoch(self, c: int, a: int, around: FieldContext, holder: Body) -> bool:
        if c < 0 or a < 0:
            return c == a
        name, partition = self._log(around)
        known = self.ids.leader_epoch(name, partition)
        return known < 0 or known == a

    def _node(self, c: int, a: int, around: FieldContext, holder: Body) -> bool:
        is_none = bool(self.ids.captured_nodes) and c not in self.ids.captured_nodes
        if c < 0 or a < 0 or is_none:
            return c == a
        return not self.ids.target.nodes or a in self.ids.target.nodes

    def _replication_factor(self, c: Any, a: Any, around: FieldContext, holder: Body) -> bool:
        """Return whether the target has fewer nodes than the captured factor, and `a` is their
        number."""
        count = len(self.ids.target.nodes)
        text = str(c)
        return text.isascii() and text.isdigit() and 0 < count < int(text) and str(a) == str(count)
