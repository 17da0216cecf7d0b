"""Reading a target's state back: its counts, and targets with wrong responses."""

from typing import Any

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import TranslateOptions
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.state import State, read_state
from tests.builders.messages import numbered_batch as batch
from tests.replay.made import NODE, answering, with_target

PARTITION = {"error_code": 0, "partition_index": 0, "leader_id": 1}
TOPIC = {"error_code": 0, "name": "orders", "partitions": [PARTITION]}


def read(data: bytes | None, end: int, code: int = 0) -> tuple[State, int]:
    """The state of orders by a broker whose log has these bytes, and the count of its Fetches."""
    fetches = 0

    def body_of(api_key: int, request: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal fetches
        if api_key == ApiKey.METADATA:
            return {"brokers": [NODE], "topics": [TOPIC]}
        if api_key == ApiKey.LIST_OFFSETS:
            is_end = request["topics"][0]["partitions"][0]["timestamp"] == -1
            entry = {"partition_index": 0, "error_code": 0, "offset": end if is_end else 0}
            return {"topics": [{"name": "orders", "partitions": [entry]}]}
        if api_key != ApiKey.FETCH:
            return None
        fetches += 1
        found = {"partition_index": 0, "error_code": code, "records": data}
        topics = [] if data is None else [{"topic": "orders", "partitions": [found]}]
        return {"responses": topics}

    state = with_target(
        answering(body_of), lambda target: read_state(target, ["orders"], {}, TranslateOptions())
    )
    return state, fetches


def test_records_are_counted_by_their_batches() -> None:
    """Two batches of 2 and 3 records, and a last one that is cut off."""
    data = batch(0, 2) + batch(2, 3)
    state, fetches = read(data + batch(5, 9)[:70], 5)
    log = state.logs["orders", 0]
    assert (log.start, log.end, log.records) == (0, 5, 5)
    assert [each.base_offset for each in log.batches or ()] == [0, 2]
    assert fetches == 1
    assert state.facts == {("topic", "orders"): 1}
    assert not state.unread


def test_a_log_that_brings_nothing_has_no_records() -> None:
    """It has lost them. Without the topic in the answer, or with an error that may pass, nobody
    knows: the reason is in `unread`. Nothing is asked for ever."""
    for data, code, said in ((None, 0, "no batch"), (b"", 6, "NOT_LEADER")):
        state, fetches = read(data, 5, code)
        assert state.logs["orders", 0].records is None
        assert said in state.unread["orders-0"]
        assert fetches == 1
    for code in (0, 2, 56):  # CORRUPT_MESSAGE, KAFKA_STORAGE_ERROR
        state, fetches = read(b"", 5, code)
        assert state.logs["orders", 0].records == 0
        assert not state.unread
        assert fetches == 1


def test_transactions_that_a_target_cannot_list_are_unread() -> None:
    """Before Kafka 3.0 there is no ListTransactions: a state that nobody tells is not "none"."""

    async def read_without(target: Target) -> State:
        del target.versions[ApiKey.LIST_TRANSACTIONS]
        return await read_state(target, [], {("transactional-id", "t"): ()}, TranslateOptions())

    state = with_target(None, read_without)
    assert "cannot list" in state.unread["transactional-ids"]
