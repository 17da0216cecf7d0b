"""Answers teach the `IdMap`: captured response and answer are read side by side.

They also say what is not ready at the target (`unready`), so that the request is sent again: an
error code after which clients repeat a request, unless the capture has it there as well; records of
the captured response, or the assignment of a member, that are not there yet. It is never another
difference. An answer with another new error is final, because only the last one is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.batches import headers, last_data
from kdissect.replay.model import Log, Resource, Step
from kdissect.replay.translation.groups import ShareSession, assignment_in, is_assigned
from kdissect.replay.translation.id_map import ZERO_UUID, IdMap, Producer
from kdissect.replay.workload import messages
from kdissect.replay.workload.messages import MEMBER_HEARTBEATS, Body, entries, error_codes

_OPAQUE = frozenset(("hmac", "token_id", "client_instance_id", "subscription_id"))
_COORDINATED = {"group_id": "group", "transactional_id": "transactional-id"}  # kinds, by fields
_INITIALISING = frozenset({ErrorCode.UNKNOWN_SERVER_ERROR, ErrorCode.INVALID_RECORD_STATE})


# Each takes the bodies of the captured request and response, empty if they are unknown, and that of
# the answer.


def _metadata(ids: IdMap, step: Step, asked: Body, captured: Body, answer: Body) -> None:
    ids.target.learn_metadata(answer)
    _bind_topics(ids, captured, answer)


def _bind_topics(ids: IdMap, captured: Body, answer: Body) -> None:
    """Map captured topic ids to the target's, for topics that both responses name."""
    theirs = {entry.get("name"): entry.get("topic_id") for entry in entries(answer.get("topics"))}
    for entry in entries(captured.get("topics")):
        if entry.get("name"):
            mine, other = entry.get("topic_id"), theirs.get(ids.topic(entry["name"]))
            if mine and other and ZERO_UUID not in (mine, other):
                ids.topic_ids[mine] = other


def _create_topics(ids: IdMap, step: Step, asked: Body, captured: Body, answer: Body) -> None:
    if asked.get("validate_only"):
        return
    was_there = {each["name"] for each in entries(captured.get("topics")) if each["error_code"]}
    for topic in entries(answer["topics"]):
        if topic["error_code"] == 0:
            ids.target.forget_topic(topic["name"])  # an earlier one of this name
            ids.target.learn_metadata({"topics": [topic]})
            name = ids.captured_name("topic", topic["name"])
            ids.offsets.created(name, step.number, is_new=name not in was_there)
    _bind_topics(ids, captured, answer)


def _delete_topics(ids: IdMap, step: Step, asked: Body, captured: Body, answer: Body) -> None:
    for topic in entries(answer["responses"]):
        if topic["error_code"] == 0 and topic["name"]:
            ids.target.forget_topic(topic["name"])


def produced(ids: IdMap, step: Step, asked: Body, captured: Body, answer: Body) -> None:
    """Of a Produce. answer: empty if there is none."""
    answered, sent = dict(ids.target_topics.logs(answer)), dict(ids.names.logs(asked))
    for log, partition in ids.names.logs(captured):
        if partition["error_code"] != 0:
            continue
        target = answered.get(log, {})
        if target.get("error_code") == 0:
            offsets = ids.offsets.of(log, step.number)
            offsets.produced(partition["base_offset"], target["base_offset"])
            offsets.target_starts(target.get("log_start_offset", -1))
            continue
        for header in headers(sent.get(log, {}).get("records") or b""):
            if header.producer_id >= 0:
                producer = Producer(header.producer_id, header.producer_epoch)
                ids.producers.lost(producer, log, header.record_count)


def _producer(ids: IdMap, step: Step, asked: Body, captured: Body, answer: Body) -> None:
    """Of an InitProducerId, or of an EndTxn that returns a producer (KIP-890)."""
    if captured.get("error_code") != 0 or "producer_id" not in captured.keys() & answer.keys():
        return
    if answer["error_code"] != 0:
        ids.producers.refused[captured["producer_id"]] = answer["error_code"]
    else:
        ids.producers.learn(
            *(Producer(each["producer_id"], each["producer_epoch"]) for each in (captured, answer))
        )


# -- share groups -----------------------------------------------------------------------------


def _share(ids: IdMap, step: Step, asked: Body, captured: Body, answer: Body) -> None:
    if asked:
        session = _share_taken(ids, step, asked, answer)
        session.due.update(acquired(ids.names, captured))
        ids.share.acknowledged.discard(step.number)


