"""Changes that a Kafka release makes by design: told once, apart from findings.

The releases of the captured broker and of the target are known by the API versions that they offer,
and so is the way from ZooKeeper to KRaft, which is a change of its own at any release.
`release_changes.toml` lists what the releases change: configs, defaults, features, errors. The
versions of an API follow from the releases themselves. A difference that is not in the list stays a
finding, and so does another value of a config.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from kdissect.protocol import catalog
from kdissect.protocol.api_keys import INTER_BROKER_APIS, ApiKey
from kdissect.protocol.releases import (
    first_release_with,
    last_release_with,
    release_number,
    releases_offering,
    spoken_versions,
)
from kdissect.replay.comparison.causes import Cause, changes
from kdissect.replay.model import ABSENT, Difference, Outcome, Step, Workload
from kdissect.replay.workload.messages import entries, response_of

RULE = "release"  # tolerates what a release changes
Ranges = Mapping[int, tuple[int, int]]


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


@dataclass(frozen=True)
class ReleaseDifferences:
    """Differences between two releases. offered: API key -> versions of the target."""

    releases: Releases
    offered: Ranges

    def allow(self, outcomes: Iterable[Outcome]) -> None:
        """Give the rule `RULE` to differences that are in the list, with their reason as a note."""
        if not self.releases.differ:
            return
        for outcome in outcomes:
            allowed = partial(self._allowed, outcome.step)
            outcome.judgement = outcome.judgement.allowing(allowed)

    def _allowed(self, step: Step, one: Difference) -> Difference:
        if one.place.startswith("api_keys[]") and self._is_of_release(one):
            return replace(one, rule=RULE, note="versions of each release")
        change = self._change(step.api_name, one)
        if change is None:
            return one
        note = f"{change.text} ({change.kip})" if change.kip else change.text
        return replace(one, rule=RULE, note=note)

    def _change(self, api: str, one: Difference) -> Cause | None:
        then, now = (
            [release_number(each) for each in releases]
            for releases in (self.releases.captured, self.releases.target)
        )
        is_downgrade = then[0] > now[-1]
        first, last = (now[0], then[-1]) if is_downgrade else (then[0], now[-1])
        return next(
            (each for each in changes()
             if (first < each.since <= last if each.since else self.releases.leaves_zookeeper)
             and each.fits(api, one, is_downgrade=is_downgrade)),
            None,
        )  # fmt: skip

    def _is_of_release(self, one: Difference) -> bool:
        """Return whether the versions of an API are those of the target's release."""
        key = catalog.api(one.keys[0]).key
        spoken = [spoken_versions(release) for release in self.releases.target]
        if one.answered is ABSENT:
            is_of_zookeeper = self.releases.leaves_zookeeper and key in INTER_BROKER_APIS
            return is_of_zookeeper or not any(key in each for each in spoken)
        if one.captured is ABSENT:
            return key in self.offered and any(key in each for each in spoken)
        return key in self.offered and one.answered in self.offered[key]
