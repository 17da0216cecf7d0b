"""Two samples compared: rank and tail tests, shares, and the correction for many comparisons.

The tests take counts that SQL has made (see `collect`), so that no sample is ever held here.

- `rank_test`: Mann-Whitney U with the normal approximation, corrected for ties and continuity; it
  asks whether values of one sample tend to be larger. Its effect size is Cliff's delta, from -1 to
  1: the chance that a value of b is larger than one of a, less the chance that it is smaller.
- `share_test`: whether two shares differ, by Fisher's exact test where counts are small and by the
  normal approximation where they are large.
- `holm`: Holm's step-down correction: the chance of even one false alarm among all tests stays
  below the level.

Romano et al. (2006) call a delta of 0.147 small and of 0.33 medium.
"""

from __future__ import annotations

import math
from typing import NamedTuple

EXACT_MAX = 500  # events in both samples up to which Fisher's test is summed


class RankTest(NamedTuple):
    delta: float
    p_value: float


def two_sided(z: float) -> float:
    """The chance of a standard normal value at least as far out."""
    return math.erfc(abs(z) / math.sqrt(2))


def rank_test(count_a: int, count_b: int, larger_b: float, ties: float) -> RankTest:
    """Mann-Whitney U of two samples.

    larger_b: pairs of a value of a and one of b with b's larger, a tie being half a pair.
    ties: the sum of t^3 - t over the numbers t of equal values in both samples together.
    """
    pairs = count_a * count_b
    total = count_a + count_b
    variance = pairs / 12 * (total + 1 - ties / (total * (total - 1)))
    distance = abs(larger_b - pairs / 2) - 0.5
    delta = 2 * larger_b / pairs - 1
    if variance <= 0 or distance <= 0:
        return RankTest(delta, 1.0)
    return RankTest(delta, two_sided(distance / math.sqrt(variance)))


def share_test(events_a: int, count_a: int, events_b: int, count_b: int) -> float:
    """The p-value, two-sided, of equal shares in both."""
    events, total = events_a + events_b, count_a + count_b
    if events in (0, total) or not count_a or not count_b:
        return 1.0
    if min(events, total - events) <= EXACT_MAX:
        return _fisher(events_a, count_a, events, total)
    share = events / total
    error = math.sqrt(share * (1 - share) * (1 / count_a + 1 / count_b))
    return two_sided((events_a / count_a - events_b / count_b) / error)


def _fisher(events_a: int, count_a: int, events: int, total: int) -> float:
    if events > total - events:  # the rarer outcome gives the shorter sum
        events, events_a = total - events, count_a - events_a

    def chance(number: int) -> float:
        return _log_choose(events, number) + _log_choose(total - events, count_a - number)

    seen = chance(events_a)
    low, high = max(0, count_a - (total - events)), min(events, count_a)
    every = [chance(number) for number in range(low, high + 1)]
    # as rare or rarer; equally rare ones differ in the last bits
    rare = math.fsum(math.exp(each - seen) for each in every if each <= seen + 1e-9)
    return min(1.0, rare / math.fsum(math.exp(each - seen) for each in every))


def _log_choose(total: int, chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)


def holm(p_values: list[float]) -> list[float]:
    """The p-values adjusted for their number, in the same order."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted
