"""A capture as many small files against the same as one: whole commands, in turns."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.inputs import WORK, copies_of, message_heavy
from bench.measure import interleaved, spread, timed
from bench.multiply import FILE_HEADER_SIZE, packet_starts

COPIES = 3  # of a capture of 23.5 MB


def main() -> None:
    """Command: python -m bench.small_files [--files N] [--rounds N]; prints a table in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    whole = copies_of(message_heavy(), COPIES)
    inputs = {"1": whole, f"{given.files:,}": pieces(whole, given.files)}
    with tempfile.TemporaryDirectory(dir=WORK) as out:
        dissect = [sys.executable, "-m", "kdissect", "dissect", "--out", out, "--overwrite"]
        jobs: dict[str, Callable[[], float]] = {
            name: partial(timed, [*dissect, str(path)]) for name, path in inputs.items()
        }
        took = {name: spread(times) for name, times in interleaved(jobs, given.rounds).items()}
    one, many = (times[0] for times in took.values())
    print(f"| {whole.stat().st_size / 1e6:.1f} MB as so many files | s | least | most |")
    print("|---:|---:|---:|---:|")
    for name, times in took.items():
        print(f"| {name} | " + " | ".join(f"{seconds:.1f}" for seconds in times) + " |")
    print(f"\n{many / one:.2f} times (the goal is at most 1.5)")


def pieces(source: Path, count: int) -> Path:
    """A folder with the packets of a pcap in so many files, written once."""
    folder = WORK / f"{source.stem}-files-{count}"
    if not folder.exists():
        data = np.fromfile(source, np.uint8)
        first = [starts[0] for starts in np.array_split(packet_starts(data), count)]
        part = folder.with_suffix(".part")
        part.mkdir(parents=True, exist_ok=True)
        for number, (start, end) in enumerate(pairwise([*first, len(data)])):
            packets = data[:FILE_HEADER_SIZE].tobytes() + data[start:end].tobytes()
            (part / f"{number:05}.pcap").write_bytes(packets)
        part.rename(folder)
    return folder


if __name__ == "__main__":
    main()
