"""Clients that both sides have, compared with themselves."""

import numpy as np
import pytest

from kdissect.diff.sample_tests import SPREAD_MIN, compare_clients, paired_p_value, student_p_value
from kdissect.diff.statistics import Scores

IS_B = np.arange(12) >= 6


def scores(values: np.ndarray) -> Scores:
    """Ten exchanges of each unit, with these averages of a score."""
    count = np.full(len(values), 10.0)
    zero = np.zeros(len(values), np.int64)
    return Scores(zero, np.arange(len(values)), count, count * values, count * values**2)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 11, 24])
@pytest.mark.parametrize("t", [0.0, 0.7, 3.0, 12.0])
def test_p_values_are_those_of_students_distribution(t: float, freedom: int) -> None:
    """The series are SciPy's distribution."""
    from scipy import stats  # a second that only one worker needs

    assert student_p_value(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), abs=1e-9)


def test_differences_between_clients_cancel_out() -> None:
    """Clients differ from each other by more than from themselves."""
    from scipy import stats

    own = np.linspace(0.1, 0.6, 6)
    shift = 0.1 + 0.02 * np.array([-1, 1, -1, 1, -1, 1])
    values = np.concatenate((own, own + shift))
    (p_value,) = compare_clients(scores(values), IS_B, np.arange(12) % 6, 1)
    expected = stats.ttest_rel(own + shift, own).pvalue
    assert p_value == pytest.approx(expected)
    assert p_value < 1e-4


def test_one_slow_client_is_no_difference() -> None:
    """One of six is much slower: the others are as they were."""
    values = np.concatenate((np.full(6, 0.4), [0.4, 0.4, 0.4, 0.4, 0.4, 0.9]))
    (p_value,) = compare_clients(scores(values), IS_B, np.arange(12) % 6, 1)
    assert p_value > 0.3


def test_equal_differences_are_bounded() -> None:
    """Clients that agree exactly do not make a small difference certain."""
    assert paired_p_value(np.full(4, SPREAD_MIN / 2)) > 0.3


@pytest.mark.parametrize(
    "client",
    [
        np.arange(12),  # none is on both sides
        np.concatenate((np.arange(6), [0, 1, 2, 7, 8, 9])),  # three are
    ],
)
def test_too_few_clients(client: np.ndarray) -> None:
    """No answer without four clients on both sides."""
    assert np.isnan(compare_clients(scores(np.linspace(0, 1, 12)), IS_B, client, 1)).all()


def test_clients_that_are_a_small_part() -> None:
    """Four clients on both sides with few of the exchanges do not speak for the others."""
    made = scores(np.linspace(0, 1, 12))
    heavy = made._replace(exchanges=np.where(np.arange(12) % 6 < 4, 10.0, 100.0))
    client = np.where(np.arange(12) % 6 < 4, np.arange(12) % 6, np.arange(12) + 10)
    assert np.isnan(compare_clients(heavy, IS_B, client, 1)).all()
    assert not np.isnan(compare_clients(made, IS_B, client, 1)).all()


def test_false_alarms_are_as_rare_as_the_level_says() -> None:
    """Six clients without a difference: at a level of 1 %, 2,000 trials raise about 20 alarms."""
    generator = np.random.default_rng(4)
    alarms = 0
    for _ in range(2000):
        own = generator.random(6)
        values = np.concatenate((own, own)) + generator.exponential(0.1, 12)
        (p_value,) = compare_clients(scores(values), IS_B, np.arange(12) % 6, 1)
        alarms += p_value < 0.01
    assert alarms < 35
