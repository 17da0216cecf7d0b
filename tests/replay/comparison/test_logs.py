"""Answers that contradict what the target has acknowledged or delivered of its logs."""

import pytest

from kdissect.codec.record_encoder import encode_batch
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Attempt
from tests.builders.messages import numbered_batch as batch
from tests.replay.comparison.made_run import Run

ABORT, COMMIT = b"\0\0\0\0", b"\0\0\0\1"
RECORDS = "responses[t].partitions[0].records"
HIGH = "responses[t].partitions[0].high_watermark"
STABLE = "responses[t].partitions[0].last_stable_offset"


def marker(offset: int, key: bytes) -> bytes:
    """Of producer 9."""
    record = {"offset": offset, "timestamp_ms": 5, "key": key, "value": b"\0" * 6, "headers": []}
    return encode_batch([record], producer_id=9, producer_epoch=0, is_transactional=True,
                        is_control=True)  # fmt: skip


def other(at: int) -> bytes:
    """A batch at an offset with other records than `batch(at)`."""
    return at.to_bytes(8, "big") + batch(at + 50)[8:]


def damaged(data: bytes) -> bytes:
    return data[:17] + b"\0\0\0\0" + data[21:]


@pytest.mark.parametrize(
    ("records", "said", "is_disorder"),
    [
        (batch(0) + batch(2) + batch(4), [], False),
        (batch(2) + batch(4), [("0", "no records")], False),
        (batch(0) + batch(4), [("2", "no records")], False),
        (batch(0) + batch(2) + batch(2), [("2", "2 records from offset 2")], True),
        (batch(2) + batch(0), [("0", "no records"), ("0", "2 records from offset 0")], True),
    ],
    ids=["whole", "first lost", "middle lost", "doubled", "swapped"],
)
def test_batches_of_an_answer_ascend(
    records: bytes, said: list[tuple[str, str]], is_disorder: bool
) -> None:
    """is_disorder: whether a compacted log, which may leave offsets out, is at fault too. A gap
    where nothing was written is none."""
    run = Run()
    run.fetch(1, 0, records, 6)
    assert bool(run.said()) is is_disorder
    for base in (0, 2, 4):
        run.produce(0, base, batch(base))
    assert [each[1:] for each in run.said()] == [
        (f"{RECORDS}[offset {at}]", found) for at, found in said
    ]
    compacted = Run("compact")
    compacted.fetch(1, 0, records, 6)
    assert len(compacted.said()) == is_disorder


def test_an_answer_lacks_records_that_it_shows() -> None:
    """It has none although its watermark shows some, or has room for a known batch of them."""
    run = Run()
    run.fetch(0.5, 0, b"", 0)
    run.produce(1, 0, batch(0))
    empty = run.fetch(2, 0, b"", 2)
    run.fetch(4, 0, b"", 2, preferred_read_replica=2)
    run.fetch(5, 0, b"", 2, size=1, records_beside=batch(0))
    beside = run.fetch(6, 0, b"", 2, records_beside=batch(0))
    said = f"{RECORDS}[offset 0]", "no records"
    assert run.said() == [(empty, *said), (beside, *said)]
    run = Run("compact")
    run.fetch(1, 4, b"", 4)
    unknown = run.fetch(2, 3, b"", 4)
    assert run.said() == [(unknown, f"{RECORDS}[offset 3]", "no records")]


def test_a_damaged_batch() -> None:
    run = Run()
    number = run.fetch(1, 0, damaged(batch(0)), 2)
    assert run.said() == [(number, f"{RECORDS}[offset 0].crc", "wrong")]


def test_an_answer_that_was_followed_by_another_try() -> None:
    """It is safe as well, although its records come again."""
    run = Run()
    number = run.fetch(1, 0, batch(0) + batch(2), 4)
    outcome = run.outcomes[number]
    twice = run.outcomes[run.fetch(1, 0, batch(0) + batch(0), 4)]
    assert outcome.sent is not None
    assert twice.answer is not None
    outcome.earlier = [Attempt(outcome.sent, 1, twice.answer, 2, "why")]
    run.outcomes.pop()
    said = [(number, f"{RECORDS}[offset 0]", "2 records from offset 0")]
    assert run.said() == said


