"""Packed arrays of rows unpack to themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdissect.packing import TILE, pack, transposed, unpack

DTYPES = (
    np.dtype([("time_ns", "<i8"), ("port", "<u2"), ("ip", "u1", (16,))]),
    np.dtype(np.uint8),
    np.dtype(np.int64),
)


@given(st.lists(st.binary(max_size=400), min_size=len(DTYPES), max_size=len(DTYPES)))
def test_packed_arrays_come_back(data: list[bytes]) -> None:
    """Arrays of any rows, and empty ones, unpack to themselves."""
    arrays = [
        np.frombuffer(part[: len(part) // dtype.itemsize * dtype.itemsize], dtype)
        for part, dtype in zip(data, DTYPES, strict=True)
    ]
    for before, after in zip(arrays, unpack(pack(arrays), DTYPES), strict=True):
        assert after.dtype == before.dtype
        assert after.tobytes() == before.tobytes()


def test_an_index_becomes_small() -> None:
    """Rows like the ones before them cost a few bytes each."""
    rows = np.zeros(1000, DTYPES[0])
    rows["time_ns"] = 1_700_000_000 * 10**9 + 1000 * np.arange(1000)
    packed = pack([rows])
    assert len(packed) < rows.nbytes // 8
    assert unpack(packed, DTYPES[:1])[0].tobytes() == rows.tobytes()


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 2**32))
def test_columns_become_rows(rows: int, columns: int, seed: int) -> None:
    """The kernel transposes small matrices as NumPy does."""
    before = np.random.default_rng(seed).integers(0, 256, (rows, columns)).astype(np.uint8)
    assert transposed(before).tolist() == before.T.tolist()


@pytest.mark.parametrize("rows", [TILE - 1, TILE, TILE + 1, 3 * TILE + 9])
@pytest.mark.parametrize("columns", [1, 8, 23, 140, TILE + 9])
def test_columns_become_rows_beyond_a_tile(rows: int, columns: int) -> None:
    """The kernel transposes matrices around its tile size as NumPy does."""
    before = np.random.default_rng(rows).integers(0, 256, (rows, columns)).astype(np.uint8)
    for matrix in (before, np.ascontiguousarray(before.T)):
        assert np.array_equal(transposed(matrix), matrix.T)
