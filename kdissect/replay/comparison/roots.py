"""Finds the first divergence of each topic, partition, group and transaction.

Later differences on the same resource may follow from it. They are folded after it: outputs count
them, and the JSON lines name the exchange that they follow. A difference of one partition does not
cover other partitions of its topic, but one of a topic covers all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdissect.replay.model import Outcome, ReplayPlan, Resource, Verdict

_GROUP_PARTS = frozenset({"commits", "share"})
_FINDINGS = frozenset({Verdict.DIFFERENT, Verdict.ERROR})


def find_roots(plan: ReplayPlan, outcomes: Iterable[Outcome]) -> dict[int, int]:
    """The step of the first divergence, for each later step that diverges on one of its resources.

    Call it after the judgement. Steps are their numbers in the plan.
    """
    diverging = {
        outcome.step.number
        for outcome in outcomes
        if outcome.judgement is not None and outcome.judgement.verdict in _FINDINGS
    }
    roots: dict[int, int] = {}
    if len(diverging) < 2:
        return roots
    diverged: dict[Resource, int] = {}
    for step in plan.steps:
        if step.number not in diverging:
            continue
        own, all_named = _resources(resource for resource, _ in step.accesses)
        root = min((diverged[each] for each in all_named if each in diverged), default=-1)
        if root >= 0:
            roots[step.number] = root
        for resource in own:
            diverged.setdefault(resource, step.number if root < 0 else root)
    return roots


def _resources(touched: Iterable[Resource]) -> tuple[set[Resource], set[Resource]]:
    """The resources that a divergence is about, and those with the topics that contain them."""
    named: set[Resource] = set()
    for resource in touched:
        if resource[0] in _GROUP_PARTS:
            named.add(("group", resource[1]))
        elif resource[0] in ("topic", "log", "group", "txn"):
            named.add(resource)
    topics = {("topic", each[1]) for each in named if each[0] == "log"}
    return named - topics, named | topics
