"""Chooses the target's nodes for a request: leaders, a coordinator, or its broker's counterpart.

The partitions, groups or transactions of one captured broker may belong to several nodes of the
target. Each node then gets a request for its own ones, as a client would send it; a request that
lists groups or transactions goes to all nodes. The answers are merged into one before anything
reads them. A frame is cut after its ids have been translated.
"""

from __future__ import annotations

import copy
from typing import Any

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.errors import EncodeError
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Step
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import (
    GROUP_KEY,
    SHARE_APIS,
    TRANSACTION_KEY,
    Body,
    apis,
    entries,
    partition_number,
    request_body,
)

_BY_LEADER = apis(
    "Produce Fetch ShareFetch ShareAcknowledge ListOffsets OffsetForLeaderEpoch DeleteRecords "
    "DescribeProducers"
)
# Requests about several groups or transactions, each of which has a coordinator.
_BY_COORDINATOR = apis(
    "DescribeGroups DeleteGroups OffsetFetch ConsumerGroupDescribe ShareGroupDescribe "
    "StreamsGroupDescribe DescribeShareGroupOffsets DescribeTransactions"
)
# Admin clients send these to the controller, and a broker with ZooKeeper refuses them if it is not.
_BY_CONTROLLER = apis(
    "CreateTopics DeleteTopics CreatePartitions ElectLeaders AlterPartitionReassignments "
    "ListPartitionReassignments AlterClientQuotas AlterUserScramCredentials UpdateFeatures"
)
# A broker lists what it coordinates, so admin clients ask all of them.
_BY_ALL = apis("ListGroups ListTransactions")
# The arrays that are cut: of topics, and of structs or plain names of groups and transactions.
_TOPICS = ("topic_data", "topics")
_NAMED = ("groups", "groups_names", "group_ids", "transactional_ids")
_PARTITIONS = ("partitions", "partition_data", "partition_indexes")
_FETCHES = (ApiKey.FETCH, ApiKey.SHARE_FETCH)


def coordinators_of(ids: IdMap, step: Step) -> list[tuple[int, str]]:
    """(key type of FindCoordinator, the target's name) of groups and transactions of a request that
    goes to their coordinator."""
    if step.exchange.api_key in _BY_LEADER or step.exchange.api_key == ApiKey.FIND_COORDINATOR:
        return []
    groups, transactions = (
        [(key_type, ids.name(kind, name)) for name in step.named(kind)]
        for key_type, kind in ((GROUP_KEY, "group"), (TRANSACTION_KEY, "transactional-id"))
    )
    return [key for key in groups or transactions if key[1]]


def coordinators_of_plan(ids: IdMap) -> list[tuple[int, str]]:
    """The coordinators of all requests that are sent, as `coordinators_of` has them."""
    steps = [step for step in ids.plan.steps if step.skipped is None]
    return list(dict.fromkeys(key for step in steps for key in coordinators_of(ids, step)))


def node_of(ids: IdMap, step: Step) -> int | None:
    """The controller, or the node of a request's first partition, group or transaction, or else the
    counterpart of its captured broker. None: the address that the user gave."""
    nodes = ids.target.several
    if not nodes:
        return None
    if step.exchange.api_key in _BY_CONTROLLER:
        owners = [ids.target.controller_id]
    elif step.exchange.api_key in _BY_LEADER:
        logs = (resource[1:] for resource, _ in step.accesses if resource[0] == "log")
        owners = [_leader(ids, ids.topic(name), number) for name, number in logs]
    else:
        owners = [ids.target.coordinators.get(key) for key in coordinators_of(ids, step)]
    captured = ids.plan.workload.connections[step.connection].node_id
    counterpart = None if captured is None else ids.node(captured)
    default = next(iter(nodes)) if ids.target.gone else None
    return next((each for each in (*owners, counterpart) if each in nodes), default)


def _leader(ids: IdMap, topic: str, partition: int) -> int | None:
    return ids.target.leaders.get((topic, partition), (None, -1))[0]


# -- parts and their answers ----------------------------------------------------------------------