def _share_taken(ids: IdMap, step: Step, asked: Body, answer: Body) -> ShareSession:
    session = ids.share.answered(ids.broker(step), asked, answer)
    session.got.update(acquired(ids.target_topics, answer))
    parts = ids.target_topics.logs(answer)
    ids.share.ready.update(log for log, part in parts if not part["error_code"])
    return session


def acquired(topics: messages.MessageTopics, response: Body) -> Counter[Log]:
    """The number of records of each log that a ShareFetch got; none of other APIs."""
    found: Counter[Log] = Counter()
    for log, partition in topics.logs(response):
        for batch in entries(partition.get("acquired_records")):
            found[log] += batch["last_offset"] - batch["first_offset"] + 1
    return found


def lacks_records(
    ids: IdMap, step: Step, asked: Body, captured: Body, answer: Body | None = None
) -> list[Log]:
    """Logs of which a member of a share group has fewer records than the captured one has with this
    response. answer: of the target, if there is one."""
    session, wanted = ids.share.of(ids.broker(step), asked), acquired(ids.names, captured)
    got = session.got + acquired(ids.target_topics, answer or {})
    return [log for log in wanted if got[log] < session.due[log] + wanted[log]]


def _opaque(ids: IdMap, step: Step, asked: Body, captured: Body, answer: Body) -> None:
    for name in _OPAQUE & captured.keys():
        if answer["error_code"] == 0:
            ids.opaque[name, captured[name]] = answer[name]


LEARNERS: dict[int, Callable[..., None]] = {
    ApiKey.METADATA: _metadata,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: _metadata,
    ApiKey.CREATE_TOPICS: _create_topics,
    ApiKey.DELETE_TOPICS: _delete_topics,
    ApiKey.PRODUCE: produced,
    ApiKey.INIT_PRODUCER_ID: _producer,
    ApiKey.END_TXN: _producer,
    ApiKey.JOIN_GROUP: lambda ids, step, *bodies: ids.groups.joined(*bodies),
    ApiKey.SHARE_FETCH: _share,
    ApiKey.SHARE_ACKNOWLEDGE: _share,
    ApiKey.CREATE_DELEGATION_TOKEN: _opaque,
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: _opaque,
    **dict.fromkeys(MEMBER_HEARTBEATS, lambda ids, step, *bodies: ids.groups.heartbeat(*bodies)),
}


# -- what is not ready ------------------------------------------------------------------------


def unready(ids: IdMap, step: Step, answer: Body) -> dict[Resource, str]:
    """What is not ready -> the reason to send the request again. Beside the resources of `_errors`:
    ``("records", topic, partition)`` and ``("member", group, member)``."""
    asked, captured = messages.bodies(step.exchange)
    if not captured:
        return {}
    api_key = step.exchange.api_key
    codes = error_codes(answer)
    if any(codes):
        # With a reference, what both targets answer in the end is compared: a request that has had
        # no effect is sent again, whatever the capture has.
        known = {
            (resource, code)
            for resource, code in _errors(ids.names, lambda _, name: name, step, captured)
            if not (ids.options.has_reference and messages.are_refusals(api_key, [code]))
        }
        answered = _errors(ids.target_topics, ids.captured_name, step, answer)
        new = [each for each in answered if each not in known]
        passing = [each for each in new if _is_transient(ids, step, *each)]
        if any(each not in passing and not messages.is_transient(api_key, each[1]) for each in new):
            return {}  # the next answer might not have this error
        found = {resource: f"error {code}: not ready yet" for resource, code in passing}
        is_partly_done = api_key == ApiKey.PRODUCE and len(found) < len(codes)
        if is_partly_done and not _is_idempotent(asked):
            return {}  # some partitions were written, and would be so twice
        if found:
            return found
    if api_key == ApiKey.FETCH:
        return _without_records(ids, step, captured, answer)
    if api_key == ApiKey.SHARE_FETCH:
        return _without_share_records(ids, step, asked, captured, answer)
    if api_key in MEMBER_HEARTBEATS:
        return _without_assignment(ids, step, captured, answer)
    return {}


def _errors(
    topics: messages.MessageTopics, named: Callable[[str, str], str], step: Step, answer: Body
) -> Iterator[tuple[Resource, int]]:
    """Each error code but 0 of an answer with its resource: the innermost that the answer names, or
    else a group or transaction of the request, or ``(API name,)``. topics, named: the capture's
    names of topics, and of groups and transactions, of the answer's side."""
    own = (resource for resource, _ in step.accesses if resource[0] in _COORDINATED.values())
    whole = next(own, (step.api_name,))
    for around, _, code in messages.errors(answer):
        if code == 0:
            continue
        found: Resource = whole
        for holder in around:
            if topic := topics.of(holder):
                found = "topic", topic
            for name, kind in _COORDINATED.items():
                if holder.get(name):
                    found = kind, named(kind, holder[name])
            for name in ("partition_index", "index", "partition"):
                if name in holder:
                    found = "log", found[-1], holder[name]
        yield found, code


