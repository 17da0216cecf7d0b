"""Tables of a Spark catalogue, such as Iceberg's or Delta's, that get the rows of table sets.

Spark reads the Parquet files of a set and appends their rows, with one commit for each table.
Commits, compaction, schema evolution and history belong to the table format. Each row gets a column
`run_id`, because ids of kdissect are unique within a set only. The column also tells whether a
table has the rows of a run, also after snapshots expired or files were compacted. `captures` comes
last: its rows tell that a run is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from kdissect.capture.object_store import is_remote
from kdissect.errors import EnvironmentFailed, OutputError
from kdissect.pipeline.spark_session import JOB_FAILED, job_errors
from kdissect.pipeline.table_set import absolute, capture_paths, read_manifest
from kdissect.sql.database import view_name

RUN_ID = "run_id"
Format = Literal["iceberg", "delta"]


def publish(
    spark: SparkSession, path: str | os.PathLike[str], into: str, *, format: Format = "iceberg"
) -> list[str]:
    """Append the rows of a table set to the tables of a catalogue of the session.

    Tables that do not exist are created: ``exchanges``, ``api_fetch`` for ``apis/Fetch``, and so
    on. Call it again after a failure: a table that has the rows of the set gets none.

    Args:
        path: folder or URL of the set; all workers read it.
        into: the catalogue and the namespace in it, ``catalogue.namespace``.
        format: of tables that are created: "iceberg" or "delta".

    Returns:
        The names of the tables that got rows.

    Raises:
        CaptureError: there is no table set at `path`.
        OutputError: the set has saved state, or the catalogue does not take the rows.
    """
    folder = os.fspath(path)
    manifest = read_manifest(folder)
    if "missing" not in manifest.get("state", {"missing": ""}):
        raise OutputError(
            f"{folder}: has saved state (--keep-state, --append), so a later run replaces rows; "
            f"{into} takes sets without it only"
        )
    check(spark, into)
    run_id, root = _run_id(manifest), absolute(folder)
    root = root if is_remote(root) else f"file://{root}"
    changed = []
    for table in sorted(manifest["tables"], key=lambda table: table == "captures"):
        entry, name = manifest["tables"][table], f"{into}.{view_name(table)}"
        with _errors(spark, name):
            is_there = spark.catalog.tableExists(name)
            of_run = F.col(RUN_ID) == run_id
            if is_there and (not entry["rows"] or spark.table(name).where(of_run).head(1)):
                continue
            # a folder's name like day=7 is no column
            files = spark.read.option("recursiveFileLookup", "true")
            rows = files.parquet(*(f"{root}/{file}" for file in entry["files"]))
            writer = rows.withColumn(RUN_ID, F.lit(run_id)).writeTo(name)
            if is_there:
                # new columns are last in an old table, not in these rows
                writer.options(mergeSchema="true", **{"check-ordering": "false"}).append()
            else:
                # Iceberg adds new columns to such tables only
                writer.using(format).tableProperty("write.spark.accept-any-schema", "true").create()
        changed.append(name)
    return changed


def check(spark: SparkSession, into: str) -> None:
    """Create the namespace if it does not exist. Raises OutputError if the session has no such
    catalogue, or its classes do not fit Spark."""
    with _errors(spark, into):
        spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {into}")
        spark.catalog.tableExists(f"{into}.captures")


@contextmanager
def _errors(spark: SparkSession, place: str) -> Iterator[None]:
    """Errors of Spark name the catalogue or the table."""
    try:
        with job_errors(spark):
            yield
    except EnvironmentFailed as error:
        is_refused = isinstance(error.__cause__, AnalysisException | IllegalArgumentException)
        reason = str(error).removeprefix(JOB_FAILED)
        raise (OutputError if is_refused else EnvironmentFailed)(f"{place}: {reason}") from error


def _run_id(manifest: dict[str, Any]) -> str:
    """16 hexadecimal digits, equal for runs of one version with the same options and the same bytes
    of captures and key logs."""
    inputs = sorted(capture_paths(manifest))
    key_logs = manifest.get("key_logs", manifest["options"]["keylog"])
    left_out = ("split_bytes", "partition_by", "keylog")
    options = {name: value for name, value in manifest["options"].items() if name not in left_out}
    text = json.dumps([manifest["program_version"], inputs, key_logs, options], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
