"""Checks that a replay may send its plan to the target.

Only reading is allowed, unless the user allows other classes by name. A target that may be the
captured cluster needs the user's consent.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import ip_address

from kdissect.errors import Error
from kdissect.replay.model import (
    CLASSES,
    DELETE_EXISTING,
    WRITING_CLASSES,
    ReplayPlan,
    SkipCode,
    WorkloadFacts,
)
from kdissect.replay.target.cluster import Target, show_address

Address = tuple[str, int]
SAME_CLUSTER = "same-cluster"  # allowed beside classes: the captured cluster is the target
_BESIDE = (DELETE_EXISTING, SAME_CLUSTER)


class GuardError(Error, ValueError):
    """The replay is refused; the text says which option would allow it."""


def parse_allow(values: Iterable[str]) -> frozenset[str]:
    """Classes of ``produce,groups`` and the like, as often as given. Raises GuardError."""
    names = {name.strip().lower() for value in values for name in value.split(",")} - {""}
    for name in sorted(names):
        if name not in (*CLASSES, *_BESIDE):
            known = ", ".join((*WRITING_CLASSES, *_BESIDE))
            raise GuardError(f"--allow {name}: classes are {known}")
    return frozenset(names) & {*WRITING_CLASSES, *_BESIDE}


def check_address(facts: WorkloadFacts, host: str, port: int, same_cluster: bool) -> None:
    """Refuse an address that the capture shows, before anything is sent. Raises GuardError."""
    if same_cluster:
        return
    captured: set[Address] = set(facts.listeners) | set(facts.brokers.values())
    ours = {(host.lower(), port)} | {(each, port) for each in _resolve(host)}
    known = {(name.lower(), number) for name, number in captured}
    if found := sorted(ours & {(_plain(name), number) for name, number in known} | ours & known):
        raise GuardError(
            f"{show_address(host, port)} is an address of the captured cluster "
            f"({show_address(*found[0])}); if this is meant, say --allow same-cluster"
        )


def check_cluster(facts: WorkloadFacts, target: Target, same_cluster: bool) -> None:
    """Refuse the captured cluster's id, before the first replayed request. Raises GuardError."""
    if not same_cluster and target.cluster_id is not None:
        if target.cluster_id in facts.cluster_ids:
            raise GuardError(
                f"{target} belongs to the captured cluster (id {target.cluster_id}); if this is "
                "meant, say --allow same-cluster"
            )


def not_allowed(plan: ReplayPlan) -> dict[str, int]:
    """Steps that --allow would add, by class."""
    counts: dict[str, int] = {}
    for step in plan.steps:
        if step.skipped is not None and step.skipped.code is SkipCode.NOT_ALLOWED:
            counts[step.step_class] = counts.get(step.step_class, 0) + 1
    return {name: counts[name] for name in CLASSES if name in counts}


def _resolve(host: str) -> set[str]:
    """Addresses of a name; none where it has none (connecting will say so)."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {_plain(str(each[4][0])) for each in found}


def _plain(host: str) -> str:
    """An address in its one spelling; IPv4 inside IPv6 as IPv4. Names stay as they are."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
