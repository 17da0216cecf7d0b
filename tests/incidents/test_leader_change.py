"""Leaders of partitions that change, in Metadata and in errors."""

from typing import Any

from tests.builders.tables import SECOND_US, Row, at, connection, exchange, expect, tables
from tests.incidents.metadata import Leader, leaders_named


def _found(leaders: list[Leader], errors: tuple[float, ...] = (), **more: Any) -> list[Row]:
    """Incidents of Metadata responses (seconds, leader, epoch) and failed Produce requests.

    more: further tables.
    """
    failed: dict[str, Any] = {"error_codes": [6], "error_code": 6, "topics": ["orders"]}
    exchanges = [
        exchange(100 + n, second=s, api_name="Produce", **failed) for n, s in enumerate(errors)
    ]
    asked, metadata = leaders_named(leaders)
    made = tables(
        connections=[connection()], exchanges=[*exchanges, *asked], apis__Metadata=metadata, **more
    )
    return [row for row in made.incidents().to_pylist() if row["kind"] == "leader_change"]


def test_a_leader_that_moved() -> None:
    """The first error of the old leader is the start, also before Metadata names the new one."""
    (change,) = _found([(1, 1, 0), (10, 2, 1)], errors=(9.5, 9.7))
    expect(change, "leader_change", "info", subject="orders-0", request_count=2)
    assert 0 <= change["start_time"].timestamp() * SECOND_US - at(9.5) <= 1000
    assert "moved from node 1 to 2" in change["text"]


def test_a_capture_that_begins_after_the_clients() -> None:
    """The broker that refuses a partition was its leader, though no Metadata response says so."""
    partitions = [{"partition_index": 0, "error_code": 6}]
    refusal = {
        "exchange_id": 100,
        "response": {"responses": [{"topic": "orders", "partitions": partitions}]},
    }
    broker = {"node_id": 1, "host": "10.0.0.9", "ip": "10.0.0.9", "port": 9092}
    rest = {"apis__Fetch": [refusal], "brokers": [broker]}
    (change,) = _found([(10, 2, 1)], errors=(9.5,), **rest)
    assert (change["kind"], change["subject"]) == ("leader_change", "orders-0")
    assert "moved from node 1 to 2" in change["text"]
    assert _found([(10, 1, 1)], errors=(9.5,), **rest) == []  # the same leader, in a new epoch


def test_a_change_that_takes_long() -> None:
    """Requests that fail for more than five seconds are a warning."""
    (change,) = _found([(1, 1, 0), (20, 2, 1)], errors=(12.0, 19.0))
    assert change["severity"] == "warn"


def test_metadata_of_a_broker_that_lags_is_no_change() -> None:
    """An older epoch that comes later, and the same leader again, are no change."""
    assert _found([(1, 1, 0), (2, 1, 1), (3, 1, 0)]) == []
    assert len(_found([(1, 1, 0), (10, 2, 1), (11, 1, 0)])) == 1


def test_one_failed_request_of_a_topic_with_three_partitions() -> None:
    """A request counts once, for the partition that refused it, and a partition counts once."""
    moved = [(1, 1, -1), (1.2, 1, 5), (10, 2, -1), (10.3, 2, 6)]  # with epochs and without
    (change,) = _found(moved, errors=(9.5,))
    assert (change["subject"], change["request_count"]) == ("orders-0", 1)
    refusals = [{"partition_index": n, "error_code": 6 * (n == 2)} for n in range(3)]
    topics = [{"topic": "orders", "partitions": refusals}]
    fetch = {"exchange_id": 100, "response": {"responses": topics}}
    (change,) = _found(moved, errors=(9.5,), apis__Fetch=[fetch])
    assert change["text"] == "1 partition moved from node 1 to 2. No captured request failed."
