"""Copies of extents out of mapped files."""

import os
from pathlib import Path

import numpy as np
import pytest

from kdissect.capture.mapped_files import Sources
from kdissect.errors import CaptureError

# The layout of stream.index.EXTENT, which is a layer above.
EXTENT = np.dtype([("pos", "<i8"), ("length", "<i8"), ("source", "<i8")])


def extents(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(list(rows), EXTENT)


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    for name, data in (("a", b"0123456789"), ("b", b"abcdef"), ("empty", b"")):
        (tmp_path / name).write_bytes(data)
    return Sources([str(tmp_path / name) for name in ("a", "b", "empty")])


def test_gather_copies_in_order_and_fills_holes(sources: Sources) -> None:
    """Ranges of several files are joined; missing ones are zeros."""
    rows = extents((2, 3, 0), (0, 2, -1), (0, 6, 1), (0, 0, 2), (10, 0, 0), (9, 1, 0))
    assert sources.gather(rows).tobytes() == b"234\x00\x00abcdef9"
    assert sources.gather(rows[:1]).tobytes() == b"234"
    assert len(sources.gather(rows[:0])) == 0


@pytest.mark.parametrize(
    "row", [(0, 11, 0), (-1, 2, 0), (2**62, 2**62, 0), (0, 1, 2), (0, -1, 0), (0, 1, 3), (0, 1, -2)]
)
def test_extents_outside_are_refused(sources: Sources, row: tuple[int, int, int]) -> None:
    """A range outside of its file, or of an unknown file, raises ValueError."""
    with pytest.raises(ValueError, match="does not lie inside a file"):
        sources.gather(extents((0, 1, 0), row))
    column = extents(row)
    with pytest.raises(ValueError, match="does not lie inside a file"):
        sources.addresses(column["source"], column["pos"], column["length"])


def test_a_file_is_mapped_when_it_is_needed(tmp_path: Path) -> None:
    """Files that no extent names need not exist; one that is gone is an error with its name."""
    (tmp_path / "a").write_bytes(b"0123456789")
    sources = Sources([str(tmp_path / "gone"), str(tmp_path / "a")])
    assert sources.gather(extents((2, 3, 1), (0, 1, -1))).tobytes() == b"234\x00"
    with pytest.raises(CaptureError, match=r"gone: No such file"):
        sources.gather(extents((0, 1, 0)))


def test_maps_are_read_only_and_hold_no_descriptor(sources: Sources) -> None:
    """A write raises ValueError, and no descriptor of the file stays open."""
    data = sources.data(0)
    links = (os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())
    assert sources.name(0) not in links
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1
