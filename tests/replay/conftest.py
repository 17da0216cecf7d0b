"""A plan that a test makes."""

import pytest

from tests.replay.made import PlanMaker


@pytest.fixture
def maker() -> PlanMaker:
    return PlanMaker()
