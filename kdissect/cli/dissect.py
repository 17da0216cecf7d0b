"""`kdissect dissect`: writes captures as Parquet tables, on Spark."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kdissect.cli.environment import check_disk, check_java, check_spark
from kdissect.cli.messages import say, some_of
from kdissect.cli.options import (
    AsJson,
    CaptureOptions,
    Captures,
    FromTime,
    Hosts,
    Quiet,
    Spool,
    UntilTime,
    period_ns,
)
from kdissect.cli.verbs import verb
from kdissect.errors import EnvironmentFailed, Error
from kdissect.step_log import logged_step


class DecodeValues(StrEnum):
    """The values of --decode-values."""

    JSON = "json"
    STRING = "string"
    SCHEMA_REGISTRY_ID = "schema-registry-id"


@verb("""
  kdissect dissect trace.pcap --out tables/
  kdissect dissect '/data/dump-*.pcap.gz' --out tables/ --overwrite
  kdissect dissect trace.pcap --out tables/ --host 10.0.0.7 --from 2026-11-21T07:30:00Z
  kdissect dissect trace.pcap --out tables/ --keep-state
  kdissect dissect '/data/dump-*.pcap' --out tables/ --append
  kdissect dissect day1/ day2/ --out tables/ --port 19092 --master 'local[8]'
""")
def dissect_command(
    captures: Captures,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for the tables.")],
    capture: CaptureOptions,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace the table set in DIR once this one is whole."),
    ] = False,
    append: Annotated[
        bool,
        typer.Option(
            "--append",
            help="Add these captures to the table set in DIR; open connections continue.",
        ),
    ] = False,
    keep_state: Annotated[
        bool,
        typer.Option("--keep-state", help="Save what a later --append needs (it does so itself)."),
    ] = False,
    read_again: Annotated[
        bool,
        typer.Option("--read-again", help="With --append: read the earlier captures again too."),
    ] = False,
    decode_values: Annotated[
        DecodeValues | None,
        typer.Option(
            "--decode-values",
            help="Add columns to records: value_json, value_text, or value_schema_id and "
            "key_schema_id; null for other bytes.",
        ),
    ] = None,
    from_time: FromTime = None,
    until_time: UntilTime = None,
    host: Hosts = None,
    split_bytes: Annotated[
        int | None,
        typer.Option(
            "--split-bytes",
            metavar="N",
            min=1,
            help="Bytes of captures per task (default: by size).",
        ),
    ] = None,
    spool: Spool = None,
    master: Annotated[str, typer.Option("--master", help="Spark master.")] = "local[*]",
    conf: Annotated[
        list[str] | None,
        typer.Option("--conf", metavar="KEY=VALUE", help="A Spark setting; repeatable."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write the messages of packet captures as Parquet tables, on Spark."""
    settings = dict(_setting(item) for item in conf or [])
    # all refusals come before anything is started
    from kdissect.capture.inputs import find_captures
    from kdissect.pipeline.append import unread
    from kdissect.pipeline.plan import read_key_logs
    from kdissect.pipeline.table_set import check_out

    if append and overwrite:
        raise typer.BadParameter("--append keeps what --overwrite replaces", param_hint="--append")
    if read_again and not append:
        raise typer.BadParameter("--read-again is for --append", param_hint="--read-again")
    check_spark()
    check_out(out, overwrite or append)
    period_ns(from_time, until_time)
    limits = capture.limits
    if spool is not None and not os.path.isdir(spool):
        raise typer.BadParameter(f"{spool} is not a folder", param_hint="--spool")
    inputs = find_captures(captures)
    if append:
        inputs = unread(out, inputs)
    read_key_logs(capture.keylog or ())
    check_disk(out, inputs)
    if master.startswith("local"):
        check_java()
    with _spark_log() as log_path:
        start = ThreadPoolExecutor(1).submit(_start_spark, master, settings, log_path)
        from kdissect import api

        with logged_step("start of Spark"):
            spark = start.result()
        with _progress(spark, sum(item.size for item in inputs), quiet):
            tables = api.dissect(
                spark,
                captures,
                out,
                overwrite=overwrite,
                append=append,
                keep_state=keep_state,
                read_again=read_again,
                ports=capture.port or (),
                reveal_secrets=capture.reveal_secrets,
                payload=capture.payload.value,
                keylog=capture.keylog or (),
                decode_values=decode_values.value if decode_values else None,
                hosts=host or (),
                from_=from_time,
                until=until_time,
                limits=limits,
                split_bytes=split_bytes,
                spool=spool,
            )
    try:
        _print_result(tables, captures, out, as_json, quiet)
    except KeyboardInterrupt:  # the tables are complete
        say(f"interrupted; {out} is written")


def _print_result(tables: Any, captures: list[str], out: str, as_json: bool, quiet: bool) -> None:
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
        say(f"warning: no Kafka traffic found in {some_of(captures)}")
    for row in document["damaged"]:
        say(f"warning: {row['path']}: {row['error']}")
    if as_json:
        typer.echo(json.dumps(document, indent=1, default=str))
    elif not quiet:
        from rich.console import Console

        print_summary(document, Console())


def _setting(item: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not equals or not key:
        raise typer.BadParameter(f"{item!r} is not KEY=VALUE", param_hint="--conf")
    return key, value


def _start_spark(master: str, settings: dict[str, str], log_path: str) -> Any:
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


def _progress(spark: Any, byte_count: int, quiet: bool) -> Any:
    from kdissect.progress import Progress

    return Progress(spark, byte_count, shown=not quiet and sys.stderr.isatty())
