"""The findings of a run: its differences in groups, what would hurt first, followers folded.

A difference may follow from an earlier one: records are missing since a Produce was refused, a
member is unknown since its group never formed. `causes` says which kinds can follow. If an answer
has only such differences, and an earlier answer about the same topic, partition, group or
transaction differs, its exchange is counted in the finding of the earlier one, with the errors and
fields that differ in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import error_name
from kdissect.replay.comparison.causes import RULE, Cause, Releases, causes
from kdissect.replay.model import (
    PRODUCE,
    TRANSACTIONS,
    Difference,
    Outcome,
    ReplayPlan,
    Resource,
    Verdict,
)

_SETTINGS_MAX = 4
_GROUP_PARTS = frozenset({"commits", "share"})
# What an element's name says about a finding; other elements are counted.
_NAMED = ("configs[]", "api_keys[]", "_features[]")
_GROUP_APIS = frozenset(
    {
        ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP, ApiKey.HEARTBEAT, ApiKey.OFFSET_COMMIT,
        ApiKey.OFFSET_FETCH, ApiKey.CONSUMER_GROUP_HEARTBEAT, ApiKey.SHARE_GROUP_HEARTBEAT,
        ApiKey.STREAMS_GROUP_HEARTBEAT,
    }
)  # fmt: skip


# Configs of the target that are not Kafka's default: by resource (``topic orders``, ``broker 1``)
Settings = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Explainer:
    """Explains the differences of one run. settings: of the target, as far as it tells them."""

    releases: Releases
    settings: Settings

    def cause(self, api_name: str, one: Difference) -> Cause:
        """The first cause that fits; the last of the table always does."""
        return next(
            each
            for each in causes()
            if each.fits(api_name, one) and (self.releases.differ or not each.needs_releases)
        )

    def notes(self, outcome: Outcome, one: Difference) -> Iterator[str]:
        """Lines about a difference of a step's answer, for people."""
        cause = self.cause(outcome.step.api_name, one)
        words = cause.text.format(then=self.releases.then, now=self.releases.now)
        found = list(self._found(cause.settings, one.keys))
        if found:
            yield f"{words}: {', '.join(found[:_SETTINGS_MAX])}"
        elif cause.settings:
            yield f"{words} ({', '.join(cause.settings[:_SETTINGS_MAX])})"
        elif words:
            yield words
        if one.note:
            yield one.note
        if one.place == "api_version":
            yield from self.releases.speaking(outcome.step)
        if outcome.earlier and one.place.endswith("error_code"):
            took_s = (outcome.answered_ns - outcome.earlier[0].sent_ns) / 1e9
            yield f"still so after {len(outcome.earlier) + 1} tries in {took_s:.1f} s"

    def _found(self, names: Sequence[str], keys: Sequence[str]) -> Iterator[str]:
        """Settings of the target by name, first those of a topic that the difference is about."""
        resources = sorted(self.settings, key=lambda each: not each.startswith("topic "))
        for name in names:
            for resource in resources:
                topic = resource.removeprefix("topic ")
                if name in self.settings[resource] and (topic == resource or topic in keys):
                    yield f"{name} = {self.settings[resource][name]}"
                    break


@dataclass(slots=True)
class Finding:
    """Differences of one kind: of one API at one place, of one config, of one pair of errors.

    example: of the first, whose step has that number. values: how many other pairs of values.
    count: of differences, in `steps` exchanges. where: the elements, by their keys. notes: lines
    for people. followers: (API, error or field) -> exchanges that follow from one of these.
    """

    api_name: str
    example: Difference
    step: int
    rank: int
    notes: list[str] = field(default_factory=list)
    count: int = 0
    steps: set[int] = field(default_factory=set)
    where: dict[tuple[str, ...], None] = field(default_factory=dict)
    values: set[tuple[str, str]] = field(default_factory=set)
    followers: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, step: int, one: Difference) -> None:
        self.count += 1
        self.steps.add(step)
        self.where[one.keys] = None
        self.values.add((str(one.captured), str(one.answered)))


def kind_of(api_name: str, one: Difference) -> tuple[str, ...]:
    """What differences of one finding have in common. A change of a config by a release is one,
    whatever resource has it; the versions of all APIs are one."""
    if one.rule == RULE:
        is_config = bool(one.keys) and "configs[]" in one.place
        where = one.place.rpartition(".")[2] if is_config else one.place.partition("[]")[0]
        return where, one.keys[-1] if is_config else "", one.note
    name = ""
    if any(part in one.place for part in _NAMED) and one.keys:
        name = one.keys[0] if one.place.startswith("api_keys") else one.keys[-1]
    values = (str(one.captured), str(one.answered)) if one.place.endswith("error_code") else ()
    return api_name, one.place, name, one.rule, *values


