"""Collects facts from all messages of a workload: brokers, topics, and internal traffic."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Connection, Exchange, TopicFacts, WorkloadFacts
from kdissect.replay.workload import messages as api
from kdissect.replay.workload.messages import (
    TOPIC_CONFIG,
    TOPIC_RESOURCE,
    entries,
    partitions,
    request_of,
    response_of,
)

_ZERO = UUID(int=0)
_INTERNAL_TOPICS = frozenset(
    {"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"}
)
_READ_APIS = frozenset(
    {
        ApiKey.METADATA, ApiKey.CREATE_TOPICS, ApiKey.CREATE_PARTITIONS, ApiKey.DESCRIBE_CONFIGS,
        ApiKey.DESCRIBE_TOPIC_PARTITIONS, ApiKey.DESCRIBE_CLUSTER, ApiKey.PRODUCE, ApiKey.FETCH,
        ApiKey.INCREMENTAL_ALTER_CONFIGS, ApiKey.ALTER_CONFIGS, ApiKey.LIST_OFFSETS,
    }
)  # fmt: skip


def gather_facts(connections: list[Connection]) -> WorkloadFacts:
    """Collect brokers and topics from the messages of all connections.

    Also marks traffic among brokers (`internal_reason`), and sets `node_id` of the connections.
    """
    facts = WorkloadFacts()
    mark_internal(connections)
    exchanges = [each for connection in connections for each in connection.exchanges]
    exchanges.sort(key=lambda each: (each.request_time_ns, each.connection, each.index))
    grown: set[str] = set()
    for exchange in exchanges:
        if exchange.api_key in _READ_APIS:
            _FactsReader(facts, exchange, grown).read()
    facts.listeners = sorted({connection.broker for connection in connections})
    _node_ids(connections, facts)
    return facts


class _FactsReader:
    """Adds the facts of one exchange.

    grown: topics to which the capture added partitions. Their `partition_count` is the count before
    that, since the replay sends the same CreatePartitions requests.
    """

    def __init__(self, facts: WorkloadFacts, exchange: Exchange, grown: set[str]) -> None:
        self.facts = facts
        self.exchange = exchange
        self.grown = grown

    def read(self) -> None:
        request, response = request_of(self.exchange), response_of(self.exchange)
        key = self.exchange.api_key
        if response is not None and key in (ApiKey.METADATA, ApiKey.DESCRIBE_CLUSTER):
            self._cluster(response)
        if response is not None and key in (ApiKey.METADATA, ApiKey.DESCRIBE_TOPIC_PARTITIONS):
            for topic in entries(response.body.get("topics")):
                self._described(topic)
        if request is not None and key == ApiKey.CREATE_TOPICS:
            self._created(request, response)
        if request is not None and key == ApiKey.CREATE_PARTITIONS:
            self._grown(request, response)
        if response is not None and key == ApiKey.DESCRIBE_CONFIGS:
            self._configs(response)
        if request is not None and key in (ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.LIST_OFFSETS):
            self._used(request)

    def _topic(self, name: str) -> TopicFacts:
        topic = self.facts.topics.get(name)
        if topic is None:
            topic = self.facts.topics[name] = TopicFacts(name, is_internal=name in _INTERNAL_TOPICS)
        return topic

    def _seen(self, name: str, topic_id: UUID | None = None) -> TopicFacts:
        topic = self._topic(name)
        if topic.first_time_ns < 0:
            topic.first_time_ns = self.exchange.request_time_ns
        if topic_id is not None and topic_id != _ZERO and str(topic_id) not in topic.topic_ids:
            topic.topic_ids.append(str(topic_id))
        return topic

    def _cluster(self, response: Message) -> None:
        cluster_id = response.body.get("cluster_id")
        if cluster_id and cluster_id not in self.facts.cluster_ids:
            self.facts.cluster_ids.append(cluster_id)
        for broker in entries(response.body.get("brokers")):
            node = broker.get("node_id", broker.get("broker_id"))
            self.facts.brokers[node] = (broker["host"], broker["port"])

    def _described(self, entry: dict[str, Any]) -> None:
        name = entry.get("name")
        if not name or entry["error_code"] != 0:
            if name:
                self._topic(name)
            return
        topic = self._seen(name, entry.get("topic_id"))
        topic.is_internal = topic.is_internal or bool(entry.get("is_internal"))
        partitions = entries(entry["partitions"])
        if name not in self.grown:
            topic.partition_count = max(topic.partition_count, len(partitions))
        for partition in partitions:
            replicas = entries(partition.get("replica_nodes"))
            topic.replication_factor = max(topic.replication_factor, len(replicas))

    def _created(self, request: Message, response: Message | None) -> None:
        if request.body.get("validate_only"):
            return
        results = {}
        if response is not None:
            results = {entry["name"]: entry for entry in entries(response.body["topics"])}
        for entry in entries(request.body["topics"]):
            result = results.get(entry["name"])
            if result is None or result["error_code"] != 0:
                self._topic(entry["name"])
                continue
            topic = self._seen(entry["name"], result.get("topic_id"))
            topic.is_created = True
            count = entry["num_partitions"]
            if entries(entry["assignments"]):
                count = len(entry["assignments"])
            if count <= 0:
                count = result.get("num_partitions", 0)
            topic.partition_count = max(topic.partition_count, count)
            factor = max(entry["replication_factor"], result.get("replication_factor", 0))
            topic.replication_factor = max(topic.replication_factor, factor)
            for config in entries(entry["configs"]):
                if config["value"] is not None:
                    topic.configs[config["name"]] = config["value"]

    def _grown(self, request: Message, response: Message | None) -> None:
        if request.body.get("validate_only") or response is None:
            return
        done = {
            entry["name"] for entry in entries(response.body["results"]) if not entry["error_code"]
        }
        for entry in entries(request.body["topics"]):
            if entry["name"] in done:
                self._seen(entry["name"])
                self.grown.add(entry["name"])

    def _configs(self, response: Message) -> None:
        for result in entries(response.body["results"]):
            if result["resource_type"] != TOPIC_RESOURCE or result["error_code"] != 0:
                continue
            topic = self._seen(result["resource_name"])
            for config in entries(result["configs"]):
                is_own = config.get("config_source") == TOPIC_CONFIG or (
                    "config_source" not in config and not config.get("is_default", True)
                )
                if is_own and config["value"] is not None and not config["is_sensitive"]:
                    topic.configs.setdefault(config["name"], config["value"])

    def _used(self, request: Message) -> None:
        for entry, number, _ in partitions(request.body):
            if name := entry.get("name") or entry.get("topic"):
                topic = self._topic(name)
                if topic.first_time_ns < 0 and not topic.is_created:
                    topic.partition_count = max(topic.partition_count, min(number, 9999) + 1)


def mark_internal(connections: list[Connection]) -> None:
    """Say of each exchange why it is traffic among brokers and controllers, where it is."""
    controllers = {
        connection.broker
        for connection in connections
        if any(each.api_key in api.CONTROLLER_LISTENER_APIS for each in connection.exchanges)
    }
    for connection in connections:
        reason = ""
        if connection.broker in controllers:
            reason = "goes to a controller's listener"
        else:
            for exchange in connection.exchanges:
                if _is_replica(exchange):
                    reason = "a broker's connection to another broker"
                    break
        for exchange in connection.exchanges:
            if exchange.api_key in api.INTERNAL_APIS:
                exchange.internal_reason = "only brokers and controllers send it"
            else:
                exchange.internal_reason = reason


def _is_replica(exchange: Exchange) -> bool:
    """Return whether only a broker sends this request."""
    if exchange.api_key in api.INTERNAL_CONNECTION_APIS - {ApiKey.WRITE_TXN_MARKERS}:
        return True
    if exchange.api_key in (ApiKey.FETCH, ApiKey.LIST_OFFSETS, ApiKey.OFFSET_FOR_LEADER_EPOCH):
        request = request_of(exchange)
        if request is None:
            return False
        state = request.body.get("replica_state") or {}
        return max(request.body.get("replica_id", -1), state.get("replica_id", -1)) >= 0
    return False


def _node_ids(connections: list[Connection], facts: WorkloadFacts) -> None:
    """Set the broker of each connection: by address, else by a port that only one broker has."""
    by_address = {address: node for node, address in facts.brokers.items()}
    by_port: dict[int, set[int]] = {}
    for node, (_, port) in facts.brokers.items():
        by_port.setdefault(port, set()).add(node)
    for connection in connections:
        connection.node_id = by_address.get(connection.broker)
        nodes = by_port.get(connection.broker[1], set())
        if connection.node_id is None and len(nodes) == 1:
            connection.node_id = next(iter(nodes))
