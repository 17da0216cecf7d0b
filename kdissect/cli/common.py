"""Parts that commands share: exit codes, common options, messages, checks before work."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kdissect.errors import CaptureError, EnvironmentFailed

if TYPE_CHECKING:
    from kdissect.api import Tables
    from kdissect.cli.options import SelectionOptions, SourceOptions
    from kdissect.pipeline.limits import Limits

Result = TypeVar("Result")

EXIT_FINDING, EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_INTERRUPTED = 1, 2, 3, 130
JAVA_MIN = 17


class Payload(StrEnum):
    """The values of --payload."""

    FULL = "full"
    KEYS = "keys"
    HASH = "hash"
    NONE = "none"


class DecodeValues(StrEnum):
    """The values of --decode-values."""

    JSON = "json"
    STRING = "string"
    SCHEMA_REGISTRY_ID = "schema-registry-id"


Ports = Annotated[
    list[int] | None,
    typer.Option(
        "--port",
        metavar="N",
        min=1,
        max=65535,
        help="A port of Kafka brokers: a hint, not a filter.",
    ),
]
RevealSecrets = Annotated[
    bool, typer.Option("--reveal-secrets", help="Show passwords, tokens and sensitive configs.")
]
ShownPayload = Annotated[
    Payload,
    typer.Option(
        "--payload",
        help="Record data that is shown: full; keys (values are null); hash (16 hex digits of "
        "the xxh3_64 of keys and values); none (keys and values are null).",
    ),
]
KeyLogs = Annotated[
    list[str] | None,
    typer.Option(
        "--keylog",
        metavar="FILE",
        help="Secrets of TLS connections (SSLKEYLOGFILE format); repeatable.",
    ),
]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", metavar="IP", help="Connections of this address only; repeatable."),
]
FromTime = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="TIME",
        help="Exchanges from this time on: RFC 3339, UTC if no zone is given, or seconds "
        "since 1970.",
    ),
]
UntilTime = Annotated[
    str | None,
    typer.Option("--until", "--to", metavar="TIME", help="Exchanges before this time."),
]
LimitItems = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=VALUE",
        help="Largest value accepted from a capture (docs/limits.md); repeatable.",
    ),
]
Sources = Annotated[
    list[str],
    typer.Argument(metavar="SOURCE...", help="Table sets, or captures (files, folders, globs)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]


_NAMED_MAX = 8  # names in a message; others are counted
_UNPACKED = 4  # estimated size of a compressed capture, as a multiple, when decompressed
_SIZE_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def limits_of(items: list[str] | None) -> Limits:
    """Return the `Limits` of --limit; raises BadParameter, which lists all limits, for a wrong
    one."""
    from kdissect.pipeline.limits import Limits

    try:
        return Limits.parse(items or ())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--limit") from None


def some_of(names: Sequence[str]) -> str:
    """Join the first few names of a list, with a count of the others."""
    shown = ", ".join(names[:_NAMED_MAX])
    more = len(names) - _NAMED_MAX
    return f"{shown} and {more:,} more" if more > 0 else shown


def say(line: str) -> None:
    typer.echo(f"kdissect: {line}", err=True)


def checked(option: str, read: Callable[[Any], Result], value: Any) -> Result:
    """Return `read(value)` for an option's value; its ValueError becomes BadParameter."""
    try:
        return read(value)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def check_choice(hosts: list[str] | None, first: str | None, last: str | None) -> None:
    """Raise BadParameter for a host that is not an address, or a time that cannot be read."""
    from kdissect.pipeline.filters import host_bytes, time_ns

    for name, values, read in (
        ("--host", hosts or [], host_bytes),
        ("--from", [first] if first is not None else [], time_ns),
        ("--until", [last] if last is not None else [], time_ns),
    ):
        for value in values:
            checked(name, read, value)
    if first is not None and last is not None and time_ns(first) >= time_ns(last):
        raise typer.BadParameter(f"{last} is not after {first}", param_hint="--until")


def open_selected(
    paths: Sequence[str], options: SourceOptions, selected: SelectionOptions
) -> Tables:
    """Return the tables of `open_source` with the selected exchanges only; warns if there are
    none."""
    selection = selected.selection()
    tables = open_source(paths, options)
    if selection.is_empty:
        return tables
    chosen = tables.select(selection)
    if not chosen.exchanges.num_rows:
        count = tables.exchanges.num_rows
        say(f"warning: 0 of {count:,} exchanges pass the filters")
    return chosen


def say_notes(tables: Tables) -> None:
    """Print the notes of the tables on stderr: lines for the user."""
    for note in tables.notes:
        say(note)


