"""What is refused, and by which option it would be allowed."""

import pytest

from kdissect.replay.model import WorkloadFacts
from kdissect.replay.target.cluster import Target, TargetError, parse_address
from kdissect.replay.target.guard import GuardError, check_address, check_cluster, parse_allow

FACTS = WorkloadFacts(
    cluster_ids=["captured"],
    brokers={1: ("broker-1.example", 9092), 2: ("localhost", 9093)},
    listeners=[("127.0.0.1", 9092), ("2001:db8::1", 9092)],
)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("127.0.0.1", 9092),
        ("localhost", 9092),
        ("LOCALHOST", 9093),
        ("Broker-1.example", 9092),
        ("2001:db8:0::1", 9092),
        ("::ffff:127.0.0.1", 9092),
    ],
)
def test_addresses_of_the_captured_cluster(host: str, port: int) -> None:
    """As spelled in the capture, as another spelling, as a name of it."""
    with pytest.raises(GuardError, match="--allow same-cluster"):
        check_address(FACTS, host, port, same_cluster=False)
    check_address(FACTS, host, port, same_cluster=True)


def test_other_addresses_are_not_the_captured_cluster() -> None:
    """Another port, and a name without an address, are not the captured cluster."""
    check_address(FACTS, "127.0.0.1", 9094, same_cluster=False)
    check_address(FACTS, "no-such-name.invalid", 9092, same_cluster=False)


def test_the_captured_cluster_id_is_refused() -> None:
    """The captured cluster id is refused without --allow same-cluster."""
    target = Target("127.0.0.1", 9094, cluster_id="captured")
    with pytest.raises(GuardError, match="captured cluster"):
        check_cluster(FACTS, target, same_cluster=False)
    check_cluster(FACTS, target, same_cluster=True)
    for other in ("another", None):
        check_cluster(FACTS, Target("h", 1, cluster_id=other), same_cluster=False)


def test_classes_are_allowed_by_name() -> None:
    """Case and spaces do not matter; other names raise GuardError."""
    assert parse_allow([]) == frozenset()
    assert parse_allow(["produce, groups", "Admin"]) == {"produce", "groups", "admin"}
    assert parse_allow(["read"]) == frozenset()
    for wrong in ("all", "write", "produce,everything"):
        with pytest.raises(GuardError, match="produce, groups, transactions, admin"):
            parse_allow([wrong])


def test_a_target_is_host_and_port() -> None:
    """HOST:PORT, with brackets around IPv6; other text raises TargetError."""
    assert parse_address("broker:9092") == ("broker", 9092)
    assert parse_address("[::1]:9092") == ("::1", 9092)
    for wrong in ("broker", "broker:", ":9092", "::1:9092", "b:0", "b:70000", "b:x"):
        with pytest.raises(TargetError):
            parse_address(wrong)
