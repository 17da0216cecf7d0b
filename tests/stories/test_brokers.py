"""What is known of brokers: the addresses of names, roles of nodes, owners of tokens."""

from __future__ import annotations

import pyarrow as pa
import pytest

import kdissect
from kdissect.pipeline.cluster_facts import BROKER_ROLE, CONTROLLER, NodeRole
from kdissect.pipeline.facts import CaptureFacts, brokers_table, with_owners
from tests.material import needs_material
from tests.truth.material import Capture


def ips(brokers: list[tuple[int, str, int]], listeners: set[tuple[str, int]]) -> list[str | None]:
    facts = CaptureFacts(brokers={(*broker, None, "c") for broker in brokers}, listeners=listeners)
    packed = CaptureFacts.from_bytes(facts.to_bytes())
    rows = brokers_table(packed).sort_by("node_id")
    return rows["ip"].to_pylist()


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
    facts = CaptureFacts(
        brokers={(node, "h", 1, None, cluster) for node, cluster in brokers}, roles=node_roles
    )
    return brokers_table(CaptureFacts.from_bytes(facts.to_bytes()))["roles"].to_pylist()


def test_roles_of_one_cluster() -> None:
    """What a message says without naming the cluster counts for its only one."""
    node_roles: set[NodeRole] = {
        (1, BROKER_ROLE, "c"),
        (1, CONTROLLER, None),
        (2, BROKER_ROLE, "c"),
    }
    assert roles([(1, "c"), (2, "c"), (3, "c")], node_roles) == [
        [BROKER_ROLE, CONTROLLER],
        [BROKER_ROLE],
        [],
    ]


def test_roles_of_two_clusters() -> None:
    """Roles belong to a node of one cluster."""
    node_roles: set[NodeRole] = {(1, BROKER_ROLE, "c"), (1, CONTROLLER, None), (1, CONTROLLER, "d")}
    assert roles([(1, "c"), (1, "d")], node_roles) == [[BROKER_ROLE], [CONTROLLER]]


def test_owners_of_tokens() -> None:
    """Only SCRAM's users are looked up; the same owner whichever message came first."""
    facts = CaptureFacts(owners={"id": "User:bob"})
    facts.merge(CaptureFacts(owners={"id": "User:alice", "other": "User:eve"}))
    table = pa.table(
        {
            "principal": ["User:id", "User:id", None, "User:carol"],
            "sasl_mechanism": ["SCRAM-SHA-256", "PLAIN", "SCRAM-SHA-512", "SCRAM-SHA-256"],
        }
    )
    found = with_owners(table, CaptureFacts.from_bytes(facts.to_bytes()))["principal"].to_pylist()
    assert found == ["User:alice", "User:id", None, "User:carol"]
    assert with_owners(table, CaptureFacts()) is table


@needs_material
@pytest.mark.parametrize("name", ["cluster/cluster", "zookeeper/zk_1_1_1"])
def test_roles_of_real_clusters(name: str) -> None:
    """Three combined nodes; with ZooKeeper one of two brokers is the controller."""
    found = [row["roles"] for row in Capture(name).rows("brokers")]
    both = [BROKER_ROLE, CONTROLLER]
    assert found == ([both] * 3 if name.startswith("cluster") else [both, [BROKER_ROLE]])


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