def open_source(paths: Sequence[str], options: SourceOptions) -> Tables:
    """Return the tables of table sets and of captures (files, folders, globs) as one set.

    Captures are dissected here. Warns of damaged captures, and if captures have no Kafka traffic.
    Raises CaptureError if captures are larger than `--in-process-max`, BadParameter for options of
    captures without a capture.
    """
    from kdissect import api
    from kdissect.pipeline.table_set import NoTableSetError

    checked("--in-process-max", parse_size, options.in_process_max)
    limits_of(options.limit)
    sets, captures = [], []
    missing = None
    for path in paths:
        try:
            sets.append(api.open_tables(path))
        except NoTableSetError as error:
            captures.append(path)
            missing = missing or error
    if missing is not None:
        sets.append(_read_captures(captures, options, missing))
    elif options.given:
        raise typer.BadParameter(
            f"{paths[0]} is a table set; this is for captures", param_hint=options.given[0]
        )
    for tables in sets:
        _warn_of_damage(tables)
    return sets[0] if len(sets) == 1 else api.joined_sets(sets)


def _read_captures(paths: Sequence[str], options: SourceOptions, missing: CaptureError) -> Tables:
    """Return the tables of captures, dissected here.

    missing: why the first of them is no table set.
    """
    from kdissect import api
    from kdissect.capture.inputs import find_captures

    largest = parse_size(options.in_process_max)
    try:
        inputs = find_captures(paths)
    except CaptureError:
        if len(paths) > 1 or not os.path.isdir(paths[0]):
            raise
        raise CaptureError(f"{missing}, and no capture in it") from None
    advice = (
        f"kdissect dissect {some_of(paths)} --out DIR makes a table set, which this command accepts"
    )
    for item in inputs:
        if item.format == "stream":
            raise CaptureError(f"{item.path}: a stream of unknown length; {advice}")
    size = sum(item.size * (1 if item.compression == "none" else _UNPACKED) for item in inputs)
    if size > largest:
        from kdissect.text import byte_size

        raise CaptureError(
            f"{some_of(paths)}: {byte_size(size)} are more than --in-process-max "
            f"{options.in_process_max}; {advice}"
        )
    tables = api.read(
        paths,
        ports=options.port or (),
        keylog=options.keylog or (),
        payload=options.payload.value,
        reveal_secrets=options.reveal_secrets,
        limits=limits_of(options.limit),
        spool=options.spool,
    )
    if not any(tables.connections.to_arrow(["is_kafka"])["is_kafka"].to_pylist()):
        say(f"warning: no Kafka traffic found in {some_of(paths)}")
    return tables


def _warn_of_damage(tables: Tables) -> None:
    for row in tables.captures.to_arrow(["path", "format", "error"]).to_pylist():
        if row["error"] is not None and row["format"] != "unknown":
            say(f"warning: {row['path']}: {row['error']}")


def parse_size(text: str) -> int:
    """Return the bytes of "256MB", "1.5GiB" or a bare number; raises ValueError for other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size: give 256MB, 1GiB or a number of bytes")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _SIZE_UNITS[match[2]])


def put(lines: Iterable[str]) -> None:
    """Write lines to stdout; a reader that closes the pipe early is no error."""
    try:
        for line in lines:
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError as error:
        stdout_failed(error)


def stdout_failed(error: OSError) -> None:
    """Handle a failed write to stdout: ignore a broken pipe, raise EnvironmentFailed otherwise."""
    close_stdout()
    if not isinstance(error, BrokenPipeError):
        raise EnvironmentFailed(f"stdout: {error.strerror or error}") from error


def close_stdout() -> None:
    """Discard the buffer of stdout and all later output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (stdout lasts as long as the program)


def check_disk(out: str, inputs: list[Any]) -> None:
    """Raise EnvironmentFailed if the disk has less room than the captures take.

    Tables take about as much room as the captures at most.
    """
    from kdissect.capture.object_store import is_remote

    if is_remote(out):
        return
    needed = sum(item.size for item in inputs if item.error is None)
    place = Path(out).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise EnvironmentFailed(
            f"{place}: {free >> 20} MB free, about {needed >> 20} MB needed; free some space "
            "or name another --out"
        )


def check_spark() -> None:
    """Raise EnvironmentFailed with installation advice if PySpark is missing (a slim image)."""
    with suppress(ModuleNotFoundError):
        if find_spec("pyspark") is not None:
            return
    raise EnvironmentFailed(
        "PySpark is needed to dissect and is not installed; pip install 'pyspark>=4.1,<5'. Without "
        "it show, summary, report, sql, readiness and diff read captures"
    )


def check_java() -> None:
    """Raise EnvironmentFailed with installation advice unless Java 17 or newer is installed."""
    from kdissect.cli.java import java_program, java_version

    java = java_program()
    hint = "install a JRE, for example: apt-get install openjdk-17-jre-headless"
    if java is None:
        raise EnvironmentFailed(
            f"Java {JAVA_MIN} or newer is needed for Spark and none is found; {hint}"
        )
    version = java_version(java)
    major = version.split(".")[0]
    if major.isdigit() and int(major) < JAVA_MIN:
        raise EnvironmentFailed(f"Java {JAVA_MIN} or newer is needed, {java} is {version}; {hint}")
