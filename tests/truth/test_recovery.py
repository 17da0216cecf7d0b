"""Frames found again on the smallest captures; `python -m tests.truth.recovery` has all of them."""

from __future__ import annotations

import pytest

from tests.material import CAPTURES, needed
from tests.truth import recovery

SASL = CAPTURES / "sasl" / "sasl_handshake_v0.pcap"


def names(scenario: recovery.Scenario) -> str:
    return scenario.name


@pytest.fixture(scope="module")
def whole() -> recovery.Whole:
    return recovery.read_whole(needed(SASL))


@pytest.mark.parametrize("scenario", recovery.SCENARIOS, ids=names)
def test_bare_tokens_are_found_again(whole: recovery.Whole, scenario: recovery.Scenario) -> None:
    """Enough exchanges with bare SASL tokens are found, and none is false or wrongly paired."""
    parts = [recovery.count(whole, scenario, seed) for seed in range(4)]
    assert sum(part.false for part in parts) == 0
    assert sum(part.wrong_pairs for part in parts) == 0
    found, intact = (sum(getattr(part, name) for part in parts) for name in ("found", "intact"))
    assert 100 * found >= scenario.asked * intact
