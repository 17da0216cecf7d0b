"""Requests that fail for one partition share one wait for it."""

from kdissect.replay.target.settling import SHORT_WAIT_S, WAIT_S, Patience
from kdissect.replay.translation.answers import Place

ONE, OTHER, THIRD = (Place((), "t", number) for number in (1, 2, 3))


def test_a_partition_that_keeps_failing_is_given_up() -> None:
    """After one wait, for all requests; another partition in the same answer has its own."""
    patience = Patience()
    assert patience.lasts([ONE], 0)
    assert patience.lasts([ONE, OTHER], WAIT_S - 1)
    assert patience.lasts([OTHER], WAIT_S - 0.1)
    assert not patience.lasts([ONE], WAIT_S)
    assert not patience.lasts([ONE], 0)
    assert not patience.lasts([], 0)


def test_waits_in_vain_share_their_time() -> None:
    """Whatever fails after a long wait in vain is given a short one."""
    patience = Patience()
    patience.lasts([ONE], 0)
    patience.lasts([ONE], WAIT_S)
    assert patience.lasts([THIRD], 20)
    assert patience.lasts([THIRD], 20 + SHORT_WAIT_S - 0.1)
    assert not patience.lasts([THIRD], 20 + SHORT_WAIT_S)


def test_a_partition_that_answers_again_is_waited_for_again() -> None:
    """An error may come and go."""
    patience = Patience()
    patience.lasts([ONE], 0)
    patience.ready([ONE])
    assert patience.lasts([ONE], WAIT_S)
