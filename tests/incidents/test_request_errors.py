"""Requests that failed: with an error that passes, for good, or without a response."""

import pytest

from tests.builders.tables import Row, connection, exchange, expect, found

_RETRIABLE, _PERMANENT = 15, 69  # COORDINATOR_NOT_AVAILABLE, GROUP_ID_NOT_FOUND


def _asked(number: int, api: str, at_ms: int, client: str = "a", error: int = 0) -> Row:
    return exchange(
        number, at_us=at_ms * 1000, client_id=client, api_name=api, latency_us=2_000,
        error_code=error, error_codes=[error] if error else [],
    )  # fmt: skip


def _errors(*exchanges: Row) -> list[Row]:
    return found(exchanges=exchanges, connections=[connection()])


def test_an_error_that_lasts() -> None:
    """It counts if a client's next success is a second or more away, or not in the capture."""
    soon = [_asked(n, "OffsetFetch", 20 * n, error=_RETRIABLE if n < 2 else 0) for n in range(3)]
    assert _errors(*soon) == []
    late = [_asked(8, "OffsetFetch", 100, "b", _RETRIABLE), _asked(9, "OffsetFetch", 1400, "b")]
    (error,) = _errors(*soon, *late)
    expect(error, "request_errors", "info", subject="OffsetFetch", request_count=3)
    assert error["time_lost_ms"] == pytest.approx(42 + 1302)
    assert "3 responses with COORDINATOR_NOT_AVAILABLE to a @ 10.0.0.1, b @" in error["text"]
    assert "A request without it followed within 1.30 s" in error["text"]
    (never,) = _errors(*soon, late[0])
    assert (never["kind"], never["time_lost_ms"]) == ("request_errors", None)


def test_an_error_that_does_not_pass() -> None:
    """Trying again does not help, so that later successes are of other requests."""
    (refused,) = _errors(
        _asked(1, "DeleteGroups", 0, error=_PERMANENT), _asked(2, "DeleteGroups", 9000)
    )
    assert (refused["kind"], refused["request_count"]) == ("refused_requests", 1)
    assert "Trying again does not help" in refused["text"]
    assert "list_contains(error_codes, 69)" in refused["next_command"]


def test_a_routine_step_is_no_error() -> None:
    """A new member is asked to join with its id (KIP-394)."""
    assert _errors(_asked(1, "JoinGroup", 0, error=79)) == []


def test_an_error_that_a_broker_tries_again_until_it_succeeds() -> None:
    """DUPLICATE_BROKER_REGISTRATION is permanent by its code; it ends with the old session."""
    rows = [
        _asked(n, "BrokerRegistration", n * 1000, error=code) | {"api_key": 62}
        for n, code in ((1, 101), (2, 101), (3, 0))
    ]
    (error,) = _errors(*rows)
    assert error["kind"] == "request_errors"
    assert "A request without it followed within 2.00 s" in error["text"]


def test_requests_whose_connection_was_closed() -> None:
    """A Fetch that was on hold when its client closed is none."""
    lost = {"latency_us": None, "status": "connection_closed"}
    closed = connection(last_time=exchange(0, at_us=5_000_000)["request_time"])
    rows = [
        exchange(1, api_name="Produce", at_us=4_000_000, **lost),
        exchange(2, api_name="Fetch", at_us=4_000_000, **lost),
    ]
    (unanswered,) = found(
        exchanges=rows, connections=[closed | {"close_reason": "fin", "closed_by": "broker"}]
    )
    expect(unanswered, "unanswered_requests", subject="app @ 10.0.0.1", request_count=1)
    assert unanswered["time_lost_ms"] == 1000
