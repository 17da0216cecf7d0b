"""Reads captures or a saved file into a `Workload` to be replayed.

Its facts are what messages show of the captured cluster: brokers, topics, and which traffic is
among brokers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from uuid import UUID

import numpy as np

from kdissect.capture.inputs import find_captures
from kdissect.capture.mapped_files import Sources
from kdissect.codec.internal_records import LOG_OF_TOPIC
from kdissect.errors import CaptureError
from kdissect.kafka.assembly import Assembly, PairStatus, Protocol
from kdissect.pipeline import local
from kdissect.pipeline.learn import principal_of
from kdissect.pipeline.options import MB, Limits, Options
from kdissect.pipeline.plan import RunPlan, planned
from kdissect.protocol.api_keys import INTER_BROKER_APIS, ApiKey
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.replay.model import (
    ANONYMOUS_PRINCIPAL,
    FOREVER_NS,
    Broker,
    Connection,
    Exchange,
    TopicFacts,
    Workload,
    WorkloadFacts,
)
from kdissect.replay.workload import messages, saved_file
from kdissect.replay.workload.fetch_sessions import FetchSessions
from kdissect.replay.workload.messages import Body
from kdissect.tables.connections import endpoint_columns
from kdissect.tables.message_chunk import FrameBuffer, chunks, client_ids, frame_sizes

PathLike = str | os.PathLike[str]
_GATHER_BYTES = 64 * MB
_NOT_WHOLE = "bytes of it are missing in the capture"
_NEVER_SEEN = "it is not in the capture"
_INTERNAL = "only brokers and controllers send it"
_DELEGATION_TOKEN = b"tokenauth=true"  # an extension of SCRAM
# Requests that only brokers and controllers send; never replayed. Admin clients can send
# WriteTxnMarkers (abortTransaction) and change the voters, so their connection may be a client's.
INTERNAL_APIS = INTER_BROKER_APIS | messages.apis("WriteTxnMarkers AddRaftVoter RemoveRaftVoter")
# Only the listener of a controller answers these.
_CONTROLLER_LISTENER_APIS = messages.apis(
    "Vote BeginQuorumEpoch EndQuorumEpoch FetchSnapshot BrokerRegistration BrokerHeartbeat "
    "ControllerRegistration UpdateRaftVoter"
)
_REPLICAS_APIS = messages.apis("Fetch ListOffsets OffsetForLeaderEpoch")  # they may name a replica


def load_workload(
    paths: PathLike | Sequence[PathLike],
    *,
    ports: Sequence[int] = (),
    keylog: Sequence[PathLike] = (),
    limits: Limits | Mapping[str, int] | None = None,
    from_ns: int | None = None,
    to_ns: int | None = None,
) -> Workload:
    """Read a workload from captures (files, folders, globs), or from one saved file.

    ports, keylog, limits: as for `kdissect.read`, for captures. from_ns, to_ns: only
    requests captured in this time (nanoseconds since 1970, the end excluded). Raises CaptureError
    where nothing of it can be used.
    """
    named = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    texts = [os.fspath(path) for path in named]
    is_saved = _is_saved(texts)
    notes: list[str] = []
    if is_saved:
        connections, notes = saved_file.read_connections(texts[0])
    else:
        options = Options(
            ports=tuple(ports),
            keylog=tuple(os.fspath(path) for path in keylog),
            limits=Limits.of(limits),
        )
        with planned(find_captures(texts), options) as plan:
            connections = [
                connection
                for _, assembly, sources in local.assemblies(plan)
                for connection in _connections(plan, assembly, sources)
            ]
    connections = _between(connections, 0, FOREVER_NS if to_ns is None else to_ns)
    facts = gather_facts(connections, from_ns or 0)
    connections = _between(connections, from_ns or 0, FOREVER_NS)
    if not connections:
        notes.append("no Kafka request was found")
    kind = "saved" if is_saved else "capture"
    return Workload(", ".join(texts), kind, connections, facts, notes)


def _is_saved(paths: list[str]) -> bool:
    """Return whether the only path is a saved file. Raises CaptureError if it is not alone."""
    for path in paths:
        if Path(path).is_file() and saved_file.is_saved(path):
            if len(paths) > 1:
                raise CaptureError(f"{path}: a saved replay stands alone, name no other source")
            return True
    return False


def _connections(plan: RunPlan, assembly: Assembly, sources: Sources) -> list[Connection]:
    rows, exchanges = assembly.connections, assembly.exchanges
    where = endpoint_columns(assembly.endpoints, rows)
    client_ips, broker_ips = where.client_ip.to_pylist(), where.broker_ip.to_pylist()
    connections = {
        row: Connection(
            connection_id=int(rows["connection_id"][row]),
            client=(client_ips[row], int(where.client_port[row])),
            broker=(broker_ips[row], int(where.broker_port[row])),
        )
        for row in np.flatnonzero(rows["protocol"] == Protocol.KAFKA).tolist()
    }
    paths = [info.path for info in plan.captures if info.source >= 0]
    for chosen in chunks(np.arange(len(exchanges)), frame_sizes(exchanges), _GATHER_BYTES):
        _add_exchanges(FrameBuffer.gather(assembly, sources, chosen), connections, paths)
    for row, connection in connections.items():
        is_plain = bool(rows["handshake_seen"][row]) and not rows["is_tls"][row]
        connection.principal = _principal(connection, is_plain)
    return list(connections.values())


def _principal(connection: Connection, is_plain: bool) -> str:
    """The principal by the first SASL token; without one the anonymous, if the connection is there
    from its start, without TLS. With a delegation token it is unknown: the user is the
    token's id (KIP-48)."""
    for exchange in connection.exchanges:
        token = exchange.request if exchange.api_key == messages.NO_API else None
        if exchange.api_key == ApiKey.SASL_AUTHENTICATE:
            token = messages.request_body(exchange).get("auth_bytes")
        if token is not None:
            return "" if _DELEGATION_TOKEN in token else principal_of(token) or ""
    return ANONYMOUS_PRINCIPAL if is_plain else ""


