"""What the captured broker refused without effect, and what the replay therefore does not send.

A client repeats a request that its broker refused with "not yet" or "not here". A target that is
ready would take the first attempt as well, and so have everything twice: all later offsets of a
partition would differ. So the replay leaves out

- requests that were refused as a whole
- the refused batches of a Produce that has others (its exchange is made shorter)
- requests that were refused to a principal which the replay has not: the target may permit them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kdissect.codec.message import Message, encode_message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import READ, Exchange, SkipCode, Skipped
from kdissect.replay.workload.messages import (
    NOT_PERMITTED,
    entries,
    error_codes,
    request_of,
    response_of,
    step_class,
)
from kdissect.replay.workload.transient import are_refusals

Body = dict[str, Any]
_AGAIN = Skipped(
    SkipCode.NOT_READY, "the captured broker was not ready, and the client asked again"
)


def refusal(exchange: Exchange, principal: str, own: str) -> Skipped | None:
    """Why a request is not sent at all; None: it is.

    principal: of its client. own: of the replay at the target, "" unknown.
    """
    response = response_of(exchange)
    if response is None:
        return None
    codes = set(error_codes(response.body))
    if step_class(exchange.api_key) != READ and are_refusals(exchange.api_key, codes):
        return _AGAIN
    if not principal or own in ("", principal):
        return None
    codes = set(_codes_of_elements(response.body)) or {response.body.get("error_code", 0)}
    if not codes <= NOT_PERMITTED:
        return None
    reason = f"the captured broker refused it to {principal}, and the replay is {own}"
    return Skipped(SkipCode.OTHER_PRINCIPAL, reason)


def _codes_of_elements(body: Mapping[str, Any]) -> Iterator[int]:
    """The ``error_code`` of each element in the arrays of a response, without those of fields: a
    created topic may lack its configs (KIP-525)."""
    for value in body.values():
        for element in value if isinstance(value, list) else ():
            if isinstance(element, dict):
                if "error_code" in element:
                    yield element["error_code"]
                yield from _codes_of_elements(element)


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
    refused = {log for log, code in answered.items() if are_refusals(ApiKey.PRODUCE, [code])}
    if not refused or len(refused) == len(answered):
        return exchange, 0

    def is_kept(topic: Body, number: int) -> bool:
        return (_topic(topic), number) not in refused

    return replace(
        exchange,
        request=_shorter(request, "topic_data", "partition_data", is_kept),
        response=_shorter(response, "responses", "partition_responses", is_kept),
    ), len(refused)


def _shorter(
    message: Message, topics: str, partitions: str, is_kept: Callable[[Body, int], bool]
) -> bytes:
    """The frame of a Produce message with only some partitions, and topics that have any."""
    shorter = []
    for topic in entries(message.body[topics]):
        kept = [each for each in entries(topic[partitions]) if is_kept(topic, each["index"])]
        shorter += [{**topic, partitions: kept}] if kept else []
    return encode_message(replace(message, body={**message.body, topics: shorter}))


def _topic(topic: Body) -> Any:
    return topic.get("name") or topic.get("topic_id")
