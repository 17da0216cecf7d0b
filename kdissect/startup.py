"""A quick start: SciPy and pandas are not imported where no code needs them.

Numba, where it finds SciPy, imports its linear algebra before it loads the first kernel; pyarrow,
where it finds pandas, imports it to convert the first Python list. Both only look once, and either
costs as much as everything else of a small run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def light() -> None:
    """For the rest of the process: no SciPy for Numba's kernels, no pandas for pyarrow.

    Not for a process in which Arrow tables become pandas frames.
    """
    with _hidden("scipy"):
        import numba.np.arraymath  # noqa: F401  (here it looks for SciPy)
    with _hidden("pandas"):
        import pyarrow

        pyarrow.array([0])  # and here pyarrow for pandas


class _Absent:
    """A finder that says of one package that it is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """A package that is not imported yet cannot be, meanwhile."""
    finder: Any = _Absent(name)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
