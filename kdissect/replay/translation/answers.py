"""What answers tell a `Translator`: the captured response and the target's, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import headers
from kdissect.replay.model import READ, Exchange, Step
from kdissect.replay.translation.fetch_sessions import AcquiredOffsets
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.offsets import Log
from kdissect.replay.translation.producers import Producer
from kdissect.replay.translation.routing import share_key
from kdissect.replay.workload.messages import (
    NO_TOPIC,
    OUT_OF_SEQUENCE,
    SESSION_LOST,
    TRANSIENT,
    entries,
    error_codes,
    request_of,
    response_of,
)

Body = dict[str, Any]
_EARLIEST = -2  # timestamp of ListOffsets

# Answers that differ are asked for again so often, a pause longer each time; and after so many
# steps of an API for which that was of no use, the others are taken at their first word.
READ_ATTEMPTS, READS_MAX = 5, 4
FETCH_ATTEMPTS, FETCHES_MAX = 6, 16
SHARE_ATTEMPTS, SHARES_MAX = 4, 8
# What nobody's writes change, and fetches, whose records are looked for in all answers.
_NEVER_AGAIN = frozenset(
    {ApiKey.FETCH, ApiKey.API_VERSIONS, ApiKey.DESCRIBE_CLUSTER, ApiKey.GET_TELEMETRY_SUBSCRIPTIONS}
)
_HEARTBEATS = frozenset(
    {ApiKey.CONSUMER_GROUP_HEARTBEAT, ApiKey.SHARE_GROUP_HEARTBEAT, ApiKey.STREAMS_GROUP_HEARTBEAT}
)


# -- before the run ---------------------------------------------------------------------------


def from_capture(t: IdMap, exchange: Exchange) -> None:
    """What a captured exchange tells that later answers are held against."""
    t.groups.capture_tells(exchange)
    if exchange.api_key == ApiKey.FETCH:
        request, response = request_of(exchange), response_of(exchange)
        for log, entry in _logs(t, request.body if request is not None else {}, "topics"):
            t.offsets.capture_tells(log, asked=entry["fetch_offset"])
        for log, entry in _logs(t, response.body if response is not None else {}, "responses"):
            t.offsets.capture_tells(log, start=entry.get("log_start_offset", -1))
    elif exchange.api_key == ApiKey.PRODUCE:
        request, response = request_of(exchange), response_of(exchange)
        if request is not None and request.body.get("transactional_id") is not None:
            t.marked.update(log for log, _ in _logs(t, request.body, "topic_data"))
        for log, entry in _logs(t, response.body if response is not None else {}, "responses"):
            t.offsets.capture_tells(log, start=entry.get("log_start_offset", -1))


def _logs(t: IdMap, body: Mapping[str, Any], topics: str) -> Iterator[tuple[Log, Body]]:
    """(log by the capture's name, partition's struct) of a captured body."""
    for topic in entries(body.get(topics)):
        name = t.topic_name(topic.get("topic") or topic.get("name") or "", topic.get("topic_id"))
        for partition in _partitions(topic):
            yield (name, _index(partition)), partition


def _partitions(topic: Body) -> list[Body]:
    for name in ("partitions", "partition_data", "partition_responses"):
        if name in topic:
            return entries(topic[name])
    return []


def _index(partition: Body) -> int:
    for name in ("partition_index", "index", "partition"):
        if name in partition:
            return int(partition[name])
    return -1


# -- is it final ------------------------------------------------------------------------------


def retry(t: IdMap, step: Step, answer: Message) -> str:
    """Why to ask again, or ""."""
    captured = t.captured_of(step)
    if captured is None:
        return ""
    codes = list(error_codes(answer.body))
    again = set(codes) & (TRANSIENT - set(error_codes(captured.body)))
    if OUT_OF_SEQUENCE in codes and _is_behind(t, step):
        again.add(OUT_OF_SEQUENCE)
    if again & NO_TOPIC and not _has_topics(t, step):
        again -= NO_TOPIC
    if not again and step.exchange.api_key == ApiKey.FETCH:
        return _retry_fetch(t, step, captured, answer)
    if not again and step.exchange.api_key == ApiKey.SHARE_FETCH:
        return _retry_share(t, step, captured, answer)
    if not again:
        return _retry_read(t, step, captured, answer)
    if step.exchange.api_key == ApiKey.PRODUCE and not set(codes) <= again:
        if not _is_idempotent(step):
            return ""  # some partitions were written, and would be so twice
    if step.exchange.api_key == ApiKey.FETCH:
        t.sessions.answered(t.broker(step), step.number, 0, answer.body, is_final=False)
    elif step.exchange.api_key in (ApiKey.SHARE_FETCH, ApiKey.SHARE_ACKNOWLEDGE):
        if answer.body["error_code"] == 0:
            _note_share(t, step, captured, answer)
    elif step.exchange.api_key == ApiKey.PRODUCE:
        t.produced_again.setdefault(step.connection, set()).add(step.number)
    return f"error {min(again)}: not ready yet"


def _is_idempotent(step: Step) -> bool:
    """Whether brokers know batches of a Produce again that they have written already."""
    request = request_of(step.exchange)
    return request is not None and all(
        header.producer_id >= 0
        for topic in entries(request.body["topic_data"])
        for partition in entries(topic["partition_data"])
        for header in headers(partition["records"] or b"")
    )


def _is_behind(t: IdMap, step: Step) -> bool:
    """Whether a Produce before this one on its connection is asked again, so that the sequence of
    its batches is not there yet."""
    return any(number < step.number for number in t.produced_again.get(step.connection, ()))


def _retry_fetch(t: IdMap, step: Step, captured: Message, answer: Message) -> str:
    """Records that the capture shows are not there yet: the request may have come a little earlier
    than what it waited for, and markers are written some time after a transaction's end."""
    lost = SESSION_LOST & ({answer.body.get("error_code", 0)} - set(error_codes(captured.body)))
    if lost and not _is_futile(t, step, 1, FETCHES_MAX):
        t.asked[step.number] += 1
        t.sessions.answered(t.broker(step), step.number, 0, answer.body, is_final=False)
        return f"error {min(lost)}: its session is opened again"
    if any(error_codes(answer.body)):
        return ""
    there = {
        (t.topic_key(topic, is_captured=False), partition["partition_index"]): partition["records"]
        for topic, partition in _fetched(answer)
    }
    wanted = (
        (t.topic_key(topic, is_captured=True), topic, partition)
        for topic, partition in _fetched(captured)
    )
    if all(
        t.brings(
            (t.topic_name(topic.get("topic") or "", topic.get("topic_id")), number),
            partition["records"],
            there.get((key, number), b""),
        )
        for key, topic, partition in wanted
        for number in (partition["partition_index"],)
    ):
        return ""
    if _is_futile(t, step, FETCH_ATTEMPTS, FETCHES_MAX):
        return ""
    t.asked[step.number] += 1
    t.sessions.answered(t.broker(step), step.number, 0, answer.body, is_final=False)
    return "it does not bring all records yet"


