"""Counts false alarms of `kdissect diff`, and the delays that it finds.

Two sides are alike if the connections of one capture are dealt out to both at random, and if both
are recordings of one workload (see `recordings`). Delays are put into answers of one side.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
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
HALVES = 10  # of each capture
CONNECTIONS_MIN = 8  # a capture of fewer has no halves
API = "Produce"
DELAYS_MS = (5, 20, 100)
SHARES = (0.1, 0.5, 1.0)
DELAY_PAIRS = 10
SEED = 7


def halves(tables: Tables, seed: int) -> tuple[Tables, Tables]:
    """The connections of a table set dealt out to two sides of equal number."""
    exchanges = tables.exchanges.to_arrow(columns=["connection_id", "exchange_id"])
    connections = np.unique(exchanges["connection_id"].to_numpy())
    np.random.default_rng(seed).shuffle(connections)
    middle = len(connections) // 2
    return _of(tables, connections[:middle]), _of(tables, connections[middle:])


def _of(tables: Tables, connections: Any) -> Tables:
    exchanges = tables.exchanges.to_arrow(columns=["connection_id", "exchange_id"])
    chosen = {"connection_id": pa.array(connections)}
    is_chosen = pc.is_in(exchanges["connection_id"], chosen["connection_id"])
    chosen["exchange_id"] = exchanges.filter(is_chosen)["exchange_id"].combine_chunks()
    made = {}
    for name in tables.names:
        dataset = tables[name].dataset
        key = next((each for each in chosen if each in dataset.schema.names), None)
        if key is not None:
            rows = dataset.to_table(filter=pc.field(key).isin(chosen[key]))
            made[name] = Table(name, pads.dataset(rows))
        else:
            made[name] = tables[name]
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


def outcome(document: dict[str, Any], kinds: Sequence[str] = KINDS) -> str:
    """`failed`, `undecided` or `passed`."""
    if failing(document, kinds):
        return "failed"
    rows = itertools.chain.from_iterable(document["changes"][kind] for kind in kinds)
    return "undecided" if any(row["change"] == UNDECIDED for row in rows) else "passed"


def finding(document: dict[str, Any]) -> str:
    """Return the verdict on a delay: `found`, `undecided` or `missed`."""
    rows = [row for row in document["changes"]["latency"] if row["api"] == API]
    if any(row["is_worse"] for row in rows):
        return "found"
    return "undecided" if any(row["change"] == UNDECIDED for row in rows) else "missed"


def _outcomes(documents: Iterable[dict[str, Any]]) -> Counter[str]:
    return Counter(outcome(document) for document in documents)


def section(captures: Path) -> str:
    """The section of the page."""
    by_capture = {}
    for path in sorted(captures.glob("*/*.pcap")):
        tables = read_capture(path)
        connections = tables.exchanges.to_arrow(["connection_id"])["connection_id"]
        if len(connections.unique()) >= CONNECTIONS_MIN:
            by_capture[f"{path.parent.name}/{path.stem}"] = _outcomes(
                compare(*halves(tables, seed)) for seed in range(HALVES)
            )
    alike = [kdissect.open(path) for path in recordings.made()]
    pairs = _outcomes(compare(a, b) for a, b in itertools.combinations(alike, 2))
    delays = {
        (delay, share): Counter(
            finding(compare(a, delayed(b, share, delay)))
            for a, b in itertools.islice(zip(alike[::2], alike[1::2], strict=False), DELAY_PAIRS)
        )
        for delay in DELAYS_MS
        for share in SHARES
    }
    every = sum(by_capture.values(), Counter[str]())
    lines = [
        "## Diff",
        "",
        f"`kdissect diff --fail-on {','.join(KINDS)}` of two sides that are alike: any failure is "
        "a false alarm. Right: at most 1 in 100.",
        "",
        "| alike | diffs | failed | passed | passed, some of it undecided |",
        "|---|---:|---:|---:|---:|",
        _row(f"random halves of the connections of {len(by_capture)} captures", every),
        _row(f"{len(alike)} recordings of one workload, all pairs", pairs),
        "",
        f"Delays put into a share of the {API} answers of one side, in pairs of these recordings, "
        f"{recordings.PRODUCERS} connections on either side:",
        "",
        "| delay | share | found | undecided | missed |",
        "|---:|---:|---:|---:|---:|",
        *(
            f"| {delay} ms | {share:.0%} | {found['found']} | {found['undecided']} | "
            f"{found['missed']} |"
            for (delay, share), found in delays.items()
        ),
        "",
        "| halves of | diffs | failed | passed | passed, some of it undecided |",
        "|---|---:|---:|---:|---:|",
        *(_row(name, found) for name, found in by_capture.items()),
    ]
    return "\n".join(lines)


def _row(name: str, found: Counter[str]) -> str:
    return (
        f"| {name} | {found.total()} | {found['failed']} | {found['passed']} | "
        f"{found['undecided']} |"
    )
