"""Files that appear only when complete: a failure leaves an earlier file as it was."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from kdissect.errors import EnvironmentFailed, OutputError


@contextmanager
def atomic_write(out: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a path to write to; it replaces `out` when the block ends without error.

    A link stays, and its target is replaced; a device or a pipe is written directly. Raises
    OutputError if nothing can be written, EnvironmentFailed for an OSError while writing.
    """
    name = os.fspath(out)
    # a device's folder may be writable, and a file would then replace the device
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
