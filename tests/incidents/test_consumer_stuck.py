"""Consumers that fetch one offset again and again, and consumers that only seem to."""

import pytest

from tests.builders.tables import Row, connection, exchange, expect, found

_END = 1000  # of the partition


def _incidents(*fetches: tuple[float, int, int]) -> list[Row]:
    """Incidents of fetches from orders-0: (second, offset, connection)."""
    exchanges, fetched = [], []
    for number, (second, offset, connection_id) in enumerate(fetches):
        place = {"second": second, "connection_id": connection_id}
        exchanges.append(exchange(number, api_name="Fetch", **place))
        asked = [{"partition": 0, "fetch_offset": offset}]
        answer = [{"partition_index": 0, "error_code": 0, "high_watermark": _END}]
        topics = [{"topic": "orders", "partitions": each} for each in (asked, answer)]
        request = {"max_bytes": 1 << 20, "topics": topics[:1]}
        response = {"responses": topics[1:]}
        fetched.append({"exchange_id": number, "request": request, "response": response})
    connections = [connection(number) for number in {one[2] for one in fetches}]
    return found(exchanges=exchanges, connections=connections, apis__Fetch=fetched)


def test_an_application_that_seeks_back() -> None:
    """The client fetches ahead, so that other offsets lie between the repetitions."""
    fetches = [(1.0, 100, 1), (1.1, 150, 1)]
    for number in range(8):
        fetches += [(2.0 + number, 120, 1), (2.1 + number, 150 + number, 1)]
    (stuck,) = _incidents(*fetches)
    # the fetch for 150 shows that the consumer has the record at 120
    expect(stuck, "consumer_stuck", "bad", subject="orders-0", start=1.1)
    assert "asked 8 times in" in stuck["text"]
    assert "for offset 120 of orders-0, which ends at 1,000" in stuck["text"]


_NOT_STUCK = {
    "a consumer that advances": [(float(second), 10 * second, 1) for second in range(20)],
    # the same offsets, each on its own connection, some seconds apart
    "five consumers of one name": sorted(
        (2.0 * number + second / 2, 10 * second, number)
        for number in range(5)
        for second in range(20)
    ),
    # a table that an application loads again from the beginning each minute
    "a topic that is read anew": [
        (60.0 * number + step / 10, 10 * step, 1) for number in range(6) for step in range(5)
    ],
    # an hour lies between the runs
    "a job that fetches one offset twice each hour": [
        (3600.0 * hour + step, 120, hour) for hour in range(4) for step in (1, 2)
    ],
}


@pytest.mark.parametrize("fetches", _NOT_STUCK.values(), ids=_NOT_STUCK)
def test_consumers_that_are_not_stuck(fetches: list[tuple[float, int, int]]) -> None:
    """No consumer asks for one offset again and again."""
    assert _incidents(*fetches) == []
