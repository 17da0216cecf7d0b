"""What messages show of the captured cluster: brokers, topics, and the traffic among brokers."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from kdissect.protocol.api_keys import INTER_BROKER_APIS, ApiKey
from kdissect.replay.model import Connection, Exchange, TopicFacts, WorkloadFacts
from kdissect.replay.workload.messages import (
    TOPIC_CONFIG,
    TOPIC_RESOURCE,
    Body,
    bodies,
    entries,
    partitions,
    request_body,
)

_INTERNAL_TOPICS = frozenset(
    {"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"}
)
# Requests that only brokers and controllers send; never replayed. Admin clients can send
# WriteTxnMarkers (abortTransaction) and change the voters, so their connection may be a client's.
INTERNAL_APIS = INTER_BROKER_APIS | {
    ApiKey.WRITE_TXN_MARKERS, ApiKey.ADD_RAFT_VOTER, ApiKey.REMOVE_RAFT_VOTER,
}  # fmt: skip
# Only the listener of a controller answers these.
_CONTROLLER_LISTENER_APIS = frozenset(
    {
        ApiKey.VOTE, ApiKey.BEGIN_QUORUM_EPOCH, ApiKey.END_QUORUM_EPOCH, ApiKey.FETCH_SNAPSHOT,
        ApiKey.BROKER_REGISTRATION, ApiKey.BROKER_HEARTBEAT, ApiKey.CONTROLLER_REGISTRATION,
        ApiKey.UPDATE_RAFT_VOTER,
    }
)  # fmt: skip


def gather_facts(connections: list[Connection]) -> WorkloadFacts:
    """Collect brokers and topics from the messages of all connections.

    Also marks traffic among brokers (`internal_reason`), and sets `node_id` of the connections.
    """
    _mark_internal(connections)
    exchanges = [each for connection in connections for each in connection.exchanges]
    exchanges.sort(key=lambda each: (each.request_time_ns, each.connection, each.index))
    reader = _Reader()
    for exchange in exchanges:
        reader.read(exchange)
    reader.facts.listeners = sorted({connection.broker for connection in connections})
    _set_nodes(connections, reader.facts.brokers)
    return reader.facts


class _Reader:
    """Adds what one exchange after the other shows to `facts`."""

    def __init__(self) -> None:
        self.facts = WorkloadFacts()
        # Topics to which the capture added partitions. Their `partition_count` is the count before
        # that, since the replay sends the same CreatePartitions requests.
        self._grown: set[str] = set()
        self._now_ns = 0
        self._readers: dict[int, Any] = {
            ApiKey.METADATA: self._metadata,
            ApiKey.DESCRIBE_TOPIC_PARTITIONS: self._metadata,
            ApiKey.DESCRIBE_CLUSTER: self._metadata,
            ApiKey.CREATE_TOPICS: self._create_topics,
            ApiKey.CREATE_PARTITIONS: self._create_partitions,
            ApiKey.DESCRIBE_CONFIGS: self._describe_configs,
            **dict.fromkeys((ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.LIST_OFFSETS), self._use),
        }

    def read(self, exchange: Exchange) -> None:
        reader = self._readers.get(exchange.api_key)
        if reader is not None:
            self._now_ns = exchange.request_time_ns
            reader(*bodies(exchange))

    def _topic(self, name: str) -> TopicFacts:
        new = TopicFacts(name, is_internal=name in _INTERNAL_TOPICS)
        return self.facts.topics.setdefault(name, new)

    def _seen(self, name: str, topic_id: UUID | None = None) -> TopicFacts:
        """A topic that exists now."""
        topic = self._topic(name)
        if topic.first_time_ns < 0:
            topic.first_time_ns = self._now_ns
        if topic_id is not None and topic_id.int and str(topic_id) not in topic.topic_ids:
            topic.topic_ids.append(str(topic_id))
        return topic

    def _metadata(self, request: Body, response: Body) -> None:
        cluster_id = response.get("cluster_id")
        if cluster_id and cluster_id not in self.facts.cluster_ids:
            self.facts.cluster_ids.append(cluster_id)
        for broker in entries(response.get("brokers")):
            node = broker.get("node_id", broker.get("broker_id"))
            self.facts.brokers[node] = (broker["host"], broker["port"])
        for entry in entries(response.get("topics")):
            if entry.get("name") and entry["error_code"] != 0:
                self._topic(entry["name"])
            elif entry.get("name"):
                self._described(entry)

    def _described(self, entry: Body) -> None:
        topic = self._seen(entry["name"], entry.get("topic_id"))
        topic.is_internal = topic.is_internal or bool(entry.get("is_internal"))
        described = entries(entry["partitions"])
        if topic.name not in self._grown:
            topic.partition_count = max(topic.partition_count, len(described))
        for partition in described:
            replicas = entries(partition.get("replica_nodes"))
            topic.replication_factor = max(topic.replication_factor, len(replicas))

    def _create_topics(self, request: Body, response: Body) -> None:
        if request.get("validate_only"):
            return
        results = {entry["name"]: entry for entry in entries(response.get("topics"))}
        for entry in entries(request.get("topics")):
            result = results.get(entry["name"])
            if result is None or result["error_code"] != 0:
                self._topic(entry["name"])
                continue
            topic = self._seen(entry["name"], result.get("topic_id"))
            topic.is_created = True
            count = len(entries(entry["assignments"])) or entry["num_partitions"]
            if count <= 0:
                count = result.get("num_partitions", 0)
            topic.partition_count = max(topic.partition_count, count)
            factor = max(entry["replication_factor"], result.get("replication_factor", 0))
            topic.replication_factor = max(topic.replication_factor, factor)
            for config in entries(entry["configs"]):
                if config["value"] is not None:
                    topic.configs[config["name"]] = config["value"]

    def _create_partitions(self, request: Body, response: Body) -> None:
        if request.get("validate_only"):
            return
        asked = {entry["name"] for entry in entries(request.get("topics"))}
        for entry in entries(response.get("results")):
            if not entry["error_code"] and entry["name"] in asked:
                self._seen(entry["name"])
                self._grown.add(entry["name"])

    def _describe_configs(self, request: Body, response: Body) -> None:
        for result in entries(response.get("results")):
            if result["resource_type"] != TOPIC_RESOURCE or result["error_code"] != 0:
                continue
            topic = self._seen(result["resource_name"])
            for config in entries(result["configs"]):
                is_own = config.get("config_source") == TOPIC_CONFIG or (
                    "config_source" not in config and not config.get("is_default", True)
                )
                if is_own and config["value"] is not None and not config["is_sensitive"]:
                    topic.configs.setdefault(config["name"], config["value"])

    def _use(self, request: Body, response: Body) -> None:
        for entry, number, _ in partitions(request):
            if name := entry.get("name") or entry.get("topic"):
                topic = self._topic(name)
                if topic.first_time_ns < 0 and not topic.is_created:
                    topic.partition_count = max(topic.partition_count, min(number, 9999) + 1)


def _mark_internal(connections: list[Connection]) -> None:
    """Say of each exchange why it is traffic among brokers and controllers, where it is."""
    controllers = {
        connection.broker
        for connection in connections
        if any(each.api_key in _CONTROLLER_LISTENER_APIS for each in connection.exchanges)
    }
    for connection in connections:
        reason = ""
        if connection.broker in controllers:
            reason = "goes to a controller's listener"
        elif any(map(_is_brokers, connection.exchanges)):
            reason = "a broker's connection to another broker"
        for exchange in connection.exchanges:
            if exchange.api_key in INTERNAL_APIS:
                exchange.internal_reason = "only brokers and controllers send it"
            else:
                exchange.internal_reason = reason


def _is_brokers(exchange: Exchange) -> bool:
    """Return whether only a broker sends this request."""
    if exchange.api_key in INTER_BROKER_APIS:
        return True
    if exchange.api_key not in (
        ApiKey.FETCH, ApiKey.LIST_OFFSETS, ApiKey.OFFSET_FOR_LEADER_EPOCH,
    ):  # fmt: skip
        return False
    request = request_body(exchange)
    state = request.get("replica_state") or {}
    return max(request.get("replica_id", -1), state.get("replica_id", -1)) >= 0


def _set_nodes(connections: list[Connection], brokers: dict[int, tuple[str, int]]) -> None:
    """Set the broker of each connection: by address, else by a port that only one broker has."""
    by_address = {address: node for node, address in brokers.items()}
    by_port: dict[int, set[int]] = {}
    for node, (_, port) in brokers.items():
        by_port.setdefault(port, set()).add(node)
    for connection in connections:
        connection.node_id = by_address.get(connection.broker)
        nodes = by_port.get(connection.broker[1], set())
        if connection.node_id is None and len(nodes) == 1:
            connection.node_id = next(iter(nodes))
