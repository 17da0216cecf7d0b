"""Compares two captures by permutation tests: which differences are beyond chance.

Exchanges of one connection resemble each other, and so do exchanges of one moment. So a test sums
its scores by unit: a connection, or a block of time. It then deals the units to both sides at
random, many times. A difference that such deals reach as well is chance. All comparisons of a diff
share the deals and one level.

- Scores are midranks for a whole distribution, and 1 or 0 for a share (errors, the tail).
- A unit of many exchanges weighs more than one of few, but not in proportion: ten exchanges that
  are all alike prove no more than one. The intraclass correlation measures how alike they are.
- Tarone (1990): a comparison with so few units that no deal could be significant is undecided, and
  is not corrected for. Holm (1979) corrects for the number of the others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kdissect.arrays import Bools, Floats, Ints

DEALS = 20_000
BLOCK_DEALS = 1_000  # rows of a matrix of deals
AS_FAR_MAX = 400  # of 20,000 deals: a share of 2 % at least, which no level accepts
UNITS_MAX = 2_000  # more units are bundled
SEED = 1_990
_EQUAL = 1e-4  # sums differ in their last bits: a deal this close to the seen difference reaches it


class Scores(NamedTuple):
    """Sums by comparison and unit; all arrays have one length, and rows of the same pair add up.

    comparison: number of the comparison, from 0. unit: number of the connection or block of time,
    from 0 over both sides. exchanges: how many, at least 1. total, squares: sums of their scores
    and of their squared scores.
    """

    comparison: Ints
    unit: Ints
    exchanges: Floats
    total: Floats
    squares: Floats


class Verdicts(NamedTuple):
    """The results, one per comparison.

    p_values: adjusted for the number of comparisons. is_comparable: whether there are enough units
    for one comparison alone. is_decided: whether there are enough for all comparisons.
    """

    p_values: Floats
    is_comparable: Bools
    is_decided: Bools


def compare_units(
    scores: Scores, is_b: Bools, comparison_count: int, alpha: float, paired: Floats | None = None
) -> Verdicts:
    """Test all comparisons at once.

    is_b: bool[units], whether a unit is of side b. If both sides are alike, no p-value falls below
    alpha, with probability 1 - alpha. paired: p-values of another test or NaN, by comparison; they
    decide comparisons with too few units.
    """
    scores, is_b = _bundled(scores, is_b)
    shape = (len(is_b), comparison_count)
    residuals, takes_part = np.zeros(shape), np.zeros(shape)
    residuals[scores.unit, scores.comparison] = _residuals(scores, comparison_count)
    takes_part[scores.unit, scores.comparison] = 1
    fewest = _fewest(takes_part, is_b)
    attainable = np.maximum(fewest, _farthest(residuals, takes_part, is_b))
    is_paired = np.zeros(comparison_count, bool)
    if paired is not None:
        is_paired = ~np.isnan(paired) & (fewest > alpha / comparison_count)
        fewest[is_paired] = attainable[is_paired] = 0
    level = alpha / tarone(attainable, alpha)
    raw, p_values = np.ones(comparison_count), np.ones(comparison_count)
    chosen = np.flatnonzero(attainable <= level)
    dealt = chosen[~is_paired[chosen]]
    raw[dealt] = _deal(residuals[:, dealt], takes_part[:, dealt], is_b)
    if paired is not None:
        raw[is_paired] = paired[is_paired]
    p_values[chosen] = holm(raw[chosen].tolist())
    return Verdicts(p_values, fewest <= alpha, fewest <= level)


def _bundled(scores: Scores, is_b: Bools) -> tuple[Scores, Bools]:
    """Sum rows of the same pair, and bundle units of one side if there are more than UNITS_MAX."""
    size = math.ceil(len(is_b) / UNITS_MAX)
    order = np.random.default_rng(SEED).permutation(len(is_b))
    place = np.empty(len(is_b), np.int64)
    for side in (~is_b, is_b):
        place[order[side[order]]] = np.arange(side.sum())
    bundles_a = math.ceil((~is_b).sum() / size)
    bundle = place // size + is_b * bundles_a
    bundle_count = int(bundle.max()) + 1
    key = scores.comparison * bundle_count + bundle[scores.unit]
    keys, inverse = np.unique(key, return_inverse=True)
    exchanges, total, squares = (
        np.bincount(inverse, column, len(keys)).astype(np.float64) for column in scores[2:]
    )
    bundled = Scores(keys // bundle_count, keys % bundle_count, exchanges, total, squares)
    return bundled, np.arange(bundle_count) >= bundles_a


def _residuals(scores: Scores, comparison_count: int) -> Floats:
    """Return each unit's part in the difference; the parts of a comparison sum to 0."""

    def sums(values: Floats) -> Floats:
        by_comparison = np.bincount(scores.comparison, values, comparison_count)
        return by_comparison[scores.comparison].astype(np.float64)

    count = scores.exchanges
    exchange_count = sums(count)
    mean = sums(scores.total) / exchange_count
    variance = sums(scores.squares) / exchange_count - mean**2
    # The intraclass correlation r, by its moment: E[(total - count mean)^2] = variance (n + n(n-1)
    # r)
    excess = sums((scores.total - count * mean) ** 2) - variance * exchange_count
    pairs = variance * sums(count * (count - 1))
    alike = np.clip(np.divide(excess, pairs, out=np.ones_like(pairs), where=pairs > 0), 0, 1)
    weight = count / (1 + (count - 1) * alike)
    average = scores.total / count
    residual: Floats = weight * (average - sums(weight * average) / sums(weight))
    residual[variance <= 1e-12] = 0
    return residual


