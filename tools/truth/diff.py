"""How often `kdissect diff` raises false alarms, what it leaves open, and which delays it finds.

Two sides are alike if the connections of one capture, or the quarter seconds of one recording (see
`recordings`), are assigned to both at random. Both sides then had the same machine. Delays are put
into answers of one side.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
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
from kdissect.diff import UNDECIDED, compare, failing
from tools.truth import recordings
from tools.truth.latency import read_capture

KINDS = ("errors", "latency", "sizes")
PAIRED = 10  # recordings
SPLITS = 4  # of each capture, and of each recording
MOMENT_US = 250_000
CONNECTIONS_MIN = 8  # a capture of fewer has no halves
API = "Produce"
DELAYS_MS = (5, 20, 100)
SHARES = (0.1, 0.5, 1.0)
QUIET_MS = 10
SEED = 7


def halves(tables: Tables, seed: int) -> tuple[Tables, Tables]:
    """The connections of a table set dealt out to two sides of equal number."""
    exchanges = tables.exchanges.to_arrow(columns=["connection_id", "exchange_id"])
    connections = np.unique(exchanges["connection_id"].to_numpy())
    np.random.default_rng(seed).shuffle(connections)
    is_a = np.isin(exchanges["connection_id"].to_numpy(), connections[: len(connections) // 2])
    return _of(tables, exchanges.filter(is_a)), _of(tables, exchanges.filter(~is_a))


def moments(tables: Tables, seed: int) -> tuple[Tables, Tables]:
    """The quarter seconds of a recording dealt out to two sides: one workload, one machine."""
    columns = ["connection_id", "exchange_id", "request_time", "response_time"]
    exchanges = tables.exchanges.to_arrow(columns=columns)
    times = pc.coalesce(exchanges["request_time"], exchanges["response_time"])
    microseconds = times.cast(pa.int64()).to_numpy()
    moment = (microseconds - microseconds.min()) // MOMENT_US
    is_a = (np.random.default_rng(seed).permutation(int(moment.max()) + 1) % 2 == 0)[moment]
    return _of(tables, exchanges.filter(is_a)), _of(tables, exchanges.filter(~is_a))


def _of(tables: Tables, exchanges: pa.Table) -> Tables:
    """The tables with the rows of some exchanges; anomalies are those of their connections."""
    made = {}
    for name in tables.names:
        columns = tables[name].schema.names
        key = "exchange_id" if "exchange_id" in columns and name != "anomalies" else "connection_id"
        made[name] = tables[name]
        if key in columns:
            chosen = pc.field(key).isin(pc.unique(exchanges[key]))
            made[name] = Table(name, pads.dataset(tables[name].dataset.to_table(filter=chosen)))
    return Tables(made, tables.manifest)


def delayed(tables: Tables, share: float, delay_ms: float) -> Tables:
    """The tables with a share of one API's answers that come later."""
    rows = tables.exchanges.to_arrow()
    dice = np.random.default_rng(SEED).random(rows.num_rows) < share
    chosen = pc.and_(pc.equal(rows["api_name"], API), pa.array(dice))
    later = pc.if_else(chosen, pc.add(rows["service_ms"], float(delay_ms)), rows["service_ms"])
    place = rows.schema.get_field_index("service_ms")
    rows = rows.set_column(place, rows.schema.field(place), later)
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

    def cells(self) -> str:
        """The cells of a table: diffs, false alarms, and open comparisons by kind."""
        shares = (f"{self.undecided[kind]:,} of {self.judged[kind]:,}" for kind in KINDS)
        return f"{self.diffs} | {self.failed} | {' | '.join(shares)}"


@dataclass
class Trial:
    """What the diffs of one recording gave.

    found: by delay and share, whether the delay was found; only for quiet recordings.
    """

    tally: Tally
    found: dict[tuple[int, float], bool]


def try_recording(tables: Tables) -> Trial:
    """Diffs of the moments of a recording, alike and with delays put in."""
    tally, found = Tally(), {}
    for seed in range(SPLITS):
        tally.add(compare(*moments(tables, seed)))
    if pc.quantile(_answers(tables)["service_ms"], 0.9)[0].as_py() < QUIET_MS:
        a, b = moments(tables, 0)
        found = {
            (delay, share): _is_found(compare(a, delayed(b, share, delay)))
            for delay in DELAYS_MS
            for share in SHARES
        }
    return Trial(tally, found)


def _answers(tables: Tables) -> pa.Table:
    rows = tables.exchanges.to_arrow(["api_name", "service_ms"])
    return rows.filter(pc.equal(rows["api_name"], API))


def _is_found(document: dict[str, Any]) -> bool:
    return any(row["api"] == API and row["is_worse"] for row in document["changes"]["latency"])


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


def section(captures: Path) -> str:
    """The section of the page."""
    recorded = [kdissect.open(path) for path in recordings.made()]
    trials = [try_recording(tables) for tables in recorded]
    pairs = Tally()
    for a, b in itertools.combinations(recorded[:PAIRED], 2):
        pairs.add(compare(a, b))
    return page(try_captures(captures), trials, pairs)


def page(tallies: dict[str, Tally], trials: Sequence[Trial], pairs: Tally) -> str:
    """The section of the page, from the outcomes by capture, by recording and by pair."""
    quiet = [trial.found for trial in trials if trial.found]
    heads = " | ".join(f"{kind} undecided" for kind in KINDS)
    return "\n".join(
        [
            "## Diff",
            "",
            f"`kdissect diff --fail-on {','.join(KINDS)}` of two sides that are alike: any failure "
            "is a false alarm. Right: at most 1 in 100. A comparison is undecided if there are too "
            "few units for one test among so many. Comparisons that no test could decide (too few "
            "exchanges, connections or moments) are not counted.",
            "",
            f"| alike | diffs | false alarms | {heads} |",
            "|---|---:|---:|---:|---:|---:|",
            f"| random halves of the connections of {len(tallies)} captures | "
            f"{total(tallies.values()).cells()} |",
            f"| random halves of the moments of {len(trials)} recordings of one workload | "
            f"{total(trial.tally for trial in trials).cells()} |",
            f"| all pairs of {PAIRED} recordings of one workload | {pairs.cells()} |",
            "",
            "The last row is above the limit. The machine ran other work meanwhile (two cores, "
            "load averages of 2 to 22), in some recordings more than in others. That may be the "
            "reason, but no measurement shows it. The two sides of one recording share its "
            "connections and its machine, so the row before is milder than two recordings. The "
            "edges of the tails were chosen with five of these recordings, and none of the pairs.",
            "",
            f"Delays put into a share of the {API} answers of one side, about 1,100 answers of "
            f"{recordings.PRODUCERS} connections. The {len(quiet)} recordings are those whose own "
            f"90th percentile is below {QUIET_MS} ms.",
            "",
            f"| delay | share | found in {len(quiet)} |",
            "|---:|---:|---:|",
            *(
                f"| {delay} ms | {share:.0%} | {sum(found[delay, share] for found in quiet)} |"
                for delay in DELAYS_MS
                for share in SHARES
            ),
            "",
            f"| halves of | diffs | false alarms | {heads} |",
            "|---|---:|---:|---:|---:|---:|",
            *(f"| {name} | {tally.cells()} |" for name, tally in tallies.items()),
        ]
    )
