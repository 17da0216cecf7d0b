"""Tests of samples, against scipy and against what they promise."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdissect.diff.statistics import EXACT_MAX, holm, rank_test, share_test

scipy_stats = pytest.importorskip("scipy.stats")

SAMPLE = st.lists(st.integers(0, 30), min_size=8, max_size=60)


def ranked(a: list[int], b: list[int]) -> tuple[int, int, float, float]:
    larger = sum((y > x) + (y == x) / 2 for x in a for y in b)
    _, counts = np.unique([*a, *b], return_counts=True)
    return len(a), len(b), float(larger), float((counts.astype(float) ** 3 - counts).sum())


@given(SAMPLE, SAMPLE)
@settings(max_examples=200, deadline=None)
def test_ranks(a: list[int], b: list[int]) -> None:
    """Ties and all, as scipy has it."""
    test = rank_test(*ranked(a, b))
    if len({*a, *b}) == 1:
        assert test == (0, 1)
        return
    known = scipy_stats.mannwhitneyu(b, a, method="asymptotic")
    assert test.p_value == pytest.approx(known.pvalue, abs=1e-9)
    assert test.delta == pytest.approx(2 * known.statistic / (len(a) * len(b)) - 1)


@given(st.integers(0, 40), st.integers(0, 200), st.integers(0, 40), st.integers(0, 300))
@settings(max_examples=200, deadline=None)
def test_small_shares(events_a: int, rest_a: int, events_b: int, rest_b: int) -> None:
    """Fisher's exact test, as scipy has it."""
    p_value = share_test(events_a, events_a + rest_a, events_b, events_b + rest_b)
    known = scipy_stats.fisher_exact([[events_a, rest_a], [events_b, rest_b]])[1]
    assert p_value == pytest.approx(known, rel=1e-6, abs=1e-12)


def test_large_shares() -> None:
    """Both ways agree where they meet, and huge counts do not overflow."""
    count = 20 * EXACT_MAX
    exact = share_test(EXACT_MAX // 2 - 40, count, EXACT_MAX // 2 + 40, count)
    normal = share_test(EXACT_MAX // 2 - 39, count, EXACT_MAX // 2 + 41, count)
    assert exact == pytest.approx(normal, rel=0.2)
    assert share_test(10**9, 10**12, 2 * 10**9, 10**12) < 1e-100


def test_holm() -> None:
    """By hand: 0.01 of 4, 0.02 of 3, 0.03 and 0.04 no lower than what came before."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_false_alarms_are_rare() -> None:
    """Ten comparisons of equal things at a time: at 5 %, one of twenty rounds alarms, not half."""
    generator = random.Random(5)
    alarms = 0
    for _ in range(200):
        p_values = []
        for _ in range(10):
            a, b = ([int(generator.expovariate(0.1)) for _ in range(30)] for _ in range(2))
            p_values.append(rank_test(*ranked(a, b)).p_value)
        alarms += min(holm(p_values)) < 0.05
    assert alarms <= 20
