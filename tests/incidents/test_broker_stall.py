"""A broker that sends nothing while requests wait, and neighbours that look like one."""

from typing import Any

import pytest

from tests.builders.tables import Row, at, connection, exchange, expect, found

CONNECTIONS = [connection(1), connection(2)]


def _answered(number: int, start_s: float, end_s: float, **values: Any) -> Row:
    return exchange(number, second=start_s, latency_us=round((end_s - start_s) * 1e6), **values)


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
    expect(stall, "broker_stall", "bad", subject="10.0.0.9:9092", start=10.05, end=13.2)
    assert (stall["request_count"], stall["time_lost_ms"]) == (2, 3150 + 3100)
    assert stall["evidence"] == {"exchange_ids": [201, 202], "connection_ids": [1, 2]}


_WAIT = (10.05, 13.2)
_NO_STALL = {
    "CreateTopics may wait for a controller": [_answered(201, *_WAIT, api_name="CreateTopics")],
    "long polls and waits for a group": [
        _answered(201, *_WAIT, connection_id=1, api_name="Fetch", wait="long_poll"),
        _answered(202, *_WAIT, connection_id=2, api_name="JoinGroup", wait="group"),
    ],
    "a response in between shows that the broker works": [
        _answered(201, 10.05, 11.3, connection_id=1, api_name="Produce"),
        _answered(202, 10.05, 11.3, connection_id=2, api_name="Produce"),
        _answered(203, 10.6, 10.61, connection_id=1, api_name="Metadata"),
    ],
}


@pytest.mark.parametrize("waiting", _NO_STALL.values(), ids=_NO_STALL)
def test_waits_that_are_no_stall(waiting: list[Row]) -> None:
    """Requests that wait by their own settings, or a broker that answers others."""
    assert found(exchanges=[*_usual(), *waiting], connections=CONNECTIONS) == []


def test_a_single_producer_that_waits() -> None:
    """Produce needs no other client: the silence of its only connection is a stall."""
    waiting = [_answered(200 + n, 10 + n / 10, 13.2, api_name="Produce") for n in range(5)]
    (stall,) = found(exchanges=[*_usual(), *waiting], connections=CONNECTIONS)
    expect(stall, "broker_stall", request_count=5, start=10)


def test_a_connection_that_a_quota_mutes_is_no_stall() -> None:
    """The broker reads the next request when the throttle time is over (KIP-219)."""
    fetches = [
        _answered(300 + n, 10 + 2 * n, 12 + 2 * n, connection_id=1, api_name="Fetch",
                  throttle_time_ms=2000)
        for n in range(5)
    ]  # fmt: skip
    quota = [{**_usual()[0], "exchange_id": 299, "throttle_time_ms": 15_000}, *fetches]
    incidents = found(exchanges=quota, connections=CONNECTIONS)
    assert [row["kind"] for row in incidents] == ["throttled"]


def test_a_stall_that_lasts_until_the_capture_ends() -> None:
    """Requests without a response on connections that stay open wait until the last packet."""
    waiting = [
        exchange(
            200 + n, at_us=57_000_000 + n, latency_us=None, connection_id=n, api_name="Produce"
        )
        for n in (1, 2)
    ]
    (stall,) = found(exchanges=[*_usual(), *waiting], connections=CONNECTIONS)
    expect(stall, "broker_stall", end=60)
    assert "waited; none was answered by its end" in stall["text"]
    until = {"options": {"time_to_ns": at(59) * 1000}}
    (stall,) = found(manifest=until, exchanges=[*_usual(), *waiting], connections=CONNECTIONS)
    expect(stall, "broker_stall", end=59)
    gone = [connection(n, close_reason="fin") for n in (1, 2)]
    assert found(exchanges=[*_usual(), *waiting], connections=gone) == []