def _retry_share(t: IdMap, step: Step, captured: Message, answer: Message) -> str:
    """A member of a share group got fewer records than it did in the capture: the request came a
    little earlier than they were produced, or than somebody else let go of them."""
    if list(error_codes(answer.body)) != list(error_codes(captured.body)):
        return ""
    request = request_of(step.exchange)
    if request is None:
        return ""
    held = t.share_held.get(share_key(t, step, request.body), AcquiredOffsets()).copy()
    _acknowledge(t, held, request)
    for log, first, last in _acquired(t, answer, is_captured=False):
        held.add(log, first, last)
    wanted = _acquired(t, captured, is_captured=True)
    if all(held.covers(log, first, last) for log, first, last in wanted):
        return ""
    if _is_futile(t, step, SHARE_ATTEMPTS, SHARES_MAX):
        return ""
    t.asked[step.number] += 1
    _note_share(t, step, captured, answer)
    return "it does not get all records yet"


def _note_share(t: IdMap, step: Step, captured: Message, answer: Message) -> None:
    """The target has taken a request that is sent again: what it acknowledged and got, and that its
    session has come one request further."""
    _share(t, step, captured, answer)
    t.share_acknowledged.add(step.number)
    if step.exchange.api_key != ApiKey.SHARE_FETCH:
        return
    for log, partition in _share_partitions(t, answer, is_captured=False):
        t.share_records[step.number, log] = t.share_records.get((step.number, log), b"") + (
            partition["records"] or b""
        )


def _acknowledge(t: IdMap, held: AcquiredOffsets, request: Message) -> None:
    """What a captured request acknowledges is held no longer."""
    for log, entry in _logs(t, request.body, "topics"):
        for batch in entries(entry["acknowledgement_batches"]):
            first, last = (
                t.offsets.to_target(log, batch[name]) for name in ("first_offset", "last_offset")
            )
            held.remove(log, first, last)


def _acquired(t: IdMap, response: Message, *, is_captured: bool) -> Iterator[tuple[Log, int, int]]:
    """(log by the capture's name, the target's first and last offset) of records that a ShareFetch
    got."""
    for log, partition in _share_partitions(t, response, is_captured=is_captured):
        for batch in entries(partition["acquired_records"]):
            first, last = batch["first_offset"], batch["last_offset"]
            if is_captured:
                first, last = (t.offsets.to_target(log, each) for each in (first, last))
            yield log, first, last


