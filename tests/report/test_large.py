"""A report of a million exchanges: quick, in bounded memory, small."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import kdissect
from bench.multiply import multiply

COPIES = 25  # of a capture with 40,858 exchanges
SECONDS_MAX, MEMORY_MB_MAX, PAGE_MB_MAX = 20, 1500, 4
_MEASURED = """
import resource, sys
from kdissect.report import build
build(sys.argv[1], sys.argv[2])
used = resource.getrusage(resource.RUSAGE_SELF)
# not ru_maxrss, which begins with that of the process that started this one
peak_kb = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak_kb) >> 10, used.ru_utime + used.ru_stime)
"""


@pytest.mark.heavy
def test_a_million_exchanges(shared_capture: Any, tmp_path: Path) -> None:
    capture = shared_capture("perf/perf_small.pcap")
    many = tmp_path / "many.pcap"
    multiply(capture, many, COPIES)
    rows = kdissect.read(many).write(tmp_path / "tables").exchanges.num_rows
    assert rows > 1_000_000
    many.unlink()
    out = tmp_path / "many.html"
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(tmp_path / "tables"), str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    seconds = time.perf_counter() - began
    # the time of the processors: on an idle machine the clock shows less, on a busy one anything
    memory_mb, cpu_seconds = (float(word) for word in done.stdout.split())
    page_mb = out.stat().st_size / 1e6
    found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "mb": memory_mb, "page_mb": page_mb}
    print(json.dumps({"exchanges": rows, **found}))
    assert cpu_seconds < SECONDS_MAX
    assert memory_mb < MEMORY_MB_MAX
    assert page_mb < PAGE_MB_MAX
