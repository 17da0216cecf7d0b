"""The capture's requests in the target's terms: ids, names, sessions, epochs and offsets.

Theory of operation
-------------------
Requests are decoded, fields that hold ids (`fields.toml`) are changed, and the request is encoded
again. If nothing changes, the captured bytes go out with another correlation id. Most follows from
the kinds of fields. A few APIs need more than that.

The `IdMap` begins with the captured log starts and fetched offsets. Before the first request the
session adds the target's leaders and log starts. Then answers teach it, to the APIs of
`learning.LEARNERS`: where the captured response has X, and the target's answer to the same request
has Y, later requests with X are sent with Y. Its keys are the capture's (names before renames), so
a capture is replayed to its own cluster and to another one in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.errors import DecodeError, EncodeError
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode, error_name
from kdissect.replay import model
from kdissect.replay.batches import headers, patch_producer
from kdissect.replay.fields import FieldRef, iter_fields
from kdissect.replay.model import Difference, Log, Resource, SkipCode, Skipped, Step, Untranslatable
from kdissect.replay.translation import learning
from kdissect.replay.translation.groups import with_topics
from kdissect.replay.translation.id_map import IN_SYNC, IdMap, Producer, limited, resource_word
from kdissect.replay.translation.reencode import reencoded
from kdissect.replay.workload import messages
from kdissect.replay.workload.fetch_sessions import by_topic
from kdissect.replay.workload.messages import GROUP_KEY, Body, entries, response_body

_MAY_FORBID_CREATION = 4  # Metadata v0 to v3 always let the broker create a topic


class Translator:
    """Translates requests to the target's ids, which it learns from answers. One for a run.

    It does not wait: the run calls it in the order in which things happen. dropped: step -> fields
    that its request lacks in the version that it is sent in.
    """

    def __init__(self, ids: IdMap) -> None:
        self.ids = ids
        self.dropped: dict[int, list[Difference]] = {}

    # -- requests -------------------------------------------------------------------------------

    def request(self, step: Step) -> bytes | Skipped:
        """The frame to send, with the target's ids; to be called just before sending."""
        exchange = step.exchange
        if exchange.request is None:
            return Skipped(SkipCode.NOT_CAPTURED, exchange.request_missing)
        if refused := self._refused(step) or self._protected(step):
            return refused
        try:
            return self._translated(step, exchange.request)
        except Untranslatable as cause:
            return Skipped(SkipCode.NOT_TRANSLATABLE, str(cause))
        except EncodeError as error:
            return Skipped(SkipCode.NOT_TRANSLATABLE, f"cannot be encoded: {error}")

    def _translated(self, step: Step, frame: bytes) -> bytes:
        """The frame to send. Raises Untranslatable, EncodeError."""
        try:
            request = decode_message(frame, side="request")
        except (DecodeError, ValueError):
            # ApiVersions in a version that has no definition: brokers answer it with an error
            return frame
        translate(self.ids, step, request)
        version = self.ids.api_version(step)
        if version != step.exchange.api_version:
            request, self.dropped[step.number] = reencoded(self.ids, request, version)
        elif request.body == messages.request_body(step.exchange):
            return frame
        return encode_message(request)

    def _refused(self, step: Step) -> Skipped | None:
        """A version that the target does not speak: a client would fail at once."""
        exchange, ranges = step.exchange, self.ids.target.ranges
        first, last = ranges.get(exchange.api_key, (0, -1))
        if not ranges or exchange.api_key == ApiKey.API_VERSIONS:
            return None
        if first <= self.ids.api_version(step) <= last:
            return None
        reason = f"the target does not offer {step.api_name}"
        if exchange.api_key in ranges:
            speaks = f"the target speaks {step.api_name} v{first} to v{last}"
            reason = f"{speaks}, captured is v{exchange.api_version}"
        if exchange.response is None and exchange.expects_response:
            return Skipped(SkipCode.API_VERSION, f"{reason}; it was not answered in the capture")
        return Skipped(SkipCode.API_VERSION, reason)

    def _protected(self, step: Step) -> Skipped | None:
        """A request that would delete something of `kept`, also if it names other things too."""
        if step.exchange.api_key not in messages.DELETING_APIS:
            return None
        for kind in ("topic", "group"):
            for name in (self.ids.name(kind, captured) for captured in step.named(kind)):
                if (kind, name) in self.ids.kept:
                    needed = f"needs --allow {model.DELETE_EXISTING}"
                    reason = f"{kind} {name} was there before: {needed}"
                    return Skipped(SkipCode.NOT_ALLOWED, reason)
        return None

    # -- answers --------------------------------------------------------------------------------

    def unready(self, step: Step, frame: bytes) -> dict[Resource, str]:
        """What is not ready at the target by an answer -> the reason to send the request again."""
        answer = self.ids.answer_of(step, frame)
        return {} if answer is None else learning.unready(self.ids, step, answer.body)

    def not_final(self, step: Step, frame: bytes) -> None:
        """Learn from an answer after which the request is sent again."""
        if (answer := self.ids.answer_of(step, frame)) is not None:
            learning.note_not_final(self.ids, step, answer.body)

    def learn(self, step: Step, frame: bytes) -> None:
        """Learn the target's ids and offsets from a final answer."""
        if (learn := learning.LEARNERS.get(step.exchange.api_key)) is None:
            return
        if (answer := self.ids.answer_of(step, frame)) is None:
            self.failed(step)
        else:
            learn(self.ids, step, *messages.bodies(step.exchange), answer.body)

    def failed(self, step: Step) -> None:
        """No answer to a step came, or it was not sent."""
        if step.exchange.api_key == ApiKey.PRODUCE and step.expects_response:
            learning.produced(self.ids, step, *messages.bodies(step.exchange), {})
        if step.exchange.api_key == ApiKey.FETCH:  # the captured session goes on all the same
            self.ids.sessions.after(self.ids.broker(step), *messages.bodies(step.exchange))

    # -- members of groups, for requests of the replay's own --------------------------------------

    def member_heartbeat(self, last: Step) -> bytes:
        """A heartbeat by the state of a member at the target.

        last: its JoinGroup (then it is a Heartbeat v1), or the last answered heartbeat of a member
        whose partitions the broker assigns.
        """
        ids, exchange, captured = self.ids, last.exchange, response_body(last.exchange)
        group, member = messages.member_of(exchange)
        api_key, version = exchange.api_key, ids.api_version(last)
        body: Body = {
            "group_id": ids.name("group", group),
            "member_id": ids.groups.member(group, member),
        }
        if exchange.api_key == ApiKey.JOIN_GROUP:
            api_key, version = ApiKey.HEARTBEAT, 1
            generation = captured.get("generation_id", -1)
            body["member_id"] = ids.groups.member(group, captured.get("member_id", ""))
            body["generation_id"] = ids.groups.generation(group, "", generation)
        else:
            body["member_epoch"] = ids.groups.last_epoch[group, member]
            if exchange.api_key != ApiKey.SHARE_GROUP_HEARTBEAT:
                body |= ids.groups.assigned(group, member)
        header = {"correlation_id": 0, "client_id": exchange.client_id}
        return encode_message(Message(api_key, version, "request", header, body))

    def member_join(self, join: Step) -> bytes:
        """The request with which a member joined, with its id at the target."""
        request = decode_message(join.exchange.request or b"", side="request")
        group, captured = request.body["group_id"], response_body(join.exchange)
        translate(self.ids, join, request)
        request.body["member_id"] = self.ids.groups.member(group, captured.get("member_id", ""))
        return encode_message(request)

    def learn_member(self, last: Step, answer: bytes) -> int:
        """Learn from the answer to a member's heartbeat; return its error code."""
        self.learn(last, answer)
        message = self.ids.answer_of(last, answer)
        return ErrorCode.UNKNOWN_SERVER_ERROR if message is None else message.body["error_code"]


