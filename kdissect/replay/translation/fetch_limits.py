"""Finds Fetch answers that lack captured records since those of other partitions use up its limit.

A replay may produce faster than the captured clients did, so that a Fetch finds more records in one
partition, and then has no room for another one. A broker adds no batch that is larger than what is
left of ``max_bytes``, or than ``partition_max_bytes``, unless the answer is empty (KIP-74). The
request that is sent again has limits with room for the captured records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kdissect.codec.message import Message
from kdissect.replay.batch_headers import headers
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import entries

UNLIMITED = 0x7FFFFFFF
Body = dict[str, Any]
Place = tuple[Any, int]  # a topic by its captured name or id, and a partition


def lacking(ids: IdMap, captured: Message, answer: Message) -> Iterator[tuple[Place, bytes]]:
    """The partitions whose data records a Fetch answer does not have to the last captured offset,
    with the captured records."""
    records = {
        (ids.topic_key(topic, is_captured=False), partition["partition_index"]): partition[
            "records"
        ]
        for topic, partition in _with_data(answer)
    }
    for topic, partition in _with_data(captured):
        number = partition["partition_index"]
        log = (ids.topic_name(topic.get("topic") or "", topic.get("topic_id")), number)
        answered = records.get((ids.topic_key(topic, is_captured=True), number), b"")
        if not ids.brings(log, partition["records"], answered):
            yield (topic.get("topic") or topic["topic_id"], number), partition["records"]


def is_full(
    ids: IdMap, sent: Body, limits: Mapping[Place, int], captured: Message, answer: Message
) -> bool:
    """Return whether none of the lacking partitions' batches has room in an answer. sent: the body
    of its request. limits: of partitions. An answer without records always has room."""
    limit = sent.get("max_bytes", UNLIMITED)
    size = sum(
        len(partition["records"] or b"")
        for topic in entries(answer.body["responses"])
        for partition in entries(topic["partitions"])
    )
    if not size or limit == UNLIMITED:
        return False
    return all(
        _least_size(data) > min(limit - size, limits.get(place, UNLIMITED))
        for place, data in lacking(ids, captured, answer)
    )


def limits_of(body: Body, session: Mapping[Place, Body]) -> dict[Place, int]:
    """The limits of the partitions that a captured request fetches. session: its partitions."""
    return {
        place: partition["partition_max_bytes"]
        for place, partition in {**session, **_named(body)}.items()
    }


def with_room(body: Body, session: Mapping[Place, Body], room: Mapping[Place, int]) -> Body:
    """A captured request with limits that have room for so many bytes of some partitions."""
    topics: dict[Any, list[Body]] = {}
    for place, partition in _named(body).items():
        topics.setdefault(place[0], []).append(dict(partition))
    for (topic, number), size in room.items():
        listed = topics.setdefault(topic, [])
        one = next((each for each in listed if each["partition"] == number), None)
        if one is None and (topic, number) in session:
            one = dict(session[topic, number])
            listed.append(one)
        if one is not None:
            one["partition_max_bytes"] = max(one["partition_max_bytes"], size)
    return {
        **body,
        "max_bytes": UNLIMITED,
        "topics": [
            {"topic" if isinstance(key, str) else "topic_id": key, "partitions": partitions}
            for key, partitions in topics.items()
            if partitions
        ],
    }


def _named(body: Body) -> dict[Place, Body]:
    return {
        (topic.get("topic") or topic["topic_id"], partition["partition"]): partition
        for topic in entries(body["topics"])
        for partition in entries(topic["partitions"])
    }


def _least_size(data: bytes) -> int:
    return min((each.size for each in headers(data) if not each.is_control), default=0)


def _with_data(response: Message) -> Iterator[tuple[Body, Body]]:
    """(topic, partition) of a Fetch response that have data records."""
    for topic in entries(response.body["responses"]):
        for partition in entries(topic["partitions"]):
            if any(
                not header.is_partial and not header.is_control
                for header in headers(partition["records"] or b"")
            ):
                yield topic, partition