def _add_exchanges(
    frames: FrameBuffer, connections: dict[int, Connection], paths: list[str]
) -> None:
    data = frames.buf.tobytes()
    start, end = frames.start.tolist(), frames.end.tolist()
    whole = [frames.whole(side).tolist() for side in (REQUEST, RESPONSE)]

    def frame(row: int, side: int) -> bytes | None:
        return data[start[row][side] : end[row][side]] if whole[side][row] else None

    ids = client_ids(frames).to_pylist()
    for row, found in enumerate(frames.exchanges):
        owner = connections.get(int(found["connection"]))
        if owner is None:
            continue
        request, response, status = found["request"], found["response"], PairStatus(found["status"])
        has_request, has_response = request["size"] >= 0, response["size"] >= 0
        first = request if has_request else response
        exchange = Exchange(
            exchange_id=int(found["exchange_id"]),
            connection=-1,
            index=-1,
            api_key=messages.NO_API if found["is_sasl_token"] else int(found["api_key"]),
            api_version=int(found["api_version"]),
            client_id=ids[row],
            request=frame(row, REQUEST),
            response=frame(row, RESPONSE),
            request_time_ns=int(first["time_ns"]),
            request_end_time_ns=int(request["end_time_ns"]) if has_request else -1,
            response_time_ns=int(response["time_ns"]) if has_response else -1,
            response_end_time_ns=int(response["end_time_ns"]) if has_response else -1,
            expects_response=status is not PairStatus.NO_RESPONSE_EXPECTED,
            request_packet=int(request["packet"]),
            response_packet=int(response["packet"]),
            capture=paths[first["source"]] if 0 <= first["source"] < len(paths) else "",
        )
        if exchange.request is None:
            exchange.request_missing = _NOT_WHOLE if has_request else _NEVER_SEEN
        if exchange.response is None and exchange.expects_response:
            exchange.response_missing = _NOT_WHOLE if has_response else _NEVER_SEEN
            if status is PairStatus.CONNECTION_CLOSED and not has_response:
                exchange.response_missing = "the connection was closed before the answer"
        owner.exchanges.append(exchange)


