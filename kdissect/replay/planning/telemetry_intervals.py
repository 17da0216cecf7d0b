"""Telemetry of clients, which a broker takes only at intervals.

A response to GetTelemetrySubscriptions has the time between two pushes of its client (KIP-714). A
broker refuses a push that comes earlier, as one would at a pace above the recorded one. The last
push of a client may come at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Step
from kdissect.replay.workload.messages import request_of, response_of

_MS_NS = 1_000_000


def mark_telemetry_intervals(steps: Iterable[Step]) -> None:
    """Set `Step.pauses` of pushes, which are in order of time."""
    intervals_ns: dict[UUID, int] = {}  # by client
    pushes: dict[UUID, Step] = {}  # the last one of each client
    for step in steps:
        api_key = step.exchange.api_key
        if step.skipped is not None or api_key not in _APIS:
            continue
        request, response = request_of(step.exchange), response_of(step.exchange)
        if request is None or response is None:
            continue
        if api_key == ApiKey.GET_TELEMETRY_SUBSCRIPTIONS:
            client = response.body["client_instance_id"]
            intervals_ns[client] = response.body["push_interval_ms"] * _MS_NS
            pushes.pop(client, None)
            continue
        client = request.body["client_instance_id"]
        before = pushes.get(client)
        if before is not None and not response.body["error_code"]:
            if client in intervals_ns and not request.body["terminating"]:
                step.pauses = ((before.number, intervals_ns[client]),)
                step.depends_on = tuple(sorted({before.number, *step.depends_on}))
        pushes[client] = step


_APIS = frozenset({ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY})
