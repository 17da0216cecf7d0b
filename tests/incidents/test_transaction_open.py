"""Readers whose fetch session leaves a partition out while a transaction keeps records from it."""

import pytest

from tests.builders.tables import Row, at, connection, exchange, expect, found

_STABLE = 100  # the first offset of the transaction
_NO_PACKETS = {"request_packet": None, "response_packet": None}
LEFT_OUT = None  # of a response: the partition did not change


def _incidents(
    fetches: list[tuple[float, int | None]],
    *,
    isolation: int = 1,
    end: float | None = None,
    begin: float | None = 0.5,
    moved: float = 60,
    first: int | None = None,
) -> list[Row]:
    """Incidents of one fetch session: (second, high watermark of ledger-0) of each response.

    begin, end: seconds of the transaction that wrote to the partition; no begin: not captured.
    moved: second from which no transaction is open. first: offset of its first batch, if captured.
    """
    exchanges, fetched = [], []
    for number, (second, high) in enumerate(fetches):
        row = exchange(number, second=second, api_name="Fetch")
        exchanges.append(row)
        topics = (
            []
            if high is LEFT_OUT
            else [{"topic": "ledger", "partitions": [_state(high, second < moved)]}]
        )
        sides = {"request": {"isolation_level": isolation}, "response": {"responses": topics}}
        fetched.append({name: row[name] for name in ("exchange_id", "response_time")} | sides)
    transaction: Row = {
        "transactional_id": "books",
        "producer_id": 4000,
        "begin_time": at(begin or 0),
        "end_time": None if end is None else at(end),
        "partitions": [{"topic": "ledger", "partition": 0}],
        "exchange_ids": [500],
    }
    batch: Row = {"exchange_id": 500, "source": "produce", "topic": "ledger", "partition": 0}
    answer = {"index": 0, "error_code": 0, "base_offset": first}
    topics = [{"name": "ledger", "partition_responses": [answer]}]
    exchanges.append(exchange(500, second=0.6, api_name="Produce", **_NO_PACKETS))
    return found(
        connections=[connection()],
        exchanges=exchanges,
        transactions=[] if begin is None else [transaction],
        apis__Fetch=fetched,
        record_batches=[] if first is None else [batch | {"record_count": 10}],
        apis__Produce=[{"exchange_id": 500, "response": {"responses": topics}}],
    )


def _state(high: int, is_open: bool) -> Row:
    states = {"partition_index": 0, "error_code": 0, "high_watermark": high}
    return states | {"last_stable_offset": min(high, _STABLE) if is_open else high}


def _session(last: int, *changes: tuple[float, int]) -> list[tuple[float, int | None]]:
    """A response each second up to the last; the others are responses with the partition."""
    empty = [(float(second), LEFT_OUT) for second in range(2, last + 1)]
    return sorted([*changes, *empty], key=lambda one: one[0])


def test_a_partition_that_its_fetch_session_leaves_out() -> None:
    """A response shows records beyond the LSO; later ones leave the partition out (KIP-227)."""
    (one,) = _incidents(_session(20, (1.0, 130)))
    # until the session's last response
    expect(one, "transaction_open", "bad", subject="books", start=0.5, end=20.001)
    assert "was still open at the end" in one["text"]
    assert "beyond offset 100 of ledger-0, though 30 offsets followed" in one["text"]


def test_a_transaction_that_ends() -> None:
    """The partition returns with a later LSO once the transaction ended."""
    (one,) = _incidents(_session(20, (1.0, 130), (8.2, 100)), end=8.0)
    expect(one, "transaction_open", "warn", time_lost_ms=7200.0, end=8)


def test_a_short_transaction() -> None:
    """It ends after 3 s; that the session leaves the partition out afterwards is no sign."""
    assert _incidents(_session(20, (1.0, 130), (4.1, 100)), end=4.0) == []


def test_one_response_without_the_begin_of_the_transaction() -> None:
    """A single response does not prove that a transaction stayed open."""
    assert _incidents(_session(20, (1.0, 130)), begin=None) == []
    (one,) = _incidents(_session(20, (1.0, 130), (9.0, 140)), begin=None)
    assert one["subject"] == "ledger-0"


@pytest.mark.parametrize(("moved", "state"), [(12, "ended after 11"), (60, "was still open at")])
def test_the_end_of_a_transaction_that_was_not_captured(moved: float, state: str) -> None:
    """A later LSO shows that it ended."""
    changes = [(float(second), 130 + second) for second in range(1, 21)]
    (one,) = _incidents(changes, begin=None, moved=moved)
    expect(one, "transaction_open", "bad", subject="ledger-0", end=min(moved, 20) + 0.001)
    assert f"A transaction whose begin was not captured {state}" in one["text"]


@pytest.mark.parametrize(("first", "subject"), [(100, "books"), (500, "ledger-0")])
def test_the_first_offset_of_a_transaction(first: int, subject: str) -> None:
    """The LSO is the first offset of the open transaction: another one is not the cause."""
    (one,) = _incidents([(1.0, 600), (9.0, 610), (20.0, 620)], first=first)
    expect(one, "transaction_open", "bad", subject=subject)


def test_a_reader_of_uncommitted_records() -> None:
    """Its records are not kept from it."""
    assert _incidents(_session(20, (1.0, 130)), isolation=0) == []
