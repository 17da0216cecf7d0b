"""Adds a likely cause to differences as text. An explained difference stays a difference.

Causes come from:

- the field and its values (`explanations.toml`)
- the Kafka releases of the captured broker and the target, inferred from the API versions that they
  offer
- the broker's own `error_message` in the same struct
- another error code in the same struct, from which the other fields follow
- an earlier request that changed a resource in the capture, but failed or worked differently at the
  target; later requests on that resource (see `planning.dependencies`) may differ because of it
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.releases import (
    first_release_with,
    last_release_with,
    releases_offering,
)
from kdissect.replay.comparison.grouping import OTHER_CODE, plain_path
from kdissect.replay.comparison.other_release import RULE, OtherRelease, release_note
from kdissect.replay.comparison.rules import path_pattern
from kdissect.replay.model import (
    Difference,
    Mode,
    Outcome,
    ReplayPlan,
    Resource,
    Step,
    Verdict,
    Workload,
)
from kdissect.replay.workload.messages import entries, response_of

Ranges = Mapping[int, tuple[int, int]]
# An answer may depend on all that its connection said before: sessions.
_IN_SESSIONS = frozenset({ApiKey.FETCH, ApiKey.SHARE_FETCH, ApiKey.SHARE_ACKNOWLEDGE})
_NOT_OFFERED = "not offered"


@dataclass(frozen=True, slots=True)
class Explanation:
    """One entry of `explanations.toml`."""

    path: str
    text: str
    apis: frozenset[str]
    captured: frozenset[str]
    answered: frozenset[str]
    needs_releases: bool
    is_no_finding: bool
    is_setting: bool
    matches: re.Pattern[str]

    def fits(self, api_name: str, difference: Difference) -> bool:
        if self.apis and api_name not in self.apis:
            return False
        if self.captured and difference.captured not in self.captured:
            return False
        if self.answered and difference.answered not in self.answered:
            return False
        return self.matches.fullmatch(plain_path(difference.path)) is not None


@cache
def explanations() -> tuple[Explanation, ...]:
    """The explanations of `explanations.toml`, in order."""
    text = files(__package__).joinpath("explanations.toml").read_text("utf-8")
    return tuple(
        Explanation(
            entry["path"],
            entry["text"],
            frozenset(entry.get("apis", ())),
            frozenset(entry.get("captured", ())),
            frozenset(entry.get("answered", ())),
            bool(entry.get("releases", False)),
            bool(entry.get("no_finding", False)),
            bool(entry.get("settings", False)),
            path_pattern(entry["path"]),
        )
        for entry in tomllib.loads(text)["explanation"]
    )


def is_setting(note: str) -> bool:
    """Return whether a note says that a difference follows from settings of the brokers."""
    return any(each.text in note for each in explanations() if each.is_setting)


@dataclass(frozen=True, slots=True)
class Releases:
    """Kafka releases of the captured broker and of the target, as ``3.9``; "" unknown."""

    then: str = ""
    now: str = ""

    @classmethod
    def of(cls, workload: Workload, target: Ranges) -> Releases:
        return cls(_name(_captured_ranges(workload)), _name(target))

    @property
    def differ(self) -> bool:
        return bool(self.then and self.now) and self.then != self.now


def _captured_ranges(workload: Workload) -> dict[int, tuple[int, int]]:
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


def _name(ranges: Ranges) -> str:
    """``3.9``, or ``4.1 or 4.2`` where these offer the same; "" for neither."""
    minors = dict.fromkeys(each.rsplit(".", 1)[0] for each in releases_offering(ranges))
    return " or ".join(minors) if len(minors) <= 2 else ""


def explain(plan: ReplayPlan, outcomes: Sequence[Outcome], target: Ranges) -> list[str]:
    """Put a note to the differences of judged outcomes that no rule allows, where something is
    known about them. target: api_key -> versions that it offers. Returns notes on the whole run."""
    different = [each for each in outcomes if _is_different(each)]
    if not different:
        return []
    releases = Releases.of(plan.workload, target)
    if releases.differ:
        _allow_other_release(different, OtherRelease(target))
    causes = _causes(plan, outcomes, {each.step.number for each in different})
    for outcome in filter(_is_different, different):
        assert outcome.judgement is not None
        cause = causes.get(outcome.step.number, "")
        differences = outcome.judgement.differences
        beside = _Beside(differences)
        outcome.judgement = replace(
            outcome.judgement,
            differences=[
                each if each.rule else _explained(outcome.step, each, releases, beside, cause)
                for each in differences
            ],
        )
    if not releases.differ:
        return []
    return [
        f"by what they offer, the captured broker is Kafka {releases.then}, the target "
        f"Kafka {releases.now}",
        *release_note(outcomes, releases.then, releases.now),
    ]


def _allow_other_release(different: Iterable[Outcome], release: OtherRelease) -> None:
    """Give the rule `other-release` to differences that are no findings between two releases."""
    for outcome in different:
        assert outcome.judgement is not None
        name, differences = outcome.step.api_name, []
        for one in outcome.judgement.differences:
            fitting = next((each for each in explanations() if each.fits(name, one)), None)
            is_allowed = fitting is not None and fitting.is_no_finding
            if not one.rule and is_allowed and release.allows(outcome.step, one):
                one = replace(one, rule=RULE)
            differences.append(one)
        is_allowed = bool(differences) and all(each.rule for each in differences)
        verdict = Verdict.TOLERATED if is_allowed else outcome.judgement.verdict
        outcome.judgement = replace(outcome.judgement, verdict=verdict, differences=differences)


def _is_different(outcome: Outcome) -> bool:
    return outcome.judgement is not None and outcome.judgement.verdict is Verdict.DIFFERENT


class _Beside:
    """Explains differences by another error code, or an error message, in the same struct."""

    def __init__(self, differences: Sequence[Difference]) -> None:
        self._texts = {
            each.path: each for each in differences if each.path.endswith("error_message")
        }
        self._holders = {
            _holder(each.path)
            for each in differences
            if not each.rule and each.path.endswith("error_code")
        }

    def note(self, one: Difference) -> str:
        """The note for a difference in a struct whose error code differs; "" if none does."""
        if one.path.endswith("error_code"):
            return ""
        holder = _holder(one.path)
        while True:
            if holder in self._holders:
                return OTHER_CODE
            if not holder:
                return ""
            holder = _holder(holder)

    def said(self, code: Difference) -> str:
        """The error message of the broker that refused the request, for its error code."""
        holder = _holder(code.path)
        text = self._texts.get(f"{holder}.error_message" if holder else "error_message")
        if text is None:
            return ""
        who, words = (
            ("the target", text.answered) if code.answered != "0" else
            ("the captured broker", text.captured)
        )  # fmt: skip
        return f"{who} says: {words}" if words not in _NO_WORDS else ""


_NO_WORDS = frozenset({"", "null", "absent", "NONE"})


def _holder(path: str) -> str:
    """The struct that a path lies in; "" for the whole message."""
    return path.rpartition(".")[0]


def _explained(
    step: Step, one: Difference, releases: Releases, beside: _Beside, cause: str
) -> Difference:
    notes = [one.note] if one.note else []
    is_refused = one.path == "api_version" and one.answered == _NOT_OFFERED
    if is_refused:
        notes += _since(step)
    if other := beside.note(one):
        return replace(one, note="; ".join([*notes, other]))
    for each in explanations():
        if each.fits(step.api_name, one) and (releases.differ or not each.needs_releases):
            notes.append(each.text.format(then=releases.then, now=releases.now))
            break
    if one.path.endswith("error_code") and (said := beside.said(one)):
        notes.append(said)
    if cause and not is_refused:
        notes.append(cause)
    return replace(one, note="; ".join(notes))


def _since(step: Step) -> list[str]:
    """Return the releases that speak the version of a request."""
    key, version = step.exchange.api_key, step.exchange.api_version
    first, last = first_release_with(key, version), last_release_with(key, version)
    if first is None or last is None:
        return []
    minors = [each.rsplit(".", 1)[0] for each in (first, last)]
    spoken = minors[0] if minors[0] == minors[1] else " to ".join(minors)
    return [f"v{version} is spoken by Kafka {spoken}, of those known"]


def _causes(plan: ReplayPlan, outcomes: Sequence[Outcome], wanted: set[int]) -> dict[int, str]:
    """For steps, what earlier request the target did not do, of those on the same thing."""
    untaken: dict[Resource, str] = {}
    causes: dict[int, str] = {}
    for step, outcome in zip(plan.steps, outcomes, strict=True):
        if step.exchange.internal_reason:
            continue
        accesses = list(step.accesses)
        if step.exchange.api_key in _IN_SESSIONS:
            accesses.append((("connection", step.connection), Mode.WRITE))
        if step.number in wanted:
            known = (untaken[resource] for resource, _ in accesses if resource in untaken)
            if cause := next(known, ""):
                causes[step.number] = cause
                if step.exchange.api_key in _IN_SESSIONS:  # later responses, too
                    untaken.setdefault(("connection", step.connection), cause)
        why = _why_untaken(outcome)
        if not why:
            continue
        text = (
            f"may follow from exchange {step.exchange.exchange_id}: {step.api_name} "
            f"v{step.exchange.api_version} {why}"
        )
        for resource, mode in accesses:
            if mode in (Mode.WRITE, Mode.COMMUTING_WRITE):
                untaken.setdefault(resource, text)
    return causes


def _why_untaken(outcome: Outcome) -> str:
    """Return the reason why a request lacks its captured effect, as a clause; "" if it has it."""
    skipped = outcome.skipped or outcome.step.skipped
    if skipped is not None:
        if skipped.is_finding:
            return "is not offered by the target"
        code = skipped.code.value
        return "" if code in _AS_CAPTURED else f"was not sent ({code})"
    if outcome.error:
        return f"was not answered ({outcome.error})"
    differences: Iterable[Difference] = (
        outcome.judgement.differences if outcome.judgement is not None else ()
    )
    for each in differences:
        if not each.rule and each.path.endswith("error_code"):
            return f"was answered {each.note or each.answered}"
    return ""


# Requests skipped for these reasons changed nothing in the capture, or are not for the target.
_AS_CAPTURED = frozenset({"not_ready", "other_principal", "target_own", "internal"})
