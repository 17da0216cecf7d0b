"""Fetch answers without room for captured records, since those of other partitions fill them."""

from __future__ import annotations

import pytest

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.codec.record_codec import encode_batch
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import ReplayPlan
from kdissect.replay.planning.plan import make_plan
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.translator import Translator
from tests.replay.other_cluster import everything
from tests.replay.planning.test_plan import exchange, workload


def batch(size: int) -> bytes:
    return encode_batch(
        [{"offset": 0, "timestamp_ms": 5, "key": None, "value": b"v" * size, "headers": []}]
    )


def fetch(max_bytes: int, partition_max_bytes: int) -> Message:
    parts = [
        {"partition": number, "fetch_offset": 0, "partition_max_bytes": partition_max_bytes}
        for number in (0, 1)
    ]
    body = {"max_wait_ms": 5, "min_bytes": 1, "max_bytes": max_bytes, "isolation_level": 0,
            "session_id": 0, "session_epoch": -1, "topics": [{"topic": "t", "partitions": parts}],
            "rack_id": "", "forgotten_topics_data": []}  # fmt: skip
    return Message(ApiKey.FETCH, 11, "request", {"client_id": "c"}, body)


def fetched(*records: bytes) -> Message:
    parts = [
        {"partition_index": number, "error_code": 0, "high_watermark": 1, "records": data,
         "aborted_transactions": []}
        for number, data in enumerate(records)
    ]  # fmt: skip
    body = {"throttle_time_ms": 0, "error_code": 0, "session_id": 0,
            "responses": [{"topic": "t", "partitions": parts}]}  # fmt: skip
    return Message(ApiKey.FETCH, 11, "response", {"correlation_id": 1}, body)


def made(max_bytes: int, partition_max_bytes: int) -> ReplayPlan:
    """The captured answer has a large batch of partition 1 alone."""
    captured = fetched(b"", batch(500))
    one = exchange(0, fetch(max_bytes, partition_max_bytes), 0, 1, captured)
    return make_plan(workload([one]), everything())


CASES = pytest.mark.parametrize(
    ("max_bytes", "partition_max_bytes", "first", "is_full"),
    [
        (600, 1000, 100, True),
        (1000, 400, 100, True),
        (1000, 1000, 100, False),  # there is room, so the broker hides the batch
        (600, 1000, 0, False),  # an empty answer has room for a batch of any size
    ],
)


@CASES
def test_a_fetch_without_room_is_sent_again_with_room(
    max_bytes: int, partition_max_bytes: int, first: int, is_full: bool
) -> None:
    """For the batch of the captured answer."""
    plan = made(max_bytes, partition_max_bytes)
    translator, step = Translator(IdMap(plan)), plan.steps[0]
    assert isinstance(translator.request(step, 0), bytes)
    answer = fetched(batch(first) if first else b"", b"")
    assert translator.retry(step, encode_message(answer))
    frame = translator.request(step, 1)
    assert isinstance(frame, bytes)
    body = decode_message(frame, side="request").body
    limits = [each["partition_max_bytes"] for each in body["topics"][0]["partitions"]]
    size = max(partition_max_bytes, len(batch(500))) if is_full else partition_max_bytes
    assert limits == [partition_max_bytes, size]
    assert body["max_bytes"] == (0x7FFFFFFF if is_full else max_bytes)
