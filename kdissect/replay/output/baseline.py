"""An accepted run: `--baseline FILE` counts only what is new since then.

The file is what `--json` wrote. A difference is accepted if the file has it: of the same API, at
the same place, with the same values, in whichever exchange. So is a finding about the whole run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from kdissect.errors import CaptureError
from kdissect.replay.comparison.judge import verdict_of
from kdissect.replay.model import Difference, Judgement, Outcome, RunFinding, Verdict
from kdissect.replay.output.results import RESULTS_VERSION
from kdissect.replay.output.text import run_texts, texts_of

RULE = "baseline"  # tolerates what the accepted run has
Accepted = tuple[str, ...]


@dataclass(frozen=True)
class Baseline:
    """differences: (API, path, captured, answered). reasons: (API, verdict, reason) of exchanges
    without a difference. findings: (kind, subject, expected, found)."""

    differences: set[Accepted] = field(default_factory=set)
    reasons: set[Accepted] = field(default_factory=set)
    findings: set[Accepted] = field(default_factory=set)

    def accept(self, outcomes: Iterable[Outcome]) -> None:
        """Tolerate what the accepted run has as well."""
        for outcome in outcomes:
            if outcome.judgement is not None:
                outcome.judgement = self._accepted(outcome, outcome.judgement)

    def _accepted(self, outcome: Outcome, judgement: Judgement) -> Judgement:
        step = outcome.step
        if judgement.verdict not in (Verdict.DIFFERENT, Verdict.ERROR):
            return judgement
        if judgement.verdict is Verdict.ERROR or not judgement.differences:
            reason = (step.api_name, judgement.verdict.value, judgement.reason)
            is_known = judgement.reason and reason in self.reasons
            return replace(judgement, verdict=Verdict.TOLERATED) if is_known else judgement
        differences = [
            replace(one, rule=RULE)
            if not one.rule and self._has(step.api_name, step.exchange.api_key, one)
            else one
            for one in judgement.differences
        ]
        if differences == judgement.differences:
            return judgement
        return replace(judgement, differences=differences, verdict=verdict_of(differences))

    def _has(self, api_name: str, api_key: int, one: Difference) -> bool:
        return (api_name, one.path, *texts_of(api_key, one)) in self.differences

    def new(self, findings: Iterable[RunFinding]) -> list[RunFinding]:
        """The findings that the accepted run does not have."""
        return [
            each
            for each in findings
            if (each.kind, each.subject, *run_texts(each)) not in self.findings
        ]


def read_baseline(path: str) -> Baseline:
    """The run that --json wrote. Raises CaptureError where it is no such file."""
    baseline = Baseline()
    is_whole = False
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                row = json.loads(line)
                if number == 1:
                    _check_version(path, row)
                is_whole = row.get("type") == "summary"
                if row.get("type") == "exchange":
                    _add_exchange(baseline, row)
                for each in row["findings"] if is_whole else ():
                    names = ("kind", "subject", "expected", "found")
                    baseline.findings.add(tuple(each[name] for name in names))
    except OSError as error:
        raise CaptureError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(f"{path}: damaged, or no file of --json ({error})") from None
    if not is_whole:
        raise CaptureError(f"{path}: the run in it has no end; make it again")
    return baseline


def _check_version(path: str, row: Any) -> None:
    if row.get("type") != "run":
        raise CaptureError(f"{path}: no run that --json of `kdissect replay` kept")
    version = row.get("format_version")
    if version != RESULTS_VERSION:
        raise CaptureError(
            f"{path}: kept by another kdissect (format_version {version}, this one has "
            f"{RESULTS_VERSION}); make it again"
        )


def _add_exchange(baseline: Baseline, row: dict[str, Any]) -> None:
    api_name = row["api_name"]
    for each in row["differences"]:
        texts = each["path"], each["captured"], each["answered"]
        baseline.differences.add((api_name, *texts))
    if row["reason"]:
        baseline.reasons.add((api_name, row["verdict"], row["reason"]))
