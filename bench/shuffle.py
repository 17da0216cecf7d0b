"""Bytes that Spark shuffles in a run, by Spark's own count, as a share of the capture."""

import argparse
import json
import tempfile
from pathlib import Path
from urllib.request import urlopen

import kdissect
from bench.inputs import message_heavy, record_heavy
from kdissect.pipeline.spark_session import session


def main() -> None:
    """Command: python -m bench.shuffle [CAPTURE ...]; prints a table in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("captures", nargs="*", type=Path)
    captures = parser.parse_args().captures or [message_heavy().path, record_heavy().path]
    print("| capture | MB | shuffled, MB | share |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        spark = session("local[2]", {"spark.ui.enabled": "true"}, Path(folder) / "log")
        context, before = spark.sparkContext, 0
        stages = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/stages"
        for capture in captures:
            kdissect.dissect(spark, capture, Path(folder) / capture.stem)
            with urlopen(stages) as answer:
                total = sum(stage["shuffleWriteBytes"] for stage in json.load(answer))
            size, shuffled, before = capture.stat().st_size, total - before, total
            mega = f"{size / 1e6:.1f} | {shuffled / 1e6:.2f}"
            print(f"| {capture.name} | {mega} | {shuffled / size:.1%} |")
        spark.stop()


if __name__ == "__main__":
    main()
