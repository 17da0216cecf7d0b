"""What a Fetch waited for, and who is a broker."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from kdissect.report import exchange_facts
from kdissect.report.database import ReportDatabase
from tests.report.made import START_US, Row, exchange, tables

_FETCH = pa.schema(
    [
        ("exchange_id", pa.int64()),
        ("connection_id", pa.int64()),
        (
            "request",
            pa.struct(
                [
                    ("replica_id", pa.int32()),
                    ("replica_state", pa.struct([("replica_id", pa.int32())])),
                    ("max_wait_ms", pa.int32()),
                    ("min_bytes", pa.int32()),
                ]
            ),
        ),
    ]
)
_PARTITION = pa.struct([("index", pa.int32()), ("base_offset", pa.int64())])
_PRODUCE = pa.schema(
    [
        ("exchange_id", pa.int64()),
        ("response_time", pa.timestamp("us", "UTC")),
        (
            "response",
            pa.struct(
                [
                    (
                        "responses",
                        pa.list_(
                            pa.struct(
                                [
                                    ("name", pa.string()),
                                    ("topic_id", pa.string()),
                                    ("partition_responses", pa.list_(_PARTITION)),
                                ]
                            )
                        ),
                    )
                ]
            ),
        ),
    ]
)


def _fetch(number: int, replica_id: int = -1, connection_id: int = 1) -> Row:
    wish = {"replica_id": replica_id, "max_wait_ms": 500, "min_bytes": 1}
    return {"exchange_id": number, "connection_id": connection_id, "request": wish}


def _batch(number: int, newest_ms: int, base_offset: int = 5) -> Row:
    return {
        "exchange_id": number,
        "source": "fetch",
        "topic": "t",
        "partition": 0,
        "base_offset": base_offset,
        "max_timestamp_ms": newest_ms,
        "size": 80,
        "record_count": 1,
    }


def _waits(**made: Any) -> dict[int, str | None]:
    with ReportDatabase(tables(**made)) as database:
        exchange_facts.prepare(database)
        return {
            row["exchange_id"]: row["wait"]
            for row in database.rows("SELECT exchange_id, wait FROM x")
        }


def _waited(latency_us: int, *, newest_ms: int | None = None, **values: Any) -> str | None:
    """How one Fetch of up to 500 ms is told, by its latency and its newest record."""
    batches = [] if newest_ms is None else [_batch(1, newest_ms)]
    row = exchange(1, latency_us=latency_us, api_key=1, api_name="Fetch", **values)
    fetch = pa.Table.from_pylist([_fetch(1)], schema=_FETCH)
    return _waits(exchanges=[row], apis__Fetch=fetch, record_batches=batches)[1]


ASKED_MS = START_US // 1000


@pytest.mark.parametrize(
    ("latency_us", "newest_ms", "wait"),
    [
        (501_000, None, "idle"),  # waited all its time for nothing
        (460_000, None, "idle"),  # a broker's timer may end a little early
        (200_000, None, "woken"),  # ended before, and nothing shows why
        (200_000, ASKED_MS + 150, "woken"),  # the record was made while it waited
        (200_000, ASKED_MS - 150, "answer"),  # the record was there: the broker was slow
        (900_000, None, "answer"),  # longer than its wish explains
        (900_000, ASKED_MS + 150, "answer"),
        (400, None, "answer"),  # nobody waited
        (400, ASKED_MS + 1, "answer"),
    ],
)
def test_a_long_poll_is_told_from_real_waiting(
    latency_us: int, newest_ms: int | None, wait: str
) -> None:
    assert _waited(latency_us, newest_ms=newest_ms) == wait


def test_a_fetch_that_brought_an_error_is_an_answer() -> None:
    assert _waited(200_000, error_code=6) == "answer"


def test_a_produce_that_was_answered_later_woke_the_fetch() -> None:
    """Records with old timestamps (a mirror's) still arrived while the Fetch waited."""
    produce = {
        "exchange_id": 2,
        "response_time": START_US + 190_000,
        "response": {
            "responses": [{"name": "t", "partition_responses": [{"index": 0, "base_offset": 5}]}]
        },
    }
    waits = _waits(
        exchanges=[
            exchange(1, latency_us=200_000, api_key=1, api_name="Fetch"),
            exchange(2, connection_id=2, at_us=180_000, api_key=0, api_name="Produce"),
        ],
        apis__Fetch=pa.Table.from_pylist([_fetch(1)], schema=_FETCH),
        apis__Produce=pa.Table.from_pylist([produce], schema=_PRODUCE),
        record_batches=[_batch(1, ASKED_MS - 86_400_000)],
    )
    assert waits[1] == "woken"


def test_what_waits_behind_a_long_poll_is_no_slow_answer() -> None:
    """A commit sent behind a Fetch is read when the Fetch is answered."""
    waits = _waits(
        exchanges=[
            exchange(1, latency_us=500_000, api_key=1, api_name="Fetch"),
            exchange(2, at_us=100_000, latency_us=401_000, api_name="OffsetCommit"),
            exchange(3, at_us=600_000, latency_us=401_000, api_name="OffsetCommit"),
        ],
        apis__Fetch=pa.Table.from_pylist([_fetch(1)], schema=_FETCH),
    )
    assert waits == {1: "idle", 2: "behind", 3: "answer"}


def test_queued_time_is_that_of_earlier_requests_of_the_connection() -> None:
    made = tables(
        exchanges=[
            exchange(1, latency_us=50_000),
            exchange(2, at_us=10_000, latency_us=60_000),
            exchange(3, at_us=10_000, latency_us=60_000, connection_id=2),
        ]
    )
    with ReportDatabase(made) as database:
        exchange_facts.prepare(database)
        rows = database.rows("SELECT exchange_id, queued_ms, own_ms FROM x ORDER BY exchange_id")
    assert [(row["queued_ms"], row["own_ms"]) for row in rows] == [(0, 50), (40, 20), (0, 60)]


def test_members_wait_for_their_group() -> None:
    waits = _waits(exchanges=[exchange(1, api_name="JoinGroup"), exchange(2, latency_us=None)])
    assert waits == {1: "group", 2: None}


def test_brokers_are_known_by_what_only_they_send() -> None:
    made = tables(
        exchanges=[
            exchange(1, api_name="Fetch"),
            exchange(2, connection_id=2, api_name="Fetch"),
            exchange(3, connection_id=3, api_name="BrokerHeartbeat"),
            exchange(4, connection_id=3, api_name="ApiVersions"),
        ],
        apis__Fetch=pa.Table.from_pylist(
            [_fetch(1), _fetch(2, replica_id=4, connection_id=2)], schema=_FETCH
        ),
    )
    with ReportDatabase(made) as database:
        exchange_facts.prepare(database)
        rows = database.rows("SELECT exchange_id FROM x WHERE is_broker ORDER BY exchange_id")
    assert [row["exchange_id"] for row in rows] == [2, 3, 4]
