"""Noise: which differences control runs excuse, and which never."""

from __future__ import annotations

from typing import Any

import pytest

from kdissect.replay.comparison.judge import NOISE, Noise
from kdissect.replay.model import ABSENT, Difference, Judgement, Outcome, Verdict
from tests.replay.made import PlanMaker


def noise(place: str, *pairs: tuple[Any, Any]) -> Noise:
    """Of control runs that differ at a place of Heartbeats in these values."""
    maker, found = PlanMaker(), Noise()
    outcomes = []
    for captured, answered in pairs:
        number = maker.add(0)
        one = Difference(place, (), captured, answered)
        outcomes.append(Outcome(maker.steps[number], judgement=Judgement(Verdict.DIFFERENT, [one])))
    found.add(outcomes)
    return found


def is_excused(found: Noise, place: str, captured: Any, answered: Any) -> bool:
    one = found.excused("Heartbeat", Difference(place, ("7",), captured, answered))
    return one.rule == NOISE


@pytest.mark.parametrize(
    ("pairs", "value", "excused"),
    [
        ([(3, 5)], (8, 10), True),  # as far apart as control runs
        ([(3, 5)], (8, 11), False),
        ([("a", "b"), ("a", "b")], ("a", "b"), True),
        ([("a", "b"), ("a", "b")], ("a", "c"), False),
        ([("x1", "x2"), ("x3", "x4")], ("x5", "x6"), True),  # random
        ([("x1", "x2"), ("x3", "x4")], ("x5", None), False),
        ([("x1", "x2"), ("x3", "x4")], ("x5", ABSENT), False),
    ],
)
def test_values_that_differ_between_control_runs(
    pairs: list[tuple[Any, Any]], value: tuple[Any, Any], excused: bool
) -> None:
    """A number within their spread, a known text, or any text if none ever repeats."""
    assert is_excused(noise("members[].name", *pairs), "members[].name", *value) is excused
    assert not is_excused(noise("members[].name", *pairs), "members[].other", *value)


@pytest.mark.parametrize(
    "place",
    ["topics[].error_code", "responses[].partitions[].high_watermark",
     "responses[].partitions[].log_start_offset", "responses[].partitions[].records[].key",
     "responses[].partitions[].aborted_transactions"],
)  # fmt: skip
def test_evidence_is_never_noise(place: str) -> None:
    """Error codes, offsets and records count though the control runs differ there."""
    assert not is_excused(noise(place, (0, 1)), place, 0, 1)
