"""`wait` separates a Fetch that waits at the broker from a slow response."""

from pathlib import Path
from typing import Any

import pytest

import kdissect
from kdissect.codec.record_encoder import encode_batch, encode_message
from kdissect.tables.exchanges import APPEND_MS
from tests.builders.messages import exchange, write_capture

SENT_MS = 1_700_000_000_003  # of the first request, after a handshake of three packets
JOIN_GROUP, CONSUMER_GROUP_HEARTBEAT = 11, 68


def _batch(at_ms: int, **how: Any) -> bytes:
    """A batch of 70 bytes or more, made that long after the Fetch was sent."""
    record = {"offset": 0, "timestamp_ms": SENT_MS + at_ms, "key": None, "value": b"x"}
    return encode_batch([record], **how)


def _wait(
    path: Path,
    records: bytes,
    took_ms: int,
    error: int = 0,
    min_bytes: int = 1,
    max_wait_ms: int = 500,
    replica_id: int = -1,
    **how: Any,
) -> str | None:
    asked = {"topics": [{"topic": "t", "partitions": [{"partition": 0}]}]}
    got = {"partition_index": 0, "error_code": error, "records": records}
    messages = exchange(
        0, 1, 12,
        {"replica_id": replica_id, "max_wait_ms": max_wait_ms, "min_bytes": min_bytes, **asked},
        {"responses": [{"topic": "t", "partitions": [got]}]},
    )  # fmt: skip
    write_capture(path, [messages], pauses_ms={(0, 1): took_ms - 1}, **how)
    (row,) = kdissect.read(path).exchanges.to_pylist()
    assert row["latency_ms"] == (None if how else took_ms)
    return row["wait"]


OLD, RECENT, NEW = _batch(-APPEND_MS - 1), _batch(-APPEND_MS + 1), _batch(1)
MAGIC_0 = encode_message({"offset": 0, "key": None, "value": b"x"}, 0)
MARKER = _batch(10, is_transactional=True, is_control=True, producer_id=1)


@pytest.mark.parametrize(
    ("records", "took_ms", "how", "expected"),
    [
        (b"", 500, {}, "long_poll"),
        (b"", 640, {}, "long_poll"),  # its timer was late
        (b"", 700, {}, "answer"),  # no timer is that late
        (b"", 40, {}, "long_poll"),  # records came that another consumer of the group took
        (b"", 40, {"error": 6}, "long_poll"),  # until the leader moved
        (NEW, 40, {}, "long_poll"),
        (RECENT, 40, {}, "undecided"),
        (_batch(0), 40, {}, "undecided"),  # the clocks of records have milliseconds
        (OLD + RECENT, 40, {}, "answer"),
        (RECENT + NEW, 40, {"min_bytes": len(RECENT) + 1}, "long_poll"),
        (MAGIC_0, 40, {}, "undecided"),  # without a timestamp
        (OLD, 40, {}, "answer"),  # a broker that is slow to read
        (OLD + NEW, 40, {}, "answer"),
        (OLD + NEW, 40, {"min_bytes": len(OLD) + 1}, "long_poll"),
        (OLD[:30], 40, {}, "undecided"),  # without the timestamp, too
        (_batch(-900, is_transactional=True, producer_id=1) + MARKER, 40, {}, "long_poll"),
        (OLD + MARKER, 40, {}, "answer"),
        (b"", 80, {"max_wait_ms": 0}, "answer"),
        (b"", 80, {"min_bytes": 0}, "answer"),
        (b"", 80, {"min_bytes": 0, "replica_id": 2}, "long_poll"),  # of the metadata log
        (b"", 500, {"lost": [(0, 1)]}, None),
    ],
)
def test_a_fetch_waits_if_too_little_was_there(
    tmp_path: Path, records: bytes, took_ms: int, how: dict[str, Any], expected: str | None
) -> None:
    """A Fetch is a long poll if fewer than min_bytes were ready, for at most its max_wait."""
    assert _wait(tmp_path / "fetch.pcap", records, took_ms, **how) == expected


def test_a_join_waits_for_its_group(tmp_path: Path) -> None:
    """JoinGroup waits for members; a coordinator of the new protocol does not."""
    messages = [
        exchange(0, JOIN_GROUP, 5, {"group_id": "g"}, {}),
        exchange(1, CONSUMER_GROUP_HEARTBEAT, 0, {"group_id": "g"}, {}),
    ]
    path = write_capture(tmp_path / "groups.pcap", messages)
    rows = kdissect.read(path).exchanges.to_arrow().sort_by("request_time").to_pylist()
    assert [row["wait"] for row in rows] == ["group", "answer"]


def test_a_capture_has_the_three_kinds(librdkafka: kdissect.Tables) -> None:
    """All that were answered have a kind."""
    rows = librdkafka.sql("select wait, count(*) n from exchanges group by all").to_pylist()
    assert {row["wait"] for row in rows} >= {"answer", "long_poll", "group", None}
    unanswered = librdkafka.sql(
        "select count(*) n from exchanges where (wait is null) <> (latency_ms is null)"
    ).to_pylist()
    assert unanswered == [{"n": 0}]


def test_a_poll_whose_queue_is_unknown_is_undecided(tmp_path: Path) -> None:
    """Its response may have waited for a lost one: `service_ms` and `wait` both say so."""
    asked = {"topics": [{"topic": "t", "partitions": [{"partition": 0}]}]}
    poll = {"max_wait_ms": 500, "min_bytes": 1, **asked}
    messages = [exchange(number, 1, 12, poll, {"responses": []}) for number in range(3)]
    whole = write_capture(tmp_path / "whole.pcap", messages, pauses_ms={(2, 1): 400})
    lossy = write_capture(tmp_path / "lossy.pcap", messages, pauses_ms={(2, 1): 400}, lost=[(1, 1)])
    for path, expected in ((whole, "long_poll"), (lossy, "undecided")):
        rows = kdissect.read(path).exchanges.to_arrow().sort_by("request_time").to_pylist()
        assert rows[2]["wait"] == expected
        assert (rows[2]["service_ms"] is None) == (expected == "undecided")
