"""Noise: which differences control runs excuse, and which never."""

from __future__ import annotations

import pytest

from kdissect.replay.comparison.comparator import IN_RUN
from kdissect.replay.comparison.noise import BY_CONTROL_RUNS, Noise
from kdissect.replay.model import Difference, Judgement, Verdict

METADATA_1, METADATA_2 = (0, 0, 3, 12), (0, 1, 3, 12)
Key = tuple[int, int, int, int]


def judged(path: str = "", captured: str = "", answered: str = "", note: str = "") -> Judgement:
    """A judgement with one difference outside the rules, or without a path no difference."""
    if not path:
        return Judgement(Verdict.SAME)
    return Judgement(Verdict.DIFFERENT, [Difference(path, captured, answered, note=note)])


def verdict(noise: Noise, key: Key, one: Judgement) -> Verdict:
    return noise.excuse(key, one).verdict


def test_a_field_that_differs_between_control_runs_is_excused_in_every_element() -> None:
    """The rule names the control runs, and another field of the API stays a finding."""
    path = "topics[0].partitions[{}].leader_count"
    noise = Noise([{METADATA_1: judged(path.format(0), "3", "4")}, {METADATA_1: judged()}])
    found = noise.excuse(METADATA_2, judged(path.format(7), "8", "9"))
    assert found.verdict is Verdict.TOLERATED
    assert found.differences[0].rule == BY_CONTROL_RUNS
    other = judged("topics[0].is_internal", "false", "true")
    assert verdict(noise, METADATA_1, other) is Verdict.DIFFERENT
    heartbeat = (0, 0, 12, 4)
    assert verdict(noise, heartbeat, judged(path.format(0), "3", "4")) is Verdict.DIFFERENT


def test_control_runs_that_agree_excuse_nothing() -> None:
    """Both differ from the capture in the same way: that is no noise."""
    path = "topics[0].is_internal"
    noise = Noise([{METADATA_1: judged(path, "false", "true")}] * 2)
    assert not noise.fields
    assert verdict(noise, METADATA_1, judged(path, "false", "true")) is Verdict.DIFFERENT


@pytest.mark.parametrize(
    "path",
    [
        "topics[0].error_code",
        "responses[0].partitions[0].high_watermark",
        "responses[0].partitions[0].log_start_offset",
        "responses[0].partitions[0].records[offset 4].key",
        "responses[0].partitions[0].aborted_transactions",
    ],
)
def test_evidence_is_never_noise(path: str) -> None:
    """Error codes, offsets and records count though the control runs differ there."""
    noise = Noise([{METADATA_1: judged(path, "0", "1")}, {METADATA_1: judged(path, "0", "2")}])
    assert verdict(noise, METADATA_1, judged(path, "0", "1")) is Verdict.DIFFERENT
    assert "never excused" in noise.notes()[0]


def test_a_contradiction_within_the_run_is_never_noise() -> None:
    """Other answers of the same run prove the value wrong, so control runs do not matter."""
    path = "members"
    noise = Noise([{METADATA_1: judged(path, "a", "b")}, {METADATA_1: judged(path, "a", "c")}])
    contradiction = judged(path, "a", "b", note=f"who joined ({IN_RUN})")
    assert verdict(noise, METADATA_1, contradiction) is Verdict.DIFFERENT


@pytest.mark.parametrize(
    ("answered", "expected"),
    [("130", Verdict.TOLERATED), ("101", Verdict.TOLERATED), ("131", Verdict.DIFFERENT),
     ("-5", Verdict.DIFFERENT), ("null", Verdict.DIFFERENT)],
)  # fmt: skip
def test_numbers_have_a_bound(answered: str, expected: Verdict) -> None:
    """Control runs gave 110 and 120: a number may be 10 away from one of them."""
    path = "size"
    noise = Noise([{METADATA_1: judged(path, "7", "110")}, {METADATA_1: judged(path, "7", "120")}])
    assert verdict(noise, METADATA_1, judged(path, "7", answered)) is expected


def test_a_text_has_to_be_known_unless_control_runs_never_agree() -> None:
    """A state must be one that control runs show; a random id may be any, but not empty."""
    states = Noise(
        [
            {METADATA_1: judged("state", "Stable", "Empty"), METADATA_2: judged()},
            {METADATA_1: judged(), METADATA_2: judged("state", "Stable", "Empty")},
            {METADATA_1: judged(), METADATA_2: judged()},
        ]
    )
    assert verdict(states, METADATA_1, judged("state", "Stable", "Empty")) is Verdict.TOLERATED
    assert verdict(states, METADATA_1, judged("state", "Stable", "Dead")) is Verdict.DIFFERENT
    ids = Noise([{METADATA_1: judged("id", "a", "b")}, {METADATA_1: judged("id", "a", "c")}])
    assert verdict(ids, METADATA_1, judged("id", "a", "d")) is Verdict.TOLERATED
    assert verdict(ids, METADATA_1, judged("id", "a", "null")) is Verdict.DIFFERENT


def test_an_answer_that_is_missing_is_never_noise() -> None:
    """A control run without an answer teaches nothing, and an error stays one."""
    failed = Judgement(Verdict.ERROR, reason="timeout")
    noise = Noise([{METADATA_1: failed}, {METADATA_1: judged("state", "a", "b")}])
    assert not noise.fields
    assert noise.excuse(METADATA_1, failed) == failed