def _fewest(takes_part: Floats, is_b: Bools) -> Floats:
    """Return the smallest p-value that so many units can reach: the best deal and its mirror
    image."""
    counts = zip(takes_part.sum(0), takes_part[is_b].sum(0), strict=True)
    return np.array([min(1.0, 2 / math.comb(int(n), int(n_b))) for n, n_b in counts], np.float64)


def _farthest(residuals: Floats, takes_part: Floats, is_b: Bools) -> Floats:
    """Estimate the p-value of the best deal of these residuals: a few large ones limit it."""
    spread = _spread(residuals, takes_part.sum(0), takes_part[is_b].sum(0))
    farthest = np.abs(residuals).sum(0) / 2
    z = np.divide(farthest, spread, out=np.zeros_like(farthest), where=spread > 0)
    return np.array([math.erfc(score / math.sqrt(2)) for score in z])


def _spread(residuals: Floats, count: Floats, count_b: Floats) -> Floats:
    """Return the standard deviation of b's sum of residuals over all deals of so many units."""
    share = count_b * (count - count_b) / np.maximum(count * (count - 1), 1)
    spread: Floats = np.sqrt(share * (residuals**2).sum(0))
    return spread


def _deal(residuals: Floats, takes_part: Floats, is_b: Bools) -> list[float]:
    """Return, by comparison, the share of deals whose difference is as large as the seen one.

    Besag and Clifford (1991): a comparison takes no more deals after AS_FAR_MAX that are as large.
    """
    count = takes_part.sum(0)

    def distance(is_b: Floats, chosen: Ints) -> Floats:
        spread = _spread(residuals[:, chosen], count[chosen], is_b @ takes_part[:, chosen])
        differences = np.abs(is_b @ residuals[:, chosen])
        return np.divide(differences, spread, out=np.zeros_like(spread), where=spread > 0)

    chosen = np.arange(residuals.shape[1])
    seen = distance(is_b[None].astype(np.float64), chosen)[0]
    generator = np.random.default_rng(SEED)
    deals, as_far = np.ones(len(chosen)), np.ones(len(chosen))
    for _ in range(DEALS // BLOCK_DEALS):
        dealt = np.tile(is_b.astype(np.float64), (BLOCK_DEALS, 1))
        generator.permuted(dealt, axis=1, out=dealt)
        deals[chosen] += BLOCK_DEALS
        as_far[chosen] += (distance(dealt, chosen) >= seen[chosen] - _EQUAL).sum(0)
        chosen = chosen[as_far[chosen] < AS_FAR_MAX]
        if not len(chosen):
            break
    return (as_far / deals).tolist()


def tarone(attainable: Floats, alpha: float) -> int:
    """Return the number of comparisons to correct for: those that could be significant at all."""
    count = 1
    while np.count_nonzero(attainable <= alpha / count) > count:
        count += 1
    return count


def holm(p_values: list[float]) -> list[float]:
    """Return the p-values adjusted for their number, in the same order."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted
