"""Brokers and controllers that messages list: addresses, racks and roles.

The roles are those of KRaft's ``process.roles``. A node is a broker if Metadata or DescribeCluster
sends clients to it, or if it registers as one. A node is a controller if it registers as one, votes
in the quorum or leads it, or asks brokers to change their partitions. With ZooKeeper the controller
is one of the brokers.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kdissect.kafka.assembly import Assembly, Protocol
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import REQUEST
from kdissect.tables.connections import endpoint_columns
from kdissect.tables.schemas import BROKERS, table_of

BROKER, CONTROLLER = "broker", "controller"
_CONTROLLER_ENDPOINTS = 2  # DescribeCluster's endpoint_type (KIP-919)

# Requests that name their sender in a top-level field. Only a controller sends the first three.
_SENDERS = {
    ApiKey.LEADER_AND_ISR: ("controller_id", CONTROLLER),
    ApiKey.STOP_REPLICA: ("controller_id", CONTROLLER),
    ApiKey.UPDATE_METADATA: ("controller_id", CONTROLLER),
    ApiKey.BROKER_REGISTRATION: ("broker_id", BROKER),
    ApiKey.BROKER_HEARTBEAT: ("broker_id", BROKER),
    ApiKey.CONTROLLER_REGISTRATION: ("controller_id", CONTROLLER),
}
ROLE_REQUESTS = frozenset((*_SENDERS, ApiKey.BEGIN_QUORUM_EPOCH))
LISTINGS = frozenset((ApiKey.METADATA, ApiKey.DESCRIBE_CLUSTER))
ROLE_RESPONSES = LISTINGS | {ApiKey.DESCRIBE_QUORUM}


class ListedBroker(NamedTuple):
    """A broker as a message lists it."""

    node_id: int
    host: str
    port: int
    rack: str | None
    cluster_id: str | None


class NodeRole(NamedTuple):
    """A role of a node; cluster_id if the message has it."""

    node_id: int
    role: str
    cluster_id: str | None


@dataclass(slots=True)
class SeenBrokers:
    """Brokers that messages list, with their roles.

    listeners: IP address and port of the broker's end of each Kafka connection.
    """

    listed: set[ListedBroker] = field(default_factory=set)
    roles: set[NodeRole] = field(default_factory=set)
    listeners: set[tuple[str, int]] = field(default_factory=set)

    def merge(self, other: SeenBrokers) -> None:
        self.listed |= other.listed
        self.roles |= other.roles
        self.listeners |= other.listeners

    def add_listeners(self, assembly: Assembly) -> None:
        kafka = assembly.connections[assembly.connections["protocol"] == Protocol.KAFKA]
        where = endpoint_columns(assembly.endpoints, kafka)
        ends = zip(where.broker_ip.to_pylist(), where.broker_port.tolist(), strict=True)
        self.listeners.update(ends)

    def add(self, api_key: int, side: int, body: pa.StructArray) -> None:
        """Add what messages of ROLE_REQUESTS (side 0) or ROLE_RESPONSES (side 1) tell."""
        if side == REQUEST and api_key in _SENDERS:
            name, role = _SENDERS[ApiKey(api_key)]
            self._add_roles(body.field(name), role)
        elif api_key == ApiKey.DESCRIBE_QUORUM:
            voters = _nested(body, "topics", "partitions", "current_voters")
            self._add_roles(voters.field("replica_id"), CONTROLLER)
        elif api_key == ApiKey.BEGIN_QUORUM_EPOCH:
            leaders = _nested(body, "topics", "partitions").field("leader_id")
            self._add_roles(leaders, CONTROLLER)
            self._add_roles(body.field("voter_id"), CONTROLLER)
        elif api_key in LISTINGS:
            self._add_listing(api_key, body)

    def _add_roles(self, nodes: pa.Array, role: str) -> None:
        known = (node for node in pc.unique(nodes).to_pylist() if node is not None and node >= 0)
        self.roles.update(NodeRole(node, role, None) for node in known)

    def _add_listing(self, api_key: int, body: pa.StructArray) -> None:
        """The brokers of Metadata; of DescribeCluster brokers or controllers."""
        brokers = body.field("brokers")
        flat = brokers.flatten()
        parents = pc.list_parent_indices(brokers)
        role = pa.array([BROKER] * len(flat), pa.string())
        if api_key == ApiKey.DESCRIBE_CLUSTER:
            kind = pc.fill_null(body.field("endpoint_type"), 0).take(parents)
            role = pc.if_else(pc.equal(kind, _CONTROLLER_ENDPOINTS), CONTROLLER, BROKER)
        columns = {
            "node_id": flat.field("node_id" if api_key == ApiKey.METADATA else "broker_id"),
            **{name: flat.field(name) for name in ("host", "port", "rack")},
            "cluster_id": body.field("cluster_id").take(parents),
            "role": role,
        }
        distinct = pa.table(columns).group_by(list(columns), use_threads=False).aggregate([])
        for row in distinct.to_pylist():
            self.roles.add(NodeRole(row["node_id"], row.pop("role"), row["cluster_id"]))
            self.listed.add(ListedBroker(**row))

    def table(self) -> pa.Table:
        """Rows of `brokers`; `ip` if the host is an address, or if `_addresses` resolves it."""
        rows = sorted(self.listed, key=lambda row: tuple("" if v is None else str(v) for v in row))
        addresses = self._addresses()
        roles = self._roles_by_node({row.cluster_id for row in rows})
        columns = {name: [getattr(row, name) for row in rows] for name in ListedBroker._fields}
        columns["ip"] = [addresses.get(row.host) for row in rows]
        columns["roles"] = [sorted(roles.get((row.node_id, row.cluster_id), ())) for row in rows]
        return table_of(BROKERS, columns)

    def _roles_by_node(self, clusters: set[str | None]) -> dict[tuple[int, str | None], set[str]]:
        """(node, cluster id) -> roles.

        A message without a cluster id counts for every cluster if the captures show only one.
        """
        roles: dict[tuple[int, str | None], set[str]] = {}
        is_one = len(clusters - {None}) <= 1
        for node, role, cluster in self.roles:
            for cluster_id in clusters if is_one else {cluster}:
                roles.setdefault((node, cluster_id), set()).add(role)
        return roles

    def _addresses(self) -> dict[str, str]:
        """host -> IP address.

        A host name is resolved if its port is unambiguous: one host name and one address of Kafka
        connections use that port. Addresses that messages list as such are left out.
        """
        addresses: dict[str, str] = {}
        names: dict[int, set[str]] = {}  # port -> hosts that are names
        for broker in self.listed:
            try:
                addresses[broker.host] = str(ipaddress.ip_address(broker.host))
            except ValueError:
                names.setdefault(broker.port, set()).add(broker.host)
        taken = {
            (addresses[broker.host], broker.port)
            for broker in self.listed
            if broker.host in addresses
        }
        ips: dict[int, set[str]] = {}
        for ip, port in self.listeners - taken:
            ips.setdefault(port, set()).add(ip)
        resolved: dict[str, set[str]] = {}
        for port, hosts in names.items():
            if len(hosts) == 1 and len(ips.get(port, ())) == 1:
                resolved.setdefault(min(hosts), set()).update(ips[port])
        only = {host: min(found) for host, found in resolved.items() if len(found) == 1}
        return addresses | only


def _nested(body: pa.StructArray, *names: str) -> pa.StructArray:
    """The innermost structs of nested lists of structs, flattened."""
    for name in names:
        body = body.field(name).flatten()
    return body
