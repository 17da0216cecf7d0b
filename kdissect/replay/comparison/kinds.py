"""The differences of a run by their kinds, what would hurt first, followers folded.

A difference may follow from an earlier one: records are missing since a Produce was refused, a
member is unknown since its group never formed. Suppose that an answer has only such differences,
and an earlier one about the same topic, partition, group or transaction differs. Then its exchange
is counted in the kind of the earlier one, with the errors and fields that differ in it. A request
without an answer has no kind, so nothing is counted there.

`causes.toml` says which kinds can follow. It has words beside a difference, with the settings of
the target that decide it. `release_changes.toml` has what a Kafka release changes by design:
configs, defaults, features, errors. Such a difference is told once, apart from the others; another
value of a config is not one of them. The API versions that the captured broker and the target offer
tell their releases. They also tell the way from ZooKeeper to KRaft, a change of its own at any
release. The versions of an API follow from the releases themselves.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.resources import files
from typing import Any

from kdissect.protocol import catalog
from kdissect.protocol.api_keys import INTER_BROKER_APIS, ApiKey
from kdissect.protocol.error_codes import error_name
from kdissect.protocol.releases import (
    release_number,
    releases_accepting,
    releases_offering,
    spoken_versions,
)
from kdissect.replay import model
from kdissect.replay.fields import Match, as_fields
from kdissect.replay.model import ABSENT, Difference, Outcome, Resource, Verdict, tolerate

_SETTINGS_MAX = 4
_CONFIG, _OTHER_VALUE = 4, 5  # ranks (`_rank`)
_GROUP_PARTS = frozenset({"commits", "share"})
# What an element's name says about a kind; other elements are counted.
_NAMED = ("configs[]", "api_keys[]", "_features[]")
RULE = "release"  # tolerates what a release changes
Ranges = Mapping[int, tuple[int, int]]


# -- the tables -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause(Match):
    """A row of a table, which explains the fields. since: releases, empty for a change of KRaft."""

    path: tuple[str, ...] = ("*error_code",)
    text: str
    keys: frozenset[str] = frozenset()
    settings: Sequence[str] = ()
    follows: bool = False
    releases: bool = False
    since: tuple[tuple[int, ...], ...] = ()
    kip: str = ""

    def fits(self, api_name: str, one: Difference, *, is_downgrade: bool = False) -> bool:
        """is_downgrade: the target is of the older release, so the values change places."""
        values = one.captured, one.answered
        return (
            (not self.keys or not self.keys.isdisjoint(one.keys))
            and self.has(*(reversed(values) if is_downgrade else values))
            and self.is_at(api_name, one.place)
        )


@cache
def causes() -> tuple[Cause, ...]:
    """The causes of `causes.toml`, in order."""
    return tuple(Cause(**as_fields(row)) for row in _rows("cause", "causes.toml"))


@cache
def changes() -> tuple[Cause, ...]:
    """The changes of `release_changes.toml`, in order."""
    found = []
    for row in _rows("change", "release_changes.toml"):
        for config, (then, *now) in row.pop("defaults", {}).items():
            value = {"path": "*.configs[].value", "captured": [then], "answered": now}
            found.append(Cause(**as_fields({**row, **value, "keys": [config]})))
        if "path" in row:
            found.append(Cause(**as_fields(row)))
    return tuple(found)


def _rows(kind: str, name: str) -> list[dict[str, Any]]:
    text = files(__package__).joinpath(name).read_text("utf-8")
    found: list[dict[str, Any]] = tomllib.loads(text)[kind]
    return found


# -- releases -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Releases:
    """Releases that the captured broker and the target may be of, oldest first; empty: unknown.

    leaves_zookeeper: the captured broker has ZooKeeper, and the target has KRaft. Only a broker
    with ZooKeeper offers UpdateMetadata. offered: by the target.
    """

    captured: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    leaves_zookeeper: bool = False
    offered: Ranges = field(default_factory=dict)

    @classmethod
    def between(cls, captured: Ranges, target: Ranges) -> Releases:
        """By the versions that the captured broker, or a reference, and the target offer."""
        has_zookeeper = [ApiKey.UPDATE_METADATA in ranges for ranges in (captured, target)]
        return cls(
            tuple(releases_offering(captured)),
            tuple(releases_offering(target)),
            leaves_zookeeper=has_zookeeper == [True, False],
            offered=target,
        )

    @property
    def then(self) -> str:
        return _minor(self.captured) + " with ZooKeeper" * self.leaves_zookeeper

    @property
    def now(self) -> str:
        return _minor(self.target)

    @property
    def differ(self) -> bool:
        return bool(_minor(self.captured) and self.now) and self.then != self.now


def _minor(releases: tuple[str, ...]) -> str:
    """``3.9``, or ``4.1 or 4.2`` where these offer the same; "" for neither."""
    minors = dict.fromkeys(each.rsplit(".", 1)[0] for each in releases)
    return " or ".join(minors) if len(minors) <= 2 else ""


def tolerate_changes(releases: Releases, outcomes: Iterable[Outcome]) -> None:
    """Tolerate the differences that `release_changes.toml` lists: by the rule `RULE`, with the
    reason as a note."""
    if releases.differ:
        tolerate(outcomes, partial(_with_rule, releases))


def _with_rule(releases: Releases, api: str, one: Difference) -> Difference:
    if one.place.startswith("api_keys[]") and _is_of_release(releases, one):
        return replace(one, rule=RULE, note="versions of each release")
    then, now = (
        [release_number(each) for each in of] for of in (releases.captured, releases.target)
    )
    is_downgrade = then[0] > now[-1]
    first, last = (now[0], then[-1]) if is_downgrade else (then[0], now[-1])
    for each in changes():
        is_between = any(first < since <= last for since in each.since)
        is_due = is_between or (not each.since and releases.leaves_zookeeper)
        if is_due and each.fits(api, one, is_downgrade=is_downgrade):
            return replace(one, rule=RULE, note=each.text + f" ({each.kip})" * bool(each.kip))
    return one


def _is_of_release(releases: Releases, one: Difference) -> bool:
    """Return whether the versions of an API are those of the target's release."""
    key = catalog.api(one.keys[0]).key
    is_spoken = any(key in spoken_versions(release) for release in releases.target)
    if one.answered is ABSENT:
        is_of_zookeeper = releases.leaves_zookeeper and key in INTER_BROKER_APIS
        return is_of_zookeeper or not is_spoken
    versions = releases.offered.get(key, ())
    return bool(versions) and (is_spoken if one.captured is ABSENT else one.answered in versions)


