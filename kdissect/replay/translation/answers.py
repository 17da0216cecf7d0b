"""Answers teach the `IdMap`: captured response and answer are read side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import headers
from kdissect.replay.model import Exchange, Step
from kdissect.replay.translation.id_map import ZERO_UUID, IdMap, Producer
from kdissect.replay.translation.nodes import nodes_of
from kdissect.replay.translation.offsets import Log
from kdissect.replay.translation.sessions import AcquiredOffsets
from kdissect.replay.workload.messages import (
    GROUP_KEY,
    MEMBER_HEARTBEATS,
    NOT_MADE_YET,
    entries,
    member_of,
    partitions,
    request_of,
    response_of,
)

Body = dict[str, Any]
_EARLIEST = -2  # timestamp of ListOffsets


# -- before the run ---------------------------------------------------------------------------


def from_capture(ids: IdMap, exchange: Exchange) -> None:
    """Take from a captured exchange, before the run, the values that answers are compared with.

    These are log start offsets, fetched offsets, assignments, and partitions in transactions.
    """
    if exchange.api_key not in (ApiKey.SYNC_GROUP, ApiKey.FETCH, ApiKey.PRODUCE):
        return
    request, response = request_of(exchange), response_of(exchange)
    if exchange.api_key == ApiKey.SYNC_GROUP:
        if request is not None:
            ids.groups.add_captured(request.body)
        return
    for log, entry in ids.names.logs(response.body if response is not None else {}):
        ids.offsets.add_captured(log, start=entry.get("log_start_offset", -1))
    if request is None:
        return
    if exchange.api_key == ApiKey.FETCH:
        for log, entry in ids.names.logs(request.body):
            ids.offsets.add_captured(log, fetched=entry["fetch_offset"])
    elif request.body.get("transactional_id") is not None:
        ids.marked.update(log for log, _ in ids.names.logs(request.body))


# -- during the run -------------------------------------------------------------------------------


def from_answer(ids: IdMap, step: Step, response: bytes) -> None:
    """Learn from a final answer."""
    learner = _LEARNERS.get(step.exchange.api_key)
    if learner is None:
        return
    if (answer := ids.answer_of(step, response)) is None:
        from_failure(ids, step)
    else:
        learner(ids, step, response_of(step.exchange), answer)


def from_failure(ids: IdMap, step: Step) -> None:
    """Note that a step was not sent, or that no answer to it came."""
    if step.exchange.api_key == ApiKey.FETCH:
        ids.sessions.failed(step.number)
    elif step.exchange.api_key == ApiKey.PRODUCE and step.expects_response:
        captured = response_of(step.exchange)
        if captured is not None:
            _lost(ids, step, captured, set())


def _metadata(ids: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    ids.target.learn_metadata(answer.body)
    request = request_of(step.exchange)
    if request is not None and request.body.get("allow_auto_topic_creation", True):
        ids.target.being_made.update(
            topic["name"]
            for topic in entries(answer.body["topics"])
            if topic["error_code"] in NOT_MADE_YET and topic.get("name")
        )
    _bind_topics(ids, captured, answer)


def _bind_topics(ids: IdMap, captured: Message | None, answer: Message) -> None:
    """Map captured topic ids to the target's, for topics that both responses name."""
    if captured is None:
        return
    ids_by_name = {
        entry["name"]: entry.get("topic_id")
        for entry in entries(answer.body.get("topics"))
        if entry.get("name")
    }
    for entry in entries(captured.body.get("topics")):
        if entry.get("name"):
            mine, other = entry.get("topic_id"), ids_by_name.get(ids.topic(entry["name"]))
            if mine and other and ZERO_UUID not in (mine, other):
                ids.topic_ids[mine] = other


