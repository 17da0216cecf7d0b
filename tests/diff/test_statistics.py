"""Permutation tests: their level, their power, and corrections computed by hand."""

import itertools
import math

import numpy as np
import pytest

from kdissect.diff.statistics import UNITS_MAX, Scores, compare_units, holm, tarone

ALPHA = 0.01


def samples(
    generator: np.random.Generator, units: int, shift: float, count: int = 20, share_a: float = 0.5
) -> Scores:
    """One comparison: values of each unit around a level of its own; b's are `shift` higher."""
    values = generator.normal(size=(units, 1)) + generator.normal(size=(units, count)) / 3
    values[sides(units, share_a)] += shift
    ranks = (values.ravel().argsort().argsort() + 0.5) / values.size
    ranks = ranks.reshape(values.shape)
    return Scores(
        np.zeros(units, np.int64),
        np.arange(units),
        np.full(units, float(count)),
        ranks.sum(1),
        (ranks**2).sum(1),
    )


def together(parts: list[Scores]) -> Scores:
    numbered = [part._replace(comparison=part.comparison + n) for n, part in enumerate(parts)]
    return Scores(*map(np.concatenate, zip(*numbered, strict=True)))


def sides(units: int, share_a: float = 0.5) -> np.ndarray:
    return np.arange(units) >= int(units * share_a)


def test_exact_for_few_units() -> None:
    """Against all deals of ten units, each counted: the p-value of sampled deals is theirs."""
    generator = np.random.default_rng(3)
    scores = samples(generator, 10, 2.0)
    residual = scores.total - scores.exchanges * scores.total.sum() / scores.exchanges.sum()
    seen = abs(residual[5:].sum())
    deals = [abs(residual[list(b)].sum()) for b in itertools.combinations(range(10), 5)]
    exact = np.mean([deal >= seen - 1e-9 for deal in deals])
    verdict = compare_units(scores, sides(10), 1, ALPHA)
    assert verdict.is_decided.all()
    assert verdict.p_values[0] == pytest.approx(exact, abs=0.004)


def test_false_alarms_are_rare() -> None:
    """Exchanges of a unit are alike and units are not: five comparisons of a diff, 300 diffs.

    At a level of 1 %, 3 of them are expected to raise an alarm; 10 have a chance of 1 in 1,000.
    """
    generator = np.random.default_rng(5)
    alarms = 0
    for _ in range(300):
        scores = together([samples(generator, 24, 0) for _ in range(5)])
        alarms += compare_units(scores, sides(24), 5, ALPHA).p_values.min() < ALPHA
    assert alarms < 10


def test_differences_are_found() -> None:
    """Three times the spread of the units, in one of five comparisons: in that one, every time."""
    generator = np.random.default_rng(6)
    for _ in range(20):
        parts = [samples(generator, 24, shift) for shift in (0, 0, 3, 0, 0)]
        p_values = compare_units(together(parts), sides(24), 5, ALPHA).p_values
        assert p_values[2] < ALPHA


def test_too_few_units_are_undecided() -> None:
    """Four against four have 70 deals: the best two of them are 1 in 35, so nothing is certain."""
    scores = samples(np.random.default_rng(7), 8, 100.0)
    verdict = compare_units(scores, sides(8), 1, ALPHA)
    assert not verdict.is_decided[0]
    assert verdict.p_values[0] == 1
    assert 2 / math.comb(8, 4) > ALPHA


def test_one_loud_unit_is_no_difference() -> None:
    """All errors on one of forty connections: it had to be on some side."""
    failed = np.zeros(40)
    failed[39] = 50
    scores = Scores(np.zeros(40, np.int64), np.arange(40), np.full(40, 50.0), failed, failed)
    assert compare_units(scores, sides(40), 1, ALPHA).p_values[0] > 0.9


def test_many_units_are_bundled() -> None:
    """More units than are dealt out, on sides of unequal number: level and power stay."""
    units = 3 * UNITS_MAX
    for shift, is_different in ((0, False), (0.5, True)):
        scores = samples(np.random.default_rng(8), units, shift, count=2, share_a=0.3)
        p_value = compare_units(scores, sides(units, 0.3), 1, ALPHA).p_values[0]
        assert (p_value < ALPHA) == is_different


def test_rows_of_a_unit_add_up() -> None:
    """A unit's sums may come in several rows."""
    scores = samples(np.random.default_rng(9), 20, 1.0)
    halved = Scores(
        *(np.concatenate((each, each)) for each in scores[:2]),
        *(np.concatenate((each / 2, each / 2)) for each in scores[2:]),
    )
    one, other = (compare_units(each, sides(20), 1, ALPHA) for each in (scores, halved))
    assert one.p_values == pytest.approx(other.p_values)


def test_a_comparison_that_cannot_be_significant_is_left_out() -> None:
    """By hand: two could reach 0.005, the third is left out, having 0.006 at best."""
    assert tarone(np.array([0.001, 0.002, 0.006]), 0.01) == 2
    assert tarone(np.array([0.5, 0.2]), 0.01) == 1
    assert tarone(np.array([1e-6] * 7), 0.01) == 7


def test_corrected_p_values_are_those_computed_by_hand() -> None:
    """Holm's correction of four p-values is the one computed by hand."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
