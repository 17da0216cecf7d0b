"""Storms of connections, of Metadata and of retries, and busy clients without a storm."""

import pytest

from tests.builders.tables import Row, alarms, at, connection, exchange, expect, found


def _connections(
    count: int, interval_s: float, length_s: float, close_reason: str = "fin"
) -> list[Row]:
    starts = [number * interval_s for number in range(count)]
    return [
        connection(
            n, first_time=at(start), last_time=at(start + length_s), close_reason=close_reason
        )
        for n, start in enumerate(starts)
    ]


def _requests(count: int, interval_s: float, **values: object) -> dict[str, list[Row]]:
    values["connection_id"] = 0
    sent = [exchange(n, second=n * interval_s, **values) for n in range(count)]
    return {"connections": [connection(0)], "exchanges": sent}


def test_a_connection_for_each_record() -> None:
    """Forty connections, four a second, each shorter than a second, are a storm."""
    (storm,) = found(connections=_connections(40, 0.25, 0.2))
    expect(storm, "connection_storm", "warn", subject="app @ 10.0.0.1", start=0)
    assert "opened 40 connections to 10.0.0.9:9092 in 9.75 s, 4.1 a second" in storm["text"]


@pytest.mark.parametrize(
    ("count", "interval_s", "length_s"),
    [(20, 0.25, 0.2), (40, 0.25, 30), (60, 0.01, 0.2), (40, 3, 0.2)],
    ids=["few", "long-lived", "all at once", "far apart"],
)
def test_connections_that_are_no_storm(count: int, interval_s: float, length_s: float) -> None:
    """Few, long-lived, opened at once, rare or open connections are no incident."""
    assert found(connections=_connections(count, interval_s, length_s)) == []
    assert found(connections=_connections(40, 0.25, 0.2, "capture_end")) == []


def test_metadata_without_a_pause() -> None:
    """Ten Metadata requests a second for six seconds are a storm."""
    (storm,) = found(**_requests(60, 0.1, api_name="Metadata", client_id="app"))
    expect(storm, "metadata_storm", "warn", request_count=60, start=0)


@pytest.mark.parametrize(("count", "interval_s"), [(17, 0.1), (60, 1), (60, 0.001)])
def test_metadata_that_is_no_storm(count: int, interval_s: float) -> None:
    """A start, a refresh each second, and many clients that start at once are no incident."""
    assert found(**_requests(count, interval_s, api_name="Metadata")) == []


@pytest.mark.parametrize(("repeats", "is_storm"), [(2, False), (4, True)])
def test_metadata_of_many_topics(repeats: int, is_storm: bool) -> None:
    """A client asks twice for each topic that it makes; more often is a storm."""
    rows = _requests(60, 0.1, api_name="Metadata", client_id="app")
    for number, row in enumerate(rows["exchanges"]):
        row["topics"] = [f"import-{number // repeats}"]
    assert [row["kind"] for row in found(**rows)] == ["metadata_storm"] * is_storm


def test_requests_at_once_with_a_late_answer_are_no_storm() -> None:
    """Forty clients' requests within 40 ms, which a broker answers after four seconds."""
    late = {"response_time": at(4), "response_end_time": at(4)}
    rows = _requests(40, 0.001, api_name="Metadata", client_id="app", **late)
    assert "metadata_storm" not in {row["kind"] for row in found(**rows)}


_FAILED = {"error_code": 19, "error_name": "NOT_ENOUGH_REPLICAS", "error_codes": [19]}


def test_retries_without_a_pause() -> None:
    """A producer repeats a refused request every 50 ms."""
    (storm,) = found(**_requests(100, 0.05, api_name="Produce", client_id="app", **_FAILED))
    expect(storm, "retry_storm", "bad", subject="app @ 10.0.0.1")
    assert "sent 100 Produce requests" in storm["text"]
    assert "NOT_ENOUGH_REPLICAS" in storm["text"]


@pytest.mark.parametrize(("count", "interval_s", "error"), [(100, 0.05, {}), (15, 0.5, _FAILED)])
def test_requests_that_are_no_retry_storm(count: int, interval_s: float, error: Row) -> None:
    """Requests that succeed, and retries with Kafka's default pauses, are no incident."""
    assert alarms(**_requests(count, interval_s, api_name="Produce", **error)) == []


def test_a_quota_makes_a_client_wait() -> None:
    """Four responses name waits of a second; a wait of 50 ms alone is information. With a wait of
    11 s it stands still, and explains that its next request is slow to arrive (KIP-219)."""
    rows = _requests(4, 2, api_name="Produce", client_id="app", throttle_time_ms=1000)
    (wait,) = found(**rows)
    assert (wait["kind"], wait["severity"], wait["time_lost_ms"]) == ("throttled", "warn", 4000)
    assert "A quota of bytes written made app @ 10.0.0.1 wait 4.00 s" in wait["text"]
    (short,) = found(**_requests(1, 2, api_name="Fetch", throttle_time_ms=50))
    assert short["severity"] == "info"
    assert found(**_requests(4, 2, throttle_time_ms=0)) == []
    rows = _requests(2, 2, api_name="Produce", throttle_time_ms=11_000)
    rows["exchanges"][1] |= {"upload_ms": 10_900.0, "throttle_time_ms": 0}
    (still,) = found(**rows)
    assert (still["kind"], still["severity"]) == ("throttled", "bad")


def test_a_quota_of_requests_is_one_incident() -> None:
    """It throttles every API of a client: the incident has all of them."""
    rows = _requests(4, 2, api_name="Produce", throttle_time_ms=1000)
    for number, row in enumerate(rows["exchanges"]):
        row["api_name"] = ("Produce", "Metadata")[number % 2]
    (wait,) = found(**rows)
    assert (wait["kind"], wait["request_count"]) == ("throttled", 4)
    assert "A quota made app @ 10.0.0.1 wait" in wait["text"]
    assert "4 responses (Metadata, Produce)" in wait["text"]
