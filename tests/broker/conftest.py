"""Real brokers and recordings for tests; where there are none, a test is skipped and says why."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker import kafka_broker, record
from tests.broker.sessions import Session, read_back, whole_session


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[kafka_broker.StartBroker]:
    """Starts empty brokers, stops them at the end: start_broker(kafka_version, **options)."""
    started: list[kafka_broker.Broker] = []

    def start(kafka_version: str = kafka_broker.LATEST, **options: Any) -> kafka_broker.Broker:
        folder = tmp_path / f"broker-{len(started)}"
        broker = kafka_broker.Broker(folder, kafka_version, **options)
        started.append(broker)
        try:
            return broker.start()
        except kafka_broker.Unavailable as error:
            pytest.skip(f"no broker: {error}")

    yield start
    for broker in started:
        broker.stop()


@pytest.fixture
def can_record() -> None:
    """The test needs to record loopback traffic."""
    try:
        record.capturer()
    except kafka_broker.Unavailable as error:
        pytest.skip(f"no recording of loopback traffic: {error}")


@pytest.fixture
def session(start_broker: kafka_broker.StartBroker, can_record: None, tmp_path: Path) -> Session:
    """A capture of the whole session, and the records of the topics after it."""
    broker = start_broker()
    with record.recording(tmp_path / "session.pcap", [broker.ports["PLAINTEXT"]]) as path:
        whole_session(broker.address)
    held = read_back(broker.address)
    broker.stop()
    return path, held
