"""Compares each client with itself: the same client ID on both sides.

A test by random assignment needs about ten connections on each side. A few clients decide more if
both captures have them: differences between the clients cancel out. The test is Student's for
paired samples. It has one value for each client, so one slow client is no difference.
"""

from __future__ import annotations

import math

import numpy as np

from kdissect.diff.statistics import Bools, Floats, Ints, Scores

CLIENTS_MIN = 4  # on both sides; with fewer, no difference is certain
SMALL_UNITS_MAX = 24  # of a comparison; a test by random assignment decides with more
SHARE_MIN = 0.5  # of the exchanges of each side that the clients of both sides must have
# A few clients may agree by chance more than clients do. Scores are between 0 and 1.
SPREAD_MIN = 0.02


def compare_clients(scores: Scores, is_b: Bools, client: Ints, comparison_count: int) -> Floats:
    """Return a p-value by comparison; NaN if too few clients are on both sides.

    is_b, client: by unit, its side and the number of its client.
    """
    units, _ = np.unique(np.stack((scores.comparison, scores.unit)), axis=1)
    is_small = np.bincount(units, minlength=comparison_count) <= SMALL_UNITS_MAX
    rows = is_small[scores.comparison]
    unit, comparison = scores.unit[rows], scores.comparison[rows]
    _, client_number = np.unique(client[unit], return_inverse=True)
    shape = (2, comparison_count, int(client_number.max(initial=-1)) + 1)
    count, total = np.zeros(shape), np.zeros(shape)
    place = (is_b[unit].astype(np.int64), comparison, client_number)
    np.add.at(count, place, scores.exchanges[rows])
    np.add.at(total, place, scores.total[rows])
    is_pair = (count[0] > 0) & (count[1] > 0)
    means = np.divide(total, count, out=np.zeros(shape), where=count > 0)
    share = (count * is_pair).sum(2) / np.maximum(count.sum(2), 1)
    p_values = np.full(comparison_count, np.nan)
    for number in np.flatnonzero((is_pair.sum(1) >= CLIENTS_MIN) & (share.min(0) >= SHARE_MIN)):
        differences = (means[1] - means[0])[number, is_pair[number]]
        p_values[number] = paired_p_value(differences)
    return p_values


def paired_p_value(differences: Floats) -> float:
    """Return the two-sided p-value of Student's test that the mean difference is 0."""
    spread = max(float(differences.std(ddof=1)), SPREAD_MIN)
    t = abs(float(differences.mean())) * math.sqrt(len(differences)) / spread
    return student_p_value(t, len(differences) - 1)


def student_p_value(t: float, freedom: int) -> float:
    """Return the probability of a value beyond ±t, with so many degrees of freedom.

    The finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = freedom % 2
    term = cosine if is_odd else 1.0
    series = 0.0
    for k in range(2 + is_odd, freedom + 1, 2):
        series += term
        term *= (k - 1) / k * cosine**2
    within = 2 / math.pi * (angle + sine * series) if is_odd else sine * series
    return max(1 - within, 0.0)
