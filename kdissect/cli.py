"""The command line: thin verbs over the Python API. Results on stdout, everything else on stderr.

Exit codes: 0 done, 1 a finding the user asked to fail on, 2 bad usage or unusable input, 3 the
environment failed, 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kdissect import __version__
from kdissect.background import Background
from kdissect.errors import EnvironmentFailed, Error

EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_INTERRUPTED = 2, 3, 130
JAVA_MIN = 17


class Payload(StrEnum):
    """--payload"""

    FULL = "full"
    KEYS = "keys"
    HASH = "hash"
    NONE = "none"


class DecodeValues(StrEnum):
    """--decode-values"""

    JSON = "json"
    STRING = "string"
    SCHEMA_REGISTRY_ID = "schema-registry-id"


app = typer.Typer(
    name="kdissect",
    help="Packet captures of Apache Kafka traffic to tables.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kdissect {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Packet captures of Apache Kafka traffic to tables."""


DISSECT_EXAMPLES = """
Examples:

  kdissect dissect trace.pcap --out tables/

  kdissect dissect '/data/dump-*.pcap.gz' --out tables/ --overwrite

  kdissect dissect day1/ day2/ --out tables/ --port 19092 --master 'local[8]'
"""


@app.command("dissect", epilog=DISSECT_EXAMPLES)
def dissect_command(
    captures: Annotated[
        list[str],
        typer.Argument(metavar="CAPTURE...", help="Files, folders or globs; '-' is stdin."),
    ],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for the tables.")],
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace the table set in DIR once this one is whole."),
    ] = False,
    port: Annotated[
        list[int] | None,
        typer.Option(
            "--port",
            metavar="N",
            min=1,
            max=65535,
            help="A port that speaks Kafka: a hint, not a filter.",
        ),
    ] = None,
    reveal_secrets: Annotated[
        bool, typer.Option("--reveal-secrets", help="Show passwords, tokens and sensitive configs.")
    ] = False,
    payload: Annotated[
        Payload,
        typer.Option(
            "--payload",
            help="Record data that is shown: full; keys (values are null); hash (16 hex digits of "
            "the xxh3_64 of keys and values); none (keys and values are null).",
        ),
    ] = Payload.FULL,
    keylog: Annotated[
        list[str] | None,
        typer.Option(
            "--keylog",
            metavar="FILE",
            help="Secrets of TLS connections (SSLKEYLOGFILE format); repeatable.",
        ),
    ] = None,
    decode_values: Annotated[
        DecodeValues | None,
        typer.Option(
            "--decode-values",
            help="Add columns to records: value_json, value_text, or value_schema_id and "
            "key_schema_id; null where the bytes are something else.",
        ),
    ] = None,
    split_bytes: Annotated[
        int | None,
        typer.Option(
            "--split-bytes",
            metavar="N",
            min=1,
            help="Bytes of a capture per task (default: by size and cores).",
        ),
    ] = None,
    spool: Annotated[
        str | None,
        typer.Option(
            "--spool", metavar="DIR", help="Folder for uncompressed copies of compressed captures."
        ),
    ] = None,
    master: Annotated[str, typer.Option("--master", help="Spark master.")] = "local[*]",
    conf: Annotated[
        list[str] | None,
        typer.Option("--conf", metavar="KEY=VALUE", help="A Spark setting; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Packet captures to Parquet tables, on Spark."""
    settings = dict(_setting(item) for item in conf or [])
    # what can be refused is refused before anything is started
    from kdissect.capture.inputs import find_captures
    from kdissect.pipeline.commit import check_out
    from kdissect.pipeline.plan import check_key_logs

    check_out(out, overwrite)
    if spool is not None and not os.path.isdir(spool):
        raise typer.BadParameter(f"{spool} is not a folder", param_hint="--spool")
    inputs = find_captures(captures)
    check_key_logs(keylog or ())
    _check_disk(out, inputs)
    if master.startswith("local"):
        check_java()
    began = time.perf_counter()
    with _spark_log() as log_path:
        start = Background(lambda: _start_spark(master, settings, log_path))
        from kdissect import api
        from kdissect.summary import print_summary, summarise

        spark = start.result()
        session_start_s = time.perf_counter() - began
        with _progress(spark, sum(item.size for item in inputs), quiet):
            tables = api.dissect(
                spark,
                captures,
                out,
                overwrite=overwrite,
                ports=port or (),
                reveal_secrets=reveal_secrets,
                payload=payload.value,
                keylog=keylog or (),
                decode_values=decode_values.value if decode_values else None,
                split_bytes=split_bytes,
                spool=spool,
                session_start_s=session_start_s,
            )
    document = summarise(tables, out)
    if not document["kafka_connections"]:
        _say(f"warning: no Kafka traffic found in {', '.join(captures)}")
    for row in document["damaged"]:
        _say(f"warning: {row['path']}: {row['error']}")
    if as_json:
        typer.echo(json.dumps(document, indent=1, default=str))
    elif not quiet:
        from rich.console import Console

        print_summary(document, Console())


DEFINITIONS_EXAMPLES = """
Examples:

  kdissect definitions

  kdissect definitions Fetch

  kdissect definitions 1 12 --json

  kdissect definitions fetch 12 13
"""


@app.command("definitions", epilog=DEFINITIONS_EXAMPLES)
def definitions_command(
    api: Annotated[
        str | None, typer.Argument(metavar="[API]", help="Name or key; other definitions by name.")
    ] = None,
    api_version: Annotated[
        int | None, typer.Argument(metavar="[VERSION]", help="Show this version only.")
    ] = None,
    other_version: Annotated[
        int | None, typer.Argument(metavar="[OTHER]", help="Compare VERSION with this one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """What is known of Kafka's APIs: fields, types, versions, and what changed between two."""
    from kdissect.protocol import describe

    try:
        document: dict[str, Any] | None
        if api is None:
            text, document = describe.api_list_text(), describe.api_list_json()
        else:
            name = int(api) if api.lstrip("-").isdigit() else api
            if other_version is not None and api_version is not None:
                text = describe.comparison_text(name, api_version, other_version)
                document = describe.comparison_json(name, api_version, other_version)
            elif _is_api(name):
                text = describe.api_text(name, api_version)
                document = describe.api_json(name, api_version)
            else:
                text, document = describe.definition_text(api), None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="API") from None
    if as_json and document is None:
        raise typer.BadParameter(f"{api} is no API; --json describes APIs", param_hint="--json")
    typer.echo(json.dumps(document, indent=1) if as_json else text.rstrip("\n"))


def _is_api(name: int | str) -> bool:
    """True for an API, and for a name that nothing has (its error suggests near ones)."""
    from kdissect.protocol import catalog

    try:
        catalog.api(name)
    except ValueError:
        if isinstance(name, str):
            try:
                catalog.definition(name)
            except ValueError:
                return True
            return False
    return True


def _setting(item: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not equals or not key:
        raise typer.BadParameter(f"{item!r} is not KEY=VALUE", param_hint="--conf")
    return key, value


def _check_disk(out: str, inputs: list[Any]) -> None:
    """Tables take about as much room as the captures at most, compressed ones their spool too."""
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


def _start_spark(master: str, settings: dict[str, str], log_path: str) -> Any:
    from kdissect.pipeline import spark as on_spark

    return on_spark.session(master, settings, log_path)


def check_java() -> None:
    """Raise EnvironmentFailed, saying what to install, unless Java 17 or newer is there."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    hint = "install a JRE, for example: apt-get install openjdk-17-jre-headless"
    if not java or not os.access(java, os.X_OK):
        raise EnvironmentFailed(
            f"Java {JAVA_MIN} or newer is needed for Spark and none is found; {hint}"
        )
    release = Path(java).resolve().parent.parent / "release"
    if release.exists():
        text = release.read_text(errors="replace")
    else:
        text = subprocess.run(
            [java, "-version"], capture_output=True, text=True, check=False
        ).stderr
        text = text.replace('version "', 'JAVA_VERSION="')
    number = text.partition('JAVA_VERSION="')[2].split('"')[0]
    major = number.split(".")[0]
    if major.isdigit() and int(major) < JAVA_MIN:
        raise EnvironmentFailed(f"Java {JAVA_MIN} or newer is needed, {java} is {number}; {hint}")


@contextmanager
def _spark_log() -> Iterator[str]:
    """A file for Spark's log, kept and named only where the environment or the program failed."""
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
        _say(f"Spark's log: {path}")
        raise
    Path(path).unlink(missing_ok=True)


def _progress(spark: Any, byte_count: int, quiet: bool) -> Any:
    from kdissect.progress import Progress

    return Progress(spark, byte_count, shown=not quiet and sys.stderr.isatty())


def _say(line: str) -> None:
    typer.echo(f"kdissect: {line}", err=True)


def main() -> None:
    """Entry point of the `kdissect` command."""
    # our own words go to the terminal also while a starting JVM is given a file as its stderr
    sys.stderr = os.fdopen(os.dup(2), "w", errors="backslashreplace", buffering=1)
    # py4j logs an interrupt with its traceback before it raises it
    logging.disable(logging.CRITICAL)
    try:
        status = app(standalone_mode=False)
    except typer.Exit as stop:
        status = stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        status = EXIT_INTERRUPTED
    except EnvironmentFailed as error:
        _say(str(error))
        status = EXIT_ENVIRONMENT
    except Error as error:
        _say(str(error))
        status = EXIT_USAGE
    except OSError as error:
        _say(f"{error.filename or 'system'}: {error.strerror or error}")
        status = EXIT_ENVIRONMENT
    except Exception as error:
        if not _is_usage(error):
            raise
        _say(_usage_text(error))
        status = EXIT_USAGE
    if status == EXIT_INTERRUPTED:
        _say("interrupted; nothing was written")
    sys.stdout.flush()
    sys.stderr.flush()
    # the JVM needs a second to stop in order, and has nothing left to save
    os._exit(status or 0)


def _is_usage(error: Exception) -> bool:
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _usage_text(error: Any) -> str:
    context = getattr(error, "ctx", None)
    hint = f" (see '{context.command_path} --help')" if context is not None else ""
    return f"{error.format_message()}{hint}"


if __name__ == "__main__":
    main()