def _share_partitions(
    t: IdMap, response: Message, *, is_captured: bool
) -> Iterator[tuple[Log, Body]]:
    """(log by the capture's name, partition's struct) of a ShareFetch response."""
    back = {} if is_captured else {target: mine for mine, target in t.topic_ids.items()}
    for topic in entries(response.body["responses"]):
        topic_id = back.get(topic["topic_id"], topic["topic_id"])
        name = t.topic_name("", topic_id)
        if topic_id not in t.names and not is_captured:
            name = t.captured_topic_name(t.target.names.get(topic_id, name))
        for partition in entries(topic["partitions"]):
            yield (name, partition["partition_index"]), partition


def _fetched(response: Message) -> Iterator[tuple[Body, Body]]:
    """(topic, partition) of a Fetch response that have data records."""
    for topic in entries(response.body["responses"]):
        for partition in entries(topic["partitions"]):
            if any(
                not header.is_partial and not header.is_control
                for header in headers(partition["records"] or b"")
            ):
                yield topic, partition


def _retry_read(t: IdMap, step: Step, captured: Message, answer: Message) -> str:
    """Brokers take a moment until all of them see what was changed: a read that differs is asked
    again, unless that has been of no use for this API several times."""
    key = step.exchange.api_key
    if (
        step.step_class != READ
        or key in _NEVER_AGAIN
        or not t.has_writes
        or t.differs is None
        or not t.differs(step, captured, answer)
        or _is_futile(t, step, READ_ATTEMPTS, READS_MAX)
    ):
        return ""
    t.asked[step.number] += 1
    return "it differs: perhaps a change is not seen everywhere yet"


def _is_futile(t: IdMap, step: Step, attempts: int, steps: int) -> bool:
    """Whether to ask no more: this step has been asked so often, or so many others in vain."""
    key = step.exchange.api_key
    if t.asked[step.number] >= attempts:
        del t.asked[step.number]
        t.futile[key] += 1
        return True
    return t.futile[key] >= steps


def _has_topics(t: IdMap, step: Step) -> bool:
    """Whether the target should know the topics of a request."""
    request = request_of(step.exchange)
    if request is None:
        return False
    names = set()
    for holder in ("topics", "topic_data", "topic_names"):
        for topic in entries(request.body.get(holder)):
            if isinstance(topic, str):
                names.add(topic)
            else:
                name = topic.get("name") or topic.get("topic") or ""
                names.add(t.topic_name(name, topic.get("topic_id")))
    return bool(names) and all(t.target.has_topic(t.topic(name)) for name in names)


# -- answers ----------------------------------------------------------------------------------


def from_answer(t: IdMap, step: Step, answer: Message) -> None:
    """Learn from a final answer."""
    learner = _LEARNERS.get(step.exchange.api_key)
    if learner is not None:
        learner(t, step, t.captured_of(step), answer)


def teaches(step: Step) -> bool:
    """Whether answers of that API tell anything."""
    return step.exchange.api_key in _LEARNERS


def from_failure(t: IdMap, step: Step) -> None:
    """No answer came, or the step was not sent."""
    if step.exchange.api_key == ApiKey.FETCH:
        t.sessions.failed(t.broker(step), step.number)
    elif step.exchange.api_key == ApiKey.PRODUCE and step.expects_response:
        captured = t.captured_of(step)
        if captured is not None:
            _lost(t, step, captured, set())


