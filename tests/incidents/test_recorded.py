"""Recorded incidents: kdissect finds each one, with its subject and time, and nothing else."""

from __future__ import annotations

import pytest

from tests.conftest import CAPTURES
from tools.incidents.measure import judge, truths

RECORDED = CAPTURES / "incidents"


@pytest.mark.parametrize("name", truths(RECORDED))
def test_recorded_incident(name: str) -> None:
    """The findings above `info` equal the truth that the recording script wrote."""
    assert judge(RECORDED, name).faults == []
