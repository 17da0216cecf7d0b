"""Captured fetch sessions, and what members of share groups hold there."""

import base64
from typing import Any
from uuid import UUID

import pytest

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Skipped, Step
from kdissect.replay.translation.groups import stand_in
from kdissect.replay.translation.nodes import parts_of
from kdissect.replay.translation.translator import Translator
from tests.builders.messages import a_request, a_response
from tests.builders.workloads import exchange
from tests.replay.made import sent_again, translated

TOPIC_ID = UUID(int=7)
REPLICA_NOT_AVAILABLE, INVALID_REQUEST, INVALID_RECORD_STATE, LOADING = 9, 42, 121, 14


def sent(translator: Translator, step: Step) -> dict[str, Any]:
    """The body that the target gets."""
    translator.ids.topic_ids[TOPIC_ID] = TOPIC_ID
    frame = translator.request(step)
    assert isinstance(frame, bytes)
    [(_, part)] = parts_of(translator.ids, step, frame)
    return decode_message(part, side="request").body


def test_a_fetch_session_that_was_lost_is_asked_for_again() -> None:
    """The captured broker did not know it, and the target does not either."""
    session = {"session_id": 9, "session_epoch": 3}
    request = a_request(ApiKey.FETCH, 12, max_wait_ms=5, min_bytes=1, **session, topics=[])
    captured = a_response(ApiKey.FETCH, 12, error_code=70, responses=[])
    translator, (step,) = translated(exchange(0, request, 0, 1, captured))
    body = sent(translator, step)
    assert (body["session_id"], body["session_epoch"]) == (9, 3)


def test_a_fetch_session_that_began_before_the_capture_is_not_known() -> None:
    request = a_request(ApiKey.FETCH, 12, session_id=9, session_epoch=3, topics=[])
    translator, (step,) = translated(exchange(0, request, 0, 1, a_response(ApiKey.FETCH, 12)))
    assert isinstance(translator.request(step), Skipped)


def test_a_fetch_session_goes_on_although_a_response_was_not_captured() -> None:
    """The client got it: its next request names only the partition that has changed since."""

    def fetch(epoch: int, **offsets: int) -> Message:
        parts = [{"partition": int(key[1:]), "fetch_offset": at} for key, at in offsets.items()]
        topics = [{"topic": "t", "partitions": parts}]
        session = {"session_id": 9 * (epoch > 0), "session_epoch": epoch}
        return a_request(ApiKey.FETCH, 12, max_wait_ms=5, min_bytes=1, **session, topics=topics)

    captured = a_response(ApiKey.FETCH, 12, session_id=9, responses=[])
    translator, steps = translated(
        exchange(0, fetch(0, p0=0, p1=0), 0, 1, captured),
        exchange(0, fetch(1, p0=100), 2, 3, None),
        exchange(0, fetch(2, p1=5), 4, 5, captured),
    )
    asked = [sent(translator, step)["topics"][0]["partitions"] for step in steps]
    offsets = [{each["partition"]: each["fetch_offset"] for each in parts} for parts in asked]
    assert offsets == [{0: 0, 1: 0}, {0: 100, 1: 0}, {0: 100, 1: 5}]


def test_a_share_session_of_another_broker_has_an_id_of_its_own() -> None:
    """A uuid as Kafka writes it, the same each time."""
    found = {stand_in("abcdefghijklmnopqrstuv", (host, 9092)) for host in ("10.0.0.1", "10.0.0.2")}
    assert len(found) == 2
    for each in found:
        assert len(base64.urlsafe_b64decode(each + "==")) == 16
    assert stand_in("a", ("h", 1)) == stand_in("a", ("h", 1))


def share_fetch(epoch: int, acknowledged: int | None = None) -> Message:
    """A ShareFetch of member m of group g, which may acknowledge the record of one offset."""
    batch = {"first_offset": acknowledged, "last_offset": acknowledged, "acknowledge_types": [1]}
    parts = [{"partition_index": 0, "acknowledgement_batches": [batch]}]
    topics = [] if acknowledged is None else [{"topic_id": TOPIC_ID, "partitions": parts}]
    names = {"group_id": "g", "member_id": "m", "share_session_epoch": epoch}
    return a_request(ApiKey.SHARE_FETCH, 1, **names, max_wait_ms=500, min_bytes=1, topics=topics)


