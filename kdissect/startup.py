"""Starts quickly: keeps SciPy and pandas from being imported if no code needs them.

If Numba finds SciPy, it imports its linear algebra before it loads the first kernel. If pyarrow
finds pandas, it imports it to convert the first Python list. Both check only once, and either
import takes as long as all else of a small run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


def light() -> None:
    """Keep Numba from loading SciPy and pyarrow from loading pandas, for the rest of the process.

    Not for a process that converts Arrow tables to pandas.
    """
    with _hidden("scipy"):
        import_module("numba.np.arraymath")  # checks for SciPy when imported
    with _hidden("pandas"):
        import pyarrow

        pyarrow.array([0])  # checks for pandas


def light_help() -> None:
    """Import Typer's help without the parts of Rich that only Markdown and tracebacks need.

    Those parts import parsers for both. Rich also imports attrs, if it is installed, to print
    objects of its classes.
    """
    unused = {name: ModuleType(name) for name in ("rich.markdown", "rich.traceback")}
    unused["rich.markdown"].__dict__["Markdown"] = _Unused
    unused["rich.traceback"].__dict__["Traceback"] = _Unused
    sys.modules.update(unused)
    try:
        with _hidden("attr"):
            import_module("typer.rich_utils")
    finally:
        for name in unused:
            del sys.modules[name]


class _Unused:
    """In place of a class of Rich that no help text of kdissect needs."""


class _Absent:
    """An import finder that reports one package as not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Make a package that is not imported yet impossible to import in this context."""
    finder: Any = _Absent(name)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
