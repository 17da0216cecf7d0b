"""Translates a captured request for the target: changes ids and offsets in its body, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from kdissect.codec import message_codec
from kdissect.codec.message import Message
from kdissect.errors import DecodeError, EncodeError
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.batch_headers import has_producer, headers, is_sealed, patch_producer
from kdissect.replay.fields import FieldKind, FieldRef, iter_fields
from kdissect.replay.model import Step
from kdissect.replay.translation import answers
from kdissect.replay.translation.fetch_sessions import stand_in
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.producers import Producer
from kdissect.replay.translation.routing import session_partitions, share_key, spread, target_node
from kdissect.replay.workload.messages import (
    GROUP_KEY,
    TRANSACTION_KEY,
    entries,
    member_of,
    response_of,
)

Body = dict[str, Any]
_TOPIC, _GROUP, _BROKER, _BROKER_LOGGER, _TRANSACTIONAL_ID = 2, 3, 4, 8, 5  # resource types
_GROUP_CONFIG = 32
_MAY_FORBID_CREATION = 4  # Metadata v0 to v3 always let the broker create a topic


class Untranslatable(Exception):
    """Something in the request has no counterpart at the target: one clause for people."""


def translate(ids: IdMap, step: Step, request: Message) -> bool:
    """Change the decoded request's body; says whether anything changed. Raises Untranslatable."""
    special = SPECIAL.get(step.exchange.api_key)
    is_changed = special(ids, step, request) if special is not None else False
    # All are found before any is changed, and epochs of members are looked up by the capture's ids.
    refs = list(iter_fields(request))
    refs.sort(key=lambda ref: ref.kind is not FieldKind.GENERATION)
    for ref in refs:
        change = CHANGES.get(ref.kind)
        if change is None:
            continue
        value = ref.holder[ref.slot.name]
        if ref.kind is FieldKind.PRODUCER_ID:
            is_changed |= producer_epoch(ids, ref)
        if isinstance(value, list):
            found = [change(ids, step, ref, each) for each in value]
        else:
            found = change(ids, step, ref, value)
        if found != value:
            ref.holder[ref.slot.name] = found
            is_changed = True
    return is_changed


# -- by the kind of a field -------------------------------------------------------------------


def _topic(ids: IdMap, step: Step, ref: FieldRef, value: str) -> str:
    return ids.topic(value)


def _group(ids: IdMap, step: Step, ref: FieldRef, value: str) -> str:
    return ids.group(value)


def _transactional_id(ids: IdMap, step: Step, ref: FieldRef, value: str) -> str:
    return ids.transactional_id(value)


def _topic_id(ids: IdMap, step: Step, ref: FieldRef, value: UUID) -> UUID:
    found = ids.topic_id(value)
    if found is not None:
        return found
    if value in ids.names or _was_refused(step):
        return value  # the target is to say that it has no such topic, too
    raise Untranslatable(f"no message of the capture has the name of topic id {value}")


def _was_refused(step: Step) -> bool:
    """Return whether the captured broker did not know an id of the request either."""
    response = response_of(step.exchange)
    return response is not None and _holds_code(response.body, ErrorCode.UNKNOWN_TOPIC_ID)


def _holds_code(value: Any, code: int) -> bool:
    if isinstance(value, dict):
        return any(
            inner == code if name.endswith("error_code") else _holds_code(inner, code)
            for name, inner in value.items()
        )
    return isinstance(value, list) and any(_holds_code(each, code) for each in value)


def _producer_id(ids: IdMap, step: Step, ref: FieldRef, value: int) -> int:
    if value < 0:
        return value
    found = ids.producers.target_id(value)
    if found is None and ref.slot.field.is_array:
        return value  # a filter
    if found is None:
        raise Untranslatable(f"the capture does not show how producer id {value} was given")
    return found


def producer_epoch(ids: IdMap, ref: FieldRef) -> bool:
    """Translate the epoch beside a producer id, which is the capture's still."""
    name = epoch_name(ref)
    producer_id = ref.holder[ref.slot.name]
    if name not in ref.holder or producer_id < 0:
        return False
    found = ids.producers.target(Producer(producer_id, ref.holder[name]))
    if found is None or found.epoch == ref.holder[name]:
        return False
    ref.holder[name] = found.epoch
    return True


def epoch_name(ref: FieldRef) -> str:
    """The field with the epoch of a producer id."""
    return ref.slot.name.removesuffix("_id") + "_epoch"


