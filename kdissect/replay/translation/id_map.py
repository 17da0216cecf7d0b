"""What a run knows of its target: the ids that it has there for those of the capture.

`learning`, `translator` and the queries of `target` fill it during a run; the comparison reads it.
Keys are the capture's, with names before `--rename`; those of `TargetCluster` are the target's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import ChainMap, Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple
from uuid import UUID

from kdissect.codec.message import Message
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import ADMIN, Log, ReplayPlan, Step, TranslateOptions
from kdissect.replay.translation.groups import Groups, ShareSessions
from kdissect.replay.workload.fetch_sessions import FetchSessions, by_topic
from kdissect.replay.workload.messages import (
    Body,
    MessageTopics,
    bodies,
    captured_topics,
    decoded,
    entries,
)

RENAME_KINDS = ("topic", "group", "transactional-id")
# Types of the resources of ACLs and of configs (ResourceType and ConfigResource.Type of Kafka's
# clients).
_ACL_RESOURCES = dict(
    enumerate(("topic", "group", "cluster", "transactional id", "delegation token", "user"), 2)
)
_OF_ACLS = frozenset({"principal", "principal_filter", "acls"})  # fields
_CONFIG_RESOURCES = {2: "topic", 4: "broker", 8: "broker logger", 16: "client metrics", 32: "group"}
IN_SYNC = "min.insync.replicas"
ZERO_UUID = UUID(int=0)
_SEQUENCES = 1 << 31  # they wrap to 0
_CAPTURED, EARLIEST, RELATIVE = "captured", "earliest", "relative"
MODES = (_CAPTURED, EARLIEST, RELATIVE)

_UNKNOWN_OFFSET = (1 << 63) - 1  # the high watermark of a Fetch that knows none (KIP-1166)


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
        target: TargetCluster | None = None,
    ) -> None:
        self.options = options or TranslateOptions()
        self.name, self.captured_name = self.options.name, self.options.captured_name
        self.plan = plan
        self.kept = frozenset(kept)
        self.target = target or TargetCluster()
        self.offsets = OffsetMap(self.options.offsets)
        # of a Fetch that is sent again: the target's offset behind the records that came
        self.read_to: dict[tuple[int, Log], int] = {}
        self.sessions = FetchSessions(plan.workload.facts.fetch_sessions)
        self.share = ShareSessions()
        self.producers = Producers()
        self.groups = Groups()
        self.topic_ids: dict[UUID, UUID] = {}  # captured -> target, from answers
        self.opaque: dict[Any, Any] = {}  # tokens, instance ids and the like: captured -> target
        self.marked: set[Log] = set()  # with markers of captured transactions
        self.may_create = ADMIN in plan.options.allow
        self.captured_nodes = sorted(plan.workload.facts.brokers)
        self.names = captured_topics(plan.workload.facts)
        # a captured id may come back as it is, from a target that has no such topic
        by_id = ChainMap(self.target.names, self.names.by_id)
        self.target_topics = MessageTopics(by_id, partial(self.captured_name, "topic"))
        sessions = FetchSessions(plan.workload.facts.fetch_sessions)
        for step in plan.steps:
            if step.skipped is None:
                self._add_captured(step, sessions)

    def _add_captured(self, step: Step, sessions: FetchSessions) -> None:
        """Take from a captured exchange the values that answers are compared with: log start
        offsets, fetched offsets, assignments, and partitions in transactions."""
        exchange = step.exchange
        if exchange.api_key not in (ApiKey.SYNC_GROUP, ApiKey.FETCH, ApiKey.PRODUCE):
            return
        asked, captured = bodies(exchange)
        if exchange.api_key == ApiKey.SYNC_GROUP:
            self.groups.add_captured(asked)
            return
        for log, entry in self.names.logs(captured):
            self.offsets.of(log, step.number).add_captured(start=entry.get("log_start_offset", -1))
        if exchange.api_key == ApiKey.FETCH:
            found = sessions.after(self.broker(step), asked, captured)
            for log, entry in self.names.logs({"topics": by_topic(found)}):
                self.offsets.of(log, step.number).add_captured(fetched=entry["fetch_offset"])
        elif asked.get("transactional_id") is not None:
            self.marked.update(log for log, _ in self.names.logs(asked))

    def broker(self, step: Step) -> tuple[str, int]:
        """The captured broker that a step went to; sessions are the brokers'."""
        return self.plan.workload.connections[step.connection].broker

    def topic(self, name: str) -> str:
        return self.name("topic", name)

    def topic_id(self, captured: UUID) -> UUID | None:
        """The target's id of a topic, or None if neither an answer nor its name gives it."""
        if captured in self.topic_ids or captured == ZERO_UUID:
            return self.topic_ids.get(captured, captured)
        name = self.names.by_id.get(captured)
        return None if name is None else self.target.topic_ids.get(self.topic(name))

    def node(self, captured: int) -> int:
        """A node of the target for one of the capture's: itself where it is there, else by order,
        around the target's nodes. A number that is no node of the capture stays one that is none.
        """
        nodes = self.target.nodes
        if captured not in self.captured_nodes or captured in nodes or not nodes:
            return captured
        return sorted(nodes)[self.captured_nodes.index(captured) % len(nodes)]

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

    def answer_of(self, step: Step, frame: bytes) -> Message | None:
        """The decoded answer in the version that was sent; None if it cannot be decoded. It is
        shared: do not change it."""
        return decoded(frame, "response", step.exchange.api_key, self.api_version(step))