# -- kinds ----------------------------------------------------------------------------------------

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
            if each.fits(api_name, one) and (self.releases.differ or not each.releases)
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
        asked = outcome.step.exchange
        speaking = releases_accepting(asked.api_key, asked.api_version)
        if one.place == "api_version" and speaking:
            ends = dict.fromkeys(each.rsplit(".", 1)[0] for each in (speaking[0], speaking[-1]))
            yield f"v{asked.api_version} is spoken by Kafka {' to '.join(ends)}, of those known"
        if outcome.earlier and one.place.endswith("error_code"):
            took_s = (outcome.answered_ns - outcome.earlier[0].sent_ns) / 1e9
            yield f"still so after {len(outcome.earlier) + 1} tries in {took_s:.1f} s"

    def may_follow(self, outcome: Outcome) -> bool:
        """Return whether all differences of an answer may follow from an earlier one."""
        api, found = outcome.step.api_name, outcome.judgement.differences
        return all(one.rule or self.cause(api, one).follows for one in found)

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
class Kind:
    """Differences of one API at one place, of one config, or of one pair of errors.

    rank: how much they would hurt, 0 most. notes: lines for people. found: each difference with its
    step. followers: (API, error or field) -> exchanges that follow from one of these.
    """

    api_name: str
    rank: int
    notes: list[str]
    found: list[tuple[int, Difference]] = field(default_factory=list)
    followers: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def first(self) -> Difference:
        return self.found[0][1]


def _key(api_name: str, one: Difference) -> tuple[str, ...]:
    """What differences of one kind have in common. A change by a release is one, whatever resource
    or API has it, and whatever config is new or gone; another default is one for each config."""
    if one.rule == RULE:
        is_config = bool(one.keys) and "configs[]" in one.place
        where = one.place.rpartition(".")[2] if is_config else one.place.partition("[]")[0]
        return where, one.keys[-1] if where == "value" else "", one.note
    name = ""
    if any(part in one.place for part in _NAMED) and one.keys:
        name = one.keys[0] if one.place.startswith("api_keys") else one.keys[-1]
    values = (str(one.captured), str(one.answered)) if one.place.endswith("error_code") else ()
    return api_name, one.place, name, one.rule, *values


