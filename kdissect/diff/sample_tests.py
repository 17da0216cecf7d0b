"""The comparisons of a diff, tested together: by connections, clients and moments."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kdissect.diff.client_pairs import compare_clients
from kdissect.diff.collect import BLOCKS, TAILS, Distributions
from kdissect.diff.statistics import Bools, Ints, Scores, compare_units

FALSE_ALARM_RATE = 0.01  # of all comparisons of a diff together
_PAIRED = ("midrank", *TAILS)  # scores that clients of both sides can decide


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
        self._rows: list[tuple[dict[str, Any], str]] = []
        self._parts: list[tuple[Any, ...]] = []

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

    def _count_units(self, rows: list[dict[str, Any]], number: Ints, sums: dict[str, Any]) -> None:
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
