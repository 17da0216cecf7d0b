"""The least that a PySpark job with a Python stage can be: a session, one mapInArrow, a result."""

import argparse
import atexit
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa


def main() -> None:
    """Command: empty_job.py --settings spark|kdissect --master M."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", choices=("spark", "kdissect"), required=True)
    parser.add_argument("--master", required=True)
    given = parser.parse_args()
    if given.settings == "kdissect":
        from kdissect.pipeline.spark_session import session

        log_path = Path(tempfile.mkstemp(suffix=".log")[1])
        atexit.register(log_path.unlink, missing_ok=True)
        spark = session(given.master, {}, log_path)
    else:
        from pyspark.sql import SparkSession

        # Spark looks for any python3, which need not be the one that has pyarrow
        os.environ["PYSPARK_PYTHON"] = sys.executable
        spark = SparkSession.builder.master(given.master).getOrCreate()

    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    assert spark.range(1).mapInArrow(same, "id long").collect()[0].id == 0


if __name__ == "__main__":
    main()
