"""What verbs share: exit codes, common options, lines to the user, checks before work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from kdissect.errors import EnvironmentFailed

Result = TypeVar("Result")

EXIT_FINDING, EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_INTERRUPTED = 1, 2, 3, 130
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


Ports = Annotated[
    list[int] | None,
    typer.Option(
        "--port",
        metavar="N",
        min=1,
        max=65535,
        help="A port that speaks Kafka: a hint, not a filter.",
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
Clients = Annotated[
    list[str] | None,
    typer.Option(
        "--client", metavar="NAME", help="A client id (* and ? fit anything), an IP or IP:PORT."
    ),
]
Topics = Annotated[
    list[str] | None, typer.Option("--topic", metavar="NAME", help="A topic; * and ? too.")
]
Groups = Annotated[
    list[str] | None,
    typer.Option("--group", metavar="ID", help="A group or a transactional id; * and ? too."),
]
FromTime = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="TIME",
        help="Exchanges from this time on: RFC 3339, UTC where no zone is given, or seconds "
        "since 1970.",
    ),
]
ToTime = Annotated[
    str | None,
    typer.Option("--to", metavar="TIME", help="Exchanges before this time."),
]
LimitItems = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=VALUE",
        help="How far an input may go before it is a fault (docs/limits.md); repeatable.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]


_NAMED_MAX = 8  # things that a line names before it counts them
HELP_WIDTH = 76  # what a terminal of 80 columns has for a line of examples


def examples(text: str) -> str:
    """Examples of a command for its help, in lines that can be copied: what is too long goes on
    behind a backslash, or inside of quotes on the next line."""
    parts = text.strip().split("\n\n")
    return "\n\n".join(_in_lines(part.strip()) for part in parts)


def with_examples(text: str) -> type[TyperCommand]:
    """A command whose help ends with examples; `epilog` would fill their lines with spaces, which
    are copied too and separate a backslash from its line's end."""

    class Command(TyperCommand):
        examples_text = text

        def format_help(self, ctx: Any, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            typer.echo(textwrap.indent(examples(text), " ") + "\n")

    return Command


def _in_lines(example: str) -> str:
    lines = [""]
    is_quoted = False
    for part in re.split(r" (?=--\w|\| )", example):
        starts_line = len(lines[-1]) + len(part) >= HELP_WIDTH - 2
        for n, word in enumerate(part.split(" ")):
            if not lines[-1]:
                lines[-1] = word
            elif (starts_line and not n) or len(lines[-1]) + len(word) >= HELP_WIDTH - 2:
                lines[-1] += "" if is_quoted else " \\"
                lines.append(word if is_quoted else f"  {word}")
            else:
                lines[-1] += f" {word}"
            is_quoted ^= (word.count('"') + word.count("'")) % 2 == 1
    return "\n".join(lines)


def limits_of(items: list[str] | None) -> Any:
    """The `Limits` of --limit. Raises BadParameter that lists them for a wrong one."""
    from kdissect.pipeline.limits import Limits

    try:
        return Limits.parse(items or ())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--limit") from None


def some_of(names: Sequence[str]) -> str:
    """A list for a line that people read: the first few, and how many more."""
    shown = ", ".join(names[:_NAMED_MAX])
    more = len(names) - _NAMED_MAX
    return f"{shown} and {more:,} more" if more > 0 else shown


def say(line: str) -> None:
    typer.echo(f"kdissect: {line}", err=True)


def checked(option: str, read: Callable[[Any], Result], value: Any) -> Result:
    """What `read` makes of an option's value; its ValueError becomes BadParameter."""
    try:
        return read(value)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def check_choice(
    hosts: list[str] | None, first: str | None, last: str | None, last_option: str = "--to"
) -> None:
    """Raise BadParameter for a host that is no address, or a time that is none.

    last_option: the verb's name of the option that `last` is the value of.
    """
    from kdissect.pipeline.filters import host_bytes, time_ns

    for name, values, read in (
        ("--host", hosts or [], host_bytes),
        ("--from", [first] if first is not None else [], time_ns),
        (last_option, [last] if last is not None else [], time_ns),
    ):
        for value in values:
            checked(name, read, value)
    if first is not None and last is not None and time_ns(first) >= time_ns(last):
        raise typer.BadParameter(f"{last} is not after {first}", param_hint=last_option)


def put(lines: Iterable[str]) -> None:
    """Write lines to stdout; a reader that has had enough is no fault."""
    try:
        for line in lines:
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError as error:
        stdout_failed(error)


def stdout_failed(error: OSError) -> None:
    """After a failed write to stdout: quiet for a broken pipe, EnvironmentFailed for others."""
    close_stdout()
    if not isinstance(error, BrokenPipeError):
        raise EnvironmentFailed(f"stdout: {error.strerror or error}") from error


def close_stdout() -> None:
    """What is left in the buffer, and what comes, has nowhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (stdout lasts as long as the program)


def check_disk(out: str, inputs: list[Any]) -> None:
    """Tables take about as much room as the captures at most, compressed ones their spool too."""
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
