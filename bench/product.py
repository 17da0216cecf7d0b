"""A warm Spark session that dissects what it is asked to: the helper process of the benchmarks.

Requests: {"path", "out"}; answers: seconds of `kdissect.dissect`, its own timings, and the rows
and bytes of the tables.
"""

import argparse
import atexit
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import kdissect
from bench.measure import serve
from kdissect.pipeline.spark_session import session


def result_of(out: Path) -> dict[str, Any]:
    """Rows and bytes of a table set, and the timings that it keeps."""
    manifest = json.loads((out / "_kdissect.json").read_text())
    tables = manifest["tables"]
    return {
        "timings": manifest["timings"],
        "totals": manifest["totals"],
        "table_bytes": {
            name: sum((out / file).stat().st_size for file in entry["files"])
            for name, entry in tables.items()
            if entry["rows"]
        },
    }


def main() -> None:
    """Command: product.py --master local[2,4], then requests on stdin."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--master", required=True)
    log_path = Path(tempfile.mkstemp(suffix=".log")[1])
    atexit.register(log_path.unlink, missing_ok=True)
    spark = session(parser.parse_args().master, {}, log_path)

    def answer(path: str, out: str) -> dict[str, Any]:
        began = time.perf_counter()
        kdissect.dissect(spark, path, out, overwrite=True)
        return {"seconds": time.perf_counter() - began, **result_of(Path(out))}

    serve(answer)


if __name__ == "__main__":
    main()
