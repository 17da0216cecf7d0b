"""The readable definition of the kernel of `values`."""

from __future__ import annotations

from collections.abc import Sequence


def copy_places(buf: bytes, start: Sequence[int], length: Sequence[int]) -> bytes:
    """The bytes of all places, one behind the other; a null's length of -1 has none."""
    places = zip(start, length, strict=True)
    return b"".join(buf[pos : pos + size] for pos, size in places if size > 0)