def parts_of(ids: IdMap, step: Step, frame: bytes) -> list[tuple[int | None, bytes]]:
    """(node, frame) of each part of a request's frame, which is already translated.

    Partitions, groups and transactions without a known node go to that of the request.
    """
    first, api_key = node_of(ids, step), step.exchange.api_key
    if api_key in _BY_ALL:
        return [(node, frame) for node in ids.target.several or [first]]
    is_shared = api_key in SHARE_APIS
    is_cut = api_key in _BY_LEADER | _BY_COORDINATOR
    if not is_cut or not (ids.target.several or is_shared):
        return [(first, frame)]
    whole = decode_message(frame, side="request")
    arrays = _TOPICS if api_key in _BY_LEADER else _NAMED
    array = next((name for name in arrays if name in whole.body), "")
    parts: dict[int | None, list[Any]] = {}
    for element in entries(whole.body.get(array)):
        for node, part in _cut(ids, api_key, element, first).items():
            parts.setdefault(node, []).append(part)
    if len(parts) < 2 and not is_shared:
        return [(node, frame) for node in parts or [first]]
    bodies = {node: {**whole.body, array: part} for node, part in parts.items()}
    if is_shared:
        asked = request_body(step.exchange)
        epochs = ids.share.set_epochs(ids.broker(step), asked, parts or [first])
        for node, epoch in epochs.items():
            body = bodies.setdefault(node, {**whole.body, array: []})
            body["share_session_epoch"] = epoch
    if api_key in _FETCHES and len(bodies) > 1:
        # A node without records would hold its part until the end of the wait; now it does so no
        # longer than the captured broker held the request.
        latency_ms = max(step.exchange.latency_ns, 0) // 1_000_000
        for body in bodies.values():
            body["max_wait_ms"] = min(body["max_wait_ms"], latency_ms)
    return [
        (node, encode_message(Message(api_key, whole.api_version, "request", whole.header, body)))
        for node, body in bodies.items()
    ]


def _cut(ids: IdMap, api_key: int, element: Any, first: int | None) -> dict[int | None, Any]:
    """The element of a request's array for each node, with the node's own partitions."""
    nodes = ids.target.several
    if api_key in _BY_COORDINATOR:
        key_type = TRANSACTION_KEY if api_key == ApiKey.DESCRIBE_TRANSACTIONS else GROUP_KEY
        name = element if isinstance(element, str) else element["group_id"]
        node = ids.target.coordinators.get((key_type, name))
        return {node if node in nodes else first: element}
    topic = ids.topic(ids.target_topics.of(element))
    inner = next(name for name in _PARTITIONS if name in element)
    parts: dict[int | None, list[Any]] = {}
    for each in entries(element[inner]):
        number = each if isinstance(each, int) else partition_number(each)
        leader = _leader(ids, topic, number)
        parts.setdefault(leader if leader in nodes else first, []).append(each)
    return {node: {**element, inner: part} for node, part in (parts or {first: []}).items()}


def merged(ids: IdMap, step: Step, answers: list[bytes]) -> bytes:
    """One frame with what all answers say; one that cannot be decoded stands for all."""
    if len(answers) == 1:
        return answers[0]
    found = [ids.answer_of(step, each) for each in answers]
    if None in found:
        return answers[found.index(None)]
    whole, *others = copy.deepcopy([each for each in found if each is not None])
    for other in others:
        _join(whole.body, other.body)
    try:
        return encode_message(whole)
    except EncodeError:
        return answers[0]


def _join(body: Body, other: Body) -> None:
    """Add the elements of another body's arrays. A topic of both then has several entries, as
    brokers' answers may have them, too."""
    for name, value in other.items():
        if isinstance(value, list):
            mine = entries(body.get(name))
            # names that a node does not know, no other node knows
            more = [each for each in value if not (isinstance(each, str) and each in mine)]
            body[name] = [*mine, *more]
        elif name == "error_code":
            body[name] = body[name] or value
        elif name == "throttle_time_ms":
            body[name] = max(body[name], value)
