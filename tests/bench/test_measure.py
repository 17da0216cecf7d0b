"""The benchmarks' own arithmetic: turns, memory of processes, batches of the floor, the page."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import inputs, report, suite
from bench.floor import batches_of
from bench.measure import MemoryWatch, cpu_seconds, family, first_line, interleaved, spread, timed
from bench.suite import BENCHMARKS
from kdissect.codec.compression import CODEC_NAMES
from kdissect.codec.record_batches import decode_record_set
from kdissect.codec.record_encoder import encode_batch

MACHINE = {
    "date": "2026-01-02", "commit": "abc1234", "load": 0.5, "processor": "a processor",
    "core_count": 2, "memory_gb": 8, "system": "Linux 6", "python": "3.11", "java": "17",
    "tshark": None, "pyspark": "4", "pyarrow": "22", "numpy": "2", "numba": "0", "cramjam": "2",
    "crc32c": "2",
}  # fmt: skip


def test_jobs_take_turns() -> None:
    """Each job runs once per round, in the order given."""
    calls: list[str] = []

    def job(name: str) -> Any:
        return lambda: calls.append(name) or len(calls)

    results = interleaved({"a": job("a"), "b": job("b")}, 2)
    assert calls == ["a", "b", "a", "b"]
    assert results == {"a": [1, 3], "b": [2, 4]}
    assert spread([3.0, 1.0, 2.0]) == [2.0, 1.0, 3.0]


def test_processor_time_of_a_family_is_summed() -> None:
    """A child that has ended counts with its parent."""
    burn = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        while (used := cpu_seconds(process.pid)) < 0.3:
            time.sleep(0.05)
        process.communicate(b"\n")
    assert 0.3 <= used < 5


def test_memory_of_a_family_is_summed() -> None:
    """The memory of a grandchild counts, and the peak includes it."""
    held = 40 << 20
    inner = f"import time; data = b'x' * {held}; print('ready', flush=True); time.sleep(600)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            assert len(family(process.pid)) == 2
            with MemoryWatch(process.pid) as peak:
                while peak.sample_count < 2:
                    time.sleep(0.05)
            assert peak.process_count == 2
            assert 0 < peak.driver < held < peak.workers
            assert held < peak.python_anonymous <= peak.python < 3 * held
            assert peak.java == 0
        finally:
            for pid in reversed(family(process.pid)):
                subprocess.run(["kill", str(pid)], check=True)


def test_the_floor_finds_the_whole_batches() -> None:
    """Batches lie side by side in the floor's buffer; one cut at the end of a set is left out."""
    records = [{"offset": n, "timestamp_ms": n, "key": None, "value": b"v" * n} for n in range(9)]
    batches = [encode_batch(records, codec=codec) for codec in CODEC_NAMES]
    sets = [b"".join(batches[:3]) + batches[3][:-1], b"", batches[3] + batches[4]]
    found = batches_of(sets)
    data = b"".join(sets)
    assert [CODEC_NAMES[batch.codec] for batch in found] == list(CODEC_NAMES)
    for batch, expected in zip(found, batches, strict=True):
        assert data[batch.start : batch.end] == expected
        assert len(decode_record_set(expected).records) == len(records)
    with pytest.raises(ValueError, match="magic 2"):
        batches_of([bytes(16) + b"\1" + bytes(60)])


def test_a_page_without_results_says_so() -> None:
    """Benchmarks that were not run are named; those that were have their command and ratios."""
    startup = {
        "rounds": 3, "file": "a.pcap", "byte_count": 1000,
        "seconds": {
            "kdissect": [6.0, 5, 7], "empty_spark": [5.0, 4, 6], "empty_kdissect": [4.0, 4, 5],
            "show": [0.6, 0.5, 0.7], "imports": [0.2, 0.2, 0.3]
        },
        "command": "python bench/run.py startup", "machine": MACHINE,
    }  # fmt: skip
    page = report.text({"startup": startup})
    assert (
        "| start-up of dissect / an empty PySpark job with our settings | 1.50 | at most 1.3 | no |"
    ) in page
    assert "(numpy and pyarrow: 0.20) | 0.60 | at most 0.7 | yes |" in page
    assert "6.00 [5.00-7.00]" in page
    assert "`python bench/run.py startup`" in page
    assert page.count("Not run.") == len(BENCHMARKS) - 1
    assert list(report.SECTIONS) == list(BENCHMARKS)


def test_processes_are_timed_and_read() -> None:
    """A process that prints nothing, or ends with another exit code, is an error."""
    code = "import time; print('a', flush=True); time.sleep(600)"
    assert first_line([sys.executable, "-c", code]) > 0
    with pytest.raises(RuntimeError):
        first_line([sys.executable, "-c", ""])
    with pytest.raises(RuntimeError):
        timed([sys.executable, "-c", "exit(1)"])


@pytest.mark.heavy
def test_a_replay_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of a made capture are answered as in it; the page has the ratios."""
    monkeypatch.setattr(inputs, "WORK", tmp_path)
    made = inputs.small_requests(400, 20)
    run = suite._replayed(made.path, "max")
    assert (run["sent"], run["ended"], run["verdicts"]) == (400, "", {"same": 400})
    assert run["requests_per_s"] > 0
    assert run["compared_per_s"] > 0
    row = {
        **run, "title": "tiny", "lag_ms": [0.5, 4.0, 9.0],
        "requests_per_s": [9000.0] * 3, "compared_per_s": [6000.0] * 3,
    }  # fmt: skip
    rows = dict.fromkeys(("small", "captured", "paced"), row)
    page = report.text({"replay": {"rows": rows, "rounds": 1, "command": "x", "machine": MACHINE}})
    assert "lag behind the schedule, p99, ms | 4.0 | at most 10 | yes |" in page
    assert "| tiny | 400 | 9000 [9000-9000] | 6000 [6000-6000] | 0.5 / 4.0 / 9.0 | 400 " in page
