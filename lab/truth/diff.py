"""How often `kdissect diff` raises false alarms, what it leaves open, and which delays it finds.

Two sides are alike if the connections of one capture, or the quarter seconds of one recording, are
assigned to both at random. Two recordings of one series (see `recordings`) are alike, too. Delays
are put into answers, or into the transfer of requests, of one side.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

import kdissect
from kdissect import Tables
from kdissect.api import Table
from kdissect.diff.compare import OPEN, UNDECIDED, compare, failing
from lab.truth import recordings
from lab.truth.captures import read_capture
from lab.truth.section import table
from tests.builders.halves import halves, with_exchanges

KINDS = ("errors", "latency", "transfers", "sizes")
SPLITS = 2  # of each capture, and of each recording
MOMENT_US = 250_000
CONNECTIONS_MIN = 8  # a capture of fewer has no halves
API = "Produce"
DELAYED = {"latency": "service_ms", "transfers": "upload_ms"}  # the column that is delayed, by kind
DELAYS_MS = (5, 20, 100)
SHARES = (0.1, 0.5, 1.0)
SPLIT_COUNT = 15  # recordings whose moments are split
DELAYED_COUNT, P90_MS = 6, 6.0  # recordings that get delays, and their p90 after scaling
FOUND, MISSED = "found", "missed"
OUTCOMES = (FOUND, UNDECIDED, MISSED)
SEED = 7


def moments(tables: Tables, seed: int) -> tuple[Tables, Tables]:
    """The quarter seconds of a recording dealt out to two sides: one workload, one machine."""
    columns = ["connection_id", "exchange_id", "request_time", "response_time"]
    exchanges = tables.exchanges.to_arrow(columns=columns)
    times = pc.coalesce(exchanges["request_time"], exchanges["response_time"])
    microseconds = times.cast(pa.int64()).to_numpy()
    moment = (microseconds - microseconds.min()) // MOMENT_US
    is_a = (np.random.default_rng(seed).permutation(int(moment.max()) + 1) % 2 == 0)[moment]
    return with_exchanges(tables, exchanges.filter(is_a)), with_exchanges(
        tables, exchanges.filter(~is_a)
    )


def delayed(tables: Tables, column: str, share: float, delay_ms: float) -> Tables:
    """The tables with longer times in a column, for a share of the exchanges of one API."""

    def times(rows: pa.Table) -> pa.Array:
        dice = np.random.default_rng(SEED).random(rows.num_rows) < share
        chosen = pc.and_(pc.equal(rows["api_name"], API), pa.array(dice))
        return pc.if_else(chosen, pc.add(rows[column], float(delay_ms)), rows[column])

    return _with_times(tables, column, times)


def _with_times(tables: Tables, column: str, times: Callable[[pa.Table], pa.Array]) -> Tables:
    """The tables with other times in a column of `exchanges`."""
    rows = tables.exchanges.to_arrow()
    place = rows.schema.get_field_index(column)
    rows = rows.set_column(place, rows.schema.field(place), times(rows))
    made = {name: tables[name] for name in tables.names}
    made["exchanges"] = Table("exchanges", pads.dataset(rows))
    return Tables(made, tables.manifest)


@dataclass
class Tally:
    """Outcomes of diffs of sides that are alike.

    judged, undecided: by kind, the comparisons that a test could decide, and those left open.
    """

    diffs: int = 0
    failed: int = 0
    judged: Counter[str] = field(default_factory=Counter)
    undecided: Counter[str] = field(default_factory=Counter)

    def add(self, document: dict[str, Any]) -> None:
        """Count one diff."""
        self.diffs += 1
        self.failed += bool(failing(document, KINDS))
        for kind in KINDS:
            rows = [row for row in document["compared"][kind] if row["too_few"] is None]
            self.judged[kind] += len(rows)
            self.undecided[kind] += sum(row["change"] == UNDECIDED for row in rows)

    def cells(self) -> list[object]:
        """The cells of a table: diffs, false alarms, and open comparisons by kind."""
        shares = (f"{self.undecided[kind]:,} of {self.judged[kind]:,}" for kind in KINDS)
        return [self.diffs, self.failed, *shares]


def try_recording(tables: Tables) -> Tally:
    """Diffs of the moments of a recording."""
    tally = Tally()
    for seed in range(SPLITS):
        tally.add(compare(*moments(tables, seed)))
    return tally


def try_delays(tables: Tables) -> dict[tuple[str, int, float], str]:
    """By kind, delay and share: FOUND, UNDECIDED (in words) or MISSED.

    All service times are scaled to those of a broker with more work: connections and moments stay
    as alike as they are.
    """
    factor = P90_MS / percentile_ms(tables, 0.9)
    scaled = _with_times(tables, "service_ms", lambda rows: pc.multiply(rows["service_ms"], factor))
    a, b = moments(scaled, 0)
    return {
        (kind, delay, share): _outcome(compare(a, delayed(b, column, share, delay)), kind)
        for kind, column in DELAYED.items()
        for delay in DELAYS_MS
        for share in SHARES
    }


def _outcome(document: dict[str, Any], kind: str) -> str:
    changes = [row for row in document["changes"][kind] if row["api"] == API]
    if any(row["is_worse"] for row in changes):
        return FOUND
    return UNDECIDED if any(row["change"] in OPEN for row in changes) else MISSED


def percentile_ms(tables: Tables, share: float) -> float:
    """A percentile of the answers that delays are put into."""
    rows = tables.exchanges.to_arrow(["api_name", "service_ms"])
    answers = rows.filter(pc.equal(rows["api_name"], API))
    return float(pc.quantile(answers["service_ms"], share)[0].as_py())


def try_captures(captures: Path) -> dict[str, Tally]:
    """Diffs of random halves of each capture with enough connections."""
    tallies = {}
    for path in sorted(captures.glob("*/*.pcap")):
        tables = read_capture(path)
        connections = tables.exchanges.to_arrow(["connection_id"])["connection_id"]
        if len(connections.unique()) >= CONNECTIONS_MIN:
            tally = tallies[f"{path.parent.name}/{path.stem}"] = Tally()
            for seed in range(SPLITS):
                tally.add(compare(*halves(tables, seed)))
    return tallies


def total(tallies: Iterable[Tally]) -> Tally:
    """The sum of tallies."""
    result = Tally()
    for tally in tallies:
        result.diffs += tally.diffs
        result.failed += tally.failed
        result.judged += tally.judged
        result.undecided += tally.undecided
    return result


def try_pairs(tables: Sequence[Tables]) -> Tally:
    """Diffs of all pairs of the recordings of a series."""
    tally = Tally()
    for a, b in itertools.combinations(tables, 2):
        tally.add(compare(a, b))
    return tally


def read_series(series: recordings.Series) -> list[Tables]:
    """The recordings of a series as tables in memory."""
    recordings.record(series)
    return [_in_memory(kdissect.open(path)) for path in recordings.paths(series)]


def _in_memory(tables: Tables) -> Tables:
    made = {
        name: Table(name, pads.dataset(tables[name].dataset.to_table())) for name in tables.names
    }
    return Tables(made, tables.manifest)


def section(captures: Path) -> str:
    """The section of the page."""
    first, second, busy = (
        read_series(series) for series in (recordings.FIRST, recordings.SECOND, recordings.BUSY)
    )
    alike = {
        f"random halves of the moments of {SPLIT_COUNT} recordings": total(
            map(try_recording, first[:SPLIT_COUNT])
        ),
        f"all pairs of {len(first)} recordings of one workload": try_pairs(first),
        f"all pairs of {len(second)} recordings of a second workload": try_pairs(second),
    }
    delays = [try_delays(tables) for tables in first[:DELAYED_COUNT]]
    medians = [percentile_ms(tables, 0.5) for tables in busy]
    return page(try_captures(captures), alike, try_pairs(busy), medians, delays)


def page(
    tallies: dict[str, Tally],
    alike: dict[str, Tally],
    busy: Tally,
    busy_medians_ms: Sequence[float],
    delays: Sequence[dict[tuple[str, int, float], str]],
) -> str:
    """The section of the page, from the outcomes by capture, by kind of pair and by delay."""
    loads = [*recordings.loads(recordings.FIRST), *recordings.loads(recordings.SECOND)]
    busy_loads = recordings.loads(recordings.BUSY)
    heads_of_delays = [f"{kind} {word}" for kind in DELAYED for word in OUTCOMES]
    return "\n".join(
        [
            "## Diff",
            "",
            f"`kdissect diff --fail-on {','.join(KINDS)}` of two sides that are alike: any failure "
            "is a false alarm. Right: at most 1 in 100. A comparison is undecided if there are too "
            "few units for one test among so many. Comparisons that no test could decide (too few "
            "exchanges, connections or moments) are not counted.",
            "",
            "The recordings of a series have one broker and lie one after the other. Broker, "
            "clients and recorder ran before all other processes of a machine with load averages "
            f"of {min(loads):.0f} to {max(loads):.0f}.",
            "",
            table(
                ("alike", "diffs", "false alarms", *(f"{kind} undecided" for kind in KINDS)),
                [
                    (
                        f"random halves of the connections of {len(tallies)} captures",
                        *total(tallies.values()).cells(),
                    ),
                    *((name, *tally.cells()) for name, tally in alike.items()),
                ],
            ),
            "",
            f"{recordings.BUSY.recording_count} more recordings of the first workload ran at "
            "normal priority beside other work, at load averages of "
            f"{min(busy_loads):.0f} to {max(busy_loads):.0f}. Their brokers were slower and faster "
            f"indeed: the median of {API} was {min(busy_medians_ms):.1f} to "
            f"{max(busy_medians_ms):.1f} ms. `diff` cannot tell a busy machine from a slow broker: "
            f"{busy.failed} of {busy.diffs} pairs failed.",
            "",
            f"Delays put into a share of the {API} exchanges of one side, about 3,000 of "
            f"{recordings.FIRST.producers} connections: into the service times, or into the time "
            f"from the first to the last byte of the request. The service times of {len(delays)} "
            f"recordings are scaled to a 90th percentile of {P90_MS:g} ms. The smallest difference "
            "that counts is half of a percentile and 3 ms (p50, p90), 10 ms (p95) or 20 ms (p99).",
            "",
            f"| delay | share | {' | '.join(heads_of_delays)} |",
            f"|---:|---:|{'---:|' * len(heads_of_delays)}",
            *(
                f"| {delay} ms | {share:.0%} | "
                + " | ".join(
                    str(sum(outcomes[kind, delay, share] == word for outcomes in delays))
                    for kind in DELAYED
                    for word in OUTCOMES
                )
                + " |"
                for delay in DELAYS_MS
                for share in SHARES
            ),
        ]
    )
