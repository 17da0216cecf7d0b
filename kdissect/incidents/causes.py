"""Removes incidents that another incident explains, so that a reader sees the cause."""

from __future__ import annotations

from collections.abc import Sequence, Set
from datetime import timedelta

from kdissect.incidents.incident import SEVERITIES, Incident

_SLOW = frozenset(("slow_api", "slow_client"))
_FAILED = frozenset(("request_errors", "unanswered_requests"))
# The incidents that a cause can reach: those of its brokers; those of its brokers with the same
# subject, or of its clients alone; and those for which one of the two is true.
AT_BROKER, OF_CLIENT, OF_EITHER = "at broker", "of client", "of either"
# Cause -> the kinds that it brings about while it lasts. All clients wait and fail; a client
# connects again after a failure, each new one sends Metadata, a member that leaves makes its group
# rebalance. Without the leader, the followers' high watermarks stand still, and so do readers of
# the nearest replica (KIP-392).
_CONSEQUENCES: dict[str, dict[str, Set[str]]] = {
    "broker_unreachable": {
        AT_BROKER: {"leader_change", "retry_storm", "broker_stall", "idle_connection_cut"},
        OF_EITHER: _SLOW | _FAILED | {"long_rebalance", "consumer_stuck"},
    },
    "broker_stall": {
        AT_BROKER: {"retry_storm", "idle_connection_cut"},
        OF_EITHER: _SLOW | {"long_rebalance"},
    },
    "leader_change": {AT_BROKER: {"request_errors"}},
    "tls_failure": {AT_BROKER: {"connection_storm"}},
    "advertised_address_unreachable": {OF_CLIENT: {"connection_storm", "metadata_storm"}},
    "consumer_stuck": {OF_CLIENT: {"connection_storm", "metadata_storm", "retry_storm"}},
    "login_failures": {OF_CLIENT: {"connection_storm", "unanswered_requests"}},
    "connection_storm": {OF_CLIENT: {"metadata_storm"}},
    # since KIP-219 a broker does not read from a client that a quota makes wait; the client's
    # records come late to consumers
    "throttled": {OF_CLIENT: {"slow_upload"}, OF_EITHER: _SLOW},
    "member_too_slow": {OF_CLIENT: _FAILED | {"rebalance_loop", "long_rebalance"}},
    "rebalance_loop": {OF_CLIENT: _FAILED | {"long_rebalance"}},
    "retry_storm": {OF_CLIENT: _FAILED | {"refused_requests"}},
    "idle_connection_cut": {OF_CLIENT: _FAILED},
    "slow_upload": {OF_CLIENT: _SLOW},
    "transaction_open": {OF_CLIENT: {"failed_transactions"}},
}
# Clients notice an outage up to so long after its end: back-off times and refreshes of metadata
# (retry.backoff.max.ms and reconnect.backoff.max.ms are 1 s by default).
_NOTICED = timedelta(seconds=2)
# They give up a request that it left without a response after request.timeout.ms, and leaders give
# up a follower after replica.lag.time.max.ms: both 30 s by default. What lasts longer has another
# cause.
_RECOVERED = timedelta(seconds=30)


def without_consequences(incidents: Sequence[Incident]) -> list[Incident]:
    """Return the incidents that no other one explains; none hides one of a worse severity."""
    return [
        incident
        for incident in incidents
        if not any(_explains(cause, incident) for cause in incidents)
    ]


def _explains(cause: Incident, incident: Incident) -> bool:
    if SEVERITIES.index(cause.severity) > SEVERITIES.index(incident.severity):
        return False  # an orderly shutdown explains no lost requests
    if not cause.start - _NOTICED <= incident.start <= cause.end + _NOTICED:
        return False
    if incident.end > cause.end + _RECOVERED:
        return False
    at_broker = bool(cause.brokers & incident.brokers)
    of_client = incident.subject == cause.subject or (
        bool(incident.clients) and incident.clients <= cause.clients
    )
    reached = {
        AT_BROKER: at_broker,
        OF_CLIENT: at_broker and of_client,
        OF_EITHER: at_broker or of_client,
    }
    consequences = _CONSEQUENCES.get(cause.kind, {})
    return any(reached[reach] and incident.kind in kinds for reach, kinds in consequences.items())
