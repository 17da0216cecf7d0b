"""Batches that lie in another order than their producer sent them, proven by offsets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from tests.builders.tables import SECOND_US, START_US, Row, connection, exchange, expect, found

_NOT_LEADER, _DUPLICATE_SEQUENCE, _TIMED_OUT = 6, 46, 7


@dataclass
class Send:
    """A Produce request with ten records of one batch.

    offset: that the broker gave. error: of its response; None without a response.
    """

    second: float
    batch: str
    offset: int = -1
    error: int | None = 0
    connection: int = 1
    stamp: int = 0
    partition: int = 0


def _incidents(*sends: Send) -> list[Row]:
    exchanges, batches, records, produced = [], [], [], []
    for number, send in enumerate(sends):
        latency_us = None if send.error is None else 1000
        ends = {"connection_id": send.connection, "client_port": 50000 + send.connection}
        row = exchange(
            number, second=send.second, latency_us=latency_us, api_name="Produce", **ends
        )
        if send.error:
            row |= {"error_code": send.error, "error_codes": [send.error]}
        exchanges.append(row)
        stamp = send.stamp or (START_US + ord(send.batch[0]) * SECOND_US) // 1000
        place = {"exchange_id": number, "source": "produce", "topic": "orders", "batch_index": 0}
        place["partition"] = send.partition
        times = {"base_timestamp_ms": stamp, "max_timestamp_ms": stamp}
        batches.append(place | times | {"record_count": 10})
        values = [f"{send.batch} {index}".encode() for index in range(10)]
        records += [place | {"record_index": n, "value": one} for n, one in enumerate(values)]
        answer = {"index": send.partition, "error_code": send.error, "base_offset": send.offset}
        topic = {"name": "orders", "partition_responses": [answer]}
        response = None if send.error is None else {"responses": [topic]}
        produced.append({"exchange_id": number, "response": response})
    return found(
        exchanges=exchanges,
        record_batches=batches,
        records=records,
        connections=[connection(number) for number in {send.connection for send in sends}],
        apis__Produce=produced,
    )


def _subjects(*cases: Sequence[Send]) -> list[str]:
    """The partitions with an incident, if each case has a partition and connections of its own."""
    sends = [
        replace(send, partition=number, connection=10 * number + send.connection)
        for number, case in enumerate(cases)
        for send in case
    ]
    found = _incidents(*sends)
    return [row["subject"] for row in found if row["kind"] == "out_of_order_records"]


_REFUSED = [Send(1, "a", error=_NOT_LEADER), Send(1.1, "b", 0), Send(2, "a", 10)]


def test_a_repetition_after_a_later_batch() -> None:
    """The first attempt fails, the next batch succeeds, and the repeated one follows it."""
    (late,) = _incidents(*_REFUSED)
    expect(late, "out_of_order_records", "bad", subject="orders-0", start=2.001, end=2.001)
    assert late["request_count"] == 1
    assert "wrote 10 records to orders-0 out of order" in late["text"]
    assert "batch in packet 0 failed. The repetition in packet 4 got offset 10," in late["text"]
    assert "in packet 2, got offset 0." in late["text"]
    assert late["evidence"]["exchange_ids"] == [1, 0, 2]


def test_a_lost_response_without_room_for_the_first_attempt() -> None:
    """Offsets that follow one another prove that the first attempt was not appended."""
    (late,) = _incidents(Send(1, "a", error=None), Send(1.1, "b", 0), Send(2, "a", 10))
    assert late["kind"] == "out_of_order_records"


@pytest.mark.parametrize("error", [None, _TIMED_OUT])
def test_a_first_attempt_that_may_have_been_appended(error: int | None) -> None:
    """Room for ten records before the later batch: then the first copy is in order."""
    sends = Send(0.5, "z", 0), Send(1, "a", error=error), Send(1.1, "b", 20), Send(2, "a", 30)
    assert "out_of_order_records" not in {row["kind"] for row in _incidents(*sends)}


def test_a_repetition_in_order() -> None:
    """All batches fail and are sent again in their order, or the other one was sent before."""
    again = [Send(1, "a", error=_NOT_LEADER), Send(1.1, "b", error=_NOT_LEADER)]
    in_order = [*again, Send(2, "a", 0), Send(2.1, "b", 10)]
    reversed_order = [*again, Send(2, "b", 0), Send(2.1, "a", 10)]
    # records of another failed batch, in a new one
    older = [Send(1, "a", error=_NOT_LEADER), Send(1.1, "Z", 0), Send(2, "a", 10)]
    before = [Send(1, "b", error=_NOT_LEADER), Send(1.1, "a", error=_NOT_LEADER)]
    before += [Send(2, "b", 0), Send(2.1, "a", 10)]
    assert _subjects(in_order, reversed_order, older, before) == ["orders-1"]


def test_other_producers_and_other_records() -> None:
    """Another connection of the same client name, or other records, give no incident."""
    first, later, repetition = _REFUSED
    other = Send(later.second, later.batch, later.offset, connection=2)
    alike = Send(2, "c", 10, stamp=(START_US + ord("a") * SECOND_US) // 1000)
    assert _subjects(_REFUSED, [first, other, repetition], [first, later, alike]) == ["orders-0"]


def test_a_repetition_on_the_connection_to_the_new_leader() -> None:
    """The later batch and the repetition have one connection, so they have one producer."""
    first, later, repetition = _REFUSED
    moved = [Send(s.second, s.batch, s.offset, connection=2) for s in (later, repetition)]
    assert [row["kind"] for row in _incidents(first, *moved)] == ["out_of_order_records"]


def test_a_refused_duplicate_is_in_order() -> None:
    """The broker has the batch from its first attempt."""
    sends = [Send(1, "a", 0), Send(2, "b", 10), Send(3, "a", error=_DUPLICATE_SEQUENCE)]
    assert _subjects(sends) == []
