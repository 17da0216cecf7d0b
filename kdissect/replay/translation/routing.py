"""Chooses the target's node for a request: a leader, a coordinator, or its broker's counterpart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from uuid import UUID

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Exchange, Step
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.field_kinds import FieldKind, FieldRef, iter_fields
from kdissect.replay.workload.messages import (
    GROUP_KEY,
    SHARE_APIS,
    TRANSACTION_KEY,
    entries,
    request_of,
)

_BY_LEADER = frozenset(
    {
        ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.LIST_OFFSETS, ApiKey.OFFSET_FOR_LEADER_EPOCH,
        ApiKey.DELETE_RECORDS, ApiKey.SHARE_FETCH, ApiKey.SHARE_ACKNOWLEDGE,
        ApiKey.DESCRIBE_PRODUCERS,
    }
)  # fmt: skip
_BY_GROUP = frozenset(
    {
        ApiKey.OFFSET_COMMIT, ApiKey.OFFSET_FETCH, ApiKey.JOIN_GROUP, ApiKey.HEARTBEAT,
        ApiKey.LEAVE_GROUP, ApiKey.SYNC_GROUP, ApiKey.DESCRIBE_GROUPS, ApiKey.DELETE_GROUPS,
        ApiKey.OFFSET_DELETE, ApiKey.TXN_OFFSET_COMMIT, ApiKey.CONSUMER_GROUP_HEARTBEAT,
        ApiKey.CONSUMER_GROUP_DESCRIBE, ApiKey.SHARE_GROUP_HEARTBEAT, ApiKey.SHARE_GROUP_DESCRIBE,
        ApiKey.STREAMS_GROUP_HEARTBEAT, ApiKey.STREAMS_GROUP_DESCRIBE,
        ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, ApiKey.ALTER_SHARE_GROUP_OFFSETS,
        ApiKey.DELETE_SHARE_GROUP_OFFSETS,
    }
)  # fmt: skip
_BY_TRANSACTION = frozenset(
    {
        ApiKey.INIT_PRODUCER_ID, ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.ADD_OFFSETS_TO_TXN,
        ApiKey.END_TXN, ApiKey.DESCRIBE_TRANSACTIONS,
    }
)  # fmt: skip
# Requests that need to know the partitions of their topics.
_NEEDS_TOPICS = _BY_LEADER | {
    ApiKey.OFFSET_COMMIT, ApiKey.OFFSET_FETCH, ApiKey.CONSUMER_GROUP_HEARTBEAT,
    ApiKey.TXN_OFFSET_COMMIT, ApiKey.ADD_PARTITIONS_TO_TXN,
}  # fmt: skip
_TOPICS = frozenset({FieldKind.TOPIC, FieldKind.TOPIC_ID})
_COORDINATED = frozenset({FieldKind.GROUP, FieldKind.TRANSACTIONAL_ID})

_NUMBERED = frozenset({FieldKind.PARTITION})


def share_key(ids: IdMap, step: Step, body: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key of a request's share session: (target node, group, member, captured
    broker)."""
    node = target_node(ids, step)
    return (node, body["group_id"] or "", body["member_id"] or "", ids.broker(step))


def needs(ids: IdMap, exchange: Exchange) -> tuple[str, ...]:
    """The capture's names of the topics that a request is about, where their leaders matter."""
    if exchange.api_key not in _NEEDS_TOPICS:
        return ()
    names: dict[str, None] = {}
    for kind, slot, holder, around in _iter_fields(exchange, _TOPICS):
        value = holder[slot.name]
        for each in value if isinstance(value, list) else [value]:
            if kind is FieldKind.TOPIC:
                names[each] = None
            elif not around.topic and each in ids.names:
                names[ids.names[each]] = None
    return tuple(names)


def names(ids: IdMap, exchange: Exchange) -> Iterator[tuple[str, str]]:
    """("topic" or "group", the target's name) of each that a request names."""
    for kind, slot, holder, _ in _iter_fields(exchange, _TOPICS | {FieldKind.GROUP}):
        value = holder[slot.name]
        for each in value if isinstance(value, list) else [value]:
            if kind is FieldKind.GROUP:
                yield "group", ids.group(each)
            elif name := ids.topic_name(*((each, None) if kind is FieldKind.TOPIC else ("", each))):
                yield "topic", ids.topic(name)


def session_partitions(ids: IdMap, step: Step, body: Mapping[str, Any]) -> set[tuple[UUID, int]]:
    """The partitions of a share session after a request, as (captured topic id, partition)."""
    key = (body["group_id"], body["member_id"], ids.broker(step))
    partitions = (
        set() if body["share_session_epoch"] == 0 else set(ids.share_partitions.get(key, ()))
    )
    for topic in entries(body.get("forgotten_topics_data")):
        partitions -= {(topic["topic_id"], number) for number in topic["partitions"]}
    for topic in entries(body["topics"]):
        partitions |= {(topic["topic_id"], each["partition_index"]) for each in topic["partitions"]}
    return partitions


