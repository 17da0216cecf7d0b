"""What the captured broker refused without effect, and what the replay therefore does not send.

A client repeats a request that its broker refused with "not yet" or "not here". A target that is
ready would take the first attempt as well, and so have everything twice: all later offsets of a
partition would differ. So the replay leaves out

- requests that were refused as a whole
- the refused batches of a Produce that has others (its exchange is made shorter)
- commits in an epoch that a heartbeat of their member ended meanwhile (KIP-848): at the target the
  commit may be in time, and would leave offsets that the captured group did not have
- requests that were refused to a principal which the replay has not: the target may permit them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kdissect.codec.message import Message, encode_message
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.model import READ, Exchange, SkipCode, Skipped
from kdissect.replay.workload.messages import (
    NOT_PERMITTED,
    REFUSED,
    entries,
    error_codes,
    request_of,
    response_of,
    step_class,
)

Body = dict[str, Any]
_AGAIN = Skipped(
    SkipCode.NOT_READY, "the captured broker was not ready, and the client asked again"
)
_STALE = Skipped(
    SkipCode.NOT_READY,
    "refused in the capture, because a heartbeat raised its member's epoch at that moment",
)


class Refusals:
    """The refusals of a workload. own: the principal of the replay at the target, "" unknown."""

    def __init__(self, exchanges: Iterable[Exchange], own: str) -> None:
        self._own = own
        self._stale = _stale_commits(exchanges)

    def of(self, exchange: Exchange, principal: str) -> Skipped | None:
        """Why a request is not sent at all; None: it is. principal: of its client."""
        if exchange.exchange_id in self._stale:
            return _STALE
        response = response_of(exchange)
        if response is None:
            return None
        codes = set(error_codes(response.body))
        if step_class(exchange.api_key) != READ and codes and codes <= REFUSED:
            return _AGAIN
        if not principal or self._own in ("", principal):
            return None
        codes = set(_codes_of_elements(response.body)) or {response.body.get("error_code", 0)}
        if not codes <= NOT_PERMITTED:
            return None
        reason = f"the captured broker refused it to {principal}, and the replay is {self._own}"
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


def _stale_commits(exchanges: Iterable[Exchange]) -> set[int]:
    """The exchange ids of refused commits whose member got a later epoch meanwhile."""
    heartbeats: dict[tuple[str, str], list[tuple[int, int, int]]] = defaultdict(list)
    refused: list[tuple[tuple[str, str], int, Exchange]] = []
    for exchange in exchanges:
        if exchange.api_key not in (ApiKey.CONSUMER_GROUP_HEARTBEAT, ApiKey.OFFSET_COMMIT):
            continue
        request, response = request_of(exchange), response_of(exchange)
        if request is None or response is None:
            continue
        member = request.body["group_id"], request.body.get("member_id", "")
        if exchange.api_key == ApiKey.CONSUMER_GROUP_HEARTBEAT:
            times = exchange.request_time_ns, exchange.response_time_ns
            heartbeats[member].append((*times, response.body["member_epoch"]))
        elif set(error_codes(response.body)) == {ErrorCode.STALE_MEMBER_EPOCH}:
            refused.append((member, request.body["generation_id_or_member_epoch"], exchange))
    return {
        exchange.exchange_id
        for member, epoch, exchange in refused
        if any(
            sent_ns < exchange.response_time_ns
            and exchange.request_time_ns < answered_ns
            and epoch < later
            for sent_ns, answered_ns, later in heartbeats[member]
        )
    }


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
