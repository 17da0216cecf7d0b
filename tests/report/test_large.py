"""A report of a million exchanges: in bounded memory, small."""

import json
import sys
from pathlib import Path

import pytest

import kdissect
from bench.multiply import multiply
from tests.material import CAPTURES, needed
from tests.processes import run

COPIES = 25  # of a capture with 40,858 exchanges
MEMORY_MB_MAX, PAGE_MB_MAX = 1500, 4
_MEASURED = """
import sys
import kdissect
kdissect.open(sys.argv[1]).report(sys.argv[2])
# not ru_maxrss, which begins with that of the process that started this one
peak_kb = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak_kb) >> 10)
"""


@pytest.mark.heavy
def test_a_million_exchanges_in_bounded_memory(tmp_path: Path) -> None:
    """A report of a million exchanges stays within its memory and its page size."""
    capture = needed(CAPTURES / "perf" / "perf_small.pcap")
    many = tmp_path / "many.pcap"
    multiply(capture, many, COPIES)
    rows = kdissect.read(many).write(tmp_path / "tables").exchanges.num_rows
    assert rows > 1_000_000
    many.unlink()
    out = tmp_path / "many.html"
    done = run(sys.executable, "-c", _MEASURED, tmp_path / "tables", out, check=True)
    memory_mb, page_mb = float(done.stdout), out.stat().st_size / 1e6
    print(json.dumps({"exchanges": rows, "mb": memory_mb, "page_mb": page_mb}))
    assert memory_mb < MEMORY_MB_MAX
    assert page_mb < PAGE_MB_MAX