def test_records_that_were_produced_come_back() -> None:
    """A fetched batch that differs from the written one, or from a delivered one."""
    run = Run()
    run.produce(1, 0, batch(0))
    run.fetch(2, 0, batch(0, codec="zstd") + batch(2), 4)
    assert run.said() == []
    changed = run.fetch(3, 0, other(0) + batch(2), 4)
    again = run.fetch(4, 2, other(2), 4)
    place = f"{RECORDS}[offset {{}}]"
    assert run.said() == [
        (changed, place.format(0), "2 records from offset 0"),
        (again, place.format(2), "2 records from offset 2"),
    ]


def test_log_ends_do_not_fall() -> None:
    """At a node that has answered more at once, at others seconds later."""
    run = Run()
    run.produce(1, 0, batch(0, 4))
    run.fetch(2, 4, b"", 4)
    run.list_offsets(3, -1, 4)
    run.fetch(3, 4, b"", 3, node=2)
    assert run.said() == []
    end = run.list_offsets(4, -1, 3)
    high = run.fetch(5, 4, b"", 2)
    late = run.fetch(20, 4, b"", 3, node=2)
    assert set(run.said()) == {
        (end, "topics[t].partitions[0].offset", "3"), (high, HIGH, "2"), (late, HIGH, "3"),
        (high, STABLE, "2"), (late, STABLE, "3"),
    }  # fmt: skip


def test_log_ends_are_not_beyond_what_was_written() -> None:
    """Unless a request without an answer may have written more."""
    run = Run()
    run.produce(1, 0, batch(0, 4))
    number = run.fetch(2, 9, b"", 9)
    assert (number, HIGH, "9") in run.said()
    run.produce(1.5, -1, batch(0, 5), code=7)
    assert run.said() == []


def test_log_starts_do_not_fall() -> None:
    """DeleteRecords moves the start; a Fetch that was sent before may have the old one."""
    run = Run()
    topic = {"name": "t", "partitions": [{"partition_index": 0, "low_watermark": 3}]}
    run.add(1, ApiKey.DELETE_RECORDS, 1, {"topics": []}, {"topics": [topic]})
    run.fetch(1.0005, 4, b"", 4, log_start_offset=0)
    assert run.said() == []
    number = run.fetch(2, 4, b"", 4, log_start_offset=0)
    assert run.said() == [(number, "responses[t].partitions[0].log_start_offset", "0")]


def test_a_topic_that_the_run_deletes_says_nothing() -> None:
    run = Run()
    run.fetch(1, 4, b"", 4)
    deleted = {"responses": [{"name": "t", "error_code": 0}]}
    run.add(2, ApiKey.DELETE_TOPICS, 1, {"topic_names": ["t"]}, deleted)
    run.fetch(3, 0, b"", 0)
    assert run.said() == []


def test_each_log_of_a_transaction_gets_a_marker() -> None:
    """Also one to which no record came. A transaction in other logs adds none."""
    run = Run()
    run.produce(1, 0, batch(0, 4))
    ids = {"v3_and_below_producer_id": 9, "v3_and_below_producer_epoch": 0}
    result = [{"partition_index": 0, "partition_error_code": 0}]
    for number, topic in enumerate(("t", "other")):
        run.add(
            2 + number, ApiKey.ADD_PARTITIONS_TO_TXN, 3,
            {"v3_and_below_transactional_id": "x", **ids,
             "v3_and_below_topics": [{"name": topic, "partitions": [0]}]},
            {"results_by_topic_v3_and_below": [{"name": topic, "results_by_partition": result}]},
        )  # fmt: skip
        ended = {"transactional_id": "x", "producer_id": 9, "producer_epoch": 0, "committed": True}
        run.add(2.5 + number, ApiKey.END_TXN, 3, ended, {"error_code": 0})
    run.list_offsets(5, -1, 5)
    assert run.said() == []
    wrong = run.list_offsets(6, -1, 6)
    assert run.said() == [(wrong, "topics[t].partitions[0].offset", "6")]


@pytest.mark.parametrize(("key", "is_wrong"), [(ABORT, True), (COMMIT, False)])
def test_aborted_records_are_listed(key: bytes, is_wrong: bool) -> None:
    """For a consumer that reads committed records only."""
    run = Run()
    data = batch(0, 2, producer_id=9, is_transactional=True) + marker(2, key)
    number = run.fetch(1, 0, data, 3)
    place = "responses[t].partitions[0].aborted_transactions"
    assert run.said() == [(number, place, "not listed")] * is_wrong
    listed = Run()
    listed.fetch(1, 0, data, 3, aborted_transactions=[{"producer_id": 9, "first_offset": 0}])
    assert listed.said() == [(number, place, "producer 9")] * (not is_wrong)