def translate(ids: IdMap, step: Step, request: Message) -> None:
    """Change the decoded request's body. Raises Untranslatable."""
    if special := _SPECIAL.get(step.exchange.api_key):
        request.body = special(ids, step, request.body)
    # All are found before any is changed, and epochs are looked up by the capture's ids.
    refs = list(iter_fields(request))
    refs.sort(key=lambda ref: ref.kind not in ("generation", "producer-epoch"))
    for ref in refs:
        found = [_changed(ids, step, ref, each) for each in ref.values]
        if ref.kind == "node":  # several of the capture's may be one at the target
            found = list(dict.fromkeys(found))
        ref.holder[ref.slot.name] = found if ref.slot.field.is_array else found[0]


# -- by the kind of a field -------------------------------------------------------------------


def _changed(ids: IdMap, step: Step, ref: FieldRef, value: Any) -> Any:
    """The target's value for one of the capture's. Raises Untranslatable."""
    holder, name, around = ref.holder, ref.slot.name, ref.around
    match ref.kind:
        case "topic" | "group" | "transactional-id":
            return ids.name(ref.kind, value)
        case "topic-id":
            return _topic_id(ids, step, value)
        case "member":
            return ids.groups.member(around.group, value)
        case "generation":
            return ids.groups.generation(around.group, holder.get("member_id") or "", value)
        case "node":
            return ids.node(value)
        case "leader-epoch" if value >= 0:  # -1 at the target if it is unknown there
            topic, partition = _log(ids, ref)
            return ids.target.leaders.get((ids.topic(topic), partition), (-1, -1))[1]
        case "offset":
            log = _log(ids, ref)
            offset = ids.offsets.of(log, step.number).to_target(value)
            if name != "fetch_offset":
                return offset
            # a Fetch that is sent again goes on behind the records that came
            return max(offset, ids.read_to.get((step.number, log), offset))
        case "producer-id" if value >= 0:
            producer = ids.producers.target(Producer(value, -1))
            if producer is None and not ref.slot.field.is_array:  # an array is a filter
                raise _unknown_producer(ids, value)
            return value if producer is None else producer.producer_id
        case "producer-epoch":
            number = holder.get(name.removesuffix("_epoch") + "_id", -1)
            producer = ids.producers.target(Producer(number, value))
            return value if producer is None or number < 0 else producer.epoch
        case "records":
            return _records(ids, _log(ids, ref), value)
        case "protocol":
            return _protocol(ids, step, value)
        case "resource":
            word = resource_word(holder)
            if word.startswith("broker") and value.isascii() and value.isdigit():
                return str(ids.node(int(value)))
            return ids.name(word.replace(" ", "-"), value)
        case "coordinator":
            kinds = {GROUP_KEY: "group", messages.TRANSACTION_KEY: "transactional-id"}
            kind = kinds.get(holder.get("key_type", GROUP_KEY))
            if kind is None:
                raise Untranslatable(
                    "only brokers look for the coordinator of a share group's state"
                )
            return ids.name(kind, value)
        case "replicas":
            return _replicas(ids, step, ref, value)
        case "opaque":
            return ids.opaque.get((name, value), value)
    return value


