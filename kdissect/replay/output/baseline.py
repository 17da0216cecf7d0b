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
    found: dict[Key, Judgement] = {}
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
                    found[key] = _judgement(row)
    except OSError as error:
        raise CaptureError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(f"{path}: damaged, or no file of --json ({error})") from None
    if not is_whole:
        raise CaptureError(f"{path}: the run in it has no end; make it again")
    return found


def _judgement(row: Mapping[str, Any]) -> Judgement:
    differences = [
        Difference(
            each["path"],
            each["captured"],
            each["answered"],
            each["rule"] or "",
            each["note"] or "",
        )
        for each in row["differences"]
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


def between(mine: Judgement, other: Judgement) -> Judgement:
    """The verdict on an answer compared with the reference run's answer to the same request.

    mine, other: judgements of both answers against the capture. A difference from the capture that
    both answers have is tolerated.
    """
    if mine.verdict is Verdict.SKIPPED:
        return mine
    if other.verdict is Verdict.SKIPPED:
        return Judgement(mine.verdict, mine.differences, "the reference did not send it")
    if (mine.verdict is Verdict.ERROR) != (other.verdict is Verdict.ERROR):
        if mine.verdict is Verdict.ERROR:
            return mine
        reason = f"the reference got no answer ({other.reason}), now there is one"
        return Judgement(Verdict.DIFFERENT, mine.differences, reason)
    if mine.verdict is Verdict.ERROR:
        return Judgement(Verdict.TOLERATED, reason=f"no answer, as in the reference: {mine.reason}")
    ours = {each.path: each for each in mine.differences}
    theirs = {each.path: each for each in other.differences}
    found: list[Difference] = []
    for path, each in ours.items():
        same = theirs.get(path)
        if each.rule:
            found.append(each)
        elif same is None:
            found.append(each)
        elif same.answered == each.answered:
            note = f"the capture has {each.captured}"
            found.append(Difference(path, same.answered, each.answered, AS_REFERENCE, note))
        else:
            found.append(Difference(path, same.answered, each.answered, same.rule, each.note))
    for path, each in theirs.items():
        if path not in ours and not each.rule:
            note = "as captured; the reference differs from the capture"
            found.append(Difference(path, each.answered, each.captured, "", note))
    if mine.verdict is Verdict.DIFFERENT and not mine.differences:
        # a finding without a place, such as a version that is not spoken
        if other.verdict is not Verdict.DIFFERENT or other.reason != mine.reason:
            return mine
        return Judgement(Verdict.TOLERATED, found, f"as the reference: {mine.reason}")
    if any(not each.rule for each in found):
        return Judgement(Verdict.DIFFERENT, found, "differs from the reference")
    return Judgement(Verdict.TOLERATED if found else Verdict.SAME, found)
