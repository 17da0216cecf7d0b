"""Maps ids, names, offsets and sessions of the capture to those of the target.

This module has only data and lookups. `answers` fills it during a run; `requests` and the
comparison read it. Keys are always the capture's, with names before `--rename`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from kdissect.codec.message import Message
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.fields import FieldKind
from kdissect.replay.model import ADMIN, ReplayPlan, Step, TranslateOptions
from kdissect.replay.translation.fetch_sessions import FetchSessions
from kdissect.replay.translation.groups import Groups
from kdissect.replay.translation.offsets import Log, OffsetMap
from kdissect.replay.translation.producers import Producers
from kdissect.replay.translation.share_sessions import ShareSessions
from kdissect.replay.translation.target_facts import ZERO_UUID, TargetFacts
from kdissect.replay.workload.messages import TopicNames, decoded

RENAME_KINDS = ("topic", "group", "transactional-id")


class IdMap:
    """The mapping from capture to target, as learnt from the answers so far."""

    def __init__(self, plan: ReplayPlan, options: TranslateOptions | None = None) -> None:
        self.options = options or TranslateOptions()
        self.plan = plan
        self.target = TargetFacts()
        self.offsets = OffsetMap(self.options.offsets)
        self.sessions = FetchSessions()
        self.share = ShareSessions()
        self.producers = Producers()
        self.groups = Groups()
        self.topic_ids: dict[UUID, UUID] = {}  # captured -> target, from answers
        self.opaque: dict[Any, Any] = {}  # tokens, instance ids and the like: captured -> target
        self.marked: set[Log] = set()  # with markers of captured transactions
        # (step, log) -> how much higher a Produce's base offset should be, by the batch before it
        self.shifts: dict[tuple[int, Log], int] = {}
        self.may_create = ADMIN in plan.options.allow
        self.captured_nodes = sorted(plan.workload.facts.brokers)
        self.names = TopicNames(plan.workload.facts)
        self.renames: dict[str, dict[str, str]] = {kind: {} for kind in RENAME_KINDS}
        for kind, old, new in self.options.renames:
            if kind not in self.renames:
                raise ValueError(f"rename: {kind!r} is none of {', '.join(RENAME_KINDS)}")
            if self.renames[kind].setdefault(old, new) != new:
                raise ValueError(f"rename: {kind} {old!r} has two new names")

    def broker(self, step: Step) -> tuple[str, int]:
        """The captured broker that a step went to; sessions are the brokers'."""
        return self.plan.workload.connections[step.connection].broker

    # -- names and ids -----------------------------------------------------------------------------

    def topic(self, name: str) -> str:
        return self.renames["topic"].get(name, name)

    def group(self, name: str) -> str:
        return self.renames["group"].get(name, name)

    def transactional_id(self, name: str) -> str:
        return self.renames["transactional-id"].get(name, name)

    @property
    def has_topic_renames(self) -> bool:
        return bool(self.renames["topic"])

    def renamed(self, kind: FieldKind, name: str) -> str:
        if kind is FieldKind.TOPIC:
            return self.topic(name)
        return self.group(name) if kind is FieldKind.GROUP else self.transactional_id(name)

    def topic_name(self, name: str, topic_id: UUID | None) -> str:
        """The capture's name of a topic that a captured message names or identifies."""
        return self.names.name(name, topic_id)

    def topic_id(self, captured: UUID) -> UUID | None:
        """The target's id of a topic, or None if neither an answer nor its name gives it."""
        found = self.topic_ids.get(captured)
        if found is None and captured in self.names:
            found = self.target.topic_ids.get(self.topic(self.names[captured]))
        if found is None and captured == ZERO_UUID:
            return captured
        return found

    def topic_key(self, topic: Mapping[str, Any], *, is_captured: bool) -> Any:
        """A key that is equal for the same topic in captured and answered messages.

        It is the target's name of the topic, or its id there if the name is unknown. So one message
        may have the name and the other the id.
        """
        name = topic.get("name") or topic.get("topic") or ""
        topic_id = topic.get("topic_id")
        if not is_captured:
            return self.target.topic_name(topic) or topic_id
        if name or topic_id is None:
            return self.topic(name)
        target_id = self.topic_id(topic_id)
        if target_id in self.target.names:
            return self.target.names[target_id]
        return target_id if target_id is not None else topic_id

    def bind_topic(self, captured: UUID | None, target: UUID | None) -> None:
        if captured and target and captured != ZERO_UUID and target != ZERO_UUID:
            self.topic_ids[captured] = target

    def leader_epoch(self, name: str, partition: int) -> int:
        """The target's leader epoch of a partition of a captured topic; -1 if unknown."""
        return self.target.leaders.get((self.topic(name), partition), (-1, -1))[1]

    def node(self, captured: int) -> int:
        return self.target.node_for(self.captured_nodes, captured)

    @property
    def has_several_brokers(self) -> bool:
        """Return whether the capture's cluster or the target has more than one."""
        return len(self.captured_nodes) > 1 or len(self.target.nodes) > 1

    def captured_topic_name(self, name: str) -> str:
        """The capture's name of one of the target's topics."""
        for old, new in self.renames["topic"].items():
            if new == name:
                return old
        return name

    def learn_coordinator(self, key_type: int, key: str, node_id: int) -> None:
        self.target.coordinators[key_type, key] = node_id

    # -- messages ----------------------------------------------------------------------------------

    def api_version(self, step: Step) -> int:
        exchange = step.exchange
        if not self.options.reencode or exchange.api_key == ApiKey.API_VERSIONS:
            return exchange.api_version
        known = self.target.ranges.get(exchange.api_key)
        if known is None:
            return exchange.api_version
        first, last = known
        ours = catalog.api(exchange.api_key).request.versions
        nearest = max(first, min(last, exchange.api_version))
        return nearest if nearest in ours else exchange.api_version

    def answer_of(self, step: Step, response: bytes) -> Message | None:
        """The decoded answer in the version that was sent; None if it cannot be decoded. It is
        shared: do not change it."""
        return decoded(response, "response", step.exchange.api_key, self.api_version(step))
