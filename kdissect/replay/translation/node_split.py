"""Splits a request for several nodes of the target into parts, and merges their answers.

The partitions, groups or transactions of one captured broker may belong to several nodes of the
target. Each node then gets a request for its own ones, as a client would send it. The answers are
merged into one before they are compared. The frame is split after its ids have been translated.
"""

from __future__ import annotations

from typing import Any

from kdissect.codec.message import Message, decode_message, encode_message
from kdissect.errors import DecodeError, EncodeError
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import headers
from kdissect.replay.model import Step
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.routing import spread
from kdissect.replay.workload.messages import GROUP_KEY, TRANSACTION_KEY, entries, response_of

Body = dict[str, Any]
# API: its array of topics, of partitions in these, and the partition's number ("" a plain number)
_TOPICS: dict[int, tuple[str, str, str]] = {
    ApiKey.PRODUCE: ("topic_data", "partition_data", "index"),
    ApiKey.FETCH: ("topics", "partitions", "partition"),
    ApiKey.LIST_OFFSETS: ("topics", "partitions", "partition_index"),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: ("topics", "partitions", "partition"),
    ApiKey.DELETE_RECORDS: ("topics", "partitions", "partition_index"),
    ApiKey.DESCRIBE_PRODUCERS: ("topics", "partition_indexes", ""),
}
# API: its array of groups or transactional ids, the name in an element ("" a plain name), key type
_NAMED: dict[int, tuple[str, str, int]] = {
    ApiKey.DESCRIBE_GROUPS: ("groups", "", GROUP_KEY),
    ApiKey.DELETE_GROUPS: ("groups_names", "", GROUP_KEY),
    ApiKey.OFFSET_FETCH: ("groups", "group_id", GROUP_KEY),
    ApiKey.CONSUMER_GROUP_DESCRIBE: ("group_ids", "", GROUP_KEY),
    ApiKey.SHARE_GROUP_DESCRIBE: ("group_ids", "", GROUP_KEY),
    ApiKey.STREAMS_GROUP_DESCRIBE: ("group_ids", "", GROUP_KEY),
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS: ("groups", "group_id", GROUP_KEY),
    ApiKey.DESCRIBE_TRANSACTIONS: ("transactional_ids", "", TRANSACTION_KEY),
}
SPLIT_APIS = frozenset(_TOPICS) | frozenset(_NAMED)


def is_split(ids: IdMap, step: Step) -> bool:
    """Return whether the request has to go to several nodes of the target, in parts."""
    if len(ids.target.nodes) < 2 or step.exchange.api_key not in SPLIT_APIS:
        return False
    return len(spread(ids, step)) > 1


def parts(ids: IdMap, step: Step, frame: bytes) -> list[tuple[int, bytes]]:
    """(node, frame) of each part of a request's frame, which is already translated.

    Partitions, groups and transactions without a known node are in the first part.
    """
    whole = decode_message(frame, side="request")
    key = step.exchange.api_key
    nodes = [node for node, _ in spread(ids, step).most_common()]
    bodies = {node: dict(whole.body) for node in nodes}
    if key in _TOPICS:
        _by_leader(ids, whole, bodies)
    else:
        _by_coordinator(ids, whole, bodies)
    if key == ApiKey.FETCH:
        _shorten_wait(ids, step, bodies)
    return [
        (node, encode_message(Message(key, whole.api_version, "request", whole.header, body)))
        for node, body in bodies.items()
        if body[(_TOPICS.get(key) or _NAMED[key])[0]]
    ]


def _by_leader(ids: IdMap, whole: Message, bodies: dict[int, Body]) -> None:
    topics, partitions, number = _TOPICS[whole.api_key]
    first = next(iter(bodies))
    for body in bodies.values():
        body[topics] = []
    for topic in entries(whole.body[topics]):
        name = ids.target.topic_name(topic)
        parts: dict[int, list[Any]] = {}
        for each in entries(topic[partitions]):
            leader = ids.target.leaders.get((name, each[number] if number else each), (first, -1))[
                0
            ]
            parts.setdefault(leader if leader in bodies else first, []).append(each)
        for node, chosen in (parts or {first: []}).items():
            bodies[node][topics].append({**topic, partitions: chosen})


def _by_coordinator(ids: IdMap, whole: Message, bodies: dict[int, Body]) -> None:
    array, name, key_type = _NAMED[whole.api_key]
    first = next(iter(bodies))
    for body in bodies.values():
        body[array] = []
    for each in entries(whole.body[array]):
        node = ids.target.coordinators.get((key_type, each[name] if name else each), first)
        bodies[node if node in bodies else first][array].append(each)


def _shorten_wait(ids: IdMap, step: Step, bodies: dict[int, Body]) -> None:
    """Limit the wait of a Fetch at nodes whose partitions had no data in the captured response.

    A broker answers as soon as one partition has data. So a node without such a partition would
    hold its part until the end of the wait; now it does so no longer than the captured broker.
    """
    captured = response_of(step.exchange)
    with_data = {
        (ids.topic_key(topic, is_captured=True), partition["partition_index"])
        for topic in entries(captured.body["responses"] if captured is not None else None)
        for partition in entries(topic["partitions"])
        if any(not header.is_partial for header in headers(partition["records"] or b""))
    }
    if not with_data:
        return
    took_ms = max(step.exchange.latency_ns, 0) // 1_000_000
    for body in bodies.values():
        asked = (
            (ids.topic_key(topic, is_captured=False), partition["partition"])
            for topic in body["topics"]
            for partition in topic["partitions"]
        )
        if not any(each in with_data for each in asked):
            body["max_wait_ms"] = min(body["max_wait_ms"], took_ms)


def merged(ids: IdMap, step: Step, answers: list[bytes]) -> bytes:
    """One frame with what all answers say; one that cannot be decoded stands for all."""
    messages = []
    for frame in answers:
        try:
            messages.append(
                decode_message(
                    frame,
                    side="response",
                    api_key=step.exchange.api_key,
                    api_version=ids.api_version(step),
                )
            )
        except (DecodeError, ValueError):
            return frame
    whole = messages[0]
    for other in messages[1:]:
        _add(whole.body, other.body)
    try:
        return encode_message(whole)
    except EncodeError:
        return answers[0]


def _add(body: Body, other: Body) -> None:
    for name, value in other.items():
        if isinstance(value, list):
            body[name] = _joined(entries(body.get(name)), value)
        elif name == "error_code":
            body[name] = body[name] or value
        elif name == "throttle_time_ms":
            body[name] = max(body[name], value)


def _joined(elements: list[Any], others: list[Any]) -> list[Any]:
    """Elements of both; of a topic that both have, its partitions."""
    by_topic = {_topic(element): element for element in elements}
    for element in others:
        same = by_topic.get(_topic(element))
        if same is None or _topic(element) is None:
            elements.append(element)
            continue
        for name in ("partitions", "partition_responses"):
            if name in same:
                same[name] = [*entries(same[name]), *entries(element[name])]
    return elements


def _topic(element: Any) -> Any:
    if not isinstance(element, dict) or not {"partitions", "partition_responses"} & set(element):
        return None
    return element.get("name") or element.get("topic") or element.get("topic_id")