def shared(*acquired: tuple[int, int] | None, code: int = 0, of_partitions: int = 0) -> Message:
    """A response with the first and last offset that each partition gives; None for no record."""
    parts = []
    for number, found in enumerate(acquired):
        part = {"partition_index": number, "error_code": of_partitions}
        if found is not None:
            part["acquired_records"] = [{"first_offset": found[0], "last_offset": found[1]}]
        parts.append(part)
    topics = [{"topic_id": TOPIC_ID, "partitions": parts}]
    return a_response(ApiKey.SHARE_FETCH, 1, error_code=code, responses=topics)


def test_a_share_fetch_that_is_sent_again_is_the_next_of_its_session() -> None:
    """The target took it, but one of its partitions was not ready. The session began before the
    capture, so the first request opens it."""
    translator, (step,) = translated(exchange(0, share_fetch(3), 0, 1, shared(None)))
    assert sent(translator, step)["share_session_epoch"] == 0
    assert sent_again(translator, step, shared(None, of_partitions=REPLICA_NOT_AVAILABLE))
    assert sent(translator, step)["share_session_epoch"] == 1
    not_taken = shared(None, code=LOADING, of_partitions=REPLICA_NOT_AVAILABLE)
    assert sent_again(translator, step, not_taken)
    assert sent(translator, step)["share_session_epoch"] == 1


def test_a_share_partition_is_waited_for_until_its_first_success() -> None:
    """UNKNOWN_SERVER_ERROR is sent again while the share partition may not be initialised; after
    it has answered without an error, the same error is final."""
    translator, (step,) = translated(exchange(0, share_fetch(3), 0, 1, shared(None)))
    for code, is_again in ((-1, True), (INVALID_RECORD_STATE, True), (INVALID_REQUEST, False)):
        assert sent_again(translator, step, shared(None, of_partitions=code)) is is_again
    assert not sent_again(translator, step, shared(None))
    translator.learn(step, encode_message(shared(None)))
    assert not sent_again(translator, step, shared(None, of_partitions=-1))


@pytest.mark.parametrize(("first", "wait_ms"), [((0, 1), 1), ((0, 0), 500)])
def test_a_share_fetch_for_records_that_are_held_does_not_wait(
    first: tuple[int, int], wait_ms: int
) -> None:
    """If the target gave both records in the first answer, the second Fetch waits no longer than
    the captured one, 1 ms."""
    translator, (one, other) = translated(
        exchange(0, share_fetch(0), 0, 1, shared((0, 0))),
        exchange(0, share_fetch(1, 0), 2, 3, shared((1, 1))),
    )
    translator.learn(one, encode_message(shared(first)))
    assert sent(translator, other)["max_wait_ms"] == wait_ms


@pytest.mark.parametrize(("first", "is_again"), [(3, True), (1, False)])
def test_a_share_fetch_that_lacks_records_of_one_partition(first: int, is_again: bool) -> None:
    """The captured answer has records of two partitions. If that of the target has those of one, it
    is sent again until the member has all of them."""
    captured = shared((1, 1), (1, 1)) if is_again else shared((1, 1))
    translator, (step,) = translated(exchange(0, share_fetch(0), 0, 1, captured))
    sent(translator, step)
    assert sent_again(translator, step, shared((first, first))) is is_again


def test_a_member_whose_id_is_forgotten_asks_for_another_one() -> None:
    """KIP-394: a coordinator that was not ready forgets the id that it gave. The client asks for
    one without an id, and joins with the new one."""
    names = {"group_id": "g", "member_id": "m", "session_timeout_ms": 1}
    request = a_request(ApiKey.JOIN_GROUP, 5, **names)
    captured = a_response(ApiKey.JOIN_GROUP, 5, member_id="m", generation_id=1)
    translator, (step,) = translated(exchange(0, request, 0, 1, captured))
    translator.ids.groups.learn("g", "m", "old")
    for code, given, next_id in ((25, "old", ""), (79, "new", "new")):
        answer = a_response(ApiKey.JOIN_GROUP, 5, error_code=code, member_id=given)
        assert sent_again(translator, step, answer)
        assert sent(translator, step)["member_id"] == next_id
    assert translator.ids.groups.members["g", "m"] == "new"
    assert translator.ids.groups.captured["g", "old"] == "m"  # both ids are one member's