def _log(ids: IdMap, ref: FieldRef) -> tuple[str, int]:
    return ids.names.name(ref.around.topic, ref.around.topic_id), ref.around.partition


def _topic_id(ids: IdMap, step: Step, value: UUID) -> UUID:
    found = ids.topic_id(value)
    if found is not None:
        return found
    was_refused = ErrorCode.UNKNOWN_TOPIC_ID in messages.error_codes(response_body(step.exchange))
    if value in ids.target.names or value in ids.names.by_id or was_refused:
        return value  # the target's own, or it is to say that it has no such topic, too
    raise Untranslatable(f"no message of the capture has the name of topic id {value}")


def _unknown_producer(ids: IdMap, producer_id: int) -> Untranslatable:
    code = ids.producers.refused.get(producer_id)
    if code is None:
        return Untranslatable(f"the capture does not show how producer id {producer_id} was given")
    return Untranslatable(
        f"the target refused the InitProducerId that gave producer id {producer_id} in the capture "
        f"({error_name(code)})"
    )


def _records(ids: IdMap, log: Log, value: bytes) -> bytes:
    """Produced batches with the target's producer id, epoch and sequence."""
    out: bytearray | None = None
    for header in headers(value):
        if header.magic != 2 or header.producer_id < 0 or header.is_partial:
            continue
        captured = Producer(header.producer_id, header.producer_epoch)
        producer = ids.producers.target(captured)
        if producer is None:
            if header.is_transactional:
                raise _unknown_producer(ids, header.producer_id)
            # without a producer id, brokers do not detect duplicates; the records are the same
            producer, sequence = Producer(-1, -1), -1
        else:
            sequence = ids.producers.sequence(captured, log, header.base_sequence)
        if (*producer, sequence) == (*captured, header.base_sequence):
            continue
        if out is None:
            out = bytearray(value)
        patch_producer(out, header, *producer, sequence)
    return value if out is None else bytes(out)


def _protocol(ids: IdMap, step: Step, value: bytes) -> bytes:
    """A consumer's subscription or assignment with renamed topics; other clients of groups have
    other protocols."""
    of = messages.request_body(step.exchange).get("protocol_type", "consumer")
    if of not in (None, "consumer") or not ids.options.renames:
        return value
    what = "Subscription" if step.exchange.api_key == ApiKey.JOIN_GROUP else "Assignment"
    return with_topics(value, what, ids.topic)


def _replicas(ids: IdMap, step: Step, ref: FieldRef, value: Any) -> Any:
    """A number of replicas, or a config's value, as the target's brokers allow it: with a higher
    min.insync.replicas, requests with acks=all always fail."""
    created = entries(response_body(step.exchange).get("topics"))
    refused = {each.get("name") for each in created if each.get("error_code")}
    is_other = ref.slot.name == "value" and ref.holder["name"] != IN_SYNC
    if is_other or ref.around.topic in refused:  # whatever was wrong with it stays so
        return value
    return limited(value, len(ids.target.nodes))


# -- by API: each takes a captured body and returns it, or another one -----------------------------


