"""Removes incidents that another incident explains, so that a reader sees the cause."""

from __future__ import annotations

from collections.abc import Sequence, Set
from datetime import timedelta

from kdissect.incidents.incident import INFO, Incident

_SLOW = frozenset(("slow_api", "slow_client"))
_FAILED = frozenset(("request_errors", "unanswered_requests"))
# The incidents that a cause can reach: those of its brokers, those of its brokers with the same
# subject or client, or all.
AT_BROKER, OF_SUBJECT, ANYWHERE = "at broker", "of subject", "anywhere"
# Cause -> the kinds that it brings about while it lasts. All clients wait and fail; a client
# connects again after a failure, each new one sends Metadata, a member that leaves makes its group
# rebalance. Without the leader, the followers' high watermarks stand still, and so do readers of
# the nearest replica (KIP-392).
_CONSEQUENCES: dict[str, dict[str, Set[str]]] = {
    "broker_unreachable": {
        AT_BROKER: {"leader_change", "retry_storm", "broker_stall", "idle_connection_cut"},
        ANYWHERE: _SLOW | _FAILED | {"long_rebalance", "consumer_stuck"},
    },
    "broker_stall": {
        AT_BROKER: {"retry_storm", "idle_connection_cut"},
        ANYWHERE: _SLOW | {"long_rebalance"},
    },
    "leader_change": {AT_BROKER: {"retry_storm"}, ANYWHERE: {"request_errors"}},
    "tls_failure": {AT_BROKER: {"connection_storm"}, ANYWHERE: {"capture_unread"}},
    "advertised_address_unreachable": {OF_SUBJECT: {"connection_storm", "metadata_storm"}},
    "consumer_stuck": {OF_SUBJECT: {"connection_storm", "metadata_storm", "retry_storm"}},
    "login_failures": {OF_SUBJECT: {"connection_storm"}, ANYWHERE: _FAILED | {"refused_requests"}},
    "connection_storm": {OF_SUBJECT: {"metadata_storm"}},
    # since KIP-219 a broker does not read from a client that a quota makes wait
    "throttled": {OF_SUBJECT: {"slow_upload"}, ANYWHERE: _SLOW},
    "member_too_slow": {OF_SUBJECT: {"rebalance_loop"}, ANYWHERE: _FAILED | {"long_rebalance"}},
    "rebalance_loop": {ANYWHERE: _FAILED | {"long_rebalance"}},
    "retry_storm": {ANYWHERE: _FAILED | {"refused_requests"}},
    "idle_connection_cut": {ANYWHERE: _FAILED},
    "slow_upload": {ANYWHERE: _SLOW},
    "transaction_open": {ANYWHERE: {"failed_transactions"}},
}
# Clients notice an outage, and recover from it, up to so long after its ends: back-off times and
# refreshes of metadata (retry.backoff.max.ms and reconnect.backoff.max.ms are 1 s by default).
_SLACK = timedelta(seconds=2)


def without_consequences(incidents: Sequence[Incident]) -> list[Incident]:
    """Return the incidents that no other incident explains."""
    return [
        incident
        for incident in incidents
        if not any(_explains(cause, incident) for cause in incidents)
    ]


def _explains(cause: Incident, incident: Incident) -> bool:
    if cause.kind == "broker_unreachable" and INFO == cause.severity != incident.severity:
        return False  # an orderly shutdown explains no lost requests
    if not cause.start - _SLACK <= incident.start <= cause.end + _SLACK:
        return False
    is_near = bool(cause.brokers & incident.brokers)
    reached = {
        AT_BROKER: is_near,
        OF_SUBJECT: is_near and incident.subject in (cause.subject, cause.client),
        ANYWHERE: True,
    }
    consequences = _CONSEQUENCES.get(cause.kind, {})
    return any(reached[reach] and incident.kind in kinds for reach, kinds in consequences.items())
