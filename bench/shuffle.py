"""Bytes that Spark shuffles in a run, by Spark's own count, and what the driver takes."""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

import kdissect
from bench.inputs import copies_of, message_heavy, record_heavy
from kdissect.pipeline.spark_session import session


def main() -> None:
    """Command: python -m bench.shuffle [CAPTURE ...]; prints a table in Markdown.

    --copies N: without CAPTURE, it reads N copies of each heavy capture as one file. driver: the
    greatest size of its Python process so far.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("captures", nargs="*", type=Path)
    parser.add_argument("--copies", type=int, default=5)
    given = parser.parse_args()
    heavy = message_heavy(), record_heavy()
    captures = given.captures or [copies_of(source, given.copies) for source in heavy]
    print("| capture | MB | shuffled, MB | share | s | driver, MB |")
    print("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        spark = session("local[2]", {"spark.ui.enabled": "true"}, Path(folder) / "log")
        context, before = spark.sparkContext, 0
        stages = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/stages"
        for capture in captures:
            began = time.perf_counter()
            kdissect.dissect(spark, capture, Path(folder) / capture.stem)
            took = time.perf_counter() - began
            with urlopen(stages) as answer:
                total = sum(stage["shuffleWriteBytes"] for stage in json.load(answer))
            size, shuffled, before = capture.stat().st_size, total - before, total
            mega = f"{size / 1e6:.1f} | {shuffled / 1e6:.2f}"
            driver = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            print(f"| {capture.name} | {mega} | {shuffled / size:.1%} | {took:.0f} | {driver} |")
        spark.stop()


if __name__ == "__main__":
    main()
