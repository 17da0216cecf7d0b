"""Run benchmarks and write reports/benchmarks.md; `make bench` runs them all.

Results are kept in out/bench/results.json, so that one benchmark may be run again alone.
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import report  # noqa: E402
from bench.measure import machine  # noqa: E402
from bench.suite import BENCHMARKS  # noqa: E402

RESULTS = ROOT / "out" / "bench" / "results.json"


def main() -> None:
    """Command: run.py [--quick] [NAME...]."""
    parser = argparse.ArgumentParser(description="Benchmarks of kdissect.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller inputs")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]}; there are {', '.join(BENCHMARKS)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in given.names or BENCHMARKS:
        began = time.perf_counter()
        print(f"{name} ...", file=sys.stderr, flush=True)
        before = machine()
        results[name] = BENCHMARKS[name](given.quick)
        options = "--quick " * given.quick
        results[name]["command"] = f"python bench/run.py {options}{name}"
        results[name]["machine"] = before
        results[name]["took_s"] = round(time.perf_counter() - began)
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    text = report.text(results)
    (ROOT / "reports" / "benchmarks.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
