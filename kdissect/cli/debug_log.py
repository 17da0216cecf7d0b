"""The log of `--debug`: versions, options, steps and errors on stderr, for a defect report.

The log never contains passwords, tokens, key logs or payload. Values of options and variables are
hidden unless they are safe to show.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import sys
from collections.abc import Iterator
from typing import Any

from kdissect import __version__
from kdissect.text import visible

LIBRARIES = ("pyarrow", "numba", "numpy", "duckdb", "pyspark", "pandas")
HIDDEN = "[hidden]"

_HIDDEN_OPTIONS = frozenset({"sasl_user"})
_SECRET_NAME = re.compile(r"(?i)passw|secret|token|credential|\bkey\b|_key|access")
# a number, a size, a duration or a switch: a Spark setting that is no secret by its form
_PLAIN_VALUE = re.compile(r"(?i)\d{1,12}(\.\d{1,3})?[a-z]{0,2}|true|false")
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY_OF_URL = re.compile(r"(://[^?\s]*\?)\S+")

_log = logging.getLogger(__name__)


def start(is_wanted: bool) -> None:
    """Log to stderr from now on: kdissect's steps, and warnings of libraries."""
    if not is_wanted:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("kdissect").setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    logging.disable(logging.NOTSET)
    for line in _environment():
        _log.debug("%s", line)


def log_options(ctx: Any) -> None:
    """Log a command and its options that differ from the defaults, without secrets."""
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name)
        if value != parameter.default and value not in (None, [], ()):
            name = max(parameter.opts, key=len)
            _log.debug("%s %s: %s", ctx.info_name, name, _shown(parameter.name, value))


def _environment() -> Iterator[str]:
    """Yield lines on versions, the machine and the environment variables of kdissect."""
    from kdissect.cli.environment import java_program, java_version

    yield f"kdissect {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield ", ".join(f"{name} {_version(name)}" for name in LIBRARIES)
    java = java_program()
    yield f"Java {java_version(java)}" if java else "no Java"
    yield f"{os.cpu_count()} cores, stderr is {'a' if sys.stderr.isatty() else 'no'} terminal"
    for name in sorted(os.environ):
        if name.startswith("KDISSECT_"):
            yield f"{name}={_setting(name, os.environ[name])}"


def _version(library: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(library)
    except PackageNotFoundError:
        return "is not installed"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(_shown(name, item) for item in value)
    text = str(value)
    if name in _HIDDEN_OPTIONS:
        return HIDDEN
    if name == "conf":
        key, _, setting = text.partition("=")
        return f"{key}={_setting(key, setting)}"
    return repr(without_credentials(text))


def _setting(name: str, value: str) -> str:
    is_safe = _PLAIN_VALUE.fullmatch(value) and not _SECRET_NAME.search(name)
    return value if is_safe else HIDDEN


def without_credentials(text: str) -> str:
    """Return the text with the user and the query of each URL hidden: both may be credentials."""
    return _QUERY_OF_URL.sub(rf"\1{HIDDEN}", _USER_OF_URL.sub(f"{HIDDEN}@", text))


class _Formatter(logging.Formatter):
    """Formats a line with the seconds since the start; further lines are indented."""

    def format(self, record: logging.LogRecord) -> str:
        lines = record.getMessage().splitlines() or [""]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        seconds = record.relativeCreated / 1000
        head = f"{seconds:9.3f} {record.levelname.lower()} {record.name}: "
        return head + "\n    ".join(visible(without_credentials(line)) for line in lines)
