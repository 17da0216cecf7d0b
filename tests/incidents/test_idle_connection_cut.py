"""Connections that died while they idled, and idle ones that still work."""

from typing import Any

from tests.builders.tables import Row, at, connection, exchange, expect, found


def _open(number: int, seconds: float = 0, **values: Any) -> Row:
    """A connection that the broker accepted, with its last response a second later."""
    opened = {"syn_count": 1, "unanswered_syn_count": 0, "refused": False}
    answered = {"response_byte_count": 100, "response_last_time": at(seconds + 1)}
    return connection(number, first_time=at(seconds), **opened, **answered) | values


def _answered(number: int, seconds: float, connection_id: int = 1) -> Row:
    return exchange(number, connection_id=connection_id, second=seconds)


def _waiting(number: int, seconds: float, **values: Any) -> Row:
    values.setdefault("api_name", "Produce")
    return exchange(number, second=seconds, latency_us=None, **values)


def test_an_idle_connection_that_was_cut() -> None:
    """After a minute of silence a request has no response, while another connection works."""
    rows = {
        "connections": [_open(1, last_time=at(58)), _open(2, 56)],
        "exchanges": [_answered(0, 1), _waiting(1, 55), _answered(2, 57, 2)],
    }
    (cut,) = found(**rows)
    expect(cut, "idle_connection_cut", "bad", subject="app @ 10.0.0.1", start=55)
    assert "died while idle for 54" in cut["text"]
    del rows["exchanges"][2:]  # the broker sends no response to any client: no cut connection
    assert found(**rows) == []


def test_connections_that_are_silent_and_one_that_is_reset() -> None:
    """They are two incidents. Times that two requests wait side by side do not add up."""
    end = {"last_time": at(55.001), "close_reason": "rst", "closed_by": "broker"}
    opened = [_open(1, last_time=at(75)), _open(2, last_time=at(75)), _open(3, **end), _open(4, 56)]
    asked = [_waiting(n + 10, 55, connection_id=n) for n in (1, 2, 3)]
    answered = [*(_answered(n, 1, n) for n in (1, 2, 3)), _answered(40, 57, 4)]
    silent, reset = found(connections=opened, exchanges=answered + asked)
    expect(silent, "idle_connection_cut", "bad", request_count=2)
    assert "Nothing answered 2 requests for up to 20.0 s" in silent["text"]
    expect(reset, "idle_connection_cut", "warn", request_count=1)


def test_an_idle_connection_that_its_client_closes_is_no_cut() -> None:
    """A request without a response from a closing client is no incident."""
    closing = _open(1, last_time=at(55.1), close_reason="fin", closed_by="client")
    rows = [_answered(0, 1), _waiting(1, 55), _answered(2, 57, 2)]
    assert found(connections=[closing, _open(2, 56)], exchanges=rows) == []


def test_a_consumer_whose_connection_was_cut() -> None:
    """Its Fetch has no response, though the broker may hold it for 500 ms only."""
    waits: list[Row] = [{"exchange_id": 1, "request": {"max_wait_ms": 500}}]
    rows = {
        "connections": [_open(1, last_time=at(58)), _open(2, 56)],
        "exchanges": [_answered(0, 1), _waiting(1, 55, api_name="Fetch"), _answered(2, 57, 2)],
    }
    (cut,) = found(**rows, apis__Fetch=waits)
    assert cut["kind"] == "idle_connection_cut"
    waits[0]["request"] = {"max_wait_ms": 2000}
    assert found(**rows, apis__Fetch=waits) == []
