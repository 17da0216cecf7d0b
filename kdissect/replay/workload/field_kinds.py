"""Kinds of message fields (topic, offset, producer id, ...), and a walk over them in a body.

The kind of a field follows from its entity and name in the definition. So fields of a new version
or API are recognised if they use the names that Kafka always uses.
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
from kdissect.replay.model import Exchange
from kdissect.replay.workload.messages import request_of


class FieldKind(Enum):
    """The meaning of a field's value."""

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


_NAMES: dict[str, FieldKind] = {
    "topic": FieldKind.TOPIC,
    "topic_name": FieldKind.TOPIC,
    "topic_names": FieldKind.TOPIC,
    "subscribed_topic_names": FieldKind.TOPIC,
    "source_topics": FieldKind.TOPIC,
    "repartition_sink_topics": FieldKind.TOPIC,
    "group_id": FieldKind.GROUP,
    "group_ids": FieldKind.GROUP,
    "transactional_id": FieldKind.TRANSACTIONAL_ID,
    "member_id": FieldKind.MEMBER,
}
_ENTITIES = {
    "topicName": FieldKind.TOPIC,
    "groupId": FieldKind.GROUP,
    "transactionalId": FieldKind.TRANSACTIONAL_ID,
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
_PARTITIONS = frozenset({"partition", "partition_index", "partition_id", "index"})
_PARTITION_LISTS = frozenset({"partitions", "partition_indexes"})  # one number is a count
# What these call offsets are offsets of the metadata log, sizes, and sums over the changelogs of a
# task (KIP-1071).
_NO_OFFSETS = frozenset(
    {
        ApiKey.DESCRIBE_QUORUM, ApiKey.DESCRIBE_LOG_DIRS, ApiKey.STREAMS_GROUP_HEARTBEAT,
        ApiKey.STREAMS_GROUP_DESCRIBE,
    }
)  # fmt: skip


def kind_of(api_key: int, one: Field) -> FieldKind | None:
    """The meaning of a field, or of the elements of an array; None where replay sees no more in it
    than a value."""
    name = one.name
    if one.type is Type.STRING:
        found = _ENTITIES.get(one.entity) or _NAMES.get(name)
        if found is None and api_key == ApiKey.JOIN_GROUP and name == "leader":
            return FieldKind.MEMBER
        return found
    if one.type is Type.UUID:
        return FieldKind.TOPIC_ID if name in ("topic_id", "topic_ids") else None
    if one.type is Type.RECORDS:
        return FieldKind.RECORDS
    if one.type is Type.INT64:
        if one.entity == "producerId":
            return FieldKind.PRODUCER_ID
        return FieldKind.OFFSET if name in _OFFSETS and api_key not in _NO_OFFSETS else None
    if one.type in (Type.INT16, Type.INT32):
        if one.entity == "brokerId" or name == "leader_id":
            return FieldKind.NODE
        if name.endswith("producer_epoch"):
            return FieldKind.PRODUCER_EPOCH
        if one.type is Type.INT16:
            return None
        if name in _LEADER_EPOCHS or (name == "epoch" and api_key == ApiKey.FETCH):
            return FieldKind.LEADER_EPOCH
        if name in _GENERATIONS:
            return FieldKind.GENERATION
        partitions = _PARTITION_LISTS if one.is_array else _PARTITIONS
        return FieldKind.PARTITION if name in partitions else None
    return None


class FieldContext(NamedTuple):
    """Topic, partition, group and transaction named by the structs around a value; "" or -1: none.

    partition is that of the value's own struct or of one around it.
    """

    topic: str = ""
    topic_id: UUID | None = None
    partition: int = -1
    group: str = ""
    transactional_id: str = ""


class FieldRef(NamedTuple):
    """A meaningful value: holder[slot.name] is it, or its list of values."""

    kind: FieldKind
    slot: Slot
    holder: dict[str, Any]
    around: FieldContext

    @property
    def values(self) -> list[Any]:
        """The elements of an array, or the one value."""
        value = self.holder[self.slot.name]
        return value if isinstance(value, list) else [value]


@dataclass(slots=True)
class _Step:
    slot: Slot
    kind: FieldKind | None
    inner: _Program | None


@dataclass(slots=True)
class _Program:
    """The slots of a layout that mean something, or hold such."""

    steps: list[_Step]
    named: dict[FieldKind, str]  # fields that name a struct's topic, group, ...


_ABOUT = (
    FieldKind.TOPIC,
    FieldKind.TOPIC_ID,
    FieldKind.PARTITION,
    FieldKind.GROUP,
    FieldKind.TRANSACTIONAL_ID,
)


def _compile(api_key: int, of: Layout) -> _Program:
    steps = []
    named: dict[FieldKind, str] = {}
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


def iter_fields(message: Message) -> Iterator[FieldRef]:
    """Every meaningful value of a message's body, in wire order."""
    program = _program(message.api_key, message.side, message.api_version)
    yield from _iter_fields(program, message.body, FieldContext())


def _iter_fields(
    program: _Program, values: dict[str, Any], around: FieldContext
) -> Iterator[FieldRef]:
    if program.named:
        around = about(program.named, values, around)
    for step in program.steps:
        value = values.get(step.slot.name)
        if step.inner is None:
            if step.kind is not None and value is not None:
                yield FieldRef(step.kind, step.slot, values, around)
        elif isinstance(value, list):
            for each in value:
                yield from _iter_fields(step.inner, each, around)
        elif value is not None:
            yield from _iter_fields(step.inner, value, around)


def request_fields(exchange: Exchange, *kinds: FieldKind) -> Iterator[FieldRef]:
    """The values of these kinds in a captured request, in wire order."""
    request = request_of(exchange)
    if request is not None:
        yield from (field for field in iter_fields(request) if field.kind in kinds)


def group_names(exchange: Exchange) -> set[str]:
    """The captured names of the groups that a request names."""
    return {name for field in request_fields(exchange, FieldKind.GROUP) for name in field.values}


def about(
    named: Mapping[FieldKind, str], values: dict[str, Any], around: FieldContext
) -> FieldContext:
    """The context for fields of a struct: topic, partition, group and transaction that it names.

    Values that the struct does not name come from `around`, the context of the struct itself.
    """
    topic, topic_id, partition, group, transactional_id = around
    for kind, name in named.items():
        value = values.get(name)
        if value is None:
            continue
        if kind is FieldKind.TOPIC:
            topic, topic_id = value, None
        elif kind is FieldKind.TOPIC_ID:
            topic_id = value
        elif kind is FieldKind.PARTITION:
            partition = value
        elif kind is FieldKind.GROUP:
            group = value
        else:
            transactional_id = value
    return FieldContext(topic, topic_id, partition, group, transactional_id)