def group(
    outcomes: Iterable[Outcome], explainer: Explainer | None, *, tolerated: bool = False
) -> list[Finding]:
    """The differences of judged outcomes by kind, in the order of their first."""
    found: dict[tuple[str, ...], Finding] = {}
    for outcome in outcomes:
        for one in outcome.judgement.differences:
            if bool(one.rule) is not tolerated:
                continue
            step = outcome.step
            key = kind_of(step.api_name, one)
            if key not in found:
                notes = [] if explainer is None else [*explainer.notes(outcome, one)]
                rank = _rank(outcome, one)
                found[key] = Finding(step.api_name, one, step.number, rank, notes)
            found[key].add(step.number, one)
    return list(found.values())


def find(
    plan: ReplayPlan, outcomes: Sequence[Outcome], explainer: Explainer
) -> tuple[list[Finding], dict[int, int]]:
    """The findings of a run, and by step the step that it follows."""
    roots = find_roots(plan, outcomes, lambda outcome: _may_follow(outcome, explainer))
    findings = group((each for each in outcomes if each.step.number not in roots), explainer)
    by_step: dict[int, Finding] = {}
    for finding in findings:
        for step in finding.steps:
            known = by_step.get(step)
            if known is None or finding.rank < known.rank:
                by_step[step] = finding
    for outcome in outcomes:
        root = roots.get(outcome.step.number)
        if root is not None and root in by_step:
            by_step[root].followers[outcome.step.api_name, _word(outcome)] += 1
    return sorted(findings, key=lambda each: (each.rank, each.step)), roots


def _rank(outcome: Outcome, one: Difference) -> int:
    """How much a difference would hurt: 0 most. Refused writes, records, groups and commits,
    topics, configs, other answers, versions."""
    step, is_code = outcome.step, one.place.endswith("error_code")
    if is_code and step.step_class in (PRODUCE, TRANSACTIONS):
        return 0
    if "records" in one.place or one.place.endswith("base_offset"):
        return 1
    if step.exchange.api_key in _GROUP_APIS:
        return 2
    if is_code or (
        step.exchange.api_key in (ApiKey.METADATA, ApiKey.CREATE_TOPICS)
        and ("configs" not in one.place)
    ):
        return 3
    if "configs[]" in one.place:
        return 4
    return 6 if one.place.startswith("api_") else 5


def _may_follow(outcome: Outcome, explainer: Explainer) -> bool:
    """Return whether all differences of an answer may follow from an earlier one."""
    return all(
        one.rule or explainer.cause(outcome.step.api_name, one).follows
        for one in outcome.judgement.differences
    )


def _word(outcome: Outcome) -> str:
    """The error, or else the field, in which an answer differs first."""
    for one in outcome.judgement.differences:
        if not one.rule:
            is_code = one.place.endswith("error_code") and isinstance(one.answered, int)
            word = one.place.rpartition(".")[2].replace("[]", "")
            return error_name(one.answered) if is_code else word
    return "no answer"


# -- the first difference of each resource --------------------------------------------------------


def find_roots(
    plan: ReplayPlan, outcomes: Iterable[Outcome], may_follow: Callable[[Outcome], bool]
) -> dict[int, int]:
    """The step of the first difference, for each later step that follows it. A difference of one
    partition does not cover other partitions of its topic; one of a topic covers all of them."""
    diverging = {
        outcome.step.number: outcome
        for outcome in outcomes
        if outcome.judgement.verdict in (Verdict.DIFFERENT, Verdict.ERROR)
    }
    roots: dict[int, int] = {}
    diverged: dict[Resource, int] = {}
    for step in plan.steps if len(diverging) > 1 else ():
        outcome = diverging.get(step.number)
        if outcome is None:
            continue
        own, all_named = _resources(resource for resource, _ in step.accesses)
        root = min((diverged[each] for each in all_named if each in diverged), default=-1)
        if root >= 0 and may_follow(outcome):
            roots[step.number] = root
        else:
            root = step.number
        for resource in own:
            diverged.setdefault(resource, root)
    return roots


def _resources(touched: Iterable[Resource]) -> tuple[set[Resource], set[Resource]]:
    """The resources that a difference is about, and those with the topics that contain them."""
    named: set[Resource] = set()
    for resource in touched:
        if resource[0] in _GROUP_PARTS:
            named.add(("group", resource[1]))
        elif resource[0] in ("topic", "log", "group", "txn"):
            named.add(resource)
    topics = {("topic", each[1]) for each in named if each[0] == "log"}
    return named - topics, named | topics
