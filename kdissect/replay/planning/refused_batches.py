"""Leaves out the batches of a Produce that the captured broker refused without effect.

Their client sent them again in a later request. A target that takes the first request as well would
have them twice, and all later offsets of the partition would differ. A request whose batches were
all refused is skipped as a whole (`SkipCode.NOT_READY`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kdissect.codec.message import Message, encode_message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Exchange
from kdissect.replay.workload.messages import REFUSED, entries, request_of, response_of

_Log = tuple[Any, int]  # a topic by name or id, and a partition


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
    shorter = (
        _without(refused, request, "topic_data", "partition_data"),
        _without(refused, response, "responses", "partition_responses"),
    )
    return replace(exchange, request=shorter[0], response=shorter[1]), len(refused)


def _without(logs: set[_Log], message: Message, topics: str, partitions: str) -> bytes:
    kept = (
        {
            **topic,
            partitions: [
                each
                for each in entries(topic[partitions])
                if (_topic(topic), each["index"]) not in logs
            ],
        }
        for topic in entries(message.body[topics])
    )
    body = {**message.body, topics: [topic for topic in kept if topic[partitions]]}
    return encode_message(replace(message, body=body))


def _topic(topic: dict[str, Any]) -> Any:
    return topic.get("name") or topic.get("topic_id")