def _between(connections: list[Connection], from_ns: int, to_ns: int) -> list[Connection]:
    """Connections with their requests of this time, in order of their first one; their exchanges
    get numbers."""
    for each in connections:
        kept = [one for one in each.exchanges if from_ns <= one.request_time_ns < to_ns]
        each.exchanges = kept
    found = [each for each in connections if each.exchanges]
    found.sort(key=lambda each: (each.exchanges[0].request_time_ns, each.connection_id))
    for number, connection in enumerate(found):
        for index, exchange in enumerate(connection.exchanges):
            exchange.connection, exchange.index = number, index
    return found


# -- what messages show of the captured cluster ----------------------------------------------------


def gather_facts(connections: list[Connection], from_ns: int = 0) -> WorkloadFacts:
    """Collect brokers and topics from the messages of all connections. from_ns: when the first
    request that is replayed was captured.

    Also marks traffic among brokers (`internal_reason`), and sets `node_id` of the connections.
    """
    _mark_internal(connections)
    exchanges = [each for connection in connections for each in connection.exchanges]
    exchanges.sort(key=lambda each: (each.request_time_ns, each.connection, each.index))
    reader = _FactsReader()
    for exchange in exchanges:
        reader.is_replayed = exchange.request_time_ns >= from_ns
        reader.read(exchange, connections[exchange.connection].broker)
    reader.facts.fetch_sessions = reader.sessions.known
    reader.facts.listeners = sorted({connection.broker for connection in connections})
    _set_nodes(connections, reader.facts.brokers)
    return reader.facts


