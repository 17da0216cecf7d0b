"""A bucket that goes on gives the same rows whether one thread or two make them."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.crowd import connections_of, crowd, heartbeat
from kdissect.pipeline import beside, exchange_index, local
from kdissect.pipeline.assemble import assemble_step
from kdissect.pipeline.options import Options
from kdissect.pipeline.plan import planned
from kdissect.pipeline.run_plan import RunPlan
from kdissect.pipeline.scan import scan_step
from kdissect.pipeline.step_rows import Kind
from kdissect.resume.tails import digests

CAPTURES = Path(__file__).parents[2] / "captures"


def rows_of(path: Path, threads: int, part_rows: int, patch: pytest.MonkeyPatch) -> Any:
    """(digests of exchanges with their bytes' places by slot in order, the other rows)."""
    patch.setattr(beside, "PART_ROWS", part_rows)
    patch.setattr(RunPlan, "threads", lambda *_: threads)
    exchanges: Any = defaultdict(list)
    others = []
    with planned([path], Options(), 2) as plan:
        plan = replace(plan, keeps=True, bucket_count=2)
        sources = plan.sources()
        buckets: Any = defaultdict(list)
        for number in range(len(plan.splits)):
            for row in scan_step(plan, sources, number):
                buckets[row.key].append(row)
        for bucket in sorted(buckets):
            for row in assemble_step(plan, plan.sources(), local.in_order(buckets[bucket])):
                if row.kind == Kind.EXCHANGES:
                    exchanges[row.key, row.order >> 20].append((row.order, row.data))
                elif row.kind == Kind.STATS:
                    stats = json.loads(row.data)
                    others.append((row.key, {**stats, "timings": None}))
                else:
                    others.append(row)
    found = {}
    for key, parts in exchanges.items():
        some = exchange_index.concat([exchange_index.from_bytes(data) for _, data in sorted(parts)])
        ids = some.connections["connection_id"][some.exchanges["connection"]]
        place = exchange_index.places(some.exchanges, some.extents)[["source", "pos", "length"]]
        found[key] = (digests(some.exchanges).tolist(), ids.tolist(), place.tolist())
    return found, others


@pytest.mark.parametrize("path", sorted(CAPTURES.glob("*.pcap*")), ids=lambda path: path.name)
def test_two_threads_change_no_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows_of(path, 1, 1 << 15, monkeypatch)
    for threads, part_rows in ((2, 1 << 15), (2, 7), (1, 7)):
        assert rows_of(path, threads, part_rows, monkeypatch) == expected


def test_a_giant_among_others_whose_first_request_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole.pcap"
    crowd(whole, heartbeat(), connections_of(3000, 9, 0.9))
    data = whole.read_bytes()
    size = 16 + int(np.frombuffer(data, "<u4", 1, 24 + 8)[0])
    cut = tmp_path / "cut.pcap"
    cut.write_bytes(data[:24] + data[24 + size :])
    expected = rows_of(cut, 1, 1 << 15, monkeypatch)
    assert sum(len(digest) for digest, _, _ in expected[0].values()) == 3000
    assert rows_of(cut, 2, 100, monkeypatch) == expected
