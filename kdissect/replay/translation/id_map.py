"""What a run knows of its target: the ids that it has there for those of the capture.

This module has only data and lookups. `answers` fills it during a run; `requests` and the
comparison read it. Keys are always the capture's, with names before `--rename`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from uuid import UUID

from kdissect.codec.message import Message
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import ADMIN, Exchange, ReplayPlan, Step, TranslateOptions
from kdissect.replay.translation.groups import Groups
from kdissect.replay.translation.offsets import Log, OffsetMap
from kdissect.replay.translation.sessions import FetchSessions, ShareSessions
from kdissect.replay.workload.messages import CapturedTopics, TopicNames, bodies, decoded, entries

RENAME_KINDS = ("topic", "group", "transactional-id")
# Types of the resources of ACLs and of configs (ResourceType and ConfigResource.Type of Kafka's
# clients).
_ACL_RESOURCES = {2: "topic", 3: "group", 4: "cluster", 5: "transactional id",
                  6: "delegation token", 7: "user"}  # fmt: skip
_CONFIG_RESOURCES = {2: "topic", 4: "broker", 8: "broker logger", 16: "client metrics",
                     32: "group"}  # fmt: skip
ZERO_UUID = UUID(int=0)
_SEQUENCES = 1 << 31  # they wrap to 0


class IdMap:
    """The mapping from capture to target, as learnt from the answers so far.

    kept: (kind, the target's name) of topics and groups that it had before the run, and that no
    request may delete.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        options: TranslateOptions | None = None,
        kept: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.options = options or TranslateOptions()
        self.plan = plan
        self.kept = frozenset(kept)
        self.target = TargetCluster()
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
        self.names = CapturedTopics(plan.workload.facts)
        self.target_topics = TargetTopics(self)
        self.renames: dict[str, dict[str, str]] = {kind: {} for kind in RENAME_KINDS}
        for (kind, old), new in self.options.renames.items():
            self.renames[kind][old] = new
        for step in plan.steps:
            if step.skipped is None:
                self._add_captured(step.exchange)

    def _add_captured(self, exchange: Exchange) -> None:
        """Take from a captured exchange the values that answers are compared with: log start
        offsets, fetched offsets, assignments, and partitions in transactions."""
        if exchange.api_key not in (ApiKey.SYNC_GROUP, ApiKey.FETCH, ApiKey.PRODUCE):
            return
        asked, captured = bodies(exchange)
        if exchange.api_key == ApiKey.SYNC_GROUP:
            self.groups.add_captured(asked)
            return
        for log, entry in self.names.logs(captured):
            self.offsets.add_captured(log, start=entry.get("log_start_offset", -1))
        if exchange.api_key == ApiKey.FETCH:
            for log, entry in self.names.logs(asked):
                self.offsets.add_captured(log, fetched=entry["fetch_offset"])
        elif asked.get("transactional_id") is not None:
            self.marked.update(log for log, _ in self.names.logs(asked))

    def broker(self, step: Step) -> tuple[str, int]:
        """The captured broker that a step went to; sessions are the brokers'."""
        return self.plan.workload.connections[step.connection].broker

    def topic(self, name: str) -> str:
        return self.renames["topic"].get(name, name)

    def name(self, resource: str, captured: str) -> str:
        """The target's name of a "topic", a "group" or a transaction ("txn")."""
        kind = "transactional-id" if resource == "txn" else resource
        return self.renames[kind].get(captured, captured)

    def captured_topic_name(self, name: str) -> str:
        """The capture's name of one of the target's topics."""
        renamed = (old for old, new in self.renames["topic"].items() if new == name)
        return next(renamed, name)

    def topic_id(self, captured: UUID) -> UUID | None:
        """The target's id of a topic, or None if neither an answer nor its name gives it."""
        if captured in self.topic_ids or captured == ZERO_UUID:
            return self.topic_ids.get(captured, captured)
        name = self.names.get(captured)
        return None if name is None else self.target.topic_ids.get(self.topic(name))

    def captured_topic_id(self, target: UUID) -> UUID:
        """The capture's id of a topic by the target's; an unknown one stays."""
        return next((mine for mine, other in self.topic_ids.items() if other == target), target)

    def node(self, captured: int) -> int:
        """A node of the target for one of the capture's: itself where it is there, else by order,
        around the target's nodes. A number that is no node of the capture stays one that is none.
        """
        nodes = self.target.nodes
        if captured not in self.captured_nodes or captured in nodes or not nodes:
            return captured
        return sorted(nodes)[self.captured_nodes.index(captured) % len(nodes)]

    @property
    def has_several_brokers(self) -> bool:
        """Return whether the capture's cluster or the target has more than one."""
        return len(self.captured_nodes) > 1 or len(self.target.nodes) > 1

    def api_version(self, step: Step) -> int:
        """The version in which a request is sent."""
        exchange = step.exchange
        known = self.target.ranges.get(exchange.api_key)
        if not self.options.reencode or exchange.api_key == ApiKey.API_VERSIONS or known is None:
            return exchange.api_version
        first, last = known
        ours = catalog.api(exchange.api_key).request.versions
        nearest = max(first, min(last, exchange.api_version))
        return nearest if nearest in ours else exchange.api_version

    def answer_of(self, step: Step, response: bytes) -> Message | None:
        """The decoded answer in the version that was sent; None if it cannot be decoded. It is
        shared: do not change it."""
        return decoded(response, "response", step.exchange.api_key, self.api_version(step))


class TargetTopics(TopicNames):
    """The captured names of topics in the target's messages."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids

    def name(self, name: str | None, topic_id: UUID | None) -> str:
        ids = self._ids
        if not name and topic_id is not None and topic_id not in ids.target.names:
            return ids.names.name("", ids.captured_topic_id(topic_id))
        return ids.captured_topic_name(name or ids.target.names.get(topic_id, ""))


class TargetCluster:
    """API versions, brokers, topics with ids and leaders, coordinators, as the target tells them.

    Names are the target's. leaders: (topic, partition) -> (node id, leader epoch). coordinators:
    (key type of FindCoordinator, group or transactional id) -> node id.
    """

    def __init__(self) -> None:
        self.ranges: dict[int, tuple[int, int]] = {}
        self.nodes: dict[int, tuple[str, int]] = {}
        self.topic_ids: dict[str, UUID] = {}
        self.names: dict[UUID, str] = {}  # of topics that are gone, too
        self.leaders: dict[tuple[str, int], tuple[int, int]] = {}
        self.missing: set[str] = set()  # topics that the target said it has not
        self.being_made: set[str] = set()  # topics that Metadata requests make
        self.coordinators: dict[tuple[int, str], int] = {}

    def topic_name(self, topic: Mapping[str, Any]) -> str:
        """The name of a topic's entry in a message of the target; "" if only an unknown id is
        there."""
        name = topic.get("name") or topic.get("topic") or topic.get("topic_name")
        topic_id = topic.get("topic_id")
        if name or topic_id is None:
            return str(name or "")
        return self.names.get(topic_id, "")

    def learn_metadata(self, body: Mapping[str, Any]) -> None:
        """A Metadata or DescribeTopicPartitions response of the target."""
        for broker in entries(body.get("brokers")):
            self.nodes[broker["node_id"]] = broker["host"], broker["port"]
        for topic in entries(body.get("topics")):
            name = topic.get("name")
            if not name:
                continue
            if topic["error_code"] != 0:
                self.forget_topic(name)
                continue
            self._found(name, topic.get("topic_id"))
            for partition in entries(topic["partitions"]):
                if partition["leader_id"] >= 0:
                    leader = partition["leader_id"], partition.get("leader_epoch", -1)
                    self.leaders[name, partition["partition_index"]] = leader

    def _found(self, name: str, topic_id: UUID | None) -> None:
        self.being_made.discard(name)
        self.missing.discard(name)
        if topic_id is not None and topic_id != ZERO_UUID:
            self.topic_ids[name] = topic_id
            self.names[topic_id] = name

    def forget_topic(self, name: str) -> None:
        self.missing.add(name)
        self.topic_ids.pop(name, None)
        for log in [log for log in self.leaders if log[0] == name]:
            del self.leaders[log]

    def created(self, name: str, topic_id: UUID | None) -> None:
        """A CreateTopics was answered: the id is known, the leaders are not yet."""
        self.forget_topic(name)
        self._found(name, topic_id)

    def has_topic(self, name: str) -> bool:
        return name in self.topic_ids or (name, 0) in self.leaders

    def is_known(self, name: str) -> bool:
        """Return whether a leader of the topic is known, or that it is not there."""
        return name in self.missing or any((name, number) in self.leaders for number in (0, 1))


def resource_word(number: int, *, is_acl: bool) -> str:
    """``topic`` for the type of a config's or an ACL's resource."""
    words = _ACL_RESOURCES if is_acl else _CONFIG_RESOURCES
    return words.get(number, f"type {number}")


class Producer(NamedTuple):
    """A producer id with its epoch."""

    producer_id: int
    epoch: int


class Producers:
    """Producer ids, epochs and sequences.

    targets: captured producer -> the target's, as answers gave them, in their order. refused:
    captured id -> the target's error, where it refused the InitProducerId that gave it.
    """

    def __init__(self) -> None:
        self.targets: dict[Producer, Producer] = {}
        self.refused: dict[int, int] = {}
        self._last: dict[int, Producer] = {}  # captured id -> the epoch learnt last
        # captured records of a producer in a partition that the target did not get
        self._lost: Counter[tuple[Producer, Log]] = Counter()

    def learn(self, captured: Producer, target: Producer) -> None:
        if captured.producer_id >= 0 and target.producer_id >= 0:
            self.targets[captured] = target
            self._last[captured.producer_id] = captured

    def target(self, captured: Producer) -> Producer | None:
        """The target's producer id and epoch, or None if they are unknown.

        A client can raise the epoch by itself (KIP-360). An epoch that no answer returned keeps its
        distance to the last epoch that one did.
        """
        if captured.producer_id < 0:
            return captured
        if captured in self.targets:
            return self.targets[captured]
        last = self._last.get(captured.producer_id)
        if last is None:
            return None
        target = self.targets[last]
        if captured.epoch < 0:
            return Producer(target.producer_id, captured.epoch)
        epoch = target.epoch + captured.epoch - last.epoch
        return Producer(target.producer_id, max(0, min(epoch, 0x7FFF)))

    def target_id(self, captured_id: int) -> int | None:
        """The target's producer id, for messages that have no epoch; None if it is unknown."""
        last = self._last.get(captured_id)
        return None if last is None else self.targets[last].producer_id

    def sequence(self, captured: Producer, log: Log, base_sequence: int) -> int:
        """The target's base sequence of a captured batch."""
        if base_sequence < 0:
            return base_sequence
        return (base_sequence - self._lost[captured, log]) % _SEQUENCES

    def lost(self, captured: Producer, log: Log, record_count: int) -> None:
        """The capture's broker took a batch that the target did not: later ones move up."""
        self._lost[captured, log] += record_count
