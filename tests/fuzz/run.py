"""Fuzz for some minutes: `python -m tests.fuzz.run --minutes 10 --seed 1`.

Each case is named before it runs, so that a crash or a hang is known by its case as well: Python's
fault handler then ends the process. What fails is kept as a file in `tests/golden/fuzz`.
"""

import argparse
import faulthandler
import itertools
import json
import sys
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.check import check_case, made

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "fuzz"
HANG_SECONDS = 1800.0  # the first case compiles kernels, and the machine may be busy


def run(minutes: float, first: int, folder: Path) -> dict[str, object]:
    """Run cases from `first` on for some CPU minutes; returns the faults."""
    compared = 0
    failures: list[dict[str, object]] = []
    mutations: Counter[str] = Counter()
    for seed in itertools.count(first):
        print(f"case {seed}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            what, rows = check_case(seed)
            compared += rows
            mutations.update(what.rpartition(": ")[2].split(", "))
        except Exception as error:
            failures.append({"seed": seed, "why": repr(error)[:2000]})
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"case_{seed}.pcap").write_bytes(made(seed)[2].data)
        if time.process_time() > minutes * 60:
            break
    faulthandler.cancel_dump_traceback_later()
    return {
        "first": first, "last": seed, "cpu_minutes": round(time.process_time() / 60, 1),
        "rows_compared": compared, "mutations": mutations, "failures": failures,
    }  # fmt: skip


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=1.0, help="CPU minutes")
    options.add_argument("--seed", type=int, default=1, help="number of the first case")
    options.add_argument("--keep", type=Path, default=GOLDEN, help="folder of failing inputs")
    chosen = options.parse_args()
    faulthandler.enable()
    result = run(chosen.minutes, chosen.seed, chosen.keep)
    print(json.dumps(result, indent=1))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