def _is_transient(ids: IdMap, step: Step, resource: Resource, code: int) -> bool:
    api_key = step.exchange.api_key
    if api_key in messages.SHARE_APIS and code in _INITIALISING:
        # the state of a share partition is read from its coordinator at first (KIP-932)
        return resource[1:] not in ids.share.ready
    if not messages.is_transient(api_key, code) or code not in messages.NO_TOPIC:
        return messages.is_transient(api_key, code)
    kind, *log = resource  # the target has it, by its metadata
    name = ids.topic(log[0]) if log else ""
    return name in ids.target.topics and (kind != "log" or (name, log[1]) in ids.target.leaders)


def _is_idempotent(asked: Body) -> bool:
    """Return whether brokers recognise batches of a Produce that they have written already."""
    return bool(asked) and all(
        header.producer_id >= 0
        for _, _, partition in messages.partitions(asked)
        for header in headers(partition["records"] or b"")
    )


def _without_records(ids: IdMap, step: Step, captured: Body, answer: Body) -> dict[Resource, str]:
    """Partitions whose answers end before the last captured data record: the Fetch came before the
    Produce, or transaction markers are not written yet, or the target's segments end elsewhere."""
    if answer.get("error_code"):
        return {}
    answered = dict(ids.target_topics.logs(answer))
    found: dict[Resource, str] = {}
    for log, partition in ids.names.logs(captured):
        last = last_data(partition["records"] or b"")
        if last < 0:
            continue
        other = answered.get(log, {})
        wanted = ids.offsets.of(log, step.number).to_target(last)
        read_to = ids.read_to.get((step.number, log), 0)
        last = max(last_data(other.get("records") or b""), read_to - 1)
        if not other.get("error_code") and last < wanted:
            found["records", *log] = "it does not bring all records yet"
    return found


def _without_share_records(
    ids: IdMap, step: Step, asked: Body, captured: Body, answer: Body
) -> dict[Resource, str]:
    """A member of a share group got fewer records than in the capture: the request came before they
    were produced, or before another member released them."""
    if not asked or set(error_codes(answer)) != set(error_codes(captured)):
        return {}
    return {
        ("records", *log): "it does not get all records yet"
        for log in lacks_records(ids, step, asked, captured, answer)
    }


def _without_assignment(
    ids: IdMap, step: Step, captured: Body, answer: Body
) -> dict[Resource, str]:
    """The coordinator computes assignments some time after a member joins: a member without any
    partition has none yet, if the captured one has."""
    group, member = messages.member_of(step.exchange)
    if (
        answer["error_code"]
        or not is_assigned(assignment_in(captured))
        or is_assigned(assignment_in(answer))
        or is_assigned(ids.groups.assigned(group, member))
    ):
        return {}
    return {("member", group, member): "its member has no partitions yet"}


def note_not_final(ids: IdMap, step: Step, answer: Body) -> None:
    """Note what the target has done of a request that is sent again."""
    api_key = step.exchange.api_key
    if api_key in messages.SHARE_APIS and answer["error_code"] == 0:
        _share_taken(ids, step, messages.request_body(step.exchange), answer)
        ids.share.acknowledged.add(step.number)
    elif api_key == ApiKey.FETCH:
        for log, partition in ids.target_topics.logs(answer):
            end = last_data(partition["records"] or b"") + 1
            ids.read_to[step.number, log] = max(ids.read_to.get((step.number, log), 0), end)
    elif api_key == ApiKey.JOIN_GROUP and answer["error_code"] == ErrorCode.UNKNOWN_MEMBER_ID:
        ids.groups.members[messages.member_of(step.exchange)] = ""  # it asks for another id
    elif api_key == ApiKey.JOIN_GROUP and answer["error_code"] == ErrorCode.MEMBER_ID_REQUIRED:
        ids.groups.learn(*messages.member_of(step.exchange), answer["member_id"])
    elif api_key in MEMBER_HEARTBEATS and answer["error_code"] == 0:
        epoch = messages.bodies(step.exchange)[0]["member_epoch"]
        ids.groups.followed(*messages.member_of(step.exchange), epoch, answer)
