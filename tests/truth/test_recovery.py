"""Frames found again in some captures; `python -m tests.truth.recovery` has all of them."""

from functools import cache

import pytest

from tests.material import CAPTURES, needed
from tests.truth import recovery

TOKENS = "sasl/sasl_handshake_v0"  # the smallest, with bare tokens: every damage, four times
OTHERS = ("java_latest/java_latest", "share_streams/streams", "zookeeper/zk_1_1_1")
DAMAGES = {
    *("0.1 % lost", "1 % lost", "5 % lost", "start at any packet", "requests alone, 1 % lost"),
    "responses alone, 1 % lost",
}


@cache
def whole(name: str) -> recovery.Whole:
    return recovery.read_whole(needed(CAPTURES / f"{name}.pcap"))


@pytest.mark.parametrize(
    ("name", "scenario", "seeds"),
    [
        *((TOKENS, scenario, range(4)) for scenario in recovery.SCENARIOS),
        *(
            (name, scenario, range(1))
            for name in OTHERS
            for scenario in recovery.SCENARIOS
            if scenario.name in DAMAGES
        ),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_frames_are_found_again(name: str, scenario: recovery.Scenario, seeds: range) -> None:
    """Enough intact frames are found, and none is false or wrongly paired."""
    numbers, _ = recovery.counts(whole(name), scenario, seeds)
    assert not numbers["false"]
    assert not numbers["wrong_pairs"]
    assert 100 * numbers["found"] >= scenario.asked * numbers["intact"]
