"""Fields that differ between control runs: noise of the reference itself.

Control runs send the same workload to the same cluster several times. A field of an API whose value
differs between two of them differs by itself, so a difference there proves nothing. Indices are
left out of its path: the field is noisy in every element.

A noisy field allows no value at all:

- a number may be as far from the control runs' values of its exchange as they are from each other,
  in the exchange where they are farthest apart
- a text has to be a value that a control run has in that field; if the control runs never agree
  there, as for random ids, any text will do, but not null, an empty one or a missing element

Error codes, offsets, record data and contradictions within a run are never noise.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kdissect.replay.comparison.comparator import IN_RUN
from kdissect.replay.comparison.grouping import plain_path
from kdissect.replay.model import Difference, Judgement, Verdict
from kdissect.replay.workload.messages import api_name
from kdissect.text import plural

BY_CONTROL_RUNS = "control-runs"  # the rule that tolerates noise
_EVIDENCE = ("offset", "record", "watermark", "aborted_transactions")
_NOTHING = frozenset({"", "null", "[]", "absent"})
_NUMBER = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?")
_COMPARED = frozenset({Verdict.SAME, Verdict.TOLERATED, Verdict.DIFFERENT})

FieldPath = tuple[str, str]  # API, path without indices
Judged = Mapping[Any, Judgement]  # by exchange: connection, index there, api_key, api_version


@dataclass(slots=True)
class NoisyField:
    """A field whose values differ between control runs.

    exchanges: how many show it. spread: the largest distance of two numbers in one exchange.
    values: all texts. is_random: no two control runs agree in any of these exchanges.
    """

    api_name: str
    path: str
    exchanges: int = 0
    spread: float = 0.0
    values: set[str] = field(default_factory=set)
    is_random: bool = True

    @property
    def is_evidence(self) -> bool:
        """Return whether differences in this field count although control runs differ there."""
        name = self.path.rpartition(".")[2]
        return name.endswith("error_code") or any(word in self.path for word in _EVIDENCE)

    def add(self, values: Sequence[str]) -> None:
        """Note the different values of one exchange, by control run."""
        self.exchanges += 1
        self.values.update(values)
        self.is_random = self.is_random and len(set(values)) == len(values)
        numbers = [number for number in map(_number, values) if number is not None]
        if len(numbers) == len(values):
            self.spread = max(self.spread, max(numbers) - min(numbers))

    def allows(self, value: str, others: Sequence[str]) -> bool:
        """Return whether a value is noise. others: the control runs' values in the same place."""
        if self.is_evidence:
            return False
        number, numbers = _number(value), [_number(each) for each in others]
        if number is not None and None not in numbers:
            return any(abs(number - each) <= self.spread for each in numbers if each is not None)
        return value in self.values or (self.is_random and value not in _NOTHING)


class Noise:
    """The noisy fields of control runs. Each run has its judgements by exchange, all in the terms
    of the capture."""

    def __init__(self, runs: Sequence[Judged]) -> None:
        self._runs = runs
        self._fields: dict[FieldPath, NoisyField] = {}
        for key in runs[0] if runs else ():
            for path, values in self._different(key):
                name = api_name(key[2])
                place = name, plain_path(path)
                self._fields.setdefault(place, NoisyField(*place)).add(values)

    @property
    def fields(self) -> list[NoisyField]:
        """Those that differ in most exchanges first."""
        return sorted(self._fields.values(), key=lambda each: (-each.exchanges, each.path))

    def _different(self, key: Hashable) -> Iterator[tuple[str, list[str]]]:
        """(path, value by run) if the runs' answers to an exchange differ."""
        judgements = [run[key] for run in self._runs if key in run]
        if len(judgements) < 2 or any(each.verdict not in _COMPARED for each in judgements):
            return
        for path in dict.fromkeys(
            one.path for each in judgements for one in each.differences if not one.rule
        ):
            values = _values(judgements, path)
            if len(set(values)) > 1:
                yield path, values

    def excuse(self, key: tuple[int, int, int, int], judgement: Judgement) -> Judgement:
        """The judgement with the noise in it tolerated."""
        if judgement.verdict is not Verdict.DIFFERENT or not self._fields:
            return judgement
        others = [run[key] for run in self._runs if key in run]
        differences = [
            self._excused(api_name(key[2]), each, others) for each in judgement.differences
        ]
        if differences == judgement.differences:
            return judgement
        is_excused = all(each.rule for each in differences)
        verdict = Verdict.TOLERATED if is_excused else Verdict.DIFFERENT
        reason = "" if is_excused else judgement.reason
        return replace(judgement, verdict=verdict, differences=differences, reason=reason)

    def _excused(self, api: str, one: Difference, others: Sequence[Judgement]) -> Difference:
        noisy = self._fields.get((api, plain_path(one.path)))
        if one.rule or noisy is None or IN_RUN in one.note:
            return one
        values = _values(others, one.path, one.captured) or [one.captured]
        if not noisy.allows(one.answered, values):
            return one
        note = f"control runs differ from each other here, in {plural(noisy.exchanges, 'exchange')}"
        return replace(one, rule=BY_CONTROL_RUNS, note=note)

    def notes(self) -> list[str]:
        """A line for each noisy field, for people."""
        return [
            f"control runs differ from each other in {each.api_name} {each.path}, in "
            f"{plural(each.exchanges, 'exchange')}: "
            + ("never excused" if each.is_evidence else "excused")
            for each in self.fields
        ]


def _values(judgements: Sequence[Judgement], path: str, captured: str = "") -> list[str]:
    """The value at a path by run; the captured one for a run without a difference there."""
    found: dict[int, str] = {}
    for number, judgement in enumerate(judgements):
        for each in judgement.differences:
            if each.path == path:
                found[number], captured = each.answered, each.captured
    return [found.get(number, captured) for number in range(len(judgements))]


def _number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None
