"""Real brokers and recordings for tests; where there are none, a test is skipped and says why."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker import kafka_broker, record


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[Callable[..., kafka_broker.Broker]]:
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
