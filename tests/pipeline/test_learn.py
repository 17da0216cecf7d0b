"""What messages tell of a cluster: addresses of brokers, roles of nodes, owners of tokens."""

from __future__ import annotations

import pyarrow as pa
import pytest

import kdissect
from kdissect.pipeline.brokers import BROKER, CONTROLLER, ListedBroker, NodeRole, SeenBrokers
from kdissect.pipeline.clients import with_owners
from kdissect.pipeline.learn import Cluster
from tests.material import needs_material
from tests.truth.material import Capture


def ips(brokers: list[tuple[int, str, int]], listeners: set[tuple[str, int]]) -> list[str | None]:
    listed = {ListedBroker(*broker, None, "c") for broker in brokers}
    return table(SeenBrokers(listed, listeners=listeners)).sort_by("node_id")["ip"].to_pylist()


def table(brokers: SeenBrokers) -> pa.Table:
    """`brokers`, after their way from step to step."""
    return Cluster.from_bytes(Cluster(brokers=brokers).to_bytes()).brokers.table()


def test_an_address_is_itself() -> None:
    """A broker that advertises an address has it."""
    assert ips([(1, "10.0.0.1", 9092), (2, "fe80::1", 9092)], set()) == ["10.0.0.1", "fe80::1"]


def test_the_only_address_on_a_port() -> None:
    """A host name has the only captured address with its port."""
    brokers = [(1, "a.example", 9092), (2, "b.example", 9192)]
    assert ips(brokers, {("10.0.0.1", 9092), ("10.0.0.2", 9192)}) == ["10.0.0.1", "10.0.0.2"]


def test_the_address_that_is_left() -> None:
    """The last address without a broker belongs to the last name."""
    brokers = [(1, "10.0.0.1", 9092), (2, "b.example", 9092)]
    assert ips(brokers, {("10.0.0.1", 9092), ("10.0.0.2", 9092)}) == ["10.0.0.1", "10.0.0.2"]


def test_doubt_is_null() -> None:
    """A port with two names or two addresses has no known node."""
    both = {("10.0.0.1", 9092), ("10.0.0.2", 9092)}
    assert ips([(1, "a.example", 9092), (2, "b.example", 9092)], both) == [None, None]
    assert ips([(1, "a.example", 9092)], both) == [None]
    assert ips([(1, "a.example", 9092)], {("10.0.0.1", 9093)}) == [None]


def roles(brokers: list[tuple[int, str | None]], node_roles: set[NodeRole]) -> list[list[str]]:
    listed = {ListedBroker(node, "h", 1, None, cluster) for node, cluster in brokers}
    return table(SeenBrokers(listed, node_roles))["roles"].to_pylist()


def test_roles_of_one_cluster() -> None:
    """What a message says without naming the cluster counts for its only one."""
    node_roles = {
        NodeRole(1, BROKER, "c"),
        NodeRole(1, CONTROLLER, None),
        NodeRole(2, BROKER, "c"),
    }
    assert roles([(1, "c"), (2, "c"), (3, "c")], node_roles) == [
        [BROKER, CONTROLLER],
        [BROKER],
        [],
    ]


def test_roles_of_two_clusters() -> None:
    """Roles belong to a node of one cluster."""
    node_roles = {
        NodeRole(1, BROKER, "c"),
        NodeRole(1, CONTROLLER, None),
        NodeRole(1, CONTROLLER, "d"),
    }
    assert roles([(1, "c"), (1, "d")], node_roles) == [[BROKER], [CONTROLLER]]


def test_owners_of_tokens() -> None:
    """Only SCRAM's users are looked up; the same owner whichever message came first."""
    cluster = Cluster(owners={"id": "User:bob"})
    cluster.merge(Cluster(owners={"id": "User:alice", "other": "User:eve"}))
    connections = pa.table(
        {
            "principal": ["User:id", "User:id", None, "User:carol"],
            "sasl_mechanism": ["SCRAM-SHA-256", "PLAIN", "SCRAM-SHA-512", "SCRAM-SHA-256"],
        }
    )
    owners = Cluster.from_bytes(cluster.to_bytes()).owners
    found = with_owners(connections, owners)["principal"].to_pylist()
    assert found == ["User:alice", "User:id", None, "User:carol"]
    assert with_owners(connections, {}) is connections


@needs_material
@pytest.mark.parametrize("name", ["cluster/cluster", "zookeeper/zk_1_1_1"])
def test_roles_of_real_clusters(name: str) -> None:
    """Three combined nodes; with ZooKeeper one of two brokers is the controller."""
    found = [row["roles"] for row in Capture(name).rows("brokers")]
    both = [BROKER, CONTROLLER]
    assert found == ([both] * 3 if name.startswith("cluster") else [both, [BROKER]])


@needs_material
@pytest.mark.parametrize("name", ["tls/tls12", "tls/tls13"])
def test_topics_named_in_envelopes_only(name: str) -> None:
    """Without keys clients say nothing, but the broker forwards CreateTopics in the clear."""
    path = Capture(name).path
    told = {
        row["topic_id"]: row["topic"] for row in kdissect.read(path).topics.to_arrow().to_pylist()
    }
    with_keys = (
        kdissect.read(path, keylog=path.with_suffix(".keylog")).topics.to_arrow().to_pylist()
    )
    assert {topic for topic in told.values() if topic.startswith("tls-")}
    assert told.items() <= {row["topic_id"]: row["topic"] for row in with_keys}.items()
