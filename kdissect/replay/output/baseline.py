"""An accepted run: a later run with `--baseline` reads the file that its `--json` wrote.

A difference is accepted if the file has it, of the same API, at the same place, with the same
values, in whichever exchange. So is a finding about the whole run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from kdissect.errors import CaptureError
from kdissect.replay.model import Difference, Outcome, Verdict, tolerate
from kdissect.replay.output import text
from kdissect.replay.output.rows import FORMAT_VERSION
from kdissect.tables.schemas import Row

RULE = "baseline"  # tolerates what the accepted run has


@dataclass(frozen=True)
class Baseline:
    """path: of the file. accepted: (API, path, captured, answered) of differences, (API, verdict,
    reason) of exchanges without one, (kind, subject, expected, found) of findings."""

    path: str
    accepted: set[tuple[str, ...]] = field(default_factory=set)

    def accept(self, outcomes: Iterable[Outcome]) -> None:
        """Tolerate what the accepted run has as well."""
        tolerate(outcomes, self._accepted)
        for outcome in outcomes:
            one, name = outcome.judgement, outcome.step.api_name
            is_known = (name, one.verdict.value, one.reason) in self.accepted
            if is_known and one.verdict is Verdict.ERROR:
                outcome.judgement = replace(one, verdict=Verdict.TOLERATED)

    def _accepted(self, name: str, one: Difference) -> Difference:
        is_known = (name, one.path, *text.texts_of(one)) in self.accepted
        return replace(one, rule=RULE) if is_known else one

    def new(self, findings: Iterable[Difference]) -> list[Difference]:
        """The findings that the accepted run does not have."""
        return [
            each
            for each in findings
            if (each.place, *each.keys, *text.texts_of(each)) not in self.accepted
        ]


def read_baseline(path: str) -> Baseline:
    """The run that --json wrote. Raises CaptureError if it is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            kept = [json.loads(line) for line in file]
        if why := _why_unfit(kept[0], kept[-1]):
            raise CaptureError(f"{path}: {why}")
        return Baseline(path, {each for row in kept for each in _accepted_in(row)})
    except OSError as error:
        raise CaptureError(f"{path}: {error.strerror}") from None
    except CaptureError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CaptureError(f"{path}: damaged, or no file of --json ({error})") from None


def _why_unfit(first: Row, last: Row) -> str:
    """Why a file with these rows is no baseline, or ""."""
    version = first.get("format_version")
    if first.get("type") != "run":
        return "no run that --json of `kdissect replay` kept"
    if version != FORMAT_VERSION:
        versions = f"format_version {version}, this one has {FORMAT_VERSION}"
        return f"kept by another kdissect ({versions}); make it again"
    return "" if last["type"] == "summary" else "the run in it has no end; make it again"


def _accepted_in(row: Row) -> Iterator[tuple[str, ...]]:
    if row["type"] == "exchange":
        for each in row["differences"]:
            if each["rule"] not in (None, RULE):
                continue  # a rule excuses it, by more than its values
            yield row["api_name"], each["path"], each["captured"], each["answered"]
        if row["reason"]:
            yield row["api_name"], row["verdict"], row["reason"]
    for each in row["findings"] if row["type"] == "summary" else ():
        yield each["kind"], each["subject"], each["expected"], each["found"]
