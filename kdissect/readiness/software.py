"""Versions that a client's software supports: from its name, or for Java clients from its
behaviour."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import VersionRange
from kdissect.protocol.releases import release_number, releases, spoken_versions
from kdissect.sql.requests import HANDSHAKE_APIS, JAVA
from kdissect.tables.schemas import Row

FIRST_NEGOTIATING_JAVA = (0, 10, 2)  # KIP-97: older Java clients always send their newest versions
# KIP-896: this release of librdkafka is known to support what Kafka 4.0 accepts.
_LIBRDKAFKA = re.compile(r"rdkafka\W*v?(\d+)\.(\d+)\.(\d+)", re.IGNORECASE)
_LIBRDKAFKA_READY = (1, 8, 2)


@dataclass
class Software:
    """Name and release that a client sends in ApiVersions (KIP-511); None if it sent none."""

    name: str | None
    release: str | None

    def __str__(self) -> str:
        return f"{self.name} {self.release}"

    def spoken(self) -> dict[int, VersionRange] | None:
        """API key -> versions that it supports, known for Java clients; None for others."""
        number = re.match(r"\d+\.\d+(\.\d+)*", self.release or "")
        if self.name != JAVA or number is None:
            return None
        wanted = release_number(number[0])
        older = [each for each in releases() if release_number(each) <= wanted]
        same_minor = [each for each in older if release_number(each)[:2] == wanted[:2]]
        if not same_minor and older and older[-1] != releases()[-1]:
            return None
        return spoken_versions(older[-1]) if older else None

    def speaks_enough(self, api_key: int, taken: VersionRange) -> bool | None:
        """Return whether it supports a version that the target accepts; None if unknown."""
        supported = self.spoken()
        if supported is not None:
            own = supported.get(api_key)
            return own is not None and own.last >= taken.first
        # node-rdkafka v2.9.1-librdkafka-v1.4.2: a binding has a version of its own
        if self.name and (matches := _LIBRDKAFKA.findall(str(self))):
            number = tuple(map(int, matches[-1]))
            return True if number >= _LIBRDKAFKA_READY else None
        return None


def java_releases(asked_with: int | None, is_whole: bool, uses: Sequence[Row]) -> list[str]:
    """Releases of Java clients that would choose the versions of a client, oldest first.

    asked_with: highest ApiVersions version that it sent; None if it sent none. is_whole: all its
    connections were captured from their first packet. uses: each with `api_key`, `api_version` and
    `offered_lasts`, the highest versions that its brokers offered; empty if not captured.
    """
    return [each for each in releases() if _fits(each, asked_with, is_whole, uses)]


def _fits(release: str, asked_with: int | None, is_whole: bool, uses: Sequence[Row]) -> bool:
    supported = spoken_versions(release)
    is_negotiating = release_number(release) >= FIRST_NEGOTIATING_JAVA
    if asked_with is not None:
        asks_with = supported.get(ApiKey.API_VERSIONS)
        if not is_negotiating or asks_with is None or asks_with.last != asked_with:
            return False
    elif is_negotiating and is_whole:
        return False
    for use in uses:
        if use["api_key"] in HANDSHAKE_APIS:
            continue
        if use["api_key"] not in supported:
            return False
        newest, api_version = supported[use["api_key"]].last, use["api_version"]
        if not is_negotiating:
            fits = api_version == newest
        elif use["offered_lasts"]:
            fits = api_version in {min(newest, last) for last in use["offered_lasts"]}
        else:
            fits = api_version <= newest
        if not fits:
            return False
    return True


def java_hint(client: Row, needs: dict[int, VersionRange]) -> str:
    """The end of a sentence on Java clients that behave as a client without a known release; "" if
    there are none.

    needs: API key -> versions that the target accepts.
    """
    software = Software(client["software_name"], client["software_version"])
    if software.name not in (None, JAVA) or software.spoken() is not None:
        return ""
    uses = [use for use in client["uses"] if use["is_sure"]]
    same = java_releases(client["asked_with"], client["is_whole"], uses)
    if not same:
        return ""
    ready = [
        release
        for release in same
        if all(
            (spoken := spoken_versions(release).get(key)) is not None and spoken.last >= taken.first
            for key, taken in needs.items()
        )
    ]
    first, last = minor(same[0]), minor(same[-1])
    span = first if first == last else f"{first} to {last}"
    fate = "would break" if not ready else "would not" if ready == same else "may break"
    return f"; the Java clients {span} behave so, and {fate}"


def minor(release: str) -> str:
    """``4.0`` of ``4.0.2``, ``0.10.2`` of ``0.10.2.2``: before 1.0 a minor release had three
    numbers."""
    numbers = release.split(".")
    return ".".join(numbers[: 3 if numbers[0] == "0" else 2])
