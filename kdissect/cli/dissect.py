"""`kdissect dissect`: writes captures as Parquet tables, on Spark."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from kdissect.cli.environment import check_disk, check_java, check_spark
from kdissect.cli.options import CaptureOptions, ResultOptions, given, period_ns
from kdissect.cli.output import say, say_no_kafka
from kdissect.cli.verbs import OptionGroup, verb
from kdissect.errors import EnvironmentFailed, Error
from kdissect.step_log import logged_step

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kdissect.api import Tables
    from kdissect.progress import Progress


@dataclass(frozen=True)
class RunOptions(OptionGroup):
    """Options of a run on Spark; all but the last four are those of `kdissect.dissect`."""

    overwrite: bool = False
    append: bool = False
    keep_state: bool = False
    read_again: bool = False
    decode_values: Literal["json", "string", "schema-registry-id"] | None = None
    from_: str | None = None
    until: str | None = None
    hosts: list[str] | None = None
    partition_by: Literal["day"] | None = None
    split_bytes: int | None = None
    spool: str | None = None
    into: str | None = None
    format: Literal["iceberg", "delta"] | None = None
    master: str = "local[*]"
    conf: list[str] | None = None

    def check(self, out: str) -> None:
        """Raise the errors that need no look at the captures, before anything is started."""
        from kdissect.pipeline.table_set import check_out

        if self.append and self.overwrite:
            raise typer.BadParameter(
                "--append keeps what --overwrite replaces", param_hint="--append"
            )
        if self.read_again and not self.append:
            raise typer.BadParameter("--read-again is for --append", param_hint="--read-again")
        if self.format and not self.into:
            raise typer.BadParameter("--format is for --into", param_hint="--format")
        if self.into and (self.append or self.keep_state):
            raise typer.BadParameter(
                "--append and --keep-state replace rows of an earlier run; tables of a catalogue "
                "keep them",
                param_hint="--into",
            )
        check_spark()
        check_out(out, self.overwrite or self.append)
        period_ns(self.from_, self.until)
        if self.spool is not None and not os.path.isdir(self.spool):
            raise typer.BadParameter(f"{self.spool} is not a folder", param_hint="--spool")


@verb("""
  kdissect dissect trace.pcap --out tables/
  kdissect dissect '/data/dump-*.pcap.gz' --out tables/ --overwrite
  kdissect dissect trace.pcap --out tables/ --host 10.0.0.7 --from 2026-11-21T07:30:00Z
  kdissect dissect trace.pcap --out tables/ --keep-state
  kdissect dissect '/data/dump-*.pcap' --out tables/ --append
  kdissect dissect day1/ day2/ --out tables/ --port 19092 --master 'local[8]'
""")
def dissect_command(
    captures: list[str], out: str, capture: CaptureOptions, run: RunOptions, result: ResultOptions
) -> None:
    """Write the messages of packet captures as Parquet tables, on Spark."""
    settings = dict(_setting(item) for item in run.conf or [])
    from kdissect.capture.inputs import find_captures
    from kdissect.pipeline.append import unread
    from kdissect.pipeline.plan import read_key_logs

    run.check(out)
    reading = capture.read_arguments()
    inputs = find_captures(captures)
    if run.append:
        inputs = unread(out, inputs)
    read_key_logs(capture.keylog or ())
    check_disk(out, inputs)
    if run.master.startswith("local"):
        check_java()
    with _spark_log() as log_path:
        start = ThreadPoolExecutor(1).submit(_start_spark, run.master, settings, log_path)
        from kdissect import api

        with logged_step("start of Spark"):
            spark = start.result()
        of_run = given(run, "into", "format", "master", "conf")
        if run.into:
            from kdissect import catalogue

            catalogue.check(spark, run.into)
        with _progress(spark, sum(item.size for item in inputs), result.quiet):
            tables = api.dissect(spark, captures, out, **of_run, **reading)
        if run.into:
            tables.notes.append(_published(spark, out, run.into, run.format or "iceberg"))
    try:
        _print_result(tables, captures, out, result)
    except KeyboardInterrupt:  # the tables are complete
        say(f"interrupted; {out} is written")


def _published(
    spark: SparkSession, out: str, into: str, format: Literal["iceberg", "delta"]
) -> str:
    """Append the rows of the set at `out` to tables of a catalogue; returns a note."""
    from kdissect.catalogue import publish

    try:
        changed = publish(spark, out, into, format=format)
    except Error:
        say(f"{out} is written; kdissect.publish appends what {into} lacks")
        raise
    if not changed:
        return f"{into}: has the rows of this run already"
    return f"{into}: rows were appended to {len(changed)} tables"


def _print_result(tables: Tables, captures: list[str], out: str, result: ResultOptions) -> None:
    """Print the notes, warnings and summary of a run whose tables are written."""
    import pyarrow as pa

    from kdissect.summary import print_summary, summarise

    for note in tables.notes:
        say(f"note: {note}")
    try:
        document = summarise(tables, out)
    except (Error, pa.ArrowException, OSError) as error:
        say(f"warning: {out} is written; it cannot be read for the summary: {error}")
        return
    if not document["kafka_connections"]:
        say_no_kafka(tables, captures)
    for row in document["damaged"]:
        say(f"warning: {row['path']}: {row['error']}")
    if result.as_json:
        result.put(document, ())
    elif not result.quiet:
        from rich.console import Console

        print_summary(document, Console())


def _setting(item: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not equals or not key:
        raise typer.BadParameter(f"{item!r} is not KEY=VALUE", param_hint="--conf")
    return key, value


def _start_spark(master: str, settings: dict[str, str], log_path: str) -> SparkSession:
    from kdissect.pipeline.spark_session import session

    return session(master, settings, log_path)


@contextmanager
def _spark_log() -> Iterator[str]:
    """Yield a file for Spark's log; it is kept, and its name printed, only after a failure."""
    descriptor, path = tempfile.mkstemp(prefix="kdissect-spark-", suffix=".log")
    os.close(descriptor)
    try:
        yield path
    except EnvironmentFailed as error:
        raise EnvironmentFailed(f"{error} (Spark's log: {path})") from error
    except (Error, KeyboardInterrupt):
        Path(path).unlink(missing_ok=True)
        raise
    except Exception:
        say(f"Spark's log: {path}")
        raise
    Path(path).unlink(missing_ok=True)


def _progress(spark: SparkSession, byte_count: int, quiet: bool) -> Progress:
    from kdissect.progress import Progress

    return Progress(spark, byte_count, shown=not quiet and sys.stderr.isatty())