class _FactsReader:
    """Adds what one exchange after the other shows to `facts`."""

    def __init__(self) -> None:
        self.facts = WorkloadFacts()
        self.sessions = FetchSessions({})
        self.is_replayed = True
        # Topics to which the replay adds partitions, as the capture did. Their `partition_count` is
        # the count before that.
        self._grown: set[str] = set()
        self._now_ns = 0
        self._readers: dict[int, Callable[[Body, Body], None]] = {
            ApiKey.METADATA: self._metadata,
            ApiKey.DESCRIBE_TOPIC_PARTITIONS: self._metadata,
            ApiKey.DESCRIBE_CLUSTER: self._metadata,
            ApiKey.CREATE_TOPICS: self._create_topics,
            ApiKey.CREATE_PARTITIONS: self._create_partitions,
            ApiKey.DESCRIBE_CONFIGS: self._describe_configs,
            ApiKey.API_VERSIONS: self._api_versions,
            **dict.fromkeys((ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.LIST_OFFSETS), self._use),
        }

    def read(self, exchange: Exchange, broker: Broker) -> None:
        reader = self._readers.get(exchange.api_key)
        is_listing = exchange.api_key == ApiKey.API_VERSIONS
        if reader is not None and not (is_listing and exchange.internal_reason):
            self._now_ns = exchange.request_time_ns
            request, response = messages.bodies(exchange)
            reader(request, response)
            if exchange.api_key == ApiKey.FETCH and not self.is_replayed:
                self.sessions.after(broker, request, response)

    def _topic(self, name: str) -> TopicFacts:
        new = TopicFacts(name, is_internal=name in LOG_OF_TOPIC)
        return self.facts.topics.setdefault(name, new)

    def _seen(
        self, name: str, topic_id: UUID | None = None, partitions: int = 0, replicas: int = 0
    ) -> TopicFacts:
        """A topic that exists now. partitions, replicas: how many are seen."""
        topic = self._topic(name)
        if topic.first_time_ns < 0:
            topic.first_time_ns = self._now_ns
        if topic_id is not None and topic_id.int and str(topic_id) not in topic.topic_ids:
            topic.topic_ids.append(str(topic_id))
        if name not in self._grown:
            topic.partition_count = max(topic.partition_count, partitions)
        topic.replication_factor = max(topic.replication_factor, replicas)
        return topic

    def _metadata(self, request: Body, response: Body) -> None:
        cluster_id = response.get("cluster_id")
        if cluster_id and cluster_id not in self.facts.cluster_ids:
            self.facts.cluster_ids.append(cluster_id)
        for broker in messages.entries(response.get("brokers")):
            node = broker.get("node_id", broker.get("broker_id"))
            self.facts.brokers[node] = (broker["host"], broker["port"])
        for entry in messages.entries(response.get("topics")):
            name, described = entry.get("name"), messages.entries(entry["partitions"])
            if name and entry["error_code"] != 0:
                self._topic(name)
            elif name:
                replicas = [len(messages.entries(each.get("replica_nodes"))) for each in described]
                most = max(replicas, default=0)
                topic = self._seen(name, entry.get("topic_id"), len(described), most)
                topic.is_internal |= bool(entry.get("is_internal"))

    def _api_versions(self, request: Body, response: Body) -> None:
        offered = {
            each["api_key"]: (each["min_version"], each["max_version"])
            for each in messages.entries(response.get("api_keys"))
        }
        self.facts.offered = max(self.facts.offered, offered, key=len)

    def _create_topics(self, request: Body, response: Body) -> None:
        if request.get("validate_only"):
            return
        results = {entry["name"]: entry for entry in messages.entries(response.get("topics"))}
        for entry in messages.entries(request.get("topics")):
            result = results.get(entry["name"])
            if result is None or result["error_code"] != 0:
                self._topic(entry["name"])
                continue
            count = len(messages.entries(entry["assignments"])) or max(entry["num_partitions"], 0)
            topic = self._seen(
                entry["name"],
                result.get("topic_id"),
                count or result.get("num_partitions", 0),
                max(entry["replication_factor"], result.get("replication_factor", 0)),
            )
            topic.is_created |= self.is_replayed
            configs = {each["name"]: each["value"] for each in messages.entries(entry["configs"])}
            topic.configs |= {name: value for name, value in configs.items() if value is not None}

    def _create_partitions(self, request: Body, response: Body) -> None:
        if request.get("validate_only"):
            return
        for entry in messages.entries(response.get("results")):
            if not entry["error_code"]:
                self._seen(entry["name"])
                if self.is_replayed:
                    self._grown.add(entry["name"])

    def _describe_configs(self, request: Body, response: Body) -> None:
        for result in messages.entries(response.get("results")):
            if result["resource_type"] != messages.TOPIC_RESOURCE or result["error_code"] != 0:
                continue
            topic = self._seen(result["resource_name"])
            for config in messages.entries(result["configs"]):
                is_own = config.get("config_source") == messages.TOPIC_CONFIG or (
                    "config_source" not in config and not config.get("is_default", True)
                )
                if is_own and config["value"] is not None and not config["is_sensitive"]:
                    topic.configs.setdefault(config["name"], config["value"])

    def _use(self, request: Body, response: Body) -> None:
        for entry, number, _ in messages.partitions(request):
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
            is_internal = exchange.api_key in INTERNAL_APIS
            exchange.internal_reason = _INTERNAL if is_internal else reason


def _is_brokers(exchange: Exchange) -> bool:
    """Return whether only a broker sends this request."""
    if exchange.api_key in INTER_BROKER_APIS:
        return True
    if exchange.api_key not in _REPLICAS_APIS:
        return False
    request = messages.request_body(exchange)
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