def _create_topics(ids: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    request = request_of(step.exchange)
    if request is not None and request.body.get("validate_only"):
        return
    for topic in entries(answer.body["topics"]):
        if topic["error_code"] == 0:
            ids.target.created(topic["name"], topic.get("topic_id"))
            ids.offsets.created(ids.captured_topic_name(topic["name"]))
    _bind_topics(ids, captured, answer)


def _delete_topics(ids: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    for topic in entries(answer.body["responses"]):
        if topic["error_code"] == 0 and topic["name"]:
            # the id stays known: a late request by id is refused by both
            name = topic["name"]
            for captured_id, captured_name in ids.names.items():
                if ids.topic(captured_name) == name and name in ids.target.topic_ids:
                    ids.topic_ids.setdefault(captured_id, ids.target.topic_ids[name])
            ids.target.forget_topic(name)


def _find_coordinator(ids: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    request = request_of(step.exchange)
    if request is None:
        return
    key_type = request.body.get("key_type", GROUP_KEY)
    if "coordinators" in answer.body:
        for found in entries(answer.body["coordinators"]):
            if found["error_code"] == 0:
                ids.target.coordinators[key_type, found["key"]] = found["node_id"]
    elif answer.body["error_code"] == 0 and request.body.get("key"):
        name = ids.name("group" if key_type == GROUP_KEY else "txn", request.body["key"])
        ids.target.coordinators[key_type, name] = answer.body["node_id"]


def _produce(ids: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    if captured is None:
        return
    answered = {
        (ids.topic_key(topic, is_captured=False), number): partition
        for topic, number, partition in partitions(answer.body)
    }
    written: set[Log] = set()
    for topic, number, partition in partitions(captured.body):
        log = ids.names.of(topic), number
        target_partition = answered.get((ids.topic_key(topic, is_captured=True), number))
        if target_partition is None or target_partition["error_code"] != 0:
            continue
        written.add(log)
        if partition["error_code"] == 0:
            expected = ids.offsets.expect(log, partition["base_offset"])
            if expected is not None:
                ids.shifts[step.number, log] = expected - partition["base_offset"]
            ids.offsets.produced(log, partition["base_offset"], target_partition["base_offset"])
            ids.offsets.target_starts(log, target_partition.get("log_start_offset", -1))
    _lost(ids, step, captured, written)


def _lost(ids: IdMap, step: Step, captured: Message, written: set[Log]) -> None:
    """Batches that the capture's broker took and the target did not."""
    taken = {log for log, entry in ids.names.logs(captured.body) if entry["error_code"] == 0}
    request = request_of(step.exchange)
    if request is None or taken <= written:
        return
    for log, entry in ids.names.logs(request.body):
        if log in taken and log not in written:
            for header in headers(entry["records"] or b""):
                if header.producer_id >= 0:
                    producer = Producer(header.producer_id, header.producer_epoch)
                    ids.producers.lost(producer, log, header.record_count)


def _fetch(ids: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    session_id = 0 if captured is None else captured.body.get("session_id", 0)
    ids.sessions.answered(ids.broker(step), step.number, session_id, answer.body, is_final=True)


def _list_offsets(ids: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    request = request_of(step.exchange)
    if request is None:
        return
    earliest = {
        (ids.topic(name), number): (name, number)
        for (name, number), entry in ids.names.logs(request.body)
        if entry["timestamp"] == _EARLIEST
    }
    for topic, number, partition in partitions(answer.body):
        log = earliest.get((topic["name"], number))
        if log is not None and partition["error_code"] == 0 and "offset" in partition:
            ids.offsets.target_starts(log, partition["offset"])


def _init_producer_id(ids: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    if captured is None or captured.body["error_code"] != 0:
        return
    if answer.body["error_code"] != 0:
        ids.producers.refused[captured.body["producer_id"]] = answer.body["error_code"]
        return
    ids.producers.learn(
        Producer(captured.body["producer_id"], captured.body["producer_epoch"]),
        Producer(answer.body["producer_id"], answer.body["producer_epoch"]),
    )


def _end_txn(ids: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    if captured is not None and "producer_id" in captured.body and "producer_id" in answer.body:
        _init_producer_id(ids, step, captured, answer)


def _join_group(ids: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    request = request_of(step.exchange)
    if request is not None:
        ids.groups.joined(request.body, None if captured is None else captured.body, answer.body)


def _heartbeat(ids: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    request = request_of(step.exchange)
    if request is not None:
        ids.groups.heartbeat(request.body, None if captured is None else captured.body, answer.body)


def member_followed(ids: IdMap, step: Step, answer: Message, *, is_again: bool) -> None:
    """Note the epoch and assignment of a member from an answer that is not final.

    is_again: the step's heartbeat is sent again. Otherwise the answer is to a later heartbeat of
    the replay's own.
    """
    known = request_of(step.exchange) if is_again else response_of(step.exchange)
    if known is not None:
        group, member = member_of(step.exchange)
        ids.groups.followed(group, member, known.body["member_epoch"], answer.body)


def _share(ids: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    request = request_of(step.exchange)
    if request is None:
        return
    body, node = request.body, nodes_of(ids, step)[0]
    session = ids.share.answered(ids.broker(step), node, body, answer.body)
    if step.number not in ids.share.acknowledged:
        _acknowledge(ids, session.held, body)
    if step.exchange.api_key == ApiKey.SHARE_FETCH:
        for log, first, last in acquired(ids, answer, is_captured=False):
            session.held.add(log, first, last)
    ids.share.acknowledged.discard(step.number)


def note_share(ids: IdMap, step: Step, captured: Message, answer: Message) -> None:
    """The target has taken a request that is sent again: what it acknowledged and got, and that its
    session has come one request further."""
    _share(ids, step, captured, answer)
    ids.share.acknowledged.add(step.number)


def _acknowledge(ids: IdMap, held: AcquiredOffsets, body: Body) -> None:
    """Remove the acknowledged offsets of a captured request from `held`."""
    for log, entry in ids.names.logs(body):
        for batch in entries(entry["acknowledgement_batches"]):
            first, last = (
                ids.offsets.to_target(log, batch[name]) for name in ("first_offset", "last_offset")
            )
            held.remove(log, first, last)


def held_after(ids: IdMap, step: Step, body: Body) -> AcquiredOffsets:
    """The offsets that a member of a share group holds after the acknowledgements of a captured
    request."""
    held = ids.share.of(ids.broker(step), body).held.copy()
    _acknowledge(ids, held, body)
    return held


def acquired(ids: IdMap, response: Message, *, is_captured: bool) -> Iterator[tuple[Log, int, int]]:
    """(log by the capture's name, the target's first and last offset) of records that a ShareFetch
    got."""
    for topic, number, partition in partitions(response.body):
        topic_id = topic["topic_id"]
        if not is_captured:
            topic_id = ids.captured_topic_id(topic_id)
        name = ids.topic_name("", topic_id)
        if topic_id not in ids.names and not is_captured:
            name = ids.captured_topic_name(ids.target.names.get(topic_id, name))
        log = name, number
        for batch in entries(partition["acquired_records"]):
            first, last = batch["first_offset"], batch["last_offset"]
            if is_captured:
                first, last = (ids.offsets.to_target(log, each) for each in (first, last))
            yield log, first, last


def _opaque(*names: str) -> Any:
    def learn(ids: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
        if captured is None or answer.body["error_code"] != 0:
            return
        for name in names:
            ids.opaque[name, captured.body[name]] = answer.body[name]

    return learn


_LEARNERS: dict[int, Any] = {
    ApiKey.METADATA: _metadata,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: _metadata,
    ApiKey.CREATE_TOPICS: _create_topics,
    ApiKey.DELETE_TOPICS: _delete_topics,
    ApiKey.FIND_COORDINATOR: _find_coordinator,
    ApiKey.PRODUCE: _produce,
    ApiKey.FETCH: _fetch,
    ApiKey.LIST_OFFSETS: _list_offsets,
    ApiKey.INIT_PRODUCER_ID: _init_producer_id,
    ApiKey.END_TXN: _end_txn,
    ApiKey.JOIN_GROUP: _join_group,
    ApiKey.SHARE_FETCH: _share,
    ApiKey.SHARE_ACKNOWLEDGE: _share,
    ApiKey.CREATE_DELEGATION_TOKEN: _opaque("hmac", "token_id"),
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: _opaque("client_instance_id", "subscription_id"),
    **dict.fromkeys(MEMBER_HEARTBEATS, _heartbeat),
}
