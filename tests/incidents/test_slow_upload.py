"""Requests that take long to arrive, and the signs of TCP for it."""

import pytest

from tests.builders.tables import SECOND_US, Row, at, connection, exchange, expect, found


def _produce(number: int, upload_ms: float) -> Row:
    begins_us = number * 10 * SECOND_US
    upload_us = round(upload_ms * 1000)
    times = {"upload_ms": upload_ms, "request_end_time": at(number * 10) + upload_us}
    row = exchange(number, at_us=begins_us, latency_us=upload_us + 1000, api_name="Produce")
    return row | times | {"service_ms": 1.0}


def test_uploads_into_a_full_receive_window() -> None:
    """Two uploads of 6 s: the broker read too slowly, and no window scaling was agreed."""
    full = {"response_zero_window_count": 5, "response_zero_window_ms": 9000.0}
    syns = {"request_syn_seen": True, "response_syn_seen": True, "request_window_scale": 7}
    one = connection(**full, **syns)
    (slow,) = found(connections=[one], exchanges=[_produce(0, 6000), _produce(1, 6000)])
    expect(slow, "slow_upload", "bad", subject="app @ 10.0.0.1", request_count=2, start=0)
    assert "announced a full receive window 5 times, 9.00 s in all" in slow["text"]
    assert "no window scaling" in slow["text"]


@pytest.mark.parametrize(
    "signs",
    [
        {},
        {"response_zero_window_count": 1, "response_zero_window_ms": 0.5},
        {"request_segment_count": 10_000, "response_segment_count": 10_000,
         "request_retransmitted_segment_count": 1},
    ],
    ids=["none", "a short zero window", "one segment"],
)  # fmt: skip
def test_uploads_without_a_sign_of_tcp(signs: Row) -> None:
    """TCP shows nothing, or too little for the length of the upload: the text names no cause."""
    (slow,) = found(connections=[connection(**signs)], exchanges=[_produce(0, 2000)])
    assert slow["severity"] == "warn"
    assert "TCP shows no cause" in slow["text"]


def test_quick_uploads_are_no_incident() -> None:
    """Uploads of less than a second are usual for large requests."""
    assert found(connections=[connection()], exchanges=[_produce(0, 900)]) == []


def test_short_uploads_that_follow_one_another() -> None:
    """Twenty small requests of 600 ms each take most of the time; three of them do not."""
    small = {"api_name": "Produce", "request_size": 20_000, "upload_ms": 600.0, "service_ms": 1.0}
    requests = [
        exchange(n, second=0.7 * n, request_end_time=at(0.7 * n + 0.6), **small) for n in range(20)
    ]
    (slow,) = found(connections=[connection()], exchanges=requests)
    assert (slow["kind"], slow["request_count"]) == ("slow_upload", 20)
    assert found(connections=[connection()], exchanges=requests[:3]) == []
    large = [{**row, "request_size": 5_000_000} for row in requests]  # a usual network
    assert found(connections=[connection()], exchanges=large) == []
