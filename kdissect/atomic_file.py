"""A file that appears when it is whole: what fails on the way leaves what was there before."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from kdissect.errors import EnvironmentFailed, OutputError


@contextmanager
def atomic_write(out: str | os.PathLike[str]) -> Iterator[str]:
    """A path to write to, which takes the place of `out` when the block ends well.

    A link stays and what it leads to is replaced; a device or a pipe is written to itself. Raises
    OutputError where nothing can be written, EnvironmentFailed for an OSError on the way.
    """
    name = os.fspath(out)
    # a device's folder may be writable, and then the device be replaced by a file
    is_special = os.path.abspath(name).startswith(("/dev/", "/proc/")) or (
        os.path.exists(name) and not os.path.isfile(name)
    )
    if os.path.isdir(name):
        raise OutputError(f"{name}: is a folder; name a file")
    target = name if is_special else os.path.realpath(name)
    part = target
    try:
        if not is_special:
            folder, base = os.path.split(target)
            descriptor, part = tempfile.mkstemp(prefix=f".{base}-", dir=folder)
            os.close(descriptor)
    except OSError as error:
        raise OutputError(f"{name}: cannot be written ({error.strerror})") from error
    try:
        try:
            yield part
            if not is_special:
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(part, 0o666 & ~umask)
                os.replace(part, target)
        except OSError as error:
            raise EnvironmentFailed(f"{name}: {error.strerror or error}") from error
    finally:
        if not is_special and os.path.exists(part):
            os.unlink(part)
