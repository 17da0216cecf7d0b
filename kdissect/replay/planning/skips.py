"""The requests that are not sent, and why.

These are traffic among brokers and controllers, logins, writing classes that `--allow` does not
name, requests that were not captured whole, and those that the user's filters leave out.

Besides, a client repeats a request that its broker refused with "not yet" or "not here". A target
that is ready would take the first attempt as well, and so have everything twice: all later offsets
of a partition would differ. So the replay leaves out requests that were refused as a whole, and the
refused batches of a Produce that has others. It also leaves out requests that were refused to a
principal which the replay has not: the target may permit them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kdissect.codec.message import Message, encode_message
from kdissect.pipeline.filters import fits
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import (
    PRODUCE,
    READ,
    TRANSACTIONS,
    Exchange,
    PlanOptions,
    ResourceAccess,
    SkipCode,
    Skipped,
)
from kdissect.replay.workload import messages as api
from kdissect.replay.workload.messages import (
    entries,
    error_codes,
    partitions,
    request_of,
    response_of,
)
from kdissect.replay.workload.transient import are_refusals

Body = dict[str, Any]


def skip_of(
    exchange: Exchange, step_class: str, principal: str, options: PlanOptions
) -> Skipped | None:
    """Why a request is not sent, whatever the user's filters; None: it is.

    principal: of its client, "" unknown.
    """
    return (
        _not_a_clients(exchange)
        or _not_allowed(exchange, step_class, options)
        or _refused(exchange, step_class, principal, options.principal)
    )


def is_chosen(
    exchange: Exchange, accesses: tuple[ResourceAccess, ...], options: PlanOptions
) -> bool:
    """Return whether the options' filters keep a request; one that names no topic or group passes
    those."""
    if options.apis and exchange.api_key not in options.apis:
        return False
    if options.client_ids and not fits(exchange.client_id, options.client_ids):
        return False
    for kinds, wanted in ((("topic", "log"), options.topics), (("group",), options.groups)):
        if wanted:
            named = {resource[1] for resource, _ in accesses if resource[0] in kinds}
            if named and not any(fits(name, wanted) for name in named):
                return False
    return True


def _not_a_clients(exchange: Exchange) -> Skipped | None:
    """A request that no client could send, or that is not there."""
    if exchange.internal_reason:
        return Skipped(SkipCode.INTERNAL, exchange.internal_reason)
    if exchange.api_key == api.NO_API:
        if exchange.request is None and exchange.request_missing:
            return Skipped(SkipCode.NOT_CAPTURED, exchange.request_missing)
        return Skipped(SkipCode.TARGET_OWN, "SASL tokens are the target's own")
    if exchange.api_key in api.TARGET_OWN_APIS:
        return Skipped(SkipCode.TARGET_OWN, "authentication is the target's own")
    if exchange.request is None:
        return Skipped(SkipCode.NOT_CAPTURED, exchange.request_missing)
    if request_of(exchange) is None and exchange.api_key != ApiKey.API_VERSIONS:
        if catalog.has_version(exchange.api_key, exchange.api_version):
            return Skipped(SkipCode.NOT_CAPTURED, "the request cannot be decoded")
        where = f"{api.api_name(exchange.api_key)} v{exchange.api_version}"
        return Skipped(SkipCode.UNKNOWN_API, f"nothing is known of {where}")
    return None


def _not_allowed(exchange: Exchange, step_class: str, options: PlanOptions) -> Skipped | None:
    needed = [] if step_class == READ else [step_class]
    if step_class == TRANSACTIONS and exchange.api_key == ApiKey.PRODUCE:
        needed = [PRODUCE, TRANSACTIONS]
    missing = [each for each in needed if each not in options.allow]
    if missing:
        return Skipped(SkipCode.NOT_ALLOWED, f"needs --allow {','.join(missing)}")
    return None


def _refused(exchange: Exchange, step_class: str, principal: str, own: str) -> Skipped | None:
    """own: the principal of the replay at the target, "" unknown."""
    response = response_of(exchange)
    if response is None:
        return None
    if step_class != READ and are_refusals(exchange.api_key, set(error_codes(response.body))):
        reason = "the captured broker was not ready, and the client asked again"
        return Skipped(SkipCode.NOT_READY, reason)
    if not principal or own in ("", principal):
        return None
    codes = set(_codes_of_elements(response.body)) or {response.body.get("error_code", 0)}
    if not codes <= api.NOT_PERMITTED:
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
        (_topic(topic), number): partition["error_code"]
        for topic, number, partition in partitions(response.body)
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
    message: Message, topics: str, array: str, is_kept: Callable[[Body, int], bool]
) -> bytes:
    """The frame of a Produce message with only some partitions, and topics that have any."""
    shorter = []
    for topic in entries(message.body[topics]):
        kept = [each for each in entries(topic[array]) if is_kept(topic, each["index"])]
        shorter += [{**topic, array: kept}] if kept else []
    return encode_message(replace(message, body={**message.body, topics: shorter}))


def _topic(topic: Body) -> Any:
    return topic.get("name") or topic.get("topic_id")
