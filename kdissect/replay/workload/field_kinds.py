"""What the fields of messages mean, and a walk over the meaningful ones of a decoded body.

The meaning of a field follows from its entity and name in the definition, so that a new version or
API is understood as far as it uses the names that Kafka always uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

from kdissect.codec.message import Message
from kdissect.codec.message_codec import Layout, Slot, layout
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import Field, Type


class Kind(Enum):
    """What a field holds."""

    TOPIC = auto()
    TOPIC_ID = auto()
    PARTITION = auto()
    GROUP = auto()
    TRANSACTIONAL_ID = auto()
    PRODUCER_ID = auto()
    PRODUCER_EPOCH = auto()
    MEMBER = auto()
    GENERATION = auto()  # of a classic group, or the epoch of a member
    NODE = auto()
    LEADER_EPOCH = auto()
    OFFSET = auto()
    RECORDS = auto()


_NAMES: dict[str, Kind] = {
    "topic": Kind.TOPIC,
    "topic_name": Kind.TOPIC,
    "topic_names": Kind.TOPIC,
    "subscribed_topic_names": Kind.TOPIC,
    "source_topics": Kind.TOPIC,
    "repartition_sink_topics": Kind.TOPIC,
    "group_id": Kind.GROUP,
    "group_ids": Kind.GROUP,
    "transactional_id": Kind.TRANSACTIONAL_ID,
    "member_id": Kind.MEMBER,
}
_ENTITIES = {
    "topicName": Kind.TOPIC,
    "groupId": Kind.GROUP,
    "transactionalId": Kind.TRANSACTIONAL_ID,
}
_OFFSETS = frozenset(
    {
        "fetch_offset", "committed_offset", "offset", "base_offset", "high_watermark",
        "last_stable_offset", "log_start_offset", "end_offset", "low_watermark", "first_offset",
        "last_offset", "start_offset", "current_txn_start_offset", "old_style_offsets",
        "shared_group_start_offset",
    }
)  # fmt: skip
_LEADER_EPOCHS = frozenset(
    {"current_leader_epoch", "leader_epoch", "last_fetched_epoch", "committed_leader_epoch"}
)
_GENERATIONS = frozenset({"generation_id", "generation_id_or_member_epoch", "member_epoch"})
_PARTITIONS = frozenset(
    {"partition", "partition_index", "partition_id", "index", "partitions", "partition_indexes"}
)
# Offsets of the metadata log and sizes called so are no offsets of a topic.
_NO_OFFSETS = frozenset({ApiKey.DESCRIBE_QUORUM, ApiKey.DESCRIBE_LOG_DIRS})


def kind_of(api_key: int, one: Field) -> Kind | None:
    """The meaning of a field, or of the elements of an array; None where replay sees no more in it
    than a value."""
    name = one.name
    if one.type is Type.STRING:
        found = _ENTITIES.get(one.entity) or _NAMES.get(name)
        if found is None and api_key == ApiKey.JOIN_GROUP and name == "leader":
            return Kind.MEMBER
        return found
    if one.type is Type.UUID:
        return Kind.TOPIC_ID if name in ("topic_id", "topic_ids") else None
    if one.type is Type.RECORDS:
        return Kind.RECORDS
    if one.type is Type.INT64:
        if one.entity == "producerId":
            return Kind.PRODUCER_ID
        return Kind.OFFSET if name in _OFFSETS and api_key not in _NO_OFFSETS else None
    if one.type in (Type.INT16, Type.INT32):
        if one.entity == "brokerId":
            return Kind.NODE
        if name.endswith("producer_epoch"):
            return Kind.PRODUCER_EPOCH
        if one.type is Type.INT16:
            return None
        if name in _LEADER_EPOCHS:
            return Kind.LEADER_EPOCH
        if name in _GENERATIONS:
            return Kind.GENERATION
        return Kind.PARTITION if name in _PARTITIONS else None
    return None


class Around(NamedTuple):
    """What the structs around a value say; "" or -1 where they say nothing.

    partition is that of the value's own struct or of one around it.
    """

    topic: str = ""
    topic_id: UUID | None = None
    partition: int = -1
    group: str = ""
    transactional_id: str = ""


class Spot(NamedTuple):
    """A meaningful value: holder[slot.name] is it, or its list of values."""

    kind: Kind
    slot: Slot
    holder: dict[str, Any]
    around: Around


@dataclass(slots=True)
class _Step:
    slot: Slot
    kind: Kind | None
    inner: _Program | None


@dataclass(slots=True)
class _Program:
    """The slots of a layout that mean something, or hold such."""

    steps: list[_Step]
    named: dict[Kind, str]  # the single values that tell what a struct is about


_ABOUT = (Kind.TOPIC, Kind.TOPIC_ID, Kind.PARTITION, Kind.GROUP, Kind.TRANSACTIONAL_ID)


def _compile(api_key: int, of: Layout) -> _Program:
    steps = []
    named: dict[Kind, str] = {}
    for slot in of.by_name.values():
        kind = kind_of(api_key, slot.field)
        inner = None
        if slot.inner is not None:
            inner = _compile(api_key, slot.inner)
            if not inner.steps:
                continue
        elif kind is None:
            continue
        elif kind in _ABOUT and not slot.field.is_array:
            named.setdefault(kind, slot.name)
        steps.append(_Step(slot, kind, inner))
    return _Program(steps, named)


@cache
def _program(api_key: int, side: str, api_version: int) -> _Program:
    definition = catalog.api(api_key).side(side)
    return _compile(api_key, layout(definition, api_version))


def spots(message: Message) -> Iterator[Spot]:
    """Every meaningful value of a message's body, in wire order."""
    program = _program(message.api_key, message.side, message.api_version)
    yield from _spots(program, message.body, Around())


def _spots(program: _Program, values: dict[str, Any], around: Around) -> Iterator[Spot]:
    if program.named:
        around = about(program.named, values, around)
    for step in program.steps:
        value = values.get(step.slot.name)
        if step.inner is None:
            if step.kind is not None and value is not None:
                yield Spot(step.kind, step.slot, values, around)
        elif isinstance(value, list):
            for each in value:
                yield from _spots(step.inner, each, around)
        elif value is not None:
            yield from _spots(step.inner, value, around)


def about(named: Mapping[Kind, str], values: dict[str, Any], around: Around) -> Around:
    """What the values of a struct say, besides what is said around it."""
    topic, topic_id, partition, group, transactional_id = around
    for kind, name in named.items():
        value = values.get(name)
        if value is None:
            continue
        if kind is Kind.TOPIC:
            topic, topic_id = value, None
        elif kind is Kind.TOPIC_ID:
            topic_id = value
        elif kind is Kind.PARTITION:
            partition = value
        elif kind is Kind.GROUP:
            group = value
        else:
            transactional_id = value
    return Around(topic, topic_id, partition, group, transactional_id)
