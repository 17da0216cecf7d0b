"""Differences that follow from the target being another Kafka release: no findings.

These are version ranges and features in ApiVersions, and configs that only one release has. They
get the rule `other-release`. Both releases must be known by the versions that their brokers offer,
and a range has to be the one that the target's release speaks. An API that is missing although that
release speaks it stays a finding, and so does another value of a config.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from kdissect.protocol.releases import releases_offering, spoken_versions
from kdissect.replay.comparison.grouping import plain_path
from kdissect.replay.comparison.tree_diff import ABSENT
from kdissect.replay.model import Difference, Outcome, Step
from kdissect.replay.workload.messages import entries, response_of
from kdissect.text import plural

RULE = "other-release"
_NAMES_MAX = 12  # of APIs and configs in a note
_INDEX = re.compile(r"^api_keys\[(\d+)\]")
_KEY = re.compile(r"^\{api_key=(-?\d+), min_version=(-?\d+), max_version=(-?\d+)")
_NAME = re.compile(r"name=([^,}]+)")

Ranges = Mapping[int, tuple[int, int]]


class OtherRelease:
    """Expected responses of brokers of the target's release. offered: api_key -> versions."""

    def __init__(self, offered: Ranges) -> None:
        self._offered = offered
        self._spoken = [spoken_versions(release) for release in releases_offering(offered)]

    def allows(self, step: Step, one: Difference) -> bool:
        """Return whether a difference is between the releases, as far as it can be checked."""
        path = plain_path(one.path)
        if path == "api_keys[]":
            return self._allows_api(one)
        if path in ("api_keys[].min_version", "api_keys[].max_version"):
            key = _captured_key(step, one.path)
            return key in self._offered and one.answered == str(
                self._offered[key][path.endswith("max_version")]
            )
        return True

    def _allows_api(self, one: Difference) -> bool:
        is_gone = one.answered == ABSENT
        found = _KEY.match(one.captured if is_gone else one.answered)
        if found is None:
            return False
        key, first, last = (int(text) for text in found.groups())
        if is_gone:
            return not any(key in spoken for spoken in self._spoken)
        return self._offered.get(key) == (first, last)


def _captured_key(step: Step, path: str) -> int:
    """The API of an entry of a captured ApiVersions response; -1 unknown."""
    response, index = response_of(step.exchange), _INDEX.match(path)
    listed = entries(response.body.get("api_keys")) if response is not None else []
    place = int(index[1]) if index is not None else len(listed)
    return listed[place]["api_key"] if place < len(listed) else -1


def release_note(outcomes: Iterable[Outcome], then: str, now: str) -> list[str]:
    """One line about all differences of the rule, with the names of APIs and configs."""
    kinds: Counter[str] = Counter()
    names: dict[str, None] = {}
    for outcome in outcomes:
        for each in outcome.judgement.differences if outcome.judgement is not None else ():
            if each.rule == RULE:
                kinds[f"{outcome.step.api_name} {plain_path(each.path)}"] += 1
                texts = (_NAME.search(text) for text in (each.captured, each.answered))
                names |= {found[1]: None for found in texts if found is not None}
    if not kinds:
        return []
    listed = ", ".join(f"{name} {count}" for name, count in kinds.most_common(_NAMES_MAX))
    said = ", ".join(list(names)[:_NAMES_MAX])
    more = f" and {len(names) - _NAMES_MAX} more" * (len(names) > _NAMES_MAX)
    return [
        f"{plural(kinds.total(), 'difference')} between Kafka {then} and Kafka {now} "
        f"(rule {RULE}): {listed}" + (f"; {said}{more}" if said else "")
    ]
