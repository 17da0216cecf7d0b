"""A quick start: where machine code is kept, and no SciPy and pandas where nobody needs them.

Numba keeps the machine code of kernels beside the package, or in the user's cache folder; where it
can write neither (a container with a read-only root), it refuses to work. Then the temporary folder
serves all processes of this machine.

Numba, where it finds SciPy, imports its linear algebra before it loads the first kernel; pyarrow,
where it finds pandas, imports it to convert the first Python list. Both only look once, and either
costs as much as everything else of a small run.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


def keep_kernels() -> None:
    """See to it that there is a place for machine code; before Numba is imported."""
    package = os.path.dirname(__file__)
    if os.environ.get("NUMBA_CACHE_DIR") or os.access(package, os.W_OK):
        return
    own = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    while not os.path.exists(own) and own != os.path.dirname(own):
        own = os.path.dirname(own)
    if os.path.isdir(own) and os.access(own, os.W_OK):
        return
    folder = _private_folder()
    os.environ["NUMBA_CACHE_DIR"] = folder
    if "numba" in sys.modules:
        sys.modules["numba"].config.CACHE_DIR = folder


def _private_folder() -> str:
    """A folder of this user alone, since what is found there is run."""
    import tempfile

    folder = os.path.join(tempfile.gettempdir(), f"kdissect-kernels-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    state = os.lstat(folder)
    is_ours = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
    return folder if is_ours and not state.st_mode & 0o077 else tempfile.mkdtemp()


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
