"""The kernels that place segments do what their definition says, whatever the segments are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kdissect.capture.segments import SEGMENT
from kdissect.resume import placing, placing_reference
from kdissect.tcp.columns import GAP_COUNT, HAS_DATA, HIGH, ORIGIN, SIDE_WIDTH
from kdissect.tcp.reassembly import Pieces, Streams


def some_streams(seed: int) -> Streams:
    """Segments of any flags, marks and numbers, of up to six connections; streams without any."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 60))
    connections = int(rng.integers(1, 7))
    segments = np.zeros(count, SEGMENT)
    near = bool(rng.integers(0, 2))  # numbers near one another, which wrap around
    base = 0xFFFFFF00 if near else 0
    segments["seq"] = (base + rng.integers(0, 600 if near else 1 << 32, count)) & 0xFFFFFFFF
    segments["length"] = rng.integers(0, 200, count) * rng.integers(0, 2, count)
    segments["captured"] = rng.integers(0, 1 + segments["length"])
    segments["flags"] = rng.integers(0, 256, count) & rng.integers(0, 256, count)
    segments["side"] = rng.integers(0, 2, count)
    segments["time_ns"] = np.sort(rng.integers(0, 1000, count))
    segments["packet"] = rng.integers(0, 3, count)
    sides = np.zeros((2 * connections, SIDE_WIDTH), np.int64)
    sides[:, HAS_DATA] = rng.integers(0, 2, len(sides))
    sides[:, GAP_COUNT] = rng.integers(0, 2, len(sides))
    sides[:, ORIGIN] = rng.integers(-50, 50, len(sides))
    sides[:, HIGH] = sides[:, ORIGIN] + rng.integers(0, 500, len(sides))
    none = np.zeros(0, np.int64)
    return Streams(
        segments,
        np.sort(rng.integers(0, connections, count)).astype(np.int32),
        none,
        sides.reshape(-1),
        Pieces(none, none, none.astype(np.uint64), none, none),
        none,
        (rng.integers(0, 8, count) * rng.integers(0, 2, count)).astype(np.uint8),
    )


@pytest.mark.parametrize("seed", range(200))
def test_segments_are_placed_as_defined(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    streams = some_streams(seed)
    times = int(rng.integers(0, 1200)), int(rng.integers(0, 500)), int(rng.integers(0, 500))
    got, expected = placing.places(streams, *times), placing_reference.places(streams, *times)
    for name in ("rows", "place", "length", "start", "seq", "settled", "quiet", "stays"):
        assert getattr(got, name).tolist() == getattr(expected, name).tolist(), name
    for stream in range(len(got.seq)):
        assert got.of(stream).seq == expected.of(stream).seq

    chosen = rng.permutation(len(got.seq))[: int(rng.integers(0, len(got.seq) + 1))]
    at = rng.integers(-100, 600, len(chosen))
    kept, rows, of = placing.behind(streams, got, chosen, at)
    index, stream = placing_reference.rows_behind(streams, got, chosen, at)
    assert rows.tolist() == got.rows[index].tolist()
    assert of.tolist() == stream.tolist()
    before = streams.segments[rows]
    trimmed = before["length"].astype(np.int64) - kept["length"]
    assert ((trimmed == 0) | (got.place[index] + trimmed == at[of]) | (kept["length"] == 0)).all()
    assert (kept["captured"] == np.maximum(0, before["captured"] - trimmed)).all()
    assert (kept["pos"] - before["pos"] == np.minimum(trimmed, before["captured"])).all()


def test_nothing_is_placed_of_no_segments() -> None:
    streams = some_streams(3)
    empty = replace(
        streams, segments=streams.segments[:0], connection=streams.connection[:0],
        mark=streams.mark[:0],
    )  # fmt: skip
    found = placing.places(empty, 0, 0, 0)
    assert not len(found.rows)
    assert (found.seq == placing.NO_NUMBER).all()
