"""Copies of extents out of mapped files."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.capture import mapped_files, resident
from kdissect.capture.mapped_files import Sources
from kdissect.capture.segments import SEGMENT
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
    """Ranges of several files are joined; missing ones are zeros."""
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
    """A range outside of its file, or of an unknown file, raises ValueError."""
    with pytest.raises(ValueError, match=reason):
        sources.gather(extents((0, 1, 0), row))
    column = extents(row)
    with pytest.raises(ValueError, match=reason):
        sources.addresses(column["source"], column["pos"], column["length"])


def test_sources_travel_as_paths(sources: Sources) -> None:
    """Pickled sources map the files again."""
    sources.gather(extents((0, 10, 0)))
    there = pickle.loads(pickle.dumps(sources))
    assert there.paths == sources.paths
    assert there.sizes.tolist() == [10, 6, 0]
    assert there.gather(extents((0, 6, 1))).tobytes() == b"abcdef"


def test_maps_are_read_only_and_hold_no_descriptor(sources: Sources) -> None:
    """A write raises ValueError, and no descriptor stays open."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    data = sources.data(0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


def test_file_that_is_gone(tmp_path: Path) -> None:
    """CaptureError names the file."""
    with pytest.raises(CaptureError, match=r"gone: No such file"):
        _ = Sources([tmp_path / "gone"]).sizes


def segments(*rows: tuple[int, int, int]) -> np.ndarray:
    made = np.zeros(len(rows), SEGMENT)
    for name, column in zip(("pos", "captured", "source"), zip(*rows, strict=True), strict=True):
        made[name] = column
    return made


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "WATCHED_SIZE_MIN", 0)
    monkeypatch.setattr(mapped_files, "WINDOW_BYTES", 4)


def test_staged_copies_are_read_instead_of_the_map(sources: Sources, staging: None) -> None:
    """Ranges inside copied segments come from the copies."""
    rows = segments((4, 2, 1), (1, 3, 0), (7, 2, 0), (0, 0, 1))  # in any order
    staged = sources.staged(rows)
    asked = extents((1, 3, 0), (2, 1, 0), (5, 1, 1), (8, 1, 0), (0, 2, 0), (3, 5, 0), (9, 1, 0))
    assert staged.gather(asked).tobytes() == b"123" + b"2" + b"f" + b"8" + b"01" + b"34567" + b"9"
    here = staged.addresses(asked["source"], asked["pos"], asked["length"])
    mapped = sources.addresses(asked["source"], asked["pos"], asked["length"])
    assert (here != mapped).tolist() == [True] * 4 + [False] * 3
    carrying = staged.carrying(np.frombuffer(b"carried", np.uint8))
    both = extents((0, 7, 3), (7, 2, 0), (0, 2, -1))
    assert carrying.gather(both).tobytes() == b"carried78\0\0"


@given(data=st.data())
def test_staged_sources_read_the_same(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any ranges give the same bytes with and without copies."""
    folder = tmp_path_factory.mktemp("files")
    contents = data.draw(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=3))
    for number, content in enumerate(contents):
        (folder / str(number)).write_bytes(content)
    sources = Sources([folder / str(number) for number in range(len(contents))])

    def part() -> tuple[int, int, int]:
        number = data.draw(st.integers(0, len(contents) - 1))
        pos = data.draw(st.integers(0, len(contents[number])))
        return pos, data.draw(st.integers(0, len(contents[number]) - pos)), number

    rows = segments(*(part() for _ in range(data.draw(st.integers(1, 8)))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident, "WATCHED_SIZE_MIN", 0)
        patch.setattr(mapped_files, "WINDOW_BYTES", data.draw(st.integers(1, 50)))
        staged = sources.staged(rows)
    asked = extents(*(part() for _ in range(data.draw(st.integers(0, 8)))))
    assert staged.gather(asked).tobytes() == sources.gather(asked).tobytes()


def test_staged_refuses_and_declines(
    sources: Sources, staging: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments outside raise ValueError; too many bytes are not copied."""
    with pytest.raises(ValueError, match="inside its file"):
        sources.staged(segments((0, 1, 0), (5, 2, 1)))
    assert sources.staged(segments((0, 0, 0))) is sources
    monkeypatch.setattr(mapped_files, "STAGED_BYTES_MAX", 3)
    assert sources.staged(segments((0, 4, 0))) is sources
