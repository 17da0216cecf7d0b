"""Leaves out the batches of a Produce that the captured broker refused without effect.

Their client sent them again in a later request. A target that takes the first request as well would
have them twice, and all later offsets of the partition would differ. A request whose batches were
all refused is skipped as a whole (`SkipCode.NOT_READY`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kdissect.codec.message import Message, encode_message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Exchange
from kdissect.replay.workload.messages import REFUSED, entries, request_of, response_of

Body = dict[str, Any]


def without_refused(exchange: Exchange) -> tuple[Exchange, int]:
    """A Produce exchange without its refused batches, and how many those are; others as they
    are."""
    if exchange.api_key != ApiKey.PRODUCE:
        return exchange, 0
    request, response = request_of(exchange), response_of(exchange)
    if request is None or response is None:
        return exchange, 0
    answered = {
        (_topic(topic), partition["index"]): partition["error_code"]
        for topic in entries(response.body["responses"])
        for partition in entries(topic["partition_responses"])
    }
    refused = {log for log, code in answered.items() if code in REFUSED}
    if not refused or len(refused) == len(answered):
        return exchange, 0

    def is_kept(topic: Body, number: int) -> bool:
        return (_topic(topic), number) not in refused

    return replace(
        exchange,
        request=without_partitions(request, ("topic_data", "partition_data"), is_kept),
        response=without_partitions(response, ("responses", "partition_responses"), is_kept),
    ), len(refused)


def without_partitions(
    message: Message, arrays: tuple[str, str], is_kept: Callable[[Body, int], bool]
) -> bytes:
    """The frame of a Produce message without some partitions, nor topics that have no other.

    arrays: of topics, and of partitions in a topic. is_kept: whether a topic's partition stays.
    """
    topics, partitions = arrays
    shorter = []
    for topic in entries(message.body[topics]):
        kept = [each for each in entries(topic[partitions]) if is_kept(topic, each["index"])]
        shorter += [{**topic, partitions: kept}] if kept else []
    return encode_message(replace(message, body={**message.body, topics: shorter}))


def _topic(topic: Body) -> Any:
    return topic.get("name") or topic.get("topic_id")
