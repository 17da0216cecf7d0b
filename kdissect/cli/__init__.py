"""The command line. Results go to stdout, all else to stderr.

Exit codes: 0 done, 1 a finding (of `check`, or what `--fail-on` names, if only by default), 2 bad
usage or unusable input, 3 the environment failed, 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import Any

import typer

# Importing a command's module registers it; each imports its own needs when it runs.
from kdissect.cli import (  # noqa: F401
    definitions,
    diff,
    dissect,
    extract,
    incidents,
    readiness,
    replay,
    report,
    show,
    tables,
)
from kdissect.cli.output import EXIT_ENVIRONMENT, EXIT_INTERRUPTED, EXIT_USAGE, say
from kdissect.cli.verbs import app
from kdissect.errors import EnvironmentFailed, Error
from kdissect.interrupts import is_interrupt

_log = logging.getLogger(__name__)

__all__ = ["app", "main"]


def main() -> None:
    """Run the `kdissect` command; ends the process with its exit code."""
    _open_closed_streams()
    # messages reach the terminal even while stderr is redirected to a file for a starting JVM
    sys.stderr = os.fdopen(os.dup(2), "w", errors="backslashreplace", buffering=1)
    # py4j logs an interrupt with its traceback before raising it
    logging.disable(logging.CRITICAL)
    if sys.argv[1:2] != ["dissect"]:
        sys.meta_path.insert(0, _WithoutPandas())
    try:
        status = app(standalone_mode=False)
    except typer.Exit as stop:
        status = stop.exit_code
    except BaseException as error:
        status = _exit_code(error)
        _log.debug("exit code %d", status, exc_info=error)
    # Typer returns an exit code for an interrupt, and replay prints its own message
    if status == EXIT_INTERRUPTED and sys.argv[1] != "replay":
        wrote_nothing = sys.argv[1] in ("dissect", "extract")
        say("interrupted; nothing was written" if wrote_nothing else "interrupted")
    sys.stdout.flush()
    sys.stderr.flush()
    # the JVM needs a second for an orderly stop, and has nothing left to save
    os._exit(status or 0)


class _WithoutPandas:
    """An import finder that reports pandas as not installed.

    pyarrow imports pandas if it can, to convert its first Python list. That takes half as long as
    a small run, and only Spark needs it.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _exit_code(error: BaseException) -> int:
    """Print an error's line and return its exit code; raises the error again if it is a defect."""
    if isinstance(error, typer.Abort | KeyboardInterrupt) or _is_cut_import(error):
        return EXIT_INTERRUPTED
    if isinstance(error, EnvironmentFailed):
        say(str(error))
        return EXIT_ENVIRONMENT
    if isinstance(error, Error):
        say(str(error))
        return EXIT_USAGE
    if isinstance(error, OSError):
        say(f"{error.filename or 'system'}: {error.strerror or error}")
        return EXIT_ENVIRONMENT
    if _is_usage(error):
        say(_usage_text(error))
        return EXIT_USAGE
    raise error


def _open_closed_streams() -> None:
    """Open stdin, stdout and stderr if the parent closed them (`<&-`): no other file gets their
    number."""
    for number, name, flags in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, flags))  # noqa: SIM115  (lasts as the program)
            if getattr(sys, name).fileno() != number:
                os.dup2(getattr(sys, name).fileno(), number)


def _is_cut_import(error: BaseException | None) -> bool:
    """Return whether SIGINT caused the error of a compiled module that was being loaded."""
    return isinstance(error, SystemError | ImportError) and is_interrupt(error)


def _is_usage(error: BaseException) -> bool:
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _usage_text(error: Any) -> str:
    context = getattr(error, "ctx", None)
    hint = f" (see '{context.command_path} --help')" if context is not None else ""
    # Typer repeats Pydantic's words about a value that it refuses
    text = error.format_message().replace("Input should be", "must be")
    return re.sub("Value error, |, unable to parse .*", "", text) + hint
