"""What a difference means, in words: a likely cause, and the settings of the target behind it.

`causes.toml` has the words by field and values. A cause also says whether a difference may follow
from an earlier one on the same topic, partition, group or transaction (`findings`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kdissect.replay.comparison.releases import Releases
from kdissect.replay.fields import path_pattern, told
from kdissect.replay.model import Difference, Outcome

# Configs of the target that are not Kafka's default: by resource (``topic orders``, ``broker 1``)
Settings = Mapping[str, Mapping[str, str]]
_SETTINGS_MAX = 4


@dataclass(frozen=True, slots=True)
class Cause:
    """One entry of `causes.toml`, which explains the fields."""

    paths: tuple[str, ...]
    text: str
    apis: frozenset[str] = frozenset()
    captured: frozenset[str] = frozenset()
    answered: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    settings: tuple[str, ...] = ()
    follows: bool = False
    needs_releases: bool = False

    def fits(self, api_name: str, one: Difference) -> bool:
        if self.apis and api_name not in self.apis:
            return False
        if self.keys and not self.keys.intersection(one.keys):
            return False
        if self.captured and told(one.captured) not in self.captured:
            return False
        if self.answered and told(one.answered) not in self.answered:
            return False
        return path_pattern(self.paths).fullmatch(one.place) is not None


@cache
def causes() -> tuple[Cause, ...]:
    """The causes of `causes.toml`, in order."""
    text = files(__package__).joinpath("causes.toml").read_text("utf-8")
    return tuple(_cause(row) for row in tomllib.loads(text)["cause"])


def _cause(row: dict[str, Any]) -> Cause:
    path = row["path"]
    values = {
        name: frozenset(map(told, row.get(name, ()))) for name in ("captured", "answered", "keys")
    }
    return Cause(
        (path,) if isinstance(path, str) else tuple(path),
        row["text"],
        frozenset(row.get("apis", ())),
        settings=tuple(row.get("settings", ())),
        follows=row.get("follows", False),
        needs_releases=row.get("releases", False),
        **values,
    )


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
        known: dict[str, None] = {}
        resources = sorted(self.settings, key=lambda each: not each.startswith("topic "))
        for name in names:
            for resource in resources:
                topic = resource.removeprefix("topic ")
                if name not in self.settings[resource] or (topic != resource and topic not in keys):
                    continue
                known[f"{name} = {self.settings[resource][name]}"] = None
                break
        yield from known
