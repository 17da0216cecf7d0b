"""Values that differ between control runs: noise of the reference itself.

Control runs send the same workload to the same cluster several times. A field of an API whose value
differs between two of them differs by itself, so a difference there proves nothing. A noisy field
allows no value at all:

- a number may be as far from the reference's as two control runs are from each other at most
- a text has to be one that a control run has in that field; if no two control runs ever agree, as
  for random ids, any text will do, but not null, an empty one or a missing element

Error codes, offsets and records are never noise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from kdissect.replay.fields import told
from kdissect.replay.model import ABSENT, Difference, Outcome

RULE = "control-runs"  # tolerates noise
_EVIDENCE = ("error_code", "offset", "record", "watermark", "aborted_transactions")
_NOTHING = (None, "", b"", ABSENT)

FieldPlace = tuple[str, str]  # API, place without keys


@dataclass(slots=True)
class NoisyField:
    """A field whose values differ between control runs, in how many places. spread: the largest
    distance of two numbers. values: all texts."""

    count: int = 0
    spread: float = 0.0
    values: set[str] = field(default_factory=set)

    def add(self, one: Difference) -> None:
        self.count += 1
        self.values |= {told(one.captured), told(one.answered)}
        if _are_numbers(one):
            self.spread = max(self.spread, abs(one.answered - one.captured))

    def allows(self, one: Difference) -> bool:
        if _are_numbers(one):
            return bool(abs(one.answered - one.captured) <= self.spread)
        is_random = len(self.values) == 2 * self.count
        return told(one.answered) in self.values or (is_random and one.answered not in _NOTHING)


class Noise:
    """The noisy fields of control runs."""

    def __init__(self) -> None:
        self.fields: dict[FieldPlace, NoisyField] = {}

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Add the differences of a control run that was judged by another one."""
        for outcome in outcomes:
            for one in outcome.judgement.differences:
                if not one.rule:
                    place = outcome.step.api_name, one.place
                    self.fields.setdefault(place, NoisyField()).add(one)

    def excused(self, api_name: str, one: Difference) -> Difference:
        """The difference, tolerated if it is noise."""
        noisy = self.fields.get((api_name, one.place))
        if noisy is None or is_evidence(one.place) or not noisy.allows(one):
            return one
        note = f"control runs differ from each other here, in {noisy.count} places"
        return replace(one, rule=RULE, note=note)


def is_evidence(place: str) -> bool:
    """Return whether differences at a place count although control runs differ there."""
    return any(word in place for word in _EVIDENCE)


def _are_numbers(one: Difference) -> bool:
    values: tuple[Any, Any] = one.captured, one.answered
    return all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values)
