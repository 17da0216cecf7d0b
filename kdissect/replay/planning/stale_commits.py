"""Finds commits of offsets that raced a heartbeat which raised the epoch of their member (KIP-848).

A coordinator refuses a commit in an epoch that is over. If the member's heartbeat was under way at
that moment, and its answer has a later epoch, either may come first: at the target the commit may
be in time. It would then leave offsets that the captured group did not have. So it is not sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.model import Exchange
from kdissect.replay.workload.messages import error_codes, request_of, response_of

_REFUSED = {ErrorCode.STALE_MEMBER_EPOCH}
_Member = tuple[str, str]  # group, member id


def stale_commits(exchanges: Iterable[Exchange]) -> set[int]:
    """The exchange ids of refused commits whose member got a later epoch meanwhile."""
    heartbeats: dict[_Member, list[tuple[int, int, int]]] = defaultdict(list)
    refused: list[tuple[_Member, int, Exchange]] = []
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
        elif set(error_codes(response.body)) == _REFUSED:
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