def kinds_of(
    outcomes: Iterable[Outcome], explainer: Explainer | None = None, *, tolerated: bool = False
) -> list[Kind]:
    """The kinds of the differences of judged outcomes, in the order of their first."""
    kinds: dict[tuple[str, ...], Kind] = {}
    for outcome in outcomes:
        name, number = outcome.step.api_name, outcome.step.number
        for one in outcome.judgement.differences:
            if bool(one.rule) is tolerated:
                key = _key(name, one)
                if key not in kinds:
                    notes = [] if explainer is None else [*explainer.notes(outcome, one)]
                    kinds[key] = Kind(name, _rank(outcome, one), notes)
                kinds[key].found.append((number, one))
    return list(kinds.values())


def find_kinds(
    outcomes: Sequence[Outcome], explainer: Explainer
) -> tuple[list[Kind], dict[int, int]]:
    """The kinds of a run, and by step the step that it follows. outcomes: of all steps."""
    roots = find_roots(outcomes, explainer.may_follow)
    kinds = kinds_of((each for each in outcomes if each.step.number not in roots), explainer)
    kinds.sort(key=lambda kind: (kind.rank, kind.found[0][0]))
    of_step = {number: kind for kind in reversed(kinds) for number, _ in kind.found}
    for number, root in roots.items():
        outcome = outcomes[number]
        of_step[root].followers[outcome.step.api_name, _word(outcome)] += 1
    return kinds, roots


def _rank(outcome: Outcome, one: Difference) -> int:
    """How much a difference would hurt: 0 most. Refused writes, records, groups and commits,
    topics and other error codes, configs, other answers, versions."""
    step, is_code = outcome.step, one.place.endswith("error_code")
    if is_code and step.step_class in (model.PRODUCE, model.TRANSACTIONS):
        return 0
    if "records" in one.place or one.place.endswith("base_offset"):
        return 1
    if step.step_class == model.GROUPS or step.exchange.api_key == ApiKey.OFFSET_FETCH:
        return 2
    is_of_topics = step.exchange.api_key in (ApiKey.METADATA, ApiKey.CREATE_TOPICS)
    if is_code or (is_of_topics and "configs" not in one.place):
        return 3
    if "configs[]" in one.place:
        return _CONFIG
    return 6 if one.place.startswith("api_") else _OTHER_VALUE


def _explains(outcome: Outcome, one: Difference) -> bool:
    """Return whether later differences may follow from it: not from a config or another value."""
    return not one.rule and _rank(outcome, one) not in (_CONFIG, _OTHER_VALUE)


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
    outcomes: Iterable[Outcome], may_follow: Callable[[Outcome], bool]
) -> dict[int, int]:
    """The step of the first difference, for each step that follows it: its answer came later. A
    difference of one partition does not cover other partitions of its topic; one of a topic covers
    all of them."""
    roots: dict[int, int] = {}
    diverged: dict[Resource, int] = {}
    for outcome in sorted(outcomes, key=lambda each: max(each.sent_ns, each.answered_ns)):
        if outcome.judgement.verdict not in (Verdict.DIFFERENT, Verdict.ERROR):
            continue
        step = outcome.step
        own, all_named = _resources(resource for resource, _ in step.accesses)
        root = min((diverged[each] for each in all_named if each in diverged), default=-1)
        if root >= 0 and may_follow(outcome):
            roots[step.number] = root
        elif any(_explains(outcome, each) for each in outcome.judgement.differences):
            root = step.number
        else:
            continue
        for resource in own:
            diverged.setdefault(resource, root)
    return roots


def _resources(touched: Iterable[Resource]) -> tuple[set[Resource], set[Resource]]:
    """The resources that a difference is about, and those with the topics that contain them."""
    named = {("group", each[1]) if each[0] in _GROUP_PARTS else each for each in touched}
    named = {each for each in named if each[0] in ("topic", "log", "group", "transactional-id")}
    topics = {("topic", each[1]) for each in named if each[0] == "log"}
    return named - topics, named | topics