def _member(ids: IdMap, step: Step, ref: FieldRef, value: str) -> str:
    return ids.groups.member(ref.around.group, value)


def _generation(ids: IdMap, step: Step, ref: FieldRef, value: int) -> int:
    member = ref.holder.get("member_id") or ""
    return ids.groups.generation(ref.around.group, member, value)


def _leader_epoch(ids: IdMap, step: Step, ref: FieldRef, value: int) -> int:
    if value < 0:
        return value
    name = ids.topic_name(ref.around.topic, ref.around.topic_id)
    return ids.leader_epoch(name, ref.around.partition)


def _offset(ids: IdMap, step: Step, ref: FieldRef, value: int) -> int:
    name = ids.topic_name(ref.around.topic, ref.around.topic_id)
    return ids.offsets.to_target((name, ref.around.partition), value)


def _node(ids: IdMap, step: Step, ref: FieldRef, value: int) -> int:
    return ids.node(value)


def _records(ids: IdMap, step: Step, ref: FieldRef, value: bytes) -> bytes:
    """Produced batches with the target's producer id, epoch and sequence."""
    if not has_producer(value):
        return value
    name = ids.topic_name(ref.around.topic, ref.around.topic_id)
    log = (name, ref.around.partition)
    out: bytearray | None = None
    for header in headers(value):
        if header.magic != 2 or header.producer_id < 0 or header.is_partial:
            continue
        captured = Producer(header.producer_id, header.producer_epoch)
        producer = ids.producers.target(captured)
        if producer is None:
            if header.is_transactional:
                raise Untranslatable(
                    f"the capture does not show how producer id {header.producer_id} was given"
                )
            # without a producer id, brokers do not detect duplicates; the records are the same
            producer, sequence = Producer(-1, -1), -1
        else:
            sequence = ids.producers.sequence(captured, log, header.base_sequence)
        if (*producer, sequence) == (*captured, header.base_sequence):
            continue
        if out is None:
            out = bytearray(value)
        was_sealed = is_sealed(value, header)
        patch_producer(out, header, *producer, sequence, seal=was_sealed)
    return value if out is None else bytes(out)


CHANGES: dict[FieldKind, Callable[[Any, Step, FieldRef, Any], Any]] = {
    FieldKind.TOPIC: _topic,
    FieldKind.GROUP: _group,
    FieldKind.TRANSACTIONAL_ID: _transactional_id,
    FieldKind.TOPIC_ID: _topic_id,
    FieldKind.PRODUCER_ID: _producer_id,
    FieldKind.MEMBER: _member,
    FieldKind.GENERATION: _generation,
    FieldKind.LEADER_EPOCH: _leader_epoch,
    FieldKind.OFFSET: _offset,
    FieldKind.NODE: _node,
    FieldKind.RECORDS: _records,
}


# -- by API -----------------------------------------------------------------------------------


def _fetch(ids: IdMap, step: Step, request: Message) -> bool:
    if "session_id" not in request.body:
        return False
    before = request.body
    captured = response_of(step.exchange)
    code = 0 if captured is None else captured.body.get("error_code", 0)
    nodes: tuple[int | None, ...] = (None,)
    if len(ids.target.nodes) > 1:
        led_by = tuple(spread(ids, step))
        nodes = led_by if len(led_by) > 1 else (target_node(ids, step),)
    request.body, reason = ids.sessions.request(ids.broker(step), step.number, before, code, nodes)
    if reason:
        raise Untranslatable(reason)
    return bool(request.body != before)


def _produce(ids: IdMap, step: Step, request: Message) -> bool:
    if not step.expects_response:
        for topic in entries(request.body["topic_data"]):
            name = ids.topic_name(topic.get("name") or "", topic.get("topic_id"))
            for partition in entries(topic["partition_data"]):
                ids.offsets.written_silently((name, partition["index"]))
    return False


def _metadata(ids: IdMap, step: Step, request: Message) -> bool:
    """Keep a Metadata request from creating topics, unless the user allows the class `admin`."""
    topics = entries(request.body["topics"])
    if ids.may_create or not topics:
        return False
    may_forbid = ids.api_version(step) >= _MAY_FORBID_CREATION
    if may_forbid and "allow_auto_topic_creation" in request.body:
        was = request.body["allow_auto_topic_creation"]
        request.body["allow_auto_topic_creation"] = False
        return bool(was)
    unknown = [
        each["name"] for each in topics if not ids.target.has_topic(ids.topic(each["name"] or ""))
    ]
    if unknown:
        raise Untranslatable(
            f"asking for {unknown[0]!r}, which the target has not, could create it: "
            "needs --allow admin"
        )
    return False


