"""What messages tell of a cluster: addresses of brokers, roles of nodes, owners of tokens."""

import numpy as np
import pyarrow as pa
import pytest

import kdissect
from kdissect.codec.message_columns import body_type
from kdissect.pipeline.brokers import BROKER, CONTROLLER, ListedBroker, NodeRole, SeenBrokers
from kdissect.pipeline.learn import Cluster, with_owners
from kdissect.pipeline.topic_messages import add_bound, binding_structs
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import RESPONSE
from kdissect.tables.topics import ZERO_UUID_TEXT, SeenTopics
from tests.material import needs_material
from tests.truth.material import Capture


def ips(brokers: list[tuple[int, str, int]], listeners: set[tuple[str, int]]) -> list[str | None]:
    listed = {ListedBroker(*broker, None, "c") for broker in brokers}
    return table(SeenBrokers(listed, listeners=listeners)).sort_by("node_id")["ip"].to_pylist()


def table(brokers: SeenBrokers) -> pa.Table:
    """`brokers`, after their way from step to step."""
    return Cluster.from_bytes(Cluster(brokers=brokers).to_bytes()).brokers.table()


A, B = (1, "a.example", 9092), (2, "b.example", 9092)
FIRST, SECOND = ("10.0.0.1", 9092), ("10.0.0.2", 9092)


@pytest.mark.parametrize(
    ("brokers", "listeners", "expected"),
    [
        ([(1, "10.0.0.1", 9092), (2, "fe80::1", 9092)], set(), ["10.0.0.1", "fe80::1"]),
        # the only address on a port
        ([A, (2, "b.example", 9192)], {FIRST, ("10.0.0.2", 9192)}, ["10.0.0.1", "10.0.0.2"]),
        # the address that is left
        ([(1, "10.0.0.1", 9092), B], {FIRST, SECOND}, ["10.0.0.1", "10.0.0.2"]),
        # doubt: two names or two addresses on a port, or none
        ([A, B], {FIRST, SECOND}, [None, None]),
        ([A], {FIRST, SECOND}, [None]),
        ([A], {("10.0.0.1", 9093)}, [None]),
    ],
)
def test_addresses_of_host_names(brokers, listeners, expected) -> None:
    """A host name has the only address that may be its own; a port in doubt has no known node."""
    assert ips(brokers, listeners) == expected


def roles(brokers: list[tuple[int, str | None]], node_roles: set[NodeRole]) -> list[list[str]]:
    listed = {ListedBroker(node, "h", 1, None, cluster) for node, cluster in brokers}
    return table(SeenBrokers(listed, node_roles))["roles"].to_pylist()


def test_roles_of_one_cluster_and_of_two() -> None:
    """What a message says without naming the cluster counts for its only one; else roles belong to
    a node of one cluster."""
    told = {NodeRole(1, BROKER, "c"), NodeRole(1, CONTROLLER, None)}
    one = told | {NodeRole(2, BROKER, "c")}
    assert roles([(1, "c"), (2, "c"), (3, "c")], one) == [[BROKER, CONTROLLER], [BROKER], []]
    two = told | {NodeRole(1, CONTROLLER, "d")}
    assert roles([(1, "c"), (1, "d")], two) == [[BROKER], [CONTROLLER]]


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
    told = {row["topic_id"]: row["topic"] for row in kdissect.read(path).topics.to_pylist()}
    with_keys = kdissect.read(path, keylog=path.with_suffix(".keylog")).topics.to_pylist()
    assert {topic for topic in told.values() if topic.startswith("tls-")}
    assert told.items() <= {row["topic_id"]: row["topic"] for row in with_keys}.items()


def test_topics_are_learnt_by_name_and_id() -> None:
    """Each Metadata response tells its topics that have both, none without an id."""
    body = {
        "topics": [
            {"name": "orders", "topic_id": "AAAAAAAAAAAAAAAAAAAAAg", "partitions": []},
            {"name": None, "topic_id": "AAAAAAAAAAAAAAAAAAAAAw", "partitions": []},
            {"name": "old", "topic_id": ZERO_UUID_TEXT, "partitions": []},
            {"name": "older", "partitions": []},
            {"name": "", "topic_id": "AAAAAAAAAAAAAAAAAAAABA", "partitions": None},
        ]
    }
    bodies = pa.array([body, None, body], body_type(ApiKey.METADATA, "response"))
    topics = SeenTopics()
    add_bound(topics, ApiKey.METADATA, RESPONSE, bodies, np.array([9, 8, 7]))
    assert topics.first == {("orders", "AAAAAAAAAAAAAAAAAAAAAg"): (7, "Metadata")}
    assert (ApiKey.FETCH, RESPONSE) not in binding_structs()