def _fetch(ids: IdMap, step: Step, body: Body) -> Body:
    """The Fetch without a session, for all partitions of the captured session (KIP-227).

    An incremental Fetch names only the partitions that change; for all others, the broker uses the
    session's earlier requests. A target may drop a session at any time, and a session belongs to
    one node, so a replay has none there. A Fetch of a session that the captured broker had lost
    goes out as it is: the target does not know the session either.
    """
    captured = response_body(step.exchange)
    if "session_id" not in body or captured.get("error_code") in messages.SESSION_LOST:
        return body
    if body["session_epoch"] < 0:
        return {**body, "session_id": 0}
    found = ids.sessions.after(ids.broker(step), body, captured)
    if not found and body["session_epoch"] > 0:
        raise Untranslatable("the capture does not show what its fetch session asks for")
    without = {"session_id": 0, "session_epoch": -1, "forgotten_topics_data": []}
    return {**body, **without, "topics": by_topic(found)}


def _produce(ids: IdMap, step: Step, body: Body) -> Body:
    """Without batches that the captured broker refused without effect: clients sent them again."""
    refused = {
        log
        for log, each in ids.names.logs(response_body(step.exchange))
        if messages.are_refusals(ApiKey.PRODUCE, [each["error_code"]])
    }
    topics = []
    for topic in body["topic_data"] if refused else ():
        name, each_of = ids.names.of(topic), topic["partition_data"]
        kept = [each for each in each_of if (name, each["index"]) not in refused]
        topics += [{**topic, "partition_data": kept}] if kept else []
    return {**body, "topic_data": topics} if refused else body


def _metadata(ids: IdMap, step: Step, body: Body) -> Body:
    """Keep a Metadata request from creating topics, unless the user allows the class `admin`."""
    topics = entries(body["topics"])
    if ids.may_create or not topics:
        return body
    may_forbid = ids.api_version(step) >= _MAY_FORBID_CREATION
    if may_forbid and "allow_auto_topic_creation" in body:
        return {**body, "allow_auto_topic_creation": False}
    unknown = [
        each["name"] for each in topics if ids.topic(each["name"] or "") not in ids.target.topics
    ]
    if unknown:
        raise Untranslatable(
            f"asking for {unknown[0]!r}, which the target has not, could create it: "
            "needs --allow admin"
        )
    return body


def _unregister(ids: IdMap, step: Step, body: Body) -> Body:
    """The target's brokers are its own: none of them may be lost to a workload."""
    captured = body["broker_id"]
    if captured in ids.captured_nodes or captured in ids.target.nodes:
        raise Untranslatable(f"unregistering node {captured} would cost the target a broker")
    return body


def _sync_group(ids: IdMap, step: Step, body: Body) -> Body:
    group, given = body["group_id"], body["assignments"]
    made = ids.groups.assignments(group, body["generation_id"], body["member_id"], given)
    return {**body, "assignments": [dict(each) for each in made]}


def _heartbeat(ids: IdMap, step: Step, body: Body) -> Body:
    """A member that reports its partitions or tasks, and does not join, reports those that the
    target assigned to it."""
    assigned = ids.groups.assigned(body["group_id"], body["member_id"])
    if body["member_epoch"] > 0 and all(body.get(name) is not None for name in assigned):
        body |= {name: [dict(each) for each in found] for name, found in assigned.items()}
    return body


def _share(ids: IdMap, step: Step, body: Body) -> Body:
    """The target may have given a member records in one answer that the captured broker gave it in
    several. A request for records that the member holds already waits no longer than the captured
    one: the locks of the others would time out meanwhile."""
    captured = response_body(step.exchange)
    if learning.acquired(ids.names, captured) and not learning.lacks_records(
        ids, step, body, captured
    ):
        latency_ms = -(-step.exchange.latency_ns // 1_000_000)
        body["max_wait_ms"] = min(body["max_wait_ms"], latency_ms)
    member = ids.groups.member(body["group_id"], body["member_id"])
    ids.share.request(ids.broker(step), step.number, body, member)
    return body


_SPECIAL: dict[int, Callable[[IdMap, Step, Body], Body]] = {
    ApiKey.PRODUCE: _produce,
    ApiKey.FETCH: _fetch,
    ApiKey.METADATA: _metadata,
    ApiKey.UNREGISTER_BROKER: _unregister,
    ApiKey.SYNC_GROUP: _sync_group,
    ApiKey.CONSUMER_GROUP_HEARTBEAT: _heartbeat,
    ApiKey.STREAMS_GROUP_HEARTBEAT: _heartbeat,
    ApiKey.SHARE_FETCH: _share,
    ApiKey.SHARE_ACKNOWLEDGE: _share,
}