def _unregister(ids: IdMap, step: Step, request: Message) -> bool:
    """The target's brokers are its own: none of them may be lost to a workload."""
    captured = request.body["broker_id"]
    if captured in ids.captured_nodes or captured in ids.target.nodes:
        raise Untranslatable(f"unregistering node {captured} would cost the target a broker")
    return False


def _create_topics(ids: IdMap, step: Step, request: Message) -> bool:
    """Cut replica counts to the number of the target's brokers, and place them on its nodes."""
    count = len(ids.target.nodes)
    is_changed = False
    if not count:
        return False
    captured = response_of(step.exchange)
    refused = {
        each["name"]
        for each in entries(captured.body["topics"] if captured is not None else None)
        if each["error_code"]
    }
    for topic in entries(request.body["topics"]):
        if topic["name"] in refused:
            continue  # whatever was wrong with it stays so
        if topic["replication_factor"] > count:
            topic["replication_factor"] = count
            is_changed = True
        for assignment in entries(topic["assignments"]):
            is_changed |= _placed(ids, assignment, "broker_ids")
        for config in entries(topic["configs"]):
            is_changed |= _in_sync(ids, config)
    return is_changed


def _in_sync(ids: IdMap, config: Body) -> bool:
    """Limit min.insync.replicas to the target's brokers, else acks=all requests always fail."""
    count = len(ids.target.nodes)
    if config.get("name") != "min.insync.replicas" or not 0 < count < _number(config["value"]):
        return False
    config["value"] = str(count)
    return True


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else 0


def _placed(ids: IdMap, holder: Body, name: str) -> bool:
    """Each node of a list once: several of the capture's may be the same at the target."""
    given = holder[name]
    if not given:
        return False
    nodes = [ids.node(node) for node in given]
    holder[name] = list(dict.fromkeys(nodes))
    # `translate` maps nodes again: those of the target stay as they are
    return bool(holder[name] != given)


def _create_partitions(ids: IdMap, step: Step, request: Message) -> bool:
    is_changed = False
    for topic in entries(request.body["topics"]):
        for assignment in entries(topic["assignments"]):
            is_changed |= _placed(ids, assignment, "broker_ids")
    return is_changed


def _reassign(ids: IdMap, step: Step, request: Message) -> bool:
    is_changed = False
    for topic in entries(request.body["topics"]):
        for partition in entries(topic["partitions"]):
            is_changed |= _placed(ids, partition, "replicas")
    return is_changed


def _find_coordinator(ids: IdMap, step: Step, request: Message) -> bool:
    key_type = request.body.get("key_type", GROUP_KEY)
    rename = {GROUP_KEY: ids.group, TRANSACTION_KEY: ids.transactional_id}.get(key_type)
    if rename is None:
        return _find_share_coordinator(ids, request)
    is_changed = False
    if request.body.get("key"):
        renamed = rename(request.body["key"])
        is_changed = renamed != request.body["key"]
        request.body["key"] = renamed
    keys = entries(request.body.get("coordinator_keys"))
    if keys:
        renamed_keys = [rename(key) for key in keys]
        is_changed |= renamed_keys != keys
        request.body["coordinator_keys"] = renamed_keys
    return is_changed


def _find_share_coordinator(ids: IdMap, request: Message) -> bool:
    """Keys ``group:topic id:partition``; only brokers ask so."""
    raise Untranslatable("only brokers look for the coordinator of a share group's state")


def _join_group(ids: IdMap, step: Step, request: Message) -> bool:
    if request.body["protocol_type"] != "consumer" or not ids.has_topic_renames:
        return False
    is_changed = False
    for protocol in entries(request.body["protocols"]):
        renamed = renamed_protocol(ids, "ConsumerProtocolSubscription", protocol["metadata"])
        is_changed |= renamed != protocol["metadata"]
        protocol["metadata"] = renamed
    return is_changed