@dataclass(eq=False)
class TargetCluster:
    """A target as it tells of itself: in its answers to the workload, and to `target.cluster`.

    ranges: API key -> first and last version that it takes. nodes: node id -> address. gone: nodes
    that the last Metadata does not list. topics: with their number of partitions, 0 of one that was
    just made. names: of topics that are gone, too.
    leaders: (topic, partition) -> (node id, leader epoch). coordinators: (key type of
    FindCoordinator, group or transactional id) -> node id.
    """

    cluster_id: str | None = None
    controller_id: int | None = None
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    nodes: dict[int, tuple[str, int]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    topics: dict[str, int] = field(default_factory=dict)
    topic_ids: dict[str, UUID] = field(default_factory=dict)
    names: dict[UUID, str] = field(default_factory=dict)
    leaders: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    coordinators: dict[tuple[int, str], int] = field(default_factory=dict)

    @property
    def several(self) -> dict[int, tuple[str, int]]:
        """The nodes among which requests have to choose: none if there is only one."""
        there = {each: at for each, at in self.nodes.items() if each not in self.gone}
        return there if len(self.nodes) > 1 else {}

    def learn_metadata(self, body: Body) -> None:
        """A response of the target to Metadata, DescribeTopicPartitions or CreateTopics."""
        if brokers := {each["node_id"]: each for each in entries(body.get("brokers"))}:
            self.nodes |= {node: (each["host"], each["port"]) for node, each in brokers.items()}
            self.gone = self.nodes.keys() - brokers.keys()
        self.controller_id = body.get("controller_id", self.controller_id)
        for topic in entries(body.get("topics")):
            name, topic_id = topic.get("name"), topic.get("topic_id", ZERO_UUID)
            if not name:
                continue
            if topic["error_code"] != 0:
                self.forget_topic(name)
                continue
            self.topics[name] = len(entries(topic.get("partitions")))
            if topic_id != ZERO_UUID:
                self.topic_ids[name] = topic_id
                self.names[topic_id] = name
            for partition in entries(topic.get("partitions")):
                if partition["leader_id"] >= 0:
                    leader = partition["leader_id"], partition.get("leader_epoch", -1)
                    self.leaders[name, partition["partition_index"]] = leader

    def learn_all(self, body: Body) -> None:
        """A Metadata response about all brokers and topics: others are gone."""
        self.nodes.clear()
        listed = {topic["name"] for topic in body["topics"]}
        for name in self.topics.keys() - listed:
            self.forget_topic(name)
        self.cluster_id = body.get("cluster_id", self.cluster_id)
        self.learn_metadata(body)

    def forget_topic(self, name: str) -> None:
        self.topics.pop(name, None)
        self.topic_ids.pop(name, None)
        for log in [log for log in self.leaders if log[0] == name]:
            del self.leaders[log]


def limited(value: Any, count: int) -> Any:
    """A number of replicas, or its text, that so many brokers can have; 0: nobody knows."""
    text = str(value)
    is_more = text.isascii() and text.isdigit() and 0 < count < int(text)
    return type(value)(count) if is_more else value


def resource_word(holder: Body) -> str:
    """``topic`` for the type of the resource in a struct about configs or ACLs."""
    number = holder.get("resource_type") or holder.get("resource_type_filter") or 0
    words = _CONFIG_RESOURCES if _OF_ACLS.isdisjoint(holder) else _ACL_RESOURCES
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

    def sequence(self, captured: Producer, log: Log, base_sequence: int) -> int:
        """The target's base sequence of a captured batch."""
        if base_sequence < 0:
            return base_sequence
        return (base_sequence - self._lost[captured, log]) % _SEQUENCES

    def lost(self, captured: Producer, log: Log, record_count: int) -> None:
        """The capture's broker took a batch that the target did not: later ones move up."""
        self._lost[captured, log] += record_count


# -- offsets --------------------------------------------------------------------------------------


@dataclass(slots=True)
class LogOffsets:
    """Maps the offsets of one log in the `mode` of its `OffsetMap`."""

    mode: str
    captured_start: int = -1  # first log start offset in the capture
    first_fetched: int = -1  # smallest offset that the capture fetched
    target_start: int = -1
    batches: list[tuple[int, int]] = field(default_factory=list)  # captured, target base, ascending
    by_target: list[tuple[int, int]] = field(default_factory=list)

    @property
    def distance(self) -> int:
        """Target's offsets minus captured ones, by the start of the log; 0 if it is unknown."""
        start = self.first_fetched if self.mode == EARLIEST else self.captured_start
        return 0 if self.target_start < 0 or start < 0 else self.target_start - start

    def reversed(self) -> list[tuple[int, int]]:
        """The batches by their offsets at the target: target, captured base."""
        if not self.by_target:
            self.by_target = sorted((target, captured) for captured, target in self.batches)
        return self.by_target

    def add_captured(self, *, start: int = -1, fetched: int = -1) -> None:
        """Add captured offsets, before the run: the first log start and the lowest fetch offset."""
        if self.captured_start < 0:
            self.captured_start = start
        if fetched >= 0 and (self.first_fetched < 0 or fetched < self.first_fetched):
            self.first_fetched = fetched

    def target_starts(self, start: int) -> None:
        """Set the target's earliest offset, unless an earlier call did."""
        if self.target_start < 0:
            self.target_start = start

    def produced(self, captured: int, target: int) -> None:
        """The same batch has these base offsets in the capture and at the target."""
        if captured < 0 or target < 0:
            return
        place, end = (bisect_left(self.batches, (each,)) for each in (captured, captured + 1))
        self.batches[place:end] = [(captured, target)]
        self.by_target.clear()

    def to_target(self, offset: int) -> int:
        """The target's offset of a captured one; negative ones have a meaning of their own."""
        if offset < 0 or offset == _UNKNOWN_OFFSET or self.mode == _CAPTURED:
            return offset
        if self.batches and self.mode == RELATIVE:
            return max(0, _moved(self.batches, offset))
        return max(0, offset + self.distance)

    def to_capture(self, offset: int) -> int:
        """The captured offset of one of the target's: by the last batch before it there."""
        if offset < 0 or self.mode == _CAPTURED:
            return offset
        if self.mode == EARLIEST or not self.batches:
            return max(0, offset - self.distance)
        return max(0, _moved(self.reversed(), offset))

    def base_to_capture(self, base: int) -> int | None:
        """The captured base offset of a batch that the target has appended at `base`: as far from
        the batch before it. None if none is known."""
        bases = self.reversed()
        if bases and bases[0][0] < base:
            return _moved(bases, base - 1) + 1
        return base if self.mode == _CAPTURED else None


class OffsetMap:
    """Maps offsets by one of three modes.

    captured: offsets stay as they are.
    earliest: the first offset that the capture fetched from a partition becomes the target's
    earliest.
    relative: an offset keeps its distance to the last batch before it that the replay produced (or
    to the first one). If there is no such batch, it keeps its distance to the start of the log.
    """

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"offsets: {mode!r} is none of {', '.join(MODES)}")
        self._made: defaultdict[str, list[int]] = defaultdict(list)  # by topic: steps that made it
        # by log, and how often the run had made its topic by then
        self._logs = defaultdict[tuple[Log, int], LogOffsets](partial(LogOffsets, mode))

    def of(self, log: Log, step: int) -> LogOffsets:
        """The offsets of the log that a step is about."""
        return self._logs[log, bisect_left(self._made[log[0]], step)]

    def created(self, topic: str, step: int, *, is_new: bool) -> None:
        """Note that a step created this topic, so its logs are empty and begin at offset 0: as
        behind a batch that ends there. is_new: in the capture, too."""
        count = len(self._made[topic])
        self._made[topic].append(step)
        for (log, made), old in list(self._logs.items()):
            if log[0] == topic and made == count:
                start = min(old.captured_start, 0) if is_new else old.captured_start
                before = [(start - 1, -1)] if start >= 0 else []
                new = LogOffsets(old.mode, start, old.first_fetched, 0, before)
                self._logs[log, count + 1] = new


def _moved(bases: list[tuple[int, int]], offset: int) -> int:
    """The offset on the other side. bases: base offsets of batches, on this side and the other."""
    here, there = bases[max(0, bisect_right(bases, offset, key=itemgetter(0)) - 1)]
    return there + offset - here
