"""How often `kdissect diff` cries wolf, and which delays it finds: `reports/diff.md`.

    python -m tools.diff_recordings RECORDINGS --count 30
    python -m tools.diff_truth CAPTURES RECORDINGS --out reports/diff.md

CAPTURES is a folder of table sets, a folder each. Their connections are dealt out to two sides at
random: both sides are alike, so any failure of ``--fail-on errors,latency,sizes`` is a false alarm.
RECORDINGS are of one workload: any failure of a pair is one, too. Delays are put into one side.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

import kdissect
from kdissect.api import Table, Tables
from kdissect.diff import compare, failing

KINDS = ("errors", "latency", "sizes")
CONNECTIONS_MIN = 8  # a capture of fewer has no halves
DELAYS_MS = (5, 20, 100)
SHARES = (0.1, 0.5, 1.0)
API = "Produce"
LATENCY_COLUMNS = ("latency_ms", "service_ms")
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
    for name in LATENCY_COLUMNS:
        place = rows.schema.get_field_index(name)
        if place >= 0:
            later = pc.if_else(chosen, pc.add(rows[name], float(delay_ms)), rows[name])
            rows = rows.set_column(place, rows.schema.field(name), later)
    made = {name: tables[name] for name in tables.names}
    made["exchanges"] = Table("exchanges", pads.dataset(rows))
    return Tables(made, tables.manifest)


def outcome(document: dict[str, Any]) -> str:
    """`failed` with the kinds, `undecided`, or `nothing`."""
    failed = failing(document, KINDS)
    if failed:
        return "failed"
    changes = itertools.chain(*(document["changes"][kind] for kind in KINDS))
    return "undecided" if any(row["change"] == "undecided" for row in changes) else "nothing"


def alarms(document: dict[str, Any]) -> list[str]:
    """What failed, for a look at it."""
    return [
        json.dumps({"kind": kind, **row}, default=str)
        for kind in failing(document, KINDS)
        for row in document["changes"][kind]
        if row["is_worse"] or (kind == "sizes" and row["change"] != "undecided")
    ]


def all_halves(folder: Path, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(folder.iterdir()):
        tables = kdissect.open(path)
        connections = pc.count_distinct(tables.exchanges.to_arrow(["connection_id"])[0]).as_py()
        if connections >= CONNECTIONS_MIN:
            for seed in range(count):
                yield path.name, compare(*halves(tables, seed))


def all_pairs(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    recordings = {path.name: kdissect.open(path) for path in sorted(folder.iterdir())}
    for a, b in itertools.combinations(recordings, 2):
        yield f"{a} {b}", compare(recordings[a], recordings[b])
