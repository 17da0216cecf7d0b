"""What is known about differences, by place and values: likely causes, and changes of releases.

`causes.toml` has words beside a difference, with the settings of the target that decide it. A cause
also says whether a difference may follow from an earlier one on the same topic, partition, group or
transaction (`findings`).

`release_changes.toml` has what a Kafka release changes by design: configs, defaults, features,
errors. Such a difference is told once, apart from findings; another value of a config stays a
finding. The releases of the captured broker and of the target are known by the API versions that
they offer, and so is the way from ZooKeeper to KRaft, which is a change of its own at any release.
The versions of an API follow from the releases themselves.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from typing import Any

from kdissect.protocol import catalog
from kdissect.protocol.api_keys import INTER_BROKER_APIS, ApiKey
from kdissect.protocol.releases import (
    first_release_with,
    last_release_with,
    release_number,
    releases_offering,
    spoken_versions,
)
from kdissect.replay.fields import Match, told
from kdissect.replay.model import ABSENT, Difference, Outcome, Step, Workload
from kdissect.replay.workload.messages import entries, response_of

RULE = "release"  # tolerates what a release changes
Ranges = Mapping[int, tuple[int, int]]


# -- the tables -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause(Match):
    """A row of a table, which explains the fields. since: releases, empty for a change of KRaft."""

    text: str
    keys: frozenset[str] = frozenset()
    settings: tuple[str, ...] = ()
    follows: bool = False
    needs_releases: bool = False
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
    return tuple(map(_cause, _rows("causes.toml", "cause")))


@cache
def changes() -> tuple[Cause, ...]:
    """The changes of `release_changes.toml`, in order."""
    found = []
    for row in _rows("release_changes.toml", "change"):
        for name, side in (("added", "captured"), ("removed", "answered")):
            if name in row:
                row |= {"path": "configs[]", "keys": row[name], side: ["absent"]}
        for config, (then, *now) in row.pop("defaults", {}).items():
            value = {"path": "*.configs[].value", "captured": [then], "answered": now}
            found.append(_cause({**row, **value, "keys": [config]}))
        if "path" in row:
            found.append(_cause(row))
    return tuple(found)


def _rows(name: str, rows: str) -> list[dict[str, Any]]:
    text = files(__package__).joinpath(name).read_text("utf-8")
    found: list[dict[str, Any]] = tomllib.loads(text)[rows]
    return found


def _cause(row: dict[str, Any]) -> Cause:
    path, since = row.get("path", "*error_code"), row.get("since", ())
    names = ("apis", "keys", "captured", "answered")
    values = {name: frozenset(map(told, row.get(name, ()))) for name in names}
    return Cause(
        paths=(path,) if isinstance(path, str) else tuple(path),
        text=row["text"],
        settings=tuple(row.get("settings", ())),
        follows=row.get("follows", False),
        needs_releases=row.get("releases", False),
        since=tuple(map(release_number, [since] if isinstance(since, str) else since)),
        kip=row.get("kip", ""),
        **values,
    )


# -- releases -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Releases:
    """Releases that the captured broker and the target may be of, oldest first; empty: unknown.

    leaves_zookeeper: the captured broker has ZooKeeper, and the target has KRaft. Only a broker
    with ZooKeeper offers UpdateMetadata.
    """

    captured: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    leaves_zookeeper: bool = False

    @classmethod
    def between(cls, captured: Ranges, target: Ranges) -> Releases:
        """By the versions that the captured broker, or a reference, and the target offer."""
        has_zookeeper = [ApiKey.UPDATE_METADATA in ranges for ranges in (captured, target)]
        return cls(
            tuple(releases_offering(captured)),
            tuple(releases_offering(target)),
            leaves_zookeeper=has_zookeeper == [True, False],
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

    def speaking(self, step: Step) -> Iterator[str]:
        """The releases that speak the version of a request, for people."""
        key, version = step.exchange.api_key, step.exchange.api_version
        first, last = first_release_with(key, version), last_release_with(key, version)
        if first is not None and last is not None:
            minors = dict.fromkeys(each.rsplit(".", 1)[0] for each in (first, last))
            yield f"v{version} is spoken by Kafka {' to '.join(minors)}, of those known"


def _minor(releases: tuple[str, ...]) -> str:
    """``3.9``, or ``4.1 or 4.2`` where these offer the same; "" for neither."""
    minors = dict.fromkeys(each.rsplit(".", 1)[0] for each in releases)
    return " or ".join(minors) if len(minors) <= 2 else ""


def captured_ranges(workload: Workload) -> Ranges:
    """API key -> (first, last) version that a captured broker offered clients; the longest list."""
    ranges: dict[int, tuple[int, int]] = {}
    for exchange in workload.exchanges():
        if exchange.api_key != ApiKey.API_VERSIONS or exchange.internal_reason:
            continue
        response = response_of(exchange)
        offered = entries(response.body.get("api_keys")) if response is not None else []
        if len(offered) > len(ranges):
            ranges = {
                each["api_key"]: (each["min_version"], each["max_version"]) for each in offered
            }
    return ranges


def allow_changes(releases: Releases, offered: Ranges, outcomes: Iterable[Outcome]) -> None:
    """Give the rule `RULE` to differences that are in the list, with their reason as a note.

    offered: API key -> versions of the target.
    """
    if not releases.differ:
        return
    for outcome in outcomes:
        allowed = partial(_allowed, releases, offered, outcome.step.api_name)
        outcome.judgement = outcome.judgement.allowing(allowed)


def _allowed(releases: Releases, offered: Ranges, api: str, one: Difference) -> Difference:
    if one.place.startswith("api_keys[]") and _is_of_release(releases, offered, one):
        return replace(one, rule=RULE, note="versions of each release")
    change = _change(releases, api, one)
    if change is None:
        return one
    note = f"{change.text} ({change.kip})" if change.kip else change.text
    return replace(one, rule=RULE, note=note)


def _change(releases: Releases, api: str, one: Difference) -> Cause | None:
    then, now = (
        [release_number(each) for each in of] for of in (releases.captured, releases.target)
    )
    is_downgrade = then[0] > now[-1]
    first, last = (now[0], then[-1]) if is_downgrade else (then[0], now[-1])
    for each in changes():
        is_between = any(first < since <= last for since in each.since)
        if is_between or (not each.since and releases.leaves_zookeeper):
            if each.fits(api, one, is_downgrade=is_downgrade):
                return each
    return None


def _is_of_release(releases: Releases, offered: Ranges, one: Difference) -> bool:
    """Return whether the versions of an API are those of the target's release."""
    key = catalog.api(one.keys[0]).key
    is_spoken = any(key in spoken_versions(release) for release in releases.target)
    if one.answered is ABSENT:
        is_of_zookeeper = releases.leaves_zookeeper and key in INTER_BROKER_APIS
        return is_of_zookeeper or not is_spoken
    if one.captured is ABSENT:
        return key in offered and is_spoken
    return key in offered and one.answered in offered[key]
