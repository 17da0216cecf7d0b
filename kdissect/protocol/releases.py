"""Versions of each API that each Kafka release accepts: the facts of `readiness`.

``tools/release_facts.py`` writes them to ``releases.toml`` beside this module, from the source code
of the releases: a release's Java clients speak the versions that its brokers accept. The file lists
the releases, oldest first, and then for each API from which release on it has which versions (first
and last, or none)::

    releases = ["2.4.1", "4.0.0"]

    [Produce]
    key = 0
    "2.4.1" = [0, 8]
    "4.0.0" = [3, 12]

    [LeaderAndIsr]
    key = 4
    "2.4.1" = [0, 4]
    "4.0.0" = []

A release that an API does not list accepts the same as the one before it; before its first line the
API does not exist. Draft versions of a release are not accepted. The facts do not distinguish
brokers from controllers, or ZooKeeper from KRaft mode: a version counts if any of them accepts it.

A broker's ApiVersions response lists more than it accepts in one case: from 4.0 on it lists Produce
from 0 on, for clients that would otherwise not compress, but refuses versions 0 to 2.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from kdissect.errors import Error
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import VersionRange

FACTS = Path(__file__).parent / "releases.toml"
FIRST_TARGET = (2, 4)  # older releases are listed only for the versions of their clients


class UnknownRelease(Error, ValueError):
    """A release that the facts do not have."""


@dataclass
class ReleaseFacts:
    """releases: oldest first. spoken: API key -> release -> its versions, None if it lacks the
    API."""

    releases: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    spoken: dict[int, dict[str, VersionRange | None]] = field(default_factory=dict)


def release_number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def parse_facts(text: str) -> ReleaseFacts:
    """Parse the text of the file of facts."""
    declared = tomllib.loads(text)
    known = ReleaseFacts(declared.pop("releases"))
    for name, changes in declared.items():
        key, versions = changes.pop("key"), None
        assert changes.keys() <= set(known.releases), name
        known.names[key], known.spoken[key] = name, {}
        for release in known.releases:
            if release in changes:
                versions = VersionRange(*changes[release]) if changes[release] else None
            known.spoken[key][release] = versions
    return known


@cache
def facts() -> ReleaseFacts:
    """The packaged facts."""
    return parse_facts(FACTS.read_text(encoding="utf-8"))


def releases() -> list[str]:
    """The known releases, oldest first."""
    return list(facts().releases)


def targets() -> list[str]:
    """Releases that `find_release` accepts."""
    return [release for release in releases() if release_number(release) >= FIRST_TARGET]


def find_release(target: str) -> str:
    """The known release for ``4.0``, ``v4.0.0`` or ``4.0.1``.

    A minor release alone means its newest patch. An unknown patch means the newest known one before
    it, because patches hardly ever change versions. Raises UnknownRelease for an unknown minor one.
    """
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?", target.strip())
    known = [release_number(release) for release in targets()]
    minors = [number for number in known if match and number[:2] == (int(match[1]), int(match[2]))]
    if not match or not minors:
        first, last = (".".join(map(str, number[:2])) for number in (known[0], known[-1]))
        raise UnknownRelease(f"release {target!r} is not known; known are {first} to {last}")
    wanted = int(match[3]) if match[3] else minors[-1][2]
    patch = max((number[2] for number in minors if number[2] <= wanted), default=minors[0][2])
    return f"{minors[0][0]}.{minors[0][1]}.{patch}"


def spoken_versions(release: str) -> dict[int, VersionRange]:
    """API key -> versions that a known release accepts; APIs that it lacks are left out."""
    return {
        key: versions
        for key, by_release in facts().spoken.items()
        if (versions := by_release.get(release)) is not None
    }


def releases_offering(ranges: Mapping[int, tuple[int, int]]) -> list[str]:
    """Releases whose brokers may answer ApiVersions with these ranges (API key -> first, last).

    Oldest first; empty for a broker of another vendor or an unknown release. APIs that the response
    leaves out are ignored, because listeners and features decide about them. For Produce only the
    last version is compared; see the module.
    """
    return [
        release
        for release in facts().releases
        if ranges
        and all(
            (versions := facts().spoken.get(key, {}).get(release)) is not None
            and versions.last == last
            and (versions.first == first or key == ApiKey.PRODUCE)
            for key, (first, last) in ranges.items()
        )
    ]


def taken(offered: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """API key -> (first, last) version that a broker accepts, from those that it offers.

    Differs for Produce only: versions that no release with this offer accepts are left out.
    """
    accepted = dict(offered)
    accepted_by_release = [
        facts().spoken[ApiKey.PRODUCE][release] for release in releases_offering(offered)
    ]
    firsts = [versions.first for versions in accepted_by_release if versions is not None]
    if firsts and ApiKey.PRODUCE in accepted:
        first, last = accepted[ApiKey.PRODUCE]
        accepted[ApiKey.PRODUCE] = max(first, min(firsts)), last
    return accepted


def releases_accepting(api_key: int, api_version: int) -> list[str]:
    """The known releases that accept a version, oldest first."""
    return [
        release
        for release, versions in facts().spoken.get(api_key, {}).items()
        if versions is not None and versions.first <= api_version <= versions.last
    ]
