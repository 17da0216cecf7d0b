"""Addresses of brokers that Metadata tells by name."""

from kdissect.pipeline.facts import Facts, brokers_table


def ips(brokers: list[tuple[int, str, int]], listeners: set[tuple[str, int]]) -> list[str | None]:
    facts = Facts(brokers={(*broker, None, "c") for broker in brokers}, listeners=listeners)
    packed = Facts.from_bytes(facts.to_bytes())
    rows = brokers_table(packed).sort_by("node_id")
    return rows["ip"].to_pylist()


def test_an_address_is_itself() -> None:
    assert ips([(1, "10.0.0.1", 9092), (2, "fe80::1", 9092)], set()) == ["10.0.0.1", "fe80::1"]


def test_the_only_address_on_a_port() -> None:
    brokers = [(1, "a.example", 9092), (2, "b.example", 9192)]
    assert ips(brokers, {("10.0.0.1", 9092), ("10.0.0.2", 9192)}) == ["10.0.0.1", "10.0.0.2"]


def test_the_address_that_is_left() -> None:
    brokers = [(1, "10.0.0.1", 9092), (2, "b.example", 9092)]
    assert ips(brokers, {("10.0.0.1", 9092), ("10.0.0.2", 9092)}) == ["10.0.0.1", "10.0.0.2"]


def test_doubt_is_null() -> None:
    """Two names on one port, or two addresses: nothing tells which is which."""
    both = {("10.0.0.1", 9092), ("10.0.0.2", 9092)}
    assert ips([(1, "a.example", 9092), (2, "b.example", 9092)], both) == [None, None]
    assert ips([(1, "a.example", 9092)], both) == [None]
    assert ips([(1, "a.example", 9092)], {("10.0.0.1", 9093)}) == [None]