def wants_metadata(ids: IdMap, needs: tuple[str, ...]) -> list[str]:
    """The target's names of topics that a request needs and nothing is known of yet."""
    wanted = [ids.topic(name) for name in needs]
    known = ids.target
    return [
        name
        for name in wanted
        if name not in known.missing and not any((name, n) in known.leaders for n in (0, 1))
    ]


def target_node(ids: IdMap, step: Step) -> int | None:
    """The target's node that a request goes to; None: any (the bootstrap address)."""
    if len(ids.target.nodes) < 2:
        return None
    key = step.exchange.api_key
    node: int | None = None
    if key in _BY_LEADER:
        votes = spread(ids, step)
        node = max(votes, key=lambda node: votes[node]) if votes else None
    elif key in _BY_TRANSACTION:
        node = _coordinator(ids, step.exchange, FieldKind.TRANSACTIONAL_ID, TRANSACTION_KEY)
    elif key in _BY_GROUP:
        node = _coordinator(ids, step.exchange, FieldKind.GROUP, GROUP_KEY)
    if node is not None and node in ids.target.nodes:
        return node
    captured = ids.plan.workload.connections[step.connection].node_id
    if captured is None:
        return None
    node = ids.node(captured)
    return node if node in ids.target.nodes else None


def spread(ids: IdMap, step: Step) -> Counter[int]:
    """The target's nodes that a request is for, with how many of its partitions each leads, or of
    its groups or transactions each coordinates."""
    votes: Counter[int] = Counter()
    key = step.exchange.api_key
    if key == ApiKey.FETCH:
        request = request_of(step.exchange)
        if request is not None and "session_epoch" in request.body:
            for topic, number in ids.sessions.fetched_partitions(ids.broker(step), request.body):
                is_name = isinstance(topic, str)
                name = ids.topic_name(topic, None) if is_name else ids.topic_name("", topic)
                _vote(ids, votes, name, number)
            return votes
    if key in SHARE_APIS:
        request = request_of(step.exchange)
        partitions = set() if request is None else session_partitions(ids, step, request.body)
        for topic_id, number in partitions:
            _vote(ids, votes, ids.topic_name("", topic_id), number)
        return votes
    if key in _BY_LEADER:
        for _, slot, holder, around in _iter_fields(step.exchange, _NUMBERED):
            value = holder[slot.name]
            name = ids.topic_name(around.topic, around.topic_id)
            for number in value if isinstance(value, list) else [value]:
                _vote(ids, votes, name, number)
        return votes
    wanted = FieldKind.TRANSACTIONAL_ID if key in _BY_TRANSACTION else FieldKind.GROUP
    key_type = TRANSACTION_KEY if key in _BY_TRANSACTION else GROUP_KEY
    for _, slot, holder, _ in _iter_fields(step.exchange, frozenset({wanted})):
        value = holder[slot.name]
        for each in value if isinstance(value, list) else [value]:
            node = ids.target.coordinators.get((key_type, ids.renamed(wanted, each)))
            if node is not None and node in ids.target.nodes:
                votes[node] += 1
    return votes


def _vote(ids: IdMap, votes: Counter[int], name: str, partition: int) -> None:
    leader = ids.target.leaders.get((ids.topic(name), partition))
    if leader is not None and leader[0] in ids.target.nodes:
        votes[leader[0]] += 1


def _coordinator(ids: IdMap, exchange: Exchange, wanted: FieldKind, key_type: int) -> int | None:
    """The node of the first named group or transaction whose coordinator is known."""
    for kind, slot, holder, _ in _iter_fields(exchange, {wanted}):
        value = holder[slot.name]
        for name in value if isinstance(value, list) else [value]:
            node = ids.target.coordinators.get((key_type, ids.renamed(kind, name)))
            if node is not None:
                return node
    return None


def coordinator_keys(ids: IdMap) -> list[tuple[int, str]]:
    """(key_type of FindCoordinator, name on the target) of the coordinators that the plan needs.

    The replay looks them up before it begins, so that a fresh target creates __consumer_offsets and
    __transaction_state before the first request.
    """
    keys: dict[tuple[int, str], None] = {}
    for step in ids.plan.steps:
        if step.skipped is not None:
            continue
        key = step.exchange.api_key
        if key not in _BY_GROUP and key not in _BY_TRANSACTION:
            continue
        for kind, slot, holder, _ in _iter_fields(step.exchange, _COORDINATED):
            value = holder[slot.name]
            key_type = GROUP_KEY if kind is FieldKind.GROUP else TRANSACTION_KEY
            for name in value if isinstance(value, list) else [value]:
                if name:
                    keys[key_type, ids.renamed(kind, name)] = None
    return list(keys)


def _iter_fields(exchange: Exchange, kinds: Collection[FieldKind]) -> Iterator[FieldRef]:
    """The iter_fields of some kinds in a captured request, in wire order."""
    request = request_of(exchange)
    if request is not None:
        yield from (ref for ref in iter_fields(request) if ref.kind in kinds)
