"""Removes incidents that another incident explains, so that a reader sees the cause."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from kdissect.incidents.incident import INFO, Incident

# Cause -> the kinds that it brings about at its brokers while it lasts.
_CONSEQUENCES: dict[str, frozenset[str]] = {
    "broker_unreachable": frozenset(
        ("leader_change", "retry_storm", "broker_stall", "idle_connection_cut")
    ),
    "broker_stall": frozenset(("retry_storm", "idle_connection_cut")),
    "leader_change": frozenset(("retry_storm",)),
    "tls_failure": frozenset(("connection_storm",)),
}
# Cause -> the kinds that it brings about for the same subject or client: a client connects again
# after a failure, each new one sends Metadata, a member that leaves makes its group rebalance.
_CONSEQUENCES_FOR_SUBJECT: dict[str, frozenset[str]] = {
    "advertised_address_unreachable": frozenset(("connection_storm", "metadata_storm")),
    "consumer_stuck": frozenset(("connection_storm", "metadata_storm", "retry_storm")),
    "login_failures": frozenset(("connection_storm",)),
    "connection_storm": frozenset(("metadata_storm",)),
    # since KIP-219 a broker does not read from a client that a quota makes wait
    "throttled": frozenset(("slow_upload",)),
    "member_too_slow": frozenset(("rebalance_loop",)),
}
# Cause -> the kinds that it brings about anywhere: all clients wait and fail. Without the leader,
# the followers' high watermarks stand still, and so do readers of the nearest replica (KIP-392).
_SLOW = frozenset(("slow_api", "slow_client"))
_FAILED = frozenset(("request_errors", "unanswered_requests"))
_CONSEQUENCES_ANYWHERE: dict[str, frozenset[str]] = {
    "broker_unreachable": _SLOW | _FAILED | {"long_rebalance", "consumer_stuck"},
    "broker_stall": _SLOW | {"long_rebalance"},
    "idle_connection_cut": _FAILED,
    "slow_upload": _SLOW,
    "throttled": _SLOW,
    "login_failures": _FAILED | {"refused_requests"},
    "leader_change": frozenset(("request_errors",)),
    "retry_storm": _FAILED | {"refused_requests"},
    "rebalance_loop": _FAILED | {"long_rebalance"},
    "member_too_slow": _FAILED | {"long_rebalance"},
    "transaction_open": frozenset(("failed_transactions",)),
    "tls_failure": frozenset(("capture_unread",)),
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
    is_at_broker = incident.kind in _CONSEQUENCES.get(cause.kind, ())
    is_of_subject = incident.kind in _CONSEQUENCES_FOR_SUBJECT.get(
        cause.kind, ()
    ) and incident.subject in (cause.subject, cause.client)
    is_anywhere = incident.kind in _CONSEQUENCES_ANYWHERE.get(cause.kind, ())
    is_near = (is_at_broker or is_of_subject) and bool(cause.brokers & incident.brokers)
    return (is_near or is_anywhere) and cause.start - _SLACK <= incident.start <= cause.end + _SLACK
