"""Consumers that fetch one offset again and again, and consumers that only seem to."""

import pytest

from tests.builders.tables import Row, connection, exchange, expect, found

_END = 1000  # of the partition


def _incidents(
    *fetches: tuple[float, int, int], error: int = 0, batch_size: int = 0, in_session: bool = False
) -> list[Row]:
    """Incidents of fetches from orders-0: (second, offset, connection).

    error: of the partition; another one has another error. batch_size: of two batches in each
    response. in_session: only the first request names the partition (KIP-227).
    """
    exchanges, fetched, batches = [], [], []
    for number, (second, offset, connection_id) in enumerate(fetches):
        place = {"second": second, "connection_id": connection_id}
        exchanges.append(exchange(number, api_name="Fetch", response_size=2 << 20, **place))
        exchanges[-1] |= {"error_name": "TOPIC_AUTHORIZATION_FAILED"} if error else {}
        batch = {"source": "fetch", "topic": "orders", "partition": 0, "size": batch_size}
        batches += [batch | {"exchange_id": number, "batch_index": n} for n in range(2)]
        asked = [{"partition": 0, "fetch_offset": offset}]
        answer = [
            {"partition_index": 1, "error_code": error and 29, "high_watermark": _END},
            {"partition_index": 0, "error_code": error, "high_watermark": _END},
        ]
        topics = [{"topic": "orders", "partitions": each} for each in (asked, answer)]
        request: Row = {"max_bytes": 1 << 20, "topics": topics[: not (in_session and number)]}
        request["session_epoch"] = number if in_session else -1
        response = {"responses": topics[1:]}
        fetched.append({"exchange_id": number, "request": request, "response": response})
    connections = [connection(number) for number in {one[2] for one in fetches}]
    rows = {"exchanges": exchanges, "apis__Fetch": fetched, "record_batches": batches}
    return found(**rows, connections=connections)


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


@pytest.mark.parametrize("in_session", [False, True])
@pytest.mark.parametrize(
    ("error", "batch_size", "cause"),
    [
        (56, 0, "The broker answered with KAFKA_STORAGE_ERROR."),
        (0, 2 << 20, "A batch has 2.10 MB, though the client asked for at most 1.05 MB."),
        (0, 900_000, "The responses had no error: look at the consumer's log."),
    ],
)
def test_a_consumer_that_was_set_back_once(
    in_session: bool, error: int, batch_size: int, cause: str
) -> None:
    """It is stuck from then on, for the reason that the partition's own answers show."""
    read = [] if in_session else [(float(second), 20 * second, 1) for second in range(1, 40)]
    again = [(50.0 + second, 100, 1) for second in range(9)]
    incidents = _incidents(*read, *again, error=error, batch_size=batch_size, in_session=in_session)
    (stuck,) = [row for row in incidents if row["severity"] == "bad"]
    expect(stuck, "consumer_stuck", subject="orders-0", start=50.001)
    assert "asked 9 times in 8.00 s" in stuck["text"]
    assert cause in stuck["text"]


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
