"""Clients and APIs whose responses take long, and neighbours that are slow by chance."""

import shlex

import pytest

from tests.builders.tables import Row, connection, exchange, found


def _answers(first: int, client: str, api: str, latency_us: int, every_us: int = 1000) -> list[Row]:
    return [
        exchange(
            first + n, at_us=n * every_us, client_id=client, api_name=api, latency_us=latency_us
        )
        for n in range(30)
    ]


def _slow(*exchanges: Row) -> list[Row]:
    # packets that are numbered by client look like a clock that steps
    rows = found(exchanges=exchanges, connections=[connection()])
    return [row for row in rows if row["kind"] != "clock_step"]


def test_a_client_that_is_slower_than_others_at_the_same_api() -> None:
    """The only incident is of the client that is slower at an API of several clients."""
    (slow,) = _slow(
        *_answers(100, "a", "Produce", 5_000),
        *_answers(200, "b", "Produce", 6_000),
        *_answers(300, "c", "Produce", 4_000),
        *_answers(400, "d", "Produce", 65_000, every_us=200_000),
        *_answers(500, "e", "CreateTopics", 90_000),
    )
    assert (slow["kind"], slow["subject"]) == ("slow_client", "d @ 10.0.0.1")
    usual = (5 + 6) / 2  # median of the clients' p95
    assert slow["time_lost_ms"] == pytest.approx(30 * (65 - usual))
    assert slow["evidence"]["exchange_ids"] == [400 + n for n in range(10)]
    command = shlex.split(slow["next_command"])
    assert command[3:] == ["--api", "Produce", "--client", "d", "--slow", "6ms"]


def test_a_few_slow_answers_do_not_make_a_slow_client() -> None:
    """One moment is one event, and of many clients one has the slowest answers."""
    rows: list[Row] = []
    seldom, in_one_moment = [n * 200_000 for n in range(3)], [n * 1000 for n in range(15)]
    for first, api, times in ((0, "Produce", seldom), (1000, "Metadata", in_one_moment)):
        for n in range(6):
            rows += _answers(first + 100 * n, f"c{n}", api, 5_000)
        rows += _answers(first + 950, "slow", api, 5_000)
        rows += [
            exchange(first + 900 + n, at_us=at, client_id="slow", api_name=api, latency_us=90_000)
            for n, at in enumerate(times)
        ]
    assert _slow(*rows) == []


def test_that_some_api_is_the_slowest_is_no_news() -> None:
    """Ordinary latency is no incident."""
    assert _slow(*_answers(1, "a", "Produce", 18_000), *_answers(50, "a", "Metadata", 900)) == []


def test_an_api_that_takes_long_for_all() -> None:
    """The incident has the percentile and the time lost."""
    (slow,) = _slow(*_answers(1, "a", "Produce", 400_000), *_answers(50, "b", "Metadata", 900))
    assert (slow["kind"], slow["subject"], slow["severity"]) == ("slow_api", "Produce", "info")
    assert "p95 of service_ms is 400 ms over 30 responses" in slow["text"]
    assert slow["time_lost_ms"] == pytest.approx(30 * 300)
