"""Stores the machine code of kernels on disk, in files named by their sources.

A file's name holds a digest of the kernel's sources, its argument types, the versions of Numba and
Python, and the CPU. So a copy of the package at another path, or with other file times, uses the
same files, and no file is ever outdated. Numba's own cache depends on paths and checks the kernel's
own module only.

`SHIPPED` is part of the package: wheels, images and packed environments contain it. Code compiled
at run time goes to `folder()`.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
from llvmlite.binding import get_host_cpu_features
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

from .atomic_file import atomic_write
from .errors import Error

ROOT = Path(__file__).parent
SHIPPED = ROOT / "machine_code"
# The CPU that wheels are compiled for: x86-64-v3 of the x86-64 psABI, Intel since 2013, AMD since
# 2015.
COMMON_CPU = "x86-64-v3"
_COMMON_FEATURES = (
    *("avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sahf"),
    *("sse3", "sse4.1", "sse4.2", "ssse3", "xsave"),
)
_IMPORT = re.compile(
    rf"^\s*from (?:{ROOT.name}\b\.?|(\.+))([\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE
)


@cache
def imported_modules(path: Path) -> frozenset[Path]:
    """Return the package's modules that a module imports, by full or relative names."""
    modules: set[Path] = set()
    for dots, module, names in _IMPORT.findall(path.read_text("utf-8")):
        place = path.parents[len(dots) - 1] if dots else ROOT
        place = place.joinpath(*module.split("."))
        places = [place, *(place / name for name in re.findall(r"\w+", names))]
        modules.update(file for item in places if (file := item.with_suffix(".py")).is_file())
    return frozenset(modules)


@cache
def _sources_digest(path: Path) -> str:
    """Return a digest of a kernel's module and all modules of the package that it imports, in
    turn too."""
    needed = {path}
    waiting = [path]
    while waiting:
        more = imported_modules(waiting.pop()) - needed
        needed |= more
        waiting += more
    digest = hashlib.sha256()
    for file in sorted(needed):
        digest.update(f"{os.path.relpath(file, ROOT)} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def folder() -> Path | None:
    """Return the folder for machine code; None if none can be written.

    In order: `NUMBA_CACHE_DIR` if set, otherwise the user's cache folder, otherwise a private
    temporary folder.
    """
    named = os.environ.get("NUMBA_CACHE_DIR")
    own = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [named] if named else [os.path.join(own, "kdissect", "kernels"), _temporary_folder()]
    for place in places:
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
        except OSError:
            continue
        return Path(place)
    return None


def _temporary_folder() -> str:
    """Return a folder of this user alone, since its contents are executed."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    place = os.path.join(tempfile.gettempdir(), f"kdissect-kernels-{user}")
    try:
        os.makedirs(place, mode=0o700, exist_ok=True)
        state = os.lstat(place)
    except OSError:
        return place
    is_ours = stat.S_ISDIR(state.st_mode) and state.st_uid == user and not state.st_mode & 0o077
    return place if is_ours or os.name == "nt" else tempfile.mkdtemp()


_compiled = count(1)


def _announce() -> None:
    """Write one line to stderr at the first compilation of a process; a terminal shows a running
    count."""
    number = next(_compiled)
    if sys.stderr is None:
        return
    line = f"kdissect compiles its kernels for this CPU, once ({folder() or 'not saved'})"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{line}: {number}" if number > 1 else f"{line}: {number}")
    elif number == 1:
        sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@cache
def _runs_common_code() -> bool:
    features = get_host_cpu_features()
    return all(features.get(name) for name in _COMMON_FEATURES)


class KernelCache(_Cache):
    """Numba's cache interface, for one kernel."""

    def __init__(self, function: FunctionType, options: str) -> None:
        self._path = Path(function.__code__.co_filename)
        self._kernel = f"{self._path.stem}.{function.__qualname__}".replace("<locals>.", "")
        self._options = options

    @property
    def cache_path(self) -> str:
        return str(folder())

    def enable(self) -> None: ...

    def disable(self) -> None: ...

    def flush(self) -> None: ...

    def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
        # compiled code needs no more; Numba's registries take longer and serve compilation only
        rtsys.initialize(target_context)
        for name in self._names(sig, target_context.codegen()):
            for place in (SHIPPED, folder()):
                try:
                    code = (place / name).read_bytes() if place else b""
                except OSError:
                    continue
                if code:
                    return CompileResult._rebuild(target_context, *pickle.loads(code))
        return None

    def save_overload(self, sig: Any, data: CompileResult) -> None:
        _announce()
        assert not data.library.has_dynamic_globals, f"{self._kernel} holds an address"
        place = folder()
        if place is not None:
            name = next(self._names(sig, data.codegen))
            # with a full disk the next process compiles again; this one has its code
            with suppress(Error), atomic_write(place / name) as part:
                Path(part).write_bytes(dumps(data._reduce()))

    def _names(self, sig: Any, codegen: Any) -> Iterator[str]:
        """Yield names of files for these argument types on this CPU, the best first."""
        triple, cpu, features = codegen.magic_tuple()
        cpus = [(cpu, features)]
        if triple.startswith("x86_64") and _runs_common_code():
            cpus.append((COMMON_CPU, ""))
        for kind in cpus:
            parts = (
                _sources_digest(self._path),
                _sources_digest(Path(__file__)),
                str(sig),
                self._options,
                numba.__version__,
                sys.implementation.cache_tag,
                triple,
                *kind,
            )
            digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
            yield f"{self._kernel}-{digest[:32]}.code"