def _sync_group(ids: IdMap, step: Step, request: Message) -> bool:
    body = request.body
    before = body["assignments"]
    group = body["group_id"]
    given = ids.groups.assignments(group, body["generation_id"], body["member_id"], before)
    is_consumer = body.get("protocol_type") in (None, "consumer")
    body["assignments"] = [
        {
            # `translate` maps member ids afterwards; here are the capture's
            **member,
            "assignment": renamed_protocol(ids, "ConsumerProtocolAssignment", member["assignment"])
            if is_consumer and ids.has_topic_renames
            else member["assignment"],
        }
        for member in given
    ]
    return bool(body["assignments"] != before)


def renamed_protocol(ids: IdMap, name: str, data: bytes) -> bytes:
    """A consumer's subscription or assignment with renamed topics; bytes of other clients'
    protocols stay as they are."""
    definition = catalog.definition(name)
    try:
        format_version, pos = message_codec.read_int16(data, 0)
        version = min(format_version, definition.versions.last)
        values, pos = message_codec.decode(definition, version, data, pos)
    except (DecodeError, ValueError):
        return data
    if "topics" in values:
        values["topics"] = [ids.topic(each) for each in entries(values["topics"])]
    for holder in ("owned_partitions", "assigned_partitions"):
        for each in entries(values.get(holder)):
            each["topic"] = ids.topic(each["topic"])
    try:
        return data[:2] + message_codec.encode(definition, version, values) + data[pos:]
    except EncodeError:
        return data


def _heartbeat(ids: IdMap, step: Step, request: Message) -> bool:
    """A member reports what the target assigned to it, if it reported its captured assignment."""
    body = request.body
    owned = ids.groups.owned(body["group_id"], body["member_id"], body)
    back = {target: captured for captured, target in ids.topic_ids.items()}
    for name, assigned in owned.items():
        # `translate` goes from the capture's ids to the target's
        body[name] = [
            {**each, "topic_id": back.get(each["topic_id"], each["topic_id"])}
            if "topic_id" in each
            else each
            for each in assigned
        ]
    return bool(owned)


def _streams_heartbeat(ids: IdMap, step: Step, request: Message) -> bool:
    body = request.body
    is_changed = _heartbeat(ids, step, request)
    captured = body["endpoint_information_epoch"]
    body["endpoint_information_epoch"] = ids.groups.endpoint_epoch(body["group_id"], captured)
    return is_changed or bool(body["endpoint_information_epoch"] != captured)


def member_heartbeat(ids: IdMap, last: Step) -> Message:
    """A heartbeat by the state of a member at the target. last: its last answered heartbeat."""
    exchange = last.exchange
    group, member = member_of(exchange)
    body: dict[str, Any] = {
        "group_id": ids.group(group),
        "member_id": ids.groups.member(group, member),
        "member_epoch": ids.groups.member_epoch(group, member),
    }
    if exchange.api_key != ApiKey.SHARE_GROUP_HEARTBEAT:
        body |= ids.groups.assigned(group, member)
    if exchange.api_key == ApiKey.STREAMS_GROUP_HEARTBEAT:
        response = response_of(exchange)
        captured = -1 if response is None else response.body["endpoint_information_epoch"]
        body["endpoint_information_epoch"] = ids.groups.endpoint_epoch(group, captured)
    header = {"correlation_id": 0, "client_id": exchange.client_id}
    return Message(exchange.api_key, ids.api_version(last), "request", header, body)


def _share_session(ids: IdMap, step: Step, request: Message) -> bool:
    """Epochs of a share session count the requests that the target has taken. Where a member's
    sessions with several captured brokers meet at one node, the later ones have ids of their own.
    """
    body = request.body
    before = body["member_id"], body["share_session_epoch"]
    key = share_key(ids, step, body)
    ids.share_partitions[key[1:]] = session_partitions(ids, step, body)
    if ids.share_owners.setdefault(key[:-1], key[-1]) != key[-1]:
        body["member_id"] = stand_in(
            ids.groups.member(body["group_id"], body["member_id"]), key[-1]
        )
    if body["share_session_epoch"] > 0:
        body["share_session_epoch"] = ids.share_epochs.get(key, body["share_session_epoch"])
    is_changed = bool((body["member_id"], body["share_session_epoch"]) != before)
    if step.number in ids.share_acknowledged:
        for topic in entries(body["topics"]):
            for partition in entries(topic["partitions"]):
                is_changed |= bool(partition["acknowledgement_batches"])
                partition["acknowledgement_batches"] = []
    return is_changed


