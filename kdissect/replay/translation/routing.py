"""Chooses the target's node for a request: a leader, a coordinator, or its broker's counterpart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.fields import FieldKind
from kdissect.replay.model import Exchange, Step
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import (
    GROUP_KEY,
    SHARE_APIS,
    TRANSACTION_KEY,
    entries,
    request_fields,
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
# Requests whose translation needs leaders and ids of topics on the target.
_NEEDS_TOPICS = _BY_LEADER | {
    ApiKey.OFFSET_COMMIT, ApiKey.OFFSET_FETCH, ApiKey.CONSUMER_GROUP_HEARTBEAT,
    ApiKey.TXN_OFFSET_COMMIT, ApiKey.ADD_PARTITIONS_TO_TXN,
}  # fmt: skip
_TOPICS = FieldKind.TOPIC, FieldKind.TOPIC_ID
_COORDINATED = FieldKind.GROUP, FieldKind.TRANSACTIONAL_ID


def share_key(ids: IdMap, step: Step, body: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key of a request's share session: (target node, group, member, captured
    broker)."""
    node = target_node(ids, step)
    return (node, body["group_id"] or "", body["member_id"] or "", ids.broker(step))


def needs(ids: IdMap, exchange: Exchange) -> tuple[str, ...]:
    """The captured names of the topics whose leaders and ids a request needs."""
    if exchange.api_key not in _NEEDS_TOPICS:
        return ()
    names: dict[str, None] = {}
    for field in request_fields(exchange, *_TOPICS):
        if field.kind is FieldKind.TOPIC:
            names |= dict.fromkeys(field.values)
        elif not field.around.topic:
            names |= dict.fromkeys(ids.names[each] for each in field.values if each in ids.names)
    return tuple(names)


def names(ids: IdMap, exchange: Exchange) -> Iterator[tuple[str, str]]:
    """("topic" or "group", the target's name) of each that a request names."""
    for field in request_fields(exchange, *_TOPICS, FieldKind.GROUP):
        is_name = field.kind is FieldKind.TOPIC
        for each in field.values:
            if field.kind is FieldKind.GROUP:
                yield "group", ids.group(each)
            elif name := ids.topic_name(*((each, None) if is_name else ("", each))):
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
    """By node of the target: how many partitions of a request it leads, or how many of its groups
    or transactions it coordinates."""
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
        for field in request_fields(step.exchange, FieldKind.PARTITION):
            name = ids.topic_name(field.around.topic, field.around.topic_id)
            for number in field.values:
                _vote(ids, votes, name, number)
        return votes
    wanted = FieldKind.TRANSACTIONAL_ID if key in _BY_TRANSACTION else FieldKind.GROUP
    key_type = TRANSACTION_KEY if key in _BY_TRANSACTION else GROUP_KEY
    for field in request_fields(step.exchange, wanted):
        for each in field.values:
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
    for field in request_fields(exchange, wanted):
        for name in field.values:
            node = ids.target.coordinators.get((key_type, ids.renamed(wanted, name)))
            if node is not None:
                return node
    return None


def step_coordinators(ids: IdMap, step: Step) -> list[tuple[int, str]]:
    """(key_type of FindCoordinator, name on the target) of the coordinators that a step needs."""
    key = step.exchange.api_key
    if step.skipped is not None or (key not in _BY_GROUP and key not in _BY_TRANSACTION):
        return []
    keys: dict[tuple[int, str], None] = {}
    for field in request_fields(step.exchange, *_COORDINATED):
        key_type = GROUP_KEY if field.kind is FieldKind.GROUP else TRANSACTION_KEY
        names = (ids.renamed(field.kind, name) for name in field.values if name)
        keys |= dict.fromkeys((key_type, name) for name in names)
    return list(keys)


def coordinator_keys(ids: IdMap) -> list[tuple[int, str]]:
    """Those that the plan needs.

    The replay looks them up before it begins, so that a fresh target creates __consumer_offsets and
    __transaction_state before the first request.
    """
    found = (key for step in ids.plan.steps for key in step_coordinators(ids, step))
    return list(dict.fromkeys(found))
