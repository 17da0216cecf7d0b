"""Exit codes, messages on stderr, and results on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from kdissect.errors import EnvironmentFailed

if TYPE_CHECKING:
    from kdissect.api import Tables

EXIT_FINDING, EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_INTERRUPTED = 1, 2, 3, 130
_NAMED_MAX = 8  # names in a message; others are counted


def say(line: str) -> None:
    """Print a line for the user on stderr."""
    typer.echo(f"kdissect: {line}", err=True)


def say_notes(tables: Tables) -> None:
    """Print the notes of the tables on stderr."""
    for note in tables.notes:
        say(note)


def some_of(names: Sequence[str]) -> str:
    """Join the first few names of a list, with a count of the others."""
    shown = ", ".join(names[:_NAMED_MAX])
    more = len(names) - _NAMED_MAX
    return f"{shown} and {more:,} more" if more > 0 else shown


def shown(value: str | None, missing: str) -> str:
    """Return a capture's text without control characters."""
    from kdissect.text import visible

    return missing if value is None else visible(value) or '""'


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
