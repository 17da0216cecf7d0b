"""Clocks, memory and the machine: what every benchmark shares."""

import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("pyspark", "pyarrow", "numpy", "numba", "cramjam", "crc32c")


def interleaved(jobs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Results of each job, called in turn `rounds` times, so that drift meets all alike."""
    results: dict[str, list[Any]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            results[name].append(job())
    return results


def timed(command: list[str]) -> float:
    """Seconds of a whole process; its output goes nowhere. Raises when it fails."""
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        tail = done.stderr.decode(errors="replace")[-2000:]
        raise RuntimeError(f"{' '.join(command)} failed:\n{tail}")
    return seconds


def first_line(command: list[str]) -> float:
    """Seconds until a process has written a line; it is stopped then."""
    began = time.perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
        process.kill()
    if not line:
        raise RuntimeError(f"{' '.join(command)} wrote nothing")
    return seconds


def median(values: list[float]) -> float:
    return float(statistics.median(values))


def spread(values: list[float]) -> list[float]:
    """[median, least, most]."""
    return [median(values), min(values), max(values)]


def machine() -> dict[str, Any]:
    """Processor, memory, load and versions: nothing that names the machine."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory_kb = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr
    tshark = ""
    if shutil.which("tshark"):
        tshark = subprocess.check_output(["tshark", "--version"], text=True)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "load": round(os.getloadavg()[0], 1),
        "processor": cpu[1] if cpu else platform.machine(),
        "core_count": len(os.sched_getaffinity(0)),
        "memory_gb": round(int(memory_kb[1]) / (1 << 20)) if memory_kb else None,
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "java": java.splitlines()[0].split('"')[1] if '"' in java else "?",
        "tshark": " ".join(tshark.splitlines()[0].split()[1:3]) if tshark else None,
        **{name: version(name) for name in LIBRARIES},
    }


def _commit() -> str:
    """The code that is measured; empty outside of a clone."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


class Helper:
    """A process of this folder that takes JSON requests on stdin and answers with a JSON line."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"bench.{module}", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __call__(self, **request: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                answer = json.loads(line)
                if "failed" in answer:
                    raise RuntimeError(answer["failed"])
                return answer
        raise RuntimeError(f"the helper ended with {self._process.wait()}")

    def __enter__(self) -> "Helper":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=60)


def serve(answer: Callable[..., dict[str, Any]]) -> None:
    """The other end of `Helper`: answer requests until stdin ends."""
    for line in sys.stdin:
        try:
            text = json.dumps(answer(**json.loads(line)))
        except Exception as error:
            text = json.dumps({"failed": f"{type(error).__name__}: {error}"})
            print(text, flush=True)
            raise
        print(text, flush=True)


# -- processor time -------------------------------------------------------------------------

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time that a process and all its descendants have used, ended ones too."""
    ticks = 0
    for member in family(pid):
        _, _, rest = _read(f"/proc/{member}/stat").rpartition(")")
        ticks += sum(int(value) for value in rest.split()[11:15])
    return ticks / _TICKS


# -- memory ---------------------------------------------------------------------------------


@dataclass
class Peak:
    """Highest sums over a process tree, in bytes; Python's and Java's processes apart."""

    python: int = 0
    python_anonymous: int = 0  # without pages of files, which the kernel can take back
    driver: int = 0  # the process that is watched
    workers: int = 0  # Python's others
    java: int = 0
    process_count: int = 0  # of Python, at the peak
    sample_count: int = 0


@dataclass
class MemoryWatch:
    """Samples the proportional set sizes of a process and all that it started."""

    pid: int
    interval_s: float = 0.02
    peak: Peak = field(default_factory=Peak)

    def __enter__(self) -> Peak:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self.peak

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        turn = 0
        while not self._stop.wait(self.interval_s):
            self._sample(with_java=turn % 25 == 0)  # a JVM's maps take long to sum up
            turn += 1

    def _sample(self, with_java: bool) -> None:
        total = anonymous = java = count = driver = 0
        for pid in family(self.pid):
            name = _read(f"/proc/{pid}/comm").strip()
            if name == "java":
                java += memory_of(pid)[0] if with_java else 0
            elif name.startswith(("python", "pyspark")):
                whole, own = memory_of(pid)
                total, anonymous, count = total + whole, anonymous + own, count + 1
                driver = whole if pid == self.pid else driver
        peak = self.peak
        peak.sample_count += 1
        peak.java = max(peak.java, java)
        peak.driver = max(peak.driver, driver)
        peak.workers = max(peak.workers, total - driver)
        peak.python_anonymous = max(peak.python_anonymous, anonymous)
        if total > peak.python:
            peak.python, peak.process_count = total, count


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # the process ended meanwhile
        return ""


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            _, _, rest = _read(f"/proc/{entry.name}/stat").rpartition(")")
            if rest:
                children.setdefault(int(rest.split()[1]), []).append(int(entry.name))
    found = [pid]
    for member in found:
        found.extend(children.get(member, ()))
    return found


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes of a process: proportional set size, and its anonymous part."""
    text = _read(f"/proc/{pid}/smaps_rollup")
    sizes = dict(re.findall(r"^(Pss|Pss_Anon):\s*(\d+) kB", text, re.MULTILINE))
    return int(sizes.get("Pss", 0)) << 10, int(sizes.get("Pss_Anon", 0)) << 10
