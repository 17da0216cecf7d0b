"""What the loop alone does against a server that answers at once (bench/replay_loop.py)."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.heavy
ATTEMPTS = 3  # the best counts: others may be busy on this machine


def best(is_better: Callable[[dict[str, Any]], float], *options: str) -> dict[str, Any]:
    done = []
    for _ in range(ATTEMPTS):
        command = [sys.executable, "-m", "bench.replay_loop", *options]
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT
        )
        done.append(json.loads(run.stdout))
        assert done[-1]["answered"] == done[-1]["sent"]
        assert not done[-1]["ended"]
    return max(done, key=is_better)


def test_small_requests_at_pace_max() -> None:
    """20 000 requests a second, one in flight on each of 100 connections."""
    found = best(lambda row: row["requests_per_s"], "--requests", "100000")
    print(found)
    assert found["requests_per_s"] >= 20_000


def test_many_connections_at_recorded_pace() -> None:
    """1000 connections, 2000 requests a second: p99 of the lag under 10 ms."""
    options = ("--connections", "1000", "--requests", "20000", "--seconds", "10")
    found = best(lambda row: -row["lag_ms"][1], *options, "--pace", "recorded")
    print(found)
    assert found["lag_ms"][1] < 10
