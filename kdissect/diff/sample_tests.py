"""The comparisons of a diff, tested together: by connections, clients and moments.

A test by random assignment needs about ten connections on each side. A few clients decide more if
both captures have them: a client is compared with itself, so differences between the clients cancel
out. The test is Student's for paired samples. It has one value for each client, so one slow client
is no difference.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kdissect.diff.collect import BLOCKS, TAILS, Distributions
from kdissect.diff.statistics import Bools, Floats, Ints, Scores, compare_units
from kdissect.tables.schemas import Row

FALSE_ALARM_RATE = 0.01  # of all comparisons of a diff together
_PAIRED = ("midrank", *TAILS)  # scores that clients of both sides can decide
CLIENTS_MIN = 4  # on both sides; with fewer, no difference is certain
SMALL_UNITS_MAX = 24  # of a comparison; a test by random assignment decides with more
SHARE_MIN = 0.5  # of the exchanges of each side that the clients of both sides must have
# A few clients may agree by chance more than clients do. Scores are between 0 and 1.
SPREAD_MIN = 0.02


class SampleTest(NamedTuple):
    """The result of a test; the default is that of a row with too few exchanges for one.

    too_few: the units that exclude any result, "connections" or "moments". is_decided: there are
    enough units for all comparisons of the diff.
    """

    p_value: float = 1.0
    is_decided: bool = True
    too_few: str | None = None


class SampleTests:
    """The comparisons of a diff; each test's result is written into the row that it compares.

    connection_is_b: by connection, whether it is of side b. client: by connection, the number of
    its client.
    """

    def __init__(self, connection_is_b: Bools, client: Ints) -> None:
        self._is_b = {"connection": connection_is_b, "block": np.arange(2 * BLOCKS) >= BLOCKS}
        self._client = client
        self._rows: list[tuple[Row, str]] = []
        self._parts: list[tuple[Ints | Floats, ...]] = []

    def add(self, samples: Distributions, score: str, sample_min: int) -> None:
        """Add a comparison for each row that has enough exchanges on both sides.

        score: "failed", "midrank" or one of TAILS, the columns of `samples.sums` to compare.
        """
        sums = {name: samples.sums[name].to_numpy() for name in samples.sums.column_names}
        number = sums["number"].astype(np.int64)
        self._count_units(samples.rows, number, sums)
        is_enough = np.array([min(row["n_a"], row["n_b"]) >= sample_min for row in samples.rows])
        comparison = np.cumsum(is_enough) - 1 + len(self._rows)
        for row, is_compared in zip(samples.rows, is_enough, strict=True):
            row[score] = SampleTest()
            self._rows += [(row, score)] if is_compared else []
        if not len(number):
            return
        chosen = is_enough[number]
        columns = ("connection", "block", "count", f"{score}_total", f"{score}_squares")
        self._parts.append((comparison[number[chosen]], *(sums[name][chosen] for name in columns)))

    def _count_units(self, rows: list[Row], number: Ints, sums: dict[str, Ints]) -> None:
        """Write `connections_a`, `moments_a` and the same of b into the rows."""
        for unit, name in (("connection", "connections"), ("block", "moments")):
            for side, is_b in (("a", False), ("b", True)):
                of_side = self._is_b[unit][sums[unit]] == is_b
                pairs = np.unique(np.stack((number, sums[unit]))[:, of_side], axis=1)
                counts = np.bincount(pairs[0], minlength=len(rows))
                for row, count in zip(rows, counts.tolist(), strict=True):
                    row[f"{name}_{side}"] = count

    def run(self) -> None:
        """Run all tests: a difference must be beyond chance by connections (or clients) and by
        moments."""
        if not self._rows:
            return
        comparison, connection, block, *sums = map(np.concatenate, zip(*self._parts, strict=True))
        count = len(self._rows)
        by_connection = Scores(comparison, connection, *sums)
        is_b = self._is_b["connection"]
        paired = compare_clients(by_connection, is_b, self._client, count)
        paired[[score not in _PAIRED for _, score in self._rows]] = np.nan
        connections = compare_units(by_connection, is_b, count, FALSE_ALARM_RATE, paired)
        moments = compare_units(
            Scores(comparison, block, *sums), self._is_b["block"], count, FALSE_ALARM_RATE
        )
        p_values = np.maximum(connections.p_values, moments.p_values)
        is_decided = connections.is_decided & moments.is_decided
        for place, (row, score) in enumerate(self._rows):
            too_few = None
            if not connections.is_comparable[place]:
                too_few = "connections"
            elif not moments.is_comparable[place]:
                too_few = "moments"
            row[score] = SampleTest(p_values[place].item(), is_decided[place].item(), too_few)


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
