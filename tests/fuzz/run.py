"""Fuzz for some minutes: `python -m tests.fuzz.run --minutes 10 --seed 1`.

Cases run in a process of their own, which writes the number of a case down before it runs it; so a
crash or a hang is known by its case as well. What fails is kept as a file in `tests/golden/fuzz`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "fuzz"
# A case that takes longer hangs; the first one compiles kernels. Processor time, so that a busy
# machine is no finding; a case that does nothing is waited for that much longer.
CPU_SECONDS_MAX, WALL_SECONDS_MAX = 180.0, 1800.0
CASES_PER_WORKER = 4000
WORK = """
import sys
from pathlib import Path
from tests.fuzz.run import work
work(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
"""


def cpu_seconds_of(pid: int) -> float:
    """User and system time of a process, 0 where it is gone."""
    try:
        _, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return 0.0
    return sum(map(int, rest.split()[11:13])) / os.sysconf("SC_CLK_TCK")


def keep(seed: int, folder: Path) -> Path:
    from tests.fuzz.check import made

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"case_{seed}.pcap"
    path.write_bytes(made(seed)[2].data)
    return path


def work(first: int, count: int, cpu_seconds: float, log: Path) -> None:
    """Run cases in this process; one JSON line before and one after each."""
    from tests.fuzz.check import check_case

    with log.open("a", encoding="utf-8") as file:

        def say(**line: object) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        for seed in range(first, first + count):
            say(start=seed)
            try:
                what, compared = check_case(seed)
                say(end=seed, what=what, compared=compared, cpu=time.process_time())
            except Exception as error:
                text = "".join(traceback.format_exception(error)[-6:])
                say(end=seed, failed=f"{error!r}"[:2000], trace=text, cpu=time.process_time())
            if time.process_time() > cpu_seconds:
                break


def supervise(minutes: float, first: int, folder: Path) -> dict[str, object]:
    """Run cases from `first` on for some CPU minutes; returns the faults."""
    used = 0.0
    seed = first
    cases = compared = 0
    failures: list[dict[str, object]] = []
    levels: collections.Counter[str] = collections.Counter()
    log = Path(tempfile.mkdtemp(prefix="kdissect-fuzz-")) / "log.jsonl"
    while used < minutes * 60:
        log.write_text("")
        left = minutes * 60 - used
        numbers = [str(seed), str(CASES_PER_WORKER), str(left), str(log)]
        command = [sys.executable, "-c", WORK, *numbers]
        worker = subprocess.Popen(command, cwd=GOLDEN.parents[2], env=os.environ)
        size, since, before, hangs = -1, time.monotonic(), 0.0, False
        while worker.poll() is None:
            time.sleep(0.2)
            now, cpu = time.monotonic(), cpu_seconds_of(worker.pid)
            if log.stat().st_size != size:
                size, since, before = log.stat().st_size, now, cpu
            elif cpu - before > CPU_SECONDS_MAX or now - since > WALL_SECONDS_MAX:
                hangs = True
                worker.kill()
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        ended = [line for line in lines if "end" in line]
        open_cases = [line["start"] for line in lines if "start" in line][len(ended) :]
        used += ended[-1]["cpu"] if ended else 60.0
        for line in ended:
            cases += 1
            compared += line.get("compared", 0)
            for name in line.get("what", "").rpartition(": ")[2].split(", "):
                levels[name] += 1
            if "failed" in line:
                failures.append({"seed": line["end"], "why": line["failed"], "at": line["trace"]})
        for case in open_cases:
            reason = "hangs" if hangs else f"the process ended with {worker.returncode}"
            failures.append({"seed": case, "why": reason, "at": ""})
        seed = (open_cases[-1] if open_cases else ended[-1]["end"]) + 1
    for failure in failures:
        keep(int(str(failure["seed"])), folder)
    return {
        "cases": cases, "cpu_minutes": round(used / 60, 1), "rows_compared": compared,
        "first": first, "next": seed, "mutations": dict(levels), "failures": failures,
    }  # fmt: skip


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=1.0, help="CPU minutes")
    options.add_argument("--seed", type=int, default=1, help="number of the first case")
    options.add_argument("--keep", type=Path, default=GOLDEN, help="folder of failing inputs")
    chosen = options.parse_args()
    result = supervise(chosen.minutes, chosen.seed, chosen.keep)
    print(json.dumps(result, indent=1))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