def _share_fetch(ids: IdMap, step: Step, request: Message) -> bool:
    """The target may have given a member records in one answer that the captured broker gave it in
    several. A request for records that the member holds already waits no longer than the captured
    one: the locks of the others would time out meanwhile."""
    captured, body = response_of(step.exchange), request.body
    if captured is None:
        return _share_session(ids, step, request)
    held = answers.held_after(ids, step, request)
    wanted = list(answers.acquired(ids, captured, is_captured=True))
    is_changed = _share_session(ids, step, request)
    if wanted and all(held.covers(log, first, last) for log, first, last in wanted):
        wait_ms = min(body["max_wait_ms"], -(-step.exchange.latency_ns // 1_000_000))
        is_changed |= bool(wait_ms != body["max_wait_ms"])
        body["max_wait_ms"] = wait_ms
    return is_changed


def _config_resources(ids: IdMap, step: Step, request: Message) -> bool:
    is_changed = False
    for resource in entries(request.body["resources"]):
        renamed = config_resource(ids, resource["resource_type"], resource["resource_name"])
        is_changed |= renamed != resource["resource_name"]
        resource["resource_name"] = renamed
        for config in entries(resource.get("configs")):
            is_changed |= _in_sync(ids, config)
    return is_changed


def config_resource(ids: IdMap, resource_type: int, name: str) -> str:
    """The target's name of a config's resource."""
    if resource_type == _TOPIC:
        return ids.topic(name)
    if resource_type == _GROUP_CONFIG:
        return ids.group(name)
    if resource_type in (_BROKER, _BROKER_LOGGER) and name.isascii() and name.isdigit():
        return str(ids.node(int(name)))
    return name


def acl_resource(ids: IdMap, resource_type: int, name: str | None) -> str | None:
    """The target's name of an ACL's resource."""
    if name is None:
        return None
    if resource_type == _TOPIC:
        return ids.topic(name)
    if resource_type == _GROUP:
        return ids.group(name)
    return ids.transactional_id(name) if resource_type == _TRANSACTIONAL_ID else name


def _acls(ids: IdMap, step: Step, request: Message) -> bool:
    body = request.body
    holders = [body, *entries(body.get("creations")), *entries(body.get("filters"))]
    is_changed = False
    for holder in holders:
        for kind, name in (
            ("resource_type", "resource_name"),
            ("resource_type_filter", "resource_name_filter"),
        ):
            if kind in holder:
                renamed = acl_resource(ids, holder[kind], holder[name])
                is_changed |= renamed != holder[name]
                holder[name] = renamed
    return is_changed


def _opaque(*names: str) -> Callable[[Any, Step, Message], bool]:
    """Values that an earlier answer gave and that mean nothing but themselves."""

    def change(ids: IdMap, step: Step, request: Message) -> bool:
        is_changed = False
        for name in names:
            value = request.body.get(name)
            found = ids.opaque.get((name, value), value)
            is_changed |= found != value
            request.body[name] = found
        return is_changed

    return change


SPECIAL: dict[int, Callable[[Any, Step, Message], bool]] = {
    ApiKey.PRODUCE: _produce,
    ApiKey.FETCH: _fetch,
    ApiKey.METADATA: _metadata,
    ApiKey.UNREGISTER_BROKER: _unregister,
    ApiKey.CREATE_TOPICS: _create_topics,
    ApiKey.CREATE_PARTITIONS: _create_partitions,
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: _reassign,
    ApiKey.FIND_COORDINATOR: _find_coordinator,
    ApiKey.JOIN_GROUP: _join_group,
    ApiKey.SYNC_GROUP: _sync_group,
    ApiKey.CONSUMER_GROUP_HEARTBEAT: _heartbeat,
    ApiKey.STREAMS_GROUP_HEARTBEAT: _streams_heartbeat,
    ApiKey.SHARE_FETCH: _share_fetch,
    ApiKey.SHARE_ACKNOWLEDGE: _share_session,
    ApiKey.DESCRIBE_CONFIGS: _config_resources,
    ApiKey.ALTER_CONFIGS: _config_resources,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _config_resources,
    ApiKey.DESCRIBE_ACLS: _acls,
    ApiKey.CREATE_ACLS: _acls,
    ApiKey.DELETE_ACLS: _acls,
    ApiKey.RENEW_DELEGATION_TOKEN: _opaque("hmac"),
    ApiKey.EXPIRE_DELEGATION_TOKEN: _opaque("hmac"),
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: _opaque("client_instance_id"),
    ApiKey.PUSH_TELEMETRY: _opaque("client_instance_id", "subscription_id"),
}
