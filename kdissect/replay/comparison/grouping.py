"""Differences of a whole run, grouped: the same one ten thousand times is one line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kdissect.replay.comparison.value_text import dropped_text
from kdissect.replay.model import Difference, Outcome
from kdissect.text import plural

VALUES_MAX = 5  # distinct pairs of values at one place that are shown apart
OTHER_CODE = "beside an error code that is another one"  # a note
_INDEX = re.compile(r"\[[^\]]*\]")
_UNNAMED = re.compile(r"\[(\d+|offset -?\d+)\]")  # elements without a name in the path


@dataclass(slots=True)
class DifferenceGroup:
    """Differences of one API at one place (`path` without indices) with the same values.

    captured, answered: the values, "various" where there are many. rule: what tolerates them, "".
    example: the step's number of the first; example_path: its path with indices. later: by API, the
    exchanges that differ after one of these on the same resource. beside: differences of fields
    that follow from this error code.
    """

    api_name: str
    path: str
    captured: str
    answered: str
    rule: str
    note: str
    count: int = 0
    steps: int = 0
    example: int = -1
    example_path: str = ""
    later: Counter[str] = field(default_factory=Counter)
    beside: int = 0
    _last_step: int = field(default=-1, repr=False)

    def add(self, number: int, difference: Difference) -> None:
        self.count += 1
        if self._last_step != number:
            self.steps += 1
            self._last_step = number
        if self.example < 0:
            self.example, self.example_path = number, difference.path
            self.note = difference.note

    def followers(self) -> str:
        """The fields and exchanges that differ after one of these, for people, or ""."""
        fields = f"with {plural(self.beside, 'difference')} in fields beside it"
        if not self.later:
            return fields if self.beside else ""
        apis = ", ".join(f"{name} {count}" for name, count in self.later.most_common())
        count = plural(self.later.total(), "exchange")
        then = f"then {count} on the same topic, partition, group or transaction: {apis}"
        return f"{fields}, {then}" if self.beside else then


def plain_path(path: str) -> str:
    """``responses[0].partitions[3].error_code`` without its indices."""
    return _INDEX.sub("[]", path)


def dropped_notes(outcomes: Iterable[Outcome]) -> list[str]:
    """A line for each field that requests of one version lack in another, with the values."""
    values_of: dict[tuple[str, int, int, str], Counter[str]] = {}
    for outcome in outcomes:
        exchange = outcome.step.exchange
        for each in outcome.dropped:
            key = (outcome.step.api_name, exchange.api_version, outcome.api_version,
                   plain_path(each.path))  # fmt: skip
            values_of.setdefault(key, Counter())[dropped_text(each)] += 1
    notes = []
    for (name, was, sent, path), values in values_of.items():
        said = ", ".join(f"{count} x {text}" for text, count in values.most_common(VALUES_MAX))
        more = f" and {len(values) - VALUES_MAX} other values" * (len(values) > VALUES_MAX)
        notes.append(
            f"{name} v{was} was sent as v{sent}, which has no {path}; left out: {said}{more}"
        )
    return notes


def retry_notes(outcomes: Iterable[Outcome]) -> list[str]:
    """A line for each reason why requests of an API were sent again."""
    counts: Counter[tuple[str, str]] = Counter()
    for outcome in outcomes:
        for reason in {each.reason for each in outcome.earlier}:
            counts[outcome.step.api_name, reason] += 1
    return [
        f"{plural(count, name + ' request')} sent again: {reason}"
        for (name, reason), count in counts.most_common()
    ]


def group_roots(outcomes: Sequence[Outcome], roots: Mapping[int, int]) -> list[DifferenceGroup]:
    """Findings of exchanges that follow no other one, in the order of their first exchange.

    roots: step -> step of the first divergence (`roots.find_roots`).
    """
    later: dict[int, Counter[str]] = {}
    for outcome in outcomes:
        if outcome.step.number in roots:
            root = roots[outcome.step.number]
            later.setdefault(root, Counter())[outcome.step.api_name] += 1
    first = [outcome for outcome in outcomes if outcome.step.number not in roots]
    groups = [each for each in group_differences(first, later) if not each.rule]
    groups.sort(key=lambda each: each.example)
    return list(_without_fields_beside(groups))


def _without_fields_beside(groups: Sequence[DifferenceGroup]) -> Iterator[DifferenceGroup]:
    """Groups without fields that follow from another error code: their number is in its group."""
    codes: dict[str, DifferenceGroup] = {}
    for group in groups:
        if group.path.endswith("error_code"):
            codes.setdefault(group.api_name, group)
    for group in groups:
        code = codes.get(group.api_name)
        if code is not None and group.note.endswith(OTHER_CODE):
            code.beside += group.count
        else:
            yield group


def group_differences(
    outcomes: Iterable[Outcome], later: Mapping[int, Counter[str]] | None = None
) -> list[DifferenceGroup]:
    """All differences of judged outcomes, those that no rule tolerates first, then by count.

    later: by step, the exchanges of each API that follow it. The step's first group gets them.
    """
    open_later = dict(later or {})
    exact: dict[tuple[str, str, str], dict[tuple[str, str], DifferenceGroup]] = {}
    for outcome in outcomes:
        if outcome.judgement is None:
            continue
        for difference in outcome.judgement.differences:
            name = outcome.step.api_name
            path = _UNNAMED.sub("[]", difference.path)
            by_values = exact.setdefault((name, path, difference.rule), {})
            values = (difference.captured, difference.answered)
            group = by_values.get(values)
            if group is None and len(by_values) > VALUES_MAX:
                values = ("various", "various")
                group = by_values.get(values)
            if group is None:
                group = by_values[values] = DifferenceGroup(
                    name, path, *values, difference.rule, ""
                )
            group.add(outcome.step.number, difference)
            if not difference.rule:
                group.later += open_later.pop(outcome.step.number, Counter())
    groups = [group for by_values in exact.values() for group in _merged(by_values)]
    groups.sort(key=lambda each: (bool(each.rule), -each.count, each.api_name, each.path))
    return groups


def _merged(by_values: dict[tuple[str, str], DifferenceGroup]) -> list[DifferenceGroup]:
    """One line where there are too many values for a line each."""
    groups = list(by_values.values())
    if len(groups) <= VALUES_MAX:
        return groups
    first = min(groups, key=lambda each: each.example)
    whole = DifferenceGroup(
        first.api_name, first.path, "various", "various", first.rule, first.note,
        example=first.example, example_path=first.example_path,
    )  # fmt: skip
    whole.count = sum(each.count for each in groups)
    whole.steps = sum(each.steps for each in groups)
    whole.later = sum((each.later for each in groups), Counter())
    return [whole]
