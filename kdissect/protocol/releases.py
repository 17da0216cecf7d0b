"""Which versions of which APIs each Kafka release takes: the facts behind `readiness`.

``tools/release_facts.py`` writes them to ``releases.kdef`` beside this module, from the releases'
own code: what its brokers take is what its Java clients speak too. It names the releases looked at,
oldest first, and then for each API from which release on it has which versions::

    release 2.4.1
    release 4.0.0

    api 0 Produce
      2.4.1 0-8
      4.0.0 3-12

    api 4 LeaderAndIsr
      2.4.1 0-4
      4.0.0 none

A release not listed under an API takes what the one before it takes; before the first line an API
does not exist. Versions that a release holds as drafts are not taken. Brokers and controllers are
not told apart, nor ZooKeeper and KRaft mode: what any of them takes counts.

A broker's own answer to ApiVersions says more than it takes in one place: from 4.0 on it names
Produce 0 and up, for clients that would otherwise not compress, and refuses 0 to 2 all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from kdissect.errors import DefinitionError
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import VersionRange

FACTS = Path(__file__).parent / "releases.kdef"
FIRST_TARGET = (2, 4)  # older releases are there for what their clients speak


@dataclass
class ReleaseFacts:
    """releases: oldest first. spoken: API key to release to its versions, None for not at all."""

    releases: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    spoken: dict[int, dict[str, VersionRange | None]] = field(default_factory=dict)


def release_number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def parse_facts(text: str) -> ReleaseFacts:
    """The facts in the text; raises DefinitionError with the line that is wrong."""
    facts = ReleaseFacts()
    changes: dict[int, dict[str, VersionRange | None]] = {}
    current: dict[str, VersionRange | None] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        place = f"releases.kdef:{number}"
        if not line or line.startswith("#"):
            continue
        if found := re.fullmatch(r"release (\d+(?:\.\d+){2,3})", line):
            facts.releases.append(found[1])
        elif found := re.fullmatch(r"api (\d+) (\w+)", line):
            current = changes.setdefault(int(found[1]), {})
            facts.names[int(found[1])] = found[2]
        elif found := re.fullmatch(r"  (\d+(?:\.\d+){2,3}) (?:(\d+)-(\d+)|none)", line):
            if current is None or found[1] not in facts.releases:
                raise DefinitionError("a release that is not listed, or no API above", place)
            current[found[1]] = (
                None if found[2] is None else VersionRange(int(found[2]), int(found[3]))
            )
        else:
            raise DefinitionError(f"not understood: {line!r}", place)
    for key, by_release in changes.items():
        versions: VersionRange | None = None
        facts.spoken[key] = {}
        for release in facts.releases:
            versions = by_release.get(release, versions)
            if release in by_release:
                versions = by_release[release]
            facts.spoken[key][release] = versions
    return facts


@cache
def facts() -> ReleaseFacts:
    """The packaged facts."""
    return parse_facts(FACTS.read_text(encoding="utf-8"))


def releases() -> list[str]:
    """The releases that are known, oldest first."""
    return list(facts().releases)


def targets() -> list[str]:
    """Those that `find_release` knows."""
    return [release for release in releases() if release_number(release) >= FIRST_TARGET]


def find_release(target: str) -> str:
    """The known release that ``4.0``, ``v4.0.0`` or ``4.0.1`` means.

    A minor alone means its newest patch; a patch that was not looked at means the newest one before
    it, since patches hardly ever change what is spoken. Raises ValueError for an unknown minor.
    """
    found = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?", target.strip())
    known = [release_number(release) for release in targets()]
    minors = [number for number in known if found and number[:2] == (int(found[1]), int(found[2]))]
    if not found or not minors:
        first, last = (".".join(map(str, number[:2])) for number in (known[0], known[-1]))
        raise ValueError(f"release {target!r} is not known; known are {first} to {last}")
    wanted = int(found[3]) if found[3] else minors[-1][2]
    patch = max((number[2] for number in minors if number[2] <= wanted), default=minors[0][2])
    return f"{minors[0][0]}.{minors[0][1]}.{patch}"


def spoken_versions(release: str) -> dict[int, VersionRange]:
    """API key to the versions that a known release takes; other APIs are not there."""
    return {
        key: versions
        for key, by_release in facts().spoken.items()
        if (versions := by_release.get(release)) is not None
    }


def releases_offering(ranges: Mapping[int, tuple[int, int]]) -> list[str]:
    """Releases whose brokers may answer ApiVersions so: API key to first and last version.

    Oldest first; none for a broker of another make, or a release that is not known. APIs that the
    answer leaves out tell nothing: listeners and features decide about them. Of Produce only the
    last version does (see above).
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
    """api_key -> versions that a broker takes of those that it offers: of Produce, none that no
    release that offers just this takes."""
    found = dict(offered)
    spoken = [facts().spoken[ApiKey.PRODUCE][release] for release in releases_offering(offered)]
    firsts = [versions.first for versions in spoken if versions is not None]
    if firsts and ApiKey.PRODUCE in found:
        first, last = found[ApiKey.PRODUCE]
        found[ApiKey.PRODUCE] = max(first, min(firsts)), last
    return found


def first_release_with(api_key: int, api_version: int) -> str | None:
    """The oldest known release that takes a version; None for none of them."""
    return next(
        (
            release
            for release, versions in facts().spoken.get(api_key, {}).items()
            if versions is not None and versions.first <= api_version <= versions.last
        ),
        None,
    )


def last_release_with(api_key: int, api_version: int) -> str | None:
    """The newest known release that takes a version; None for none of them."""
    found = [
        release
        for release, versions in facts().spoken.get(api_key, {}).items()
        if versions is not None and versions.first <= api_version <= versions.last
    ]
    return found[-1] if found else None
