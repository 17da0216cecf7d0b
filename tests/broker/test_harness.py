"""The test broker starts, logs its requests, and stops."""

from pathlib import Path

import pytest

import kdissect
from tests.broker.kafka_broker import StartBroker
from tests.broker.record import recording


@pytest.mark.broker
@pytest.mark.heavy
def test_a_session_is_recorded(start_broker: StartBroker, can_record: None, tmp_path: Path) -> None:
    """A client's calls to a broker of our own are found in the recording."""
    from kafka import KafkaProducer

    broker = start_broker()
    with recording(tmp_path / "session.pcap", [broker.ports["PLAINTEXT"]]) as path:
        producer = KafkaProducer(bootstrap_servers=broker.address, acks="all")
        producer.send("orders", key=b"k", value=b"v").get(timeout=20)
        producer.close()
    tables = kdissect.read(path)
    names = set(tables.exchanges.to_pandas().api_name)
    assert {"ApiVersions", "Metadata", "Produce"} <= names
    # once or more often: the topic comes by being asked for, and has no leader at first
    assert set(tables.records.to_pandas().topic) == {"orders"}
