"""Copies of extents out of mapped files."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from kdissect.capture.source import Sources
from kdissect.errors import CaptureError

# The layout of stream.index.EXTENT, which is a layer above.
EXTENT = np.dtype([("pos", "<i8"), ("length", "<i8"), ("source", "<i4"), ("transform", "<i4")])


def extents(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array([(*row, 0) for row in rows], EXTENT)


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    for name, data in (("a", b"0123456789"), ("b", b"abcdef"), ("empty", b"")):
        (tmp_path / name).write_bytes(data)
    return Sources([tmp_path / name for name in ("a", "b", "empty")])


def test_gather_copies_in_order_and_fills_holes(sources: Sources) -> None:
    rows = extents((2, 3, 0), (0, 2, -1), (0, 6, 1), (0, 0, 2), (10, 0, 0), (9, 1, 0))
    assert sources.gather(rows).tobytes() == b"234\x00\x00abcdef9"
    assert sources.gather(rows[:1]).tobytes() == b"234"
    assert len(sources.gather(rows[:0])) == 0


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ((0, 11, 0), "inside its file"),
        ((-1, 2, 0), "inside its file"),
        ((2**62, 2**62, 0), "inside its file"),
        ((0, 1, 2), "inside its file"),
        ((0, -1, 0), "negative length"),
        ((0, 1, 3), "no file of the run"),
        ((0, 1, -2), "no file of the run"),
    ],
)
def test_extents_outside_are_refused(
    sources: Sources, row: tuple[int, int, int], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        sources.gather(extents((0, 1, 0), row))


def test_gather_frames_in_any_order(sources: Sources) -> None:
    rows = extents((0, 2, 0), (0, 3, 1), (5, 5, 0))
    out = np.zeros(64, np.uint8)
    places = sources.gather_frames(rows, np.array([1, 0, 2, 0]), np.array([2, 1, 0, 3]), out)
    assert places.tolist() == [0, 8, 10, 10, 20]
    assert out[:20].tobytes() == b"abc56789" + b"01" + b"01abc56789"
    assert sources.gather_frames(rows, np.array([], int), np.array([], int), out).tolist() == [0]


def test_gather_frames_checks_its_arguments(sources: Sources) -> None:
    rows = extents((0, 2, 0))
    with pytest.raises(ValueError, match="not all in the array"):
        sources.gather_frames(rows, np.array([0]), np.array([2]), np.zeros(9, np.uint8))
    with pytest.raises(ValueError, match="1 bytes are too few"):
        sources.gather_frames(rows, np.array([0]), np.array([1]), np.zeros(1, np.uint8))


def test_sources_travel_as_paths(sources: Sources) -> None:
    sources.gather(extents((0, 10, 0)))
    there = pickle.loads(pickle.dumps(sources))
    assert there.paths == sources.paths
    assert there.sizes.tolist() == [10, 6, 0]
    assert there.gather(extents((0, 6, 1))).tobytes() == b"abcdef"


def test_maps_are_read_only_and_hold_no_descriptor(sources: Sources) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    data = sources.data(0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


def test_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"gone: No such file"):
        _ = Sources([tmp_path / "gone"]).sizes
