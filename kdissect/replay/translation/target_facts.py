"""Facts about the target: API versions, brokers, topics with ids and leaders, coordinators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from kdissect.replay.workload.messages import entries

ZERO_UUID = UUID(int=0)


class TargetFacts:
    """Names are the target's. leaders: (topic, partition) -> (node id, leader epoch)."""

    def __init__(self) -> None:
        self.cluster_id = ""
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
        self.cluster_id = self.cluster_id or body.get("cluster_id") or ""
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
                log = name, partition["partition_index"]
                leader = partition["leader_id"], partition.get("leader_epoch", -1)
                if leader[0] >= 0:
                    self.leaders[log] = leader

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

    def node_for(self, captured_nodes: list[int], captured: int) -> int:
        """A node of the target for one of the capture's: itself where it is there, else by order,
        around the target's nodes. A number that is no node of the capture stays one that is none.
        """
        if captured not in captured_nodes or captured in self.nodes or not self.nodes:
            return captured
        order = sorted(self.nodes)
        return order[captured_nodes.index(captured) % len(order)]