def _metadata(t: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    t.target.learn_metadata(answer.body)
    _bind_topics(t, captured, answer, "topics")


def _bind_topics(t: IdMap, captured: Message | None, answer: Message, where: str) -> None:
    """The ids that both sides tell for a name."""
    if captured is None:
        return
    told = {
        entry["name"]: entry.get("topic_id")
        for entry in entries(answer.body.get(where))
        if entry.get("name")
    }
    for entry in entries(captured.body.get(where)):
        if entry.get("name"):
            t.bind_topic(entry.get("topic_id"), told.get(t.topic(entry["name"])))


def _create_topics(t: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    request = request_of(step.exchange)
    if request is not None and request.body.get("validate_only"):
        return
    for topic in entries(answer.body["topics"]):
        if topic["error_code"] == 0:
            t.target.created(topic["name"], topic.get("topic_id"))
            t.offsets.created(t.captured_topic_name(topic["name"]))
    _bind_topics(t, captured, answer, "topics")


def _delete_topics(t: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    for topic in entries(answer.body["responses"]):
        if topic["error_code"] == 0 and topic["name"]:
            # the id stays known: a late request by id is refused by both
            name = topic["name"]
            for captured_id, captured_name in t.names.items():
                if t.topic(captured_name) == name and name in t.target.topic_ids:
                    t.topic_ids.setdefault(captured_id, t.target.topic_ids[name])
            t.target.forget_topic(name)


def _find_coordinator(t: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    request = request_of(step.exchange)
    if request is None:
        return
    key_type = request.body.get("key_type", 0)
    if "coordinators" in answer.body:
        for found in entries(answer.body["coordinators"]):
            if found["error_code"] == 0:
                t.learn_coordinator(key_type, found["key"], found["node_id"])
    elif answer.body["error_code"] == 0 and request.body.get("key"):
        rename = t.group if key_type == 0 else t.transactional_id
        t.learn_coordinator(key_type, rename(request.body["key"]), answer.body["node_id"])


def _produce(t: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    if captured is None:
        return
    told = {
        (t.topic_key(topic, is_captured=False), partition["index"]): partition
        for topic in entries(answer.body["responses"])
        for partition in entries(topic["partition_responses"])
    }
    written: set[Log] = set()
    for topic in entries(captured.body["responses"]):
        name = t.topic_name(topic.get("name") or "", topic.get("topic_id"))
        key = t.topic_key(topic, is_captured=True)
        for partition in entries(topic["partition_responses"]):
            log = (name, partition["index"])
            found = told.get((key, partition["index"]))
            if found is None or found["error_code"] != 0:
                continue
            written.add(log)
            if partition["error_code"] == 0:
                expected = t.offsets.expect(log, partition["base_offset"])
                if expected is not None:
                    t.expected[step.number, log] = expected
                t.offsets.produced(log, partition["base_offset"], found["base_offset"])
                t.offsets.target_starts(log, found.get("log_start_offset", -1))
    _lost(t, step, captured, written)


def _lost(t: IdMap, step: Step, captured: Message, written: set[Log]) -> None:
    """Batches that the capture's broker took and the target did not."""
    taken = {log for log, entry in _logs(t, captured.body, "responses") if entry["error_code"] == 0}
    request = request_of(step.exchange)
    if request is None or taken <= written:
        return
    for log, entry in _logs(t, request.body, "topic_data"):
        if log in taken and log not in written:
            for header in headers(entry["records"] or b""):
                if header.producer_id >= 0:
                    producer = Producer(header.producer_id, header.producer_epoch)
                    t.producers.lost(producer, log, header.record_count)


def _fetch(t: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    session_id = 0 if captured is None else captured.body.get("session_id", 0)
    t.sessions.answered(t.broker(step), step.number, session_id, answer.body, is_final=True)


def _list_offsets(t: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    request = request_of(step.exchange)
    if request is None:
        return
    earliest = {
        (t.topic(name), number): (name, number)
        for (name, number), entry in _logs(t, request.body, "topics")
        if entry["timestamp"] == _EARLIEST
    }
    for topic in entries(answer.body["topics"]):
        for partition in entries(topic["partitions"]):
            log = earliest.get((topic["name"], partition["partition_index"]))
            if log is not None and partition["error_code"] == 0 and "offset" in partition:
                t.offsets.target_starts(log, partition["offset"])


def _init_producer_id(t: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    if captured is None or captured.body["error_code"] != 0 or answer.body["error_code"] != 0:
        return
    t.producers.learn(
        Producer(captured.body["producer_id"], captured.body["producer_epoch"]),
        Producer(answer.body["producer_id"], answer.body["producer_epoch"]),
    )


def _end_txn(t: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    if captured is not None and "producer_id" in captured.body and "producer_id" in answer.body:
        _init_producer_id(t, step, captured, answer)


def _join_group(t: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    request = request_of(step.exchange)
    if request is not None:
        t.groups.joined(request.body, None if captured is None else captured.body, answer.body)


def _heartbeat(t: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    request = request_of(step.exchange)
    if request is not None:
        t.groups.heartbeat(request.body, None if captured is None else captured.body, answer.body)


def _share(t: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
    request = request_of(step.exchange)
    if request is None:
        return
    key = share_key(t, step, request.body)
    epoch = request.body["share_session_epoch"]
    if answer.body["error_code"] != 0 or epoch < 0:
        t.share_epochs.pop(key, None)
        t.share_held.pop(key, None)
    elif epoch == 0 or key not in t.share_epochs:
        t.share_epochs[key] = epoch + 1
    else:
        last = t.share_epochs[key]
        t.share_epochs[key] = last + 1 if last < 0x7FFFFFFF else 1
    held = t.share_held.setdefault(key, AcquiredOffsets())
    if step.number not in t.share_acknowledged:
        _acknowledge(t, held, request)
    if step.exchange.api_key == ApiKey.SHARE_FETCH:
        for log, first, last in _acquired(t, answer, is_captured=False):
            held.add(log, first, last)
    t.share_acknowledged.discard(step.number)


def _opaque(*names: str) -> Any:
    def learn(t: IdMap, step: Step, captured: Message | None, answer: Message) -> None:
        if captured is None or answer.body["error_code"] != 0:
            return
        for name in names:
            t.opaque[name, captured.body[name]] = answer.body[name]

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
    **dict.fromkeys(_HEARTBEATS, _heartbeat),
}
