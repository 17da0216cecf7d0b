"""Which versions a client's software speaks: by its name, or as a Java client by its behaviour."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.model import VersionRange
from kdissect.protocol.releases import release_number, releases, spoken_versions

JAVA = "apache-kafka-java"
FIRST_NEGOTIATING_JAVA = (0, 10, 2)  # KIP-97: older Java clients send their newest versions
# Every connection may begin with these. Java sends ApiVersions 0 and, in some releases, its newest.
HANDSHAKE_APIS = frozenset({ApiKey.SASL_HANDSHAKE, ApiKey.API_VERSIONS, ApiKey.SASL_AUTHENTICATE})

# KIP-896: this release of librdkafka was checked to speak what Kafka 4.0 takes.
_LIBRDKAFKA = re.compile(r"rdkafka\W*v?(\d+)\.(\d+)\.(\d+)", re.IGNORECASE)
_LIBRDKAFKA_READY = (1, 8, 2)


@dataclass
class Software:
    """The name and release that a client sends in ApiVersions; None: it sent none."""

    name: str | None
    release: str | None

    def spoken(self) -> dict[int, VersionRange] | None:
        """The versions that it speaks by API key, where that is known: Java clients."""
        number = re.match(r"\d+\.\d+(\.\d+)*", self.release or "")
        if self.name != JAVA or number is None:
            return None
        wanted = release_number(number[0])
        known = [each for each in releases() if release_number(each) <= wanted]
        same_minor = [each for each in known if release_number(each)[:2] == wanted[:2]]
        if not same_minor and known and known[-1] != releases()[-1]:
            return None
        return spoken_versions(known[-1]) if known else None

    def speaks_enough(self, api_key: int, taken: VersionRange) -> bool | None:
        """Whether it speaks a version that the target takes; None: not known."""
        spoken = self.spoken()
        if spoken is not None:
            mine = spoken.get(api_key)
            return mine is not None and mine.last >= taken.first
        title = f"{self.name} {self.release}" if self.name else ""
        if (match := _LIBRDKAFKA.search(title)) is not None:
            number = tuple(int(part) for part in match.groups())
            return True if number >= _LIBRDKAFKA_READY else None
        return None


@dataclass
class Behaviour:
    """How a client without a name chose its versions.

    asked_with: the highest ApiVersions version that it sent; None: it sent none. is_whole: all its
    connections were captured from their first packet. requests: API key, version, and the highest
    versions that its brokers offered (empty: not captured).
    """

    asked_with: int | None
    is_whole: bool
    requests: list[tuple[int, int, Sequence[int]]] = field(default_factory=list)

    def java_releases(self) -> list[str]:
        """The releases of Java clients that behave so, oldest first."""
        return [each for each in releases() if self._fits(each)]

    def _fits(self, release: str) -> bool:
        spoken = spoken_versions(release)
        is_negotiating = release_number(release) >= FIRST_NEGOTIATING_JAVA
        if self.asked_with is not None:
            asks_with = spoken.get(ApiKey.API_VERSIONS)
            if not is_negotiating or asks_with is None or asks_with.last != self.asked_with:
                return False
        elif is_negotiating and self.is_whole:
            return False
        for api_key, api_version, offered in self.requests:
            if api_key in HANDSHAKE_APIS:
                continue
            if api_key not in spoken:
                return False
            newest = spoken[api_key].last
            if not is_negotiating:
                fits = api_version == newest
            elif offered:
                fits = api_version in {min(newest, last) for last in offered}
            else:
                fits = api_version <= newest
            if not fits:
                return False
        return True


def java_hint(behaviour: Behaviour, needs: dict[int, VersionRange]) -> str:
    """What becomes of the Java clients that behave so, as the end of a sentence; or nothing.

    needs: API key to the versions that the target takes.
    """
    same = behaviour.java_releases()
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
    """``4.0`` of ``4.0.2``, ``0.10.2`` of ``0.10.2.2``: until 1.0 a minor had three numbers."""
    numbers = release.split(".")
    return ".".join(numbers[: 3 if numbers[0] == "0" else 2])
