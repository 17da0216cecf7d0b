"""Connections that go on in later runs: the rows of one run, wherever the captures are cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import SegmentBatch
from kdissect.kafka.assemble import assemble
from kdissect.kafka.assembly import Assembly
from kdissect.kafka.options import StreamOptions
from kdissect.resume.rejoined import FINAL, OPEN, SHOWN_BEFORE, joined_batch, keep, rejoin
from kdissect.resume.tails import MS, Keeping, Open, digests
from tests.kafka.plain_reader import read_capture

SHIPPED = Path(__file__).parents[2] / "captures"
SHARED = Path(__file__).parents[3] / "shared" / "captures"
NAMES = ("shapes/seqwrap", "shapes/reordered", "shapes/duplicated", "shapes/midstream",
         "shapes/drop1pct", "shapes/snap128", "sasl/sasl",
         "old_clients/java_0_10_2_2", "java_latest/java_latest", "zookeeper/zk_1_1_1",
         "odd/odd_conversations", "admin/admin", "transactions/transactions")  # fmt: skip
SMALL = Keeping(0, keep_ns=10 * MS, linger_ns=20 * MS, cut_bytes=0, looked_at=512)
USUAL = Keeping(0)
TABLES = ("exchanges", "connections", "anomalies")


def rotated(batch: SegmentBatch, bounds: list[int]) -> SegmentBatch:
    """The packets behind each bound in a file of their own, numbered from 1."""
    segments = batch.segments.copy()
    source = np.searchsorted(np.array(bounds), segments["packet"], "left")
    segments["source"] = source
    segments["packet"] -= np.array([0, *bounds])[source]
    return SegmentBatch(batch.endpoints, segments)


def rows_of(assembly: Assembly, lanes=None, lane=None) -> dict[str, list]:
    found = {}
    for name in TABLES:
        table = getattr(assembly, name)
        chosen = np.ones(len(table), bool) if lanes is None else lanes[name] == lane
        if name == "connections":
            rows = table.copy()
            rows["endpoints"] = 0
            raw = rows.tobytes()
            size = rows.itemsize
            found[name] = [raw[n * size : n * size + size] for n in np.flatnonzero(chosen)]
        else:
            found[name] = digests(table[chosen]).tolist()
    return found


def run_in_turns(batch, files, bounds, keeping):
    """(rows by table, kinds of pairs kept on the way); None where a part did not fit."""
    final = {name: [] for name in TABLES}
    opened: dict[str, list] = {name: [] for name in TABLES}
    kept, kinds = Open(), set()
    segments = batch.segments
    end_ns = 0
    for source in range(len(bounds) + 1):
        some = segments[segments["source"] == source]
        here = SegmentBatch(batch.endpoints, some)
        if len(some):
            end_ns = max(end_ns, int(some["time_ns"].max()))
            used, index = np.unique(some["endpoints"], return_inverse=True)
            some["endpoints"] = index
            here = SegmentBatch(batch.endpoints[used], some)
        else:
            here = SegmentBatch(batch.endpoints[:0], some)
        joined, pairs, at = joined_batch(kept, [here])
        sources = files.standing_in(source, kept.data)
        run = rejoin(kept, joined, pairs, at, sources, StreamOptions(), (), source)
        if run.unfit:
            return run.unfit, kinds
        result = keep(run, sources, StreamOptions(), replace(keeping, end_ns=end_ns))
        assert result is not None
        lanes = {"exchanges": result.exchanges, "connections": result.connections,
                 "anomalies": result.anomalies}  # fmt: skip
        for name, some_rows in rows_of(run.assembly, lanes, FINAL).items():
            final[name] += some_rows
        opened = rows_of(run.assembly, lanes, OPEN)
        assert (result.exchanges[run.is_shown] == SHOWN_BEFORE).all()
        kept = Open.from_bytes(result.open.to_bytes())
        kinds |= set(kept.pairs["kind"].tolist())
    return {name: sorted(final[name] + opened[name]) for name in TABLES}, kinds


def loaded(name: str):
    path = SHARED / f"{name}.pcap"
    if not path.exists():
        pytest.skip(f"no capture {path}")
    return read_capture(path)[0], path


def check(name: str, bounds: list[int], keeping: Keeping) -> tuple[bool, set[int]]:
    batch, path = loaded(name)
    files = Sources([path] * (len(bounds) + 1))
    whole = rotated(batch, bounds)
    found, kinds = run_in_turns(whole, files, bounds, keeping)
    if isinstance(found, str):
        return False, kinds
    expected = {key: sorted(rows) for key, rows in rows_of(assemble(whole, files)).items()}
    for key in TABLES:
        assert found[key] == expected[key], (name, bounds, key)
    return True, kinds


@pytest.mark.parametrize("keeping", [USUAL, SMALL], ids=["usual", "small"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_one_run(name, keeping):
    batch, _ = loaded(name)
    count = int(batch.segments["packet"].max())
    random = np.random.default_rng(1)
    fits = 0
    for parts in (1, 1, 2, 4, 9):
        bounds = sorted(set(random.integers(1, count, parts).tolist()))
        fits += check(name, bounds, keeping)[0]
    assert fits, "nothing ever fitted"
