"""Comparing two runs: with another target's answers (--against) or an earlier run (--baseline).

Answers of two brokers cannot be compared byte by byte, each has ids of its own. Both have been
compared with the capture already, in the capture's ids; so two runs agree in an exchange when they
differ from the capture in the same way. What only one of them does is the difference between them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kdissect.errors import CaptureError
from kdissect.replay.model import Difference, Judgement, Outcome, Verdict
from kdissect.replay.output.results import RESULTS_VERSION, judgement_of

Key = tuple[int, int, int, int]
"""connection, index there, api_key, api_version: the same exchange in runs of the same source."""

Judged = Mapping[Key, Judgement]
AS_REFERENCE = "as-reference"  # the rule that tolerates what the reference does as well


def key_of(outcome: Outcome) -> Key:
    exchange = outcome.step.exchange
    return exchange.connection, exchange.index, exchange.api_key, exchange.api_version


def judged(outcomes: Iterable[Outcome]) -> dict[Key, Judgement]:
    """A run's judgements by exchange."""
    return {key_of(outcome): judgement_of(outcome) for outcome in outcomes}


def read_baseline(path: str) -> dict[Key, Judgement]:
    """The judgements that --json wrote. Raises CaptureError where it is no such file."""
    judgements: dict[Key, Judgement] = {}
    is_whole = False
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                row = json.loads(line)
                if number == 1 and (
                    row.get("type") != "run" or row.get("format_version") != RESULTS_VERSION
                ):
                    raise CaptureError(
                        f"{path}: no run that --json of `kdissect replay` kept "
                        f"(format_version {RESULTS_VERSION})"
                    )
                is_whole = row.get("type") == "summary"
                if row.get("type") == "exchange":
                    key = row["connection"], row["index"], row["api_key"], row["api_version"]
                    judgements[key] = _judgement(row)
    except OSError as error:
        raise CaptureError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(f"{path}: damaged, or no file of --json ({error})") from None
    if not is_whole:
        raise CaptureError(f"{path}: the run in it has no end; make it again")
    return judgements


def _judgement(row: Mapping[str, Any]) -> Judgement:
    differences = [
        Difference(
            entry["path"],
            entry["captured"],
            entry["answered"],
            entry["rule"] or "",
            entry["note"] or "",
        )
        for entry in row["differences"]
    ]
    return Judgement(Verdict(row["verdict"]), differences, row["reason"] or "")


def compare_runs(outcomes: Iterable[Outcome], references: Sequence[Judged]) -> int:
    """Judge the outcomes against other runs of the same source instead of the capture.

    An answer is compared with the run that it resembles most. Returns how many of the requests
    those runs lack.
    """
    missing = 0
    for outcome in outcomes:
        mine, key = judgement_of(outcome), key_of(outcome)
        others = [each[key] for each in references if key in each]
        if not others:
            missing += 1
            continue
        outcome.judgement = min((between(mine, other) for other in others), key=_findings)
    return missing


def _findings(judgement: Judgement) -> tuple[bool, int]:
    """A rank that is lower for a judgement with fewer findings."""
    count = sum(not each.rule for each in judgement.differences)
    return judgement.verdict in (Verdict.DIFFERENT, Verdict.ERROR), count


def between(judgement: Judgement, reference: Judgement) -> Judgement:
    """The verdict on an answer compared with the reference run's answer to the same request.

    judgement, reference: of both answers against the capture. A difference from the capture that
    both answers have is tolerated.
    """
    if judgement.verdict is Verdict.SKIPPED:
        return judgement
    if reference.verdict is Verdict.SKIPPED:
        return Judgement(judgement.verdict, judgement.differences, "the reference did not send it")
    if (judgement.verdict is Verdict.ERROR) != (reference.verdict is Verdict.ERROR):
        if judgement.verdict is Verdict.ERROR:
            return judgement
        reason = f"the reference got no answer ({reference.reason}), now there is one"
        return Judgement(Verdict.DIFFERENT, judgement.differences, reason)
    if judgement.verdict is Verdict.ERROR:
        return Judgement(
            Verdict.TOLERATED, reason=f"no answer, as in the reference: {judgement.reason}"
        )
    by_path = {difference.path: difference for difference in judgement.differences}
    in_reference = {difference.path: difference for difference in reference.differences}
    merged: list[Difference] = []
    for path, difference in by_path.items():
        same = in_reference.get(path)
        if difference.rule:
            merged.append(difference)
        elif same is None:
            merged.append(difference)
        elif same.answered == difference.answered:
            note = f"the capture has {difference.captured}"
            merged.append(Difference(path, same.answered, difference.answered, AS_REFERENCE, note))
        else:
            merged.append(
                Difference(path, same.answered, difference.answered, same.rule, difference.note)
            )
    for path, difference in in_reference.items():
        if path not in by_path and not difference.rule:
            note = "as captured; the reference differs from the capture"
            merged.append(Difference(path, difference.answered, difference.captured, "", note))
    if judgement.verdict is Verdict.DIFFERENT and not judgement.differences:
        # a finding without a place, such as a version that is not spoken
        if reference.verdict is not Verdict.DIFFERENT or reference.reason != judgement.reason:
            return judgement
        return Judgement(Verdict.TOLERATED, merged, f"as the reference: {judgement.reason}")
    if any(not difference.rule for difference in merged):
        return Judgement(Verdict.DIFFERENT, merged, "differs from the reference")
    return Judgement(Verdict.TOLERATED if merged else Verdict.SAME, merged)
