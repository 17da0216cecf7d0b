"""A broker that sends nothing while requests wait, and neighbours that look like one."""

from __future__ import annotations

from typing import Any

from tests.incidents.made import Row, at, connection, found
from tests.report.made import exchange

CONNECTIONS = [connection(1), connection(2)]


def _answered(number: int, start_s: float, end_s: float, **values: Any) -> Row:
    return exchange(
        number, at_us=round(start_s * 1e6), latency_us=round((end_s - start_s) * 1e6), **values
    )


def _usual() -> list[Row]:
    """Requests of two connections that are answered at once, each 100 ms up to second 10."""
    return [
        _answered(n, n / 10, n / 10 + 0.002, connection_id=1 + n % 2, api_name="Produce")
        for n in range(100)
    ]


def test_all_connections_silent_then_all_responses_at_once() -> None:
    """A broker that answers all waiting requests at one time after a silence has stalled."""
    waiting = [
        _answered(201, 10.05, 13.2, connection_id=1, api_name="Produce"),
        _answered(202, 10.10, 13.2, connection_id=2, api_name="Produce"),
    ]
    (stall,) = found(exchanges=[*_usual(), *waiting], connections=CONNECTIONS)
    assert (stall["kind"], stall["severity"]) == ("broker_stall", "bad")
    assert stall["subject"] == "10.0.0.9:9092"
    assert stall["start_time"].timestamp() == at(10.05) / 1e6
    assert stall["end_time"].timestamp() == at(13.2) / 1e6
    assert stall["request_count"] == 2
    assert stall["time_lost_ms"] == 3150 + 3100
    assert stall["evidence"] == {"exchange_ids": [201, 202], "connection_ids": [1, 2]}


def test_one_slow_request_is_no_stall() -> None:
    """A single CreateTopics may wait for a controller."""
    slow = _answered(201, 10.05, 13.2, api_name="CreateTopics")
    assert found(exchanges=[*_usual(), slow], connections=CONNECTIONS) == []


def test_long_polls_and_group_waits_are_no_stall() -> None:
    """Requests that wait by their own settings are no evidence."""
    waiting = [
        _answered(201, 10.05, 13.2, connection_id=1, api_name="Fetch", wait="long_poll"),
        _answered(202, 10.05, 13.2, connection_id=2, api_name="JoinGroup", wait="group"),
    ]
    assert found(exchanges=[*_usual(), *waiting], connections=CONNECTIONS) == []


def test_a_response_on_another_connection_disproves_a_stall() -> None:
    """One response during the silence shows that the broker works."""
    waiting = [
        _answered(201, 10.05, 11.3, connection_id=1, api_name="Produce"),
        _answered(202, 10.05, 11.3, connection_id=2, api_name="Produce"),
        _answered(203, 10.6, 10.61, connection_id=1, api_name="Metadata"),
    ]
    assert found(exchanges=[*_usual(), *waiting], connections=CONNECTIONS) == []
