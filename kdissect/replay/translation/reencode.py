"""A request in another version: the nearest that the target speaks (``--reencode``).

Fields that both versions have keep their values; new ones get their defaults. A field that the
other version lacks is dropped. If its value is not its default, the request means something else
without it: `DROPPABLE` names the fields that may go all the same, and each of them is noted; any
other makes the request untranslatable. A few requests were rebuilt between versions, and are
rebuilt here: topics by name or by id, groups and keys alone or in lists, and record data of a form
that newer versions no longer take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdissect.codec.message import Message
from kdissect.codec.message_codec import UNKNOWN_TAGS
from kdissect.codec.record_codec import decode_record_set, encode_batch
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.layout import Layout, Slot, layout
from kdissect.replay.model import DroppedField
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.requests import Untranslatable
from kdissect.replay.translation.target_facts import ZERO_UUID
from kdissect.replay.workload.messages import entries

Body = dict[str, Any]
_MAGIC_2_SINCE = 3  # Produce v3 takes nothing older


def reencoded(ids: IdMap, request: Message, version: int) -> tuple[Message, list[DroppedField]]:
    """The request, with the target's ids already, in another version of its API, and what that
    version has no field for.

    Raises Untranslatable where that version cannot say the same.
    """
    definition = catalog.api(request.api_key).request
    body = request.body
    rebuild = _REBUILD.get(request.api_key)
    if rebuild is not None:
        body = rebuild(ids, body, request.api_version, version)
    new = layout(definition, version)
    dropped: list[DroppedField] = []
    values = _fitted(layout(definition, request.api_version), new, body, "", dropped)
    header = {
        name: value
        for name, value in request.header.items()
        if name in ("client_id", "correlation_id")
    }
    return Message(request.api_key, version, "request", header, values), dropped


def _fitted(old: Layout, new: Layout, values: Body, path: str, dropped: list[DroppedField]) -> Body:
    fitted: Body = {}
    for name, value in values.items():
        where = f"{path}.{name}" if path else name
        slot, was = new.by_name.get(name), _slot(old, name)
        if slot is None:
            if name == UNKNOWN_TAGS:
                is_default = not value
            else:
                is_default = was is None or value == was.default()
            if not is_default and value and name not in DROPPABLE:
                raise Untranslatable(f"version {new.version} cannot say {where}")
            if not is_default:
                dropped.append(DroppedField(where, value))
            continue
        if value is None and not slot.nullable:
            if was is not None and was.default() is not None:
                raise Untranslatable(f"version {new.version} cannot say that {where} is null")
            continue  # its default says nothing either
        inner = slot.inner
        if inner is not None and value is not None:
            before = was.inner if was is not None and was.inner is not None else inner
            if slot.field.is_array:
                value = [
                    _fitted(before, inner, each, f"{where}[{index}]", dropped)
                    for index, each in enumerate(value)
                ]
            else:
                value = _fitted(before, inner, value, where, dropped)
        fitted[name] = value
    return fitted


def _slot(of: Layout, name: str) -> Slot | None:
    """A field of a layout, or of an array in it whose only element a rebuild has made the body."""
    found = of.by_name.get(name)
    inner = (slot.inner for slot in of.by_name.values() if slot.inner is not None)
    return found or next((each.by_name[name] for each in inner if name in each.by_name), None)


# Without these a request still asks for the same thing: they are for the broker's log, for checks
# that an older broker does not make, or for limits that it sets itself.
DROPPABLE = frozenset(
    {
        "reason", "client_software_name", "client_software_version", "rack_id",
        "include_documentation", "retention_time_ms", "current_leader_epoch", "last_fetched_epoch",
        "committed_leader_epoch", "require_stable", "member_epoch", "log_start_offset",
        "timeout_ms", "protocol_type", "protocol_name", "rebalance_timeout_ms",
    }
)  # fmt: skip


def _topic_ids(holder: str, name: str) -> Callable[[Any, Body, int, int], Body]:
    """Topics by name in old versions, by id in new ones."""

    def rebuild(ids: IdMap, body: Body, old: int, new: int) -> Body:
        topics = []
        for topic in entries(body.get(holder)):
            topic = dict(topic)
            if topic.get("topic_id") is not None and topic["topic_id"] != ZERO_UUID:
                names = [key for key, value in ids.target.topic_ids.items()
                         if value == topic["topic_id"]]  # fmt: skip
                topic[name] = names[0] if names else ""
                if not names:
                    raise Untranslatable("a topic id whose name at the target is not known")
            elif topic.get(name):
                topic["topic_id"] = ids.target.topic_ids.get(topic[name], ZERO_UUID)
            topics.append(_only(topic, name, _has_ids(ids, holder, body, new)))
        return {**body, holder: topics}

    return rebuild


def _has_ids(ids: IdMap, holder: str, body: Body, new: int) -> bool:
    first = {"topic_data": 13, "topics": 13 if "max_wait_ms" in body else 10}[holder]
    return new >= first


def _only(topic: Body, name: str, by_id: bool) -> Body:
    topic.pop(name if by_id else "topic_id", None)
    return topic


def _produce(ids: IdMap, body: Body, old: int, new: int) -> Body:
    body = _topic_ids("topic_data", "name")(ids, body, old, new)
    if new < _MAGIC_2_SINCE:
        if old >= _MAGIC_2_SINCE:
            raise Untranslatable("record batches cannot be made the messages of Produce v2")
        return body
    if old < _MAGIC_2_SINCE:
        for topic in body["topic_data"]:
            topic["partition_data"] = [
                {**each, "records": _as_batch(each["records"])}
                for each in entries(topic["partition_data"])
            ]
    return body


def _as_batch(data: bytes | None) -> bytes | None:
    """Messages of magic 0 and 1 as one record batch, uncompressed."""
    if not data:
        return data
    found = decode_record_set(data)
    if found.faults or not found.records:
        raise Untranslatable("the messages of an old format cannot be read to be sent in a new one")
    records = [{**record, "offset": at, "headers": []} for at, record in enumerate(found.records)]
    return encode_batch(records, base_offset=0)


def _find_coordinator(ids: IdMap, body: Body, old: int, new: int) -> Body:
    body = dict(body)
    if old < 4 <= new:
        body["coordinator_keys"] = [body.pop("key")]
    elif new < 4 <= old:
        keys = body.pop("coordinator_keys")
        if len(keys) != 1:
            raise Untranslatable(f"version {new} asks for one coordinator, not {len(keys)}")
        body["key"] = keys[0]
    return body


def _offset_fetch(ids: IdMap, body: Body, old: int, new: int) -> Body:
    body = dict(body)
    if old < 8 <= new:
        group = {"group_id": body.pop("group_id"), "topics": body.pop("topics")}
        body["groups"] = [group]
    elif new < 8 <= old:
        groups = body.pop("groups")
        if len(groups) != 1:
            raise Untranslatable(f"version {new} asks for one group, not {len(groups)}")
        body |= groups[0]
    groups = []
    for group in entries(body.get("groups")):
        if group["topics"] is None:
            groups.append(group)
        else:
            groups.append(_topic_ids("topics", "name")(ids, group, old, new))
    if groups:
        body["groups"] = groups
    return body


def _leave_group(ids: IdMap, body: Body, old: int, new: int) -> Body:
    body = dict(body)
    if old < 3 <= new:
        body["members"] = [{"member_id": body.pop("member_id")}]
    elif new < 3 <= old:
        members = body.pop("members")
        if len(members) != 1:
            raise Untranslatable(f"version {new} lets one member leave, not {len(members)}")
        body |= members[0]
    return body


def _delete_topics(ids: IdMap, body: Body, old: int, new: int) -> Body:
    body = dict(body)
    if old < 6 <= new:
        body["topics"] = [{"name": name} for name in body.pop("topic_names")]
    elif new < 6 <= old:
        topics = body.pop("topics")
        if any(each["name"] is None for each in topics):
            raise Untranslatable(f"version {new} deletes by name, not by topic id")
        body["topic_names"] = [each["name"] for each in topics]
    return body


_REBUILD: dict[int, Callable[[Any, Body, int, int], Body]] = {
    ApiKey.PRODUCE: _produce,
    ApiKey.FETCH: _topic_ids("topics", "topic"),
    ApiKey.OFFSET_COMMIT: _topic_ids("topics", "name"),
    ApiKey.OFFSET_FETCH: _offset_fetch,
    ApiKey.FIND_COORDINATOR: _find_coordinator,
    ApiKey.LEAVE_GROUP: _leave_group,
    ApiKey.DELETE_TOPICS: _delete_topics,
}
