"""Mutated captures hold what any capture holds: a short run here, a long one when asked for.

`KDISSECT_FUZZ_MINUTES` sets the CPU minutes of the long run, `KDISSECT_FUZZ_SEED` its first case,
`KDISSECT_FUZZ_CAPTURES` a folder of further captures.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.fuzz.check import check_bytes, check_case
from tests.fuzz.run import GOLDEN
from tests.processes import run

# a change of each level, to three bases: a base takes as long as a case
SHORT_CASES = (7, 127, 148, 153, 176, 206, 259)


def test_mutated_captures_keep_their_untouched_rows() -> None:
    """Seven mutated captures keep the rows that no mutation touched."""
    compared = 0
    for seed in SHORT_CASES:
        what, rows = check_case(seed)
        print(f"{seed}: {what}, {rows} rows that no mutation touched")
        compared += rows
    assert compared > 1000


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.pcap")), ids=lambda path: path.stem)
def test_cases_that_failed_once_pass(path: Path) -> None:
    """Inputs that broke something before it was mended, whole and in small splits."""
    check_bytes(path.read_bytes(), split_bytes=5000)


@pytest.mark.heavy
def test_many_cases_hold(tmp_path: Path) -> None:
    """Kernels check their indices here: without that, a wrong one reads or writes elsewhere."""
    minutes = os.environ.get("KDISSECT_FUZZ_MINUTES", "5")
    first = os.environ.get("KDISSECT_FUZZ_SEED", "1000")
    command = [sys.executable, "-m", "tests.fuzz.run", "--minutes", minutes, "--seed", first]
    done = run(*command, "--keep", tmp_path, timeout_s=None, KDISSECT_BOUNDSCHECK="1")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
